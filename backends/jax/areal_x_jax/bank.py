"""Many adapters beside one frozen model, which train at once (areal_x.protocols.adapter_bank).

Each adapter has arrays of its own rank. For a pass, those of its rows are cut into blocks of columns and
stacked, [layers, blocks, in, columns] with zeros in the last block of each, and each row multiplies with
its own (areal_x_jax.row_adapters); one adapter alone is padded to a rank. What is padded is 0 and its
gradient too. Numbers of rows and blocks and the rank are powers of two, so that passes share compiled
programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32, Int32

from areal_x.protocols.adapter_bank import NO_ADAPTER, AdapterState, Evaluate
from areal_x.protocols.trainer_config import EXPERTS, LoRAConfig, OptimizerConfig, TrainerConfig
from areal_x.protocols.tries import continued, subtree_ends
from areal_x.types import Batch
from areal_x_jax import adapter_blocks, lora, optimizers
from areal_x_jax.adapter_blocks import BLOCK, count_blocks, rank_axis
from areal_x_jax.architecture import Architecture
from areal_x_jax.forward import Rows
from areal_x_jax.packed_cudnn import run_ends
from areal_x_jax.parameters import Params, parameter_shapes
from areal_x_jax.row_adapters import RowBlocks, power
from areal_x_jax.sampler import Sampler
from areal_x_jax.trainer import Trainer
from areal_x_jax.weights import from_tensors, places, to_tensors

MOMENTS = "exp_avg", "exp_avg_sq"
LEAST_RANK = 4
LEAST_LENGTH = 32  # of rows of which only a part is computed


@dataclass(eq=False)
class Adapter:
    """One adapter's state: trees of its parameters' shapes. fresh: of requests that are not
    settled."""

    arch: Architecture
    scale: float
    parameters: Params
    moments: tuple[Params, Params] | None = None
    """None before the first step."""

    steps: int = 0
    gradient: Params | None = None
    fresh: Params | None = None

    @property
    def rank(self) -> int:
        assert self.arch.adapters is not None
        return self.arch.adapters.rank

    @property
    def blocks(self) -> int:
        return count_blocks(self.rank)


class Bank:
    """An `areal_x.protocols.adapter_bank.AdapterBank` on one device."""

    def __init__(self, config: TrainerConfig) -> None:
        if any(target.startswith(EXPERTS) for target in config.lora.targets):
            raise NotImplementedError("adapters of experts train one at a time")
        if config.precision == "fp8":
            raise NotImplementedError("adapters beside fp8 products train one at a time")
        self.config = config
        frozen = replace(config, frozen=True, lora=replace(config.lora, rank=0))
        self.trainer = Trainer(frozen)
        if self.trainer.mesh.size > 1:
            raise NotImplementedError("a bank of adapters is on one device")
        self.trained(replace(config.lora, rank=1))  # refuses targets that the model lacks
        self._adapters: dict[str, Adapter] = {}
        self._logp = jax.jit(self._logprobs)
        self._add = jax.jit(partial(jax.tree.map, jnp.add), donate_argnums=0)
        self._padded = jax.jit(padded, static_argnums=1)
        self._blocks = jax.jit(blocks_of, static_argnums=(1, 2))
        self._stacked = jax.jit(lambda trees: jax.tree.map(lambda *x: jnp.stack(x, 1), *trees))
        self._part = jax.jit(part_of, static_argnums=1)
        self._joined = jax.jit(joined, static_argnums=2)
        self._step = jax.jit(partial(step, config.optimizer), donate_argnums=(0, 1, 2))

    def trained(self, config: LoRAConfig) -> Architecture:
        return lora.trained_architecture(self.trainer.arch, config)

    # ---- adapters

    def shapes(self, config: LoRAConfig) -> dict[str, tuple[int, ...]]:
        return {name: place.tensor for name, place in places(self.trained(config)).items()}

    def put(self, name: str, config: LoRAConfig, state: AdapterState) -> None:
        arch = self.trained(config)

        def read(tensors: Any) -> Params:
            return from_tensors(arch, tensors, f"the adapter {name}", self.trainer.partitioner)

        def moment(name: str) -> Params:
            prefix = f"{name}."
            own = (
                (x.removeprefix(prefix), y)
                for x, y in state.moments.items()
                if x.startswith(prefix)
            )
            return read(own)

        moments = (moment(MOMENTS[0]), moment(MOMENTS[1])) if state.moments else None
        made = read(state.tensors.items())
        self._adapters[name] = Adapter(arch, config.scale, made, moments, state.steps)

    def get(self, name: str) -> AdapterState:
        own = self._adapters[name]

        def read(params: Params) -> dict[str, np.ndarray]:
            # Copies: a step may reuse the memory.
            return {tensor: np.array(x) for tensor, x in to_tensors(own.arch, params)}

        moments = {
            f"{moment}.{tensor}": x
            for moment, of in zip(MOMENTS, own.moments or (), strict=False)
            for tensor, x in read(of).items()
        }
        return AdapterState(read(own.parameters), moments, own.steps)

    def remove(self, name: str) -> None:
        self._adapters.pop(name, None)

    def nbytes(self) -> int:
        return sum(
            x.nbytes
            for own in self._adapters.values()
            for x in jax.tree.leaves((own.parameters, own.moments, own.gradient, own.fresh))
        )

    # ---- passes

    def logprobs(
        self, batch: Batch, adapters: Int32[np.ndarray, " rows"], names: Sequence[str]
    ) -> Float32[np.ndarray, "rows length"]:
        rows, own = self._rows(batch, adapters, names)
        logp = self._logp(*self._stacks(own, rows), self.trainer.params, rows)
        return masked(logp, batch)

    def add_gradients(
        self,
        batch: Batch,
        adapters: Int32[np.ndarray, " rows"],
        names: Sequence[str],
        evaluate: Evaluate,
    ) -> Float32[np.ndarray, "rows length"]:
        rows, own = self._rows(batch, adapters, names)
        stacks, scales = self._stacks(own, rows)
        # Both passes are compiled; between them the loss is evaluated on the host.
        logp, pull = jax.vjp(lambda x: self._logp(x, scales, self.trainer.params, rows), stacks)
        logprobs = masked(logp, batch)
        factors = np.zeros(logp.shape, np.float32)
        factors[: len(logprobs)] = evaluate(logprobs)
        if factors.any():
            (gradients,) = pull(jnp.asarray(-factors))
            first = 0
            for adapter in own:
                shapes = shapes_of(adapter.arch)
                if rows.adapters is None:
                    found = {"layers": self._part(gradients, shapes)}
                else:
                    blocks = np.arange(first, first + adapter.blocks, dtype=np.int32)
                    found = {"layers": self._joined(gradients, blocks, shapes)}
                    first += adapter.blocks
                before = adapter.fresh
                adapter.fresh = found if before is None else self._add(before, found)
        return logprobs

    def _rows(
        self, batch: Batch, adapters: Int32[np.ndarray, " rows"], names: Sequence[str]
    ) -> tuple[Rows, list[Adapter]]:
        """Returns rows on the device, a power of two of them, and the adapters that some have."""
        self.trainer.check_tokens(batch, self.trainer.arch.vocab)
        chosen = [index for index in np.unique(adapters) if index != NO_ADAPTER]
        own = [self._adapters[names[index]] for index in chosen]
        count = len(adapters)
        more = (1 << (count - 1).bit_length()) - count

        def put(x: np.ndarray) -> Array:
            return jnp.asarray(np.pad(np.asarray(x), ((0, more), *[(0, 0)] * (x.ndim - 1))))

        ends = until = computed = None
        segments = np.asarray(batch.segment_ids)
        if batch.parents is not None:
            followed = continued(np.asarray(batch.parents), segments, LEAST_LENGTH)
            segments = followed.segment_ids()
            if followed.branches():
                of_rows = zip(followed.parents, segments, strict=True)
                until = put(np.stack([subtree_ends(*row) for row in of_rows]).astype(np.int32))
            tokens, positions, mask = (
                np.take_along_axis(np.asarray(x), np.maximum(followed.at, 0), axis=1)
                for x in (batch.tokens, batch.positions, batch.mask)
            )
            computed = Batch(tokens, segments, positions, mask & (segments > 0)).map(put)
            batch = batch.replace(parents=followed.before)
        if self.trainer._reads_ends:
            found = run_ends(segments)
            ends = None if found is None else put(found)
        which = None
        if own and not (adapters == chosen[0]).all():
            rows_of = [np.flatnonzero(adapters == index) for index in chosen]
            which = RowBlocks.of(rows_of, [x.blocks for x in own], count + more)
        return Rows(batch.map(put), None, ends, until, which, computed), own

    def _stacks(self, own: Sequence[Adapter], rows: Rows) -> tuple[Params, Array]:
        """Returns the kernels of the rows' adapters and their scales: blocks, [layers, blocks, in,
        columns] and [layers, blocks, columns, out], or of one that all rows have without the axis of
        blocks."""
        if not own:
            return {}, jnp.zeros(())
        if rows.adapters is None:
            rank = power(max(LEAST_RANK, own[0].rank))
            shapes = shapes_of(self.trained(replace(self.config.lora, rank=rank)))
            return self._padded(own[0].parameters["layers"], shapes), jnp.float32(own[0].scale)
        shapes = shapes_of(self.trained(replace(self.config.lora, rank=BLOCK)))
        blocks, scales = [], []
        for x in own:
            blocks += self._blocks(x.parameters["layers"], shapes, x.blocks)
            scales += [x.scale] * x.blocks
        missing = power(len(blocks)) - len(blocks)
        blocks += self._blocks({}, shapes, 1) * missing
        each = np.array(scales + [0.0] * missing, np.float32)[:, None, None]
        return self._stacked(blocks), jnp.asarray(each)

    def _logprobs(self, stacks: Params, scales: Array, base: Params, rows: Rows) -> Array:
        own = {name: x * scales if name.endswith("_lora_b") else x for name, x in stacks.items()}
        params = {**base, "layers": {**base["layers"], **own}}
        policy, _ = self.trainer.forward.policy(params, None, rows)
        assert policy.logp is not None
        logp: Array = policy.logp
        return logp

    def settle(self, name: str, keep: bool) -> None:
        own = self._adapters[name]
        if keep and own.fresh is not None:
            own.gradient = own.fresh if own.gradient is None else self._add(own.gradient, own.fresh)
        own.fresh = None

    def step(self, name: str, optimizer: OptimizerConfig) -> dict[str, float]:
        own = self._adapters[name]
        gradient = own.gradient
        if gradient is None:
            gradient = jax.tree.map(jnp.zeros_like, own.parameters)
        own.gradient = None
        settings = optimizers.settings_of(optimizer, own.steps)
        if own.moments is None:
            zeros = partial(jax.tree.map, jnp.zeros_like, own.parameters)
            own.moments = zeros(), zeros()
        own.parameters, *moments, norm = self._step(
            own.parameters, *own.moments, np.int32(own.steps), gradient, settings
        )
        own.moments = moments[0], moments[1]
        own.steps += 1
        norm = float(norm)
        rate = optimizer.learning_rate
        return {
            "grad_norm": norm,
            "learning_rate": rate,
            "skipped": float(not math.isfinite(norm)),
        }

    # ---- sampling

    def snapshot(self) -> Params:
        return self.trainer.snapshot()

    def adapter(self, name: str) -> Params:
        own = self._adapters[name]
        return {
            leaf: x * own.scale if leaf.endswith("_lora_b") else x + 0  # a copy: steps donate
            for leaf, x in own.parameters["layers"].items()
        }

    def sampler(self, slots: int, context: int, exact: bool) -> Sampler:
        arch = self.trainer.arch
        longest = min(context, arch.context or context)
        adapted = self.trained(replace(self.config.lora, rank=1))
        mesh = self.trainer.mesh
        return Sampler(arch, slots, longest, mesh=mesh, adapted=adapted, exact=exact)


def masked(logp: Array, batch: Batch) -> Float32[np.ndarray, "rows length"]:
    rows: np.ndarray = np.asarray(logp)[: len(batch.mask)]
    return np.where(batch.mask, rows, np.float32(0))


Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def shapes_of(arch: Architecture) -> Shapes:
    """Returns the shapes of an adapter's kernels by their names."""
    return tuple((name, x.shape) for name, x in parameter_shapes(arch)["layers"].items())


