"""docs/metrics.md has every key that runs write, and no other."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms import losses, recipes
from areal_x.batching.packing import pack
from areal_x.cluster.gang import Span
from areal_x.cluster.measures import differences
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.evaluation.evaluation_set import EvaluationSet
from areal_x.monitor.step_metrics import describe_groups, throughput
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.speculation import Speculation
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.rollout.rollout import Published
from areal_x.rollout.runner import RolloutStats
from areal_x.runtime import cores
from areal_x.shards.engine import ShardedEngine
from areal_x.shards.shards import Shards
from areal_x.simulation import FakeTrainer
from areal_x.types import Episode, Group, Kept, Scored, Task, Trajectory
from areal_x.workflows.supervised import Demonstrations, PreferencePairs
from tests.experiments import TASKS, TRUNCATED, tiny_experiment
from tests.rollout.test_turns import Sleeping, turns

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
OF_ONE_KIND = r"[^/]+(?:/.+)?"  # what <…> stands for


def documented() -> dict[str, re.Pattern[str]]:
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    names = [name for name, _, _ in rows]
    assert len(names) == len(set(names))

    def pattern(name: str) -> re.Pattern[str]:
        parts = re.split(r"(<\w+>)", name)
        return re.compile("".join(OF_ONE_KIND if part.startswith("<") else re.escape(part) for part in parts))

    return {name: pattern(name) for name in names}


def written_by(**changes: Any) -> set[str]:
    experiment = tiny_experiment(**{"backend": "torch", "steps": 2, **changes})
    return {key for turn in experiment.turns(experiment.open(), message=lambda _: None) for key in turn.metrics}


@pytest.fixture(scope="module")
def written(tiny_model_dir: Path, model_dir_of: Any, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every key of a few runs, one for each kind of algorithm, and of what needs a server or a mixture."""
    pytest.importorskip("areal_x_torch")
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(cores.available())  # whatever a test before left: with one there is nothing to choose
    try:
        return written_by_all(tiny_model_dir, model_dir_of, tmp_path_factory.mktemp("runs"))
    finally:
        torch.set_num_threads(before)


def written_by_all(tiny_model_dir: Path, model_dir_of: Any, runs: Path) -> set[str]:
    of = {"model": tiny_model_dir, "runs": runs}
    offline = {**of, "engine": "none", "group_size": 1}
    answered = [replace(task, answer="11") for task in TASKS]
    pairs = [replace(task, answer={"chosen": "1", "rejected": "2"}) for task in TASKS]
    keys = written_by(
        **of,
        name="critic",
        algorithm=recipes.ppo(kl_coefficient=0.1, entropy_coefficient=0.01),
        held_out=[*TASKS[:3], Task("long", "1" * 40)],
        evaluations=[EvaluationSet(name="two", dataset=TASKS[:2], attempts=2)],
        share_prompts=True,
        max_staleness=1,
        workflow=TRUNCATED,
        speculation=Speculation(method="ngram", shortest=1),
    )
    keys |= written_by(
        **offline, name="sft", algorithm=recipes.sft(), workflow=Demonstrations(), dataset=answered, held_out=answered
    )
    keys |= written_by(**offline, name="dpo", algorithm=recipes.dpo(), workflow=PreferencePairs(), dataset=pairs)
    for name, beta in (("drawn", None), ("whole", 0.5)):
        keys |= written_by(**of, name=name, algorithm=recipes.distill(beta=beta), teacher=str(tiny_model_dir))
    spans = [Span("update", began=0.0, seconds=1.0, cpu_seconds=1.0, peak_bytes=1)] * 2
    keys |= set(differences(spans))
    keys |= set(VLLMEngine(VLLMConfig(delta=1), tiny_model_dir, runs).balance(0.0, 0.0))
    keys |= set(ShardedEngine(Shards(1, 1, SimpleNamespace(), print), SimpleNamespace(), 64).balance(0.0, 0.0))  # type: ignore[arg-type]
    with turns(Sleeping(), max_staleness=0) as rollout:
        rollout.take()
        rollout.publish(FakeTrainer(version=1))
        keys |= set(rollout.balance(0.0, 0.0))
    mixture = create_trainer("torch", TrainerConfig(model=ModelConfig(str(model_dir_of("qwen3-moe")))))
    batch = pack([trajectory()], 8).batch
    keys |= set(mixture.update(batch.replace(weights=batch.mask.astype(np.float32)), losses.sft))
    took = {"seconds": 1.0, "packed_tokens": 1.0, "logprob_seconds": 1.0, "update_seconds": 1.0, "publish_seconds": 1.0}
    return keys | set(throughput(took, RolloutStats(), RolloutStats(), Published(0.0, 0.0, bytes=1, seconds=1.0)))


