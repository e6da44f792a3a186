"""What layers of any kind are made of: kernels with their adapters and biases, norms, gated MLPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from areal_x_jax import fp8, row_adapters
from areal_x_jax.architecture import Architecture
from areal_x_jax.parameters import Params
from areal_x_jax.slot_adapters import add_products

# Name, for jax.checkpoint_policies.save_only_these_names, of the sum of a kernel's and its adapter's
# products.
PRODUCT = "product"
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
}


def gated_mlp(layer: Params, prefix: str, x: Array, activation: Callable[[Array], Array]) -> Array:
    if f"{prefix}gate_up" in layer:
        gate, up = jnp.split(affine(layer, f"{prefix}gate_up", x), 2, axis=-1)
    else:
        gate, up = affine(layer, f"{prefix}gate", x), affine(layer, f"{prefix}up", x)
    return affine(layer, f"{prefix}down", activation(gate) * up)


def affine(layer: Params, name: str, x: Array) -> Array:
    """Applies a kernel, with its adapter and bias if the layer has them (an adapter's scale is in
    its lora_b). If there are several adapters, each row of x has one: of the layer's "adapters"
    (areal_x_jax.row_adapters), or of those that are "running" (areal_x_jax.slot_adapters)."""
    kernel = layer[name]
    y = fp8.linear(x, kernel) if isinstance(kernel, fp8.Kernel) else linear(x, kernel)
    if f"{name}_lora_a" in layer:
        a, b = layer[f"{name}_lora_a"], layer[f"{name}_lora_b"]
        if "running" in layer:
            y = add_products(y, x, a, b, layer["running"])
        elif "adapters" in layer:
            y = row_adapters.add_products(y, x, a, b, layer["adapters"])
        else:
            y = y + linear(linear(x, a), b)
    y = checkpoint_name(y, PRODUCT)
    return y + layer[f"{name}_bias"] if f"{name}_bias" in layer else y


@jax.custom_vjp
def linear(x: Float[Array, "... in"], kernel: Float[Array, "in out"]) -> Float[Array, "... out"]:
    """x @ kernel, with a backward pass that computes the incoming gradient once.

    XLA for CPU would fuse that gradient's formula (silu's, the rotation's) into the transposition
    with which one of the two products begins, and compute it twice, with strides: a quarter of a
    step.
    """
    return x @ kernel


def _linear_forward(x: Array, kernel: Array) -> tuple[Array, tuple[Array, Array]]:
    return x @ kernel, (x, kernel)


def _linear_backward(saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, kernel = saved
    gradient = jax.lax.optimization_barrier(gradient)
    tokens = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    # x.T @ gradient, without an array for x.T
    d_kernel = jax.lax.dot_general(*tokens, (((0,), (0,)), ((), ())))
    return gradient @ kernel.T, d_kernel


linear.defvjp(_linear_forward, _linear_backward)


def norm(
    x: Float[Array, "... features"], scale: Float[Array, " features"], arch: Architecture
) -> Float[Array, "... features"]:
    """RMS norm, or layer norm without bias, computed in fp32 whatever the input."""
    y = x.astype(jnp.float32)
    if arch.centred:
        y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + arch.eps)
    if arch.norm_offset or arch.varied is not None:
        factor = scale.astype(jnp.float32)
        return (y * (1.0 + factor if arch.norm_offset else factor)).astype(x.dtype)
    return y.astype(x.dtype) * scale


def unit_rms(x: Float[Array, "... features"], eps: float) -> Float[Array, "... features"]:
    """Divides by the RMS of the features, computed in fp32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)).astype(x.dtype)
