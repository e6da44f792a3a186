"""The JAX backend's batched sampler: lanes that share their weights and compiled programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from areal_x.engines.lanes import Lanes, lanes_on_cpu
from areal_x.protocols.speculation import NOTHING, Speculation
from areal_x_jax.architecture import Architecture
from areal_x_jax.decode_step import unstack_layers
from areal_x_jax.lane import Lane
from areal_x_jax.parameters import Params, parameter_shapes
from areal_x_jax.prompt_images import Tower
from areal_x_jax.sharding import sampling_groups
from areal_x_jax.slot_adapters import SlotAdapters


class Sampler(Lanes):
    """An `areal_x.protocols.sampler.Sampler` with one lane for each group of devices that decodes
    together (see `sharding.sampling_groups`).

    On one CPU device there are several lanes: XLA runs programs as small as a decoding step on one
    core, so two lanes on two cores sample twice as many tokens per second.
    """

    def __init__(
        self,
        arch: Architecture,
        slots: int,
        context: int,
        lanes: int | None = None,
        mesh: Mesh | None = None,
        speculation: Speculation = NOTHING,
        draft: tuple[Architecture, Params] | None = None,
        adapted: Architecture | None = None,
        exact: bool = False,
    ) -> None:
        """adapted: the architecture of an adapter of any rank, of which requests may have one each; on
        one device. exact: a sequence's numbers do not depend on the others (areal_x_jax.lane)."""
        groups = (
            sampling_groups(mesh)
            if mesh is not None
            else [Mesh(jax.local_devices()[:1], ("tensor",))]
        )
        groups = groups[: max(n for n in range(1, len(groups) + 1) if slots % n == 0)]
        in_group = 1
        if len(groups) == 1:
            in_group = lanes or (lanes_on_cpu(slots) if jax.default_backend() == "cpu" else 1)
        size, calls = slots // (len(groups) * in_group), [CompileOnce() for _ in groups]
        self._groups = groups
        self._in_group = in_group
        self._unstack = jax.jit(partial(unstack_layers, arch=arch))
        each = [
            (group, call, whole_on(draft, group)) for group, call in zip(groups, calls, strict=True)
        ]
        towers = {} if arch.vision is None else {group: Tower(arch, group) for group in groups}
        self._adapters: SlotAdapters | None = None
        self._shapes: Params = {}
        if adapted is not None and adapted.adapters is not None:
            one_by_one = jax.default_backend() == "cpu"
            self._adapters = SlotAdapters(arch, adapted.adapters.kernels, one_by_one)
            self._shapes = parameter_shapes(adapted)["layers"]
        self._plain: list[Params] = []
        made = [
            Lane(
                arch,
                size,
                context,
                call,
                group,
                speculation,
                smaller,
                self._adapters,
                towers.get(group),
                exact,
            )
            for group, call, smaller in each
            for _ in range(in_group)
        ]
        self._first = made[0]
        super().__init__(made, self._lane_weights)

    @property
    def programs(self) -> int:
        """Number of compiled programs, the tower's left out; lanes of one device share them, because
        they have one size."""
        return self._first.programs + self._unstack._cache_size()

    def _lane_weights(self, snapshot: Params) -> list[Params]:
        apart = [
            self._unstack(jax.tree.map(partial(shard_on, group=group), snapshot))
            for group in self._groups
        ]
        self._plain = [weights for weights in apart for _ in range(self._in_group)]
        return self._adapted()

    def _adapted(self) -> list[Params]:
        """Returns each lane's weights with the adapters beside them."""
        if self._adapters is None:
            return self._plain
        return [self._adapters.beside(weights, self._shapes) for weights in self._plain]

    def put_adapter(self, name: str, adapter: Params) -> None:
        """See `areal_x.protocols.sampler.AdaptedSampler`."""
        assert self._adapters is not None
        self._adapters.put(name, adapter)
        self._adapt()

    def remove_adapter(self, name: str) -> None:
        assert self._adapters is not None
        self._adapters.remove(name)
        self._adapt()

    def _adapt(self) -> None:
        for lane, weights in zip(self.lanes, self._adapted(), strict=True):
            assert isinstance(lane, Lane)
            lane.adapt(weights)


def whole_on(
    draft: tuple[Architecture, Params] | None, group: Mesh
) -> tuple[Architecture, Params] | None:
    """Returns the smaller model, unstacked, with all of its weights on each device of a group."""
    if draft is None:
        return None
    arch, params = draft
    whole = NamedSharding(group, PartitionSpec()) if group.size > 1 else group.devices.flat[0]
    return arch, jax.device_put(unstack_layers(params, arch), whole)


def shard_on(x: jax.Array, group: Mesh) -> jax.Array:
    """Returns x on the devices of a group without a copy: each already has its part."""
    there = {shard.device: shard.data for shard in x.addressable_shards}
    parts = [there[device] for device in group.devices.flat]
    if len(parts) == 1:
        return parts[0]
    return jax.make_array_from_single_device_arrays(
        x.shape, NamedSharding(group, x.sharding.spec), parts
    )


class CompileOnce:
    """Calls functions by name, each name's first call exclusively: lanes that need one program at
    once would each compile it."""

    def __init__(self) -> None:
        self._turn = Lock()
        self._called: set[str] = set()

    def __call__(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name in self._called:
            return function(*arguments)
        with self._turn:
            result = function(*arguments)
            self._called.add(name)
            return result