def trajectory(finish_reason: str = "stop", answer: int = 2, logp: float = -1.0) -> Trajectory:
    tokens = np.arange(2, 4 + answer, dtype=np.int32)
    new = tokens[2:], np.full(answer, logp, np.float32), np.zeros(answer, np.int32)
    return Trajectory.from_completion(tokens[:2], *new, 1.0, finish_reason)


def test_every_key_that_is_written_is_on_the_page(written: set[str]) -> None:
    patterns = documented().values()
    assert [key for key in sorted(written) if not any(pattern.fullmatch(key) for pattern in patterns)] == []


def test_every_key_on_the_page_is_written(written: set[str]) -> None:
    missing = [name for name, pattern in documented().items() if not any(pattern.fullmatch(key) for key in written)]
    assert missing == (["threads"] if cores.available() < 2 else [])


def test_what_a_step_consumed_is_described() -> None:
    """Against numbers made by hand."""

    def episode(reward: float, *trajectories: Trajectory) -> Episode:
        return Episode(Scored(reward), trajectories)

    context = replace(trajectory(), mask=np.zeros(4, np.bool_))
    varied = Group(Task("a", ""), 0, 0, (episode(0.0, trajectory("length", 4, -2.0)), episode(2.0, trajectory(answer=1))))
    equal = Group(Task("b", ""), 1, 0, (episode(1.0, trajectory()), episode(1.0), episode(1.0, context)))
    row = describe_groups([varied, equal], [1, 3])
    assert (row["reward"], row["reward_min"], row["reward_max"]) == (1.0, 0.0, 2.0)
    assert row["reward_std"] == pytest.approx(np.std([0, 2, 1, 1, 1]))
    assert (row["prompt_length"], row["prompt_length_min"], row["prompt_length_max"]) == (2.5, 2, 4)
    assert (row["response_length"], row["response_length_min"], row["response_length_max"]) == (7 / 4, 0, 4)
    assert row["truncated"] == 1 / 4
    assert row["entropy_estimate"] == pytest.approx((4 * 2 + 1 + 2) / 7)
    assert (row["staleness_mean"], row["staleness_max"]) == (2.0, 3)
    assert "kept_tokens" not in row
    chosen = [
        replace(trajectory(), kept=Kept(np.array([0, 0, n, m], np.int32), np.array([4, 9, 8][:n] + [5, 9, 8][:m], np.int32)))
        for n, m in ((3, 1), (0, 2))
    ]
    row = describe_groups([Group(Task("a", ""), 0, 0, (episode(0.0, *chosen), episode(1.0, trajectory())))], [0])
    assert row["kept_tokens"] == (3 + 1 + 2) / 3  # where nothing was left out does not count
    assert "groups_without_variance" not in row  # of no algorithm that has advantages
    batch = pack([varied.episodes[0].trajectories[0], equal.episodes[0].trajectories[0]], 8).batch
    of_rows = np.array([[1.0], [0.0]]) * batch.mask  # 4 trained tokens in one row, 2 in the other
    row = describe_groups([varied, equal], [1, 3], [batch.replace(advantages=of_rows)])
    assert (row["groups_without_variance"], row["zero_advantages"]) == (0.5, 1 / 3)


def test_a_step_without_any_token_is_described_without_a_warning() -> None:
    row = describe_groups([Group(Task("a", ""), 0, 0, (Episode(Scored(1.0)),))], [0])
    assert row["trained_tokens"] == 0
    assert not {"response_length", "entropy_estimate", "truncated"} & set(row)
