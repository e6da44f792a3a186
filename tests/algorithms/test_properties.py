"""Properties of every loss: one result on every framework, for any packing and any masked-out values."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import areal_x.algorithms
from areal_x.types import Batch, Policy
from tests.algorithms import test_losses, test_preferences
from tests.algorithms.frameworks import (
    Gradients,
    as_array,
    bare,
    example,
    loss_and_gradient,
    precision,
    present,
    value_and_gradient,
)
from tests.algorithms.test_losses import CLIPPED
from tests.imports import parsed

LOSSES = test_losses.LOSSES | test_preferences.LOSSES
BY_HAND = {name: (test_losses if name in test_losses.LOSSES else test_preferences).by_hand for name in LOSSES}
on_every_loss = pytest.mark.parametrize("name", LOSSES)
on_jax_and_torch = pytest.mark.parametrize("framework", ["jax", "torch"])
SOURCES = sorted(Path(areal_x.algorithms.__file__).parent.rglob("*.py"))


@cache
def all_in_jax() -> Callable[..., Any]:
    """Values of all losses, and the gradient of each with respect to a policy of its own, as one program: one by one each
    operation, or each loss, would be compiled for itself, which takes ten times as long."""
    import jax

    def values(policies: dict[str, dict[str, Any]], constants: dict[str, Any]) -> Any:
        batch = Batch(**constants)
        each = {name: (batch.weights * loss(Policy(**policies[name]), batch)[0]).sum() for name, loss in LOSSES.items()}
        return sum(each.values()), each

    return jax.jit(jax.value_and_grad(values, has_aux=True))


def value_and_gradient_of(
    name: str, policy: Policy, batch: Batch, framework: str, dtype: type = np.float64
) -> tuple[np.ndarray, Gradients]:
    """`loss_and_gradient` of a loss: eager in torch, compiled in jax."""
    if framework == "torch":
        return loss_and_gradient(LOSSES[name], policy, batch, framework=framework, dtype=dtype)
    with precision(framework, dtype):
        own = {field: as_array(x, framework, dtype) for field, x in present(policy).items()}
        constants = {field: as_array(x, framework, dtype) for field, x in present(batch).items()}
        (_, values), gradients = all_in_jax()(dict.fromkeys(LOSSES, own), constants)
    return np.asarray(values[name]), {field: np.asarray(g) for field, g in gradients[name].items()}


@on_every_loss
@on_jax_and_torch
@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-6), (np.float32, 1e-5)])
def test_value_and_gradient_are_those_of_the_formula(name, framework, dtype, tolerance):
    policy, batch = example(2)
    value, gradient = value_and_gradient_of(name, policy, batch, framework, dtype)
    assert value.dtype == dtype
    np.testing.assert_allclose(value, total(name, policy, batch), rtol=tolerance)
    for field, expected in slopes(name).items():
        np.testing.assert_allclose(gradient[field], expected, rtol=tolerance, atol=tolerance / 100)


def test_jax_gives_the_same_terms_and_metrics_where_it_does_not_compile():
    """One test for all losses: most operations are shared between losses and compiled once."""
    policy, batch = example(2)
    in_jax = [
        kind(**{field: as_array(x, "jax", np.float32) for field, x in present(data).items()})
        for kind, data in ((Policy, policy), (Batch, batch))
    ]
    for name, loss in LOSSES.items():
        terms, metrics = loss(policy, batch)
        found, said = loss(*in_jax)
        np.testing.assert_allclose(found, terms, rtol=1e-5, atol=1e-5, err_msg=name)
        assert said.keys() == metrics.keys()
        for metric, x in said.items():
            np.testing.assert_allclose(x, metrics[metric], rtol=1e-5, atol=1e-5, err_msg=f"{name} {metric}")


@pytest.mark.parametrize("half", [0, 1])
def test_compiled_by_torch_they_are_the_same(half):
    """Half of them in one graph, each loss with a policy of its own, so that gradients stay apart. The graph is run and not
    made into machine code: benchmarks/algorithms.py does that."""
    # The others hold these: ppo_clip in ppo_clip_dual and combined, cispo in cispo_low, the estimators in kl_penalty.
    names = [name for name in LOSSES if name not in ("ppo_clip", "cispo", "kl_penalty_k1")][half::2]
    policy, batch = example(2)
    policies = {f"{name}.{field}": x for name in names for field, x in present(policy).items()}

    def sum_of_all(leaves, constants):
        result = 0.0
        for name in names:
            own = Policy(**{field: leaves[f"{name}.{field}"] for field in present(policy)})
            result = result + (constants["weights"] * bare(LOSSES[name])(own, Batch(**constants))[0]).sum()
        return result

    value, gradient = value_and_gradient(sum_of_all, policies, present(batch), framework="torch", compiled="eager")
    np.testing.assert_allclose(value, sum(total(name, policy, batch) for name in names), rtol=1e-6)
    for key, g in gradient.items():
        name, field = key.split(".")
        np.testing.assert_allclose(g, slopes(name)[field], rtol=1e-6, atol=1e-8, err_msg=key)


def total(name: str, policy: Policy, batch: Batch) -> float:
    return float((LOSSES[name](policy, batch)[0] * batch.weights).sum())


@cache
def slopes(name: str) -> dict[str, np.ndarray]:
    """Finite differences of the formula in plain Python, with expressions under a stop-gradient held fixed."""
    policy, batch = example(2)
    result = {field: np.zeros(batch.shape) for field in present(policy)}
    step = 1e-6
    for field, slope in result.items():
        for at in zip(*np.nonzero(batch.mask), strict=True):
            moved = [getattr(policy, field).copy() for _ in range(2)]
            moved[0][at] += step
            moved[1][at] -= step
            up, down = (total_by_hand(name, replace(policy, **{field: x}), policy, batch, at) for x in moved)
            slope[at] = (up - down) / (2 * step)
    return result


def total_by_hand(name: str, policy: Policy, frozen: Policy, batch: Batch, at: tuple[int, int]) -> float:
    """The sum over the row of `at`: terms of other rows cannot depend on it."""
    row = at[0]
    tokens = [(row, int(t)) for t in np.flatnonzero(batch.mask[row])]
    return sum(batch.weights[i] * BY_HAND[name](name, policy, batch, i, frozen) for i in tokens)


@on_every_loss
@on_jax_and_torch
def test_garbage_behind_the_mask_changes_neither_value_nor_gradient(name, framework):
    clean, clean_gradient = value_and_gradient_of(name, *example(3), framework, np.float32)
    for garbage in (np.nan, np.inf, -np.inf, 1e30, -1e30):
        policy, batch = example(3, garbage)
        value, gradient = value_and_gradient_of(name, policy, batch, framework, np.float32)
        assert value == clean
        for field, g in gradient.items():
            np.testing.assert_array_equal(g, clean_gradient[field])
            assert (g[~batch.mask] == 0).all()
        terms, metrics = LOSSES[name](policy, batch)
        for x in (terms, *metrics.values()):
            assert (x[~batch.mask] == 0).all()


@on_every_loss
@on_jax_and_torch
@pytest.mark.parametrize("shift", [200.0, -200.0])
def test_log_ratios_of_two_hundred_stay_finite_in_float32(name, framework, shift):
    policy, batch = example(4)
    for moved in (shift, shift * (np.arange(batch.shape[1]) % 2)):  # every token, and every other one
        far = replace(policy, logp=policy.logp + moved)
        value, gradient = value_and_gradient_of(name, far, batch, framework, np.float32)
        assert np.isfinite(value)
        assert all(np.isfinite(g).all() for g in gradient.values())


@pytest.mark.parametrize("name", CLIPPED)
@on_jax_and_torch
def test_on_policy_a_clipped_loss_has_the_gradient_of_reinforce(name, framework):
    policy, batch = example(5)
    batch = batch.replace(proximal_logp=policy.logp, behavior_logp=policy.logp)
    _, gradient = value_and_gradient_of(name, policy, batch, framework)
    np.testing.assert_allclose(gradient["logp"], np.where(batch.mask, -batch.advantages * batch.weights, 0), rtol=1e-12)


Sequence = dict[str, np.ndarray]  # an array of one length for each field of the policy and the batch, and the half of its pair


def units(of_pairs: bool) -> list[list[Sequence]]:
    """The units that a packer keeps together: single sequences, or the two of a pair."""
    rng = np.random.default_rng(7)

    def sequence() -> Sequence:
        length = int(rng.integers(2, 7))
        fields = ("logp", "entropy", "values", "behavior_logp", "proximal_logp", "reference_logp", "advantages", "returns")
        drawn = {field: rng.normal(size=length) for field in (*fields, "old_values", "divergence")}
        mask = rng.random(length) < 0.7
        mask[-2] = True
        return drawn | {"mask": mask, "weights": np.where(mask, rng.random(length), 0)}

    return [[sequence() for _ in range(2 if of_pairs else 1)] for _ in range(5)]


def pack(
    units: list[list[Sequence]], order: list[int], length: int
) -> tuple[dict[str, np.ndarray], list[list[tuple[int, slice]]]]:
    """Packs units greedily into rows of `length`: the arrays by name, and the place of each sequence of each unit."""
    row, start, segment, places = 0, 0, 0, [[] for _ in units]
    for number in order:
        needed = sum(len(s["mask"]) for s in units[number])
        if start + needed > length:
            row, start, segment = row + 1, 0, 0
        for s in units[number]:
            segment += 1
            places[number].append((row, slice(start, start + len(s["mask"])), segment))
            start += len(s["mask"])
    arrays = {name: np.full((row + 1, length), 9.0) for name in units[0][0]}  # 9: padding is never looked at
    arrays |= {"mask": np.zeros((row + 1, length), bool), "segment_ids": np.zeros((row + 1, length), np.int32)}
    for unit, at in zip(units, places, strict=True):
        for s, (r, span, segment) in zip(unit, at, strict=True):
            arrays["segment_ids"][r, span] = segment
            for name, x in s.items():
                arrays[name][r, span] = x
    arrays["weights"][~arrays["mask"]] = 0
    return arrays, [[(r, span) for r, span, _ in at] for at in places]


def value_and_gradient_by_sequence(
    name: str, units, order: list[int], length: int, rows: int
) -> tuple[float, list[np.ndarray]]:
    """Packed in this order into rows of `length` and given to the loss in micro-batches of `rows` rows."""
    arrays, places = pack(units, order, length)
    ids = arrays["segment_ids"]
    total, gradients = 0.0, []
    for first in range(0, len(ids), rows):
        part = {field: x[first : first + rows] for field, x in arrays.items()}
        policy = Policy(**{field: part.pop(field) for field in ("logp", "entropy", "values", "divergence")})
        batch = Batch(tokens=part["segment_ids"], positions=part["segment_ids"], **part)
        value, gradient = loss_and_gradient(LOSSES[name], policy, batch, framework="torch")
        total += float(value)
        gradients.append(np.stack([gradient[field] for field in present(policy)]))
    gradient = np.concatenate(gradients, axis=1)
    return total, [gradient[:, row, span] for unit in places for row, span in unit]


@settings(deadline=None, max_examples=10)
@given(order=st.permutations(range(5)), length=st.integers(12, 40), rows=st.integers(1, 5))
@on_every_loss
def test_packing_splitting_order_and_padding_change_nothing(name, order, length, rows):
    own = units(of_pairs=name in test_preferences.LOSSES)
    value, gradient = value_and_gradient_by_sequence(name, own, order, length, rows)
    alone, alone_gradient = value_and_gradient_by_sequence(name, own, list(range(5)), 12, 1)
    assert value == pytest.approx(alone, rel=1e-12)
    for one, other in zip(gradient, alone_gradient, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-15)


def lines_of_code(function: ast.FunctionDef) -> int:
    """Number of code lines from `def` on, without docstring, comments and blank lines."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    parts = [function.args, *([function.returns] if function.returns else []), *body]
    nodes = [node for part in parts for node in ast.walk(part) if hasattr(node, "lineno")]
    return len({function.lineno} | {line for node in nodes for line in (node.lineno, node.end_lineno)})


@pytest.mark.parametrize("module", ["losses", "preferences", "distillation"])
def test_no_loss_is_longer_than_25_lines(module):
    tree = parsed(next(path for path in SOURCES if path.stem == module).read_text())
    lengths = {node.name: lines_of_code(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert lengths
    assert {name: lines for name, lines in lengths.items() if lines > 25} == {}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_module_of_the_algorithms_imports_jax_or_torch_before_it_is_called(path):
    imported = set()
    for node in parsed(path.read_text()).body:
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert not imported & {"jax", "torch"}
