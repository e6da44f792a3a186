"""Products in fp8 by a device's own units: the call that a GPU would get, computed by XLA on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("areal_x_jax")

from areal_x.algorithms.losses import sft
from areal_x_jax import fp8, fp8_products
from tests.model_families import CASES
from tests.models import write_config
from tests.test_fp8 import batch_of_all, make

RNG = np.random.default_rng(0)
X = (RNG.normal(size=(3, 50, 700)) * np.exp(3 * RNG.normal(size=(3, 50, 1)))).astype(np.float32)
W, DY = (RNG.normal(size=shape).astype(np.float32) for shape in ((700, 200), (3, 50, 200)))


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Has a CPU multiply by the call of a GPU with units for tiles, and returns the calls."""
    made: list[Any] = []
    scaled_dot = jax.lax.scaled_dot

    def one(*arguments: Any, **more: Any) -> Any:
        made.append([(x.dtype.name, x.shape) for x in (*arguments, more["lhs_scale"], more["rhs_scale"])])
        return scaled_dot(*arguments, **more)

    monkeypatch.setattr(jax.lax, "scaled_dot", one)
    monkeypatch.setattr(fp8_products, "has_units", lambda: True)
    yield made
    jax.clear_caches()  # programs that were made with these calls


PRODUCTS: dict[str, Callable[[], Any]] = {
    "output": lambda: fp8_products.output(X, fp8.round_blocks(W)),
    "of_input": lambda: fp8_products.of_input(DY, fp8.round_blocks(W)),
    "of_kernel": lambda: fp8_products.of_kernel(X, DY),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_products_are_those_of_rounded_numbers(name: str, units: list[Any]) -> None:
    found = np.asarray(PRODUCTS[name]())
    (call,) = units
    with pytest.MonkeyPatch.context() as emulated:
        emulated.setattr(fp8_products, "has_units", lambda: False)
        expected = np.asarray(PRODUCTS[name]())
    assert len(units) == 1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    (left, a), (right, b), (of_left, c), (of_right, d) = call
    assert left == right == "float8_e4m3fn"
    assert of_left == of_right == "float8_e8m0fnu"
    assert a[1] == b[1] == 32 * c[1] == 32 * d[1]
    assert a[1] % 128 == 0


def test_a_model_trains_by_such_calls_alike(units: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, batch = write_config(CASES["qwen3-0"], tmp_path), batch_of_all()
    made = make("jax", directory)
    losses = [made.update(batch, sft)["loss"] for _ in range(2)]
    assert len(units) >= 7 * 3
    monkeypatch.setattr(fp8_products, "has_units", lambda: False)
    jax.clear_caches()
    other = make("jax", directory)
    np.testing.assert_allclose(losses, [other.update(batch, sft)["loss"] for _ in range(2)], rtol=1e-2)


def test_a_device_whose_product_is_another_computes_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp8_products.differs() is None
    scaled_dot = jax.lax.scaled_dot
    monkeypatch.setattr(jax.lax, "scaled_dot", lambda *x, **more: 1.1 * scaled_dot(*x, **more))
    assert "of the largest away" in str(fp8_products.differs())

    def raises(*_: Any, **__: Any) -> Any:
        raise NotImplementedError("no such units")

    monkeypatch.setattr(jax.lax, "scaled_dot", raises)
    assert fp8_products.differs() == "no such units"


@pytest.mark.parametrize(
    ("platform", "capability", "differs", "has"),
    [
        ("cpu", None, None, False),
        ("gpu", "9.0", None, False),
        ("gpu", "10.0", None, True),
        ("gpu", "10.0", "it was 0.1 away", False),
        ("gpu", None, None, False),
    ],
)
def test_the_device_chooses(
    platform: str, capability: str | None, differs: str | None, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(platform=platform, compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(fp8_products, "differs", lambda: differs)
    choose = fp8_products.has_units.__wrapped__
    if differs:
        with pytest.warns(UserWarning, match=r"computed in bf16 on .*: it was 0\.1 away"):
            assert choose() is has
    else:
        assert choose() is has
