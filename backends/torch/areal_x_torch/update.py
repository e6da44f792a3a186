"""One optimizer step's gradients and metrics: what `Trainer.update_share` does before the optimizer
moves parameters.

    add_gradients   for each micro-batch: forward pass, loss, load balancing, backward pass
    load_of_all     how many trained tokens of all processes went through each expert
    metrics         of all processes

All processes call these in this order, then `clip`, because each of them has collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from jaxtyping import Float32, Int
from numpy import ndarray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from areal_x.protocols.expert_load import max_violation
from areal_x.protocols.shares import StepOutput
from areal_x.protocols.trainer import is_max_reduced
from areal_x.runtime.interrupts import raise_if_interrupted
from areal_x.types import Batch, Loss, evaluate_loss
from areal_x_torch import experts
from areal_x_torch.collectives import SumOverGroup
from areal_x_torch.dtensors import local
from areal_x_torch.flat_rows import FlatRow, to_tensor
from areal_x_torch.forward import Forward
from areal_x_torch.pipeline import AddedLoss, Chunk, Pipeline
from areal_x_torch.pipeline_schedule import States
from areal_x_torch.sharding import (
    max_over_rows,
    sum_over_stages,
    sum_over_tokens,
    total_norm,
)
from areal_x_torch.shares import MicroBatches

Kept: TypeAlias = tuple[Tensor | None, Tensor | None]
"""Log-probabilities and entropies of the rows of a micro-batch, 0 where nothing is trained."""


@dataclass(frozen=True)
class KeptOutputs:
    """What the forward passes of a step gave of this process's rows."""

    of_micro: Mapping[int, Kept]
    """By micro-batch; those of a pipeline are on its last stage."""

    sizes: Int[ndarray, " micro_batches"]
    """Rows of each; a micro-batch without any has a blank one."""

    length: int

    device: torch.device

    pipeline: Pipeline | None

    def rows(self, output: StepOutput) -> Float32[Tensor, "own_rows length"]:
        """Returns an output that the step computed. All stages of a pipeline call it together."""
        outputs = [self.of_micro[i] for i in sorted(self.of_micro) if self.sizes[i]]
        found = [logp if output == "logprobs" else entropy for logp, entropy in outputs]
        rows = [x for x in found if x is not None]
        if not rows:
            rows = [torch.zeros((int(self.sizes.sum()), self.length), device=self.device)]
        own = torch.cat(rows).float()
        return own if self.pipeline is None else self.pipeline.stages.from_last(own)


