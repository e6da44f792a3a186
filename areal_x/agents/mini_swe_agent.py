"""The environment that mini-swe-agent runs its commands in, for its option `--environment-class`:
the container of its episode.

    mini --environment-class areal_x.agents.mini_swe_agent.ContainerEnvironment …

mini-swe-agent has a Python of its own, where this file is all that is needed of this project: it
imports the standard library and `minisweagent` (written for 2.4).
"""

from __future__ import annotations

import json
import os
import platform
import socket
from typing import Any

DONE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # as minisweagent's own environments
VARIABLE = "AREAL_X_CONTAINER"


class ContainerEnvironment:
    """An `Environment` of minisweagent. timeout: seconds of a command. env: its variables. cwd:
    below the repository; "" is the repository itself. Others of its settings are ignored."""

    def __init__(
        self, *, timeout: float = 30, env: dict[str, str] | None = None, cwd: str = "", **_: Any
    ) -> None:
        self.config = {"timeout": timeout, "env": env or {}, "cwd": cwd}

    def execute(
        self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Runs a command. Raises: minisweagent's Submitted if it says that the work is done."""
        reply = ask(
            {
                "command": action.get("command", ""),
                "directory": cwd or self.config["cwd"],
                "seconds": timeout or self.config["timeout"],
                "variables": self.config["env"],
            }
        )
        output: dict[str, Any] = {
            "output": reply["output"],
            "returncode": -1 if reply["code"] is None else reply["code"],
            "exception_info": reply["error"] or "",
        }
        lines = output["output"].lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == DONE and output["returncode"] == 0:
            from minisweagent.exceptions import Submitted

            text = "".join(lines[1:])
            extra = {"exit_status": "Submitted", "submission": text}
            raise Submitted({"role": "exit", "content": text, "extra": extra})
        return output

    def get_template_vars(self, **more: Any) -> dict[str, Any]:
        """Returns what prompts may mention."""
        return {**self.config, **platform.uname()._asdict(), **more}

    def serialize(self) -> dict[str, Any]:
        """Returns what minisweagent keeps about its environment."""
        kind = f"{type(self).__module__}.{type(self).__name__}"
        return {"info": {"config": {"environment": self.config, "environment_type": kind}}}


def ask(request: dict[str, Any]) -> dict[str, Any]:
    """Sends a request to the episode's container (areal_x.agents.container_door)."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[VARIABLE])
        connection.sendall(json.dumps(request).encode() + b"\n")
        with connection.makefile("rb") as answer:
            reply: dict[str, Any] = json.loads(answer.readline() or b"{}")
    return {"output": "", "code": None, "error": "the container is gone", **reply}
