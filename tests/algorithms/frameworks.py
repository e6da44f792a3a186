"""Runs a function on numpy, jax and torch: converts the same arrays to each, and computes gradients.

Also the example batch for the tests of losses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from inspect import unwrap
from typing import Any

import numpy as np

from areal_x.types import Batch, Policy

Gradients = dict[str, np.ndarray]


def example(seed: int = 0, garbage: float | None = None) -> tuple[Policy, Batch]:
    """Three packed rows with one to five segments, some of their tokens masked; `garbage` fills every array elsewhere."""
    rng = np.random.default_rng(seed)
    shape = rows, length = 3, 14
    ids = np.zeros(shape, np.int32)
    for row in range(rows):
        ends = np.sort(rng.choice(np.arange(2, length), rng.integers(1, 6), replace=False))
        for segment, (start, end) in enumerate(zip([0, *ends], ends, strict=False), 1):
            ids[row, start:end] = segment
    mask = (rng.random(shape) < 0.7) & (ids > 0)

    def draw(scale: float = 1.0) -> np.ndarray:
        return rng.normal(size=shape) * scale

    behavior = -np.abs(draw())
    values, entropy = draw(), np.abs(draw())
    policy = Policy(logp=behavior + draw(0.4), entropy=entropy, values=values, divergence=entropy[::-1].copy())
    batch = Batch(
        tokens=ids, segment_ids=ids, positions=ids, mask=mask, behavior_logp=behavior, proximal_logp=behavior + draw(0.1),
        reference_logp=behavior + draw(0.3), advantages=draw(), returns=draw(), old_values=values + draw(0.3),
        weights=np.where(mask, np.abs(draw()), 0),
    )  # fmt: skip
    if garbage is not None:
        for name, x in (present(policy) | present(batch)).items():
            if x.dtype.kind == "f" and name != "weights":
                x[~mask] = garbage
    return policy, batch


def as_array(x: Any, framework: str, dtype: type = np.float64) -> Any:
    """x as an array of the framework, floats as `dtype`, integers and booleans as they are. jax: inside `precision(dtype)`."""
    x = np.asarray(x)
    x = x.astype(dtype) if x.dtype.kind == "f" else x
    if framework == "numpy":
        return x
    if framework == "jax":
        import jax.numpy as jnp

        return jnp.asarray(x)
    import torch

    return torch.tensor(x)


def as_numpy(x: Any) -> np.ndarray:
    return x.detach().numpy() if hasattr(x, "detach") else np.asarray(x)


def precision(framework: str, dtype: type = np.float64) -> Any:
    """A context in which `dtype` is available: jax has no float64 unless it is enabled."""
    import jax

    return jax.enable_x64() if framework == "jax" and dtype is np.float64 else nullcontext()


def present(data: Policy | Batch) -> dict[str, Any]:
    """The arrays that are not None, by name."""
    return {f.name: x for f in fields(data) if (x := getattr(data, f.name)) is not None}


def apply(
    function: Callable[..., Any], *inputs: Any, framework: str, dtype: type = np.float64, compiled: bool | str = False
) -> Any:
    """function(*inputs), with numpy in and numpy out (an array or a tuple of them)."""
    with precision(framework, dtype):
        function = compile_for(framework, function, compiled) if compiled else function
        result = function(*(as_array(x, framework, dtype) for x in inputs))
        return tuple(map(as_numpy, result)) if isinstance(result, tuple) else as_numpy(result)


def value_and_gradient(
    function: Callable[..., Any],
    inputs: Mapping[str, np.ndarray],
    constants: Mapping[str, np.ndarray],
    *,
    framework: str,
    dtype: type = np.float64,
    compiled: bool | str = False,
) -> tuple[np.ndarray, Gradients]:
    """function(inputs, constants), a scalar, and its gradient with respect to each of the inputs. framework: jax or torch.

    compiled: under jax.jit or torch.compile, whose backend may be named. An unused input has a gradient of 0.
    """
    function = compile_for(framework, function, compiled) if compiled else function
    with precision(framework, dtype):
        leaves = {name: as_array(x, framework, dtype) for name, x in inputs.items()}
        rest = {name: as_array(x, framework, dtype) for name, x in constants.items()}
        if framework == "jax":
            import jax

            value, gradient = jax.value_and_grad(function)(leaves, rest)
            return np.asarray(value), {name: np.asarray(g) for name, g in gradient.items()}
        for leaf in leaves.values():
            leaf.requires_grad_()
        value = function(leaves, rest)
        value.backward()
        zero = {name: np.zeros(leaf.shape, dtype) for name, leaf in leaves.items()}
        return as_numpy(value), {n: zero[n] if x.grad is None else x.grad.numpy() for n, x in leaves.items()}


def loss_and_gradient(
    loss: Any, policy: Policy, batch: Batch, *, framework: str, dtype: type = np.float64, compiled: bool | str = False
) -> tuple[np.ndarray, Gradients]:
    """The objective of the trainer, sum(weights * terms), and its gradient with respect to each array of the policy."""
    loss = bare(loss) if compiled else loss

    def total(leaves: dict[str, Any], rest: dict[str, Any]) -> Any:
        terms, _ = loss(Policy(**leaves), Batch(**rest))
        return (rest["weights"] * terms).sum()

    return value_and_gradient(total, present(policy), present(batch), framework=framework, dtype=dtype, compiled=compiled)


def bare(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without gin's wrapper, whose lock torch.compile cannot trace through."""
    if isinstance(function, partial):
        return partial(bare(function.func), *function.args, **function.keywords)
    return unwrap(function)


def compile_for(framework: str, function: Callable[..., Any], backend: bool | str = True) -> Callable[..., Any]:
    """The function under jax.jit, or under torch.compile as one graph.

    backend: torch's; True is one that traces but generates no code.
    """
    if framework == "jax":
        import jax

        return jax.jit(function)
    import torch

    torch.compiler.reset()  # else the functions, each compiled once, would count as recompilations of one
    compiled = torch.compile(bare(function), backend="aot_eager" if backend is True else backend, fullgraph=True)

    def call(*inputs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")  # array_api_compat's
            return compiled(*inputs)

    return call
