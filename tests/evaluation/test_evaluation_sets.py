"""Evaluation sets: what they refuse, their results and metrics, and evaluations in runs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from areal_x.errors import ConfigError
from areal_x.evaluation.evaluation_set import EvaluationSet, check_names
from areal_x.evaluation.results import compare_models, comparisons_table, result_of, results_table, verdict
from areal_x.evaluation.statistics import mean_interval
from areal_x.protocols.engine import SamplingParams
from areal_x.types import Episode, Failed, Scored, Task, TimedOut, Trajectory
from areal_x.workflows.single_turn import SingleTurn
from tests.experiments import TASKS, tiny_experiment


def scored(reward: float, tokens: int = 3) -> Episode:
    new = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32), np.zeros(tokens, np.int32)
    return Episode(Scored(reward), (Trajectory.from_completion(np.zeros(2, np.int32), *new),))


FOUR = EvaluationSet(name="four", dataset=TASKS[:3], attempts=4)
EPISODES = [
    *(scored(1.0), scored(0.0), scored(0.5), scored(1.0, tokens=5)),
    *(scored(0.0), Episode(Failed("lost")), Episode(TimedOut(1.0)), scored(0.0)),
    *(scored(2.0), scored(1.0), scored(1.0), scored(1.0)),
]


def test_scores_of_each_task_by_hand_where_attempts_failed_and_timed_out():
    result = result_of(FOUR, TASKS[:3], EPISODES)
    scores = {name: x.tolist() for name, x in result.scores().items()}
    assert scores == {
        "avg@4": [0.625, 0, 1.25],
        "pass@1": [0.5, 0, 1],
        "pass@2": [pytest.approx(1 - 1 / 6), 0, 1],
        "pass@4": [1, 0, 1],
    }
    assert (result.failed, result.tokens, result.ks) == (2, pytest.approx((9 * 3 + 5) / 10), [1, 2, 4])
    row = result.metrics()
    assert row["evaluation/four/pass@1"] == 0.5
    interval = mean_interval(np.array([0.5, 0, 1]))
    assert (row["evaluation/four/pass@1/low"], row["evaluation/four/pass@1/high"]) == (interval.low, interval.high)
    assert row["evaluation/four/avg@4/high"] > 1  # rewards above 1 have no bound
    assert row["evaluation/four/failed"] == 2
    lenient = result_of(replace(FOUR, threshold=0.5), TASKS[:3], EPISODES)
    assert lenient.scores()["pass@1"].tolist() == [0.75, 0, 1]


def test_a_result_goes_through_json_and_has_no_number_that_is_none():
    result = result_of(replace(FOUR, dataset=TASKS[:1]), TASKS[:1], [Episode(Failed("lost"))] * 4)
    assert set(result.metrics()) == {f"evaluation/four/{key}" for key in ("avg@4", "pass@1", "pass@2", "pass@4", "failed")}
    told = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert told["statistics"]["pass@4"] == {"value": 0.0, "low": None, "high": None}
    assert told["tasks"] == [{"id": "0", "rewards": [None] * 4}]


def test_models_are_compared_by_every_statistic_and_the_better_one_is_named():
    many = EvaluationSet(name="many", dataset=[Task(str(i), "") for i in range(20)], attempts=2)
    rng = np.random.default_rng(0)

    def result(rate: float):
        return result_of(many, many.dataset, [scored(float(x)) for x in rng.random(40) < rate])

    results = {name: {"many": result(rate)} for name, rate in (("weak", 0.1), ("same", 0.1), ("strong", 0.9))}
    found = compare_models(results)
    assert list(found["many"]) == ["avg@2", "pass@1", "pass@2"]
    told = {pair: verdict(one, pair, 0.95) for pair, one in found["many"]["pass@1"].items()}
    assert told == {
        ("weak", "same"): "not told apart at 95% confidence",
        ("weak", "strong"): "strong is better at 95% confidence",
        ("same", "strong"): "strong is better at 95% confidence",
    }
    lines = comparisons_table(found).splitlines()
    assert len(lines) == 2 + 9
    assert len({len(line) for line in lines}) == 1
    assert [line.count("|") for line in results_table(results).splitlines()] == [9] * 11


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"name": "a/b"}, r"evaluation_set\.name = 'a/b'"),
        ({"attempts": 0}, r"evaluation_set\.attempts = 0"),
        ({"greedy": True}, r"evaluation_set\.attempts = 4 .* greedy attempts are all the same"),
        ({"workflow": object()}, r"evaluation_set\.workflow"),
    ],
)
def test_a_set_that_cannot_work_is_refused(changes, sentence):
    with pytest.raises(ConfigError, match=sentence):
        replace(FOUR, **changes)


def test_sets_of_one_name_and_without_tasks_are_refused():
    with pytest.raises(ConfigError, match="a name that no other set has"):
        check_names([FOUR, FOUR])
    with pytest.raises(ConfigError, match="at least one task"):
        check_names([replace(FOUR, dataset=[])])
    assert not FOUR.is_greedy
    assert replace(FOUR, attempts=1).is_greedy
    assert not replace(FOUR, attempts=1, greedy=False).is_greedy


def other_reward(task: Task, text: str) -> float:
    return 0.25


def test_a_run_evaluates_each_named_set_in_its_own_way(tiny_model_dir, tmp_path):
    other = SingleTurn(reward=other_reward, sampling=SamplingParams(max_tokens=2), reward_workers=1)
    sets = (
        EvaluationSet(name="greedy", dataset=TASKS[:4]),
        EvaluationSet(name="sampled", dataset=TASKS[:3], attempts=3),
        EvaluationSet(name="other", dataset=TASKS[:2], workflow=other, attempts=2),
    )
    changes = {"evaluations": sets, "held_out": TASKS[:4], "steps": 2, "evaluate_every": 1}
    run = tiny_experiment(tiny_model_dir, tmp_path, **changes)
    rows = [turn.metrics for turn in run.turns(run.open(), message=lambda _: None)]
    assert all({"evaluation/greedy/avg@1", "evaluation/sampled/pass@2", "evaluation/other/avg@2"} <= row.keys() for row in rows)
    assert rows[0]["evaluation/greedy/avg@1"] == rows[0]["accuracy"]  # the same tasks, answered alike
    assert [row["evaluation/other/avg@2"] for row in rows] == [0.25] * 3
    assert rows[0]["evaluation/other/tokens"] <= 2 < rows[0]["evaluation/sampled/tokens"]
    with pytest.raises(ConfigError, match=r"train\.evaluations = \['greedy', 'sampled', 'other'\] .* engine 'none'"):
        replace(run, engine="none")
