"""Real runs, slow in known ways: the lab names the cause."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.engines.embedded import EmbeddedConfig, EmbeddedEngine
from areal_x.experiment import Experiment
from areal_x.lab.causes import LABELS, WHAT, advice, first_cause
from areal_x.lab.runs import Run
from areal_x.lab.time_parts import PARTS, divided, time_parts
from areal_x.protocols.engine import SamplingParams
from areal_x.run import checkpoint
from areal_x.runtime import timeline
from areal_x.runtime.timeline import Interval
from areal_x.types import Task
from areal_x.workflows.single_turn import SingleTurn
from tests.experiments import tiny_experiment
from tests.lab.journals import write_metrics
from tests.thorough import further

ROOT = Path(__file__).parents[2]
SLOW = 0.25
STEPS = 4  # of which the first is left out
Changes = dict[str, Any]


def slow_reward(task: Task, text: str) -> float:
    import time

    time.sleep(0.08)
    return text.count("1") / 8


class SlowEnvironment(SingleTurn):
    async def run(self, task: Task, engine: Any) -> Any:
        import asyncio

        found = await super().run(task, engine)
        await asyncio.sleep(SLOW)  # a tool
        return found


def workflow(kind: type[SingleTurn] = SingleTurn, reward: Any = None, tokens: int = 4) -> SingleTurn:
    from tests.ones import counts_ones

    return kind(reward=reward or counts_ones, sampling=SamplingParams(max_tokens=tokens), reward_workers=1)


def slower(method: Callable[..., Any], seconds: float = SLOW) -> Callable[..., Any]:
    def slowed(*arguments: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return method(*arguments, **more)

    return slowed


def reward(monkeypatch: pytest.MonkeyPatch) -> Changes:
    return {"workflow": workflow(reward=slow_reward)}


def environment(monkeypatch: pytest.MonkeyPatch) -> Changes:
    return {"workflow": workflow(SlowEnvironment)}


def trainer(monkeypatch: pytest.MonkeyPatch) -> Changes:
    made = Experiment.learn
    monkeypatch.setattr(Experiment, "learn", slower(made, SLOW))
    return {"max_staleness": 1}


def generation(monkeypatch: pytest.MonkeyPatch) -> Changes:
    monkeypatch.setattr(EmbeddedEngine, "_decode", slower(EmbeddedEngine._decode))
    return {"embedded": EmbeddedConfig(slots=2)}


def weights(monkeypatch: pytest.MonkeyPatch) -> Changes:
    monkeypatch.setattr(EmbeddedEngine, "_load", slower(EmbeddedEngine._load))
    return {"max_staleness": 0}


def staging(monkeypatch: pytest.MonkeyPatch) -> Changes:
    monkeypatch.setattr(EmbeddedEngine, "stage", slower(EmbeddedEngine.stage))
    return {"max_staleness": 1}


def evaluation(monkeypatch: pytest.MonkeyPatch) -> Changes:
    return {
        "held_out": [Task(f"held {i}", f"{i}+1=") for i in range(40)],
        "evaluate_every": 1,
        "embedded": EmbeddedConfig(slots=2),
    }


def checkpoint_(monkeypatch: pytest.MonkeyPatch) -> Changes:
    monkeypatch.setattr(checkpoint.Saver, "save", slower(checkpoint.Saver.save, SLOW))
    return {"checkpoint_every": 1}


def alternation(monkeypatch: pytest.MonkeyPatch) -> Changes:
    monkeypatch.setattr(Experiment, "learn", slower(Experiment.learn))
    return {"workflow": workflow(SlowEnvironment), "max_staleness": 0}


WAYS: list[Any] = [
    (reward, "rewards", "single_turn.reward_workers (now 1)"),
    (environment, "environment", "train.max_staleness"),
    (weights, "weights", "train.groups_per_step"),
    *further(
        (trainer, "trainer", "mesh.fsdp"),
        (generation, "generation", "embedded.slots (now 2)"),
        (evaluation, "evaluation", "train.evaluate_every (now 1)"),
        (staging, "weights", "train.groups_per_step"),
        (checkpoint_, "checkpoint", "train.checkpoint_every (now 1)"),
        (alternation, "alternation", "train.max_staleness = 1"),
    ),
]


@pytest.mark.parametrize(("way", "part", "setting"), WAYS)
def test_a_run_that_is_slow_in_a_known_way_has_that_cause_named_first(
    way: Callable[[pytest.MonkeyPatch], Changes], part: str, setting: str, tiny_model_dir, tmp_path, monkeypatch
) -> None:
    """Real runs on the embedded engine, each with one part that sleeps or has too much to do."""
    changes = {"workflow": workflow(), "steps": STEPS, "group_size": 2} | way(monkeypatch)
    experiment = tiny_experiment(tiny_model_dir, tmp_path, **changes)
    run = experiment.open()
    for _ in experiment.turns(run, message=lambda _: None):
        pass
    found = Run(run).overview()
    assert (found["cause"]["part"], found["parts"]["steps"]) == (part, STEPS - 1), found["parts"]
    assert setting in found["cause"]["sentence"]
    assert sum(found["parts"]["shares"].values()) == pytest.approx(1.0)


# ---- made timelines, in seconds


def span(name: str, start: float, end: float, **arguments: Any) -> Interval:
    return Interval(name, start, end, arguments)


def step(number: int, at: float, waited: float, publish: float = 0.1) -> list[Interval]:
    """A wait, half a second of training, a publication."""
    times = [at, at + waited, at + waited + 0.1, at + waited + 0.5, at + waited + 0.5 + publish]
    names = ("wait", "log-probabilities", "update", "publish")
    return [span(name, *ends, step=number) for name, ends in zip(names, itertools.pairwise(times), strict=True)]


def episode(start: float, end: float, ticket: int = 0) -> Interval:
    return span("episode", start, end, ticket=ticket, index=0)


def parts(**lanes: list[Interval]) -> dict[str, float]:
    """The seconds of each part that is not 0."""
    found = time_parts(lanes, drains=bool(lanes.pop("drains", ())))
    assert found is not None
    return {part: round(found.seconds * share, 6) for part, share in found.shares.items() if share > 1e-9}


WHOLE = {"trainer": 0.5, "weights": 0.1}


def test_a_wait_goes_to_what_the_last_episode_did():
    lanes = {
        "trainer": step(1, 0.0, 1.0),
        "episodes": [episode(0.0, 0.3, ticket=1), episode(0.1, 1.0), episode(0.3, 5.0, ticket=9)],
        "generation": [span("generate", 0.2, 0.5, ticket=0, index=0), span("generate", 0.0, 0.9, ticket=1, index=0)],
        "rewards": [span("reward", 0.8, 0.9, of="group 0, episode 0 (task x)", queued=0.1)],
    }
    # before its admission: the other was generating
    assert parts(**lanes) == WHOLE | {"generation": 0.4, "rewards": 0.2, "environment": 0.4}


def test_a_wait_before_the_first_episode_goes_to_the_publication_under_way_or_to_nothing():
    one = [span("stage", 0.05, 0.1, version=3), *step(1, 0.1, 1.0)]
    lanes = {"trainer": one, "engine": [span("pause", 0.3, 0.4, version=3)], "episodes": [episode(0.6, 1.1)]}
    assert parts(**lanes) == {"trainer": 0.5, "weights": 0.4, "idle": 0.2, "environment": 0.5}


def test_the_first_of_several_steps_and_what_follows_the_last_are_left_out():
    of = [*step(1, 0.0, 9.0), *step(2, 10.0, 1.0), span("evaluate", 11.6, 12.6), *step(3, 12.6, 1.0)]
    found = parts(trainer=[span("evaluate", -5.0, 0.0), *of, span("checkpoint", 14.2, 20.0), span("evaluate", 20.0, 30.0)])
    assert found == {"trainer": 1.0, "weights": 0.2, "idle": 2.0, "evaluation": 1.0}


def test_a_publication_that_drains_goes_to_what_is_drained_and_turns_have_a_part_of_their_own():
    of = [*step(1, 0.0, 1.0, publish=0.4), span("wake", 0.8, 1.0), span("rest", 1.5, 1.6)]
    lanes = {"trainer": of, "episodes": [episode(0.0, 0.8), episode(0.0, 1.9, ticket=1)]}
    assert parts(**lanes) == {"trainer": 0.5, "turns": 0.3, "weights": 0.3, "environment": 0.8}
    assert parts(**lanes, drains=lanes["trainer"]) == {"trainer": 0.5, "turns": 0.3, "environment": 1.1}


def test_episodes_of_shards_are_found_in_their_own_lanes_and_a_lane_of_trainers_counts_once():
    lanes = {"trainer": step(1, 0.0, 1.0), "rank 0": [span("update", 1.1, 1.5)]}
    lanes["shard 1"] = [episode(0.0, 1.0), span("generate", 0.0, 0.7, ticket=0, index=0)]
    assert parts(**lanes) == WHOLE | {"generation": 0.7, "environment": 0.3}


@pytest.mark.parametrize("lanes", [{}, {"trainer": []}, {"trainer": step(1, 0.0, 1.0)[:3]}])
def test_a_timeline_without_a_whole_step_has_no_parts(lanes):
    assert time_parts(lanes) is None


@given(st.lists(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)).map(sorted).map(tuple), max_size=5), max_size=4))
def test_a_stretch_is_divided_without_loss(covering):
    found = divided((2.0, 7.0), *((str(i), x) for i, x in enumerate(covering)), rest="rest")
    assert sum(found.values()) == pytest.approx(5.0)
    ticks = [2.0 + (i + 0.5) / 200 for i in range(1000)]
    left = [t for t in ticks if not any(a <= t < b for x in covering for a, b in x)]
    assert found["rest"] == pytest.approx(len(left) / 200, abs=0.01 * (1 + 2 * sum(map(len, covering))))


def test_every_setting_that_is_named_exists():
    page = (ROOT / "docs" / "configuration.md").read_text()
    known = set(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` \|", page, re.MULTILINE))
    workflows = [{}, {"train.workflow": "@tool_use()", "tool_use.reward_workers": 4}, {"train.workflow": "@learned_reward()"}]
    for settings in (
        {"train.engine": engine, "train.share_prompts": shared} | of
        for engine in ("embedded", "vllm", "sglang", "none")
        for shared in (False, True)
        for of in workflows
    ):
        for part in (*PARTS, "rollout"):
            named = set(re.findall(r"\b[a-z_]+\.[a-z_]+\b", advice(part, settings))) - {"timeline.json"}
            assert named <= known, part
            assert bool(named) or part in ("rollout", "rewards"), part
    assert set(WHAT) == set(LABELS) == {*PARTS, "rollout"}


def test_trainer_and_rollout_that_take_turns_are_named_only_where_they_could_overlap():
    shares = {"trainer": 0.45, "generation": 0.4, "weights": 0.15}
    settings = {"train.max_staleness": 0, "train.engine": "embedded"}
    assert first_cause(shares, settings).part == "alternation"
    for other in ({"train.max_staleness": 1}, {"train.colocate": True}, {"train.engine": "none"}):
        assert first_cause(shares, settings | other).part == "trainer"
    assert first_cause({"trainer": 0.1, "generation": 0.9}, settings).part == "generation"
    assert first_cause({}, settings) is None


def test_without_a_timeline_the_metrics_tell_trainer_weights_and_the_rest(tmp_path):
    row = {"seconds": 2.0, "wait_seconds": 1.2, "update_seconds": 0.4, "logprob_seconds": 0.2, "publish_seconds": 0.2}
    write_metrics(tmp_path, [{"step": i, **row} for i in range(1, 4)])
    found = Run(tmp_path).overview()
    assert found["parts"]["shares"] == pytest.approx({"rollout": 0.6, "trainer": 0.3, "weights": 0.1})
    assert "timeline.json" in found["cause"]["sentence"]


def test_the_timeline_of_a_run_that_goes_on_is_renewed_for_a_bounded_share_of_the_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timeline.time, "perf_counter", lambda: now[0])
    recorder = timeline.Recorder()
    writes = []

    def written(run: Path) -> Path:
        writes.append(now[0])
        now[0] += 0.05  # it takes so long
        return original(run)

    original = recorder.write
    monkeypatch.setattr(recorder, "fetch", lambda: now.__setitem__(0, now[0] + 0.05))
    monkeypatch.setattr(recorder, "write", written)
    for _ in range(2000):
        now[0] += 0.1
        recorder.renew(tmp_path)
    assert writes[0] == pytest.approx(timeline.LEAST_SECONDS, abs=0.2)
    assert all(b - a >= 50 for a, b in itertools.pairwise(writes))
    assert len(writes) >= 3
