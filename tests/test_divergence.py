"""The divergence from a teacher's whole distribution: both trainers against the full logits of transformers' own models."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.algorithms.distillation import generalized_jsd
from areal_x.algorithms.weighting import token_mean
from areal_x.batching.packing import Packed, pack
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.testing.models import CHARACTERS, write_model, write_tokenizer
from areal_x.types import Batch, Policy, Trajectory
from tests.algorithms.test_distillation import by_hand

torch = pytest.importorskip("torch")

VOCABULARY, TEMPERATURE, BETA = len(CHARACTERS) + 2, 0.7, 0.3
PLACES = 48  # in the rows of the batch
STILL = OptimizerConfig(learning_rate=1e-30, weight_decay=0.0)


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another architecture than the student's, narrower and of one layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", **sizes, vocab_size=VOCABULARY, initializer_range=0.3, max_position_embeddings=64)
    directory = tmp_path_factory.mktemp("teacher")
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def trainer_of(backend: str, student: Path, teacher: Path, **changes: Any) -> Trainer:
    config = TrainerConfig(
        model=ModelConfig(str(student)),
        optimizer=STILL,
        micro_batch_rows=2,
        head_chunk=4,
        temperature=TEMPERATURE,
        teacher=str(teacher),
        divergence=partial(generalized_jsd, beta=BETA),
    )
    return create_trainer(backend, replace(config, **changes))


def written() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    lengths = ((2, 7), (1, 3), (3, 9), (2, 5), (1, 1))
    drawn = [(rng.integers(2, VOCABULARY, prompt), rng.integers(2, VOCABULARY, answer)) for prompt, answer in lengths]
    return [Trajectory.from_completion(p, n, np.zeros(len(n)), np.zeros(len(n))) for p, n in drawn]


def packed_batch(row_length: int = 16) -> tuple[Packed, Batch]:
    packed = pack(written(), row_length)
    batch = packed.batch
    return packed, batch.replace(weights=token_mean(batch.mask, batch.segment_ids).astype(np.float32))


@cache
def full_logits(directory: Path) -> tuple[list[Any], Any]:
    """transformers' logits in fp64 over the temperature, [length, vocabulary] of each sequence alone, and their model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
    return [model(torch.tensor(t.tokens)[None].long()).logits[0] / TEMPERATURE for t in written()], model


def one_by_one(policy: Policy, batch: Batch) -> losses.LossTerms:
    """The divergence of each token as a metric of its own, under the number that stands at its place in `advantages`."""
    return policy.divergence, {str(i): policy.divergence * (batch.advantages == i) for i in range(PLACES)}


def test_it_is_that_of_the_full_logits_where_each_token_was_drawn(backend, tiny_model_dir, teacher_dir):
    packed, batch = packed_batch()
    assert batch.tokens.size == PLACES
    numbers = np.arange(PLACES, dtype=np.float32).reshape(batch.shape)
    everywhere = batch.replace(mask=np.ones_like(batch.mask), advantages=numbers)  # padding and a segment's first token too
    said = trainer_of(backend, tiny_model_dir, teacher_dir).update(everywhere, one_by_one)
    found = np.array([said[str(i)] * PLACES for i in range(PLACES)]).reshape(batch.shape)  # a metric is a mean
    assert (found[batch.segment_ids == 0] == 0).all()
    logits = zip(full_logits(tiny_model_dir)[0], full_logits(teacher_dir)[0], strict=True)
    for ours, (student, teacher) in zip(packed.gather(found), logits, strict=True):
        expected = [by_hand(s, t, BETA) for s, t in zip(student.tolist(), teacher.tolist(), strict=True)]
        assert ours[0] == 0
        np.testing.assert_allclose(ours[1:], expected[:-1], rtol=1e-4, atol=1e-6)


def dense_step(student: Path, teacher: Path) -> tuple[float, float]:
    """Loss and gradient norm of a step from full logits in fp64, the definition written out, token by token."""
    logits, model = full_logits(student)
    total, count = 0, sum(int(t.mask.sum()) for t in written())
    for ours, theirs, trajectory in zip(logits, full_logits(teacher)[0], written(), strict=True):
        for t in np.flatnonzero(trajectory.mask):
            p, q = ours[t - 1].softmax(-1), theirs[t - 1].detach().softmax(-1)
            m = BETA * q + (1 - BETA) * p
            total = total + (BETA * (q * (q / m).log()).sum() + (1 - BETA) * (p * (p / m).log()).sum()) / count
    gradient = torch.autograd.grad(total, list(model.parameters()), retain_graph=True)
    return float(total.detach()), float(torch.cat([g.flatten() for g in gradient]).norm())


