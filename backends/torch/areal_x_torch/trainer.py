"""The torch trainer: a transformers model, AdamW, and as many micro-batches as a batch needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float32
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from areal_x import model_dir
from areal_x.errors import ConfigError, UserError, one_of
from areal_x.lora import check_saved
from areal_x.rollout.lanes import Lanes
from areal_x.trainer import Loss, OptimizerConfig, TrainerConfig
from areal_x.types import IMAGES, Batch, Policy
from areal_x_torch import attention, head, model
from areal_x_torch.attention import Segments
from areal_x_torch.device import check_mesh, compute_dtype, find_device
from areal_x_torch.images import check_images, seen_of
from areal_x_torch.layout import Flat, flatten, micro_batches, to_tensor


class Trainer:
    """See `areal_x.trainer.Trainer`. One device; fp32 master weights and moments, activations in the compute precision."""

    def __init__(self, config: TrainerConfig) -> None:
        check_mesh(config.mesh)
        one_of("trainer.remat", config.remat, ("auto",))
        one_of("trainer.checkpoint", config.checkpoint, ("portable",))
        if config.balance:
            raise ConfigError("trainer.balance", config.balance, "0, as the torch backend does not push experts yet")
        if config.replay_experts:
            raise ConfigError("trainer.replay_experts", True, "False, as the torch backend does not choose experts yet")
        if config.lora.rank:
            raise ConfigError(
                "lora.rank", config.lora.rank, "0, as the torch backend has no adapters yet: use train.backend = 'jax'"
            )
        one_of("optimizer.name", config.optimizer.name, ("adamw",))
        one_of("optimizer.moments", config.optimizer.moments, ("fp32",))
        self.config = config
        self.directory = model_dir.resolve(config.model.path)
        self.device = find_device()
        self.dtype = compute_dtype(config.precision, self.device)
        self.attend = attention.choose(config.model.attention, self.device, self.dtype)
        self.teacher = self._load_teacher(Path(config.teacher)) if config.teacher is not None else None
        if config.frozen:
            self.model = model.load_frozen(self.directory, self.device, self.dtype, config.head)
        else:
            self.model = model.load(self.directory, self.device, config.head)
            self.optimizer = make_optimizer(list(self.model.parameters()), config.optimizer)
        if self.teacher is not None and model.sees(self.teacher) != model.sees(self.model):
            raise ConfigError("train.teacher", config.teacher, "a model that sees where the student does, and else one of text")
        self.version = 0
        self._threads = torch.get_num_threads()
        self._beside: Lanes | None = None  # the sampler that shares the CPU with this trainer

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        if batch.weights is None:
            raise ValueError("the batch has no weights: an algorithm's weighting gives them")
        self._need_moments("update")
        check_images(batch, self.model.config)
        self._leave_cores()
        self.optimizer.zero_grad()  # what a loss that raised has left behind
        tokens = max(int(np.sum(batch.mask)), 1)
        zero = partial(torch.zeros, (), device=self.device)
        sums: dict[str, Tensor] = defaultdict(zero, loss=zero())
        for packed in micro_batches(batch.map(np.asarray), self.config.micro_batch_rows):
            rows = packed.map(lambda x: to_tensor(x, self.device))
            # Only what is trained on goes through the head: a loss masks everything else before it computes.
            terms, metrics = loss(self._policy(packed, packed.mask, self.config.entropy, self.teacher), rows)
            total = (rows.weights * terms).sum()
            if total.requires_grad:
                total.backward()
            sums["loss"] += total.detach()
            for name, x in metrics.items():
                sums[name] += torch.where(rows.mask, x.detach(), 0).sum() / tokens
        for p in self.model.parameters():
            if p.grad is None and p.requires_grad:  # of what a batch without images does not reach
                p.grad = torch.zeros_like(p)
        norm = self._clip()
        rate = float(self.config.optimizer.learning_rate_at(np.float32(self.version)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        results = {name: float(x) for name, x in sums.items()} | {"grad_norm": norm, "learning_rate": rate}
        finite = np.isfinite([results["loss"], norm]).all()
        if finite:
            self.optimizer.step()
        else:  # the optimizer's counts are the version, and a skipped step is one too
            for state in self.optimizer.state.values():
                state["step"] += 1
        self.optimizer.zero_grad()
        self.version += 1
        return results | {"skipped": 1.0 - finite}

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        self._only_with("logprobs", "policy")
        return self._everywhere(batch, "logp")

    def values(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        self._only_with("values", "value", "reward")
        return self._everywhere(batch, "values")

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, x in model.named_tensors(self.model).items():
            yield name, model.to_numpy(x.to(self.dtype) if x.is_floating_point() else x)

    def snapshot(self) -> dict[str, Tensor]:
        self._only_with("snapshot", "policy")
        return {name: x.detach().to(self.dtype, copy=True) for name, x in self.model.named_parameters()}

    def sampler(self, slots: int, context: int) -> Any:
        from areal_x_torch.sampler import Sampler

        self._only_with("sampler", "policy")
        if model.sees(self.model):
            raise UserError(f"{self.directory} sees, and the torch sampler draws from models of text: use vLLM servers")
        self._beside = Sampler(self.model, slots, context, self.dtype)
        return self._beside

    def save(self, directory: Path) -> None:
        self._need_moments("state to save")
        tensors = ((name, model.to_numpy(x)) for name, x in model.named_tensors(self.model).items())
        model_dir.write_model(directory, self.directory, tensors, head=self.config.head)
        first, second = (self._moments(which) for which in ("exp_avg", "exp_avg_sq"))
        moments = ((name, model.to_numpy(x), model.to_numpy(second[name])) for name, x in first.items())
        model_dir.write_state(directory, moments, {"version": self.version})

    def save_in_background(self, directory: Path) -> None:
        """All at once, so that nothing is left to wait for."""
        self.save(directory)

    def restore(self, directory: Path) -> None:
        model_dir.check_portable(directory)
        check_saved(directory, self.config.lora, self.directory)
        state = model_dir.read_state(directory)
        self.config.optimizer.check_state(directory, state)
        self.version = int(state["version"])
        model.copy_in(model.named_tensors(self.model), model_dir.read_tensors(directory), str(directory))
        for state in self.optimizer.state.values():
            state["step"].fill_(self.version)
        targets = {model_dir.FIRST + name: x for name, x in self._moments("exp_avg").items()}
        targets |= {model_dir.SECOND + name: x for name, x in self._moments("exp_avg_sq").items()}
        model.copy_in(targets, model_dir.read_moments(directory), str(directory))

    def _moments(self, which: str) -> dict[str, Tensor]:
        """The optimizer's own, under the names of the tensors that they belong to."""
        return model.as_saved(self.model, {name: self.optimizer.state[p][which] for name, p in self.model.named_parameters()})

    def _load_teacher(self, directory: Path) -> PreTrainedModel:
        model_dir.check_vocabulary("train.teacher", directory, self.directory)
        return model.load_frozen(directory, self.device, self.dtype)

    def _leave_cores(self) -> None:
        """On a CPU, half of the cores while the sampler decodes. On all of them each operation would wait for the threads whose
        core a lane has: an asynchronous step on two cores takes 0.7 of the time this way."""
        if self.device.type == "cpu" and self._beside is not None:
            torch.set_num_threads(max(1, self._threads // 2) if self._beside.busy else self._threads)

    def _policy(
        self,
        packed: Batch,
        wanted: Bool[np.ndarray, "rows length"],
        entropy: bool = False,
        teacher: PreTrainedModel | None = None,
    ) -> Policy:
        """What the head says of the wanted tokens of packed rows, 0 elsewhere."""
        said: dict[str, Tensor] = {}
        for flat in flatten(packed.segment_ids, self.config.micro_batch_rows * packed.shape[1]):
            telling, told = flat.read(wanted, before=self.config.head != "reward")
            row = self._row(packed, flat)
            targets, telling, told = (to_tensor(x, self.device) for x in (packed.tokens.reshape(-1)[told], telling, told))
            hidden, beside = self._hidden(self.model, row, telling), None
            if teacher is not None:
                with torch.no_grad():
                    of_teacher = self._hidden(teacher, row, telling)
                beside = head.Teacher(of_teacher, model.head(teacher), self.config.divergence)
            for name, x in self._say(hidden, targets, entropy, beside).items():
                everywhere = said.get(name, x.new_zeros(packed.tokens.size))
                said[name] = everywhere.index_copy(0, told, x)
        return Policy(**{name: x.reshape(packed.shape) for name, x in said.items()})

    def _row(self, packed: Batch, flat: Flat) -> model.Row:
        segments = Segments.of(tuple(flat.lengths.tolist()), self.attend, self.device)
        tokens, positions, seen = to_tensor(flat.take(packed.tokens), self.device), flat.positions, None
        if model.sees(self.model):
            positions, seen = seen_of(packed, flat, self.model.config, self.device)
        return model.Row(tokens, to_tensor(positions, self.device), segments, seen)

    def _hidden(self, of: PreTrainedModel, row: model.Row, telling: Tensor) -> Tensor:
        """What a model's head reads at the places `telling` of a flat row."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            states = model.hidden_states(of, row)
        return states.to(self.dtype).index_select(0, telling)

    def _say(self, hidden: Tensor, targets: Tensor, entropy: bool, teacher: head.Teacher | None) -> dict[str, Tensor]:
        c, layer = self.config, model.head(self.model)
        if c.head != "policy":
            return {"values": head.values(hidden, layer.weight)}
        said = head.logprobs(hidden, layer, targets, c.temperature, c.head_chunk or 1024, entropy, teacher)
        return {name: x for name, x in zip(("logp", "entropy", "divergence"), said, strict=True) if x is not None}

    @torch.inference_mode()
    def _everywhere(self, batch: Batch, name: str) -> Float32[np.ndarray, "rows length"]:
        """What the head says of all tokens."""
        check_images(batch, self.model.config)
        images = {name: getattr(batch, name) for name in IMAGES}
        packed = Batch(batch.tokens, batch.segment_ids, batch.positions, batch.mask, **images).map(np.asarray)
        said = getattr(self._policy(packed, packed.segment_ids != 0), name)
        return np.zeros(batch.shape, np.float32) if said is None else said.cpu().numpy()

    def _only_with(self, what: str, *heads: str) -> None:
        if self.config.head not in heads:
            raise ValueError(f"{what} needs a trainer with the head {' or '.join(map(repr, heads))}, not {self.config.head!r}")

    def _need_moments(self, what: str) -> None:
        if self.config.frozen:
            raise ValueError(f"a frozen model has no {what}: it is only asked")

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