def padded(layers: Params, shapes: Shapes) -> Params:
    """Returns an adapter's kernels with zeros up to these shapes, and zeros for those it lacks."""

    def whole(name: str, shape: tuple[int, ...]) -> Array:
        if name not in layers:
            return jnp.zeros(shape)
        x = layers[name]
        return jnp.pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)])

    return {name: whole(name, shape) for name, shape in shapes}


def part_of(kernels: Params, shapes: Shapes) -> Params:
    """Returns an adapter's kernels without what was padded."""
    return {name: kernels[name][tuple(slice(n) for n in shape)] for name, shape in shapes}


def blocks_of(layers: Params, shapes: Shapes, count: int) -> list[Params]:
    """Returns an adapter's kernels as blocks of these shapes, with zeros after its rank and for those
    that it lacks."""

    def part(name: str, shape: tuple[int, ...]) -> Array:
        if name not in layers:
            return jnp.zeros((shape[0], count, *shape[1:]))
        return adapter_blocks.blocks_of(name, layers[name])

    parts = {name: part(name, shape) for name, shape in shapes}
    return [{name: x[:, block] for name, x in parts.items()} for block in range(count)]


def joined(stacks: Params, blocks: Array, shapes: Shapes) -> Params:
    """Returns the kernels whose blocks these are, without what was padded."""

    def part(name: str) -> Array:
        axis = rank_axis(name)
        own = jnp.moveaxis(stacks[name][:, blocks], 1, axis)  # its columns follow the blocks
        return own.reshape(*own.shape[:axis], -1, *own.shape[axis + 2 :])

    return part_of({name: part(name) for name, _ in shapes}, shapes)


def step(
    config: OptimizerConfig,
    params: Params,
    mu: Params,
    nu: Params,
    steps: Array,
    gradient: Params,
    settings: optimizers.Settings,
) -> tuple[Params, Params, Params, Array]:
    """Returns an adapter and its moments after a step of AdamW, unless its gradient is not finite,
    and the gradient's norm."""
    optimizer = optimizers.with_settings(config, settings)
    state = optax.tree.set(optimizer.init(params), mu=mu, nu=nu, count=steps)
    norm = optax.tree.norm(gradient)
    updates, after = optimizer.update(gradient, state, params)
    new = (
        optax.apply_updates(params, updates),
        optax.tree.get(after, "mu"),
        optax.tree.get(after, "nu"),
    )
    kept = jax.tree.map(lambda x, old: jnp.where(jnp.isfinite(norm), x, old), new, (params, mu, nu))
    return *kept, norm
