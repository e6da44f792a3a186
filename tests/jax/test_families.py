"""Every family that the JAX backend trains, in several shapes: the numbers of transformers in packed rows, gradients, files,
adapters and samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_x.algorithms.losses import ppo_clip
from areal_x.batching.packing import pack
from areal_x.errors import ConfigError, UserError
from areal_x.hf.model_dir import read_config, read_tensors, write_model
from areal_x.protocols.trainer_config import EXPERTS, LoRAConfig
from areal_x.testing.conformance.helpers import sample_to_end, slot_request
from areal_x_jax import head
from areal_x_jax.architecture import Architecture, read_architecture
from areal_x_jax.families import FAMILIES
from areal_x_jax.model import head_kernel, hidden_states
from areal_x_jax.parameters import Params, adapter_targets, layer_leaves
from areal_x_jax.weights import from_tensors, tensors_beside, to_tensors
from tests.model_families import CASES, FAMILY_MODELS, HYBRIDS, MULTIMODAL_MODELS
from tests.models import log_softmax, reference_model, sequences, torch_logits, trajectories, write_config
from tests.thorough import further

from .config_fields import packed_logprobs
from .family_meshes import deviations_of
from .test_lora import LORA, assert_near, expected_logprobs, logprobs, randomised, with_products
from .test_trainer import LENGTHS, learnable, make_trainer

# Their shapes have been in other tests for long.
FORMER = {"qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama", "mistral", "gemma3_text"}
NEWER = [name for name in CASES if name.rpartition("-")[0] not in FORMER]
# Of parts that others have.
COMPOSED = {"deepseek_v2", "glm4_moe_lite", "dots1", "solar_open", "youtu", "ernie4_5_moe", "gemma4_unified_text"}
COMPOSED |= {"qwen3_next", "mixtral", "olmo2", "phi3"}
COMPOSED |= MULTIMODAL_MODELS.keys() - {"gemma3"}
FIRST = [name for name in NEWER if name.endswith("-0") and name.rpartition("-")[0] not in COMPOSED]
GRADIENTS = ["gpt_oss-0", "cohere2-0", "deepseek_v3-0", "qwen3_next-0"]
SAMPLED = ["gpt_oss-0", "deepseek_v3-0", "qwen3_5_text-0"]
OTHERS = [name for name in CASES if name not in NEWER]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: write_config(CASES[name], tmp_path_factory.mktemp(name), seed=len(name)))


Directories = Callable[[str], Path]


def test_every_family_has_shapes_here_and_heads_of_both_kinds() -> None:
    seen = {family.model_type for family in FAMILIES.values() if family.module or not family.has_vision}
    assert seen == FAMILY_MODELS.keys()
    for family, shapes in FAMILY_MODELS.items():
        assert len(shapes) >= 4
        names = [{**config, "architectures": [name]} for config in shapes for name in architectures(family)]
        assert {read_architecture(config).tied for config in names} == {True, False}, family


def architectures(model_type: str) -> list[str]:
    return [name for name, family in FAMILIES.items() if family.model_type == model_type]


@pytest.mark.parametrize("name", [*FIRST, *further(*(x for x in NEWER if x not in FIRST), *OTHERS)])
def test_packed_rows_are_each_sequence_alone_in_transformers_and_files_go_round_with_the_same_bits(
    name: str, directory_of: Directories, tmp_path: Path
) -> None:
    directory, rows = directory_of(name), sequences(19, 1, 11)
    arch = read_architecture(read_config(directory))
    # A chain of corrections to a state rounds more than attention does: transformers' own fp32 is up to 2e-3 from its float64,
    # in which torch computes no experts.
    theirs = torch_logits(directory, rows, exact=name in HYBRIDS and arch.experts is None)
    atol = 5e-4 if name in HYBRIDS else 1e-4
    for ours, logits in zip(packed_logprobs(arch, directory, rows), theirs, strict=True):
        np.testing.assert_allclose(ours, log_softmax(logits), rtol=1e-5, atol=atol)
    read = dict(read_tensors(directory))
    params = from_tensors(arch, read.items(), str(directory))
    written = chain(to_tensors(arch, params), tensors_beside(arch, directory))
    write_model(tmp_path / "written", directory, written)
    again = dict(read_tensors(tmp_path / "written"))
    assert again.keys() == read.keys()
    assert all(np.array_equal(again[tensor], x) for tensor, x in read.items())


def torch_gradients(directory: Path, tokens: np.ndarray, place: Path) -> dict[str, np.ndarray]:
    """Returns transformers' gradients of the negative log-likelihood under the names of its files: it saves them in place of
    the parameters."""
    import torch

    model = reference_model(directory)
    ids = torch.tensor(tokens[None]).long()
    logp = torch.log_softmax(model(ids).logits[0, :-1], -1)
    (-logp[torch.arange(len(tokens) - 1), ids[0, 1:]].mean()).backward()
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "layer_scalar")):  # which no gradient trains
            buffer.zero_()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(place)
    return dict(read_tensors(place))


@pytest.mark.parametrize("name", [*GRADIENTS, *further(*(x for x in CASES if x not in GRADIENTS))])
def test_gradients_are_those_of_transformers(name: str, directory_of: Directories, tmp_path: Path) -> None:
    directory = directory_of(name)
    arch = read_architecture(read_config(directory))
    params = from_tensors(arch, read_tensors(directory), str(directory))
    tokens = np.maximum(sequences(30)[0], 2)  # torch gives an embedding that pads no gradient

    @jax.jit
    def loss(params: Params, tokens: Any) -> Any:
        ids, positions = jnp.ones_like(tokens), jnp.arange(30)[None]
        hidden, _ = hidden_states(arch, params, tokens, positions, ids, implementation="blocked")
        logp, *_ = head.logprobs(hidden, head_kernel(params), tokens, ids, 1.0, 64, softcap=arch.logit_softcap)
        return -jnp.mean(logp[:, 1:])

    ours = dict(to_tensors(arch, jax.grad(loss)(params, jnp.asarray(tokens[None]))))
    theirs = torch_gradients(directory, tokens, tmp_path)
    assert ours.keys() == theirs.keys() - dict(tensors_beside(arch, directory)).keys()
    theirs = {tensor: theirs[tensor] for tensor in ours}
    # That of a bias of keys is 0 but for rounding in layers without rotation: it adds the same to all scores.
    least = 1e-3 * max(np.abs(x).max() for x in theirs.values())
    far = {tensor: float(np.abs(ours[tensor] - x).max() / max(np.abs(x).max(), least)) for tensor, x in theirs.items()}
    assert max(far.values()) < 1e-3, max(far, key=far.__getitem__)


@pytest.mark.parametrize("name", [*SAMPLED, *further(*(x for x in NEWER if x not in SAMPLED))])
def test_what_is_sampled_with_the_cache_has_the_log_probabilities_of_the_whole_sequence(
    name: str, directory_of: Directories
) -> None:
    """Of prompts longer than a prefill's chunk and shorter than a window, in one part of the cache and in several, and of one
    token where another sequence was."""
    directory = directory_of(name)
    trainer = make_trainer(directory)
    sampler = trainer.sampler(4, 160)
    sampler.load(trainer.snapshot())
    for prompts in ((90, 3, 1, 40), (1,)):
        requests = [slot_request(slot, prompt, 12, seed=slot) for slot, prompt in enumerate(prompts)]
        for slot, (tokens, said) in sample_to_end(sampler, requests).items():
            assert len(tokens) == 12
            whole = np.append(requests[slot].tokens, tokens).astype(np.int32)
            logits = torch_logits(directory, [whole])[0]
            at = np.arange(len(whole) - 12, len(whole))
            np.testing.assert_allclose(said, log_softmax(logits)[at - 1, whole[at]], atol=1e-4)


@pytest.mark.parametrize("name", ["phi3-0", *further(*(x for x in CASES if x != "phi3-0"))])
def test_adapters_of_every_kernel_are_transformers_with_their_products_added(name: str, directory_of: Directories) -> None:
    """But experts' (tests/test_expert_adapters.py)."""
    directory = directory_of(name)
    arch = read_architecture(read_config(directory))
    leaves = layer_leaves(arch)
    targets = {target: kernels for target, kernels in adapter_targets(arch).items() if not target.startswith(EXPERTS)}
    trainer = randomised(make_trainer(directory, lora=replace(LORA, targets=tuple(targets))))
    adapter = dict(trainer.adapter())
    assert len(adapter) == 2 * sum(len(arch.layers_in(leaves[kernel].stack)) for kernel in chain(*targets.values()))
    _, logits = with_products(directory, adapter)
    # A delta rule's state adds up the rounding of all tokens before: transformers' own log-probabilities move by 1e-4 where
    # each weight moves by a rounding, and by more than 6 without the adapter of one kernel.
    assert_near(logprobs(trainer), expected_logprobs(logits), 2e-3 if name in HYBRIDS else 1e-4)
    trainer.update(learnable(pack(trajectories(*LENGTHS), 32)), ppo_clip)
    assert all(np.abs(x - adapter[tensor]).max() > 0 for tensor, x in trainer.adapter())


