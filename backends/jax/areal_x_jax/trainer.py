"""The JAX trainer: one compiled, donated step with the micro-batches inside.

The host lays a batch out as [micro-batches, rows, length], in one of few capacities (powers of two); the step loops over those
that are filled, so batches of different sizes share a program and what pads the capacity costs no compute.
"""

from __future__ import annotations

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

from areal_x import model_dir
from areal_x.errors import UserError
from areal_x.trainer import Loss, TrainerConfig
from areal_x.types import Batch, Policy
from areal_x_jax import head, optimizers
from areal_x_jax.layout import BY_ROW, RULES, all_of, check_fit, lay, make_layout, shardings
from areal_x_jax.model import head_kernel, hidden_states
from areal_x_jax.parameters import Params
from areal_x_jax.shape import Shape, shape_of
from areal_x_jax.weights import from_tensors, to_tensors

jax.tree_util.register_dataclass(Batch)
jax.tree_util.register_dataclass(Policy)

KEPT_BYTES = 4 * 2**30  # for one device's backward pass, beyond which it computes whole layers again


class Trainer:
    """See `areal_x.trainer.Trainer`. fp32 master weights and moments; what lies where says areal_x_jax.layout."""

    def __init__(self, config: TrainerConfig) -> None:
        self.config = config
        self.layout = make_layout(config.mesh)
        assert self.layout.mesh is not None
        self.mesh = self.layout.mesh
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.by_row = NamedSharding(self.mesh, PartitionSpec(None, RULES["rows"], RULES["length"]))
        on_cpu = jax.local_devices()[0].platform == "cpu"
        precision = {"auto": "fp32" if on_cpu else "bf16"}.get(config.precision, config.precision)
        self.dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16}[precision]
        self.directory = model_dir.resolve(config.model.path)
        model_dir.check_head(self.directory, config.head)
        self.shape = shape_of(model_dir.read_config(self.directory), config.head)
        check_fit(self.layout, self.shape)
        self.lies = shardings(self.layout, self.shape)
        self.teacher: Params | None = None
        if config.teacher is not None:
            self.teacher_shape, self.teacher = self._read_teacher(Path(config.teacher))
        self.optimizer = optimizers.make_optimizer(config.optimizer)
        self.params = self._read_params(self.directory)
        self.moments: Any = None
        if not config.frozen:
            state = jax.eval_shape(self.optimizer.init, self.params)
            self.moments_lie = optimizers.shardings_of(state, self.params, self.lies, self.replicated)
            self.moments = jax.jit(self.optimizer.init, out_shardings=self.moments_lie)(self.params)
        self.version = 0
        self._steps: dict[Loss, Any] = {}
        self._said = jax.jit(self._all_said, out_shardings=self.by_row)

    @property
    def programs(self) -> int:
        """How many programs have been compiled for steps: one for each loss, length and power of two of micro-batches."""
        return sum(step._cache_size() for step in self._steps.values())

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        self._need_policy("log-probabilities")
        return self._say(batch)

    def values(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        if self.config.head == "policy":
            raise ValueError("a trainer with the head 'policy' has no values: a critic or a reward model has them")
        return self._say(batch)

    def update(self, batch: Batch, loss: Loss) -> dict[str, float]:
        if batch.weights is None:
            raise ValueError("the batch has no weights: an algorithm's weighting gives them")
        self._need_moments("update")
        micro, count = self._lay_out(batch)
        if loss not in self._steps:
            # Pinned shardings: left to the compiler, those of the second step's state could differ and compile it again.
            lies = self.lies, self.moments_lie, self.replicated
            self._steps[loss] = jax.jit(partial(self._step, loss), donate_argnums=(0, 1), out_shardings=lies)
        trained = np.float32(max(np.count_nonzero(batch.mask), 1))
        self.params, self.moments, results = self._steps[loss](self.params, self.moments, self.teacher, micro, count, trained)
        rate = float(self.config.optimizer.learning_rate_at(np.float32(self.version)))
        self.version += 1
        return {**{name: float(x) for name, x in jax.device_get(results).items()}, "learning_rate": rate}

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, tensor in to_tensors(self.shape, self.params):
            yield name, tensor.astype(self.dtype)

    def save(self, directory: Path | None) -> None:
        self._need_moments("state to save")
        model_dir.write_model(directory, self.directory, to_tensors(self.shape, self.params), head=self.config.head)
        optimizers.save(directory, self.config.optimizer, self.shape, self.moments, self.version)

    def restore(self, directory: Path) -> None:
        how = self.config.optimizer, self.shape, self.moments, self.moments_lie, self.layout
        moments = optimizers.restored(directory, *how)
        self.params, self.moments = self._read_params(directory), moments
        self.version = int(model_dir.read_state(directory)["version"])

    def snapshot(self) -> Params:
        self._need_policy("snapshot to sample from")
        if self.mesh.is_multi_process:
            return jax.tree.map(lambda x: all_of(x.astype(self.dtype)), self.params)
        return jax.tree.map(lambda x: jnp.array(x, self.dtype, copy=True), self.params)

    def sampler(self, slots: int, context: int) -> Any:
        from areal_x_jax.lanes import Sampler

        self._need_policy("sampler")
        return Sampler(self.shape, slots, context)

    # ---- on the host

    def _need_policy(self, what: str) -> None:
        if self.config.head != "policy":
            raise ValueError(f"a trainer with the head {self.config.head!r} has no {what}: it judges tokens and draws none")

    def _need_moments(self, what: str) -> None:
        if self.config.frozen:
            raise ValueError(f"a frozen model has no {what}: it is only asked")

    def _say(self, batch: Batch) -> Float32[np.ndarray, "rows length"]:
        rows, length = batch.shape
        micro, count = self._lay_out(Batch(batch.tokens, batch.segment_ids, batch.positions, batch.mask))
        said = jax.device_get(all_of(self._said(self.params, micro, count)))
        return np.asarray(said).reshape(-1, length)[:rows]

    def _read_params(self, directory: Path) -> Params:
        tensors = model_dir.read_tensors(directory)
        if self.shape.scores and not model_dir.is_classifier(model_dir.read_config(directory)):
            tensors = chain(tensors, [("score.weight", np.zeros((1, self.shape.hidden)))])
        params = from_tensors(self.shape, tensors, str(directory), self.layout)
        return self._cast(params) if self.config.frozen else params

    def _read_teacher(self, directory: Path) -> tuple[Shape, Params]:
        model_dir.check_vocabulary("train.teacher", directory, self.directory)
        model_dir.check_head(directory, "policy")
        shape = shape_of(model_dir.read_config(directory))
        check_fit(self.layout, shape)
        return shape, self._cast(from_tensors(shape, model_dir.read_tensors(directory), str(directory), self.layout))

    def _cast(self, params: Params) -> Params:
        """In the compute precision, but for a score, which is computed in fp32."""
        score = {"score": params["score"]} if "score" in params else {}
        return {**jax.tree.map(lambda x: x.astype(self.dtype), params), **score}

    def _lay_out(self, batch: Batch) -> tuple[Batch, np.int32]:
        """The batch as [capacity, rows at once, length] on the devices, and how many micro-batches are filled."""
        rows, length = batch.shape
        parts = self.layout.size("context")
        if length % parts:
            wanted = f"set train.row_length to a multiple of {parts}"
            raise UserError(f"mesh.context = {parts} does not divide rows of {length} tokens: {wanted}")
        largest = int(np.max(batch.tokens))
        if largest >= self.shape.vocab:
            raise UserError(
                f"token {largest} is outside the vocabulary of {self.shape.vocab} of the model in {self.directory}: "
                "its tokenizer must be the one that the model was made for"
            )
        at_once = self.config.micro_batch_rows * self.layout.size(*BY_ROW)
        count = -(-rows // at_once)
        capacity = 1 << (count - 1).bit_length()

        def lay_out(x: np.ndarray) -> jax.Array:
            padded = np.zeros((capacity * at_once, *x.shape[1:]), np.float32 if x.dtype == np.float64 else x.dtype)
            padded[:rows] = x
            return lay(padded.reshape(capacity, at_once, *x.shape[1:]), self.by_row)

        return batch.map(lay_out), np.int32(count)

    # ---- what is compiled

    def _step(
        self, loss: Loss, params: Params, moments: Any, teacher: Params | None, batch: Batch, count: Array, trained: Array
    ) -> tuple[Params, Any, dict[str, Array]]:
        """One optimizer step over the first `count` micro-batches. trained: masked tokens of the whole batch."""

        def objective(params: Params, micro: Batch) -> tuple[Array, dict[str, Array]]:
            policy, uneven = self._policy(params, micro, self.config.entropy, teacher)
            terms, metrics = loss(policy, micro)
            means = {name: jnp.sum(jnp.where(micro.mask, x, 0)) / trained for name, x in metrics.items()}
            if uneven is None:
                return jnp.sum(micro.weights * terms), means
            uneven = uneven * jnp.sum(micro.mask) / trained
            return jnp.sum(micro.weights * terms) + self.config.balance * uneven, means | {"expert_imbalance": uneven}

        differentiate = jax.value_and_grad(objective, has_aux=True)

        def add(index: Array, sums: Any) -> Any:
            return jax.tree.map(jnp.add, sums, differentiate(params, _micro(batch, index)))

        kinds = jax.eval_shape(differentiate, params, _micro(batch, 0))
        sums = jax.lax.fori_loop(0, count, add, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kinds))
        (value, metrics), gradient = sums
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        updates, new_moments = self.optimizer.update(gradient, moments, params)

        def keep(new: Array, old: Array) -> Array:
            """The optimizer's counts, the only integers, go on: they are the version, and a skipped step is one too."""
            return new if jnp.issubdtype(new.dtype, jnp.integer) else jnp.where(finite, new, old)

        params, moments = jax.tree.map(keep, (optax.apply_updates(params, updates), new_moments), (params, moments))
        return params, moments, {"loss": value, "grad_norm": norm, "skipped": 1.0 - finite, **metrics}

    def _all_said(self, params: Params, batch: Batch, count: Array) -> Float32[Array, "capacity rows length"]:
        """Log-probabilities, or values of what scores."""

        def fill(index: Array, said: Array) -> Array:
            policy, _ = self._policy(params, _micro(batch, index))
            return said.at[index].set(policy.values if self.shape.scores else policy.logp)

        return jax.lax.fori_loop(0, count, fill, jnp.zeros(batch.tokens.shape, jnp.float32))

    def _policy(
        self, params: Params, batch: Batch, entropy: bool = False, teacher: Params | None = None
    ) -> tuple[Policy, Array | None]:
        """What the model says of a micro-batch, and how unevenly its experts were chosen, where it has any."""
        cast = self._cast(params)
        on_one_device = batch.tokens.size // self.layout.size(*BY_ROW, "context")
        kept = on_one_device * kept_numbers(self.shape) * jnp.dtype(self.dtype).itemsize
        remat = self.config.remat == "layers" or (self.config.remat == "auto" and kept > KEPT_BYTES)
        packed, how = (batch.tokens, batch.positions, batch.segment_ids), self.config.model.attention
        hidden, uneven = hidden_states(self.shape, cast, *packed, remat, self.layout, how)
        if self.shape.scores:
            before = self.config.head == "value"
            return Policy(values=head.values(hidden, params["score"], batch.segment_ids, before)), uneven
        chunk = self.config.head_chunk * self.layout.size(*BY_ROW)
        kernel, temperature = head_kernel(params), self.config.temperature
        beside = None
        if teacher is not None:
            # No gradient goes there, so nothing of it is kept.
            of_teacher, _ = hidden_states(self.teacher_shape, teacher, *packed, False, self.layout, how)
            beside = head.Teacher(of_teacher, head_kernel(teacher), self.config.divergence)
        hidden = self.layout.pin(hidden, "rows", None, None)  # the head looks at neighbours
        of_head = temperature, chunk, entropy, beside, self.shape.logit_softcap, self.layout, self.shape.tied
        said = head.logprobs(hidden, kernel, batch.tokens, batch.segment_ids, *of_head)
        return Policy(**dict(zip(("logp", "entropy", "divergence"), said, strict=True))), uneven


def _micro(batch: Batch, index: Array | int) -> Batch:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), batch)


def kept_numbers(shape: Shape) -> int:
    """What the backward pass keeps of each token without remat: the layers' inputs and all products with kernels."""
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    experts = shape.experts
    inner = shape.intermediate if experts is None else experts.per_token * experts.intermediate + experts.shared
    return shape.layers * (3 * shape.hidden + attention + 2 * inner)
