"""A folder with a shell in it: what persists, what does not, and what the model sees."""

from __future__ import annotations

import asyncio
import json

import pytest

from areal_x.agents.tools.terminal import Shell, Terminal, share_of_tests
from areal_x.errors import ConfigError, UserError
from areal_x.sandbox.folder import Folder, sandbox_for
from areal_x.sandbox.pool import SandboxLimits
from areal_x.types import Scored, Task
from tests.agents.chat.speaking import Says, tokenizer_of
from tests.agents.test_multi_turn import run, texts

END = "<|im_end|>"
FILES = {"notes/a.txt": "first\n", "one.py": "print(1)\n"}


def typed(*commands: str, files=FILES, folder_mb=1.0, **limits) -> list[str]:
    """Returns what the model sees of commands, one after the other."""

    async def shown() -> list[str]:
        each = SandboxLimits(**limits)
        sandbox = sandbox_for(each, folder_mb, workers=1)
        folder = Folder(sandbox, each, files)
        try:
            return [await Shell(folder).call({"command": command}) for command in commands]
        finally:
            await sandbox.close()

    return asyncio.run(shown())


def test_files_stay_from_one_command_to_the_next_and_nothing_else_does():
    first = "mv one.py two.py; mkdir empty; ln -s two.py link; sleep 60 &"
    assert typed(first, "ls; python3 link")[1] == "empty\nlink\nnotes\ntwo.py\n1"
    assert typed("X=1; cd notes", "echo $X; ls")[1] == "\nnotes\none.py"
    assert typed("chmod +x one.py", "test -x one.py && echo executable")[1] == "executable"


def test_what_a_command_printed_comes_with_how_it_ended():
    assert typed("cat notes/a.txt", "true", "echo half; false", "kill -9 $$") == [
        "first",
        "(the command printed nothing)",
        "half\nexit status 1",
        "exit status -9",
    ]


def test_a_command_that_takes_too_long_is_ended_and_what_it_did_stays():
    late, after = typed("echo kept > new; echo said; sleep 60", "cat new", seconds=0.5)
    assert late == "said\nthe command was ended after 0.5 seconds"
    assert after == "kept"


def test_a_command_that_prints_without_end_is_shown_in_part():
    (shown,) = typed("yes", output_characters=100, file_mb=1.0)
    assert "the first and the last 50 are shown" in shown
    assert len(shown) < 250


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("head -c 3000000 /dev/urandom > big", "the folder would grow beyond its limit"),
        ("rm one.py; kill -9 $PPID", "the program was ended by SIGKILL"),
        ("rm -rf ../*", "No such file"),
    ],
)
def test_a_command_that_breaks_what_is_around_it_leaves_the_files_as_they_were(command, why):
    reply, after = typed(command, "ls")
    assert why in reply
    assert reply.endswith("the files are as they were before this command")
    assert after == "notes\none.py"


def test_commands_of_one_reply_run_one_after_the_other_and_looking_changes_nothing():
    async def main():
        limits = SandboxLimits()
        sandbox = sandbox_for(limits, 1.0, workers=4)
        folder = Folder(sandbox, limits, {"count": ""})
        try:
            await asyncio.gather(*(folder.run(f"echo {i} >> count") for i in range(6)))
            await asyncio.gather(*(folder.run_test("rm count") for _ in range(3)))
            return (await folder.run("sort count | tr -d '\\n'")).output
        finally:
            await sandbox.close()

    assert asyncio.run(main()) == "012345"


def test_a_test_imports_no_module_of_the_model_in_the_place_of_pythons_own():
    files = {
        "json.py": "dumps = lambda x: 'forged'",
        "helper.py": "import json\nsay = lambda: print(json.dumps([1]))",
        "main.py": "import helper\nhelper.say()",
        "sitecustomize.py": "print('forged')",
        "usercustomize.py": "print('forged')",
        ".gitconfig": "forged",
    }
    tests = [
        "python3 -c 'import json; print(json.dumps([1]))'",
        "python3 -c 'import helper; helper.say()'",
        "python3 main.py",
        "python3 -m main",
        "python3 -I -c 'import json; print(json.dumps([1]))'",
        "ls -A ~/.gitconfig 2>&1 | grep -c forged",
    ]

    async def go():
        limits = SandboxLimits(seconds=60)
        sandbox = sandbox_for(limits, 4.0, workers=2)
        folder = Folder(sandbox, limits, files)
        try:
            result = await asyncio.gather(*(folder.run_test(test) for test in tests))
            return [one.output.strip() for one in result], (await folder.run("python3 main.py")).output
        finally:
            await sandbox.close()

    looked, worked = asyncio.run(go())
    assert looked == ["[1]"] * 5 + ["0"]
    assert worked == "forged\n"  # the model's own commands are as in any shell


def test_the_reward_is_the_share_of_tests_that_print_what_they_should():
    task = Task("t", "", ["42", "a\nb", ""])
    assert share_of_tests(task, json.dumps(["42\n", "a  \nb\n\n", ""])) == 1.0
    assert share_of_tests(task, json.dumps(["42", "ab", "x"])) == pytest.approx(1 / 3)


TASK = Task("t", "Say hello in file.", ["hello", "2"], {"files": {"file": ""}, "tests": ["cat file", "rm file; echo $((1+1))"]})


@pytest.mark.parametrize(("word", "reward"), [("hello", 1.0), ("good-bye", 0.5)])
def test_an_episode_is_worth_what_its_files_are_afterwards(word, reward):
    tokenizer = tokenizer_of("qwen25")
    call = json.dumps({"name": "shell", "arguments": {"command": f"echo {word} > file; ls"}})
    engine = Says(*texts(tokenizer, f"<tool_call>\n{call}\n</tool_call>{END}", f"Done.{END}"))
    episode = run(Terminal(workers=2), tokenizer, engine, TASK)
    assert isinstance(episode.outcome, Scored)
    assert episode.outcome.reward == reward
    assert (episode.outcome.details["turns"], episode.outcome.details["tool_calls"]) == (2, 1)
    shown = tokenizer.decode(episode.trajectories[0].tokens.tolist())
    assert "<tool_response>\nfile\n</tool_response>" in shown
    assert "cat file" not in shown  # nor what it should print


def test_episodes_have_folders_of_their_own():
    tokenizer = tokenizer_of("qwen25")
    for _ in range(2):
        assert run(Terminal(), tokenizer, Says(*texts(tokenizer, f"Done.{END}")), TASK).outcome.reward == 0.5


@pytest.mark.parametrize(
    "wrong", [{"answer": ["a"]}, {"answer": None}, {"metadata": {}}, {"answer": [], "metadata": {"tests": []}}]
)
def test_a_task_without_tests_or_with_too_few_answers_is_said(wrong):
    task = Task("t", "", **{"answer": TASK.answer, "metadata": TASK.metadata, **wrong})
    tokenizer = tokenizer_of("qwen25")
    with pytest.raises(UserError, match="task t"):
        run(Terminal(), tokenizer, Says(), task)


def test_settings_that_cannot_work_are_refused():
    for name, value in (("workers", 0), ("folder_mb", 0), ("max_turns", 0)):
        with pytest.raises(ConfigError, match=name):
            Terminal(**{name: value})
