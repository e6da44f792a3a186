"""The torch trainer: a transformers model, an optimizer, and as many micro-batches as a batch
needs.

Of several processes each has a batch whole and computes its rows of it (areal_x_torch.sharding says
what else lies where); all make the same passes through the model in the same order, as each gathers
parameters together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float32
from torch import Tensor
from transformers import PreTrainedModel

from areal_x.errors import ConfigError
from areal_x.hf import adapters as adapter_files
from areal_x.hf import model_dir
from areal_x.hf.tokenizer import check_known, check_vocabulary
from areal_x.protocols.recorded_experts import recorded_experts
from areal_x.protocols.trainer import Wait, is_max_reduced
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.runtime.interrupts import check
from areal_x.types import IMAGES, Batch, Loss, Policy, evaluate_loss
from areal_x_torch import (
    attention,
    context_parallel,
    decoder_blocks,
    experts,
    head,
    loading,
    lora,
    model,
    optimizers,
    rope,
    sharded_checkpoint,
)
from areal_x_torch.attention import Segments
from areal_x_torch.collectives import Summed
from areal_x_torch.device import compute_dtype, find_device, memory_of, repeat_exactly
from areal_x_torch.dtensors import Piece, gathered, gathered_each, local
from areal_x_torch.flat_rows import Flat, divisible, flatten, micro_batches, no_sequence, to_tensor
from areal_x_torch.images import check_images, check_sharing, seen_of
from areal_x_torch.sharding import (
    check_model,
    largest_over_rows,
    make_mesh,
    parts_to_sum,
    rank_among_rows,
    spread,
    sum_gradients,
    sum_over_rows,
    sum_over_tokens,
    total_norm,
)


class Trainer:
    """See `areal_x.trainer.Trainer`. fp32 master weights, activations in the compute precision."""

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self.directory = model_dir.resolve(config.model.path)
        if config.lora.rank:
            lora.check_targets(self.directory, config.lora)
        self.device = find_device()
        if config.deterministic:
            repeat_exactly(self.device)
        # where all is on the host anyway
        self.offload = config.offload and self.device.type != "cpu"
        self.mesh = make_mesh(config.mesh, self.device, self.offload)
        self.share, self.shares = rank_among_rows(self.mesh)
        learns = not (config.frozen or config.lora.rank)
        check_model(self.directory, config.mesh, memory_of(self.device), learns, self.offload)
        self.dtype = compute_dtype(config.precision, self.device)
        self.context = (
            None
            if config.mesh.context == 1 or self.mesh is None
            else self.mesh["context"].get_group()
        )
        self.attend = context_parallel.exchanging(
            attention.choose(config.model.attention, self.device, self.dtype), self.context
        )
        self.teacher = (
            self._load_teacher(Path(config.teacher)) if config.teacher is not None else None
        )
        self.model = loading.build(self.directory, config.head)
        check_sharing(config.share_prompts, self.directory, self.model.config)
        rope.check_length("train.row_length", config.row_length, self.model.config, self.directory)
        if config.frozen or config.lora.rank:
            loading.freeze(self.model, self.dtype)
        if self.teacher is not None and model.sees(self.teacher) != model.sees(self.model):
            raise ConfigError(
                "train.teacher",
                config.teacher,
                "a model that sees where the student does, and else one of text",
            )
        if config.lora.rank:
            lora.adapt(self.model, config.lora, config.seed)
        self.routers = experts.hook_routers(self.model, config, self.directory)
        decoder_blocks.prepare(self.model, config, self.dtype, memory_of(self.device))
        self.whole = spread(self.model, self.mesh, self.dtype, self.device, offload=self.offload)
        loading.fill(self.model, self.directory)
        self.summed = parts_to_sum(self.model, self.mesh)
        self.trained = lora.trained(self.model, config.lora)
        if not config.frozen:
            self.optimizer = optimizers.Optimizer(self.trained.items(), config.optimizer)
        self.version = 0

    @property
    def threads(self) -> int | None:
        return torch.get_num_threads() if self.device.type == "cpu" and self.mesh is None else None

    @threads.setter
    def threads(self, count: int | None) -> None:
        assert count is not None
        torch.set_num_threads(count)

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        if batch.weights is None:
            raise ValueError("the batch has no weights: an algorithm's weighting gives them")
        self._need_moments("update")
        self._check(batch, self.model, self.directory)
        if self.teacher is not None:
            self._check(batch, self.teacher, Path(str(self.config.teacher)))
        batch = batch.replace(experts=self._replayed(batch))
        self.optimizer.zero_grad()  # what a loss that raised has left behind
        tokens = max(int(np.sum(batch.mask)), 1)
        zero = partial(torch.zeros, (), device=self.device)
        sums: dict[str, Tensor] = defaultdict(zero, loss=zero())
        largest: dict[str, Tensor] = defaultdict(zero)
        for shares in micro_batches(
            batch.map(np.asarray), self.config.micro_batch_rows, self.shares
        ):
            if self.mesh is None:  # others would wait in a collective
                check()
            packed, passes = shares[self.share], self._passes(shares)
            rows = packed.map(lambda x: to_tensor(x, self.device))
            tally = None if self.routers is None else experts.Tally.of(self.routers, self.device)
            # Only what is trained on goes through the head: a loss masks everything else before it
            # computes.
            policy = self._policy(
                packed, packed.mask, passes, self.config.entropy, self.teacher, tally
            )
            terms, metrics = evaluate_loss(loss, policy, rows)
            total = (rows.weights * terms).sum()
            sums["loss"] += total.detach()
            if tally is not None:
                seen, trained = (
                    sum(np.count_nonzero(getattr(x, name)) for x in shares)
                    for name in ("segment_ids", "mask")
                )
                uneven = tally.imbalance(seen, partial(sum_over_tokens, mesh=self.mesh)) * (
                    trained / tokens
                )
                total = total + self.config.balance * uneven
                of_rows = (
                    uneven.detach()
                    if self.context is None
                    else Summed.apply(uneven.detach(), self.context)
                )
                sums["expert_imbalance"] += of_rows
                sums["loss"] += self.config.balance * of_rows
            if total.requires_grad:
                total.backward()
            for name, x in metrics.items():
                x = torch.where(rows.mask, x.detach(), 0)
                if is_max_reduced(name):
                    largest[name] = (
                        torch.maximum(largest[name], x.max()) if x.numel() else largest[name]
                    )
                else:
                    sums[name] += x.sum() / tokens
        largest = largest_over_rows(largest, self.mesh)
        sums = dict(
            zip(sums, sum_over_rows(torch.stack(list(sums.values())), self.mesh), strict=True)
        )
        for p in self.model.parameters():
            if p.grad is None and p.requires_grad:  # of what a batch without images does not reach
                p.grad = torch.zeros_like(p)
        sum_gradients(self.summed, self.mesh)
        norm = self._clip()
        rate = float(self.config.optimizer.learning_rate_at(np.float32(self.version)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        results = {name: float(x) for name, x in (sums | largest).items()} | {
            "grad_norm": norm,
            "learning_rate": rate,
        }
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

    def device_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `weights`, on this process's device. Where nothing is cast or gathered
        they are the model's own."""
        for name, x in gathered_each(
            lora.merged(self.model), lambda x: x.to(self.dtype) if x.is_floating_point() else x
        ):
            yield name, x.to(self.device)

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, x in self.device_weights():
            yield name, model.to_numpy(x)

    def adapter(self) -> Iterator[tuple[str, np.ndarray]]:
        if not self.config.lora.rank:
            raise ValueError("a trainer with lora.rank = 0 has no adapter")
        for name, x in self.trained.items():
            yield name, model.to_numpy(gathered(x.detach()))

    def snapshot(self) -> dict[str, Tensor]:
        self._only_with("snapshot", "policy")
        copied = gathered_each(lora.merged(self.model), lambda x: x.to(self.dtype, copy=True))
        copied = ((name, x.to(self.device)) for name, x in copied)
        # All gather it, and the first, whose sampler draws, keeps it.
        return {name: x for name, x in copied if self.mesh is None or self.mesh.get_rank() == 0}

    def sampler(self, slots: int, context: int) -> Any:
        from areal_x_torch.sampler import Sampler

        self._only_with("sampler", "policy")
        rope.check_length("embedded.context", context, self.model.config, self.directory)
        # Who has a part of the model alone, or one whose blocks are compiled, samples with a whole
        # one beside it.
        own = self.mesh is None and not self.config.compile
        of = self.model if own else loading.frozen(self.directory, self.device, self.dtype)
        return Sampler(of, slots, context, self.dtype)

    def save(self, directory: Path | None) -> None:
        self._need_moments("state to save")
        state: dict[str, Any] = {"version": self.version}
        if self.config.lora.rank:
            if directory is None:
                model_dir.exhaust(self.adapter())
            else:
                model_dir.copy_other_files(directory, self.directory, self.config.head)
                how = {"config": self.config.lora, "base": self.directory, "head": self.config.head}
                adapter_files.write(directory, self.adapter(), **how)
                state["base"] = adapter_files.fingerprint(self.directory)
        else:
            tensors = (
                (name, model.to_numpy(x))
                for name, x in gathered_each(model.named_tensors(self.model).items())
            )
            model_dir.write_model(directory, self.directory, tensors, head=self.config.head)
        optimizers.save(
            directory, self.config.optimizer, self.optimizer, self.trained, state, self._as_saved
        )

    def save_in_background(self, directory: Path) -> Wait | None:
        writes = self.mesh is None or self.mesh.get_rank() == 0
        if self.config.checkpoint == "portable":
            self.save(directory if writes else None)
            return None
        self._need_moments("state to save")
        if writes:
            model_dir.copy_other_files(directory, self.directory, self.config.head)
            numbers = {
                "version": self.version,
                "optimizer": self.config.optimizer.name,
                "backend": "torch",
            }
            model_dir.write_trainer_state(directory, numbers)
        return sharded_checkpoint.save(directory, self._state(), together=self.mesh is not None)

    def restore(self, directory: Path) -> None:
        if sharded_checkpoint.is_sharded(directory):
            state = model_dir.read_trainer_state(directory)
            self.config.optimizer.check_state(directory, state, "torch")
            sharded_checkpoint.restore(directory, self._state(), together=self.mesh is not None)
            self.version = int(state["version"])
            self.optimizer.set_steps(self.version)
            return
        model_dir.check_portable(directory)
        adapter_files.check_saved(directory, self.config.lora, self.directory)
        optimizers.restore(
            directory, self.config.optimizer, self.optimizer, self.trained, self._as_saved
        )
        if self.config.lora.rank:
            loading.copy_in(self.trained, adapter_files.read(directory), str(directory))
        else:
            loading.copy_in(
                model.named_tensors(self.model), model_dir.read_tensors(directory), str(directory)
            )
        self.version = int(model_dir.read_trainer_state(directory)["version"])

    def _as_saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | Piece]:
        """Of what is trained, or its moments, under the names of its files."""
        return dict(tensors) if self.config.lora.rank else model.as_saved(self.model, tensors)

    def _state(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint, or this process's part, without copying."""
        return model.own_tensors(self.model) | optimizers.moments(self.optimizer, self.trained)

    def _check(self, batch: Batch, of: PreTrainedModel, directory: Path) -> None:
        """Raises: UserError for tokens, images or lengths that the model of a directory cannot
        read."""
        check_images(batch, of.config)
        check_known(batch.tokens, model.vocabulary(of), directory)
        rope.check_longest(int(np.max(batch.positions, initial=-1)) + 1, of.config, directory)

    def _replayed(self, batch: Batch) -> np.ndarray | None:
        """The recorded experts, where they are to be used."""
        if not self.config.replay_experts:
            return None
        assert self.routers is not None
        return recorded_experts(
            batch, self.directory, self.routers.layers, self.routers.per_token, self.routers.count
        )

    def _load_teacher(self, directory: Path) -> PreTrainedModel:
        check_vocabulary("train.teacher", directory, self.directory)
        check_model(directory, self.config.mesh, None, learns=False)
        teacher = loading.freeze(loading.build(directory, "policy"), self.dtype)
        rope.check_length("train.row_length", self.config.row_length, teacher.config, directory)
        decoder_blocks.prepare(teacher, self.config, self.dtype, None)
        # the student's pass reads its head
        spread(teacher, self.mesh, self.dtype, self.device, ends=False)
        loading.fill(teacher, directory)
        return teacher

    def _policy(
        self,
        packed: Batch,
        wanted: Bool[np.ndarray, "rows length"],
        passes: Sequence[Flat],
        entropy: bool = False,
        teacher: PreTrainedModel | None = None,
        tally: experts.Tally | None = None,
    ) -> Policy:
        """What the head says of the wanted tokens of packed rows, 0 elsewhere, in these passes
        through the model."""
        said: dict[str, Tensor] = {}
        for flat in passes:
            own = context_parallel.own_part(len(flat.places), self.context)
            telling, told = flat.read(wanted, before=self.config.head != "reward", own=own)
            row = self._row(packed, flat, own, tally)
            targets, telling, told = (
                to_tensor(x, self.device) for x in (packed.tokens.reshape(-1)[told], telling, told)
            )
            beside = None
            if teacher is not None:
                with torch.no_grad():
                    of_teacher = self._hidden(teacher, row, telling)
                beside = head.Teacher(of_teacher, model.head(teacher), self.config.divergence)
            read = partial(self._hidden, row=row, telling=telling)
            say = partial(self._say, targets=targets, entropy=entropy, teacher=beside)
            for name, x in self.whole(read, say).items():
                everywhere = said.get(name, x.new_zeros(packed.tokens.size))
                said[name] = everywhere.index_copy(0, told, x)
        if self.context is not None:
            # A loss may need all that was said of a sequence. Each process computes the same one,
            # and its gradient goes back to what was said here.
            said = {name: Summed.apply(x, self.context) for name, x in said.items()}
        return Policy(**{name: x.reshape(packed.shape) for name, x in said.items()})

    def _passes(self, shares: Sequence[Batch]) -> list[Flat]:
        """This process's passes over its share, given everyone's: as many as whoever has most
        makes."""
        budget = self.config.micro_batch_rows * shares[0].shape[1]
        passes = [flatten(share.segment_ids, budget, share.prefix_ids) for share in shares]
        parts = self.config.mesh.context
        own = [divisible(flat, parts) for flat in passes[self.share]]
        return own + [no_sequence(parts)] * (max(map(len, passes)) - len(own))

    def _row(self, packed: Batch, flat: Flat, own: slice, tally: experts.Tally | None) -> model.Row:
        """The part `own` of a flat row's tokens, and the sequences of all of it."""
        segments = Segments.of(
            tuple(flat.lengths.tolist()), self.attend, self.device, tuple(flat.prefixes.tolist())
        )
        tokens, positions, seen = (
            to_tensor(flat.take(packed.tokens)[own], self.device),
            flat.positions[own],
            None,
        )
        if model.sees(self.model):
            positions, seen = seen_of(
                packed, flat, self.model.config, self.device, self.mesh is not None
            )
        recorded = (
            None
            if packed.experts is None
            else to_tensor(flat.take(packed.experts)[own], self.device)
        )
        routing = experts.Routing(recorded, tally, flat.counted(own))
        return model.Row(tokens, to_tensor(positions, self.device), segments, seen, routing)

    def _hidden(self, of: PreTrainedModel, row: model.Row, telling: Tensor) -> Tensor:
        """What a model's head reads at the places `telling` of a flat row."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            states = model.hidden_states(of, row)
        return states.to(self.dtype).index_select(0, telling)

    def _say(
        self,
        hidden: Tensor,
        layer: model.Head,
        targets: Tensor,
        entropy: bool,
        teacher: head.Teacher | None,
    ) -> dict[str, Tensor]:
        c = self.config
        if c.head != "policy":
            return {"values": head.values(hidden, layer.weight)}
        said = head.logprobs(hidden, layer, targets, c.temperature, c.head_chunk, entropy, teacher)
        return {
            name: x
            for name, x in zip(("logp", "entropy", "divergence"), said, strict=True)
            if x is not None
        }

    # what fully_shard gathers in inference mode could not be trained with afterwards
    @torch.no_grad()
    def _everywhere(self, batch: Batch, name: str) -> Float32[np.ndarray, "rows length"]:
        """What the head says of all tokens."""
        self._check(batch, self.model, self.directory)
        read = {name: getattr(batch, name) for name in ("prefix_ids", *IMAGES)} | {
            "experts": self._replayed(batch)
        }
        packed = Batch(batch.tokens, batch.segment_ids, batch.positions, batch.mask, **read).map(
            np.asarray
        )
        share_of_row = np.arange(len(packed.tokens)) * self.shares // len(packed.tokens)
        owned = [
            np.where((share_of_row == share)[:, None], packed.segment_ids, 0)
            for share in range(self.shares)
        ]
        passes = self._passes([packed.replace(segment_ids=own) for own in owned])
        said = getattr(self._policy(packed, owned[self.share] != 0, passes), name)
        if said is None:
            return np.zeros(batch.shape, np.float32)
        return sum_over_rows(said, self.mesh).cpu().numpy()

    def _only_with(self, what: str, *heads: str) -> None:
        if self.config.head not in heads:
            raise ValueError(
                f"{what} needs a trainer with the head {' or '.join(map(repr, heads))}, not"
                f" {self.config.head!r}"
            )

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
