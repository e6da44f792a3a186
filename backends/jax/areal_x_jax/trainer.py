"""The JAX trainer: one compiled, donated step with the micro-batches inside.

The host lays a batch out as [micro-batches, rows, length], in one of few capacities (powers of
two); the step loops over those that are filled, so batches of different sizes share a program and
what pads the capacity costs no compute.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32

from areal_x.errors import ConfigError, UserError
from areal_x.hf import adapters as adapter_files
from areal_x.hf import model_dir
from areal_x.hf.tokenizer import check_known, check_vocabulary
from areal_x.protocols.recorded_experts import recorded_experts
from areal_x.protocols.trainer import Wait, is_max_reduced
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.types import IMAGES, Batch, Loss, Policy, evaluate_loss
from areal_x_jax import head, lora, optimizers, sharded_checkpoint
from areal_x_jax.architecture import Shape, check_sharing, shape_of
from areal_x_jax.images import image_arrays
from areal_x_jax.model import head_kernel, hidden_states
from areal_x_jax.parameters import Params
from areal_x_jax.sharding import (
    BY_ROW,
    RULES,
    all_of,
    check_fit,
    lay,
    make_layout,
    sampling_shardings,
    shardings,
)
from areal_x_jax.vision import ImageArrays, look
from areal_x_jax.vision_architecture import VisionShape
from areal_x_jax.weights import from_tensors, to_tensors

jax.tree_util.register_dataclass(Batch)
jax.tree_util.register_dataclass(Policy)

DETERMINISTIC_FLAG = "--xla_gpu_deterministic_ops=true"
Rows = tuple[Batch, ImageArrays | None]  # what a step reads of a batch
# for one device's backward pass, beyond which it computes whole layers again
KEPT_BYTES = 4 * 2**30


class Trainer:
    """See `areal_x.trainer.Trainer`. fp32 master weights and moments; what lies where says
    areal_x_jax.sharding."""

    def __init__(self, config: TrainerConfig) -> None:
        if config.offload:
            raise ConfigError(
                "trainer.offload",
                True,
                "False with JAX: split the model over more devices by mesh.fsdp",
            )
        self.config = config
        if config.deterministic:
            check_repeatable(jax.local_devices()[0].platform)
        self.layout = make_layout(config.mesh)
        assert self.layout.mesh is not None
        self.mesh = self.layout.mesh
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.by_row = NamedSharding(self.mesh, PartitionSpec(None, RULES["rows"], RULES["length"]))
        self.whole_rows = NamedSharding(self.mesh, PartitionSpec(None, RULES["rows"]))
        on_cpu = jax.local_devices()[0].platform == "cpu"
        precision = {"auto": "fp32" if on_cpu else "bf16"}.get(config.precision, config.precision)
        self.dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16}[precision]
        self.directory = model_dir.resolve(config.model.path)
        model_dir.check_head(self.directory, config.head)
        self.shape = shape_of(model_dir.read_config(self.directory), config.head)
        check_sharing(config.share_prompts, self.directory, self.shape)
        if config.replay_experts and self.shape.experts is None:
            raise ConfigError(
                "trainer.replay_experts", True, f"False with {self.directory}, which has no experts"
            )
        check_fit(self.layout, self.shape)
        self.trained = lora.trained_shape(self.shape, config.lora)
        self.lies = shardings(self.layout, self.trained)
        self.teacher: Params | None = None
        if config.teacher is not None:
            self.teacher_shape, self.teacher = self._read_teacher(Path(config.teacher))
        self.optimizer = optimizers.make_optimizer(config.optimizer)
        self.params = self._read_params(self.directory)
        self.base: Params | None = None  # what the adapters stand beside
        if self.trained.adapters is not None:
            self.base, self.params = self.params, lora.drawn(self.trained, config.seed, self.lies)
            if self.shape.scores:
                self.params["score"] = self.base.pop("score")
        self.moments: Any = None
        if not config.frozen:
            state = jax.eval_shape(self.optimizer.init, self.params)
            self.moments_lie = optimizers.shardings_of(
                state, self.params, self.lies, self.replicated
            )
            self.moments = jax.jit(self.optimizer.init, out_shardings=self.moments_lie)(self.params)
        self.version = 0
        self.threads: int | None = None  # XLA chooses them
        self._steps: dict[Loss, Any] = {}
        self._said = jax.jit(self._all_said, out_shardings=self.by_row)
        self._snapshot = jax.jit(
            self._copied, out_shardings=sampling_shardings(self.layout, self.shape)
        )

    @property
    def programs(self) -> int:
        """How many programs have been compiled for steps: one for each loss, length and power of
        two of micro-batches."""
        return sum(step._cache_size() for step in self._steps.values())

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        self._need_policy("log-probabilities")
        return self._say(batch)

    def values(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        if self.config.head == "policy":
            raise ValueError(
                "a trainer with the head 'policy' has no values: a critic or a reward model has"
                " them"
            )
        return self._say(batch)

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        if batch.weights is None:
            raise ValueError("the batch has no weights: an algorithm's weighting gives them")
        self._need_moments("update")
        if self.teacher is not None:
            check_known(batch.tokens, self.teacher_shape.vocab, Path(str(self.config.teacher)))
        rows, count = self._lay_out(batch)
        if loss not in self._steps:
            # Pinned shardings: left to the compiler, those of the second step's state could differ
            # and compile it again.
            lies = self.lies, self.moments_lie, self.replicated
            self._steps[loss] = jax.jit(
                partial(self._step, loss), donate_argnums=(0, 1), out_shardings=lies
            )
        trained = np.float32(max(np.count_nonzero(batch.mask), 1))
        self.params, self.moments, results = self._steps[loss](
            self.params, self.moments, self.base, self.teacher, rows, count, trained
        )
        rate = float(self.config.optimizer.learning_rate_at(np.float32(self.version)))
        self.version += 1
        return {
            **{name: float(x) for name, x in jax.device_get(results).items()},
            "learning_rate": rate,
        }

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        if self.base is None:
            tensors = to_tensors(self.shape, self.params)
        else:
            tensors = adapter_files.merge(
                to_tensors(self.shape, self.base), self.adapter(), self.config.lora.scale
            )
        for name, tensor in tensors:
            yield name, tensor.astype(self.dtype)

    def adapter(self) -> Iterator[tuple[str, np.ndarray]]:
        if self.base is None:
            raise ValueError("a trainer with lora.rank = 0 has no adapter")
        yield from to_tensors(self.trained, self.params)

    def save(self, directory: Path | None) -> None:
        self._need_moments("state to save")
        state: dict[str, Any] = {"version": self.version}
        if self.base is None:
            model_dir.write_model(
                directory,
                self.directory,
                to_tensors(self.shape, self.params),
                head=self.config.head,
            )
        elif directory is None:
            model_dir.exhaust(self.adapter())
        else:
            model_dir.copy_other_files(directory, self.directory, self.config.head)
            config, head = self.config.lora, self.config.head
            adapter_files.write(
                directory, self.adapter(), config=config, base=self.directory, head=head
            )
            state["base"] = adapter_files.fingerprint(self.directory)
        optimizers.save(directory, self.config.optimizer, self.trained, self.moments, state)

    def save_in_background(self, directory: Path) -> Wait | None:
        writes = jax.process_index() == 0 or not self.mesh.is_multi_process
        if self.config.checkpoint == "portable":
            self.save(directory if writes else None)
            return None
        self._need_moments("state to save")
        if writes:
            model_dir.copy_other_files(directory, self.directory, self.config.head)
            numbers = {
                "version": self.version,
                "optimizer": self.config.optimizer.name,
                "backend": "jax",
            }
            model_dir.write_trainer_state(directory, numbers)
        return sharded_checkpoint.save(directory, self.params, self.moments)

    def restore(self, directory: Path) -> None:
        if sharded_checkpoint.is_sharded(directory):
            state = model_dir.read_trainer_state(directory)
            self.config.optimizer.check_state(directory, state, "jax")
            of_state = self.params, self.lies, self.moments, self.moments_lie
            self.params, self.moments = sharded_checkpoint.restored(directory, *of_state)
            self.version = int(state["version"])
            return
        model_dir.check_portable(directory)
        adapter_files.check_saved(directory, self.config.lora, self.directory)
        how = self.config.optimizer, self.trained, self.moments, self.moments_lie, self.layout
        moments = optimizers.restored(directory, *how)
        if self.base is None:
            self.params = self._read_params(directory)
        else:
            self.params = from_tensors(
                self.trained, adapter_files.read(directory), str(directory), self.layout
            )
        self.moments = moments
        self.version = int(model_dir.read_trainer_state(directory)["version"])

    def snapshot(self) -> Params:
        self._need_policy("snapshot to sample from")
        of_model = self.params if self.base is None else self.base
        # the sampler sees no images
        read = {name: x for name, x in of_model.items() if name != "vision"}
        return self._snapshot(read, None if self.base is None else self.params)

    def sampler(self, slots: int, context: int) -> Any:
        from areal_x_jax.sampler import Sampler

        self._need_policy("sampler")
        # What is drawn is trained on, and a row may be longer than the longest sequence.
        return Sampler(
            self.shape, slots, min(context, self.shape.context or context), mesh=self.mesh
        )

    # ---- on the host

    def _need_policy(self, what: str) -> None:
        if self.config.head != "policy":
            raise ValueError(
                f"a trainer with the head {self.config.head!r} has no {what}: it judges tokens and"
                " draws none"
            )

    def _need_moments(self, what: str) -> None:
        if self.config.frozen:
            raise ValueError(f"a frozen model has no {what}: it is only asked")

    def _say(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        rows, length = batch.shape
        read = {name: getattr(batch, name) for name in ("experts", "prefix_ids", *IMAGES)}
        micro, count = self._lay_out(
            Batch(batch.tokens, batch.segment_ids, batch.positions, batch.mask, **read)
        )
        said = jax.device_get(all_of(self._said(self.params, self.base, micro, count)))
        return np.asarray(said).reshape(-1, length)[:rows]

    def _read_params(self, directory: Path) -> Params:
        tensors = model_dir.read_tensors(directory)
        if self.shape.scores and not model_dir.is_classifier(model_dir.read_config(directory)):
            tensors = chain(tensors, [("score.weight", np.zeros((1, self.shape.hidden)))])
        learns = not self.config.frozen and self.trained.adapters is None
        return from_tensors(
            self.shape, tensors, str(directory), self.layout, jnp.float32 if learns else self.dtype
        )

    def _read_teacher(self, directory: Path) -> tuple[Shape, Params]:
        check_vocabulary("train.teacher", directory, self.directory)
        model_dir.check_head(directory, "policy")
        shape = shape_of(model_dir.read_config(directory))
        if self.shape.vision is not None and (
            shape.vision is None or shape.vision.seen != self.shape.vision.seen
        ):
            raise ConfigError(
                "train.teacher",
                str(directory),
                f"a model that sees images as {self.directory} does",
            )
        check_fit(self.layout, shape)
        check_sharing(self.config.share_prompts, directory, shape)
        return shape, from_tensors(
            shape, model_dir.read_tensors(directory), str(directory), self.layout, self.dtype
        )

    def _whole(self, params: Params, base: Params | None) -> Params:
        """What is trained, with what it stands beside."""
        return params if base is None else lora.joined(base, params, self.config.lora.scale)

    def _cast(self, params: Params) -> Params:
        """In the compute precision, but for a score, which is computed in fp32."""
        score = {"score": params["score"]} if "score" in params else {}
        return {**jax.tree.map(lambda x: x.astype(self.dtype), params), **score}

    def _lay_out(self, batch: Batch) -> tuple[Rows, np.int32]:
        """The batch, and its images, as [capacity, rows at once, …] on the devices, and how many
        micro-batches are filled."""
        rows, length = batch.shape
        parts = self.layout.size("context")
        if length % parts:
            wanted = f"set train.row_length to a multiple of {parts}"
            raise UserError(
                f"mesh.context = {parts} does not divide rows of {length} tokens: {wanted}"
            )
        longest = int(np.max(batch.positions)) + 1
        if 0 < self.shape.context < longest:
            raise UserError(
                f"a sequence of {longest} tokens is longer than the {self.shape.context} that the"
                f" model in {self.directory} was made for: lower train.row_length, or stretch its"
                " positions (rope_scaling in its config.json)"
            )
        check_known(batch.tokens, self.shape.vocab, self.directory)
        batch = batch.replace(experts=self._replayed(batch))
        images = image_arrays(batch.map(np.asarray), self.shape.vision)
        # patches are what is large, and nothing computes with them in more than its precision
        if images is not None:
            images = images._replace(patches=images.patches.astype(self.dtype))
        at_once = self.config.micro_batch_rows * self.layout.size(*BY_ROW)
        count = -(-rows // at_once)
        capacity = 1 << (count - 1).bit_length()

        def lay_out(lies: NamedSharding, x: np.ndarray) -> jax.Array:
            padded = np.zeros(
                (capacity * at_once, *x.shape[1:]), np.float32 if x.dtype == np.float64 else x.dtype
            )
            padded[:rows] = x
            return lay(padded.reshape(capacity, at_once, *x.shape[1:]), lies)

        laid_out = batch.replace(**dict.fromkeys(IMAGES)).map(partial(lay_out, self.by_row))
        return (laid_out, jax.tree.map(partial(lay_out, self.whole_rows), images)), np.int32(count)

    def _replayed(self, batch: Batch) -> np.ndarray | None:
        """The recorded experts, where they are to be used."""
        if not self.config.replay_experts:
            return None
        of_model = self.shape.experts
        assert of_model is not None
        return recorded_experts(
            batch, self.directory, self.shape.layers, of_model.per_token, of_model.count
        )

    # ---- what is compiled

    def _step(
        self,
        loss: Loss,
        params: Params,
        moments: Any,
        base: Params | None,
        teacher: Params | None,
        rows: Rows,
        count: Array,
        trained: Array,
    ) -> tuple[Params, Any, dict[str, Array]]:
        """One optimizer step over the first `count` micro-batches. trained: masked tokens of the
        whole batch."""

        def objective(params: Params, of_micro: Rows) -> tuple[Array, dict[str, Array]]:
            micro, _ = of_micro
            policy, uneven = self._policy(
                self._whole(params, base), of_micro, self.config.entropy, teacher
            )
            terms, metrics = evaluate_loss(loss, policy, micro)
            masked = {name: jnp.where(micro.mask, x, 0) for name, x in metrics.items()}
            means = {
                name: jnp.max(x) if is_max_reduced(name) else jnp.sum(x) / trained
                for name, x in masked.items()
            }
            if uneven is None:
                return jnp.sum(micro.weights * terms), means
            uneven = uneven * jnp.sum(micro.mask) / trained
            return jnp.sum(micro.weights * terms) + self.config.balance * uneven, means | {
                "expert_imbalance": uneven
            }

        differentiate = jax.value_and_grad(objective, has_aux=True)

        def add(index: Array, sums: Any) -> Any:
            (value, said), gradient = differentiate(params, _micro(rows, index))
            (values, all_said), gradients = sums
            both = {
                name: (jnp.maximum if is_max_reduced(name) else jnp.add)(all_said[name], x)
                for name, x in said.items()
            }
            return (values + value, both), jax.tree.map(jnp.add, gradients, gradient)

        kinds = jax.eval_shape(differentiate, params, _micro(rows, 0))
        sums = jax.lax.fori_loop(
            0, count, add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kinds)
        )
        (value, metrics), gradient = sums
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        updates, new_moments = self.optimizer.update(gradient, moments, params)

        def keep(new: Array, old: Array) -> Array:
            """The optimizer's counts, the only integers, go on: they are the version, and a skipped
            step is one too."""
            return new if jnp.issubdtype(new.dtype, jnp.integer) else jnp.where(finite, new, old)

        params, moments = jax.tree.map(
            keep, (optax.apply_updates(params, updates), new_moments), (params, moments)
        )
        return (
            params,
            moments,
            {"loss": value, "grad_norm": norm, "skipped": 1.0 - finite, **metrics},
        )

    def _copied(self, params: Params, adapters: Params | None) -> Params:
        """What is sampled from: adapters merged, in the compute precision."""
        if adapters is not None:
            params = lora.merged(params, adapters, self.config.lora.scale)
        copied: Params = jax.tree.map(lambda x: jnp.array(x, self.dtype, copy=True), params)
        return copied

    def _all_said(
        self, params: Params, base: Params | None, rows: Rows, count: Array
    ) -> Float32[Array, "capacity rows length"]:
        """Log-probabilities, or values of what scores."""

        def fill(index: Array, said: Array) -> Array:
            policy, _ = self._policy(self._whole(params, base), _micro(rows, index))
            return said.at[index].set(policy.values if self.shape.scores else policy.logp)

        return jax.lax.fori_loop(0, count, fill, jnp.zeros(rows[0].tokens.shape, jnp.float32))

    def _policy(
        self, params: Params, rows: Rows, entropy: bool = False, teacher: Params | None = None
    ) -> tuple[Policy, Array | None]:
        """What the model says of a micro-batch, and how unevenly its experts were chosen, where it
        has any."""
        (batch, images), cast = rows, self._cast(params)
        kept = batch.tokens.size // self.layout.size(*BY_ROW, "context") * kept_numbers(self.shape)
        if images is not None and self.shape.vision is not None:
            kept += (
                images.layout.rows.size
                // self.layout.size(*BY_ROW)
                * kept_of_patch(self.shape.vision)
            )
        kept *= jnp.dtype(self.dtype).itemsize
        remat = self.config.remat == "layers" or (self.config.remat == "auto" and kept > KEPT_BYTES)
        packed, how = (
            (batch.tokens, batch.positions, batch.segment_ids),
            self.config.model.attention,
        )
        features = (
            None if images is None else look(self.shape, cast, images, remat, self.layout, how)
        )
        prefixes = batch.prefix_ids
        hidden, uneven = hidden_states(
            self.shape, cast, *packed, remat, self.layout, how, batch.experts, features, prefixes
        )
        if self.shape.scores:
            before = self.config.head == "value"
            return (
                Policy(values=head.values(hidden, params["score"], batch.segment_ids, before)),
                uneven,
            )
        chunk = self.config.head_chunk * self.layout.size(*BY_ROW)
        kernel, temperature = head_kernel(params), self.config.temperature
        beside = None
        if teacher is not None:
            # No gradient goes there, so nothing of it is kept.
            features = (
                None
                if images is None
                else look(self.teacher_shape, teacher, images, False, self.layout, how)
            )
            others = {"images": features, "prefix_ids": prefixes}
            of_teacher, _ = hidden_states(
                self.teacher_shape, teacher, *packed, False, self.layout, how, **others
            )
            beside = head.Teacher(
                of_teacher,
                head_kernel(teacher),
                self.config.divergence,
                self.teacher_shape.logit_softcap,
            )
        hidden = self.layout.pin(hidden, "rows", None, None)  # the head looks at neighbours
        of_head = (
            temperature,
            chunk,
            entropy,
            beside,
            self.shape.logit_softcap,
            self.layout,
            self.shape.tied,
        )
        said = head.logprobs(hidden, kernel, batch.tokens, batch.segment_ids, *of_head)
        return Policy(**dict(zip(("logp", "entropy", "divergence"), said, strict=True))), uneven


def _micro(rows: Rows, index: Array | int) -> Rows:
    found: Rows = jax.tree.map(
        lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), rows
    )
    return found


def kept_numbers(shape: Shape) -> int:
    """What the backward pass keeps of each token without remat: the layers' inputs and all products
    with kernels."""
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    experts, inner = shape.experts, shape.layers * shape.intermediate
    if experts is not None:
        sparse, dense = len(shape.layers_in("sparse")), len(experts.dense)
        inner = (
            sparse * (experts.per_token * experts.intermediate + experts.shared)
            + dense * shape.intermediate
        )
    return shape.layers * (3 * shape.hidden + attention) + 2 * inner


def kept_of_patch(shape: VisionShape) -> int:
    """The same of a vision tower and each patch."""
    return shape.layers * (5 * shape.hidden + (1 + shape.gated) * shape.intermediate)


def check_repeatable(platform: str) -> None:
    """Raises: UserError for a GPU on which the compiler may choose kernels whose sums depend on the
    order of threads."""
    if platform in ("gpu", "cuda", "rocm") and DETERMINISTIC_FLAG not in os.environ.get(
        "XLA_FLAGS", ""
    ):
        raise UserError(
            f"train.deterministic = True needs XLA_FLAGS={DETERMINISTIC_FLAG} in the environment on"
            " a GPU: start with it"
        )
