"""The torch trainer against transformers, against a step written by hand, and against itself on other layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import areal_x_torch
from areal_x.algorithms import losses
from areal_x.algorithms.weighting import token_mean
from areal_x.batching.packing import pack
from areal_x.errors import ConfigError, UserError
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Trajectory
from areal_x_torch.sharding import check_model

LENGTHS = (9, 5, 12, 3, 7, 2)  # of the tests' sequences; the first two tokens are the prompt, of the shortest the first
VOCABULARY = 40
# A large eps keeps Adam's first steps proportional to the gradient, so that a wrong gradient shows and rounding does not.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-2, weight_decay=0.1, clip_norm=0.05)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def save_model(directory, kind, **changes):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **changes)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": save_model(root / "qwen3", "qwen3", head_dim=16, tie_word_embeddings=False),
        "qwen2": save_model(root / "qwen2", "qwen2", tie_word_embeddings=True),
        "llama": save_model(root / "llama", "llama"),
        "phi": save_model(root / "phi", "phi"),  # a bias in the head, LayerNorm, half-rotated heads
        "mistral": save_model(root / "mistral", "mistral", sliding_window=4),
    }


def trainer_of(directory, optimizer=OPTIMIZER, **changes):
    return areal_x_torch.create_trainer(TrainerConfig(model=ModelConfig(str(directory)), optimizer=optimizer, **changes))


def sequences():
    rng = np.random.default_rng(0)
    return [
        Trajectory.from_completion(
            rng.integers(0, VOCABULARY, min(2, n - 1)).astype(np.int32),
            rng.integers(0, VOCABULARY, n - min(2, n - 1)).astype(np.int32),
            rng.normal(-3.5, 0.3, n - min(2, n - 1)).astype(np.float32),
            np.zeros(n - min(2, n - 1), np.int32),
        )
        for n in LENGTHS
    ]


def batch_of(trajectories, row_length=16, order=None):
    """The packed batch and, for each trajectory, its tokens' places."""
    packed = pack(trajectories, row_length)
    batch = packed.batch
    advantages = packed.spread(np.array([1.0, -1.0, 0.5, 2.0, -0.3, 0.7][: len(trajectories)], np.float32))
    weights = np.asarray(token_mean(batch.mask, batch.segment_ids), np.float32)
    batch = batch.replace(proximal_logp=batch.behavior_logp, advantages=advantages, weights=weights)
    return (batch if order is None else batch.map(lambda x: x[order])), packed


