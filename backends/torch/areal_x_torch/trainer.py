"""The torch trainer: a transformers model, AdamW, and as many micro-batches as a batch needs.

Of several processes each has a batch whole and computes its rows of it (areal_x_torch.parallel says what else lies where); all
make the same passes through the model in the same order, as each gathers parameters together.
"""

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
from areal_x.checkpoint import Wait
from areal_x.errors import ConfigError, one_of
from areal_x.lora import check_saved
from areal_x.rollout.lanes import Lanes
from areal_x.trainer import Loss, OptimizerConfig, TrainerConfig
from areal_x.types import Batch, Policy
from areal_x_torch import head, model, sharded
from areal_x_torch.device import compute_dtype, find_device, memory_of, places_at_once
from areal_x_torch.layout import NO_SEQUENCE, Sequences, micro_batches, refuse_images, take_apart, to_tensor
from areal_x_torch.parallel import (
    check_fit,
    make_mesh,
    parts_to_sum,
    rank_among_rows,
    recompute,
    spread,
    sum_gradients,
    sum_over_rows,
    total_norm,
)
from areal_x_torch.parts import gathered, local, mesh_of


class Trainer:
    """See `areal_x.trainer.Trainer`. fp32 master weights and moments, activations in the compute precision."""

    def __init__(self, config: TrainerConfig) -> None:
        one_of("model.attention", config.model.attention, ("auto",))
        one_of("trainer.remat", config.remat, ("auto", "layers"))
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
        self.mesh = make_mesh(config.mesh, self.device)
        self.share, self.shares = rank_among_rows(self.mesh)
        check_fit(self.directory, config.mesh, memory_of(self.device), learns=not config.frozen)
        self.dtype = compute_dtype(config.precision, self.device)
        self.teacher = self._load_teacher(Path(config.teacher)) if config.teacher is not None else None
        at = self.device if self.mesh is None else torch.device("cpu")  # a device may hold its part alone
        if config.frozen:
            self.model = model.load_frozen(self.directory, at, self.dtype, config.head)
        else:
            self.model = model.load(self.directory, at, config.head)
        if config.remat == "layers" and not config.frozen:
            recompute(self.model)  # before it is split: a block that is computed again is gathered already
        self.whole = spread(self.model, self.mesh, self.dtype, self.device)
        self.summed = parts_to_sum(self.model, self.mesh)
        if not config.frozen:
            self.optimizer = make_optimizer(list(self.model.parameters()), config.optimizer)
        self.version = 0
        self._threads = torch.get_num_threads()
        self._beside: Lanes | None = None  # the sampler that shares the CPU with this trainer

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        if batch.weights is None:
            raise ValueError("the batch has no weights: an algorithm's weighting gives them")
        self._need_moments("update")
        refuse_images(batch)
        self._leave_cores()
        self.optimizer.zero_grad()  # what a loss that raised has left behind
        tokens = max(int(np.sum(batch.mask)), 1)
        zero = partial(torch.zeros, (), device=self.device)
        sums: dict[str, Tensor] = defaultdict(zero, loss=zero())
        for shares in micro_batches(batch.map(np.asarray), self.config.micro_batch_rows, self.shares):
            packed, passes = shares[self.share], self._passes([share.segment_ids for share in shares])
            rows = packed.map(lambda x: to_tensor(x, self.device))
            # Only what is trained on goes through the head: a loss masks everything else before it computes.
            terms, metrics = loss(self._policy(packed, packed.mask, passes, self.config.entropy, self.teacher), rows)
            total = (rows.weights * terms).sum()
            if total.requires_grad:
                total.backward()
            sums["loss"] += total.detach()
            for name, x in metrics.items():
                sums[name] += torch.where(rows.mask, x.detach(), 0).sum() / tokens
        sums = dict(zip(sums, sum_over_rows(torch.stack(list(sums.values())), self.mesh), strict=True))
        sum_gradients(self.summed, self.mesh)
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
            yield name, model.to_numpy(gathered(x.to(self.dtype) if x.is_floating_point() else x))

    def snapshot(self) -> dict[str, Tensor]:
        self._only_with("snapshot", "policy")
        copied = ((name, gathered(x.detach().to(self.dtype, copy=True))) for name, x in self.model.named_parameters())
        # All gather it, and the first, whose sampler draws, keeps it.
        return {name: x for name, x in copied if self.mesh is None or self.mesh.get_rank() == 0}

    def sampler(self, slots: int, context: int) -> Any:
        from areal_x_torch.sampler import Sampler

        self._only_with("sampler", "policy")
        # Who has a part of the model alone, or one whose blocks are wrapped, samples with a whole one beside it.
        own = self.mesh is None and self.config.remat != "layers"
        of = self.model if own else model.load_frozen(self.directory, self.device, self.dtype)
        self._beside = Sampler(of, slots, context, self.dtype)
        return self._beside

    def save(self, directory: Path | None) -> None:
        self._need_moments("state to save")
        tensors = ((name, model.to_numpy(gathered(x))) for name, x in model.named_tensors(self.model).items())
        model_dir.write_model(directory, self.directory, tensors, head=self.config.head)
        states = ((name, self.optimizer.state[p]) for name, p in self.model.named_parameters())
        moments = ((name, *(model.to_numpy(gathered(s[of])) for of in ("exp_avg", "exp_avg_sq"))) for name, s in states)
        model_dir.write_state(directory, moments, {"version": self.version})

    def save_in_background(self, directory: Path) -> Wait | None:
        writes = self.mesh is None or self.mesh.get_rank() == 0
        if self.config.checkpoint == "portable":
            self.save(directory if writes else None)
            return None
        self._need_moments("state to save")
        if writes:
            model_dir.copy_others(directory, self.directory, self.config.head)
            model_dir.write_numbers(directory, {"version": self.version, "optimizer": self.config.optimizer.name})
        return sharded.save(directory, self._state(), together=self.mesh is not None)

    def restore(self, directory: Path) -> None:
        if sharded.is_sharded(directory):
            state = model_dir.read_state(directory)
            self.config.optimizer.check_state(directory, state)
            sharded.restore(directory, self._state(), together=self.mesh is not None)
            self.version = int(state["version"])
            for of_parameter in self.optimizer.state.values():
                of_parameter["step"].fill_(self.version)
            return
        model_dir.check_portable(directory)
        check_saved(directory, self.config.lora, self.directory)
        state = model_dir.read_state(directory)
        self.config.optimizer.check_state(directory, state)
        self.version = int(state["version"])
        model.copy_in(model.named_tensors(self.model), model_dir.read_tensors(directory), str(directory))
        targets = {}
        for name, p in self.model.named_parameters():
            state = self.optimizer.state[p]
            targets |= {model_dir.FIRST + name: state["exp_avg"], model_dir.SECOND + name: state["exp_avg_sq"]}
            state["step"].fill_(self.version)
        model.copy_in(targets, model_dir.read_moments(directory), str(directory))

    def _state(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint, or this process's part, without copying."""
        tensors = model.named_tensors(self.model)
        for name, p in self.model.named_parameters():
            state = self.optimizer.state[p]
            tensors |= {model_dir.FIRST + name: state["exp_avg"], model_dir.SECOND + name: state["exp_avg_sq"]}
        return tensors

    def _load_teacher(self, directory: Path) -> PreTrainedModel:
        model_dir.check_vocabulary("train.teacher", directory, self.directory)
        teacher = model.load_frozen(directory, self.device if self.mesh is None else torch.device("cpu"), self.dtype)
        spread(teacher, self.mesh, self.dtype, self.device, ends=False)  # the student's pass reads its head
        return teacher

    def _leave_cores(self) -> None:
        """On a CPU, half of the cores while the sampler decodes. On all of them each operation would wait for the threads whose
        core a lane has: an asynchronous step on two cores takes 0.7 of the time this way."""
        if self.device.type == "cpu" and self._beside is not None:
            torch.set_num_threads(max(1, self._threads // 2) if self._beside.busy else self._threads)

    def _policy(
        self,
        packed: Batch,
        wanted: Bool[np.ndarray, "rows length"],
        passes: Sequence[Sequences],
        entropy: bool = False,
        teacher: PreTrainedModel | None = None,
    ) -> Policy:
        """What the head says of the wanted tokens of packed rows, 0 elsewhere, in these passes through the model."""
        said: dict[str, Tensor] = {}
        for some in passes:
            telling, told = some.read(wanted, before=self.config.head != "reward")
            rows, telling = (to_tensor(x, self.device) for x in (some.take(packed.tokens), telling))
            targets, told = (to_tensor(x, self.device) for x in (packed.tokens.reshape(-1)[told], told))
            beside = None
            if teacher is not None:
                with torch.no_grad():
                    of_teacher = self._hidden(teacher, rows, telling)
                beside = head.Teacher(of_teacher, model.head(teacher), self.config.divergence)
            read = partial(self._hidden, rows=rows, telling=telling)
            say = partial(self._say, targets=targets, entropy=entropy, teacher=beside)
            for name, x in self.whole(read, say).items():
                flat = said.get(name, x.new_zeros(packed.tokens.size))
                said[name] = flat.index_copy(0, told, x)
        return Policy(**{name: x.reshape(packed.shape) for name, x in said.items()})

    def _passes(self, shares: Sequence[np.ndarray]) -> list[Sequences]:
        """This process's passes over its share, given everyone's segments: as many as whoever has most makes."""
        # A quarter more than so many rows have: else a little padding would split the sequences of full rows in two.
        places = self.config.micro_batch_rows * shares[0].shape[1] * 5 // 4
        taken = [take_apart(segment_ids, places_at_once(places, self.device)) for segment_ids in shares]
        own = taken[self.share]
        return own + [NO_SEQUENCE] * (max(map(len, taken)) - len(own))

    def _hidden(self, of: PreTrainedModel, rows: Tensor, telling: Tensor) -> Tensor:
        """What a model's head reads at the flat places `telling` of rows of tokens."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            states = model.hidden_states(of, rows)
        return states.to(self.dtype).flatten(0, 1).index_select(0, telling)

    def _say(
        self, hidden: Tensor, layer: model.Head, targets: Tensor, entropy: bool, teacher: head.Teacher | None
    ) -> dict[str, Tensor]:
        c = self.config
        if c.head != "policy":
            return {"values": head.values(hidden, layer.weight)}
        said = head.logprobs(hidden, layer, targets, c.temperature, c.head_chunk, entropy, teacher)
        return {name: x for name, x in zip(("logp", "entropy", "divergence"), said, strict=True) if x is not None}

    @torch.no_grad()  # what fully_shard gathers in inference mode could not be trained with afterwards
    def _everywhere(self, batch: Batch, name: str) -> Float32[np.ndarray, "rows length"]:
        """What the head says of all tokens."""
        refuse_images(batch)
        packed = Batch(batch.tokens, batch.segment_ids, batch.positions, batch.mask).map(np.asarray)
        share_of_row = np.arange(len(packed.tokens)) * self.shares // len(packed.tokens)
        shares = [np.where((share_of_row == share)[:, None], packed.segment_ids, 0) for share in range(self.shares)]
        said = getattr(self._policy(packed, shares[self.share] != 0, self._passes(shares)), name)
        if said is None:
            return np.zeros(batch.shape, np.float32)
        return sum_over_rows(said, self.mesh).cpu().numpy()

    def _only_with(self, what: str, *heads: str) -> None:
        if self.config.head not in heads:
            raise ValueError(f"{what} needs a trainer with the head {' or '.join(map(repr, heads))}, not {self.config.head!r}")

    def _need_moments(self, what: str) -> None:
        if self.config.frozen:
            raise ValueError(f"a frozen model has no {what}: it is only asked")

    def _clip(self) -> float:
        """Scales the gradient down to `optimizer.clip_norm`; its global norm before."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = total_norm(gradients, self.mesh)
        limit = self.config.optimizer.clip_norm
        if 0 < limit < norm:
            torch._foreach_mul_([local(g) for g in gradients], limit / norm)
        return norm


def make_optimizer(parameters: Sequence[Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW with decay on matrices only (norms and biases are left alone), its moments already there."""
    # torch computes with tensors of one mesh at once.
    alike: dict[Any, list[Parameter]] = defaultdict(list)
    for p in parameters:
        alike[p.ndim >= 2, mesh_of(p)].append(p)
    groups = [{"params": ps, "weight_decay": config.weight_decay * decays} for (decays, _), ps in alike.items()]
    optimizer = torch.optim.AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
    for p in parameters:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        optimizer.state[p] = {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer
