"""Benchmarks whose packages need other versions of what a run needs too: each runs in a Python of its
own, one process to list the tasks and one process an episode.

    request ──standard input──▶ package_main.py PROGRAM ──standard output──▶ result
                                       │ OpenAI's protocol
                                       ▼
                            a session of the run's gateway
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from areal_x.agents import package_main
from areal_x.agents.external_program import ProgramFailed, inherited_environment, run_program
from areal_x.agents.package_main import MARK
from areal_x.errors import UserError
from areal_x.types import Task

MAIN = package_main.__file__
PREFIX = "areal_x_package_"  # of the folders of temporary files
LIST_SECONDS = 600.0  # to load a package and its tasks
ERROR_CHARACTERS = 400
OUTPUT_BYTES = 1 << 20  # that are kept of what an episode prints
PROCESSES = 256  # of an episode at once

Request = Mapping[str, Any]


def listed(program: str, request: Request, setting: str, install: str) -> list[Any]:
    """Returns the ids of a benchmark's tasks.

    Args:
        program: A file as package_main takes it.
        request: What its `listed` takes; `python`, and `variables`, names of the run's environment
            variables that the package needs.
        setting: The setting and its value that say which tasks, for errors.
        install: What to install, for errors.

    Raises: UserError if they cannot be loaded.
    """
    try:
        with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
            done = subprocess.run(
                [request["python"], MAIN, program],
                input=json.dumps(request),
                env={**inherited_environment(request["variables"]), "TMPDIR": folder},
                capture_output=True,
                text=True,
                timeout=LIST_SECONDS,
                check=False,
            )
        found = None if done.returncode else result_in(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{setting} cannot be loaded: {error}") from None
    if found is None:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no reason given"
        raise UserError(
            f"{setting} cannot be loaded ({reason[-ERROR_CHARACTERS:]}): install {install} where"
            f" {request['python']} finds it"
        )
    return list(found)


async def played(program: str, request: Request, id: Any, base_url: str, api_key: str) -> Any:
    """Plays the task of this id and returns the program's result. Cancelling this ends everything
    that the package started, and its temporary files go with it.

    Raises: RuntimeError for an episode that failed.
    """
    asked = {**request, "id": id, "base_url": base_url, "api_key": api_key}
    folder = tempfile.mkdtemp(prefix=PREFIX)
    try:
        printed = await run_program(
            (request["python"], MAIN, program),
            Task(str(id), ""),
            {**inherited_environment(request["variables"]), "TMPDIR": folder},
            ".",
            OUTPUT_BYTES,
            PROCESSES,
            json.dumps(asked).encode(),
            folder,
        )
        result = result_in(printed)
        if "error" in result:
            raise RuntimeError(str(result["error"])[:ERROR_CHARACTERS])
    except ProgramFailed as error:
        raise RuntimeError(f"the program ended with {error}") from None
    except ValueError:
        raise RuntimeError("the program printed no result") from None
    return result


def result_in(printed: str) -> Any:
    """Raises: ValueError if there is none."""
    _, mark, result = printed.rpartition(MARK)
    if not mark:
        raise ValueError("there is no result")
    return json.loads(result.partition("\n")[0])
