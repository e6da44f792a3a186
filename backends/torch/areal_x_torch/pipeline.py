"""The decoder's layers divided among the processes of the mesh axis "stage" (pipeline parallelism).

    process                  0                  1            mesh.stage = 2, mesh.stage_chunks = 2
    chunk 0, 1        embedding, 0, 1         2, 3           eight layers
    chunk 2, 3              4, 5         6, 7, norm, head

Micro-batches go through the chunks in turns (areal_x_torch.pipeline_schedule); hidden states travel
between processes, and gradients back. Everything else about a micro-batch, its tokens, positions
and sequences, every process makes itself from its own copy of the rows.

The model of transformers stays one: layers that other processes have are replaced by modules that
pass on their input, so that names, and the numbers of layers, are those of the whole model. While a
chunk is computed so are the layers of the other chunks, and the embedding is replaced by zeros,
whatever the model does to it, which the module before the chunk's first layer replaces by what the
chunk before gave.

A head that is tied to the embedding is on two processes, the first and the last one, which add up
their gradients: copies that were equal stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from areal_x.errors import ConfigError
from areal_x.hf.adapters import PEFT_PREFIX
from areal_x.protocols.trainer_config import EXPERTS, MeshConfig, TrainerConfig
from areal_x_torch.decoder_blocks import blocks_of
from areal_x_torch.dtensors import Joined, ShardedView, Stored, gather_each, local
from areal_x_torch.experts import IN_LAYER, is_experts
from areal_x_torch.lora import adaptable
from areal_x_torch.model import decoder, head_layer, named_tensors
from areal_x_torch.pipeline_schedule import States


def check_stages(model: PreTrainedConfig, mesh: MeshConfig, offload: bool) -> None:
    """Raises: ConfigError for a model whose config shows that its layers cannot be divided so."""

    def wants(what: str) -> ConfigError:
        return ConfigError("mesh.stage", mesh.stage, what)

    if mesh.stage == 1:
        return
    if hasattr(model, "vision_config"):
        raise wants("1 for a model with images, whose tower is no layer of a stage: use mesh.fsdp")
    if model.model_type == "llama4_text":
        raise wants("1 for a Llama 4, whose decoder reads its embedding itself: use mesh.fsdp")
    if getattr(model, "hidden_size_per_layer_input", 0) or getattr(
        model, "num_kv_shared_layers", 0
    ):
        parts = "layers read embeddings of their own, or keys and values of other layers"
        raise wants(f"1 for a model whose {parts}: use mesh.fsdp")
    layers, chunks = model.num_hidden_layers, mesh.stage * mesh.stage_chunks
    if layers < chunks:
        of_chunks = f" / mesh.stage_chunks = {layers // mesh.stage_chunks}"
        most = f"the model's {layers} layers{of_chunks if mesh.stage_chunks > 1 else ''}"
        raise wants(f"at most {most}: each chunk of a stage needs one")
    if offload:
        wanted = "False with mesh.stage: the parameters of a stage stay on its device"
        raise ConfigError("trainer.offload", True, wanted)


def check_adapters(model: PreTrainedModel, config: TrainerConfig) -> None:
    """Raises: ConfigError for adapters of a whole model that some stage would have none of."""
    mesh, targets = config.mesh, config.lora.targets
    if mesh.stage == 1 or not config.lora.rank:
        return
    names = [name for name in adaptable(model) if name.rpartition(".")[2] in targets]
    if any(target.startswith(EXPERTS) for target in targets):
        names += [name for name, module in model.named_modules() if is_experts(module)]
    adapted = {int(found[1]) for name in names if (found := IN_LAYER.search(name))}
    chunks = chunks_of(model.config.num_hidden_layers, mesh.stage, mesh.stage_chunks)
    for stage in range(mesh.stage):
        layers = [layer for chunk in chunks[stage :: mesh.stage] for layer in chunk.layers]
        if not adapted.intersection(layers):
            wanted = (
                f"such that every stage has an adapter, as the layers {', '.join(map(str, layers))}"
                f" of mesh.stage = {mesh.stage} have none"
            )
            raise ConfigError("lora.targets", targets, wanted)


class Names(NamedTuple):
    """The parts of a decoder, by the names of its modules."""

    embedding: str
    layers: str
    norm: str


def names_of(model: PreTrainedModel, stages: int) -> Names:
    """Returns the parts of a model's decoder.

    Raises: ConfigError for a decoder with other parts, which a stage would have to compute too.
    """
    whole, blocks, embedding = decoder(model), set(blocks_of(model)), model.get_input_embeddings()
    parts = {
        name: part for name, part in whole.named_children() if any(True for _ in part.parameters())
    }
    found = [name for name, part in parts.items() if part is embedding]
    layers = [name for name, part in parts.items() if blocks.intersection(part.children())]
    after = [*parts][[*parts].index(layers[-1]) + 1 :] if layers else []
    if [*parts] != [*found, *layers, *after] or not len(found) == len(layers) == len(after) == 1:
        wanted = (
            f"1 for a {type(model).__name__}, whose decoder is not an embedding, layers and a norm"
            f" but {', '.join(parts)}: use mesh.fsdp"
        )
        raise ConfigError("mesh.stage", stages, wanted)
    return Names(found[0], layers[0], after[0])


class Chunk(NamedTuple):
    """Consecutive layers of one stage. number: of all chunks, in the order of layers."""

    number: int
    start: int
    stop: int
    is_last: bool

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)


def chunks_of(layers: int, stages: int, chunks_each: int) -> list[Chunk]:
    """Returns all chunks, as equal as possible: the longer ones first, because the last one has the
    head too. Stage i has every chunk whose number is i modulo `stages`."""
    count = stages * chunks_each
    sizes = [layers // count + (number < layers % count) for number in range(count)]
    bounds = accumulate(sizes, initial=0)
    return [
        Chunk(number, *ends, is_last=number == count - 1)
        for number, ends in enumerate(pairwise(bounds))
    ]


class Elsewhere(nn.Module):
    """A layer that another process has, or that is not computed now: passes on its input. Other
    attributes are those of the layer."""

    weight = bias = None

    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self._of = (of,)  # not a module of this one

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._of[0], name)


class Received(Elsewhere):
    """In place of the layer before a chunk: gives what the chunk before gave."""

    def __init__(self, of: nn.Module) -> None:
        super().__init__(of)
        self.states: States | None = None

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        assert self.states is not None
        return self.states[None]


class Zeros(nn.Module):
    """In place of an embedding whose result nobody reads."""

    weight = None

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, self.features, device=tokens.device)


@dataclass(frozen=True)
class Stages:
    """The processes that have the stages of one copy of a model. ends: of these the first and the
    last one."""

    group: ProcessGroup
    ends: ProcessGroup
    rank: int
    size: int

    @staticmethod
    def of(mesh: DeviceMesh) -> Stages:
        """All processes call it together."""
        axis = mesh["stage"]
        group, ends = axis.get_group(), None
        names = list(mesh.mesh_dim_names or ())
        columns = mesh.mesh.movedim(names.index("stage"), 0).flatten(1).T
        for column in columns.tolist():
            made = dist.new_group([column[0], column[-1]]) if len(column) > 2 else group
            if dist.get_rank() in column:
                ends = made
        assert ends is not None
        return Stages(group, ends, axis.get_local_rank(), axis.size())

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1

    @property
    def is_end(self) -> bool:
        return self.rank in (0, self.size - 1)

    def all_of(self, own: Any) -> list[Any]:
        """Returns small things of all stages, in their order."""
        found = [None] * self.size
        dist.all_gather_object(found, own, group=self.group)
        return found

    def from_last(self, x: Tensor) -> Tensor:
        """Returns the last stage's tensor; others give one of its shape."""
        x = x.contiguous()
        dist.broadcast(x, group=self.group, group_src=self.size - 1)
        return x


