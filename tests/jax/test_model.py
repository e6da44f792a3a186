from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.errors import UserError
from areal_x.hf.model_dir import read_config, read_tensors
from areal_x_jax import head
from areal_x_jax.architecture import Architecture, read_architecture
from areal_x_jax.dense_attention import softcapped
from areal_x_jax.layer_scan import LayerRun, layer_runs
from areal_x_jax.model import head_kernel, hidden_states
from areal_x_jax.parameters import Params, parameter_shapes
from areal_x_jax.rope import Rope
from areal_x_jax.weights import from_tensors, places, to_tensors
from tests.models import MODELS, MORE, QWEN3, reference_model, sequences, torch_logits
from tests.thorough import further

MadeModel = Callable[[str], Path]
BASE = {**QWEN3, "architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6}
MIXED = {**MORE["qwen3-moe-between"], "architectures": ["Qwen3MoeForCausalLM"]}


def load(directory: Path) -> tuple[Architecture, Params]:
    arch = read_architecture(read_config(directory))
    return arch, from_tensors(arch, read_tensors(directory), str(directory))


def logits_of(arch: Architecture, params: Params, tokens: Any, segment_ids: Any, positions: Any) -> np.ndarray:
    hidden, _ = hidden_states(arch, params, jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(segment_ids))
    return np.asarray(softcapped(hidden @ head_kernel(params), arch.logit_softcap))


def logit_deviation(directory: Path) -> float:
    """The largest difference of any logit of a sequence from transformers'."""
    arch, params = load(directory)
    (tokens,) = sequences(40)
    ours = logits_of(arch, params, tokens[None], np.ones((1, 40), np.int32), np.arange(40)[None])[0]
    return float(np.abs(ours - torch_logits(directory, [tokens])[0]).max())


@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_logits_are_those_of_transformers(name: str, model_dir_of: MadeModel) -> None:
    assert logit_deviation(model_dir_of(name)) < 1e-4


def torch_gradients(directory: Path, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Returns gradients of the negative log-likelihood of tokens under the names of the files (one per expert)."""
    import torch

    model = reference_model(directory)
    ids = torch.tensor(tokens[None]).long()
    logp = torch.log_softmax(model(ids).logits[0, :-1], -1)
    (-logp[torch.arange(len(tokens) - 1), ids[0, 1:]].mean()).backward()
    found = {name: x.grad.numpy() for name, x in model.named_parameters() if x.grad is not None}
    for name in [name for name in found if "experts" in name and "proj" in name and "shared" not in name]:
        parts = np.split(found[name], 2, axis=1) if "gate_up" in name else [found[name]]
        module, kinds = name.rsplit(".", 1)[0], ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        for kind, part in zip(kinds, parts, strict=True):
            found |= {f"{module}.{expert}.{kind}.weight": x for expert, x in enumerate(part)}
        del found[name]
    return found


def gradient_deviation(directory: Path) -> float:
    """The largest difference of any gradient of a loss from transformers', relative to the largest of its tensor."""
    arch, params = load(directory)
    tokens = np.maximum(sequences(30)[0], 1)  # torch gives an embedding that pads, 0, no gradient

    @jax.jit
    def loss(params: Params, tokens: Any) -> Any:
        ids, positions = jnp.ones_like(tokens), jnp.arange(30)[None]
        hidden, _ = hidden_states(arch, params, tokens, positions, ids)
        logp, *_ = head.logprobs(hidden, head_kernel(params), tokens, ids, 1.0, 64, softcap=arch.logit_softcap)
        return -jnp.mean(logp[:, 1:])

    ours = dict(to_tensors(arch, jax.grad(loss)(params, jnp.asarray(tokens[None]))))
    theirs = torch_gradients(directory, tokens)
    assert ours.keys() == theirs.keys()
    # An expert that no token chose has a gradient of zeros.
    return max(float(np.abs(ours[name] - x).max() / max(np.abs(x).max(), 1e-6)) for name, x in theirs.items())


@pytest.mark.parametrize(
    "name", ["qwen2-moe-between", "gemma3", *further("qwen3-moe", "qwen3-biased", "llama3", "mistral-window")]
)
def test_gradients_are_those_of_transformers(name: str, model_dir_of: MadeModel) -> None:
    assert gradient_deviation(model_dir_of(name)) < 1e-3


def test_a_packed_row_gives_what_each_sequence_alone_gives(model_dir_of: MadeModel) -> None:
    arch, params = load(model_dir_of("qwen3"))
    alone = sequences(9, 1, 14)
    row = np.concatenate([*alone, np.full(6, 7, np.int32)])[None]
    ids = np.repeat([1, 2, 3, 0], [9, 1, 14, 6])[None]
    positions = np.concatenate([np.arange(len(s)) for s in alone] + [np.zeros(6, int)])[None]
    packed = logits_of(arch, params, row, ids, positions)[0]
    start = 0
    for s in alone:
        own = logits_of(arch, params, s[None], np.ones((1, len(s)), np.int32), np.arange(len(s))[None])[0]
        np.testing.assert_allclose(packed[start : start + len(s)], own, atol=1e-5)
        start += len(s)


def test_recomputing_layers_gives_the_same_gradients(model_dir_of: MadeModel) -> None:
    arch, params = load(model_dir_of("qwen2"))
    tokens = jnp.asarray(np.stack(sequences(16, 16)))
    ids, positions = jnp.ones((2, 16), jnp.int32), jnp.tile(jnp.arange(16), (2, 1))

    @jax.jit
    def each(params: Params) -> Any:
        return [
            jax.grad(lambda p, remat=remat: jnp.sum(hidden_states(arch, p, tokens, positions, ids, remat)[0] ** 2))(params)
            for remat in ("products", "attention", "layers")
        ]

    kept, *recomputed = each(params)
    for gradients in recomputed:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4), kept, gradients)


