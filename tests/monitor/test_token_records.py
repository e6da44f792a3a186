"""What a step made of each token is in the journal, at the cost of no computation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.algorithms import recipes
from areal_x.batching.batch import pack_minibatches, without_truncated
from areal_x.batching.step_outputs import StepOutputs
from areal_x.monitor.token_records import token_records
from areal_x.monitor.trajectories import trained
from areal_x.run.journal import Journal, JournalConfig
from areal_x.run.token_record import TokenRecord, is_recorded, of_trajectories
from areal_x.testing.reference import Reference
from areal_x.types import Episode, Group, Scored, Task, Trajectory, Turn
from tests.experiments import BACKEND, tiny_experiment
from tests.launching import records
from tests.thorough import further


def run_of(model: Path, runs: Path, **changes: Any) -> tuple[Path, list[Turn]]:
    experiment = tiny_experiment(model, runs, **{"steps": 2} | changes)
    run = experiment.open()
    return run, list(experiment.turns(run, message=lambda _: None))


def masks_of(group: Group) -> list[np.ndarray]:
    return [t.mask for e in group.episodes for t in e.trajectories]


WAYS = [
    ("own passes", {"backend": BACKEND, "algorithm": recipes.grpo(), "minibatches": 2}),
    *further(
        ("own passes of jax", {"backend": "jax", "algorithm": recipes.grpo(), "minibatches": 2}),
        ("one own pass", {"backend": BACKEND, "algorithm": recipes.decoupled_ppo()}),
        ("a pass before", {"backend": BACKEND, "algorithm": recipes.decoupled_ppo(), "minibatches": 2}),
        ("shared prompts", {"backend": BACKEND, "algorithm": recipes.grpo(), "share_prompts": True}),
    ),
]


@pytest.fixture
def saved(monkeypatch, tmp_path) -> list[Path]:
    """The policy before each optimizer step of the test's runs."""
    found: list[Path] = []
    for backend in ("jax", "torch"):
        trainer = pytest.importorskip(f"areal_x_{backend}.trainer").Trainer

        def saving(self: Any, *arguments: Any, made: Any = trainer.update) -> Any:
            found.append(tmp_path / f"before-{len(found)}")
            self.save(found[-1])
            return made(self, *arguments)

        monkeypatch.setattr(trainer, "update", saving)
    return found


@pytest.mark.parametrize(("name", "changes"), WAYS)
def test_a_record_is_what_the_batches_and_an_independent_model_have(name, changes, tiny_model_dir, tmp_path, saved) -> None:
    journal = JournalConfig(token_share=1.0, entropy=True)
    run, turns = run_of(tiny_model_dir, tmp_path, journal=journal, **changes)
    kept = records(run)
    assert [step for step, _ in kept.values()] == [1, 1, 2, 2]
    minibatches = changes.get("minibatches", 1)
    for turn in turns[1:]:
        advantages = {id(t.trajectory): t.advantages for t in trained(turn)}
        for place, group in enumerate(turn.groups):
            step, record = kept[group.ticket]
            assert step == turn.metrics["step"]
            first, own_step = ((step - 1) * minibatches + x for x in (0, place % minibatches))
            before = Reference(saved[first if name == "a pass before" else own_step])
            masks, trajectories = masks_of(group), [t for e in group.episodes for t in e.trajectories]
            arrays = (of_trajectories(x, masks) for x in (record.advantages, record.logprobs, record.entropies))
            for t, own, own_logp, own_entropy in zip(trajectories, *arrays, strict=True):
                assert np.isnan(own[~t.mask]).all()
                np.testing.assert_allclose(own[t.mask], advantages[id(t)][t.mask], atol=2e-3)
                logp = before.distributions(t.tokens, 1.0)
                chosen = np.array([0.0, *logp[np.arange(len(t) - 1), t.tokens[1:]]])
                np.testing.assert_allclose(own_logp[t.mask], chosen[t.mask], atol=1e-4)
                logp = Reference(saved[own_step]).distributions(t.tokens, 1.0)
                entropy = np.array([0.0, *-(np.exp(logp) * logp).sum(-1)[:-1]])
                np.testing.assert_allclose(own_entropy[t.mask], entropy[t.mask], atol=5e-3)


