"""Adapters under torch beside those of the JAX backend, transformers and PEFT."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM

from areal_x import export
from areal_x.algorithms.weighting import token_mean
from areal_x.batching.packing import pack
from areal_x.errors import ConfigError
from areal_x.hf import adapters, model_dir
from areal_x.protocols.trainer_config import LoRAConfig, OptimizerConfig
from areal_x_torch import loading, model
from areal_x_torch.lora import adaptable
from tests.backend_moves import LOSS, deviations, learn, recorded_batches, trainer
from tests.model_families import CASES, HYBRIDS
from tests.models import SEEING, trajectories, write_config
from tests.thorough import further

from .test_families import plain as plain_model

LORA = LoRAConfig(rank=3, alpha=6.0)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, warmup_steps=3, schedule="cosine", schedule_steps=8, weight_decay=0.1)


def make(directory, **changes):
    return trainer("torch", directory, **{"optimizer": OPTIMIZER, "lora": LORA, **changes})


@pytest.fixture(scope="module")
def batches(tiny_model_dir):
    return recorded_batches(8, make(tiny_model_dir), mean=1.0)


@pytest.fixture
def taught(tiny_model_dir, batches):
    """After two updates, so that no matrix is 0."""
    made = make(tiny_model_dir)
    for batch in batches[:2]:
        made.update(batch, LOSS)
    return made


@pytest.mark.parametrize("first, second", [("torch", "jax"), *further(("jax", "torch"))])
def test_a_run_of_adapters_moves_between_backends(tiny_model_dir, batches, first, second):
    pytest.importorskip("areal_x_jax")
    settings = {"optimizer": OPTIMIZER, "lora": LORA}
    moved, stayed = (learn(backends, tiny_model_dir, batches, **settings) for backends in ((first, second), (first,)))
    loss, largest, _ = deviations(moved, stayed)
    assert loss < 1e-5
    assert largest < 1e-4
    assert abs(stayed.losses[-1] - stayed.losses[0]) > 0.01


def test_adapters_begin_as_peft_draws_them_and_change_nothing(tiny_model_dir, batches):
    made, plain = make(tiny_model_dir), make(tiny_model_dir, lora=LoRAConfig())
    np.testing.assert_array_equal(made.logprobs(batches[0]), plain.logprobs(batches[0]))
    adapter = dict(made.adapter())
    assert len(adapter) == 2 * 2 * 7
    for name, x in adapter.items():
        if "lora_B" in name:
            assert not x.any()
        else:  # kaiming_uniform with a = sqrt(5)
            assert x.shape[0] == 3
            assert 0.8 < np.abs(x).max() * x.shape[1] ** 0.5 <= 1
    other = dict(make(tiny_model_dir, seed=1).adapter())
    assert any((x != other[name]).any() for name, x in adapter.items())


def test_only_adapters_are_trained_and_have_moments(tiny_model_dir, taught):
    plain = dict(model_dir.read_tensors(tiny_model_dir))
    now = {name: x.numpy() for name, x in model.named_tensors(taught.model).items()}
    for name, x in plain.items():
        np.testing.assert_array_equal(now[name], x)
    adapters = sum(x.size for _, x in taught.adapter())
    moments = (x for state in taught.optimizer.state.values() for name, x in state.items() if name != "step")
    assert sum(x.numel() for x in moments) == 2 * adapters
    assert sum(p.grad is not None for p in taught.model.parameters() if not p.requires_grad) == 0


def added(theirs, adapter):
    """Adds the products of LORA's matrices to transformers' own kernels."""
    for name, p in theirs.named_parameters():
        a, b = (adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight") for x in "AB")
        if a is not None:
            p += torch.tensor(b @ a) * (6.0 / 3)


def test_the_adapted_model_is_transformers_with_the_products_added(tiny_model_dir, taught, batches):
    adapter, theirs = dict(taught.adapter()), AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    with torch.no_grad():
        added(theirs, adapter)
        said = taught.logprobs(batches[0])
        tokens, segments = batches[0].tokens, batches[0].segment_ids
        for row in range(len(tokens)):
            first = torch.from_numpy(tokens[row][segments[row] == 1].astype(np.int64))
            logp = theirs(first[None]).logits[0, :-1].log_softmax(-1).gather(1, first[1:, None])[:, 0]
            np.testing.assert_allclose(said[row][segments[row] == 1][1:], logp, atol=1e-5)
    snapshot = taught.snapshot()
    for name, x in taught.weights():
        np.testing.assert_allclose(x, theirs.get_parameter(name).detach(), atol=1e-6)
        np.testing.assert_array_equal(snapshot[name].numpy(), x)
    assert snapshot.keys() == dict(taught.weights()).keys()


FIRST = ["phi3-0", "qwen3_next-0"]


# Those that torch alone gives adapters.
OTHERS = {"qwen3_vl": SEEING["qwen3_vl"]}
FURTHER = [x for x in CASES if x.endswith("-0") and x not in FIRST] + list(OTHERS)


@pytest.mark.parametrize("name", [*FIRST, *further(*FURTHER)])
def test_adapters_of_each_family_are_transformers_with_the_products_added(name, tmp_path):
    directory = write_config((CASES | OTHERS)[name], tmp_path)
    there = adaptable(loading.build(directory, "policy"))
    targets = tuple(sorted({module.rpartition(".")[2] for module in there}))
    made = make(directory, lora=replace(LORA, targets=targets))
    packed = pack(trajectories(17, 9), 32)
    batch = packed.batch.replace(
        proximal_logp=packed.batch.behavior_logp,
        advantages=packed.spread(np.array([1.0, -1.0], np.float32)),
        weights=np.asarray(token_mean(packed.batch.mask, packed.batch.segment_ids), np.float32),
    )
    for _ in range(2):  # after which no matrix is 0
        made.update(batch, LOSS)
    adapter, theirs = dict(made.adapter()), plain_model(directory)
    assert len(adapter) == 2 * len(there)
    with torch.no_grad():
        added(theirs, adapter)
        for said, trajectory in zip(packed.gather(made.logprobs(batch)), trajectories(17, 9), strict=True):
            tokens = torch.from_numpy(trajectory.tokens.astype(np.int64))
            logp = theirs(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            np.testing.assert_allclose(said[1:], logp, atol=4e-4 if name in HYBRIDS else 2e-5)


def test_the_export_is_the_adapters_model(tiny_model_dir, taught, batches, tmp_path):
    taught.save(tmp_path / "adapter")
    export.export(tmp_path / "adapter", tmp_path / "plain")
    plain = make(tmp_path / "plain", lora=LoRAConfig())
    np.testing.assert_allclose(plain.logprobs(batches[0]), taught.logprobs(batches[0]), atol=1e-5)


def test_targets_that_the_model_has_not_are_refused_before_it_is_read(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(loading, "fill", lambda *_: pytest.fail("the model was read"))
    with pytest.raises(ConfigError, match=r"without qkv_proj, as this model's kernels .* are q_proj, k_proj, .*, down_proj$"):
        make(tiny_model_dir, lora=LoRAConfig(3, 6.0, ("q_proj", "qkv_proj")))


def test_neither_shared_experts_nor_the_head_nor_what_sees_can_have_adapters():
    from transformers import AutoConfig, AutoModelForImageTextToText

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2_moe", **sizes, num_key_value_heads=1))
        sees = AutoModelForImageTextToText.from_config(AutoConfig.for_model("qwen2_5_vl", text_config=sizes))
    assert {name.rpartition(".")[2] for name in adaptable(made)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adaptable(sees)
    assert all(name.startswith("model.language_model.layers.") for name in adaptable(sees))


def test_in_bf16_the_base_is_bf16_and_the_adapters_are_not(tiny_model_dir, taught, batches, tmp_path):
    taught.save(tmp_path)
    rough = type(taught)(replace(taught.config, precision="bf16"))
    rough.restore(tmp_path)
    layer = rough.model.model.layers[0].self_attn.q_proj
    assert (layer.weight.dtype, layer.lora_A.weight.dtype) == (torch.bfloat16, torch.float32)
    assert {x.dtype.name for _, x in rough.weights()} == {"bfloat16"}
    assert {x.dtype for x in rough.snapshot().values()} == {torch.bfloat16}
    exact, found = taught.update(batches[2], LOSS)["loss"], rough.update(batches[2], LOSS)["loss"]
    assert found == pytest.approx(exact, rel=0.05)


def test_a_critics_score_is_trained_in_full_beside_its_adapters(tiny_model_dir, batches, tmp_path):
    def squared_error(policy, batch):
        return torch.where(batch.mask, (policy.values - 1) ** 2, 0), {}

    critic, again = (make(tiny_model_dir, head="value") for _ in range(2))
    said = [critic.update(batches[0], squared_error)["loss"] for _ in range(6)]
    assert said[-1] < 0.9 * said[0]
    critic.save(tmp_path)
    assert "base_model.model.score.weight" in dict(adapters.read(tmp_path))
    again.restore(tmp_path)
    np.testing.assert_array_equal(again.values(batches[1]), critic.values(batches[1]))


def test_peft_loads_what_was_saved_with_the_same_logits(tiny_model_dir, taught, tmp_path):
    peft = pytest.importorskip("peft")
    taught.save(tmp_path / "ours")
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    tokens = torch.arange(2, 30)[None]
    with torch.no_grad():
        expected, found = theirs(tokens).logits, taught.model(tokens).logits
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    written = dict(model_dir.read_file(tmp_path / "theirs" / adapters.WEIGHTS))
    assert written.keys() == dict(taught.adapter()).keys()
    assert json.loads((tmp_path / "theirs" / adapters.CONFIG).read_text())["r"] == 3