def test_a_step_is_that_of_the_full_logits_whatever_the_chunk_and_the_packing(backend, tiny_model_dir, teacher_dir):
    loss, norm = dense_step(tiny_model_dir, teacher_dir)
    for chunk, row_length, rows in ((4, 16, 2), (1000, 32, 1)):
        trainer = trainer_of(backend, tiny_model_dir, teacher_dir, head_chunk=chunk, micro_batch_rows=rows)
        learned = trainer.update(packed_batch(row_length)[1], losses.divergence)
        assert learned["loss"] == pytest.approx(loss, rel=1e-5)
        assert learned["teacher_divergence"] == pytest.approx(loss, rel=1e-5)  # both are means over tokens
        assert learned["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_both_backends_learn_the_same_from_a_teacher_beside_other_losses(tiny_model_dir, teacher_dir):
    loss = losses.combine(losses.divergence, losses.sft, partial(losses.entropy_bonus, coefficient=0.1))
    changes = {"optimizer": OptimizerConfig(learning_rate=1e-3), "entropy": True}
    both = [trainer_of(backend, tiny_model_dir, teacher_dir, **changes) for backend in ("jax", "torch")]
    for _ in range(3):
        mine, theirs = (trainer.update(packed_batch()[1], loss) for trainer in both)
        assert mine.keys() == theirs.keys()
        for key, x in mine.items():
            assert x == pytest.approx(theirs[key], rel=1e-3, abs=2e-5), key
    mine, theirs = (dict(trainer.weights()) for trainer in both)
    assert max(np.abs(x - theirs[key]).max() for key, x in mine.items()) < 1e-4


def test_from_a_teacher_that_is_the_student_there_is_nothing_to_learn(backend, tiny_model_dir):
    learned = trainer_of(backend, tiny_model_dir, tiny_model_dir).update(packed_batch()[1], losses.divergence)
    assert learned["loss"] == pytest.approx(0, abs=1e-6)
    assert learned["grad_norm"] == pytest.approx(0, abs=1e-5)


def frozen(trainer: Any) -> list[np.ndarray]:
    """The teacher's weights of products."""
    if hasattr(trainer.teacher, "parameters"):
        products = [layer.weight for layer in trainer.teacher.modules() if isinstance(layer, torch.nn.Linear)]
        return [weight.detach().float().numpy().copy() for weight in products]
    import jax

    return [np.array(x, np.float32) for x in jax.tree.leaves(trainer.teacher)]


def test_the_teacher_is_held_in_the_compute_precision_stays_as_it_is_and_only_updates_ask_it(
    backend, tiny_model_dir, teacher_dir
):
    optimizer = OptimizerConfig(learning_rate=1e-2)
    trainer: Any = trainer_of(backend, tiny_model_dir, teacher_dir, optimizer=optimizer, precision="bf16")
    batch, before = packed_batch()[1], frozen(trainer)
    divergences = [trainer.update(batch, losses.divergence)["teacher_divergence"] for _ in range(10)]
    exact, _ = dense_step(tiny_model_dir, teacher_dir)
    assert divergences[0] == pytest.approx(exact, rel=0.05)
    assert divergences[-1] < 0.9 * divergences[0]
    for x, y in zip(before, frozen(trainer), strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x, torch.tensor(x).bfloat16().float().numpy())
    trainer.teacher = object()  # which could not answer
    assert (trainer.logprobs(batch)[batch.mask] < 0).all()


def test_another_teacher_of_the_same_shape_needs_no_other_program(tiny_model_dir, tmp_path):
    pytest.importorskip("areal_x_jax")
    batch, others = packed_batch()[1], write_model(tmp_path / "other", seed=5)
    trainer: Any = trainer_of("jax", tiny_model_dir, tiny_model_dir)
    trainer.update(batch, losses.divergence)
    trainer.teacher = trainer_of("jax", tiny_model_dir, others).teacher
    loss, _ = dense_step(tiny_model_dir, others)
    assert trainer.update(batch, losses.divergence)["loss"] == pytest.approx(loss, rel=1e-5)
    assert trainer.programs == 1


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"teacher": "somewhere"}, r"trainer\.divergence = None cannot work: it must be given exactly if there is a teacher"),
        ({"divergence": generalized_jsd}, r"trainer\.divergence = .* given exactly if there is a teacher \(which is None\)"),
        ({"teacher": "somewhere", "divergence": generalized_jsd, "head": "value"}, r"trainer\.teacher = .* head 'value'"),
    ],
)
def test_a_teacher_and_a_divergence_come_together_and_to_a_policy_alone(changes, says):
    with pytest.raises(ConfigError, match=says):
        TrainerConfig(**changes)


def test_a_teacher_with_other_tokens_is_refused(backend, tiny_model_dir, tmp_path):
    other = write_model(tmp_path / "other")
    write_tokenizer(other, CHARACTERS[::-1])
    with pytest.raises(ConfigError, match=r"train\.teacher .* a model with the tokens of"):
        trainer_of(backend, tiny_model_dir, other)


@pytest.mark.parametrize("padded", ["teacher", "student"])
def test_embeddings_that_are_padded_further_are_compared_over_the_tokens_that_both_have(
    padded: str, backend: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    """As Qwen2.5's of 7 billion parameters has more rows than that of 1.5 billion."""
    wide = write_model(tmp_path / "wide", seed=3, vocab_size=VOCABULARY + 12)
    student, teacher = (tiny_model_dir, wide) if padded == "teacher" else (wide, tiny_model_dir)
    _, batch = packed_batch()
    trainer = trainer_of(backend, student, teacher)
    logits = zip(*(full_logits(directory)[0] for directory in (student, teacher)), strict=True)
    expected = [
        by_hand(s[t - 1, :VOCABULARY].tolist(), q[t - 1, :VOCABULARY].tolist(), BETA)
        for (s, q), trajectory in zip(logits, written(), strict=True)
        for t in np.flatnonzero(trajectory.mask)
    ]
    learned = trainer.update(batch, losses.divergence)
    assert learned["loss"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert learned["grad_norm"] > 0
    tokens = np.where(batch.mask, VOCABULARY + 5, batch.tokens)
    with pytest.raises(
        UserError, match=rf"token {VOCABULARY + 5} is outside the vocabulary of {VOCABULARY} of .*{tiny_model_dir}"
    ):
        trainer.update(batch.replace(tokens=tokens), losses.divergence)