def alone(directory, trajectory, temperature=1.0):
    """Log-probabilities of one sequence by transformers' own logits."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))[None]
    with torch.no_grad():
        logp = (model(tokens).logits / temperature).log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], logp.numpy()])


def all_weights(trainer):
    return {name: x.copy() for name, x in trainer.weights()}


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "phi", "mistral"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_packed_row_gives_what_transformers_gives_for_each_sequence_alone(models, kind, temperature):
    batch, packed = batch_of(sequences())
    trainer = trainer_of(models[kind], temperature=temperature, micro_batch_rows=1, head_chunk=5)
    logp = trainer.logprobs(batch)
    assert logp.dtype == np.float32
    assert (logp[batch.segment_ids == 0] == 0).all()
    for trajectory, ours in zip(sequences(), packed.gather(logp), strict=True):
        np.testing.assert_allclose(ours, alone(models[kind], trajectory, temperature), atol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_an_update_is_the_step_that_plain_torch_takes_on_each_sequence_alone(models, kind):
    batch, packed = batch_of(sequences())
    trainer = trainer_of(models[kind], replace(OPTIMIZER, warmup_steps=2), temperature=0.8)
    results = [trainer.update(batch, losses.ppo_clip) for _ in range(2)]

    model = AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32).eval()
    grouped = [[p for p in model.parameters() if (p.ndim >= 2) == matrix] for matrix in (True, False)]
    adamw = torch.optim.AdamW(
        [{"params": grouped[0], "weight_decay": 0.1}, {"params": grouped[1], "weight_decay": 0.0}], betas=(0.9, 0.98), eps=1e-2
    )
    for step, result in enumerate(results):
        adamw.zero_grad()
        total = 0.0
        fields = (packed.gather(x) for x in (batch.behavior_logp, batch.advantages, batch.weights, batch.mask))
        for trajectory, old, advantage, weight, mask in zip(sequences(), *fields, strict=True):
            tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))
            logp = (model(tokens[None]).logits[0] / 0.8).log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
            old, advantage, weight = (torch.from_numpy(x[1:]) for x in (old, advantage, weight * mask))
            ratio = (logp - old).exp()
            total = total + (weight * -torch.minimum(advantage * ratio, advantage * ratio.clip(0.8, 1.2))).sum()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        rate = 1e-2 * (step + 1) / 2
        for group in adamw.param_groups:
            group["lr"] = rate
        adamw.step()
        assert result["loss"] == pytest.approx(total.item(), abs=1e-6)
        assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert result["grad_norm"] > OPTIMIZER.clip_norm  # else the clip is not tested
        assert result["learning_rate"] == pytest.approx(rate, rel=1e-6)
    assert trainer.version == 2
    theirs = dict(model.named_parameters())
    for name, x in trainer.weights():
        np.testing.assert_allclose(x, theirs[name].detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "phi"])
def test_what_is_saved_has_the_tensors_that_save_pretrained_writes(models, kind, tmp_path):
    trainer = trainer_of(models[kind])
    trainer.update(batch_of(sequences())[0], losses.ppo_clip)
    trainer.save(tmp_path / "ours")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    ours = all_weights(trainer)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        np.testing.assert_array_equal(x, theirs[name])


def test_it_continues_what_the_jax_backend_saved(tiny_model_dir, tmp_path):
    pytest.importorskip("jax")
    jax_backend = pytest.importorskip("areal_x_jax")
    batch, _ = batch_of(sequences())
    config = TrainerConfig(model=ModelConfig(str(tiny_model_dir)), optimizer=OPTIMIZER)
    theirs = jax_backend.create_trainer(config)
    theirs.update(batch, losses.ppo_clip)
    theirs.save(tmp_path / "jax")
    ours = areal_x_torch.create_trainer(config)
    ours.restore(tmp_path / "jax")
    ours.save(tmp_path / "torch")
    for file in (model_dir.WEIGHTS, model_dir.MOMENTS):
        written, read = load_file(tmp_path / "jax" / file), load_file(tmp_path / "torch" / file)
        assert written.keys() == read.keys()
        for name, x in written.items():
            np.testing.assert_array_equal(x, read[name])
    mine, its = ours.update(batch, losses.ppo_clip), theirs.update(batch, losses.ppo_clip)
    assert mine["loss"] == pytest.approx(its["loss"], rel=1e-5, abs=1e-6)
    expected = dict(theirs.weights())
    for name, x in ours.weights():
        np.testing.assert_allclose(x, expected[name], atol=1e-5)


def test_bf16_computes_in_bf16_over_fp32_masters(models):
    batch, _ = batch_of(sequences())
    exact, rough = trainer_of(models["qwen3"]), trainer_of(models["qwen3"], precision="bf16")
    difference = np.abs(exact.logprobs(batch) - rough.logprobs(batch))
    assert 1e-5 < difference.max() < 0.2
    assert {x.dtype for x in rough.snapshot().values()} == {torch.bfloat16}
    assert {x.dtype.name for _, x in rough.weights()} == {"bfloat16"}
    assert {x.dtype for _, x in rough.device_weights()} == {torch.bfloat16}
    rough.update(batch, losses.ppo_clip)
    assert {p.dtype for p in rough.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("axis", ["data", "fsdp", "context", "tensor"])
def test_more_than_one_device_is_refused_by_name(models, axis):
    with pytest.raises(ConfigError, match=rf"mesh\.{axis} = 2"):
        trainer_of(models["qwen3"], mesh=MeshConfig(**{axis: 2}))


def test_heads_that_a_mesh_does_not_divide_are_refused(models):
    with pytest.raises(ConfigError, match=r"mesh\.tensor = 3 cannot work: it must be a divisor of .* num_attention_heads = 4"):
        check_model(models["qwen3"], MeshConfig(tensor=3, processes=3), None, learns=True)


def test_a_model_that_no_device_holds_is_refused_before_it_is_loaded(models):
    bytes_needed = 16 * sum(x.size for _, x in model_dir.read_tensors(models["qwen3"]))
    check_model(models["qwen3"], MeshConfig(), bytes_needed, learns=True)
    with pytest.raises(ConfigError, match=r"mesh\.fsdp = 2 cannot work: it must be at least 4, with as many mesh\.processes"):
        check_model(models["qwen3"], MeshConfig(fsdp=2, processes=2), bytes_needed // 4 + 4, learns=True)
    check_model(models["qwen3"], MeshConfig(fsdp=4, processes=4), bytes_needed // 4 + 4, learns=True)
    check_model(models["qwen3"], MeshConfig(fsdp=2, processes=2), bytes_needed // 4 + 4, learns=False)


def test_a_kind_of_model_that_transformers_does_not_know_is_said_so(models, tmp_path):
    model_dir.write_model(tmp_path / "other", models["llama"], {"x": np.ones(1, np.float32)}.items())
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps({**config, "model_type": "no_such_model"}))
    with pytest.raises(UserError, match="cannot load"):
        trainer_of(tmp_path / "other")


def test_a_tied_head_that_was_saved_twice_is_read_once(models, tmp_path):
    tensors = dict(model_dir.read_tensors(models["qwen2"]))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model_dir.write_model(tmp_path, models["qwen2"], tensors.items())
    assert "lm_head.weight" not in all_weights(trainer_of(tmp_path))


def test_a_head_that_was_saved_twice_and_differs_is_not_tied(models, tmp_path):
    tensors = dict(model_dir.read_tensors(models["qwen2"]))
    tensors["lm_head.weight"] = 2 * tensors["model.embed_tokens.weight"]
    model_dir.write_model(tmp_path, models["qwen2"], tensors.items())
    found = all_weights(trainer_of(tmp_path))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        np.testing.assert_array_equal(found[name], tensors[name])


def test_a_model_of_a_narrow_type_is_read_in_full_precision_and_buffers_are_transformers_own(models, tmp_path):
    AutoModelForCausalLM.from_pretrained(models["mistral"], dtype=torch.bfloat16).save_pretrained(tmp_path)
    ours, theirs = trainer_of(tmp_path).model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for mine, expected in (
        (dict(ours.named_parameters()), theirs.named_parameters()),
        (dict(ours.named_buffers()), theirs.named_buffers()),
    ):
        for name, x in expected:
            torch.testing.assert_close(mine.pop(name), x, atol=0, rtol=0)
        assert not mine


def test_a_loss_with_bound_hyperparameters_is_a_loss(models):
    batch, _ = batch_of(sequences())
    tight, loose = (
        trainer_of(models["qwen3"]).update(batch, partial(losses.ppo_clip, clip_low=c, clip_high=c))["clip_fraction"]
        for c in (0.01, 10.0)
    )
    assert tight > loose