# Fewer key heads than devices: with sinks, a wide norm of keys, and one head in full layers only.
OTHER_HEADS = ("gemma4_text-1", "gemma4_unified_text-1", "gpt_oss-1", "olmo2-2", "llama-1", "qwen3_next-1")


@pytest.mark.parametrize("name", further(*(x for x in CASES if x.endswith("-0") or x in OTHER_HEADS)))
def test_meshes_compute_the_numbers_of_one_device(name: str, directory_of: Directories) -> None:
    (found,) = deviations_of([directory_of(name)])
    assert found.keys() >= {"fsdp", "tensor", "context"}
    assert max(found.values()) < 1e-3, found


@pytest.mark.parametrize(
    "name, change, complaint",
    [
        ("cohere-0", {"use_qk_norm": True}, "use_qk_norm = True"),
        (
            "phi3-0",
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
            "longrope",
        ),
        ("gpt_oss-0", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("gpt_oss-0", {"hidden_act": "gelu_pytorch_tanh"}, "'gelu_pytorch_tanh' where this family clamps another"),
        (
            "smollm3-0",
            {"no_rope_layers": [1], "layer_types": ["full_attention"] * 4},
            "no_rope_layers has 1 entries for 4 layers",
        ),
        ("glm4-0", {"head_dim": 6}, "heads of 6 features, of which 3"),
        ("llama-0", {"embedding_multiplier": 2.0}, "embedding_multiplier"),
        ("llama-0", {"rope_interleave": True}, "rope_interleave = True"),
        ("qwen3-0", {"n_routed_experts": 4}, "n_routed_experts = 4"),
        ("deepseek_v2-0", {"norm_topk_prob": True}, "norm_topk_prob = True, which transformers leaves out"),
        ("deepseek_v2-0", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        ("deepseek_v2-0", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ("deepseek_v3-0", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        ("deepseek_v3-0", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek_v3-0", {"n_group": 3}, "n_group = 3 does not divide the 8 experts"),
        ("deepseek_v3-0", {"n_group": 8}, "n_group = 8 does not divide the 8 experts into groups of at least 2"),
        (
            "deepseek_v3-0",
            {"num_experts_per_tok": 5},
            "num_experts_per_tok = 5 cannot be chosen from topk_group = 2 of 4 groups",
        ),
        ("deepseek_v3-0", {"num_key_value_heads": 2}, "num_key_value_heads = 2 beside 4 heads of latent attention"),
        ("deepseek_v3-0", {"head_dim": 12}, "head_dim = 12 beside qk_rope_head_dim = 4"),
        (
            "deepseek_v3-0",
            {"qk_rope_head_dim": 5},
            "heads of 5 features, of which 5 are rotated|even rotary dimension, but got `head_dim`=5",
        ),
        ("deepseek_v3-0", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("glm4_moe_lite-0", {"first_k_dense_replace": 2}, "first_k_dense_replace = 2"),
        ("dots1-0", {"n_shared_experts": 0}, "a shared expert without features"),
        ("ernie4_5_moe-0", {"use_bias": True}, "use_bias = True"),
        ("gemma4_text-0", {"num_kv_shared_layers": 6}, "num_kv_shared_layers = 6 of 6 layers leave none of the kind full_att"),
        ("gemma4_text-0", {"use_bidirectional_attention": "all"}, "bidirectional attention"),
        ("gemma4_text-0", {"vocab_size_per_layer_input": 40}, "vocab_size_per_layer_input = 40, less than vocab_size = 50"),
        ("gemma4_text-0", {"global_head_dim": 15}, "head_dim = 15 of layers of the kind full_attention is odd"),
        ("gemma4_text-0", {"per_layer_config": {"1": {"intermediate_size": 64}}}, "per_layer_config with intermediate_size"),
        ("gemma4_text-0", {"per_layer_config": {"1": {"head_dim": 4}}}, "several shapes in layers of the kind sliding_att"),
        ("gemma4_text-1", {"num_global_key_value_heads": 3}, "num_key_value_heads = 3 of layers of the kind full_attention"),
        ("gemma4_text-1", {"top_k_experts": None}, "enable_moe_block needs num_experts, .* 4, 16 and None"),
        (
            "gemma4_text-1",
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            "none for layers",
        ),
    ],
)
def test_what_a_family_lacks_is_refused_by_name(name: str, change: dict[str, Any], complaint: str) -> None:
    config = {**CASES[name], "architectures": architectures(name.rpartition("-")[0])} | change
    with pytest.raises(UserError, match=complaint):
        read_architecture(config)


def test_targets_that_a_fused_kernel_replaces_are_refused_with_its_name(directory_of: Directories) -> None:
    with pytest.raises(ConfigError, match="qkv_proj, o_proj, gate_up_proj, down_proj"):
        make_trainer(directory_of("phi3-0"), lora=LoRAConfig(rank=2))


def test_a_critic_reads_states_that_are_not_scaled_as_logits_are() -> None:
    config = {**CASES["granite-0"], "architectures": ["GraniteForCausalLM"]}
    assert read_architecture(config).logit_scale == 0.25
    assert read_architecture(config, "value").logit_scale == 1


def test_one_architecture_is_one_program(directory_of: Directories) -> None:
    """jax caches programs by the architecture, which must hash."""
    arch: Architecture = read_architecture(read_config(directory_of("gpt_oss-0")))
    assert hash(arch) == hash(read_architecture(read_config(directory_of("gpt_oss-0"))))
