"""Sharding of a model over processes, one device each: the mesh, the sharding of parameters, and
sums over all processes.

    stage     consecutive layers of the decoder, through which micro-batches go in turns
              (areal_x_torch.pipeline); below, "all" processes are those of one stage
    data      copies of the model, each with its own rows; gradients are summed
    fsdp      its own rows too; parameters, gradients and moments are sharded, and gathered a decoder
              block at a time as they are needed
    expert    its own rows too; the experts of a mixture, to which tokens are sent
    context   tokens of every row; parameters, gradients and moments are sharded as over fsdp
    tensor    heads, the width of the MLP, experts and the vocabulary; every process of a tensor group
              has the same tokens

A parameter is a DTensor that knows its sharding: over tensor if it is computed in parts, and over
fsdp, expert and context together, to be gathered; one of experts over expert and tensor, and to be
gathered over fsdp and context. The axes of a joined mesh have the names of those that they join.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from transformers import AutoConfig, PreTrainedModel

from areal_x.errors import ConfigError
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import MeshConfig
from areal_x_torch import sequence_parallel
from areal_x_torch.context_parallel import check_context
from areal_x_torch.decoder_blocks import blocks_of
from areal_x_torch.dtensors import local, split
from areal_x_torch.dummy_model import inner_decoder
from areal_x_torch.experts import is_experts
from areal_x_torch.loading import materialize
from areal_x_torch.model import Head, head_layer, is_classifier, softcap_of
from areal_x_torch.pipeline import check_stages
from areal_x_torch.processes import join_alone
from areal_x_torch.tensor_split import plan_of, split_heads

AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")
ROW_AXES = ("data", "fsdp", "expert")  # axes along which processes have their own rows
# Axes over which every parameter that is not an expert's is sharded.
DENSE = "fsdp expert context"
EXPERTS = "expert tensor"  # axes that divide a mixture's experts among them
# Names, in configs, of the number of experts of a layer.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def make_mesh(config: MeshConfig, device: torch.device, offload: bool = False) -> DeviceMesh | None:
    """Returns the devices of all processes by their AXES; None for one process, whose model is
    whole.

    offload: True if parameters are on the host. Even one process has a mesh then, because the
    mechanism that brings a block to the device while it is computed is the one that gathers it from
    several.

    Raises: ConfigError for axes that this backend lacks or that do not match the number of
    processes.
    """
    sizes = sizes_of(config)
    if config.processes == 1 and not offload:
        return None
    if config.processes == 1:
        join_alone(device)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    if config.stage > 1:
        stage_group(mesh)  # which all processes make together
    return mesh


def sizes_of(config: MeshConfig) -> tuple[int, ...]:
    """Returns the size of each of the AXES. Raises: like make_mesh."""
    sizes = {axis: getattr(config, axis) for axis in AXES if axis != "data"}
    processes, split = config.processes, prod(sizes.values())
    if processes % split or config.data not in (-1, processes // split):
        axis = next((axis for axis in AXES if getattr(config, axis) not in (-1, 1)), "data")
        wanted = (
            f"such that {' · '.join(AXES)} is mesh.processes = {processes}: torch has one process"
            " for each device"
        )
        raise ConfigError(f"mesh.{axis}", getattr(config, axis), wanted)
    sizes["data"] = processes // split
    return tuple(sizes[axis] for axis in AXES)


def stage_group(mesh: DeviceMesh) -> ProcessGroup:
    """Returns the processes of this one's stage."""
    others = " ".join(AXES[1:])
    return joined_mesh(mesh, "stage", others)[others].get_group()


@cache
def joined_mesh(mesh: DeviceMesh, *axes: str) -> DeviceMesh:
    """Returns the same devices with other axes, "fsdp context" being one axis of these two. All
    processes call it in one order."""
    names = list(mesh.mesh_dim_names or ())
    order = [names.index(name) for axis in axes for name in axis.split()]
    sizes = [prod(mesh[name].size() for name in axis.split()) for axis in axes]
    return DeviceMesh(
        mesh.device_type, mesh.mesh.permute(order).reshape(sizes), mesh_dim_names=axes
    )


