"""Many adapters beside one frozen model, which train at once (areal_x.protocols.adapter_bank).

    flat row     a a a a b b b c c c c c       one product with the frozen weight for all tokens,
    adapters     ── A ── ─ B ─ ─── C ───       and two small ones for each adapter's tokens

The gradient of an adapter is written by the backward pass into its own buffer, and the parameters,
gradient and moments of an adapter are one flat tensor each: a step is one fused operation, and no
rank is padded to another's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.optim.adamw import adamw

from areal_x.errors import UserError
from areal_x.hf.adapters import MATRICES, PEFT_PREFIX
from areal_x.protocols.adapter_bank import NO_ADAPTER, AdapterState, Evaluate
from areal_x.protocols.trainer_config import EXPERTS, LoRAConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch
from areal_x_torch import decoder_blocks, lora, model, rope
from areal_x_torch.device import memory_of
from areal_x_torch.flat_rows import continued_rows, flatten_rows, to_tensor
from areal_x_torch.sampler import Sampler
from areal_x_torch.slot_adapters import AdapterMatrices
from areal_x_torch.split_linear import SplitLinear
from areal_x_torch.trainer import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")


class Bank:
    """An `areal_x.protocols.adapter_bank.AdapterBank` on one device."""

    def __init__(self, config: TrainerConfig) -> None:
        check(config)
        frozen = replace(config, frozen=True, compile=False, lora=replace(config.lora, rank=0))
        self.trainer = Trainer(frozen)
        self.model = self.trainer.model
        self.device = self.trainer.device
        lora.check_targets(self.trainer.directory, config.lora)
        self._chosen = Chosen()
        self._layers: dict[str, AdaptedLinear] = {}
        for name, plain in lora.adaptable(self.model).items():
            if name.rpartition(".")[2] in config.lora.targets:
                self._layers[name] = AdaptedLinear(plain, name, self._chosen)
                self.model.set_submodule(name, self._layers[name])
        memory = memory_of(self.device)
        if memory is not None:
            decoder_blocks.recompute_as(self.model, config, self.trainer.dtype, memory)
        self._adapters: dict[str, Adapter] = {}

    # ---- adapters

    def shapes(self, config: LoRAConfig) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for name, layer in self._layers.items():
            if name.rpartition(".")[2] in config.targets:
                both = (config.rank, layer.in_features), (layer.out_features, config.rank)
                for suffix, shape in zip(MATRICES, both, strict=True):
                    found[f"{PEFT_PREFIX}{name}{suffix}"] = shape
        return found

    def put(self, name: str, config: LoRAConfig, state: AdapterState) -> None:
        adapter = Adapter(self.shapes(config), config.scale, self.device)
        adapter.write(adapter.parameters, state.tensors)
        if state.moments:
            for moment, flat in zip(MOMENTS, adapter.both_moments(), strict=True):
                own = {x: state.moments.get(f"{moment}.{x}", np.zeros(0)) for x in adapter.places}
                adapter.write(flat, own)
        adapter.steps.fill_(state.steps)
        self._adapters[name] = adapter

    def get(self, name: str) -> AdapterState:
        own = self._adapters[name]
        of_moments = () if own.moments is None else zip(MOMENTS, own.moments, strict=True)
        moments = {f"{m}.{x}": y for m, flat in of_moments for x, y in own.read(flat).items()}
        return AdapterState(own.read(own.parameters), moments, int(own.steps))

    def remove(self, name: str) -> None:
        self._adapters.pop(name, None)

    def nbytes(self) -> int:
        return sum(x.nbytes for own in self._adapters.values() for x in own.tensors())

    # ---- passes

    def logprobs(
        self, batch: Batch, adapters: Int32[np.ndarray, " rows"], names: Sequence[str]
    ) -> Float32[np.ndarray, "rows length"]:
        return self._pass(batch, adapters, names, None)

    def add_gradients(
        self,
        batch: Batch,
        adapters: Int32[np.ndarray, " rows"],
        names: Sequence[str],
        evaluate: Evaluate,
    ) -> Float32[np.ndarray, "rows length"]:
        for index in np.unique(adapters[adapters != NO_ADAPTER]):
            self._adapters[names[index]].begin()
        return self._pass(batch, adapters, names, evaluate)

    def _pass(
        self,
        batch: Batch,
        adapters: Int32[np.ndarray, " rows"],
        names: Sequence[str],
        evaluate: Evaluate | None,
    ) -> Float32[np.ndarray, "rows length"]:
        self.trainer._check(batch, self.model, self.trainer.directory)
        self.trainer.check_tokens(batch, model.vocabulary_size(self.model))
        packed = batch.map(np.asarray)
        segments, size = packed.segment_ids, packed.tokens.size
        if packed.parents is None:
            (flat,) = flatten_rows(segments, size)
        else:
            (flat,) = continued_rows(segments, packed.parents, size)
        of_tokens = flat.take(np.broadcast_to(adapters[:, None], packed.shape))
        own = [
            (self._adapters[names[index]], places_of(of_tokens == index))
            for index in np.unique(of_tokens)
            if index != NO_ADAPTER
        ]
        with self._chosen.being(own), torch.set_grad_enabled(evaluate is not None):
            policy = self.trainer.forward.policy(packed, packed.mask, [flat])
            assert policy.logp is not None
            logprobs: np.ndarray = policy.logp.detach().cpu().numpy()
            if evaluate is not None:
                factors = evaluate(logprobs)
                if own and factors.any():
                    policy.logp.backward(-to_tensor(factors, self.device))
                    for adapter, _ in own:
                        adapter.written = True
        return logprobs

    def settle(self, name: str, keep: bool) -> None:
        self._adapters[name].settle(keep)

    def step(self, name: str, optimizer: OptimizerConfig) -> dict[str, float]:
        return self._adapters[name].step(optimizer)

    # ---- sampling

    def snapshot(self) -> dict[str, Tensor]:
        return self.trainer.snapshot()

    def adapter(self, name: str) -> AdapterMatrices:
        own = self._adapters[name]
        found = {}
        for layer in self._layers:
            if (part := own.of(layer)) is not None:
                found[layer] = part.a.clone(), part.b * part.scale
        return found

    def sampler(self, slots: int, context: int, exact: bool) -> Sampler:
        trainer = self.trainer
        rope.check_length("embedded.context", context, self.model.config, trainer.directory)
        given = self.model, slots, context, trainer.dtype
        return Sampler(*given, adapted=tuple(self._layers), exact=exact)


def check(config: TrainerConfig) -> None:
    """Raises: NotImplementedError for what a bank does not support."""
    mesh = config.mesh
    parts = mesh.fsdp * mesh.expert * mesh.context * mesh.tensor * mesh.stage * mesh.processes
    if parts > 1 or mesh.data > 1 or torch.distributed.is_initialized():
        raise NotImplementedError("a bank of adapters is on one device")
    if any(target.startswith(EXPERTS) for target in config.lora.targets):
        raise NotImplementedError("adapters of experts train one at a time")
    if config.precision == "fp8":
        raise NotImplementedError("adapters beside fp8 products train one at a time")


class Part(NamedTuple):
    """What an adapter adds to one layer: scale · b @ a. grad_a, grad_b: where its gradient goes; the
    first backward pass of a request overwrites what is there."""

    adapter: Adapter

    a: Float[Tensor, "rank in"]
    b: Float[Tensor, "out rank"]
    grad_a: Float[Tensor, "rank in"] | None
    grad_b: Float[Tensor, "out rank"] | None
    scale: float


class Adapter:
    """One adapter's state: flat tensors, and views of its matrices by layer."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], scale: float, device: torch.device
    ) -> None:
        self.scale = scale
        self.places: dict[str, tuple[slice, tuple[int, ...]]] = {}
        at = 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            self.places[name] = slice(at, at + size), shape
            at += size
        self.parameters = torch.zeros(at, device=device)
        self.moments: Float32[Tensor, "2 numbers"] | None = None  # before the first step
        self.steps = torch.zeros((), device=device)
        self.gradient: Tensor | None = None
        self.fresh: Tensor | None = None  # of a request that is not settled
        self.written = False  # whether `fresh` is, by a backward pass
        self._spare: Tensor | None = None  # for the next one, which writes what the last one wrote
        self._parts: dict[str, Part] | None = None

    def tensors(self) -> Iterator[Tensor]:
        every = self.parameters, self.moments, self.gradient, self.fresh, self._spare
        return (x for x in every if x is not None)

    def both_moments(self) -> Float32[Tensor, "2 numbers"]:
        if self.moments is None:
            self.moments = self.parameters.new_zeros(2, len(self.parameters))
        return self.moments

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: flat[at].view(shape) for name, (at, shape) in self.places.items()}

    def read(self, flat: Tensor) -> dict[str, np.ndarray]:
        return {name: x.cpu().numpy().copy() for name, x in self.views(flat).items()}

    def write(self, flat: Tensor, tensors: Any) -> None:
        """Raises: UserError for tensors of another adapter."""
        for name, x in self.views(flat).items():
            given = tensors.get(name)
            if given is None or tuple(given.shape) != tuple(x.shape):
                found = "none" if given is None else f"one of {tuple(given.shape)}"
                raise UserError(f"the adapter has for {name} {found}, not one of {tuple(x.shape)}")
            x.copy_(torch.from_numpy(np.ascontiguousarray(given, np.float32)))

    def begin(self) -> None:
        """Makes room for a gradient."""
        if self.fresh is None:
            self.fresh, self._spare = self._spare, None
            if self.fresh is None:
                self.fresh = torch.zeros_like(self.parameters)
            self.written, self._parts = False, None

    def of(self, layer: str) -> Part | None:
        if self._parts is None:
            own = self.views(self.parameters)
            fresh = {} if self.fresh is None else self.views(self.fresh)
            self._parts = {}
            for name, a in own.items():
                if name.endswith(MATRICES[0]):
                    module = name.removesuffix(MATRICES[0])
                    other = module + MATRICES[1]
                    self._parts[module.removeprefix(PEFT_PREFIX)] = Part(
                        self, a, own[other], fresh.get(name), fresh.get(other), self.scale
                    )
        return self._parts.get(layer)

    def settle(self, keep: bool) -> None:
        fresh, self.fresh, self._parts = self.fresh, None, None
        if fresh is None:
            return
        if not self.written:
            fresh.zero_()
        if keep and self.gradient is None:
            self.gradient = fresh
            return
        if keep and self.gradient is not None:
            self.gradient += fresh
        self._spare = fresh

    @torch.no_grad()
    def step(self, config: OptimizerConfig) -> dict[str, float]:
        gradient = torch.zeros_like(self.parameters) if self.gradient is None else self.gradient
        self.gradient, self._spare = None, gradient
        norm = float(torch.linalg.vector_norm(gradient))
        finite = math.isfinite(norm)
        if finite:
            if 0 < config.clip_norm < norm:
                gradient.mul_(config.clip_norm / norm)
            adamw(
                [self.parameters],
                [gradient],
                *([x] for x in self.both_moments()),
                [],
                [self.steps],
                fused=True,
                amsgrad=False,
                beta1=config.beta1,
                beta2=config.beta2,
                lr=config.learning_rate,
                weight_decay=config.weight_decay,  # all of them are matrices
                eps=config.eps,
                maximize=False,
            )
        else:
            self.steps += 1
        rate = config.learning_rate
        return {"grad_norm": norm, "learning_rate": rate, "skipped": 1.0 - finite}