@pytest.mark.parametrize("change", [{}, MIXED])
def test_the_program_does_not_grow_with_depth(change: dict[str, Any]) -> None:
    def program(layers: int) -> int:
        arch = read_architecture({**BASE, **change, "num_hidden_layers": layers})
        ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
        gradient = jax.grad(lambda p, ids: jnp.sum(hidden_states(arch, p, ids, ids, ids)[0]))
        return len(jax.jit(gradient).lower(parameter_shapes(arch), ids).as_text().splitlines())

    assert program(4) == program(12)


@pytest.mark.parametrize(
    "kinds, expected",
    [
        ("ssss", [(0, 1, 4)]),
        ("dsdsds", [(0, 2, 3)]),
        ("dssss", [(0, 1, 1), (1, 1, 4)]),
        ("ddsddsds", [(0, 3, 2), (6, 1, 1), (7, 1, 1)]),
        ("sdssdd", [(0, 1, 1), (1, 1, 1), (2, 1, 2), (4, 1, 2)]),
        ("d", [(0, 1, 1)]),
    ],
)
def test_layers_are_scanned_in_the_fewest_kinds_of_bodies(kinds: str, expected: list[tuple[int, int, int]]) -> None:
    assert layer_runs(list(kinds)) == [LayerRun(*segment) for segment in expected]


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_segments_hold_every_layer_once_and_repeat_what_they_say(kinds: list[bool]) -> None:
    told = [kinds[segment.first + i % segment.period] for segment in layer_runs(kinds) for i in range(segment.count)]
    assert told == kinds


@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_tensors_go_in_and_come_out_under_the_same_names_with_the_same_bits(name: str, model_dir_of: MadeModel) -> None:
    arch, params = load(model_dir_of(name))
    read = dict(read_tensors(model_dir_of(name)))
    written = dict(to_tensors(arch, params))
    assert written.keys() == read.keys() == places(arch).keys()
    for tensor in read:
        np.testing.assert_array_equal(written[tensor], read[tensor])


def test_tensors_that_do_not_fit_the_config_are_listed(model_dir_of: MadeModel) -> None:
    arch = read_architecture(read_config(model_dir_of("qwen3")))
    tensors = dict(read_tensors(model_dir_of("qwen3")))
    without = {name: x for name, x in tensors.items() if name != "model.norm.weight"}
    with pytest.raises(UserError, match=r"here .*: missing model\.norm\.weight; left over extra\.weight"):
        from_tensors(arch, [*without.items(), ("extra.weight", np.zeros(3))], "here")
    with pytest.raises(UserError, match=r"model\.norm\.weight has the shape \(3,\), but its config\.json requires \(32,\)"):
        from_tensors(arch, [*without.items(), ("model.norm.weight", np.zeros(3))], "here")


def test_a_damaged_tensor_is_named(model_dir_of: MadeModel) -> None:
    arch = read_architecture(read_config(model_dir_of("qwen3")))
    tensors = dict(read_tensors(model_dir_of("qwen3")))
    tensors["model.layers.1.mlp.up_proj.weight"] = np.full((48, 32), np.nan, np.float32)
    with pytest.raises(UserError, match=r"here: model\.layers\.1\.mlp\.up_proj\.weight holds numbers that are not finite"):
        from_tensors(arch, tensors.items(), "here")


def test_what_scores_has_a_matrix_of_one_row_in_place_of_the_head(model_dir_of: MadeModel) -> None:
    for name in ("qwen3", "qwen3-tied"):
        config, tensors = read_config(model_dir_of(name)), dict(read_tensors(model_dir_of(name)))
        arch = read_architecture(config, "value")
        assert arch == read_architecture({**config, "architectures": ["Qwen3ForSequenceClassification"]}, "reward")
        params = from_tensors(arch, [*tensors.items(), ("score.weight", np.arange(32.0)[None])], "here")
        assert "head" not in params
        written = dict(to_tensors(arch, params))
        assert written.keys() == (tensors.keys() - {"lm_head.weight"}) | {"score.weight"}
        np.testing.assert_array_equal(written["score.weight"], np.arange(32.0)[None])
        with pytest.raises(UserError, match=r"missing score\.weight"):
            from_tensors(arch, tensors.items(), "here")


def test_many_missing_tensors_are_counted_and_not_all_named(model_dir_of: MadeModel) -> None:
    arch = read_architecture(read_config(model_dir_of("qwen3")))
    with pytest.raises(UserError, match=r"missing lm_head\.weight, .* and \d\d more"):
        from_tensors(arch, [], "here")


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM; it knows qwen3, .*gemma3_text"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope scaling 'dynamic'"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layers of the kind chunked_attention"),
        ({"hidden_act": "gelu"}, "the activation 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "a rotation of some features only"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_name(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        read_architecture(BASE | change)


def test_the_rotary_base_is_read_from_old_and_new_configs() -> None:
    old = read_architecture(BASE | {"rope_theta": 12345.0})
    new = read_architecture(BASE | {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}})
    assert old == new == replace(read_architecture(BASE), ropes=(Rope(12345.0),))
