"""Low-rank adapters beside a frozen decoder: the trained parameters are a tree of their own, joined
with the decoder's when used.

frozen, in the compute precision ──┐
                                   ├─ with_adapters ──▶ the decoder's functions, which add (x @ a) @ b for layers with adapters
adapters, fp32, with moments ──────┘
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_x.errors import ConfigError
from areal_x.protocols.trainer_config import LoRAConfig
from areal_x_jax.architecture import Adapters, Architecture
from areal_x_jax.parameters import Params, adapter_targets, parameter_shapes
from areal_x_jax.stack_order import stored


def trained_architecture(arch: Architecture, config: LoRAConfig) -> Architecture:
    """Returns the architecture of what is trained: the whole decoder, or adapters and its score.

    Raises: ConfigError for targets that the decoder does not have.
    """
    if not config.rank:
        return arch
    there = adapter_targets(arch)
    unknown = [target for target in config.targets if target not in there]
    if unknown:
        experts = " (the router of experts can have none)" if arch.experts else ""
        wanted = (
            f"without {', '.join(unknown)}, as this model's kernels that can have adapters are"
            f" {', '.join(there)}{experts}"
        )
        raise ConfigError("lora.targets", config.targets, wanted)
    kernels = tuple(
        kernel
        for target, of_target in there.items()
        for kernel in of_target
        if target in config.targets
    )
    return replace(arch, adapters=Adapters(kernels, config.rank, config.scale))


def init_adapters(trained: Architecture, seed: int, shardings: Params) -> Params:
    """Returns adapters without effect: b is 0 and a uniform within ±1 / sqrt(its rows), as in PEFT.
    A score is 0."""

    def draw() -> Params:
        made = parameter_shapes(trained)
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), made)
        for index, (name, x) in enumerate(made["layers"].items()):
            if name.endswith("_lora_a"):
                key = jax.random.fold_in(jax.random.key(seed), index)
                uniform = jax.random.uniform(key, x.shape, minval=-1.0, maxval=1.0)
                params["layers"][name] = stored(
                    trained, ("layers", name), uniform * x.shape[-2] ** -0.5
                )
        return params

    adapters: Params = jax.jit(draw, out_shardings=shardings)()
    return adapters


def with_adapters(base: Params, adapters: Params, scale: float) -> Params:
    """Returns one tree in which layers have adapters beside their kernels, with the scale in each
    lora_b."""
    own = {
        name: x * scale if name.endswith("_lora_b") else x for name, x in adapters["layers"].items()
    }
    return {**base, **adapters, "layers": {**base["layers"], **own}}


def merge(
    kernel: Float[Array, "*_ in out"],
    a: Float[Array, "*_ in rank"],
    b: Float[Array, "*_ rank out"],
    scale: float,
) -> Float[Array, "*_ in out"]:
    """Returns a stack of kernels with their adapters added, in the kernels' dtype."""
    return (kernel + scale * jnp.matmul(a, b, precision="highest")).astype(kernel.dtype)


def merged(base: Params, adapters: Params, scale: float) -> Params:
    """Returns the decoder with the adapters merged into it."""
    own = {**adapters["layers"]}
    if "experts_gate" in base["layers"] and "experts_gate_up_lora_a" in own:
        a, both = own["experts_gate_up_lora_a"], own["experts_gate_up_lora_b"]
        for name, b in zip(
            ("experts_gate", "experts_up"), jnp.split(both, 2, axis=-1), strict=True
        ):
            own |= {f"{name}_lora_a": a, f"{name}_lora_b": b}

    def whole(name: str, kernel: Array) -> Array:
        return (
            merge(kernel, own[f"{name}_lora_a"], own[f"{name}_lora_b"], scale)
            if f"{name}_lora_a" in own
            else kernel
        )

    return {
        **base,
        "layers": {name: whole(name, kernel) for name, kernel in base["layers"].items()},
    }