# ---- products

Places = slice | Tensor


def places_of(own: np.ndarray) -> Places:
    """Returns where a mask is True, as a slice if possible, which copies nothing."""
    at = np.flatnonzero(own)
    if at[-1] - at[0] + 1 == len(at):
        return slice(int(at[0]), int(at[-1]) + 1)
    return torch.from_numpy(at)


class Chosen:
    """The adapters of the pass that is under way, with the places of their tokens in the flat row."""

    def __init__(self) -> None:
        self.adapters: Sequence[tuple[Adapter, Places]] = ()

    @contextmanager
    def being(self, adapters: Sequence[tuple[Adapter, Places]]) -> Iterator[None]:
        self.adapters = adapters
        try:
            yield
        finally:
            self.adapters = ()


class AdaptedLinear(SplitLinear):
    """A frozen linear layer, beside which the chosen adapters are."""

    def __init__(self, layer: nn.Linear, name: str, chosen: Chosen) -> None:
        super().__init__(layer)
        self.name, self.chosen = name, chosen

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        own = [
            (part, places)
            for adapter, places in self.chosen.adapters
            if (part := adapter.of(self.name)) is not None
        ]
        if not own:
            return linear(x, self.weight, bias)
        flat = x.reshape(-1, x.shape[-1])
        # Without an input that has a gradient the first layer's function would have no backward pass.
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
        y: Tensor = Products.apply(flat, anchor, self.weight, bias, own)
        return y.view(*x.shape[:-1], y.shape[-1])


