"""Deviation between numpy, JAX and torch for every public function of areal_x.algorithms, as a markdown table.

    python -m benchmarks.algorithms [MODULE …]        # all modules, or e.g. losses kl

Claim: at most 1e-6 in fp64 and 1e-5 in fp32, values and gradients, compiled or not.

Method: inputs are random and exact in fp32, so that only arithmetic can differ. The reference is numpy in fp64 for values
(metrics included) and torch in fp64 for gradients of a randomly weighted sum. A deviation is the largest absolute difference of
an array divided by the largest absolute value of its reference; a cell is the maximum over outputs, inputs and frameworks.
Compiled means jax.jit and torch.compile (inductor, one graph). Functions that are called on the host only, before the step, are
constants to the gradient. A dash: no gradient, or (named on stderr) not compilable.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from areal_x.algorithms import advantages, corrections, distillation, kl, losses, preferences, proximal, weighting
from areal_x.types import Batch, Policy
from tests.algorithms.frameworks import as_array, as_numpy, bare, compile_for, precision

MODULES = ("losses", "kl", "preferences", "distillation", "weighting", "advantages", "corrections", "proximal")
ROWS, LENGTH, SEQUENCES, VOCABULARY = 8, 192, 48, 384
RNG = np.random.default_rng(0)


@dataclass(frozen=True)
class Case:
    """function(*inputs) returns one or several arrays; the first `differentiated` inputs have a gradient, through the first
    output."""

    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    differentiated: int = 0


def draw(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (RNG.normal(size=shape) * scale).astype(np.float32)


def packed_ids() -> np.ndarray:
    ids = np.zeros((ROWS, LENGTH), np.int32)
    for row in ids:
        start, segment = 0, 1
        while (end := start + int(RNG.integers(4, 40))) <= LENGTH:
            row[start:end] = segment
            start, segment = end, segment + 1
    return ids


IDS = packed_ids()
MASK = (RNG.random(IDS.shape) < 0.8) & (IDS > 0)
BEHAVIOR = -np.abs(draw(*IDS.shape))
POLICY = {"logp": BEHAVIOR + draw(*IDS.shape, scale=0.3), "entropy": draw(*IDS.shape), "values": draw(*IDS.shape)}
POLICY["divergence"] = -BEHAVIOR
BATCH = {
    "segment_ids": IDS,
    "mask": MASK,
    "behavior_logp": BEHAVIOR,
    "proximal_logp": BEHAVIOR + draw(*IDS.shape, scale=0.1),
    "reference_logp": BEHAVIOR + draw(*IDS.shape, scale=0.3),
    "advantages": draw(*IDS.shape),
    "returns": draw(*IDS.shape),
    "old_values": POLICY["values"] + draw(*IDS.shape, scale=0.3),
}


def of_loss(loss: Any) -> Case:
    loss = bare(loss)

    def function(*inputs: Any) -> tuple[Any, ...]:
        fields = dict(zip([*POLICY, *BATCH], inputs, strict=True))
        policy = Policy(**{name: fields.pop(name) for name in POLICY})
        terms, metrics = loss(policy, Batch(tokens=fields["segment_ids"], positions=fields["segment_ids"], **fields))
        return (terms, *metrics.values())

    return Case(function, (*POLICY.values(), *BATCH.values()), len(POLICY))


def of(function: Any, *inputs: np.ndarray, differentiated: int = 0, **hyper: Any) -> Case:
    return Case(partial(bare(function), **hyper), inputs, differentiated)


def cases() -> dict[str, Case]:
    """One line per function, "module.name", with its arguments."""
    logp, ref = POLICY["logp"], BATCH["reference_logp"]
    pairs = [draw(SEQUENCES, scale=5) for _ in range(4)]
    logits = [draw(ROWS, LENGTH // 4, VOCABULARY, scale=2) for _ in range(2)]
    rewards, groups = draw(SEQUENCES), np.repeat(np.arange(SEQUENCES // 8), 8)
    lengths = RNG.integers(1, 99, SEQUENCES)
    ratio = BATCH["proximal_logp"] - BEHAVIOR
    versions = RNG.integers(0, 5, IDS.shape)
    groups_of_segments = np.broadcast_to(np.arange(LENGTH + 1) // 4, (ROWS, LENGTH + 1)).copy()
    both = losses.combine(bare(losses.ppo_clip), partial(bare(losses.kl_penalty), coefficient=0.04))
    bound = {
        "kl_penalty": {"coefficient": 0.04},
        "entropy_bonus": {"coefficient": 0.01},
        "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    }
    return {
        **{f"losses.{n}": of_loss(partial(f, **bound.get(n, {}))) for n, f in public(losses).items() if n != "combine"},
        "losses.combine": of_loss(both),
        **{f"kl.{n}": of(f, logp, ref, differentiated=2) for n, f in public(kl).items()},
        "preferences.dpo": of(preferences.dpo, *pairs, differentiated=4),
        "preferences.ipo": of(preferences.ipo, *pairs, differentiated=4),
        "preferences.bradley_terry": of(preferences.bradley_terry, *pairs[:2], differentiated=2),
        "preferences.dpo_loss": of_loss(preferences.dpo_loss),
        "preferences.ipo_loss": of_loss(preferences.ipo_loss),
        "preferences.reward_model_loss": of_loss(preferences.reward_model_loss),
        "distillation.generalized_jsd": of(distillation.generalized_jsd, *logits, differentiated=2, beta=0.3),
        **{f"weighting.{n}": of(f, MASK, IDS) for n, f in public(weighting).items() if n not in ("constant", "group_mean")},
        "weighting.constant": of(weighting.constant, MASK, IDS, length=64),
        "weighting.group_mean": of(weighting.group_mean, MASK, IDS, groups_of_segments),
        "advantages.group_relative": of(advantages.group_relative, rewards, groups),
        "advantages.leave_one_out": of(advantages.leave_one_out, rewards, groups),
        "advantages.mean_normalized": of(advantages.mean_normalized, np.abs(rewards), groups),
        "advantages.gae": of(advantages.gae, BATCH["advantages"], POLICY["values"], MASK, gamma=0.99, lam=0.95),
        "advantages.turn_gae": of(advantages.turn_gae, BATCH["advantages"], POLICY["values"], MASK, gamma=0.99, lam=0.95),
        "advantages.bootstrapped": of(
            advantages.bootstrapped, BATCH["advantages"], POLICY["values"], MASK, RNG.random(ROWS) < 0.5, gamma=0.99
        ),
        "advantages.returns_to_go": of(advantages.returns_to_go, BATCH["advantages"], MASK, gamma=0.99),
        "advantages.whiten": of(advantages.whiten, BATCH["advantages"], MASK),
        "advantages.length_weighted_baseline": of(advantages.length_weighted_baseline, rewards, lengths, groups),
        "advantages.greedy_baseline": of(advantages.greedy_baseline, rewards, draw(SEQUENCES)),
        "advantages.discount_turns": of(advantages.discount_turns, draw(SEQUENCES, 6), gamma=0.9),
        **{f"corrections.{n}": of(f, ratio, MASK, IDS) for n, f in public(corrections).items()},
        "proximal.interpolate": of(proximal.interpolate, logp, BEHAVIOR, versions, version=5),
    }  # fmt: skip


def public(module: Any) -> dict[str, Callable[..., Any]]:
    """The functions that a module defines itself, except those of numpy arrays only, composed of the others, and
    `losses.summands`, which takes no arrays."""
    functions = inspect.getmembers(module, inspect.isfunction)
    own = {n: f for n, f in functions if n[0] != "_" and inspect.unwrap(f).__module__ == module.__name__}
    return {n: f for n, f in own.items() if n != "summands" and "np.ndarray" not in str(inspect.signature(f).return_annotation)}


def evaluate(case: Case, framework: str, dtype: type, compiled: bool = False) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The outputs, and the gradients of a weighted sum of the first one."""
    with precision(framework, dtype):
        inputs = [as_array(x, framework, dtype) for x in case.inputs]
        function = compile_for(framework, case.function, backend="inductor") if compiled else case.function
        leaves, rest = inputs[: case.differentiated], inputs[case.differentiated :]

        def outputs(*leaves: Any) -> tuple[Any, ...]:
            result = function(*leaves, *rest)
            return result if isinstance(result, tuple) else (result,)

        if framework == "numpy" or not leaves:
            return [as_numpy(x) for x in outputs(*leaves)], []
        if framework == "torch":
            import torch

            for leaf in leaves:
                leaf.requires_grad_()
            values = outputs(*leaves)
            if not values[0].requires_grad:  # policy_gap is only a metric
                return [as_numpy(x) for x in values], []
            direction = as_array(weights_like(values[0]), framework, dtype)
            gradients = torch.autograd.grad(values[0], leaves, direction, materialize_grads=True)
        else:
            import jax

            values, pull_back = jax.vjp(outputs, *leaves)
            direction = as_array(weights_like(values[0]), framework, dtype)
            gradients = pull_back((direction, *(x * 0 for x in values[1:])))
        return [as_numpy(x) for x in values], [as_numpy(x) for x in gradients]


