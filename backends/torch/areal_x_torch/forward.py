"""From packed rows to what a head outputs for their tokens: flat rows, passes through the model, and
back.

Each of several processes has its own share of a batch's rows. All of them make the same number of
passes through the model in the same order, because they gather its parameters together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from numpy import ndarray
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from areal_x.hf.image_format import takes_images
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.types import Batch, Policy
from areal_x_torch import context_parallel, experts, head, model
from areal_x_torch.collectives import SumOverGroup
from areal_x_torch.flat_rows import (
    FlatRow,
    flatten_rows,
    padded_to_multiple,
    padding_row,
    to_tensor,
)
from areal_x_torch.images import row_images
from areal_x_torch.pipeline import Chunk, Pipeline
from areal_x_torch.pipeline_schedule import Run, States
from areal_x_torch.segments import Attend, Segments
from areal_x_torch.sharding import ModelWithHead


@dataclass(frozen=True)
class Forward:
    """The forward passes of one model on one process."""

    config: TrainerConfig

    module: ModelWithHead
    """The model and its head, as sharded."""

    device: torch.device

    dtype: torch.dtype
    """Compute precision."""

    attend: Attend

    context: ProcessGroup | None
    """Processes that share each row's tokens; None for this one alone."""

    distributed: bool
    """True if other processes gather parameters with this one."""

    logits: int
    """Computed at a time, see `device.logits_at_once`."""

    pipeline: Pipeline | None = None
    """The layers that this process has; None for all."""

    def passes(self, rows: Batch, most: int = 0) -> list[FlatRow]:
        """Returns this process's passes over its rows; at least `most`, as many as the process with
        most makes."""
        budget = self.config.micro_batch_rows * rows.shape[1]
        mesh = self.config.mesh
        parts = mesh.context * (mesh.tensor if mesh.sequence else 1)
        own = [
            padded_to_multiple(flat, parts)
            for flat in flatten_rows(rows.segment_ids, budget, rows.parents)
        ]
        return own + [padding_row(parts)] * (most - len(own))

    def policy(
        self,
        packed: Batch,
        wanted: Bool[ndarray, "rows length"],
        passes: Sequence[FlatRow],
        entropy: bool = False,
        teacher: PreTrainedModel | None = None,
        tally: experts.Tally | None = None,
        last: tuple[Chunk, States | None] | None = None,
    ) -> Policy:
        """Returns the head's outputs for the wanted tokens of packed rows, 0 elsewhere, computed in
        these passes.

        last: of a pipeline, the last chunk and what the chunk before gave for these passes.
        """
        outputs: dict[str, Tensor] = {}
        for flat, scope in zip(passes, self._scopes(passes, last), strict=True):
            own = context_parallel.token_range(len(flat.places), self.context)
            state_at, token_at = flat.read(wanted, before=self.config.head != "reward", own=own)
            row = self.row(packed, flat, own, tally)
            kept = self._kept(packed, token_at)
            targets, state_at, token_at = (
                to_tensor(x, self.device)
                for x in (packed.tokens.reshape(-1)[token_at], state_at, token_at)
            )
            teacher_states = None
            if teacher is not None:
                assert self.config.divergence is not None
                with torch.no_grad():
                    hidden = self._hidden(teacher, row, state_at)
                teacher_states = head.Teacher(hidden, model.head(teacher), self.config.divergence)
            body = partial(self._hidden, row=row, state_at=state_at, scope=scope)
            apply_head = partial(
                self._head_outputs,
                targets=targets,
                entropy=entropy,
                teacher=teacher_states,
                kept=kept,
            )
            for name, x in self.module(body, apply_head).items():
                everywhere = outputs.get(name, x.new_zeros(packed.tokens.size))
                outputs[name] = everywhere.index_copy(0, token_at, x)
        if self.context is not None:
            # A loss may need every output of a sequence. Each process computes the same loss, and
            # its gradient goes back to the outputs computed here.
            outputs = {name: SumOverGroup.apply(x, self.context) for name, x in outputs.items()}
        return Policy(**{name: x.reshape(packed.shape) for name, x in outputs.items()})

    def states(
        self,
        packed: Batch,
        passes: Sequence[FlatRow],
        chunk: Chunk,
        received: States | None,
        tally: experts.Tally | None = None,
    ) -> States:
        """Returns what a pipeline's chunk before the last one gives for the tokens of these passes, one
        pass after another, from what the chunk before it gave."""
        found = []
        for flat, scope in zip(passes, self._scopes(passes, (chunk, received)), strict=True):
            own = context_parallel.token_range(len(flat.places), self.context)
            body = partial(
                self._decoder_states, row=self.row(packed, flat, own, tally), scope=scope
            )
            found.append(self.module(body, None).float())
        return torch.cat(found)

    def in_stages(
        self,
        passes: Sequence[Sequence[FlatRow]],
        compute: Callable[[int, int, States | None], Tensor | None],
        learns: bool,
    ) -> None:
        """Runs micro-batches through a pipeline, together with its other processes. passes: of each
        micro-batch. compute: see `pipeline_schedule.Run`."""
        assert self.pipeline is not None
        Run(
            group=self.pipeline.stages.group,
            chunks_each=self.config.mesh.stage_chunks,
            tokens=[self.tokens(of_one) for of_one in passes],
            features=self.pipeline.features,
            device=self.device,
            compute=compute,
            learns=learns,
        )()

    def outputs_of_stages(
        self,
        packed: Batch,
        wanted: Bool[ndarray, "rows length"],
        passes: Sequence[FlatRow],
        output: str,
    ) -> Float32[Tensor, "rows length"]:
        """Returns an output of the head for the wanted tokens of packed rows, 0 elsewhere, on all stages
        of a pipeline. output: a name in Policy."""
        pipeline = self.pipeline
        assert pipeline is not None
        outputs = torch.zeros(packed.shape, device=self.device)

        def compute(index: int, number: int, received: States | None) -> Tensor | None:
            chunk, own = pipeline.chunk(number), passes[index : index + 1]
            if not chunk.is_last:
                return self.states(packed, own, chunk, received)
            policy = self.policy(packed, wanted, own, last=(chunk, received))
            outputs.add_(getattr(policy, output))
            return None

        self.in_stages([[flat] for flat in passes], compute, learns=False)
        return pipeline.stages.from_last(outputs)

    def tokens(self, passes: Sequence[FlatRow]) -> int:
        """Returns the number of this process's tokens in these passes."""
        return sum(len(flat.places) for flat in passes) // self.config.mesh.context

    def _scopes(
        self, passes: Sequence[FlatRow], chunk: tuple[Chunk, States | None] | None
    ) -> list[Callable[[], AbstractContextManager[None]]]:
        """Returns for each pass the context in which the model computes a chunk only."""
        if chunk is None:
            return [nullcontext] * len(passes)
        assert self.pipeline is not None
        received: Sequence[States | None] = [None] * len(passes)
        if chunk[1] is not None:
            received = chunk[1].split([self.tokens([flat]) for flat in passes])
        return [partial(self.pipeline.computing, chunk[0], x) for x in received]

    def _kept(self, packed: Batch, token_at: Int64[ndarray, " n"]) -> head.Kept | None:
        """Returns the tokens that truncated sampling kept at these tokens of the packed rows."""
        if packed.kept is None:
            return None
        column, ids = np.moveaxis(packed.kept, -1, 0)
        rows, length = packed.shape
        index = np.full(rows * length, -1)
        index[token_at] = np.arange(len(token_at))
        # A row's first token is predicted by none, so that a blank row's pairs of zeros are none.
        found = np.where(column > 0, index[np.arange(rows)[:, None] * length + column], -1)
        here = found >= 0
        return head.Kept(
            to_tensor(found[here], self.device), to_tensor(ids[here], self.device), len(token_at)
        )

    def row(
        self, packed: Batch, flat: FlatRow, own: slice, tally: experts.Tally | None
    ) -> model.PackedRow:
        """Returns the tokens `own` of a flat row, with the sequences of the whole row."""
        net = self.module.model
        tokens = to_tensor(flat.take(packed.tokens)[own], self.device)
        positions, images = flat.positions[own], None
        if takes_images(net.config):
            positions, images = row_images(packed, flat, net.config, self.device, self.distributed)
            positions = positions[..., own]
        segments = Segments.of(
            tuple(flat.lengths.tolist()),
            self.attend,
            self.device,
            tuple(flat.prefixes.tolist()),
            self.context,
            () if images is None else images.spans,
            images is not None and images.near,
        )
        recorded = None
        if packed.experts is not None:
            recorded = to_tensor(flat.take(packed.experts)[own], self.device)
        trained = flat.take(packed.mask)[own][: flat.real_tokens(own)]
        routing = experts.Routing(recorded, tally, to_tensor(trained, self.device))
        return model.PackedRow(tokens, to_tensor(positions, self.device), segments, images, routing)

    def _hidden(
        self,
        net: PreTrainedModel,
        row: model.PackedRow,
        state_at: Tensor,
        scope: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Tensor:
        """Returns a model's last hidden states at the indices `state_at` of a flat row."""
        with self._autocast():
            with scope():
                states = model.decoder_states(net, row)
            states = model.head_input(net, states)
        return states.to(self.dtype).index_select(0, state_at)

    def _decoder_states(
        self,
        net: PreTrainedModel,
        row: model.PackedRow,
        scope: Callable[[], AbstractContextManager[None]],
    ) -> Tensor:
        with self._autocast(), scope():
            states = model.decoder_states(net, row)
        return states.clone()  # fully_shard has hooks on what is returned, which a view may lose

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def _head_outputs(
        self,
        hidden: Tensor,
        layer: model.Head,
        targets: Tensor,
        entropy: bool,
        teacher: head.Teacher | None,
        kept: head.Kept | None,
    ) -> dict[str, Tensor]:
        c = self.config
        if c.head != "policy":
            return {"values": head.values(hidden, layer.weight)}
        logp, entropies, divergence = head.logprobs(
            hidden,
            layer,
            targets,
            c.temperature,
            c.head_chunk,
            entropy,
            teacher,
            kept,
            self.logits,
        )
        outputs = {"logp": logp, "entropy": entropies, "divergence": divergence}
        return {name: x for name, x in outputs.items() if x is not None}
