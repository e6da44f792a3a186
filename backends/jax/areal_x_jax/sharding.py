"""The mesh of devices, and the one table of the mesh axes over which each kind of array axis is
sharded.

    stage     layers, through which rows go in turns (areal_x_jax.pipeline)
    data      copies of the model, each with its own rows
    fsdp      its own rows too; parameters are sharded, and gathered layer by layer as they are needed
    expert    its own rows too; each device has some of the experts, and gathers its group's tokens
    context   parts of every row: keys and values are gathered for the attention
    tensor    heads, the width of the MLP, the vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from areal_x.errors import ConfigError, UserError
from areal_x.protocols.trainer_config import MeshConfig
from areal_x_jax.architecture import STACKS, Architecture
from areal_x_jax.parameters import Params, parameter_axes

AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
ROW_AXES = ("data", "fsdp", "expert")
RULES: dict[str, str | tuple[str, ...] | None] = {
    # parameters
    **dict.fromkeys(STACKS, "stage"),
    "vocab": "tensor",
    "hidden": "fsdp",
    "input_vocab": "tensor",
    "table_width": "fsdp",
    "query": "tensor",
    "query_and_gate": "tensor",
    "key": "tensor",
    "attended": "tensor",
    "full_query": "tensor",
    "full_key": "tensor",
    "full_attended": "tensor",
    "doubled_intermediate": "tensor",
    "query_latent": "fsdp",
    "latent": "fsdp",
    "keys_and_values": "tensor",
    "query_and_keys": "tensor",
    "intermediate": "tensor",
    "gate_and_up": "tensor",
    "shared_intermediate": "tensor",
    "experts": "expert",
    "expert_intermediate": "tensor",
    "expert_gate_and_up": "tensor",
    # A tower is small beside its decoder: each device of a tensor group computes all of it.
    "vision_hidden": "fsdp",
    "vision_wide": "fsdp",
    # activations
    "stages": "stage",
    "rows": ROW_AXES,
    "length": "context",
    "heads": "tensor",
}


@dataclass(frozen=True)
class Partitioner:
    """A mesh and how arrays are sharded over it; None for one device, where no array is sharded."""

    mesh: Mesh | None = None

    def size(self, *axes: str) -> int:
        return 1 if self.mesh is None else prod(self.mesh.shape[axis] for axis in axes)

    def spec(self, *axes: str | None) -> PartitionSpec:
        """axes: the kind of each array axis; those that are not in RULES are not sharded."""
        return PartitionSpec(*(RULES.get(axis) if axis else None for axis in axes))

    def sharding(self, *axes: str | None) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, self.spec(*axes))

    def constrain(self, x: Array, *axes: str | None) -> Array:
        """Constrains x to be sharded as its axes require."""
        return (
            x
            if self.mesh is None or self.mesh.size == 1
            else jax.lax.with_sharding_constraint(x, self.sharding(*axes))
        )

    def gathered(self, params: Params, axes: Mapping[str, tuple[str, ...]]) -> Params:
        """Returns a layer's parameters gathered for computing: sharded over tensor and expert
        only."""
        if self.size("fsdp") == 1:
            return params
        whole = {
            name: [None if RULES.get(axis) == "fsdp" else axis for axis in own]
            for name, own in axes.items()
        }
        return {name: self.constrain(x, *whole[name]) for name, x in params.items()}

    def shard_map(
        self, function: Callable[..., Any], inputs: Any, outputs: Any, axes: tuple[str, ...] = AXES
    ) -> Callable[..., Any]:
        """Returns a function that each device calls with its own shards. inputs, outputs: partition
        specs; axes: mesh axes that the function is mapped over."""
        return partial(jax.shard_map, mesh=self.mesh, axis_names=set(axes), check_vma=False)(
            function, in_specs=inputs, out_specs=outputs
        )


ONE_DEVICE = Partitioner()


def put_sharded(x: np.ndarray, sharding: NamedSharding | None) -> Array:
    """Puts x on the devices: on those of this process, if other processes have a part of it and
    call this too."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(np.shape(x), sharding, lambda index: np.asarray(x)[index])


