"""The command that runs agents for a run elsewhere: its key, its agent, and what it refuses to send or to call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_x import agents_command
from areal_x.agents.worker import FunctionAttempt, ProgramAttempt
from areal_x.errors import UserError
from areal_x.runtime.credentials import GATEWAY_KEY
from tests.agents.far_agents import asking

AGENT = "tests.agents.far_agents.asking"
URL = "https://run.example.com:8443"


@pytest.fixture(autouse=True)
def without_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(GATEWAY_KEY, raising=False)


def parsed(*words: str):
    return agents_command.parse(["work", *words])


def test_the_agent_is_a_function_or_the_words_of_a_command() -> None:
    function = agents_command.attempt_of(parsed(URL, "--agent", AGENT))
    assert isinstance(function, FunctionAttempt)
    assert function.solve is asking
    program = agents_command.attempt_of(
        parsed(URL, "--inherit", "SEARCH_KEY", "--", "node", "agent.mjs", "--agent", "{prompt}")
    )
    assert isinstance(program, ProgramAttempt)
    assert program.command == ("node", "agent.mjs", "--agent", "{prompt}")
    assert set(program.variables) == {"SEARCH_KEY", *agents_command.TRUST}


@pytest.mark.parametrize(
    "words", [(URL,), (URL, "--agent", AGENT, "--", "node"), (URL, "--"), (URL, "--agent", AGENT, "--episodes", "0")]
)
def test_neither_both_or_none_at_once_is_a_mistake(words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(*words)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    "name, why",
    [("nowhere.solve", "No module"), (f"{AGENT}s", "no attribute"), ("solve", "MODULE.FUNCTION"), ("os.sep", "MODULE")],
)
def test_an_agent_that_is_not_there_is_named(name: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        agents_command.function_named(name)


def test_the_key_comes_from_a_file_of_either_form_or_the_environment(tmp_path: Path, monkeypatch) -> None:
    for name, text in (("gateway.json", '{"url": "https://a", "key": "secret"}'), ("key", "secret\n")):
        (tmp_path / name).write_text(text)
        assert agents_command.key_of(tmp_path / name) == "secret"
    with pytest.raises(UserError, match=GATEWAY_KEY):
        agents_command.key_of(None)
    monkeypatch.setenv(GATEWAY_KEY, "secret\n")
    assert agents_command.key_of(None) == "secret"


@pytest.mark.parametrize("text", ["", "{", "{}", '{"key": 1}', "two words"])
def test_a_file_without_a_key_is_named_and_not_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(UserError, match="has no key"):
        agents_command.key_of(tmp_path / "key")
    with pytest.raises(UserError, match="cannot be read"):
        agents_command.key_of(tmp_path / "none")


@pytest.mark.parametrize("url", ["http://10.0.0.5:8000", "run.example.com", f"{URL}/v1", "https://me:secret@run.example.com"])
def test_a_key_goes_nowhere_without_encryption(url: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv(GATEWAY_KEY, "secret")
    assert agents_command.main(["work", url, "--agent", AGENT, "--patience", "0"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: URL = ")
    assert "secret" not in said


def test_trust_is_passed_to_whatever_client_an_agent_uses(tmp_path: Path, monkeypatch) -> None:
    for name in agents_command.TRUST:
        monkeypatch.setenv(name, "before")
    (tmp_path / "run.pem").write_text("a certificate")
    monkeypatch.chdir(tmp_path)
    agents_command.trust("run.pem")
    assert {os.environ[name] for name in agents_command.TRUST} == {str(tmp_path / "run.pem")}
    with pytest.raises(UserError, match="cannot be read"):
        agents_command.trust("none.pem")


def test_a_worker_needs_none_of_the_extras() -> None:
    code = (
        "import sys; before = set(sys.modules); import areal_x.agents_command\n"
        "loaded = {n.split('.')[0] for n in set(sys.modules) - before if not n.startswith('_')}\n"
        "print(sorted(loaded - sys.stdlib_module_names))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "['areal_x', 'jaxtyping', 'numpy']\n"