def check_model(
    directory: Path, config: MeshConfig, memory: int | None, learns: bool, offload: bool = False
) -> None:
    """Raises: ConfigError for a model that the mesh cannot shard, or whose parameters, gradients
    and moments alone exceed the memory of the devices, in bytes per device. offload: see
    `make_mesh`."""
    if config.processes > 1:
        described = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        check_context(described, config)
        check_stages(described, config, offload)
        text = described.get_text_config()
        experts = next((n for field in COUNTS if (n := getattr(text, field, None))), 0)
        if config.expert > 1 and (not experts or experts % config.expert):
            wanted = (
                f"a divisor of the model's {experts} experts"
                if experts
                else "1 for a model without experts: use mesh.fsdp"
            )
            raise ConfigError("mesh.expert", config.expert, wanted)
        if config.tensor > 1 and experts % (config.expert * config.tensor):
            wanted = f"such that mesh.expert · mesh.tensor divides the model's {experts} experts"
            raise ConfigError("mesh.tensor", config.tensor, wanted)
        if config.tensor > 1:
            plan_of(text, config.tensor)
    if memory is None or offload:
        return
    count = sum(prod(shape) for shape in model_dir.shapes(directory).values())
    # fp32 weights, gradients and both moments, or bf16 weights for inference.
    needed = count * (16 if learns else 2)
    beside = config.expert * config.context * config.tensor * config.stage
    parts = config.fsdp * beside
    if needed > memory * parts:
        least = -(-needed // (memory * beside))
        wanted = (
            f"at least {least}, with as many mesh.processes: {count / 1e9:.1f} billion parameters"
            f" take {needed / parts / 1e9:.0f} GB of each device, which has {memory / 1e9:.0f} GB"
        )
        raise ConfigError("mesh.fsdp", config.fsdp, wanted)


class HeadModule(nn.Module):
    """A head as a module of its own, because a model's own head is used without calling its
    forward.

    say: computes outputs from hidden states and the head, all of it or this process's words.
    others: see `Head`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.layer = head_layer(model)
        self.softcap = softcap_of(model)
        self.others: ProcessGroup | None = None

    def forward(self, hidden: Tensor, say: Callable[[Tensor, Head], Any]) -> Any:
        weight, bias = (
            None if x is None else local(x) for x in (self.layer.weight, self.layer.bias)
        )
        return say(hidden, Head(weight, bias, self.softcap, self.others))


class ModelWithHead(nn.Module):
    """A model and its head as one forward pass, whose begin and end `fully_shard` must see."""

    def __init__(self, model: PreTrainedModel, held: nn.ModuleList | None = None) -> None:
        super().__init__()
        self.model = model
        self.head = HeadModule(model)
        # Modules that fully_shard must find while a pipeline has taken them out of the model.
        self.held = held

    def forward(
        self,
        read: Callable[[PreTrainedModel], Tensor],
        say: Callable[[Tensor, Head], Any] | None,
    ) -> Any:
        found = read(self.model)
        return found if say is None else self.head(found, say)


def shard_model(
    model: PreTrainedModel,
    mesh: DeviceMesh | None,
    dtype: torch.dtype,
    device: torch.device,
    shard_ends: bool = True,
    offload: bool = False,
    held: nn.ModuleList | None = None,
    tokens_apart: bool = False,
) -> ModelWithHead:
    """Returns the model that `loading.build` made on the device: whole, or this process's part of
    it, which `loading.fill` then reads.

    The order of what is done to a model, and why: it is frozen and given adapters first, while it
    is whole; its blocks are compiled and checkpointed (areal_x_torch.decoder_blocks); then heads
    and vocabulary are split, because what fully_shard shards further must be this process's part;
    then fully_shard, outermost, so that a block is gathered before anything of it runs, and once
    for the backward pass that recomputes it. All of this happens on the meta device: only the
    remaining part takes memory.

    dtype: of products. shard_ends: also shard the embedding, the last norm and the head. offload:
    keep parameters, and with them gradients and moments, on the host, and a block on the device
    only while it is computed. Raises: ConfigError for a model that the mesh does not divide.
    """
    whole = ModelWithHead(model, held)
    if mesh is None:
        materialize(whole, device)
        return whole
    dense = joined_mesh(mesh, "stage", "data", DENSE, "tensor")
    if dense["tensor"].size() > 1:
        learns = {name: p.requires_grad for name, p in model.named_parameters()}
        split_heads(model, dense["tensor"], tokens_apart)
        if tokens_apart:
            sequence_parallel.install(model, dense["tensor"].get_group())
        if shard_ends:
            split_vocabulary(model, dense["tensor"])
            whole.head.others = None if is_classifier(model) else dense["tensor"].get_group()
        for name, p in model.named_parameters():  # torch's styles make trainable parameters
            p.requires_grad_(learns[name])
    over = dense["data", DENSE] if dense["data"].size() > 1 else dense[DENSE]

    # Pinned pages let copies overlap with computing. A CPU has none.
    on_host = CPUOffloadPolicy(pin_memory=device.type != "cpu") if offload else OffloadPolicy()
    # The head is also below the model, where fully_shard would find it again.
    done: set[nn.Parameter] = set()

    def shard(unit: nn.Module, compute: torch.dtype | None, over: DeviceMesh = over) -> None:
        # Parameters are gathered in the compute precision and gradients summed in fp32. Inputs are
        # not cast: the residual stream is fp32, as on one device. Gathered parameters are released
        # after each pass, because they are read and restored between passes.
        policy = MixedPrecisionPolicy(
            param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        how = {"mp_policy": policy, "offload_policy": on_host, "ignored_params": done}
        by = partial(split_along, over.size(-1))
        unit = fully_shard(
            unit, mesh=over, reshard_after_forward=True, shard_placement_fn=by, **how
        )
        assert isinstance(unit, FSDPModule)
        # Summed instead of averaged: a batch's weights hold the normalisation. gloo only has sums.
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)

    low = None if dtype == torch.float32 else dtype
    if mesh["expert"].size() * mesh["tensor"].size() > 1:
        mixed = joined_mesh(mesh, "stage", "data", "fsdp context", EXPERTS)
        beside = (
            mixed["data", "fsdp context"] if mixed["data"].size() > 1 else mixed["fsdp context"]
        )
        for module in filter(is_experts, model.modules()):
            split_experts(module, mixed[EXPERTS], mesh["tensor"])
            shard(module, low, beside)
    for block in blocks_of(model):
        shard(block, low)
    if not shard_ends:
        materialize(whole, device)
        return whole
    if whole.head.layer.weight is not None and not is_tied(model):
        shard(whole.head, None if is_classifier(model) else low)
        done.update(whole.head.parameters())
    # The rest is the embedding, which includes a tied head, and the last norm.
    shard(whole, None)
    materialize(whole, device, torch.device("cpu") if offload else device)
    return whole


def is_tied(model: PreTrainedModel) -> bool:
    return head_layer(model).weight is model.get_input_embeddings().weight


def split_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Splits the embeddings, and a language model's head; areal_x_torch.head combines the outputs of
    each process's words."""
    tied, layer = is_tied(model), head_layer(model)
    embedding = model.get_input_embeddings()
    decoder = inner_decoder(model)
    # Gemma 4's embeddings for each layer, which are most of a small one's parameters.
    of_layers = getattr(decoder, "embed_tokens_per_layer", None)
    for words in (embedding, of_layers):
        if words is not None and words.weight is not None:  # else another stage has it
            parallelize_module(words, mesh, RowwiseParallel(input_layouts=Replicate()))
    if tied:
        layer.weight = embedding.weight
    elif not is_classifier(model):
        for name, x in list(layer.named_parameters()):
            setattr(layer, name, split(x, mesh, 0))


def split_along(size: int, x: nn.Parameter) -> Shard | None:
    """Returns how fully_shard shards what is already split, which it must do evenly: whole experts,
    or else each of them."""
    of_experts = isinstance(x, DTensor) and EXPERTS in (x.device_mesh.mesh_dim_names or ())
    if not of_experts:
        return None
    even = (axis for axis, length in enumerate(local(x).shape) if length % size == 0)
    return Shard(next(even, 0))


def split_experts(module: nn.Module, mesh: DeviceMesh, tensor: DeviceMesh) -> None:
    """Gives each process equally many experts, which it alone computes: areal_x_torch.experts sends
    it their tokens. tensor: the processes that have the same tokens."""
    for name, x in list(module.named_parameters()):
        owner, _, own = name.rpartition(".")  # an adapter's, or its own
        setattr(module.get_submodule(owner), own, split(x, mesh, 0))
    module.same_tokens = tensor.get_group() if tensor.size() > 1 else None


# ---- sums over all processes


def row_rank(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Returns the index of this process's share of a batch's rows, and the number of shares."""
    place, shares = 0, 1
    if mesh is None:
        return place, shares
    for axis in ROW_AXES:
        place, shares = (
            place * mesh[axis].size() + mesh.get_local_rank(axis),
            shares * mesh[axis].size(),
        )
    return place, shares


def sum_over_rows(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Sums what the processes computed for their own rows; the same, bit for bit, on every one."""
    return _sum_along(x, mesh, ROW_AXES)


def sum_over_stages(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Sums what the processes of all stages computed for their own rows, each its own part."""
    return _sum_along(x, mesh, ("stage", *ROW_AXES))


def sum_over_tokens(x: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Sums what the processes of one stage computed for their own parts of rows."""
    own = ("stage", *ROW_AXES, "context")
    group = None if mesh is None or mesh["stage"].size() == 1 else stage_group(mesh)
    return _sum_along(x, mesh, own, group)


def _sum_along(
    x: Tensor, mesh: DeviceMesh | None, own: Sequence[str], group: ProcessGroup | None = None
) -> Tensor:
    if mesh is not None:
        # Along the other axes all have the same number, which counts once.
        x = (
            torch.zeros_like(x)
            if any(mesh.get_local_rank(axis) for axis in AXES if axis not in own)
            else x.clone()
        )
        dist.all_reduce(x, group=group)
    return x


def max_over_rows(found: Mapping[str, Tensor], mesh: DeviceMesh | None) -> dict[str, Tensor]:
    """Returns the maxima over the processes' rows; all have the same names."""
    if mesh is None or not found:
        return dict(found)
    x = torch.stack(list(found.values()))
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return dict(zip(found, x, strict=True))


def total_norm(gradients: Sequence[Tensor], mesh: DeviceMesh | None) -> float:
    """Returns the norm of all gradients together, over all processes."""
    if mesh is None:
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
    own = [local(g) for g in gradients if is_counted(g, mesh)]
    squared = torch.zeros((), device=mesh.device_type)
    if own:
        squared = squared + torch.nn.utils.get_total_norm(own) ** 2
    dist.all_reduce(squared)
    return float(squared.sqrt())


def is_counted(x: Tensor, mesh: DeviceMesh) -> bool:
    """True if this process is the first of those that have the same part of x."""
    split = {"stage"}
    if isinstance(x, DTensor):
        for axes, placement in zip(x.device_mesh.mesh_dim_names or (), x.placements, strict=True):
            split |= set() if placement.is_replicate() else set(axes.split())
    return all(mesh.get_local_rank(axis) == 0 for axis in AXES if axis not in split)


def sum_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh | None) -> None:
    """Sums gradients over each tensor group."""
    for p in parameters:
        if mesh is not None and p.grad is not None:
            dist.all_reduce(local(p.grad), group=mesh["tensor"].get_group())
