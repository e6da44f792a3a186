"""The torch backend computes the same as transformers with a model, or refuses it by name: windows, neighbours, lengths."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import AutoConfig

import areal_x_torch
from areal_x.batching.packing import pack
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x_torch import attention, compatibility, dummy_model, kv_cache, loading, model, rope
from areal_x_torch.images import check_sharing
from areal_x_torch.masks import Visible
from tests.families import compared, random_model, tiny
from tests.model_families import CASES, FAMILY_MODELS
from tests.models import SIZES, trajectories, write_config
from tests.thorough import further

# With windows by the mask alone (the first two), by layer or everywhere, latent keys, mixtures, blocks in parallel.
TAKEN = [
    "llama4_text",  # chunks, and a factor that grows with the position
    "qwen2_moe",
    "phimoe",
    "exaone4",
    "gemma4_text",
    "deepseek_v3",
    "olmo3",
    "cohere2",
    "gpt_neox",
    "gpt_oss",
    "gemma2",
    "granite",
]
REFUSED = {
    "doge": "does not train",  # computes its own mask
    "deepseek_v32": "does not train",  # selects the tokens that it sees
    "granitemoehybrid": "mix the sequences",
    "bloom": "does not let others replace",
}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [8.0, 4.0, 3.0, 9.0]}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}
PHI = {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "pad_token_id": None, "eos_token_id": 1}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
STATIC = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("model_type", [*TAKEN, *further(*(x for x in FAMILY_MODELS if x not in TAKEN))])
def test_packed_rows_with_neighbours_and_samples_beyond_the_window_are_those_of_transformers(tmp_path, model_type):
    assert compared(model_type, tmp_path).startswith("agrees")


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_would_be_computed_otherwise_is_refused_by_name(tmp_path, model_type):
    found = compared(model_type, tmp_path)
    assert found.startswith("refused")
    assert REFUSED[model_type] in found


@pytest.fixture
def ignored_masks(monkeypatch):
    """Attention that knows no more of windows than what it is told beside the mask."""
    monkeypatch.setattr(compatibility, "_passed", set())
    for module in (attention, kv_cache):
        monkeypatch.setattr(module, "seen_of", lambda layer, mask, sliding_window: Visible(sliding_window))


@pytest.mark.parametrize("model_type", ["qwen2_moe", "phimoe"])
def test_the_probe_sees_a_window_that_attention_does_not_know_of(ignored_masks, tmp_path, model_type):
    assert "rules beyond a window" in compared(model_type, tmp_path)


def test_the_probe_sees_windows_of_real_sizes(ignored_masks, tmp_path):
    """No sequence of the probe has as many tokens as the window of the config."""
    config = AutoConfig.for_model("phimoe", **SIZES, num_local_experts=2, sliding_window=2047)
    random_model(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="rules beyond a window"):
        loading.build(tmp_path, "policy")


def test_what_is_short_stays_in_order_and_other_numbers_stay():
    with torch.device("meta"):
        model = dummy_model.make_dummy(random_of(tiny("gemma2")))
    model.config.sliding_window, model.config.attention_chunk_size, model.config.max_window_layers = 4096, 8192, 28
    assert compatibility.shorten(model) == [4, 7, 10]  # the layers' own is 5
    assert (model.config.sliding_window, model.config.attention_chunk_size) == (7, 10)
    assert {layer.self_attn.sliding_window for layer in model.model.layers} == {4, None}
    assert model.config.max_window_layers == 28


def test_the_probe_sees_scaled_logits(monkeypatch, tmp_path):
    monkeypatch.setattr(compatibility, "_passed", set())
    monkeypatch.setattr(model, "logit_scale_of", lambda model: 1.0)
    assert "scales its logits" in compared("granite", tmp_path)


def random_of(config):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config)


def test_a_model_is_probed_once_in_a_process(tmp_path, monkeypatch):
    directory = write_config({**SIZES, "model_type": "llama", "head_dim": 4}, tmp_path)
    loading.build(directory, "policy")
    monkeypatch.setattr(compatibility, "make_dummy", lambda model: pytest.fail("it is probed again"))
    loading.build(directory, "policy")


def test_check_refuses_what_construction_refuses(tmp_path):
    random_model(tiny("deepseek_v32")).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="choose among the keys that its mask shows"):
        areal_x_torch.check(TrainerConfig(model=ModelConfig(str(tmp_path))))


# ---- rotations that change with a sequence's length


def turning(directory, rope):
    """A model that turns sequences of up to 32 tokens alike."""
    if rope["rope_type"] == "longrope":  # as Phi-3's files say it
        return write_config({**SIZES, "model_type": "phi3", **PHI, "rope_parameters": rope}, directory)
    return write_config({**SIZES, "model_type": "llama", "max_position_embeddings": 32, "rope_parameters": rope}, directory)


def settings(directory, row_length=0):
    return TrainerConfig(model=ModelConfig(str(directory)), row_length=row_length)


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC])
def test_rows_of_sequences_that_may_be_turned_unlike_are_refused(tmp_path, rope):
    directory, kind = turning(tmp_path, rope), rope["rope_type"]
    for refuse in (areal_x_torch.check, areal_x_torch.create_trainer):
        with pytest.raises(ConfigError, match=rf"train\.row_length = 33 .* at most 32 with .* rotations \({kind}\)"):
            refuse(settings(directory, 33))
    trainer = areal_x_torch.create_trainer(settings(directory, 32))
    with pytest.raises(ConfigError, match=r"embedded\.context = 33 .* at most 32"):
        trainer.sampler(2, 33)
    with pytest.raises(UserError, match=r"a sequence has 33 tokens: give sequences of at most 32"):
        trainer.logprobs(pack(trajectories(33), 40).batch)


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC])
def test_up_to_that_length_a_sequence_is_what_it_is_alone(tmp_path, rope):
    trainer = areal_x_torch.create_trainer(settings(turning(tmp_path, rope), 32))
    both = pack(trajectories(32, 9), 64)
    together = both.gather(trainer.logprobs(both.batch))
    for i, length in enumerate((32, 9)):
        alone = pack(trajectories(32, 9)[i : i + 1], 64)
        np.testing.assert_allclose(together[i], alone.gather(trainer.logprobs(alone.batch))[0], atol=1e-5)
        assert len(together[i]) == length


def test_static_scalings_have_rows_of_any_length(tmp_path):
    directory = turning(tmp_path, STATIC)
    assert rope.stable_length(AutoConfig.from_pretrained(directory)) is None
    areal_x_torch.create_trainer(settings(directory, 1000))


def test_the_length_of_one_kind_of_layers_counts():
    config = AutoConfig.for_model("gemma3_text")
    of_full = LONGROPE | {"original_max_position_embeddings": 32}
    config.rope_parameters = {"full_attention": of_full, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    assert rope.stable_length(config) == (32, "longrope")


def test_a_prompt_is_not_shared_by_sequences_that_are_cut_into_chunks(tmp_path):
    config = AutoConfig.for_model("llama4_text", num_hidden_layers=4)
    check_sharing(False, tmp_path, config)
    with pytest.raises(ConfigError, match="chunks of a sequence are not counted from a prompt on"):
        check_sharing(True, tmp_path, config)


def test_a_multimodal_llama_4_is_no_critic_and_says_so(tmp_path):
    write_config(CASES["llama4-0"], tmp_path)
    with pytest.raises(UserError, match=r"is a llama4, .*use train\.backend = 'jax'"):
        loading.build(tmp_path, "value")