class Products(torch.autograd.Function):
    """x @ weightᵀ + bias, and for each adapter's tokens scale · (x @ aᵀ) @ bᵀ.

    The adapters' gradients go to their own buffers and not through autograd, which would allocate
    them and add them up for each pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Float[Tensor, "tokens in"],
        anchor: Tensor,
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, " out"] | None,
        parts: Sequence[tuple[Part, Places]],
    ) -> Float[Tensor, "tokens out"]:
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(weight.dtype)
            y = linear(x, weight, bias)
            inner = []
            for part, places in parts:
                h = x[places] @ part.a.to(x.dtype).T
                add_product(y, places, h, part.b.to(x.dtype).T, part.scale)
                inner.append(h)
        ctx.save_for_backward(x, weight, *inner)
        ctx.parts = parts
        return y

    @staticmethod
    def backward(ctx: Any, grad: Float[Tensor, "tokens out"]) -> tuple[Tensor | None, ...]:
        x, weight, *inner = ctx.saved_tensors
        grad = grad.to(x.dtype)
        of_x = grad @ weight if ctx.needs_input_grad[0] else None
        for (part, places), h in zip(ctx.parts, inner, strict=True):
            own = grad[places]
            of_h = (own @ part.b.to(x.dtype)).mul_(part.scale)
            if of_x is not None:
                add_product(of_x, places, of_h, part.a.to(x.dtype), 1.0)
            if part.grad_a is not None and part.grad_b is not None:
                before = part.adapter.written
                add_product(part.grad_a, slice(None), of_h.T, x[places], 1.0, before)
                add_product(part.grad_b, slice(None), own.T, h, part.scale, before)
        return of_x, None, None, None, None


def add_product(
    y: Tensor, places: Places, one: Tensor, other: Tensor, scale: float, add: bool = True
) -> None:
    """Adds scale · one @ other to rows of y, or with False writes it there."""
    if isinstance(places, slice) and y.dtype == one.dtype:
        y[places].addmm_(one, other, alpha=scale, beta=float(add))
        return
    product = (one @ other).to(y.dtype)
    if not add:
        y[places] = product * scale
    elif isinstance(places, slice):
        y[places].add_(product, alpha=scale)
    else:
        y.index_add_(0, places.to(y.device), product, alpha=scale)
