"""How a model is spread over processes, one device each: the mesh, what of a model lies where, and sums over all.

data      copies of the model, each with rows of its own; gradients are summed
fsdp      rows too; parameters, gradients and moments are split, and gathered a decoder block at a time as they are needed
expert    rows too; the experts of a mixture
context   tokens of every row
tensor    heads, the width of the MLP and the vocabulary; every process of a tensor group has the same tokens

A parameter is a DTensor that knows how it is split: over tensor where it is computed in parts, and over fsdp, expert and
context together, to be gathered. The axes of a `joined` mesh have the names of those that they join.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from areal_x import model_dir
from areal_x.errors import ConfigError, UserError
from areal_x.trainer import MeshConfig
from areal_x_torch.model import Head, head_layer, is_classifier, softcap_of
from areal_x_torch.parts import local

AXES = ("data", "fsdp", "expert", "context", "tensor")
ROWS = ("data", "fsdp", "expert")  # the axes along which processes have rows of their own
DENSE = "fsdp expert context"  # the axes over which every parameter is split that is not an expert's
STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
SUMMED = "replicated_with_grad_allreduce"  # what transformers' plans call a norm of single heads


def make_mesh(config: MeshConfig, device: torch.device) -> DeviceMesh | None:
    """The devices of all processes by their AXES; None for one process, whose model is whole.

    Raises: ConfigError for axes that this backend does not have or that do not make up the processes.
    """
    sizes = sizes_of(config)
    return None if config.processes == 1 else init_device_mesh(device.type, sizes, mesh_dim_names=AXES)


def sizes_of(config: MeshConfig) -> tuple[int, ...]:
    """Of each of the AXES. Raises: as make_mesh."""
    for axis in ("expert", "context"):
        if getattr(config, axis) != 1:
            raise ConfigError(f"mesh.{axis}", getattr(config, axis), "1, as the torch backend does not split that yet")
    sizes = [getattr(config, axis) for axis in AXES[1:]]
    processes, split = config.processes, prod(sizes)
    if processes % split or config.data not in (-1, processes // split):
        axis = next((axis for axis in AXES if getattr(config, axis) not in (-1, 1)), "data")
        wanted = f"such that {' · '.join(AXES)} is mesh.processes = {processes}: torch has one process for each device"
        raise ConfigError(f"mesh.{axis}", getattr(config, axis), wanted)
    return (processes // split, *sizes)


@cache
def joined(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """The same devices with other axes, "fsdp context" being one axis of these two. All processes call it in one order."""
    names = list(mesh.mesh_dim_names or ())
    order = [names.index(name) for axis in axes for name in axis.split()]
    sizes = [prod(mesh[name].size() for name in axis.split()) for axis in axes]
    return DeviceMesh(mesh.device_type, mesh.mesh.permute(order).reshape(sizes), mesh_dim_names=axes)


def check_model(directory: Path, config: MeshConfig, memory: int | None, learns: bool) -> None:
    """Raises: ConfigError for a model that the mesh cannot split, or whose parameters, gradients and moments alone are more
    than the memory of the devices, each of which has so many bytes."""
    if config.processes > 1:
        described = AutoConfig.from_pretrained(directory, local_files_only=True)
        what = {"vision_config": "a model that sees", "num_experts": "a mixture of experts", "num_local_experts": "a mixture"}
        for field, kind in what.items():
            if getattr(described, field, None):
                raise ConfigError("mesh.processes", config.processes, f"1, as torch does not split {kind} yet")
        if config.tensor > 1:
            plan_of(described, config.tensor)
    if memory is None:
        return
    count = sum(prod(shape) for shape in model_dir.shapes(directory).values())
    # fp32 weights, gradients and both moments, or weights that are only read in bf16.
    needed = count * (16 if learns else 2)
    parts = config.fsdp * config.tensor
    if needed > memory * parts:
        least = -(-needed // (memory * config.tensor))
        wanted = (
            f"at least {least}, with as many mesh.processes: {count / 1e9:.1f} billion parameters take "
            f"{needed / parts / 1e9:.0f} GB of each device, which has {memory / 1e9:.0f} GB"
        )
        raise ConfigError("mesh.fsdp", config.fsdp, wanted)


def recompute(model: PreTrainedModel) -> None:
    """Has the backward pass compute each block again from what went into it."""
    for block in blocks_of(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


class Spoken(nn.Module):
    """A head as a module of its own, since a model's head is read where its forward is never called.

    say: what is computed from hidden states and the head, all of it or this process's words. others: see `Head`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.layer = head_layer(model)
        self.softcap = softcap_of(model)
        self.others: ProcessGroup | None = None

    def forward(self, hidden: Tensor, say: Callable[[Tensor, Head], Any]) -> Any:
        weight, bias = (None if x is None else local(x) for x in (self.layer.weight, self.layer.bias))
        return say(hidden, Head(weight, bias, self.softcap, self.others))


