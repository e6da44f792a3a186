"""The real clients that the gateway is held to: how each is started, and what its tools are called."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from examples.coding_agents.launch import AGENTS, FOLDER, Start, answer_in
from tests.agents.gateway.scripted import tool

PROGRAMS = Path(__file__).parent / "programs"


def folder() -> Path:
    """Returns where the clients are installed. Skips the test without them."""
    if FOLDER not in os.environ:
        pytest.skip(f"needs {FOLDER}: make clients")
    return Path(os.environ[FOLDER]).absolute()


def shell(name: str, argument: str, **more: str) -> Callable[[int, int], str]:
    """Returns what adds two numbers with an agent's tool for commands."""
    return lambda a, b: tool(name, **{argument: f"echo $(({a}+{b}))"}, **more)


@dataclass(frozen=True)
class Client:
    """One client with one API.

    package: on npm or PyPI. environment: the name of its Python environment; empty for npm's. api: chat, responses or messages.
    agent: its name in examples/coding_agents, or none for one of the programs of these tests. adds: the call of its tool for a
    sum. answers: the reply that ends its work with a text. reads: the call of its tool that reads an image, if it has one.
    rewrites: it sends its history in another form than it got it, so that each call starts a trajectory.
    """

    package: str
    api: str
    environment: str = ""
    program: str = ""
    agent: str = ""
    adds: Callable[[int, int], str] = field(default=lambda a, b: tool("add", a=a, b=b))
    answers: Callable[[str], str] = field(default=lambda text: text)
    reads: Callable[[str], str] | None = None
    rewrites: bool = False

    @property
    def id(self) -> str:
        return f"{self.package.rpartition('/')[2]}-{self.api}"

    def version(self) -> str:
        if not self.environment:
            about = json.loads((folder() / "node_modules" / self.package / "package.json").read_text())
            return str(about["version"])
        name = self.package.replace("-", "_")
        (found,) = (folder() / self.environment).glob(f"lib/python3*/site-packages/{name}-*.dist-info")
        return found.name.removeprefix(f"{name}-").removesuffix(".dist-info")

    def start(self, prompt: str, home: Path, url: str, key: str) -> Start:
        """Skips the test if the client is not installed."""
        if self.agent:
            start = AGENTS[self.agent](prompt, home, url, key)
            if not Path(start.command[0]).exists():
                pytest.skip(f"{self.package} is not installed: make clients")
            return start
        python = folder() / self.environment / "bin" / "python"
        if not python.exists():
            pytest.skip(f"{self.package} is not installed: make clients")
        variables = {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": key,
        }
        return Start([str(python), "-I", str(PROGRAMS / f"{self.program}.py"), self.api, prompt], variables)

    def answer(self, start: Start, printed: str) -> str:
        return printed if start.answer is None else answer_in(start.answer)


def submitted(text: str) -> str:
    return tool("bash", command=f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo {text}")


def finally_answered(text: str) -> str:
    return tool("final_answer", answer=text)


MCP = {"adds": lambda a, b: tool("mcp__sums__add", a=a, b=b)}
CLIENTS = [
    Client(
        "@anthropic-ai/claude-code",
        "messages",
        agent="claude-code",
        adds=shell("Bash", "command"),
        reads=lambda path: tool("Read", file_path=path),
    ),
    Client(
        "@openai/codex",
        "responses",
        agent="codex",
        adds=shell("exec_command", "cmd"),
        reads=lambda path: tool("view_image", path=path),
    ),
    Client(
        "opencode-ai",
        "chat",
        agent="opencode",
        adds=shell("bash", "command", description="adds"),
    ),
    Client(
        "mini-swe-agent",
        "chat",
        environment="mini-swe-agent",
        agent="mini-swe-agent",
        adds=shell("bash", "command"),
        answers=submitted,
    ),
    Client("claude-agent-sdk", "messages", environment="claude-agent-sdk", program="claude_sdk", **MCP),
    *(
        Client(package, api, environment=package, program=program, **more)
        for package, program, apis, more in (
            ("openai-agents", "openai_agents", ("chat", "responses"), {}),
            ("langgraph", "langgraph_agent", ("chat", "responses", "messages"), {}),
            ("pydantic-ai-slim", "pydantic_agent", ("chat", "responses", "messages"), {}),
            ("smolagents", "smolagents_agent", ("chat",), {"answers": finally_answered, "rewrites": True}),
            ("camel-ai", "camel_agent", ("chat",), {}),
            ("inspect-ai", "inspect_agent", ("chat", "responses", "messages"), {}),
        )
        for api in apis
    ),
]
