"""Who waits for whom in a run in which nothing moves: the lab says what the run's log and display say."""

from __future__ import annotations

import io
import json
import re
import threading
from pathlib import Path
from queue import SimpleQueue

import pytest

from areal_x.lab.runs import Run
from areal_x.lab.stall import read_stall
from areal_x.lab.terminal import run_at, show
from areal_x.protocols.engine import SamplingParams
from areal_x.runtime import waits
from areal_x.types import Task
from areal_x.workflows.single_turn import SingleTurn
from tests.experiments import tiny_experiment


def held_reward(task: Task, text: str) -> float:
    import time
    from pathlib import Path

    while not Path(str(task.answer)).exists():
        time.sleep(0.02)
    return 1.0


def without_seconds(text: str) -> str:
    return re.sub(r"\d+ s\b", "s", text)


def test_a_live_run_that_stalls_shows_the_waits_of_its_log_and_display_with_stacks_until_it_moves(
    tiny_model_dir, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(waits, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(waits, "STEPS", 0.0)
    gate = tmp_path / "open"
    experiment = tiny_experiment(
        tiny_model_dir,
        tmp_path,
        dataset=[Task(str(i), "1+1=", answer=str(gate)) for i in range(4)],
        workflow=SingleTurn(held_reward, SamplingParams(max_tokens=4), reward_workers=1, reward_timeout_seconds=300),
        steps=1,
        groups_per_step=1,
        group_size=2,
    )
    run, heard, failed = experiment.open(), SimpleQueue(), []

    def work() -> None:
        try:
            for _ in experiment.turns(run, message=heard.put):
                pass
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="the ring")
    thread.start()
    try:
        while True:
            said = heard.get(timeout=120)
            if said.startswith("nothing has moved") and "its reward" in said:
                break
        found = Run(run).overview()
        shown = found["stall"]
        logged = (run / "logs" / waits.FILE).read_text()
        stream = io.StringIO()
        show(run_at(run), stream, once=True)
    finally:
        gate.touch()
        thread.join(120)
    assert not failed
    assert found["state"] == "running"
    assert shown["silent_seconds"] >= 0.5
    sentences = [without_seconds(x) for x in shown["sentences"]]
    groups = "the trainer has waited s for the groups of step 1 (0 of 1 are finished;"
    assert [x for x in sentences if x.startswith(groups)]
    assert all(sentence in without_seconds(said) for sentence in sentences[: waits.SHOWN])
    assert all(sentence in without_seconds(logged) for sentence in sentences)
    assert any(x["who"].startswith("group 0, ") and " s for its reward" in x["about"] for x in shown["waits"])
    stacks = {x["name"]: x["stack"] for x in shown["threads"]}
    assert "rollout.take()" in stacks["the ring"]
    assert {"rollout", "embedded-engine", "journal"} <= stacks.keys()
    assert "the trainer has waited" in " ".join(stream.getvalue().split())
    assert not (run / "logs" / waits.STATE).exists()  # it moved again
    assert Run(run).overview()["stall"] is None


def test_the_file_of_a_run_that_was_killed_stays_until_the_run_is_resumed(tmp_path) -> None:
    file = tmp_path / "logs" / waits.STATE
    with waits.waiting("the trainer", "groups"):
        waits.write_state(file, 40.0)
    found = read_stall(tmp_path, goes_on=False)
    assert (found["silent_seconds"], found["sentences"][0][:24]) == (40.0, "the trainer has waited 0")
    assert read_stall(tmp_path, goes_on=True)["silent_seconds"] >= 40.0
    with waits.watching(lambda _: None, tmp_path / "logs"):
        pass
    assert not file.exists()


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"time": "x"}', "[" * 100_000, '{"time": 0, "silent_seconds": 1, "sentences": 3}']
)
def test_a_damaged_file_shows_nothing(content, tmp_path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / waits.STATE).write_text(content)
    assert read_stall(tmp_path, goes_on=True) is None
    (tmp_path / "logs" / waits.STATE).write_text(json.dumps({"time": 0}))
    assert read_stall(Path(tmp_path), goes_on=False) is None