class Whole(nn.Module):
    """A model and its head as one forward pass, of which `fully_shard` needs to see the begin and the end."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head = Spoken(model)

    def forward(self, read: Callable[[PreTrainedModel], Tensor], say: Callable[[Tensor, Head], Any]) -> Any:
        return self.head(read(self.model), say)


def spread(
    model: PreTrainedModel, mesh: DeviceMesh | None, dtype: torch.dtype, device: torch.device, ends: bool = True
) -> Whole:
    """The model, as it was loaded on the host, on the device: whole, or this process's part of it.

    dtype: of products. ends: whether the embedding, the last norm and the head are split too.
    Raises: ConfigError for a model that the mesh does not divide.
    """
    whole = Whole(model)
    if mesh is None:
        return whole.to(device)
    dense = joined(mesh, "data", DENSE, "tensor")
    if dense["tensor"].size() > 1:
        # Before fully_shard: what that splits further is this process's part.
        split_heads(model, dense["tensor"])
        if ends:
            split_vocabulary(model, dense["tensor"])
            whole.head.others = None if is_classifier(model) else dense["tensor"].get_group()
    over = dense["data", DENSE] if dense["data"].size() > 1 else dense[DENSE]

    done: set[nn.Parameter] = set()  # the head is below the model too, where fully_shard would find it again

    def shard(unit: nn.Module, compute: torch.dtype | None) -> None:
        # Gathered in what products are computed in; summed in fp32. What goes in is left alone: the residual stream is fp32, as
        # on one device. What was gathered is given up after each pass: parameters are read and restored between passes.
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        unit = fully_shard(unit, mesh=over, reshard_after_forward=True, mp_policy=policy, ignored_params=done)
        assert isinstance(unit, FSDPModule)
        # Summed and not averaged: a batch's weights hold the normalisation. gloo has nothing but sums.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)

    low = None if dtype == torch.float32 else dtype
    for block in blocks_of(model):
        shard(block, low)
    if not ends:
        return whole.to(device)
    if not is_tied(model):
        shard(whole.head, None if is_classifier(model) else low)
        done.update(whole.head.parameters())
    # The rest is the embedding, which a tied head is too, and the last norm.
    shard(whole, None)
    return whole.to(device)


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder blocks, by the name that transformers gives their class.

    Raises: UserError where it names none.
    """
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError(f"transformers does not say what the blocks of a {type(model).__name__} are: train it in one process")
    return blocks


def is_tied(model: PreTrainedModel) -> bool:
    return head_layer(model).weight is model.get_input_embeddings().weight


def plan_of(config: PreTrainedConfig, tensor: int) -> dict[str, str]:
    """transformers' own plan of what is split how, by patterns of names below the base model.

    Raises: ConfigError for models that this backend cannot split by heads, or not by so many.
    """
    plan = dict(config.base_model_tp_plan or {})
    plan.pop("embed_tokens", None)  # which `split_vocabulary` splits
    if not plan or set(plan.values()) - {*STYLES, SUMMED}:
        wanted = f"1, as heads and MLPs of a {config.model_type} model cannot be split yet: use mesh.fsdp"
        raise ConfigError("mesh.tensor", tensor, wanted)
    for what in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        count = getattr(config, what, None) or config.num_attention_heads
        if count % tensor:
            raise ConfigError("mesh.tensor", tensor, f"a divisor of the model's {what} = {count}")
    return plan


def split_heads(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    styles = {name: STYLES[style]() for name, style in plan_of(model.config, mesh.size()).items() if style in STYLES}
    parallelize_module(model.base_model, mesh, styles)


def split_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """The embedding, and the head where it says words: what each process says of its own, areal_x_torch.head puts together."""
    tied, layer = is_tied(model), head_layer(model)
    embedding = model.get_input_embeddings()
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    if tied:
        layer.weight = embedding.weight
    elif not is_classifier(model):
        for name, x in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(x.detach(), mesh, [Shard(0)], src_data_rank=None)))


def parts_to_sum(model: PreTrainedModel, mesh: DeviceMesh | None) -> list[nn.Parameter]:
    """The parameters of which each process of a tensor group has the gradient of its own heads alone."""
    if mesh is None or mesh["tensor"].size() == 1:
        return []
    names = [name for name, style in plan_of(model.config, mesh["tensor"].size()).items() if style == SUMMED]
    modules = model.base_model.named_modules()
    return [p for name, m in modules if any(fnmatchcase(name, of) for of in names) for p in m.parameters()]


# ---- sums over all processes


def rank_among_rows(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Which share of a batch's rows is this process's, and of how many."""
    place, shares = 0, 1
    for axis in ROWS if mesh is not None else ():
        place, shares = place * mesh[axis].size() + mesh.get_local_rank(axis), shares * mesh[axis].size()
    return place, shares


def sum_over_rows(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The sum of what the processes found in their own rows; the same, bit for bit, on every one."""
    if mesh is not None:
        if any(
            mesh.get_local_rank(axis) for axis in AXES if axis not in ROWS
        ):  # the first of those with its rows says the same
            x = torch.zeros_like(x)
        dist.all_reduce(x)
    return x


def largest_over_rows(found: Mapping[str, Tensor], mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """Of each the largest that a process found in its own rows; all have the same names."""
    if mesh is None or not found:
        return dict(found)
    x = torch.stack(list(found.values()))
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return dict(zip(found, x, strict=True))


def total_norm(gradients: Sequence[Tensor], mesh: DeviceMesh | None) -> float:
    """The norm of all gradients together, over all processes."""
    if mesh is None:
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
    own = [local(g) for g in gradients if is_counted(g, mesh)]
    squared = torch.zeros((), device=mesh.device_type)
    if own:
        squared = squared + torch.nn.utils.get_total_norm(own) ** 2
    dist.all_reduce(squared)
    return float(squared.sqrt())


def is_counted(x: Tensor, mesh: DeviceMesh) -> bool:
    """Whether this process is the first of those that have the same part of x."""
    split: set[str] = set()
    if isinstance(x, DTensor):
        for axes, placement in zip(x.device_mesh.mesh_dim_names or (), x.placements, strict=True):
            split |= set() if placement.is_replicate() else set(axes.split())
    return all(mesh.get_local_rank(axis) == 0 for axis in AXES if axis not in split)


def sum_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh | None) -> None:
    """Sums gradients over each tensor group."""
    for p in parameters:
        if mesh is not None and p.grad is not None:
            dist.all_reduce(local(p.grad), group=mesh["tensor"].get_group())
