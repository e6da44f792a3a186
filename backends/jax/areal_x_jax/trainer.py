"""The JAX trainer: one compiled, donated step with the micro-batches inside.

The host lays a batch out as [micro-batches, rows, length] with a power of two of micro-batches (the
capacity); the step loops over the filled ones only. Batches of different sizes thus share a
program, and unused capacity costs no compute.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float32

from areal_x.errors import ConfigError, UserError
from areal_x.hf import adapters as adapter_files
from areal_x.hf import model_dir
from areal_x.hf.tokenizer import check_known, check_vocabulary
from areal_x.hf.trainer import HuggingFaceTrainer, Tensors
from areal_x.protocols.shares import StepOutput, blank_row, own_rows
from areal_x.protocols.speculation import NOTHING, Speculation
from areal_x.protocols.trainer import Mine, Wait
from areal_x.protocols.trainer_config import OptimizerConfig, TrainerConfig
from areal_x.protocols.tries import subtree_ends
from areal_x.types import IMAGES, Batch, Loss
from areal_x_jax import experts, lora, optimizers, resting, sharded_checkpoint
from areal_x_jax.architecture import Architecture, check_sharing, read_architecture
from areal_x_jax.device import (
    compute_in_fp32,
    logits_at_once,
    memory_of,
    room_for_activations,
)
from areal_x_jax.forward import Forward, Rows
from areal_x_jax.images import image_arrays
from areal_x_jax.packed_cudnn import run_ends
from areal_x_jax.parameters import FIXED, Params
from areal_x_jax.sampler import Sampler
from areal_x_jax.sharding import (
    RULES,
    addressable,
    check_divisible,
    make_partitioner,
    parameter_shardings,
    put_sharded,
    sampling_shardings,
    staged,
)
from areal_x_jax.shares import WholeBatch, divide, own_blocks, put_shares, shares_of
from areal_x_jax.speculation import check_draft
from areal_x_jax.update import update_step, update_with_settings
from areal_x_jax.weights import (
    as_stored,
    from_tensors,
    places,
    tensors_beside,
    to_arrays,
    to_tensors,
)

# The heads that have what each method returns.
HEADS = {"logprobs": ("policy",), "values": ("value", "reward")}
DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"


class Trainer(HuggingFaceTrainer):
    """An `areal_x.protocols.trainer.Trainer` with fp32 master weights and moments, sharded by the
    rules of areal_x_jax.sharding."""

    backend = "jax"

    def __init__(self, config: TrainerConfig) -> None:
        if config.offload:
            wanted = "False with JAX: split the model over more devices by mesh.fsdp"
            raise ConfigError("trainer.offload", True, wanted)
        self.config = config
        if config.deterministic:
            check_deterministic(jax.local_devices()[0].platform)
        if config.rests:
            resting.check_can_rest(jax.local_devices()[0].platform)
        self.partitioner = make_partitioner(config.mesh)
        assert self.partitioner.mesh is not None
        self.mesh = self.partitioner.mesh
        self.shares = shares_of(self.partitioner)
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.by_row = NamedSharding(self.mesh, PartitionSpec(None, RULES["rows"], RULES["length"]))
        self.whole_rows = NamedSharding(self.mesh, PartitionSpec(None, RULES["rows"]))
        on_cpu = jax.local_devices()[0].platform == "cpu"
        precision = {"auto": "fp32" if on_cpu else "bf16"}.get(config.precision, config.precision)
        self.dtype = jnp.float32 if precision == "fp32" else jnp.bfloat16
        if precision == "fp32":
            compute_in_fp32(jax.local_devices()[0].platform)
        self.directory = model_dir.resolve(config.model.path)
        model_dir.check_head(self.directory, config.head)
        arch = as_stored(
            read_architecture(model_dir.read_config(self.directory), config.head), self.directory
        )
        self.arch = replace(staged(arch, config.mesh), fp8=precision == "fp8")
        check_sharing(config.share_prompts, self.directory, self.arch)
        experts.check_settings(config, self.arch.experts, self.directory)
        check_divisible(self.partitioner, self.arch)
        self.trained = lora.trained_architecture(self.arch, config.lora)
        self.shardings = parameter_shardings(self.partitioner, self.trained)
        self.teacher: Params | None = None
        self.teacher_arch: Architecture | None = None
        if config.teacher is not None:
            self.teacher_arch, self.teacher = self._read_teacher(Path(config.teacher))
        self.optimizer = optimizers.make_optimizer(config.optimizer)
        self.params = self._read_params(self.directory, model_dir.read_tensors(self.directory))
        self.base: Params | None = None  # the frozen model beside adapters
        if self.trained.adapters is not None:
            self.base = self.params
            self.params = lora.init_adapters(self.trained, config.seed, self.shardings)
            if self.arch.scores:
                self.params["score"] = self.base.pop("score")
        self.moments: Any = None
        if not config.frozen:
            state = jax.eval_shape(self.optimizer.init, self.params)
            self.moment_shardings = optimizers.moment_shardings(
                state, self.params, self.shardings, self.replicated
            )
            init = jax.jit(self.optimizer.init, out_shardings=self.moment_shardings)
            self.moments = init(self.params)
        self._resting_shardings: Any = None  # of the state while it rests
        self.version = 0
        self.threads: int | None = None  # XLA chooses them
        memory, platform = memory_of(jax.local_devices()[0]), jax.default_backend()
        self.forward = Forward(
            config=config,
            arch=self.arch,
            teacher_arch=self.teacher_arch,
            partitioner=self.partitioner,
            dtype=self.dtype,
            room=room_for_activations(
                memory, (self.params, self.moments, self.base, self.teacher), self.dtype
            ),
            logits=logits_at_once(memory),
        )
        # Kernels that read ends of sequences are those of one GPU, in bf16.
        named = config.model.attention in ("auto", "packed_cudnn")
        low = self.dtype == jnp.bfloat16
        self._reads_ends = platform == "gpu" and low and named and self.mesh.size == 1
        self._sets_optimizer = False
        self._steps: dict[tuple[Loss, bool], Any] = {}
        # log-probabilities and entropies of the last step, the number of this process's rows, and that
        # of all, if it knew the whole batch
        self._kept: tuple[jax.Array | None, jax.Array | None] = None, None
        self._kept_rows: tuple[int, int | None] = 0, None
        # Whole rows, so that a process with their first tokens has the others too.
        self._outputs = jax.jit(self.forward.outputs, out_shardings=self.whole_rows)
        self._in_whole_rows = jax.jit(lambda x: x, out_shardings=self.whole_rows)
        self._copy = jax.jit(
            self.forward.copy_for_sampling,
            out_shardings=sampling_shardings(self.partitioner, self.arch),
        )

    @property
    def programs(self) -> int:
        """Number of programs compiled for steps: one for each loss, row length and power of two of
        micro-batches."""
        return sum(step._cache_size() for step in self._steps.values())

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        return self._all_outputs("logprobs", batch)

    def values(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        return self._all_outputs("values", batch)

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        division = divide(self.config, batch, self.shares.count, "update")
        own = own_rows(batch, division.rows(self.shares.own))
        results = self.update_share(own, division.whole, loss)
        self._kept_rows = len(own.tokens), len(batch.tokens)
        return results

    def update_share(self, rows: Batch, whole: WholeBatch, loss: Loss) -> dict[str, float]:
        self.need_weights(rows)
        if self.teacher_arch is not None:
            check_known(rows.tokens, self.teacher_arch.vocab, Path(str(self.config.teacher)))
        laid_out, count = self._to_device(rows, whole)
        given = self._sets_optimizer
        if (loss, given) not in self._steps:
            step = (
                partial(update_with_settings, self.forward, self.config.optimizer, loss)
                if given
                else partial(update_step, self.forward, self.optimizer, loss)
            )
            # Pinned shardings: left to the compiler, those of the second step's state could differ
            # and compile it again.
            self._steps[loss, given] = jax.jit(
                step,
                donate_argnums=(0, 1),
                out_shardings=(self.shardings, self.moment_shardings, self.replicated, self.by_row),
            )
        settings = [optimizers.settings_of(self.config.optimizer, self.version)] if given else []
        trained = np.float32(whole.trained)
        self.params, self.moments, results, self._kept = self._steps[loss, given](
            self.params, self.moments, self.base, self.teacher, laid_out, count, trained, *settings
        )
        self._kept_rows = len(rows.tokens), None
        rate = float(self.config.optimizer.learning_rate_at(np.float32(self.version)))
        self.version += 1
        metrics = {name: float(x) for name, x in jax.device_get(results).items()}
        return {**metrics, "learning_rate": rate}

    def set_optimizer(self, config: OptimizerConfig) -> None:
        self.config.optimizer.check_same_moments(config)
        self.config = replace(self.config, optimizer=config)
        self._sets_optimizer = True

    def step_logprobs(self) -> Float32[np.ndarray, "rows length"] | None:
        return self._step_output(self._kept[0])

    def step_entropies(self) -> Float32[np.ndarray, "rows length"] | None:
        return self._step_output(self._kept[1])

    def _step_output(self, x: jax.Array | None) -> Float32[np.ndarray, "rows length"] | None:
        _, rows = self._kept_rows
        if x is None or rows is None:
            return None
        return np.asarray(jax.device_get(addressable(x))).reshape(-1, x.shape[-1])[:rows]

    def step_share(self, output: StepOutput) -> Float32[np.ndarray, "own_rows length"] | None:
        x = self._kept[0 if output == "logprobs" else 1]
        if x is None:
            return None
        # Other processes may have a part of this one's rows.
        if self.partitioner.size("context") > 1:
            x = self._in_whole_rows(x)
        own = own_blocks(x, self.shares)
        return own.reshape(-1, own.shape[-1])[: self._kept_rows[0]]

    def weights(self, mine: Mine | None = None) -> Iterator[tuple[str, np.ndarray]]:
        if self.base is None:
            return to_tensors(self.arch, self.params, self.dtype, mine)
        # A score is trained in full and only in params; all else is the base's.
        base = to_tensors(self.arch, {**self.params, **self.base})
        config = model_dir.read_config(self.directory)
        settings = adapter_files.settings_of(self.config.lora, self.directory, self.config.head)
        merged = adapter_files.merge(base, self.adapter(), settings, config["model_type"])
        fixed = {name for name, place in places(self.arch).items() if place.path[-1] in FIXED}
        cast = (
            (name, tensor if name in fixed else tensor.astype(self.dtype))
            for name, tensor in merged
        )
        return ((name, tensor) for name, tensor in cast if mine is None or mine(tensor.nbytes))

    def device_weights(self) -> Iterator[tuple[str, Any]]:
        """Yields the tensors of `weights` without a copy, by DLPack, as torch tensors on this
        process's first device. With the transport "nccl": experimental."""
        import torch

        params = self.params
        if self.base is not None:
            if self.config.lora.served_rank:
                raise NotImplementedError("adapters are published through files")
            params = lora.merged(self.base, self.params, self.config.lora.scale)
        for name, x in to_arrays(self.arch, params, self.dtype):
            yield name, torch.from_dlpack(addressable(x))

    def adapter(self) -> Iterator[tuple[str, np.ndarray]]:
        if self.base is None:
            raise ValueError("a trainer with lora.rank = 0 has no adapter")
        yield from to_tensors(self.trained, self.params)

    def peak_bytes(self) -> int | None:
        used = [(x.memory_stats() or {}).get("peak_bytes_in_use") for x in jax.local_devices()]
        return max((x for x in used if x is not None), default=None)

    def rest(self) -> None:
        if self._resting_shardings is None:
            state = self._state()
            self._resting_shardings = jax.tree.map(lambda x: x.sharding, state)
            self._set_state(resting.to_host(state))

    def wake(self) -> None:
        if self._resting_shardings is not None:
            self._set_state(resting.to_devices(self._state(), self._resting_shardings))
            self._resting_shardings = None

    def device_bytes(self) -> int:
        return resting.device_bytes(self._state())

    def _state(self) -> tuple[Any, ...]:
        """Returns all arrays that outlive a step; None for those that this trainer lacks."""
        return self.params, self.moments, self.base, self.teacher

    def _set_state(self, state: tuple[Any, ...]) -> None:
        self.params, self.moments, self.base, self.teacher = state

    def snapshot(self) -> Params:
        self.need_head("snapshot", "policy")
        params = self.params if self.base is None else self.base
        copied: Params = self._copy(params, None if self.base is None else self.params)
        return copied

    def sampler(self, slots: int, context: int, speculation: Speculation = NOTHING) -> Sampler:
        self.need_head("sampler", "policy")
        draft = None
        if speculation.method == "draft":
            draft = self._read_draft(Path(speculation.draft))
        # Samples are trained on, and a row may be longer than the longest sequence.
        longest = min(context, self.arch.context or context)
        return Sampler(
            self.arch, slots, longest, mesh=self.mesh, speculation=speculation, draft=draft
        )

    def _read_draft(self, directory: Path) -> tuple[Architecture, Params]:
        model_dir.check_head(directory, "policy")
        arch = as_stored(read_architecture(model_dir.read_config(directory)), directory)
        check_draft(arch, str(directory))
        tensors = model_dir.read_tensors(directory)
        return arch, from_tensors(arch, tensors, str(directory), dtype=self.dtype)

    # ---- files

    @property
    def writes(self) -> bool:
        return jax.process_index() == 0 or not self.mesh.is_multi_process

    @property
    def experts_per_token(self) -> tuple[int, int, int] | None:
        experts = self.arch.experts
        return None if experts is None else (self.arch.layers, experts.per_token, experts.count)

    def own_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from to_tensors(self.arch, self.params)
        if self.writes:
            yield from tensors_beside(self.arch, self.directory)

    def moments_are_portable(self) -> bool:
        return optimizers.portable(self.config.optimizer, self.trained)

    def own_moments(self) -> Iterator[tuple[str, np.ndarray]]:
        return optimizers.moment_tensors(self.config.optimizer, self.trained, self.moments)

    def load_state(
        self, directory: Path, tensors: Tensors, *, version: int, own_form: bool
    ) -> None:
        moments = optimizers.read_moments(
            directory,
            self.trained,
            self.moments,
            self.moment_shardings,
            version=version,
            own_form=own_form,
        )
        if self.base is None:
            self.params = self._read_params(directory, tensors)
        else:
            self.params = from_tensors(self.trained, tensors, str(directory), self.partitioner)
        self.moments = moments

    def save_sharded(self, directory: Path) -> Wait:
        return sharded_checkpoint.save(directory, self.trained, self.params, self.moments)

    def load_sharded(self, directory: Path, version: int) -> None:
        self.params, self.moments = sharded_checkpoint.restore(
            directory,
            self.trained,
            self.params,
            self.shardings,
            self.moments,
            self.moment_shardings,
        )

    def _read_params(self, directory: Path, tensors: Tensors) -> Params:
        if self.arch.scores and not model_dir.is_classifier(model_dir.read_config(directory)):
            tensors = chain(tensors, [("score.weight", np.zeros((1, self.arch.hidden)))])
        learns = not self.config.frozen and self.trained.adapters is None
        dtype = jnp.float32 if learns else self.dtype
        return from_tensors(self.arch, tensors, str(directory), self.partitioner, dtype)

    def _read_teacher(self, directory: Path) -> tuple[Architecture, Params]:
        check_vocabulary("train.teacher", directory, self.directory)
        model_dir.check_head(directory, "policy")
        arch = as_stored(read_architecture(model_dir.read_config(directory)), directory)
        arch = staged(arch, self.config.mesh)
        if self.arch.vision is not None and (
            arch.vision is None or arch.vision.host_view != self.arch.vision.host_view
        ):
            wanted = f"a model that sees images as {self.directory} does"
            raise ConfigError("train.teacher", str(directory), wanted)
        check_divisible(self.partitioner, arch)
        check_sharing(self.config.share_prompts, directory, arch)
        tensors = model_dir.read_tensors(directory)
        return arch, from_tensors(arch, tensors, str(directory), self.partitioner, self.dtype)

    # ---- batches

    def _all_outputs(self, method: str, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        division = divide(self.config, batch, self.shares.count, "outputs")
        own = own_rows(batch, division.rows(self.shares.own))
        outputs = addressable(self._outputs_of(method, own, division.whole))
        rows, length = batch.shape
        return np.asarray(jax.device_get(outputs)).reshape(-1, length)[:rows]

    def outputs_share(
        self, method: str, rows: Batch, whole: WholeBatch
    ) -> Float32[np.ndarray, "own_rows length"]:
        count, length = rows.shape
        outputs = own_blocks(self._outputs_of(method, rows, whole), self.shares)
        return outputs.reshape(-1, length)[:count]

    def _outputs_of(self, method: str, rows: Batch, whole: WholeBatch) -> jax.Array:
        """Returns the outputs of all rows, as they lie on the devices. rows: this process's."""
        self.need_head(method, *HEADS[method])
        read = {name: getattr(rows, name) for name in ("experts", "kept", "parents", *IMAGES)}
        unlabelled = Batch(rows.tokens, rows.segment_ids, rows.positions, rows.mask, **read)
        laid_out, count = self._to_device(unlabelled, whole)
        outputs: jax.Array = self._outputs(self.params, self.base, laid_out, count)
        return outputs

    def _to_device(self, batch: Batch, whole: WholeBatch) -> tuple[Rows, np.int32]:
        """Returns rows and their images as [capacity, rows at once, …] on the devices, and the
        number of filled micro-batches. batch: this process's rows."""
        rows, length = batch.shape
        parts = self.partitioner.size("context")
        if length % parts:
            wanted = f"set train.row_length to a multiple of {parts}"
            raise UserError(
                f"mesh.context = {parts} does not divide rows of {length} tokens: {wanted}"
            )
        longest = int(np.max(batch.positions, initial=-1)) + 1
        if 0 < self.arch.context < longest:
            raise UserError(
                f"a sequence of {longest} tokens is longer than the {self.arch.context} that the"
                f" model in {self.directory} was made for: lower train.row_length, or stretch its"
                " positions (rope_scaling in its config.json)"
            )
        self.check_tokens(batch, self.arch.vocab)
        batch = batch.replace(experts=self.recorded_experts(batch)).map(np.asarray)
        images = image_arrays(batch if rows else blank_row(batch), self.arch.vision, whole.patches)
        if images is not None and self.partitioner.size("stage") > 1:
            raise UserError(
                "the batch has images, and JAX does not divide rows with images among mesh.stage ="
                f" {self.partitioner.size('stage')} stages: use mesh.fsdp or mesh.tensor"
            )
        if images is not None:  # patches are large, and nothing reads them in a higher precision
            images = images._replace(patches=images.patches.astype(self.dtype))
            images = jax.tree.map(lambda x: x[:rows], images)
        block = self.config.micro_batch_rows
        at_once, own = block * self.shares.count, block * len(self.shares.own)
        count = -(-whole.rows // at_once)
        capacity = 1 << (count - 1).bit_length()

        def lay_out(sharding: NamedSharding, x: np.ndarray) -> jax.Array:
            dtype = np.float32 if x.dtype == np.float64 else x.dtype
            padded = np.zeros((capacity * own, *x.shape[1:]), dtype)
            padded[: len(x)] = x
            laid_out = padded.reshape(capacity, own, *x.shape[1:])
            if self.shares.is_all:
                return put_sharded(laid_out, sharding)
            return put_shares(laid_out, sharding, self.shares, at_once)

        tokens = batch.replace(kept=None, **dict.fromkeys(IMAGES)).map(
            partial(lay_out, self.by_row)
        )
        if batch.kept is not None:  # a list for each row, not an entry for each token
            tokens = tokens.replace(kept=lay_out(self.whole_rows, batch.kept))
        ends = None
        if self._reads_ends:
            ends = run_ends(np.pad(batch.segment_ids, ((0, capacity * own - rows), (0, 0))))
        until = None
        if batch.parents is not None:
            of_rows = zip(batch.parents, batch.segment_ids, strict=True)
            until = np.zeros(batch.shape, np.int32)
            for row, (parents, ids) in enumerate(of_rows):
                until[row] = subtree_ends(parents, ids)
        return Rows(
            tokens,
            jax.tree.map(partial(lay_out, self.whole_rows), images),
            None if ends is None else lay_out(self.whole_rows, ends),
            None if until is None else lay_out(self.by_row, until),
        ), np.int32(count)


def check_deterministic(platform: str) -> None:
    """Raises: UserError for a GPU on which the compiler may choose kernels whose sums depend on the
    order of threads."""
    flags = os.environ.get("XLA_FLAGS", "")
    if platform in ("gpu", "cuda", "rocm") and DETERMINISTIC_FLAG not in flags:
        raise UserError(
            f"train.deterministic = True needs XLA_FLAGS={DETERMINISTIC_FLAG} in the environment on"
            " a GPU: start with it"
        )
