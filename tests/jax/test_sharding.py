"""Whatever the mesh, the same numbers; and what does not fit a mesh is refused before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from areal_x.errors import ConfigError, UserError
from areal_x.protocols.trainer_config import MeshConfig
from areal_x_jax.architecture import read_architecture
from areal_x_jax.row_attention import repeat_heads
from areal_x_jax.sharding import AXES, ONE_DEVICE, Partitioner, check_divisible, make_partitioner, staged
from tests.model_families import CASES
from tests.models import DIVISIBLE, MODELS, MORE
from tests.thorough import further, thorough

from .meshes import learn, learn_on

MadeModel = Callable[[str], Path]
MESHES = {
    "even": (
        {"fsdp": 8},
        {"fsdp": 2, "tensor": 4},
        {"fsdp": 2, "tensor": 2, "context": 2},
        {"stage": 2, "fsdp": 2, "tensor": 2},
    ),
    # Untied and tied heads, and routers' biases, whose layers are in the order of stages.
    "even-deep": (
        {"stage": 2, "stage_chunks": 2, "fsdp": 2, "tensor": 2},
        {"stage": 4, "stage_chunks": 2, "data": 2},
        {"stage": 2, "stage_chunks": 4, "context": 2, "data": 2},
    ),
    "even-moe-deep": ({"stage": 2, "stage_chunks": 2, "data": 2, "expert": 2},),
    "even-latent-deep": ({"stage": 2, "stage_chunks": 2, "expert": 2, "tensor": 2}, {"stage": 4, "stage_chunks": 2, "fsdp": 2}),
    "even-moe": ({"data": 2, "expert": 4}, {"data": 2, "expert": 2, "tensor": 2}, {"stage": 2, "data": 2, "expert": 2}),
    "even-latent": ({"fsdp": 2, "tensor": 2, "context": 2}, {"stage": 2, "expert": 2, "tensor": 2}),
    "even-gemma3": ({"fsdp": 2, "context": 2, "tensor": 2}, {"stage": 4, "context": 2}),
    "even-gemma4": ({"fsdp": 2, "context": 2, "tensor": 2}, {"stage": 2, "expert": 2, "tensor": 2}),
}
# Of the parameters, how much the first device has at most: norms are whole, and "expert" splits experts alone, not what stands
# between them.
SHARE = {"even": 0.3, "even-moe": 0.75, "even-latent": 0.5, "even-gemma3": 0.3, "even-gemma4": 0.5}
SHARE |= {"even-deep": 0.55, "even-moe-deep": 0.5, "even-latent-deep": 0.5}


@thorough
@pytest.mark.parametrize("name", ["even", *further(*[name for name in MESHES if name != "even"])])
def test_ten_updates_are_the_same_on_every_mesh_with_a_rest_on_the_host_in_between(name: str, model_dir_of: MadeModel) -> None:
    alone = learn(model_dir_of(name), {})
    assert alone["share"] == alone["programs"] == 1
    others = learn_on(model_dir_of(name), MESHES[name], JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    for mesh, found in zip(MESHES[name], others, strict=True):
        np.testing.assert_allclose(found["loss"], alone["loss"], rtol=1e-5, atol=1e-6, err_msg=str(mesh))
        np.testing.assert_allclose(found["grad_norm"], alone["grad_norm"], rtol=1e-4, err_msg=str(mesh))
        np.testing.assert_allclose(found["violation"], alone["violation"], atol=1e-6, err_msg=str(mesh))
        np.testing.assert_allclose(found["logp"], alone["logp"], atol=1e-4, err_msg=str(mesh))
        assert found["programs"] == 1
        assert found["share"] < SHARE[name]
        awake, resting, again = found["on devices"]
        assert awake == again > resting == 0


@pytest.mark.parametrize(
    "name, axis, size, says",
    [
        ("qwen3-one", "tensor", 4, "mesh.tensor = 4 does not divide the 6 features of the keys"),
        ("qwen3", "tensor", 3, "mesh.tensor = 3 does not divide the 4 heads"),
        ("qwen3-biased", "tensor", 4, "mesh.tensor = 4 does not divide the 50 entries of the vocabulary"),
        ("qwen3", "fsdp", 5, "mesh.fsdp = 5 does not divide the 32 features"),
        ("qwen3-moe", "expert", 3, "mesh.expert = 3 does not divide the 4 experts"),
        ("qwen2-moe-odd", "tensor", 2, "mesh.tensor = 2 does not divide the 41 features of the shared expert"),
        ("qwen3", "expert", 2, "mesh.expert = 2 needs a model with experts"),
        ("latent", "tensor", 3, "mesh.tensor = 3 does not divide the 8 heads"),
        ("latent", "fsdp", 32, "mesh.fsdp = 32 does not divide the 24 features of the keys' latent vector"),
        ("latent", "stage", 3, "mesh.stage = 3 gives stages different kinds of layers, as the layers 0 have no experts"),
        ("qwen3", "stage", 3, "mesh.stage = 3 does not divide the 2 layers"),
        ("qwen2-moe-odd", "stage", 2, "mesh.stage = 2 gives stages different kinds of layers, as the layers 0 have no experts"),
        (
            "even-moe",
            "stage_chunks",
            2,
            "mesh.stage = 2 · mesh.stage_chunks = 2 gives stages different kinds of layers, as the",
        ),
        ("qwen3", "stage_chunks", 2, "mesh.stage = 2 · mesh.stage_chunks = 2 does not divide the 2 layers"),
        ("gemma4", "stage", 2, "as the layers 2, 5 have full attention and the layers 3, 4, 5 share keys and values of others"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_refused(name: str, axis: str, size: int, says: str) -> None:
    class Sized(Partitioner):
        def size(self, *axes: str) -> int:
            return size if axis in axes else 1

    architectures = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM"}
    architectures |= {"deepseek_v3": "DeepseekV3ForCausalLM", "gemma4_text": "Gemma4ForCausalLM"}
    odd = {"qwen2-moe-odd": MORE["qwen2-moe"] | {"shared_expert_intermediate_size": 41, "mlp_only_layers": [0]}}
    odd |= {"gemma4": CASES["gemma4_text-0"] | {"vocab_size": 48}, "qwen3-one": MODELS["qwen3-tied"] | {"head_dim": 6}}
    odd["latent"] = DIVISIBLE["even-latent"] | {"num_hidden_layers": 3, "first_k_dense_replace": 1}
    config = (MODELS | MORE | DIVISIBLE | odd)[name]
    arch = read_architecture({**config, "architectures": [architectures[str(config["model_type"])]]})
    of_stages = {"stage": {"stage": size}, "stage_chunks": {"stage": 2, "stage_chunks": size}}.get(axis, {})
    with pytest.raises(UserError, match=says.replace(".", r"\.")):
        check_divisible(Sized(), staged(arch, MeshConfig(**of_stages)))


@pytest.mark.parametrize("key_heads, devices, repeated", [(1, 4, 4), (2, 4, 4), (3, 2, 6), (6, 4, 12), (4, 2, 4)])
def test_each_query_finds_its_key_head_where_heads_are_repeated_for_a_tensor_group(
    key_heads: int, devices: int, repeated: int
) -> None:
    heads = 12
    found = np.asarray(repeat_heads(jnp.arange(key_heads).reshape(1, 1, -1, 1), devices)).reshape(-1)
    assert len(found) == repeated
    for query in range(heads):
        assert found[query // (heads // repeated)] == query // (heads // key_heads)


@pytest.mark.parametrize("axis", AXES)
def test_a_mesh_of_other_than_the_devices_is_refused(axis: str) -> None:
    with pytest.raises(ConfigError, match=rf"mesh\.{axis} = 64 .*mesh\.data = -1"):
        make_partitioner(MeshConfig(**{axis: 64}))
    with pytest.raises(ConfigError, match=rf"mesh\.{axis} = 0"):
        MeshConfig(**{axis: 0})


def test_sequence_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.sequence = True .* False with train\.backend = 'jax': use mesh\.context"):
        make_partitioner(MeshConfig(tensor=2, sequence=True))


def test_one_device_alone_says_nothing_to_the_compiler() -> None:
    x = np.ones(3)
    assert ONE_DEVICE.constrain(x, "hidden") is x
