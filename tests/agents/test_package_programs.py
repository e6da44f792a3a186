"""Programs in a Python of their own: what they are asked, what they give, and what is left of them."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import areal_x.agents
from areal_x.agents.package_programs import listed, played
from areal_x.errors import UserError

PROGRAM = """
import os, sys, time

def listed(request):
    print("a package may print")
    if request.get("broken"):
        raise ModuleNotFoundError("No module named 'package'")
    return [1, "two"]

def play(request):
    print("a package may print")
    os.system("echo '{}'")
    match request["id"]:
        case "names":
            import client  # there is a module of this name in areal_x.agents
        case "dies":
            os._exit(3)
        case "silent":
            os._exit(0)
        case "fails":
            raise ValueError("no\\nroom")
        case "hangs":
            from pathlib import Path
            if child := os.fork():
                Path(request["place"]).write_text(f"{child} {os.environ['TMPDIR']}")
            time.sleep(1000)
    text = request.pop("text", "")
    about = {"environment": sorted(os.environ), "path": sys.path}
    return {"given": request, "text": [len(text), set(text) == {"ä", "\\n"}], **about}
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return str(file)


def request(**more: Any) -> dict[str, Any]:
    return {"python": sys.executable, "variables": ["SEEN"], **more}


def result(program: str, id: str, **more: Any) -> Any:
    return asyncio.run(played(program, request(**more), id, "http://127.0.0.1:1/v1", "the key"))


def test_tasks_are_listed_whatever_the_package_prints(program: str) -> None:
    assert listed(program, request(), "tasks.name = 'x'", "package") == [1, "two"]
    with pytest.raises(UserError, match=r"tasks.name = 'x' cannot be loaded \(Module.* 'package'\): install package where"):
        listed(program, request(broken=True), "tasks.name = 'x'", "package")
    with pytest.raises(UserError, match="no-such-python"):
        listed(program, {**request(), "python": "no-such-python"}, "tasks.name = 'x'", "package")


def test_a_request_of_any_size_comes_whole_and_the_key_is_in_no_environment(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEEN", "1")
    monkeypatch.setenv("UNSEEN", "1")
    text = "ä\n" * 400_000  # more than a pipe holds
    found = result(program, "plain", text=text)
    assert found["text"] == [len(text), True]
    assert (found["given"]["base_url"], found["given"]["api_key"]) == ("http://127.0.0.1:1/v1", "the key")
    assert {"SEEN", "UNSEEN"} & set(found["environment"]) == {"SEEN"}


@pytest.mark.parametrize(
    ("id", "reason"),
    [
        ("fails", "ValueError: no room"),
        ("dies", "the program ended with exit status 3"),
        ("silent", "the program printed no result"),
        ("names", "No module named 'client'"),
    ],
)
def test_an_episode_without_a_result_has_a_reason(program: str, id: str, reason: str) -> None:
    with pytest.raises(RuntimeError, match=reason):
        result(program, id)


def test_a_program_that_reads_nothing_ends_as_it_ends() -> None:
    """A large request that nobody reads."""
    with pytest.raises(RuntimeError, match="exit status"):
        result("no-such-program.py", "any", python="/bin/false", text="x" * 1_000_000)


def test_nothing_that_a_package_started_or_wrote_outlives_its_episode(program: str, tmp_path: Path) -> None:
    place = tmp_path / "pid"

    async def run() -> list[str]:
        playing = asyncio.create_task(played(program, request(place=str(place)), "hangs", "", ""))
        while not (place.exists() and place.read_text()):
            await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        return place.read_text().split()

    pid, folder = asyncio.run(run())
    assert folder.startswith(tempfile.gettempdir())
    until = time.monotonic() + 20
    while (Path(f"/proc/{pid}").exists() or Path(folder).exists()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
    assert not Path(folder).exists()


def test_modules_of_this_project_are_not_the_packages(program: str) -> None:
    folders = {str(Path(folder).resolve()) for folder in areal_x.agents.__path__}
    assert not folders & {str(Path(place).resolve()) for place in result(program, "plain")["path"] if place}
