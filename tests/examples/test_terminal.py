"""Jobs in a shell: what they are, what a folder left alone earns, and an episode as it was demonstrated."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from areal_x.agents.tools.terminal import Terminal, share_of_tests
from areal_x.errors import ConfigError
from areal_x.sandbox.folder import Folder, sandbox_for
from areal_x.sandbox.pool import SandboxLimits
from areal_x.types import Scored
from examples.terminal import warm_start as module
from examples.terminal.task import KINDS, drawn, jobs, task
from examples.terminal.warm_start import PIECES, batches, given_up, worked
from examples.tiny.chat import CHAT_TEMPLATE, demonstration
from examples.tiny.model import write_model
from tests.examples.running import ROOT, check_file, conversed, gin_files, same_tokens, trained
from tests.thorough import thorough


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("terminal")
    write_model(directory, PIECES, 0, CHAT_TEMPLATE)
    return directory


@pytest.mark.parametrize("file", gin_files("terminal"), ids=lambda file: file.stem)
def test_an_example_can_be_run(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check_file(file)


def test_a_folder_that_is_left_alone_earns_nothing_and_the_solution_everything() -> None:
    async def shares() -> list[tuple[float, float]]:
        limits = SandboxLimits()
        sandbox = sandbox_for(limits, 1.0, workers=2)
        found = []
        try:
            for index in range(12):
                job = drawn(index, np.random.default_rng(index))
                folder, asked = Folder(sandbox, limits, job.files), task("job", job)
                before = [(await folder.run_test(test)).output for test, _ in job.tests]
                await folder.run(job.solution)
                after = [(await folder.run_test(test)).output for test, _ in job.tests]
                found.append((share_of_tests(asked, json.dumps(before)), share_of_tests(asked, json.dumps(after))))
        finally:
            await sandbox.close()
        return found

    assert asyncio.run(shares()) == [(0.0, 1.0)] * 12


def test_jobs_are_fixed_by_their_seed_and_those_to_judge_by_are_others() -> None:
    assert jobs(count=40, seed=1) == jobs(count=40, seed=1) != jobs(count=40, seed=2)
    assert jobs("test", count=40, seed=1) == jobs("test", count=40, seed=2)
    assert not {str(job.metadata) for job in jobs(count=400)} & {str(job.metadata) for job in jobs("test", count=100)}
    plain, told = jobs(count=4), jobs(count=4, instructed=True)
    assert len({one.prompt[0]["content"].split()[0] for one in plain}) == len(KINDS)
    assert all(b.prompt[0]["content"].startswith(f"{a.prompt[0]['content']} Use") for a, b in zip(plain, told, strict=True))


@pytest.mark.parametrize("kind", range(len(KINDS)), ids=lambda kind: KINDS[kind].__name__)
@pytest.mark.parametrize(("turns", "reward"), [(worked, 1.0), (given_up, 0.0)])
def test_an_episode_is_token_for_token_the_demonstration(model: Path, kind: int, turns, reward: float) -> None:
    job = drawn(kind, np.random.default_rng(kind))
    shown = demonstration(PIECES, turns(job), tools=True)
    episode = conversed(Terminal(workers=1, reward_workers=1, max_turns=3), model, task("job", job), shown)
    assert isinstance(episode.outcome, Scored)
    assert episode.outcome.reward == reward
    assert episode.outcome.details["tool_calls"] == (turns is worked)
    same_tokens(episode, shown)


def test_the_tutor_types_a_command_in_a_quarter_of_the_jobs() -> None:
    starts, typed = 0, 0
    for batch in batches(20, seed=0, calls=0.25):
        assert batch.shape == (25, module.ROW_LENGTH)
        starts += (batch.positions == 0)[batch.segment_ids > 0].sum()
        typed += (batch.tokens == PIECES.index("<tool_call>") + 2).sum()
    assert typed / starts == pytest.approx(0.25, abs=0.03)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"terminal_jobs\.jobs\.split"):
        jobs("both")
    with pytest.raises(ConfigError, match=r"terminal_jobs\.warm_start\.steps"):
        module.warm_start(steps=1)
    with pytest.raises(ConfigError, match=r"terminal_jobs\.warm_start\.calls"):
        module.warm_start(calls=1.5)


@thorough
def test_two_steps_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"terminal_jobs__warm_start__steps": 2, "terminal_jobs__warm_start__backend": "torch"}
    rows = trained("terminal/tiny.gin", tmp_path, monkeypatch, **settings, **{"test/terminal_jobs.jobs.count": 8})
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (rows[-1]["failed"], rows[-1]["timed_out"]) == (0, 0)
    assert rows[-1]["scored"] >= 8
    assert rows[-1]["trained_tokens"] > 0
    assert rows[-1]["reward/turns"] >= 1
