"""Runs inside the vLLM worker: reads parameters back as kernels use them.

a parameter that kernels read itself      its memory
a linear layer or a head on a CPU         its product with columns of the identity, through the layer's own
                                          kernel: the parameter is gone, or lies unused beside a packed copy
a mixture's experts on a CPU              their memory, in the order in which vLLM packs the kernel's weights
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_x.engines.fleet.proof.readers import Reader, Unreadable, memory_reader
from areal_x.engines.fleet.proof.regions import Held, Shape
from areal_x.engines.fleet.proof.sums import as_slice

AT_ONCE = 256  # columns that a kernel is multiplied with
EXPERTS = ("w13_weight", "w2_weight")


def readers_of(held: Held, modules: Mapping[str, Any], aliases: Sequence[str]) -> list[Reader]:
    """Returns the ways in which a parameter is used. modules: by their names. aliases: all names of its module.

    Raises: Unreadable if one of them cannot be read back.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    from areal_x.engines.vllm.loading import is_plain_mixture

    module, use = modules[held.module], f"{held.module}.{held.name}"
    method = getattr(module, "quant_method", None)
    if is_plain_mixture(module) and held.name in EXPERTS:
        return [Reader(use, experts_reader(module, held))]
    plain = isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    if method is not None and not plain:
        raise Unreadable(f"it is quantised or packed by {type(method).__name__}")
    if held.module.endswith(".kv_b_proj"):
        raise Unreadable("attention multiplies with copies of it")
    itself = Reader(use, memory_reader(module, held))
    if held.name != "weight" or not hasattr(module, "cpu_linear"):
        return [itself]
    multiplied = Reader(f"{use}, multiplied", product_reader(module, held), AT_ONCE)
    if not isinstance(module, VocabParallelEmbedding):
        return [multiplied]
    if isinstance(module, ParallelLMHead):
        return [multiplied]
    is_head = any(name.rpartition(".")[2] == "lm_head" for name in aliases)
    return [itself, multiplied] if is_head else [itself]


def product_reader(module: Any, held: Held) -> Callable[[Sequence[range]], Any]:
    """Returns what reads a weight [out, in] through the layer's kernel. A product with a column of the identity is
    exact: each number is multiplied by 1, and others by 0 are added to it."""
    import torch

    last: dict[
        range, Any
    ] = {}  # parts of a fused weight are read with the same columns, one after the other

    def read(indices: Sequence[range]) -> Any:
        rows, columns = indices
        if columns not in last:
            last.clear()
            one_hot = torch.zeros(len(columns), held.shape[1], dtype=held.dtype)
            one_hot[torch.arange(len(columns)), torch.tensor(columns)] = 1
            last[columns] = module.quant_method.apply(module, one_hot, None)
        return last[columns].T[as_slice(rows)]

    return read


def experts_reader(module: Any, held: Held) -> Callable[[Sequence[range]], Any]:
    """Returns what reads the weights [experts, out, in] of a mixture. Raises: Unreadable."""
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    backend = getattr(module.quant_method, "unquantized_backend", None)
    if backend is None:
        raise Unreadable(f"experts are held by {type(module.quant_method).__name__}")
    if backend in (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON):
        return memory_reader(module, held)
    if backend is not UnquantizedMoeBackend.CPU:
        raise Unreadable(f"experts are packed for {backend.value}")
    if module.quant_method.moe_kernel is None:
        raise Unreadable("experts are packed in a way of an older vLLM")
    experts = module.quant_method.moe_kernel.fused_experts
    if experts._use_zentorch:
        return memory_reader(module, held)
    other = [tuple(getattr(module, name).shape) for name in EXPERTS]
    places = packed_places(experts, held.name, held.shape[1:], held.dtype, tuple(other))

    def read(indices: Sequence[range]) -> Any:
        whose, rows, columns = indices
        packed = getattr(module, held.name).data.flatten(1)
        return packed[as_slice(whose)][:, places[as_slice(rows)][:, as_slice(columns)]]

    return read


_orders: dict[Any, Any] = {}


def packed_places(
    experts: Any, name: str, shape: Shape, dtype: Any, packed: tuple[Shape, ...]
) -> Any:
    """Returns at which place of a packed expert each number of its weight [out, in] is, as vLLM's own packing moves
    the numbers 1, 2, …"""
    import torch

    key = type(experts), name, shape, dtype, packed
    if key in _orders:
        return _orders[key]
    count, width = shape[0] * shape[1], torch.finfo(dtype).bits
    integer = torch.int32 if width == 32 else torch.int16
    found: Any = 0
    for shift in range(0, 32, width):
        numbers = torch.arange(1, count + 1, dtype=torch.int64) >> shift
        if width == 16:
            numbers &= 0xFFFF
        found = found + (
            repacked(experts, name, numbers.to(integer).view(dtype).reshape(shape)).long() << shift
        )
    order = torch.full((count + 1,), -1)
    order[found] = torch.arange(len(found))
    places = order[1:]
    if (places < 0).any() or len(found) != packed[EXPERTS.index(name)][1] * packed[
        EXPERTS.index(name)
    ][2]:
        raise Unreadable("vLLM's packing of experts does not only move numbers")
    _orders[key] = places.reshape(shape)
    return _orders[key]


def repacked(experts: Any, name: str, weight: Any) -> Any:
    """Returns the bits of one expert's weight as vLLM packs it, as integers from 0."""
    import torch

    hidden, inner = (weight.shape[1], weight.shape[0] // 2) if name == EXPERTS[0] else weight.shape
    layer = torch.nn.Module()
    for own, shape in zip(EXPERTS, ((1, 2 * inner, hidden), (1, hidden, inner)), strict=True):
        content = weight[None] if own == name else weight.new_zeros(shape)
        layer.register_parameter(own, torch.nn.Parameter(content.clone(), requires_grad=False))
    layer.activation = getattr(experts.moe_config, "activation", None)
    experts.process_weights_after_loading(layer)
    bits = getattr(layer, name).data.flatten()
    if weight.dtype.itemsize == 4:
        return bits.view(torch.int32)
    return bits.view(torch.int16).int() & 0xFFFF
