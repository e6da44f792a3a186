"""The torch trainer: a transformers model, an optimizer, and as many micro-batches as a batch
needs.

Each of several processes computes its own rows of a batch (areal_x_torch.shares; areal_x_torch.sharding
defines the sharding of everything else); all make the same passes through the model in the same
order, because they gather parameters together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor
from transformers import PreTrainedModel

from areal_x.errors import ConfigError, UserError
from areal_x.hf import model_dir
from areal_x.hf.tokenizer import check_known, check_vocabulary
from areal_x.hf.trainer import HuggingFaceTrainer, Tensors
from areal_x.protocols.shares import Shares, blank_row, own_rows
from areal_x.protocols.trainer import Mine, Wait, is_max_reduced
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.runtime.interrupts import raise_if_interrupted
from areal_x.types import IMAGES, Batch, Loss, evaluate_loss
from areal_x_torch import (
    attention,
    context_parallel,
    decoder_blocks,
    experts,
    loading,
    lora,
    model,
    optimizers,
    resting,
    rope,
    sharded_checkpoint,
)
from areal_x_torch.collectives import SumOverGroup
from areal_x_torch.device import (
    compute_dtype,
    find_device,
    logits_at_once,
    make_deterministic,
    memory_of,
    peak_bytes,
)
from areal_x_torch.dtensors import ShardedView, gather, gather_each, local
from areal_x_torch.flat_rows import to_tensor
from areal_x_torch.forward import Forward
from areal_x_torch.images import check_images, check_sharing, sees
from areal_x_torch.sharding import (
    check_model,
    make_mesh,
    max_over_rows,
    replicated_in_tensor_group,
    row_rank,
    shard_model,
    sum_gradients,
    sum_over_rows,
    sum_over_tokens,
    total_norm,
)
from areal_x_torch.shares import MicroBatches, divide

# The output of each method of a trainer, and the heads that have it.
OUTPUTS = {"logprobs": ("logp", ("policy",)), "values": ("values", ("value", "reward"))}


class Trainer(HuggingFaceTrainer):
    """An `areal_x.protocols.trainer.Trainer` with fp32 master weights and activations in the
    compute precision."""

    backend = "torch"

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self.directory = model_dir.resolve(config.model.path)
        if config.lora.rank:
            lora.check_targets(self.directory, config.lora)
        self.device = find_device()
        if config.deterministic:
            make_deterministic(self.device)
        # On a CPU everything is on the host anyway.
        self.offload = config.offload and self.device.type != "cpu"
        self.mesh = make_mesh(config.mesh, self.device, self.offload)
        if config.rests and self.mesh is not None and not self.offload:
            raise UserError(
                "train.colocate = True needs a torch trainer in one process, without a mesh: one that is"
                " sharded over processes stays on its devices"
            )
        self.share, shares = row_rank(self.mesh)
        self.shares = Shares((self.share,), shares)
        learns = not (config.frozen or config.lora.rank)
        check_model(self.directory, config.mesh, memory_of(self.device), learns, self.offload)
        self.dtype = compute_dtype(config.precision, self.device)
        self.context = (
            None
            if config.mesh.context == 1 or self.mesh is None
            else self.mesh["context"].get_group()
        )
        attention.choose(
            config.model.attention, self.device, self.dtype
        )  # refuses before anything is loaded
        self.teacher = (
            self._load_teacher(Path(config.teacher)) if config.teacher is not None else None
        )
        self.model = loading.build(self.directory, config.head)
        check_sharing(config.share_prompts, self.directory, self.model.config)
        rope.check_length("train.row_length", config.row_length, self.model.config, self.directory)
        if config.frozen or config.lora.rank:
            loading.freeze(self.model, self.dtype)
        if self.teacher is not None and sees(self.teacher.config) != sees(self.model.config):
            raise ConfigError(
                "train.teacher",
                config.teacher,
                "a vision-language model exactly if the student is one",
            )
        if config.lora.rank:
            lora.add_adapters(self.model, config.lora, config.seed)
        self.routers = experts.hook_routers(self.model, config, self.directory)
        decoder_blocks.prepare(self.model, config, self.dtype, memory_of(self.device))
        module = shard_model(self.model, self.mesh, self.dtype, self.device, offload=self.offload)
        loading.fill(self.model, self.directory)
        attend = attention.choose(config.model.attention, self.device, self.dtype)
        self.forward = Forward(
            config=config,
            module=module,
            device=self.device,
            dtype=self.dtype,
            attend=context_parallel.ulysses(attend, self.context),
            context=self.context,
            distributed=self.mesh is not None,
            logits=logits_at_once(memory_of(self.device)),
        )
        self.summed = replicated_in_tensor_group(self.model, self.mesh)
        self.trained = lora.trained_parameters(self.model, config.lora)
        if not config.frozen:
            self.optimizer = optimizers.Optimizer(self.trained.items(), config.optimizer)
        self.version = 0
        self._step_logp: list[Tensor | None] = []  # of each micro-batch
        self._step_rows = np.arange(0)
        self._step_shape = 0, 0

    @property
    def threads(self) -> int | None:
        return torch.get_num_threads() if self.device.type == "cpu" and self.mesh is None else None

    @threads.setter
    def threads(self, count: int | None) -> None:
        assert count is not None
        torch.set_num_threads(count)

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        division = divide(self.config, batch, self.shares.count, "update")
        rows = division.rows(self.shares.own)
        self._step_rows, self._step_shape = rows, batch.shape
        return self.update_share(own_rows(batch, rows), division.whole, loss)

    def update_share(self, rows: Batch, whole: MicroBatches, loss: Loss) -> dict[str, float]:
        self.need_weights(rows)
        self._check(rows, self.model, self.directory)
        self.check_tokens(rows, model.vocabulary_size(self.model))
        if self.teacher is not None:
            self._check(rows, self.teacher, Path(str(self.config.teacher)))
        rows = rows.replace(experts=self.recorded_experts(rows)).map(np.asarray)
        self.optimizer.zero_grad()  # left behind by a loss that raised
        zero = partial(torch.zeros, (), device=self.device)
        sums: dict[str, Tensor] = defaultdict(zero, loss=zero())
        largest: dict[str, Tensor] = defaultdict(zero)
        self._step_logp = []
        for index, packed in enumerate(whole.cut(rows, self.share)):
            if self.mesh is None:  # others would wait in a collective
                raise_if_interrupted()
            logp = self._backward(loss, packed, whole, index, sums, largest)
            self._step_logp.append(logp)
        largest = max_over_rows(largest, self.mesh)
        totals = sum_over_rows(torch.stack(list(sums.values())), self.mesh)
        metrics = dict(zip(sums, totals, strict=True)) | largest
        for p in self.model.parameters():
            if p.grad is None and p.requires_grad:  # a vision tower, by a batch without images
                p.grad = torch.zeros_like(p)
        sum_gradients(self.summed, self.mesh)
        norm = self._clip()
        rate = float(self.config.optimizer.learning_rate_at(np.float32(self.version)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        results = {name: float(x) for name, x in metrics.items()}
        finite = np.isfinite([results["loss"], norm]).all()
        if finite:
            self.optimizer.step()
        else:  # the optimizer's counts are the version, and a skipped step is one too
            for state in self.optimizer.state.values():
                state["step"] += 1
        self.optimizer.zero_grad()
        self.version += 1
        skipped = float(1.0 - finite)
        return {**results, "grad_norm": norm, "learning_rate": rate, "skipped": skipped}

    def _backward(
        self,
        loss: Loss,
        packed: Batch,
        whole: MicroBatches,
        index: int,
        sums: dict[str, Tensor],
        largest: dict[str, Tensor],
    ) -> Tensor | None:
        """Adds the gradient of this process's rows of one micro-batch, and their metrics to `sums`
        and `largest`. index: of the micro-batch. Returns its log-probabilities, if any."""
        passes, tokens = self.forward.passes(packed, whole.passes[index]), whole.step_trained
        # No loss reads the kept tokens, of which there may be many.
        rows = packed.replace(kept=None).map(lambda x: to_tensor(x, self.device))
        tally = None if self.routers is None else experts.Tally.of(self.routers, self.device)
        # Only trained tokens go through the head: a loss masks all others before it computes.
        policy = self.forward.policy(
            packed, packed.mask, passes, self.config.entropy, self.teacher, tally
        )
        terms, metrics = evaluate_loss(loss, policy, rows)
        total = (rows.weights * terms).sum()
        sums["loss"] += total.detach()
        if tally is not None:
            seen, trained = whole.tokens[index], whole.trained[index]
            over_tokens = partial(sum_over_tokens, mesh=self.mesh)
            imbalance = tally.imbalance(seen, over_tokens) * (trained / tokens)
            total = total + self.config.balance * imbalance
            of_rows = imbalance.detach()
            if self.context is not None:
                of_rows = SumOverGroup.apply(of_rows, self.context)
            sums["expert_imbalance"] += of_rows
            sums["loss"] += self.config.balance * of_rows
        if total.requires_grad:
            total.backward()
        for name, x in metrics.items():
            x = torch.where(rows.mask, x.detach(), 0)
            if not is_max_reduced(name):
                sums[name] += x.sum() / tokens
            elif x.numel():
                largest[name] = torch.maximum(largest[name], x.max())
            else:
                largest[name] = largest[name]  # every process has the same names
        return None if policy.logp is None else policy.logp.detach()

    def step_logprobs(self) -> Float32[np.ndarray, "rows length"] | None:
        kept = [logp for logp in self._step_logp if logp is not None]
        if not kept or self.mesh is not None:
            return None
        found = np.zeros(self._step_shape, np.float32)
        found[self._step_rows] = torch.cat(kept).cpu().numpy()
        return found

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        return self._all_tokens(batch, "logprobs")

    def values(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        return self._all_tokens(batch, "values")

    def device_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of `weights` on this process's device. Tensors that are neither cast
        nor gathered are the model's own. With all transports but "files": experimental."""
        for name, x in gather_each(
            lora.merged(self.model), lambda x: x.to(self.dtype) if x.is_floating_point() else x
        ):
            yield name, x.to(self.device)

    def weights(self, mine: Mine | None = None) -> Iterator[tuple[str, np.ndarray]]:
        for name, x in self.device_weights():
            if mine is None or mine(x.nbytes):
                yield name, model.to_numpy(x)

    def adapter(self) -> Iterator[tuple[str, np.ndarray]]:
        if not self.config.lora.rank:
            raise ValueError("a trainer with lora.rank = 0 has no adapter")
        for name, x in self.trained.items():
            yield name, model.to_numpy(gather(x.detach()))

    def peak_bytes(self) -> int | None:
        return peak_bytes(self.device)

    def rest(self) -> None:
        resting.move(*self._resident(), resting.HOST)

    def wake(self) -> None:
        resting.move(*self._resident(), self.device)

    def device_bytes(self) -> int:
        return resting.device_bytes(*self._resident())

    def _resident(self) -> tuple[list[PreTrainedModel], optimizers.Optimizer | None]:
        """Returns the modules that hold state on the device between steps, and the optimizer that does;
        none for what trainer.offload keeps on the host anyway."""
        modules = [] if self.offload else [self.model]
        if self.teacher is not None:
            modules.append(self.teacher)
        return modules, None if self.config.frozen or self.offload else self.optimizer

    def snapshot(self) -> dict[str, Tensor]:
        self.need_head("snapshot", "policy")
        copied = gather_each(lora.merged(self.model), lambda x: x.to(self.dtype, copy=True))
        copied = ((name, x.to(self.device)) for name, x in copied)
        # All processes gather it; the first one, which has the sampler, keeps it.
        return {name: x for name, x in copied if self.mesh is None or self.mesh.get_rank() == 0}

    def sampler(self, slots: int, context: int) -> Any:
        from areal_x_torch.sampler import Sampler

        self.need_head("sampler", "policy")
        rope.check_length("embedded.context", context, self.model.config, self.directory)
        # A process with a sharded model, or with compiled blocks, samples with a whole copy beside it.
        own = self.mesh is None and not self.config.compile
        of = self.model if own else loading.frozen(self.directory, self.device, self.dtype)
        return Sampler(of, slots, context, self.dtype)

    @property
    def writes(self) -> bool:
        return self.mesh is None or self.mesh.get_rank() == 0

    @property
    def experts_per_token(self) -> tuple[int, int, int] | None:
        routers = self.routers
        return None if routers is None else (routers.layers, routers.per_token, routers.count)

    def own_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, x in gather_each(model.named_tensors(self.model).items()):
            yield name, model.to_numpy(x)

    def moments_are_portable(self) -> bool:
        return optimizers.portable(self.config.optimizer, self.trained, self._as_saved)

    def own_moments(self) -> Iterator[tuple[str, np.ndarray]]:
        moments = optimizers.named_moments(
            self.config.optimizer, self.optimizer, self.trained, self._as_saved
        )
        for name, x in gather_each(moments.items()):
            yield name, model.to_numpy(x)

    def load_state(
        self, directory: Path, tensors: Tensors, *, version: int, own_form: bool
    ) -> None:
        optimizers.read_moments(
            directory,
            self.config.optimizer,
            self.optimizer,
            self.trained,
            self._as_saved,
            version=version,
            own_form=own_form,
        )
        targets: Mapping[str, Tensor | ShardedView] = (
            self.trained if self.config.lora.rank else model.named_tensors(self.model)
        )
        loading.copy_tensors(targets, tensors, str(directory))

    def save_sharded(self, directory: Path) -> Wait:
        return sharded_checkpoint.save(directory, self._state(), together=self.mesh is not None)

    def load_sharded(self, directory: Path, version: int) -> None:
        sharded_checkpoint.restore(directory, self._state(), together=self.mesh is not None)
        self.optimizer.set_steps(version)

    def _as_saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | ShardedView]:
        """Returns trained tensors, or their moments, under the names of their files."""
        return dict(tensors) if self.config.lora.rank else model.as_saved(self.model, tensors)

    def _state(self) -> dict[str, Tensor]:
        """Returns every tensor of a checkpoint, or this process's part, without copying."""
        return model.state_tensors(self.model) | optimizers.moments(self.optimizer, self.trained)

    def _check(self, batch: Batch, of: PreTrainedModel, directory: Path) -> None:
        """Raises: UserError for tokens, images or lengths that the model of a directory cannot
        read."""
        check_images(batch, of.config)
        check_known(batch.tokens, model.vocabulary_size(of), directory)
        rope.check_longest(int(np.max(batch.positions, initial=-1)) + 1, of.config, directory)

    def _load_teacher(self, directory: Path) -> PreTrainedModel:
        check_vocabulary("train.teacher", directory, self.directory)
        check_model(directory, self.config.mesh, None, learns=False)
        teacher = loading.freeze(loading.build(directory, "policy"), self.dtype)
        rope.check_length("train.row_length", self.config.row_length, teacher.config, directory)
        decoder_blocks.prepare(teacher, self.config, self.dtype, None)
        # The student's pass reads the teacher's head, so its ends are not sharded.
        shard_model(teacher, self.mesh, self.dtype, self.device, shard_ends=False)
        loading.fill(teacher, directory)
        return teacher

    def _all_tokens(self, batch: Batch, method: str) -> Float32[np.ndarray, "rows length"]:
        """Returns the head's output for all tokens."""
        division = divide(self.config, batch, self.shares.count, "outputs")
        rows = division.rows(self.shares.own)
        outputs = self._own_tokens(own_rows(batch, rows), division.whole, method)
        if self.mesh is None:
            return outputs.cpu().numpy()
        everywhere = outputs.new_zeros(batch.shape)
        everywhere[to_tensor(rows, self.device)] = outputs
        return sum_over_rows(everywhere, self.mesh).cpu().numpy()

    def outputs_share(
        self, method: str, rows: Batch, whole: int
    ) -> Float32[np.ndarray, "own_rows length"]:
        return self._own_tokens(rows, whole, method).cpu().numpy()

    # Not inference mode: parameters that fully_shard gathers in it could not be trained afterwards.
    @torch.no_grad()
    def _own_tokens(
        self, rows: Batch, passes: int, method: str
    ) -> Float32[Tensor, "own_rows length"]:
        """Returns the head's output for all tokens of this process's rows. passes: of the process
        that makes most."""
        output, heads = OUTPUTS[method]
        self.need_head(method, *heads)
        self._check(rows, self.model, self.directory)
        self.check_tokens(rows, model.vocabulary_size(self.model))
        read = {name: getattr(rows, name) for name in ("kept", "prefix_ids", *IMAGES)} | {
            "experts": self.recorded_experts(rows)
        }
        packed = Batch(rows.tokens, rows.segment_ids, rows.positions, rows.mask, **read).map(
            np.asarray
        )
        count = len(packed.tokens)
        if not count:
            packed = blank_row(packed)
        policy = self.forward.policy(
            packed, packed.segment_ids != 0, self.forward.passes(packed, passes)
        )
        outputs: Tensor | None = getattr(policy, output)
        if outputs is None:
            return torch.zeros(rows.shape, device=self.device)
        return outputs[:count]

    def _clip(self) -> float:
        """Scales the gradient down to `optimizer.clip_norm` and returns its global norm before."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = total_norm(gradients, self.mesh)
        limit = self.config.optimizer.clip_norm
        if 0 < limit < norm:
            torch._foreach_mul_([local(g) for g in gradients], limit / norm)
        return norm