def test_tokens_that_the_algorithm_leaves_out_have_no_numbers_of_the_step() -> None:
    made = (Trajectory.from_completion([1], [2, 3], [-1.0, -1.0], [0, 0], 1.0, why) for why in ("stop", "length"))
    group = Group(Task("0", ""), 0, 0, tuple(Episode(Scored(1.0), (t,)) for t in made))
    (part,) = pack_minibatches([group], recipes.grpo(), row_length=8)
    batch = without_truncated(part.packed.batch, part)
    outputs = StepOutputs(*(np.where(batch.mask, x, 0.0).astype(np.float32) for x in (-2.0, 3.0)))
    record = token_records([batch], [part], [outputs], share=1.0)[0]
    np.testing.assert_array_equal(record.logprobs, [-2, -2, np.nan, np.nan])
    np.testing.assert_array_equal(TokenRecord.decode(record.encode()).entropies, [3, 3, np.nan, np.nan])


def test_recording_changes_no_step_and_needs_no_forward_pass(tiny_model_dir, tmp_path, monkeypatch) -> None:
    """Against the same run without records, to the bit; the algorithm's own passes are counted."""
    from areal_x_torch.trainer import Trainer

    calls: list[str] = []
    for method in ("logprobs", "update"):
        made = getattr(Trainer, method)

        def counted(self: Any, *arguments: Any, made: Any = made, method: str = method) -> Any:
            calls.append(method)
            return made(self, *arguments)

        monkeypatch.setattr(Trainer, method, counted)
    timed = ("seconds", "per_second", "idle")
    rows = []
    for share in (0.0, 1.0):
        same = {"deterministic": True, "backend": "torch", "name": f"share-{share}"}
        run, turns = run_of(tiny_model_dir, tmp_path, journal=JournalConfig(token_share=share), **same)
        rows.append([{k: v for k, v in t.metrics.items() if not any(x in k for x in timed) and k != "threads"} for t in turns])
        assert len(records(run)) == (4 if share else 0)
    assert rows[0] == rows[1]
    assert calls == ["update"] * 4


@given(st.integers(0, 10**6), st.integers(1, 300), st.floats(0, 1))
def test_a_share_of_the_tickets_is_recorded_and_evenly(first: int, count: int, share: float) -> None:
    found = sum(is_recorded(ticket, share) for ticket in range(first, first + count))
    assert abs(found - share * count) <= 1 + 1e-6
    assert all(is_recorded(ticket, 1.0) and not is_recorded(ticket, 0.0) for ticket in range(first, first + 3))


MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=4)


@given(MASKS, st.sampled_from(["logprobs", "advantages"]))
def test_a_record_is_read_as_it_was_written(masks: Sequence[Sequence[bool]], name: str) -> None:
    flags = [np.array(mask) for mask in masks]
    values = np.linspace(-7.0, 3.0, sum(int(x.sum()) for x in flags)).astype(np.float32)
    read = TokenRecord.decode(TokenRecord(**{name: values}).encode())
    assert [x for x in ("logprobs", "advantages", "entropies") if getattr(read, x) is not None] == [name]
    split = of_trajectories(getattr(read, name), flags)
    np.testing.assert_allclose(np.concatenate([x[m] for x, m in zip(split, flags, strict=True)]), values, atol=4e-3)
    if name == "logprobs":
        np.testing.assert_array_equal(read.logprobs, values)
    with pytest.raises(ValueError, match="trained tokens"):
        of_trajectories(np.zeros(len(values) + 1, np.float32), flags)


def test_records_go_with_their_groups_and_with_the_steps_that_a_resumed_run_takes_again(tmp_path) -> None:
    record = TokenRecord(advantages=np.array([np.inf, -1e9], np.float32))
    groups = [Group(Task(str(i), ""), i, 0) for i in range(4)]
    with Journal(tmp_path, keep_steps=1) as journal:
        for group in groups:
            journal.admitted(group, group.ticket)
            journal.finished(group)
            journal.consumed(group.ticket + 1, [group])
            journal.trained(group.ticket + 1, {group.ticket: record})
        journal.prune(oldest_checkpoint=1, step=3)
        journal.resumed(3, lambda i: groups[i].task, 1)
    kept = records(tmp_path)
    assert {ticket: step for ticket, (step, _) in kept.items()} == {1: 2, 2: 3}
    assert np.isfinite(kept[1][1].advantages).all()