def weights_like(x: Any) -> np.ndarray:
    return np.random.default_rng(1).normal(size=tuple(x.shape)).astype(np.float32)


def deviation(results: list[np.ndarray], references: list[np.ndarray]) -> float:
    worst = 0.0
    for x, reference in zip(results, references, strict=False):
        scale = np.abs(reference).max()
        worst = max(worst, float(np.abs(x.astype(np.float64) - reference).max() / (scale if scale > 0 else 1)))
    return worst


def row(name: str, case: Case) -> list[float | None]:
    """Deviations of value and gradient, eager and then compiled, in fp64 and then in fp32; None where there is none."""
    values, _ = evaluate(case, "numpy", np.float64)
    _, gradients = evaluate(case, "torch", np.float64)
    cells: list[float | None] = []
    for dtype in (np.float64, np.float32):
        for compiled in (False, True):
            frameworks = ("jax", "torch") if compiled else ("numpy", "jax", "torch")
            try:
                results = [evaluate(case, framework, dtype, compiled) for framework in frameworks]
            except Exception as error:
                print(f"{name} compiled: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
                cells += [None, None]
                continue
            cells.append(max(deviation(result, values) for result, _ in results))
            cells.append(max(deviation(result, gradients) for _, result in results) if gradients else None)
    return cells


def main() -> None:
    chosen = sys.argv[1:] or MODULES
    table = cases()
    for module in MODULES:
        names = {f"{module}.{n}" for n in public(importlib.import_module(f"areal_x.algorithms.{module}"))}
        if missing := names - table.keys():
            raise SystemExit(f"add to cases(): {', '.join(sorted(missing))}")
    print(
        "| function | fp64 value | gradient | compiled value | gradient | fp32 value | gradient | compiled value | gradient |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name, case in table.items():
        if name.split(".")[0] in chosen:
            cells = ["–" if x is None else "0" if x == 0 else f"{x:.0e}" for x in row(name, case)]
            print(f"| `{name}` | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
