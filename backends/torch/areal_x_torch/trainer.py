"""The torch trainer: a transformers model, AdamW, and as many micro-batches as a batch needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor
from torch.nn import Parameter

from areal_x import model_dir
from areal_x.rollout.lanes import Lanes
from areal_x.trainer import Loss, OptimizerConfig, TrainerConfig
from areal_x.types import Batch, Policy
from areal_x_torch import head, model
from areal_x_torch.device import check_mesh, compute_dtype, find_device, places_at_once
from areal_x_torch.layout import Micro, take_apart


class Trainer:
    """See `areal_x.trainer.Trainer`. One device; fp32 master weights and moments, activations in the compute precision."""

    def __init__(self, config: TrainerConfig) -> None:
        check_mesh(config.mesh.data)
        self.config = config
        self.directory = model_dir.resolve(config.model.path)
        self.device = find_device()
        self.dtype = compute_dtype(config.precision, self.device)
        self.model = model.load(self.directory, self.device)
        self.optimizer = make_optimizer(list(self.model.parameters()), config.optimizer)
        self.version = 0
        self._threads = torch.get_num_threads()
        self._beside: Lanes | None = None  # the sampler that shares the CPU with this trainer

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        if batch.weights is None:
            raise ValueError("the batch has no weights: an algorithm's weighting gives them")
        self._leave_cores()
        self.optimizer.zero_grad()  # what a loss that raised has left behind
        tokens = max(int(np.sum(batch.mask)), 1)
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=self.device))
        for micro in self._take_apart(batch):
            rows = micro.take(batch, self.device)
            # Only what is trained on goes through the head: a loss masks everything else before it computes.
            policy = self._policy(rows, micro.flat(np.asarray(batch.mask).reshape(-1)[micro.places]))
            terms, metrics = loss(policy, rows)
            total = (rows.weights * terms).sum()
            if total.requires_grad:
                total.backward()
            sums["loss"] += total.detach()
            for name, x in metrics.items():
                sums[name] += torch.where(rows.mask, x.detach(), 0).sum() / tokens
        norm = self._clip()
        rate = float(self.config.optimizer.learning_rate_at(np.float32(self.version)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.version += 1
        return {name: float(x) for name, x in sums.items()} | {"grad_norm": norm, "learning_rate": rate}

    @torch.inference_mode()
    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        out = np.zeros(batch.shape, np.float32)
        given = Batch(batch.tokens, batch.segment_ids, batch.positions, batch.mask)
        for micro in self._take_apart(batch):
            logp = self._policy(micro.take(given, self.device), micro.flat(micro.real)).logp
            out.reshape(-1)[micro.places[micro.real]] = logp.cpu().numpy()[micro.real]
        return out

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, x in model.named_tensors(self.model).items():
            yield name, model.to_numpy(x.to(self.dtype) if x.is_floating_point() else x)

    def snapshot(self) -> dict[str, Tensor]:
        return {name: x.detach().to(self.dtype, copy=True) for name, x in self.model.named_parameters()}

    def sampler(self, slots: int, context: int) -> Any:
        from areal_x_torch.sampler import Sampler

        self._beside = Sampler(self.model, slots, context, self.dtype)
        return self._beside

    def save(self, directory: Path) -> None:
        tensors = ((name, model.to_numpy(x)) for name, x in model.named_tensors(self.model).items())
        model_dir.write_model(directory, self.directory, tensors)
        states = ((name, self.optimizer.state[p]) for name, p in self.model.named_parameters())
        moments = ((name, model.to_numpy(s["exp_avg"]), model.to_numpy(s["exp_avg_sq"])) for name, s in states)
        model_dir.write_state(directory, moments, {"version": self.version})

    def restore(self, directory: Path) -> None:
        self.version = int(model_dir.read_state(directory)["version"])
        model.copy_in(model.named_tensors(self.model), model_dir.read_tensors(directory), str(directory))
        targets = {}
        for name, p in self.model.named_parameters():
            state = self.optimizer.state[p]
            targets |= {model_dir.FIRST + name: state["exp_avg"], model_dir.SECOND + name: state["exp_avg_sq"]}
            state["step"].fill_(self.version)
        model.copy_in(targets, model_dir.read_moments(directory), str(directory))

    def _leave_cores(self) -> None:
        """On a CPU, half of the cores while the sampler decodes. On all of them each operation would wait for the threads whose
        core a lane has: an asynchronous step on two cores takes 0.7 of the time this way."""
        if self.device.type == "cpu" and self._beside is not None:
            torch.set_num_threads(max(1, self._threads // 2) if self._beside.busy else self._threads)

    def _take_apart(self, batch: Batch) -> list[Micro]:
        return take_apart(batch.segment_ids, places_at_once(self.config.micro_batch_rows * batch.shape[1], self.device))

    def _policy(self, rows: Batch, wanted: Tensor) -> Policy:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            hidden = model.hidden_states(self.model, rows.tokens)
        c = self.config
        wanted = wanted.to(self.device)
        chosen = head.logprobs(hidden.to(self.dtype), model.head(self.model), rows.tokens, wanted, c.temperature, c.head_chunk)
        return Policy(chosen)

    def _clip(self) -> float:
        """Scales the gradient down to `optimizer.clip_norm`; its global norm before."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        limit = self.config.optimizer.clip_norm
        if 0 < limit < norm:
            torch._foreach_mul_(gradients, limit / norm)
        return norm


def make_optimizer(parameters: Sequence[Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with decay on matrices only (norms and biases are left alone), its moments already there."""
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    for p in parameters:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer
