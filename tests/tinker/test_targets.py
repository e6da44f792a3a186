"""Targets that are not the next tokens: the cookbook's rl_loop names 0 at each token of a prompt. The model does not compute
them, so that families whose layers compute no branches answer too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from areal_x.errors import UserError
from areal_x.hf import adapters
from areal_x.protocols.trainer_config import LoRAConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.testing.models import write_tokenizer
from areal_x.tinker.data import Datum, lay_out, weighted
from areal_x.tinker.host import TrainerHost
from areal_x.tinker.models import Model, Shape, Source
from areal_x_torch.flat_rows import continued_rows
from tests.model_families import CASES
from tests.models import reference_model, write_config
from tests.thorough import further

SHIFTED, HYBRID = "qwen3-0", "qwen3_5_text-0"
FAMILIES = [(SHIFTED, "torch"), (HYBRID, "torch"), *further((SHIFTED, "jax"), (HYBRID, "jax"))]
FAMILIES += further(
    *(
        (f"{x}-0", b)
        for x in ("qwen3_next", "gemma3_text", "gpt_oss", "qwen3_moe", "llama4_text", "qwen3_5")
        for b in ("torch", "jax")
    )
)
STEP = OptimizerConfig(learning_rate=0.05, beta1=0.5, eps=1.0)
PROMPT, ANSWER = 9, 5


def host_of(family: str, backend: str, place: Path) -> TrainerHost:
    pytest.importorskip(f"areal_x_{backend}")
    directory = write_config(CASES[family], place / "base")
    write_tokenizer(directory)
    lora = LoRAConfig(targets=("q_proj", "v_proj"))  # which mixtures have too
    return TrainerHost(backend, TrainerConfig(model=ModelConfig(path=str(directory)), lora=lora, row_length=32))


def answers(shifted: bool, width: int = 1) -> list[Datum]:
    """Two answers to one prompt, and one to another. shifted: the targets of prompts are their next tokens, and not 0."""
    random = np.random.default_rng(0)
    prompts = random.integers(20, 40, (2, PROMPT))
    found = []
    for prompt in prompts[[0, 0, 1]]:
        ids = np.append(prompt, random.integers(20, 40, ANSWER)).astype(np.int32)
        targets = ids[1:, None].repeat(width, 1)
        weights = np.zeros(targets.shape, np.float32)
        weights[PROMPT - 1 :, 0] = random.normal(size=ANSWER)
        if not shifted:
            targets[: PROMPT - 1] = 0
        targets[:, 1:] = random.integers(20, 40, targets[:, 1:].shape)
        found.append(Datum(ids[:-1], targets, {"weights": weights}, width == 1))
    return found


@pytest.mark.parametrize("family, backend", FAMILIES)
def test_any_targets_have_the_models_logprobs_and_those_without_weight_no_gradient(
    family: str, backend: str, tmp_path: Path
) -> None:
    host = host_of(family, backend, tmp_path)
    reference = reference_model(host.base)
    states = []
    for shifted in (False, True):
        model = Model(f"{shifted}", Shape(4), tmp_path / f"{shifted}", seed=1)
        for width in (1, 3):
            some = answers(shifted, width)
            logprobs, _ = host.forward(model, some, "cross_entropy", {}, True)
            if not states and width < 3:  # before the first step the adapter is without effect
                for datum, ours in zip(some, logprobs, strict=True):
                    with torch.no_grad():
                        logits = reference(torch.tensor(datum.tokens[None]).long()).logits[0]
                    theirs = logits.log_softmax(-1).gather(1, torch.tensor(datum.targets).long()).numpy()
                    np.testing.assert_allclose(ours, theirs, atol=5e-5)
            host.step(model, STEP)
        host.save(model, tmp_path / f"{shifted} saved")
        states.append(dict(adapters.read(tmp_path / f"{shifted} saved")))
    assert max(float(np.abs(x).max()) for name, x in states[0].items() if "lora_B" in name) > 1e-3
    for name, x in states[0].items():
        np.testing.assert_allclose(x, states[1][name], atol=1e-5, err_msg=name)


def test_the_next_token_stands_in_place_of_targets_whose_weight_is_0_and_of_no_others() -> None:
    datum = answers(False, width=3)[0]
    weights = np.random.default_rng(0).integers(-1, 2, datum.targets.shape).astype(np.float32)
    found = weighted(datum, weights)
    after = np.append(datum.tokens[1:], datum.targets[-1, 0])
    for i, (own, kept) in enumerate(zip(datum.targets.tolist(), weights.tolist(), strict=True)):
        assert found.targets[i].tolist() == [target if weight else after[i] for target, weight in zip(own, kept, strict=True)]
    np.testing.assert_array_equal(found.tokens, datum.tokens)


def test_a_datum_is_one_sequence_whatever_its_targets() -> None:
    """A call of attention for each leaf took a hundred times as long."""
    batch = lay_out(answers(False), 64).batch
    assert batch.parents is not None
    (row,) = continued_rows(batch.segment_ids, batch.parents, batch.tokens.size)
    assert row.lengths.tolist() == [PROMPT + ANSWER - 1] * 3
    assert row.prefixes.tolist() == [-1] * 3
    assert row.take(batch.tokens).tolist() == np.concatenate([x.tokens for x in answers(False)]).tolist()


@pytest.mark.parametrize("backend", ["torch", *further("jax")])
def test_whole_models_answer_for_any_targets_where_layers_compute_branches(backend: str, tmp_path: Path) -> None:
    host = host_of(SHIFTED, backend, tmp_path)
    states = []
    for shifted in (False, True):
        model = Model(f"{shifted}", Shape(0), tmp_path / f"{shifted}", seed=1)
        logprobs, _ = host.forward(model, answers(shifted), "cross_entropy", {}, True)
        source = Source("", model.shape, tmp_path / f"{shifted} sampled", model, model.steps)
        for datum, x in zip(answers(shifted), logprobs, strict=True):
            tokens = np.append(datum.tokens, datum.targets[-1]).astype(np.int32)
            np.testing.assert_allclose(x, host.logprobs(source, tokens, datum.targets), atol=1e-5)
        host.step(model, STEP)
        host.save(model, tmp_path / f"{shifted} saved")
        logprobs, _ = host.forward(model, answers(True), "cross_entropy", {}, False)
        states.append(np.concatenate(logprobs))
    np.testing.assert_allclose(*states, atol=1e-5)


def test_a_whole_model_names_what_it_cannot_compute(tmp_path: Path) -> None:
    host = host_of(HYBRID, "jax", tmp_path)
    model = Model("m", Shape(0), tmp_path / "m", seed=1)
    with pytest.raises(UserError, match="datum 0 has targets that are not its next tokens"):
        host.forward(model, answers(False), "cross_entropy", {}, True)
