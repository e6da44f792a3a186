"""One optimizer step as a pure function, compiled once per loss, row length and capacity."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from areal_x.protocols.expert_load import bias_step, max_violation
from areal_x.protocols.trainer import is_max_reduced
from areal_x.protocols.trainer_config import OptimizerConfig
from areal_x.types import Loss, evaluate_loss
from areal_x_jax.forward import Forward, Rows, micro_batch
from areal_x_jax.optimizers import Settings, with_settings
from areal_x_jax.parameters import Params


def update_step(
    forward: Forward,
    optimizer: optax.GradientTransformation,
    loss: Loss,
    params: Params,
    moments: Any,
    base: Params | None,
    teacher: Params | None,
    rows: Rows,
    count: Array,
    trained: Array,
) -> tuple[Params, Any, dict[str, Array], tuple[Array | None, Array | None]]:
    """Takes one optimizer step over the first `count` micro-batches and returns parameters, moments,
    metrics, and what the policy was before the step at the trained tokens: their log-probabilities
    and entropies (None for what the head does not compute).

    trained: masked tokens of the whole batch. A step whose loss or gradient norm is not finite
    leaves parameters and moments as they are.

    After it the biases that routers choose experts by move by `trainer.balance_rate`, by the load of
    all micro-batches on all devices: the compiler sums over devices.
    """

    def objective(params: Params, of_micro: Rows) -> tuple[Array, Any]:
        micro = of_micro.batch
        policy, use = forward.policy(params, base, of_micro, forward.config.entropy, teacher)
        terms, metrics = evaluate_loss(loss, policy, micro)
        masked = {name: jnp.where(micro.mask, x, 0) for name, x in metrics.items()}
        means = {
            name: jnp.max(x) if is_max_reduced(name) else jnp.sum(x) / trained
            for name, x in masked.items()
        }
        kept = jax.tree.map(lambda x: jnp.where(micro.mask, x, 0), (policy.logp, policy.entropy))
        if use is None:
            return jnp.sum(micro.weights * terms), (means, None, kept)
        imbalance = use.imbalance * jnp.sum(micro.mask) / trained
        total = jnp.sum(micro.weights * terms) + forward.config.balance * imbalance
        return total, (means | {"expert_imbalance": imbalance}, use.load, kept)

    differentiate = jax.value_and_grad(objective, has_aux=True)

    def add(index: Array, sums: Any) -> Any:
        (value, (metrics, load, own)), gradient = differentiate(params, micro_batch(rows, index))
        (values, all_metrics, loads), gradients, kept = sums
        both = {
            name: (jnp.maximum if is_max_reduced(name) else jnp.add)(all_metrics[name], x)
            for name, x in metrics.items()
        }
        kept = jax.tree.map(lambda of_all, x: of_all.at[index].set(x), kept, own)
        loads = jax.tree.map(jnp.add, loads, load)
        return (values + value, both, loads), jax.tree.map(jnp.add, gradients, gradient), kept

    (value, (metrics, load, own)), gradient = jax.eval_shape(
        differentiate, params, micro_batch(rows, 0)
    )
    kinds = (value, metrics, load), gradient
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kinds)
    kept = jax.tree.map(lambda x: jnp.zeros(rows.batch.tokens.shape, x.dtype), own)
    (value, metrics, load), gradient, kept = jax.lax.fori_loop(0, count, add, (*zeros, kept))
    norm = optax.tree.norm(gradient)
    finite = jnp.isfinite(value) & jnp.isfinite(norm)
    updates, new_moments = optimizer.update(gradient, moments, params)

    def keep(new: Array, old: Array) -> Array:
        """The optimizer's counts, the only integers, increase: they are the version, and a skipped
        step is one too."""
        return new if jnp.issubdtype(new.dtype, jnp.integer) else jnp.where(finite, new, old)

    params, moments = jax.tree.map(
        keep, (optax.apply_updates(params, updates), new_moments), (params, moments)
    )
    results = {"loss": value, "grad_norm": norm, "skipped": 1.0 - finite, **metrics}
    if load is not None:
        results["expert_max_violation"] = max_violation(load)
        if rate := forward.config.balance_rate:
            bias = params["layers"]["router_correction"]
            moved = bias + bias_step(load, rate).reshape(bias.shape)
            layers = params["layers"] | {"router_correction": jnp.where(finite, moved, bias)}
            params = params | {"layers": layers}
    return params, moments, results, kept


def update_with_settings(
    forward: Forward,
    config: OptimizerConfig,
    loss: Loss,
    params: Params,
    moments: Any,
    base: Params | None,
    teacher: Params | None,
    rows: Rows,
    count: Array,
    trained: Array,
    settings: Settings,
) -> tuple[Params, Any, dict[str, Array], tuple[Array | None, Array | None]]:
    """Takes the step of `update_step` with the optimizer's numbers as inputs, so that steps with other
    numbers share a program."""
    optimizer = with_settings(config, settings)
    return update_step(
        forward, optimizer, loss, params, moments, base, teacher, rows, count, trained
    )
