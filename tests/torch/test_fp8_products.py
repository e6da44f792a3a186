"""Products in fp8 by a device's own units: the calls, checked by torch's own rules for a GPU and multiplied on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from areal_x.algorithms.losses import sft
from areal_x_torch import fp8_products
from areal_x_torch.fp8_products import CALLS, Scaled, of_input, of_weight, output, round_blocks
from tests.model_families import CASES
from tests.models import write_config
from tests.test_fp8 import batch_of_all, make

if not hasattr(functional, "scaled_mm"):
    pytest.skip("this torch has no call for scaled products", allow_module_level=True)
KINDS = functional.ScalingType
scaled_mm = functional.scaled_mm


def on_a_gpu(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def each_tile(scales: Any, kind: Any, rows: int, columns: int) -> Any:
    """Returns the scale of each row's tile of 128, from what a unit of this kind is given."""
    if kind == KINDS.BlockWise1x32:
        # cuBLAS' order: 128 rows by 4 tiles, of which row r of each 32 is at (r, r // 32).
        apart = scales.float().view(rows // 128, columns // 128, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns // 32)
        assert (apart.view(rows, -1, 4) == apart.view(rows, -1, 4)[..., :1]).all()
        return apart[:, ::4]
    if kind == KINDS.BlockWise128x128:
        return scales.T[:, : columns // 128].repeat_interleave(128, dim=0)
    return scales


def multiplied(a: Any, b: Any, scale_a: Any, kind_a: Any, scale_b: Any, kind_b: Any, **more: Any) -> Any:
    """Checks a call as torch does that of a GPU, and has the CPU's own call multiply a tile's columns after another."""
    with FakeTensorMode():
        whole = scaled_mm(on_a_gpu(a), on_a_gpu(b), on_a_gpu(scale_a), kind_a, on_a_gpu(scale_b), kind_b, **more)
        assert (whole.dtype, whole.shape) == (torch.bfloat16, (a.shape[0], b.shape[1]))
    of_a, of_b = (each_tile(s, k, n, a.shape[1]) for s, k, n in ((scale_a, kind_a, a.shape[0]), (scale_b, kind_b, b.shape[1])))
    found = torch.zeros(whole.shape)
    for tile in range(a.shape[1] // 128):
        here = slice(tile * 128, (tile + 1) * 128)
        scales = of_a[:, tile].contiguous().view(-1, 1), of_b[:, tile].contiguous().view(1, -1)
        found += scaled_mm(
            a[:, here].contiguous(),
            b.T[:, here].contiguous().T,
            scales[0],
            KINDS.RowWise,
            scales[1],
            KINDS.RowWise,
            output_dtype=torch.float32,
        )
    return found


@pytest.fixture(params=[9, 10])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Has a CPU multiply as a GPU of this compute capability is asked to, and returns the calls."""
    made: list[Any] = []

    def one(*arguments: Any, **more: Any) -> Any:
        made.append(arguments)
        return multiplied(*arguments, **more)

    monkeypatch.setattr(functional, "scaled_mm", one)
    monkeypatch.setattr(fp8_products, "_of_device", lambda _: CALLS[request.param])
    return made


RNG = np.random.default_rng(0)
X = torch.tensor(RNG.normal(size=(150, 700)) * np.exp(3 * RNG.normal(size=(150, 1))), dtype=torch.float32)
W, DY = (torch.tensor(RNG.normal(size=shape), dtype=torch.float32) for shape in ((200, 700), (150, 200)))


PRODUCTS: tuple[Callable[[], Any], ...] = (
    lambda: output(X, round_blocks(W)),
    lambda: of_input(DY, round_blocks(W)),
    lambda: of_weight(DY, X),
)


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_products_are_those_of_rounded_numbers(product: Callable[[], Any], calls: list[Any]) -> None:
    found = product()
    assert len(calls) == 1
    with pytest.MonkeyPatch.context() as emulated:
        emulated.setattr(fp8_products, "_of_device", lambda _: None)
        expected = product()
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert len(calls) == 1


def test_a_model_trains_by_such_calls_alike(calls: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, batch = write_config(CASES["qwen3-0"], tmp_path), batch_of_all()
    made = make("torch", directory)
    losses = [made.update(batch, sft)["loss"] for _ in range(2)]
    assert len(calls) > 7 * 3 * made.model.config.num_hidden_layers
    monkeypatch.setattr(fp8_products, "_of_device", lambda _: None)
    other = make("torch", directory)
    np.testing.assert_allclose(losses, [other.update(batch, sft)["loss"] for _ in range(2)], rtol=1e-2)


@pytest.mark.parametrize("breaks", [None, "numbers", "raises"])
def test_a_device_whose_product_is_another_computes_in_bf16(breaks: str | None) -> None:
    def call(left: Scaled, right: Scaled) -> Any:
        if breaks == "raises":
            raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
        rows = right.scales.repeat_interleave(len(right.numbers) // len(right.scales), dim=0)
        a, b = (x.float() * s.repeat_interleave(128, dim=1) for x, s in ((left.numbers, left.scales), (right.numbers, rows)))
        return (a @ b.T * (1.1 if breaks else 1)).bfloat16()

    why = fp8_products._differs(call, torch.device("cpu"))
    assert why == {None: None, "raises": "CUBLAS_STATUS_NOT_SUPPORTED"}.get(breaks, why)
    assert (why is None) == (breaks is None)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("differs", [False, True])
def test_the_device_chooses(capability: tuple[int, int], differs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(fp8_products, "_differs", lambda *_: "it was 0.1 away" if differs else None)
    choose = fp8_products._of_device.__wrapped__
    call = CALLS.get(capability[0])
    if differs and call is not None:
        with pytest.warns(UserWarning, match=r"computed in bf16 on cuda:0: it was 0\.1 away"):
            assert choose(device) is None
    else:
        assert choose(device) is call
    assert choose(torch.device("cpu")) is None
