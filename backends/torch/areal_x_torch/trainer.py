"""The torch trainer: a transformers model, an optimizer, and as many micro-batches as a batch
needs.

Each of several processes computes its own rows of a batch (areal_x_torch.shares; areal_x_torch.sharding
defines the sharding of everything else); all make the same passes through the model in the same
order, because they gather parameters together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32
from torch import Tensor
from transformers import PreTrainedModel

from areal_x.errors import ConfigError, UserError
from areal_x.hf import model_dir
from areal_x.hf.image_format import takes_images
from areal_x.hf.tokenizer import check_known, check_vocabulary
from areal_x.hf.trainer import HuggingFaceTrainer, Tensors
from areal_x.protocols.shares import Shares, StepOutput, blank_row, own_rows
from areal_x.protocols.speculation import NOTHING, Speculation
from areal_x.protocols.trainer import Mine, Wait
from areal_x.protocols.trainer_config import OptimizerConfig, TrainerConfig
from areal_x.types import IMAGES, Batch, Loss
from areal_x_torch import (
    attention,
    context_parallel,
    decoder_blocks,
    experts,
    fp8,
    loading,
    lora,
    model,
    optimizers,
    resting,
    rope,
    sequence_parallel,
    sharded_checkpoint,
)
from areal_x_torch.device import (
    compute_dtype,
    find_device,
    logits_at_once,
    make_deterministic,
    memory_of,
    peak_bytes,
)
from areal_x_torch.dtensors import Stored, gather_each
from areal_x_torch.flat_rows import FlatRow, continued_rows, to_tensor
from areal_x_torch.forward import Forward
from areal_x_torch.images import check_images, check_sharing
from areal_x_torch.pipeline import Pipeline, Stages, check_adapters
from areal_x_torch.sharding import (
    check_model,
    make_mesh,
    row_rank,
    shard_model,
    sum_gradients,
    sum_over_rows,
)
from areal_x_torch.shares import MicroBatches, divide
from areal_x_torch.tensor_split import replicated_in_tensor_group
from areal_x_torch.update import KeptOutputs, Step, clip

MOSTLY = 0.75  # of a row's tokens: if fewer are followed by others, these alone are computed
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
        staged = self.mesh is not None and config.mesh.stage > 1
        stages = Stages.of(self.mesh) if staged else None
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
        self.teacher = None
        if config.teacher is not None and (stages is None or stages.is_last):
            self.teacher = self._load_teacher(Path(config.teacher))
        self.model = loading.build(self.directory, config.head)
        check_sharing(config.share_prompts, self.directory, self.model.config)
        rope.check_length("train.row_length", config.row_length, self.model.config, self.directory)
        if config.frozen or config.lora.rank:
            loading.freeze(self.model, self.dtype)
        if self.teacher is not None and takes_images(self.teacher.config) != takes_images(
            self.model.config
        ):
            raise ConfigError(
                "train.teacher",
                config.teacher,
                "a vision-language model exactly if the student is one",
            )
        check_adapters(self.model, config)
        sequence_parallel.check(config, self.model)
        if config.precision == "fp8":
            fp8.install(self.model)
        if config.lora.rank:
            lora.add_adapters(self.model, config.lora, config.seed)
        self.routers = experts.hook_routers(self.model, config, self.directory)
        self.pipeline = None if stages is None else Pipeline.divide(self.model, stages, config.mesh)
        decoder_blocks.prepare(self.model, config, self.dtype, memory_of(self.device))
        module = shard_model(
            self.model,
            self.mesh,
            self.dtype,
            self.device,
            offload=self.offload,
            held=None if self.pipeline is None else self.pipeline.held,
            tokens_apart=config.mesh.sequence,
        )
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
            pipeline=self.pipeline,
        )
        self.summed = replicated_in_tensor_group(self.model, self.mesh)
        self.trained = lora.trained_parameters(self.model, config.lora)
        if not config.frozen:
            self.optimizer = optimizers.Optimizer(self.trained.items(), config.optimizer)
        self.version = 0
        # What the last step gave of this process's rows. If it knew the whole batch: which rows of it
        # they are, and its shape.
        self._kept: KeptOutputs | None = None
        self._step_rows: tuple[np.ndarray, tuple[int, int]] | None = None

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
        results = self.update_share(own_rows(batch, rows), division.whole, loss)
        self._step_rows = rows, batch.shape
        return results

    def update_share(self, rows: Batch, whole: MicroBatches, loss: Loss) -> dict[str, float]:
        self.need_weights(rows)
        self._check(rows, self.model, self.directory)
        self.check_tokens(rows, model.vocabulary_size(self.model))
        if self.teacher is not None:
            self._check(rows, self.teacher, Path(str(self.config.teacher)))
        rows = rows.replace(experts=self.recorded_experts(rows)).map(np.asarray)
        self.optimizer.zero_grad()  # left behind by a loss that raised
        step = Step(
            loss, whole, self.forward, self.model, self.mesh, self.share, self.teacher, self.routers
        )
        self._kept, self._step_rows = None, None
        step.add_gradients(rows)
        self._kept = KeptOutputs(
            step.kept, whole.sizes[:, self.share], rows.shape[1], self.device, self.pipeline
        )
        load = step.load_of_all()
        metrics = step.metrics(load)
        sum_gradients(self.summed, self.mesh)
        if self.pipeline is not None:
            self.pipeline.add_up_copies()
        norm = clip(self.model, self.pipeline, self.mesh, self.config.optimizer.clip_norm)
        rate = float(self.config.optimizer.learning_rate_at(np.float32(self.version)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        results = {name: float(x) for name, x in metrics.items()}
        finite = np.isfinite([results["loss"], norm]).all()
        if finite:
            self.optimizer.step()
            if self.config.balance_rate:
                experts.move_corrections(self.model, load, self.config.balance_rate)
        else:  # the optimizer's counts are the version, and a skipped step is one too
            for state in self.optimizer.state.values():
                state["step"] += 1
        self.optimizer.zero_grad()
        self.version += 1
        skipped = float(1.0 - finite)
        return {**results, "grad_norm": norm, "learning_rate": rate, "skipped": skipped}

    def set_optimizer(self, config: OptimizerConfig) -> None:
        self.config.optimizer.check_same_moments(config)
        self.config = replace(self.config, optimizer=config)
        self.optimizer.set(config)

    def step_logprobs(self) -> Float32[np.ndarray, "rows length"] | None:
        return self._step_output("logprobs")

    def step_entropies(self) -> Float32[np.ndarray, "rows length"] | None:
        return self._step_output("entropies")

    def _step_output(self, output: StepOutput) -> Float32[np.ndarray, "rows length"] | None:
        if self._step_rows is None or (own := self._own_step_output(output)) is None:
            return None
        rows, shape = self._step_rows
        everywhere = own.new_zeros(shape)
        everywhere[to_tensor(rows, self.device)] = own
        return sum_over_rows(everywhere, self.mesh).cpu().numpy()

    def step_share(self, output: StepOutput) -> Float32[np.ndarray, "own_rows length"] | None:
        own = self._own_step_output(output)
        return None if own is None else own.cpu().numpy()

    def _own_step_output(self, output: StepOutput) -> Float32[Tensor, "own_rows length"] | None:
        computed = self.config.entropy if output == "entropies" else self.config.head == "policy"
        return self._kept.rows(output) if computed and self._kept is not None else None

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        return self._all_tokens(batch, "logprobs")

    def values(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        return self._all_tokens(batch, "values")

    def device_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of `weights` on this process's device. Tensors that are neither cast
        nor gathered are the model's own. With all transports but "files": experimental."""
        for name, x in self._merged(lambda name, x: x.to(self._published_dtype(name, x))):
            yield name, x.to(self.device)

    def _published_dtype(self, name: str, x: Tensor) -> torch.dtype:
        """Returns the compute precision, but for what a router chooses by, which is exact, and for
        what is no number."""
        exact = name.endswith(experts.CORRECTION) or not x.is_floating_point()
        return x.dtype if exact else self.dtype

    def _merged(self, as_: Callable[[str, Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yields the whole tensors of the plain model, as `dtensors.gather_each` does."""
        if self.pipeline is None:
            yield from gather_each(lora.merged(self.model), as_)
            return
        plain = {
            name: x
            for name, x in model.named_tensors(self.model).items()
            if not name.endswith(model.ADAPTER)
        }
        yield from self.pipeline.gather_each(plain, self.device, as_, lora.merged(self.model))

    def _gathered(self, own: Mapping[str, Stored]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields whole tensors, this process's own ones and with stages also the others'."""
        pipeline = self.pipeline
        of_all = pipeline.gather_each(own, self.device) if pipeline else gather_each(own.items())
        for name, x in of_all:
            yield name, model.to_numpy(x)

    def _elsewhere(self, own: Iterable[tuple[str, Stored]]) -> Mapping[str, torch.Size]:
        """Returns the shapes of the tensors that only other stages have, by their names."""
        return {} if self.pipeline is None else self.pipeline.elsewhere(own)

    def weights(self, mine: Mine | None = None) -> Iterator[tuple[str, np.ndarray]]:
        for name, x in self.device_weights():
            if mine is None or mine(x.nbytes):
                yield name, model.to_numpy(x)

    def adapter(self) -> Iterator[tuple[str, np.ndarray]]:
        if not self.config.lora.rank:
            raise ValueError("a trainer with lora.rank = 0 has no adapter")
        yield from self._gathered(self._as_saved(self.trained))

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
        copied = self._merged(lambda name, x: x.to(self._published_dtype(name, x), copy=True))
        copied = ((name, x.to(self.device)) for name, x in copied)
        # All processes gather it; the first one, which has the sampler, keeps it.
        return {name: x for name, x in copied if self.mesh is None or self.mesh.get_rank() == 0}

    def sampler(self, slots: int, context: int, speculation: Speculation = NOTHING) -> Any:
        from areal_x_torch.sampler import Sampler

        self.need_head("sampler", "policy")
        rope.check_length("embedded.context", context, self.model.config, self.directory)
        # A process with a sharded model, or with compiled blocks, samples with a whole copy beside it.
        own = self.mesh is None and not self.config.compile
        of = self.model if own else loading.frozen(self.directory, self.device, self.dtype)
        if not own and self.config.precision == "fp8":
            fp8.install(of)
        return Sampler(of, slots, context, self.dtype, speculation=speculation)

    @property
    def writes(self) -> bool:
        return self.mesh is None or self.mesh.get_rank() == 0

    @property
    def experts_per_token(self) -> tuple[int, int, int] | None:
        routers = self.routers
        return None if routers is None else (routers.layers, routers.per_token, routers.count)

    def own_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from self._gathered(model.named_tensors(self.model))

    def moments_are_portable(self) -> bool:
        own = optimizers.portable(self.config.optimizer, self.trained, self._as_saved)
        return own if self.pipeline is None else all(self.pipeline.stages.all_of(own))

    def own_moments(self) -> Iterator[tuple[str, np.ndarray]]:
        moments: Mapping[str, Stored]
        if self.moments_are_portable():
            moments = optimizers.named_moments(self.optimizer, self.trained, self._as_saved)
        else:
            moments = optimizers.moments(self.optimizer, self.trained)
        yield from self._gathered(moments)

    def load_state(
        self, directory: Path, tensors: Tensors, *, version: int, own_form: bool
    ) -> None:
        optimizers.read_moments(
            directory,
            self.optimizer,
            self.trained,
            self._as_saved,
            version=version,
            own_form=own_form,
            elsewhere=self._elsewhere,
        )
        targets: Mapping[str, Stored] = (
            self._as_saved(self.trained)
            if self.config.lora.rank
            else model.named_tensors(self.model)
        )
        elsewhere = self._elsewhere(targets.items())
        loading.copy_tensors(targets, tensors, str(directory), elsewhere)

    def save_sharded(self, directory: Path) -> Wait:
        own = self._state(copies=False)
        return sharded_checkpoint.save(directory, own, together=self.mesh is not None)

    def load_sharded(self, directory: Path, version: int) -> None:
        own = self._state()
        elsewhere = self._elsewhere(own.items())
        sharded_checkpoint.restore(directory, own, self.mesh is not None, elsewhere)
        self.optimizer.set_steps(version)

    def _as_saved(self, tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
        """Returns trained tensors, or their moments, under the names of their files."""
        if self.config.lora.rank:
            return lora.as_saved(tensors)
        return dict(model.as_saved(self.model, tensors))

    def _state(self, copies: bool = True) -> dict[str, Tensor]:
        """Returns every tensor of a checkpoint, or this process's part, without copying. copies: also
        those that another stage has too."""
        found = model.state_tensors(self.model) | optimizers.moments(self.optimizer, self.trained)
        if self.pipeline is None or copies:
            return found
        return {name: x for name, x in found.items() if not self.pipeline.has_copied(name)}

    def _check(self, batch: Batch, of: PreTrainedModel, directory: Path) -> None:
        """Raises: UserError for tokens, images or lengths that the model of a directory cannot
        read."""
        check_images(batch, of.config, self.config.mesh.context)
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

    def _passes(self, packed: Batch, passes: int, output: str) -> list[FlatRow]:
        """Returns the passes for an output of all tokens. Tries that are leaves for the most part are
        computed without them, as each leaf costs attention a call of its own."""
        if packed.parents is not None and output == "logp" and self.mesh is None:
            budget = self.config.micro_batch_rows * packed.shape[1]
            rows = continued_rows(packed.segment_ids, packed.parents, budget)
            computed = sum(len(row.places) for row in rows)
            if computed < MOSTLY * np.count_nonzero(packed.segment_ids):
                return rows
        return self.forward.passes(packed, passes)

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
        read = {name: getattr(rows, name) for name in ("kept", "parents", *IMAGES)} | {
            "experts": self.recorded_experts(rows)
        }
        packed = Batch(rows.tokens, rows.segment_ids, rows.positions, rows.mask, **read).map(
            np.asarray
        )
        count = len(packed.tokens)
        if not count:
            packed = blank_row(packed)
        wanted, flat_rows = packed.segment_ids != 0, self._passes(packed, passes, output)
        if self.pipeline is not None:
            return self.forward.outputs_of_stages(packed, wanted, flat_rows, output)[:count]
        policy = self.forward.policy(packed, wanted, flat_rows)
        outputs: Tensor | None = getattr(policy, output)
        if outputs is None:
            return torch.zeros(rows.shape, device=self.device)
        return outputs[:count]