def addressable(x: Array) -> Array:
    """Returns x where this process can read all of it: on its first device, if other processes have
    a part and call this too."""
    if not isinstance(x, Array) or x.is_fully_addressable:
        return x
    if not x.is_fully_replicated:
        x = _replicate(NamedSharding(x.sharding.mesh, PartitionSpec()))(x)
    return x.addressable_data(0)


@cache
def _replicate(sharding: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=sharding)


def make_partitioner(config: MeshConfig) -> Partitioner:
    """Divides all devices, of this process or of all processes, as the config describes.

    Raises: ConfigError if the mesh does not fit the devices.
    """
    devices = jax.devices() if config.processes > 1 else jax.local_devices()
    sizes = sizes_of(config, len(devices))
    mesh = jax.make_mesh(
        tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
    )
    return Partitioner(mesh)


def sizes_of(config: MeshConfig, devices: int) -> dict[str, int]:
    """Returns the size of each axis for this number of devices.

    Raises: ConfigError if the mesh needs another number.
    """
    if config.sequence:
        raise ConfigError(
            "mesh.sequence", True, "False with train.backend = 'jax': use mesh.context"
        )
    sizes = {axis: getattr(config, axis) for axis in AXES}
    others = prod(size for axis, size in sizes.items() if axis != "data")
    if sizes["data"] == -1:
        sizes["data"] = max(devices // others, 1)
    needed = prod(sizes.values())
    if needed != devices:
        wrong = next((axis for axis in AXES if axis != "data" and sizes[axis] != 1), "data")
        asked = (
            " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1) or "data 1"
        )
        wanted = (
            f"a size with which the mesh, {asked}, has the {devices} devices that are available, not"
            f" {needed}"
        )
        raise ConfigError(
            f"mesh.{wrong}",
            getattr(config, wrong),
            f"{wanted} (mesh.data = -1 uses all remaining ones)",
        )
    return sizes


def staged(arch: Architecture, config: MeshConfig) -> Architecture:
    """Returns the architecture with the stages of a mesh, in whose order its stacks then are."""
    return replace(arch, stages=(config.stage, config.stage_chunks))


def check_divisible(partitioner: Partitioner, arch: Architecture) -> None:
    """Raises: UserError for a mesh that does not divide the model, before anything is allocated."""
    counts = {
        "heads": ("tensor", arch.heads),
        # Heads that are fewer are computed by several devices (areal_x_jax.row_attention).
        "features of the keys": ("tensor", arch.kv_heads * arch.head_dim),
        "entries of the vocabulary": ("tensor", arch.vocab),
        "features of the MLP": (
            "tensor",
            arch.intermediate
            if arch.experts is None or arch.experts.dense or arch.experts.beside
            else 0,
        ),
        "features of the keys of full layers": (
            "tensor",
            arch.varied.kv_heads * arch.varied.head_dim if arch.varied else 0,
        ),
        "entries of the layers' embeddings": (
            "tensor",
            arch.varied.input_vocab if arch.varied else 0,
        ),
        "features of the layers' embeddings": (
            "fsdp",
            arch.layers * arch.varied.inputs if arch.varied else 0,
        ),
        "key heads of the delta rule": ("tensor", arch.delta.key_heads if arch.delta else 0),
        "features of an expert": ("tensor", arch.experts.intermediate if arch.experts else 0),
        "features of the shared expert": ("tensor", arch.experts.shared if arch.experts else 0),
        "features of the model": ("fsdp", arch.hidden),
        "features of the keys' latent vector": ("fsdp", arch.latent.rank if arch.latent else 0),
        "features of the queries' latent vector": (
            "fsdp",
            arch.latent.query_rank if arch.latent else 0,
        ),
        "features of the vision tower": (
            "fsdp",
            arch.vision.hidden if arch.vision else partitioner.size("fsdp"),
        ),
        "experts": ("expert", arch.experts.count if arch.experts else partitioner.size("expert")),
    }
    for what, (axis, count) in counts.items():
        if count % partitioner.size(axis):
            raise UserError(
                f"mesh.{axis} = {partitioner.size(axis)} does not divide the {count} {what}: give it a"
                " size that does"
            )
    check_stages(arch)
    if arch.experts is None and partitioner.size("expert") > 1:
        raise UserError(
            f"mesh.expert = {partitioner.size('expert')} needs a model with experts: use mesh.data or"
            " mesh.fsdp"
        )


def check_stages(arch: Architecture) -> None:
    """Raises: UserError for a model whose layers cannot be divided among its stages."""
    stages, groups = arch.stages
    if stages == 1:
        return
    asked = f"mesh.stage = {stages}" + (f" · mesh.stage_chunks = {groups}" if groups > 1 else "")
    if arch.layers % (stages * groups):
        raise UserError(
            f"{asked} does not divide the {arch.layers} layers: give it a size that does"
        )
    if arch.vision is not None and arch.vision.sections:
        raise UserError(
            f"mesh.stage = {stages} cannot divide a model with a vision tower: use mesh.fsdp or"
            " mesh.tensor"
        )
    each, kinds = arch.layers // (stages * groups), arch.kinds()
    if any(kind != kinds[layer % each] for layer, kind in enumerate(kinds)):
        parts = (
            ("dense", "have no experts"),
            ("recurrent", "have a gated delta rule"),
            ("full", "have full attention"),
        )
        reason = " and ".join(
            f"the layers {', '.join(map(str, own))} {what}"
            for stack, what in parts
            if (own := arch.layers_in(stack))
        )
        if arch.varied and (own := arch.varied.sharing):
            reason += f" and the layers {', '.join(map(str, own))} share keys and values of others"
        raise UserError(
            f"{asked} gives stages different kinds of layers, as {reason}: all must have"
            " the same, use mesh.expert or mesh.fsdp"
        )


def sampling_groups(mesh: Mesh) -> list[Mesh]:
    """Returns the devices of this process in groups that decode together: each shards heads and
    vocabulary as the axis "tensor" does, and has all of the rest. If such a group would span
    processes, each device is its own group."""
    groups = mesh.devices.reshape(-1, mesh.shape["tensor"])
    if any(len({device.process_index for device in group}) > 1 for group in groups):
        groups = mesh.devices.reshape(-1, 1)
    own = [group for group in groups if group[0].process_index == jax.process_index()]
    return [Mesh(group, ("tensor",), axis_types=(AxisType.Auto,)) for group in own]


def sampling_spec(group: Mesh, axes: tuple[str, ...]) -> PartitionSpec:
    """Returns how an array with these axes is sharded over such a group."""
    split = group.size > 1
    return PartitionSpec(
        *("tensor" if split and RULES.get(axis) == "tensor" else None for axis in axes)
    )


def sampling_shardings(partitioner: Partitioner, arch: Architecture) -> Params:
    """Returns the shardings of the parameters that `sampling_groups` decode with, on the whole
    mesh: each group finds its own parts there."""
    assert partitioner.mesh is not None
    (group, *_), mesh = sampling_groups(partitioner.mesh), partitioner.mesh
    return jax.tree.map(
        lambda own: NamedSharding(mesh, sampling_spec(group, own)),
        parameter_axes(arch),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def parameter_shardings(partitioner: Partitioner, arch: Architecture) -> Params:
    """Returns the sharding of each parameter."""
    return jax.tree.map(
        lambda axes: partitioner.sharding(*axes),
        parameter_axes(arch),
        is_leaf=lambda x: isinstance(x, tuple),
    )