@dataclass(frozen=True)
class Pipeline:
    """A model of which this process has some chunks."""

    stages: Stages
    model: PreTrainedModel
    names: Names
    chunks: tuple[Chunk, ...]
    """Of this process."""

    held: nn.ModuleList
    """The modules of the decoder that are taken out of it while another chunk is computed."""

    places: Mapping[str, int]
    """Of the whole model's tensors, under their names in its files and under its own."""

    is_tied: bool

    @staticmethod
    def divide(model: PreTrainedModel, stages: Stages, mesh: MeshConfig) -> Pipeline:
        """Leaves in a whole model on the meta device what this process computes.

        Raises: ConfigError like `names_of`.
        """
        names, whole, head = names_of(model, mesh.stage), decoder(model), head_layer(model)
        embedding = model.get_input_embeddings()
        is_tied = head.weight is embedding.weight
        saved = [*named_tensors(model), *(name for name, _ in model.named_parameters())]
        places = {name: place for place, name in enumerate(dict.fromkeys(saved))}
        layers: Any = whole.get_submodule(names.layers)
        every = chunks_of(len(layers), stages.size, mesh.stage_chunks)
        own = tuple(every[stages.rank :: stages.size])
        for number in set(range(len(layers))).difference(*(chunk.layers for chunk in own)):
            layers[number] = Elsewhere(layers[number])
        if stages.rank and not (is_tied and stages.is_last):
            setattr(whole, names.embedding, Zeros(embedding.weight.shape[1]))
        if not stages.is_last:
            setattr(whole, names.norm, Elsewhere(whole.get_submodule(names.norm)))
            if stages.rank or not is_tied:
                name = next(name for name, part in model.named_modules() if part is head)
                model.set_submodule(name, Elsewhere(head))
        held = [*layers, *(whole.get_submodule(name) for name in (names.embedding, names.norm))]
        return Pipeline(
            stages=stages,
            model=model,
            names=names,
            chunks=own,
            held=nn.ModuleList(part for part in held if any(True for _ in part.parameters())),
            places=places,
            is_tied=is_tied,
        )

    @property
    def features(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    def chunk(self, number: int) -> Chunk:
        return self.chunks[number // self.stages.size]

    @contextmanager
    def computing(self, chunk: Chunk, received: States | None) -> Iterator[None]:
        """Makes the model compute a chunk only, from what the chunk before gave; its result is that of
        the chunk's last layer, or of the norm after the last chunk."""
        whole: Any = decoder(self.model)
        before = {name: whole.get_submodule(name) for name in self.names}
        layers = [
            layer if number in chunk.layers else Elsewhere(layer)
            for number, layer in enumerate(before[self.names.layers].children())
        ]
        if chunk.number:
            layers[chunk.start - 1] = entry = Received(layers[chunk.start - 1])
            entry.states = received
            setattr(whole, self.names.embedding, Zeros(self.features))
        if not chunk.is_last:
            setattr(whole, self.names.norm, Elsewhere(before[self.names.norm]))
        setattr(whole, self.names.layers, nn.ModuleList(layers))
        try:
            yield
        finally:
            for name, part in before.items():
                setattr(whole, name, part)

    # ---- a head that is tied to the embedding

    def copied(self) -> nn.Parameter | None:
        """Returns the parameter that the last stage has a copy of, in the first and in the last one."""
        if not (self.is_tied and self.stages.is_end):
            return None
        found: nn.Parameter = head_layer(self.model).weight
        return found

    def has_copied(self, name: str) -> bool:
        """True for the name of a parameter, or of its moment, that this process has a copy of."""
        if not self.stages.is_last or (copied := self.copied()) is None:
            return False
        own = next(name for name, x in self.model.named_parameters() if x is copied)
        return own in (name, name.partition(".")[2])

    def add_up_copies(self) -> None:
        """Gives both copies the sum of their gradients."""
        copied = self.copied()
        if copied is not None and copied.requires_grad:
            assert copied.grad is not None
            dist.all_reduce(local(copied.grad), group=self.stages.ends)

    # ---- tensors of all stages

    def elsewhere(self, own: Iterable[tuple[str, Stored]]) -> dict[str, torch.Size]:
        """Returns the shapes of the other stages' tensors, by their names; all stages call it."""
        shapes = {name: x.shape for name, x in own}
        others = {name: shape for of in self.stages.all_of(shapes) for name, shape in of.items()}
        return {name: shape for name, shape in others.items() if name not in shapes}

    def gather_each(
        self,
        own: Mapping[str, Stored],
        device: torch.device,
        as_: Callable[[str, Tensor], Tensor] = lambda _, x: x,
        values: Iterable[tuple[str, Stored]] | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the whole tensors of all stages on the device, one after another, in the order of the
        whole model; every process gets them all. as_: see `dtensors.gather_each`. values: in place of
        those of `own`, in their order."""

        def in_order(own: Mapping[str, Any]) -> list[tuple[str, Any]]:
            return sorted(own.items(), key=lambda pair: self._place(pair[0]))

        described = {}
        for name, x in own.items():
            of = x.of if isinstance(x, ShardedView | Joined) else x
            described[name] = x.shape, as_(name, torch.empty(0, dtype=of.dtype)).dtype
        owners: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        for stage, of_stage in enumerate(self.stages.all_of(described)):
            for name, (shape, dtype) in of_stage.items():
                owners.setdefault(name, (stage, shape, dtype))
        mine = gather_each(
            (
                (name, x)
                for name, x in (in_order(own) if values is None else values)
                if owners[name][0] == self.stages.rank
            ),
            as_,
        )
        for name, (stage, shape, dtype) in in_order(owners):
            if stage == self.stages.rank:
                found, x = next(mine)
                assert found == name, (found, name)
                x = x.to(device).contiguous()
            else:
                x = torch.empty(shape, dtype=dtype, device=device)
            dist.broadcast(x, group=self.stages.group, group_src=stage)
            yield name, x

    def _place(self, name: str) -> tuple[str, int]:
        """Returns where a tensor comes in the order of the whole model; an optimizer's after all."""
        for moment, _, of in (("", "", name), name.partition(".")):
            if (place := self.places.get(of.removeprefix(PEFT_PREFIX))) is not None:
                return moment, place
        return name, len(self.places)


class AddedLoss(torch.autograd.Function):
    """Gives states as they are; the backward pass differentiates a further loss too."""

    @staticmethod
    def forward(ctx: Any, states: States, loss: Tensor) -> States:
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), device=grad.device)