class Step:
    """The forward and backward passes of one step.

    whole: of the batch's rows, of which this process has the share `share`. teacher, routers: None for
    none; a teacher is on the last stage alone.
    """

    def __init__(
        self,
        loss: Loss,
        whole: MicroBatches,
        forward: Forward,
        model: PreTrainedModel,
        mesh: DeviceMesh | None,
        share: int,
        teacher: PreTrainedModel | None,
        routers: experts.Routers | None,
    ) -> None:
        self.whole, self.forward, self.model, self.mesh = whole, forward, model, mesh
        self.loss, self.share, self.teacher, self.routers = loss, share, teacher, routers
        self.config, self.device = forward.config, forward.device
        zero = partial(torch.zeros, (), device=self.device)
        self.sums: dict[str, Tensor] = defaultdict(zero, loss=zero())
        self.largest: dict[str, Tensor] = defaultdict(zero)
        self.kept: dict[int, Kept] = {}  # by micro-batch, of this process's rows
        self.load: dict[int, Tensor] = {}  # of each layer with experts, see `experts.Tally`

    def add_gradients(self, rows: Batch) -> None:
        """Adds the gradients of all micro-batches to those of the model, and what this process
        computes of the metrics to this step's. rows: this process's."""
        if self.forward.pipeline is not None:
            self._add_in_stages(self.forward.pipeline, rows)
            return
        for index, packed in enumerate(self.whole.cut(rows, self.share)):
            if self.mesh is None:  # others would wait in a collective
                raise_if_interrupted()
            passes = self.forward.passes(packed, self.whole.passes[index])
            total = self._loss(packed, passes, index)
            if total.requires_grad:
                total.backward()

    def load_of_all(self) -> dict[int, Tensor]:
        """Returns the load of each of this process's layers with experts, over all processes; none
        for a model without routers."""
        if not self.load:
            return {}
        layers, own = zip(*sorted(self.load.items()), strict=True)
        return dict(zip(layers, sum_over_tokens(torch.stack(own), self.mesh), strict=True))

    def metrics(self, load: dict[int, Tensor]) -> dict[str, Tensor]:
        """Returns the metrics of all processes. load: of `load_of_all`. Parameters that no loss read
        have a gradient of 0 afterwards."""
        largest = max_over_rows(self.largest, self.mesh)
        if self.routers is not None:
            self.sums["expert_max_violation"] = torch.zeros((), device=self.device)
            if load and self.share == 0:  # all shares have the same load
                part = len(load) / len(self.routers.routing_scope)
                violation = max_violation(torch.stack([*load.values()]))
                self.sums["expert_max_violation"] += part * violation
        totals = sum_over_stages(torch.stack(list(self.sums.values())), self.mesh)
        for p in self.model.parameters():
            if p.grad is None and p.requires_grad:  # a vision tower, by a batch without images
                p.grad = torch.zeros_like(p)
        return dict(zip(self.sums, totals, strict=True)) | largest

    def _loss(
        self,
        packed: Batch,
        passes: Sequence[FlatRow],
        index: int,
        last: tuple[Chunk, States | None] | None = None,
    ) -> Tensor:
        """Returns the loss of this process's rows of one micro-batch; adds their metrics to this step's,
        and keeps their log-probabilities and entropies. index: of the micro-batch. last: see
        `Forward.policy`."""
        tokens = self.whole.step_trained
        # No loss reads the kept tokens, of which there may be many.
        rows = packed.replace(kept=None).map(lambda x: to_tensor(x, self.device))
        tally = self._tally(None if last is None else last[0])
        # Only trained tokens go through the head: a loss masks all others before it computes.
        policy = self.forward.policy(
            packed, packed.mask, passes, self.config.entropy, self.teacher, tally, last
        )
        terms, metrics = evaluate_loss(self.loss, policy, rows)
        total = (rows.weights * terms).sum()
        self.sums["loss"] += total.detach()
        if tally is not None:
            total = total + self._balance(tally, index)
        for name, x in metrics.items():
            x = torch.where(rows.mask, x.detach(), 0)
            if not is_max_reduced(name):
                self.sums[name] += x.sum() / tokens
            elif x.numel():
                self.largest[name] = torch.maximum(self.largest[name], x.max())
            else:
                self.largest[name] = self.largest[name]  # every process has the same names
        logp, entropy = (None if x is None else x.detach() for x in (policy.logp, policy.entropy))
        self.kept[index] = logp, entropy
        return total

    def _tally(self, chunk: Chunk | None) -> experts.Tally | None:
        """Returns the counts of this model's routers, or a chunk's, of which there are none yet; None
        if it has no routers."""
        routers = self.routers
        if routers is not None and chunk is not None:
            routers = routers.within(chunk.layers)
        if routers is None or not routers.routing_scope:
            return None
        return experts.Tally.of(routers, self.load, self.device)

    def _balance(self, tally: experts.Tally, index: int) -> Tensor:
        """Returns the load-balancing loss of one micro-batch, in as many layers as the tally is of."""
        assert self.routers is not None
        whole = self.whole
        seen, trained = whole.tokens[index], whole.trained[index]
        over_tokens = partial(sum_over_tokens, mesh=self.mesh)
        layers = len(tally.hits) / len(self.routers.routing_scope)
        imbalance = tally.imbalance(seen, over_tokens) * (layers * trained / whole.step_trained)
        of_rows = imbalance.detach()
        if self.forward.context is not None:
            of_rows = SumOverGroup.apply(of_rows, self.forward.context)
        self.sums["expert_imbalance"] += of_rows
        self.sums["loss"] += self.config.balance * of_rows
        return self.config.balance * imbalance

    def _add_in_stages(self, pipeline: Pipeline, rows: Batch) -> None:
        """Does the same for this process's layers."""
        micro_batches = list(self.whole.cut(rows, self.share))
        passes = [
            self.forward.passes(packed, most)
            for packed, most in zip(micro_batches, self.whole.passes, strict=True)
        ]

        def compute(index: int, number: int, received: States | None) -> Tensor:
            chunk, packed = pipeline.chunk(number), micro_batches[index]
            if chunk.is_last:
                last = chunk, received
                return self._loss(packed, passes[index], index, last)
            tally = self._tally(chunk)
            states = self.forward.states(packed, passes[index], chunk, received, tally)
            if tally is not None:
                states = AddedLoss.apply(states, self._balance(tally, index))
            return states

        self.forward.in_stages(passes, compute, learns=True)
        # Each stage has the metrics of its own layers, the last one those of the loss too.
        of_stages = pipeline.stages.all_of((list(self.sums), list(self.largest)))
        for found, which in ((self.sums, 0), (self.largest, 1)):
            for name in dict.fromkeys(name for of in reversed(of_stages) for name in of[which]):
                found[name] = found.pop(name, torch.zeros((), device=self.device))


def clip(
    model: PreTrainedModel, pipeline: Pipeline | None, mesh: DeviceMesh | None, limit: float
) -> float:
    """Scales the gradient down to the norm `limit` (0: not at all) and returns its global norm
    before."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    counted = gradients
    if pipeline is not None and (copied := pipeline.copied()) is not None:
        counted = [g for g in gradients if not (pipeline.stages.is_last and g is copied.grad)]
    norm = total_norm(counted, mesh)
    if 0 < limit < norm:
        torch._foreach_mul_([local(g) for g in gradients], limit / norm)
    return norm
