"""The fingerprint of weights, what a trainer claims, and how reports of workers are judged. No server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.engines.fleet.proof.claims import CLAIMS, Claiming, Claims, read_claims, recast
from areal_x.engines.fleet.proof.judge import Part, Report, judge, parsed, sentence
from areal_x.engines.fleet.proof.sums import COLUMNS, Sums, as_slice, bits_in, columns, of_array, of_bits, places, within
from areal_x.engines.fleet.proof.workers import in_workers, workers_with_others
from areal_x.protocols.engine import EngineError

MODULUS = 2**64
KINDS: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SHAPES = st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple)


def numbers(shape: tuple[int, ...], kind: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(KINDS[kind])


def whole(x: np.ndarray) -> Sums:
    return of_array(x, range(x.shape[-1]))


@given(shape=SHAPES, kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 99))
def test_the_sums_are_those_of_the_formula(shape: tuple[int, ...], kind: str, seed: int) -> None:
    x = numbers(shape, kind, seed)
    tiny = np.abs(x.astype(np.float64)) < float(ml_dtypes.finfo(x.dtype).smallest_normal)
    bits = np.where(tiny, 0, x.view(f"i{x.dtype.itemsize}"))
    plain = placed = 0
    for place in np.ndindex(*shape):
        weight = 1
        for axis, index in enumerate(place):
            weight *= int(places(axis, shape[axis])[index])
        plain, placed = plain + int(bits[place]), placed + int(bits[place]) * weight
    assert whole(x) == Sums(plain % MODULUS, placed % MODULUS)


@given(shape=SHAPES, kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 99), block=st.sampled_from((1, 7, 2**16)))
def test_numpy_and_torch_compute_the_same(shape: tuple[int, ...], kind: str, seed: int, block: int) -> None:
    torch = pytest.importorskip("torch")
    x = numbers(shape, kind, seed)
    bits = torch.tensor(x.astype(np.float32)).to(getattr(torch, kind)).view(torch.int32 if kind == "float32" else torch.int16)
    weights = [torch.tensor(places(axis, size)) for axis, size in enumerate(shape)]
    assert of_bits(bits, kind, weights, block) == whole(x)


@given(shape=SHAPES, cuts=st.lists(st.integers(1, 19), max_size=3), axis=st.integers(0, 2), seed=st.integers(0, 99))
def test_the_sums_of_the_parts_add_up_to_those_of_the_whole(
    shape: tuple[int, ...], cuts: list[int], axis: int, seed: int
) -> None:
    x, axis = numbers(shape, seed=seed), axis % len(shape)
    ends = sorted({0, shape[axis], *(cut for cut in cuts if cut < shape[axis])})
    total = Sums()
    for start, stop in pairwise(ends):
        slices = tuple(slice(start, stop) if a == axis else slice(None) for a in range(len(shape)))
        weights = [places(a, size)[slices[a]] for a, size in enumerate(shape)]
        total += of_bits(np.ascontiguousarray(x[slices]).view(np.int32), "float32", weights)
    assert total == whole(x)


@given(rows=st.integers(2, 12), width=st.integers(2, 12), seed=st.integers(0, 99), data=st.data())
def test_two_numbers_that_changed_places_are_seen_and_so_are_rows_columns_and_a_transposition(
    rows: int, width: int, seed: int, data: st.DataObject
) -> None:
    x = numbers((rows, width), seed=seed)
    one, other = data.draw(st.lists(st.integers(0, x.size - 1), min_size=2, max_size=2, unique=True))
    swapped = x.copy()
    swapped.flat[[one, other]] = x.flat[[other, one]]
    moved = [swapped, np.roll(x, 1, axis=0), np.roll(x, 1, axis=1), x[::-1], x[:, ::-1], x.T.reshape(x.shape)]
    for other_way in moved:
        if not np.array_equal(other_way, x):
            found = whole(np.ascontiguousarray(other_way))
            assert found.plain == whole(x).plain
            assert found.placed != whole(x).placed


@given(kind=st.sampled_from(sorted(KINDS)), place=st.integers(0, 63), bit=st.integers(0, 31), seed=st.integers(0, 99))
def test_a_flipped_bit_is_seen(kind: str, place: int, bit: int, seed: int) -> None:
    x = np.abs(numbers((8, 8), kind, seed)) + KINDS[kind](1)
    flipped = x.copy()
    flipped.view(f"u{x.dtype.itemsize}").flat[place] ^= 1 << (bit % (8 * x.dtype.itemsize))
    assert whole(flipped) != whole(x)


def test_zeros_of_either_sign_and_numbers_below_the_smallest_normal_one_are_alike() -> None:
    zero = whole(np.array([1, 0, 2], np.float32))
    assert whole(np.array([1, -0.0, 2], np.float32)) == zero
    assert whole(np.array([1, 1e-40, 2], np.float32)) == zero
    assert whole(np.array([1, 1.2e-38, 2], np.float32)) != zero


@given(version=st.integers(0, 10**6), rows=st.integers(1, 5), size=st.integers(1, 5000))
def test_a_sample_has_a_few_columns_of_each_part_that_workers_may_hold(version: int, rows: int, size: int) -> None:
    found = columns(version, (rows, size), False)
    assert len(found) <= 2 * COLUMNS
    assert set(found) <= set(range(size))
    for count in (2, 4, 8):
        width = size // count
        for worker in range(count if size % count == 0 and size >= 2 * COLUMNS else 0):
            part = within(found, worker * width, (worker + 1) * width)
            assert list(part) == [x for x in found if worker * width <= x < (worker + 1) * width]
            assert part


def test_other_versions_have_other_columns_and_vectors_are_always_whole() -> None:
    assert len({columns(version, (3, 4096), False) for version in range(50)}) > 30
    assert columns(3, (4096,), False) == range(4096)
    assert columns(3, (4, 4096), True) == range(4096)
    assert columns(3, (), False) == range(1)


# ---- claims


def tensors() -> Iterator[tuple[str, np.ndarray]]:
    yield "q", numbers((6, 32))
    yield "norm", numbers((6,), seed=1)


def claims_of(full: bool = True, version: int = 4) -> Claims:
    claiming = Claiming(version, full)
    assert [name for name, _ in claiming.of(tensors())] == ["q", "norm"]
    return claiming.done()


@pytest.mark.parametrize("full", [True, False])
def test_claims_are_read_from_their_file_as_they_were_written(full: bool, tmp_path: Path) -> None:
    assert read_claims(tmp_path) is None
    claims = claims_of(full)
    claims.write(tmp_path)
    assert read_claims(tmp_path) == claims
    assert claims.tensors["q"].sums["float32"] == of_array(dict(tensors())["q"], columns(4, (6, 32), full))


@pytest.mark.parametrize(
    "written",
    [
        "{",
        "[]",
        '{"version": 1, "full": true, "scale": "2", "tensors": {}}',
        '{"version": -1, "full": true, "scale": null, "tensors": {}}',
        '{"version": 1, "full": true, "scale": null, "tensors": {"q": [[2], "float32", {"float32": [1]}]}}',
        '{"version": 1, "full": true, "scale": null, "tensors": {"q": [[2], "float32", {"float32": [1, 1.5]}]}}',
        '{"version": 1, "full": true, "scale": null, "tensors": {"q": [["2"], "float32", {}]}}',
    ],
)
def test_another_file_than_one_of_claims_is_refused(written: str, tmp_path: Path) -> None:
    (tmp_path / CLAIMS).write_text(written)
    with pytest.raises(EngineError, match=CLAIMS):
        read_claims(tmp_path)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_a_claim_for_a_server_of_another_type_is_of_the_numbers_rounded_as_torch_does(kind: str) -> None:
    torch = pytest.importorskip("torch")
    x = dict(tensors())["q"]
    x[0, :5] = [np.inf, 1 + 2**-8, 1 + 3 * 2**-8, 65519, -65519]  # ties go to even
    rounded = torch.tensor(x).to(getattr(torch, kind)).view(torch.int16).numpy()
    np.testing.assert_array_equal(bits_in(x, kind), rounded)
    more = recast(claims_of(), tensors(), {"q": kind})
    assert more.tensors["norm"] == claims_of().tensors["norm"]
    assert more.tensors["q"].sums == {
        "float32": whole(dict(tensors())["q"]),
        kind: whole(dict(tensors())["q"].astype(KINDS[kind])),
    }


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_an_adapter_is_claimed_with_its_scale_as_torch_multiplies(kind: str) -> None:
    torch = pytest.importorskip("torch")
    x, name = numbers((20, 6)), "base_model.model.q.lora_B.weight"
    claiming = Claiming(1, True, {name: kind}, scale=0.7)
    claiming.add(name, x)
    claiming.add(name.replace("_B", "_A"), x)
    held = torch.tensor(x).to(getattr(torch, kind))
    held *= 0.7
    as_it_is = np.asarray(held.float()).astype(KINDS[kind])
    claims = claiming.done().tensors
    assert claims[name].sums[kind] == whole(as_it_is)
    assert claims[name.replace("_B", "_A")].sums == {"float32": whole(x)}


def test_numbers_that_were_rounded_for_the_transport_are_claimed_in_the_wider_type_too() -> None:
    x = numbers((4, 20), "bfloat16")
    assert of_array(x, range(20), "float32") == whole(x.astype(np.float32))


# ---- the judge


def part(name: str, start: int = 0, stop: int | None = None, x: np.ndarray | None = None, use: str = "u") -> Part:
    """Rows of a tensor, as a worker has them."""
    x = dict(tensors())[name] if x is None else x
    stop = len(x) if stop is None else stop
    weights = [places(axis, size) for axis, size in enumerate(x.shape)]
    weights[0] = weights[0][start:stop]
    sums = of_bits(np.ascontiguousarray(x[start:stop]).view(np.int32), "float32", weights)
    return Part(name, use, ((start, stop), *((0, size) for size in x.shape[1:])), "float32", sums)


RIGHT = [part("q"), part("norm")]


def differences(*reports: list[Part]) -> list[str]:
    return list(judge(claims_of(), [Report(parts) for parts in reports]).differences)


def test_workers_that_have_the_published_weights_differ_in_nothing() -> None:
    assert differences(RIGHT) == []
    assert differences([part("q", 0, 2), part("norm")], [part("q", 2, 6), part("norm")]) == []
    assert differences([part("q", 0, 2)], [part("q", 2, 6), part("norm")]) == []
    assert differences([*RIGHT, part("q", use="head")]) == []


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([[part("q", x=numbers((6, 32), seed=9)), part("norm")]], "q has other numbers (u)"),
        ([[part("q", x=dict(tensors())["q"][::-1]), part("norm")]], "q has the published numbers in other places (u)"),
        ([[part("q", 0, 3), part("norm")]], "q has 96 of the 192 published numbers (u)"),
        ([[part("q", 0, 4), part("norm")], [part("q", 2, 6)]], "q has 256 of the 192 published numbers (u)"),
        ([RIGHT, [part("q"), part("norm", x=numbers((6,)))]], "norm is not the same in the workers 0 and 1 (u)"),
        ([[*RIGHT, part("q", x=numbers((6, 32), seed=9), use="head")]], "q has other numbers (head)"),
        ([[replace(part("q"), sums=None), part("norm")]], "q is missing in worker 0 (u)"),
        ([[replace(part("q"), box=((0, 7), (0, 32))), part("norm")]], "q has a part at ((0, 7), (0, 32)), and"),
        ([[part("q", 0, 2), part("norm")], [replace(part("q", 2, 6), dtype="float16")]], "q is float16 and float32 (u)"),
    ],
)
def test_what_differs_is_named(reports: list[list[Part]], expected: str) -> None:
    (found,) = differences(*reports)
    assert found.startswith(expected)


def test_what_cannot_be_judged_is_told_apart_from_what_is_wrong() -> None:
    report = Report([replace(part("q"), dtype="bfloat16")], {"experts": "they are packed"})
    verdict = judge(claims_of(), [report])
    assert verdict.differences == []
    assert verdict.dtypes == {"q": "bfloat16"}
    assert verdict.unproved == {"experts": "they are packed", "norm": "the server has no place for it that was found"}


def test_the_sentence_names_the_server_the_version_and_the_tensor() -> None:
    assert sentence("vLLM server 2", 7, ["q has other numbers (u)", "k …"]) == (
        "vLLM server 2 does not use the weights of version 7: q has other numbers (u) (1 more differ)"
    )


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("stale", [[], [1], [0, 2], [0, 1, 2]])
def test_the_workers_whose_parts_are_not_the_published_ones_are_named(
    stale: list[int], axis: int | None, kind: str, full: bool
) -> None:
    """Each of three has a slice along an axis, or the whole tensor."""
    shape, name = (6, 48), "base_model.model.q.lora_B.weight"
    x, other = numbers(shape), numbers(shape, seed=9)
    claiming = Claiming(4, full, scale=0.5)
    claiming.add(name, x)
    reports = []
    for worker in range(3):
        box = [(0, size) for size in shape]
        if axis is not None:
            third = shape[axis] // 3
            box[axis] = (worker * third, (worker + 1) * third)
        indices = [range(*box[0]), within(columns(4, shape, full), *box[1])]
        held = (other if worker in stale else x).astype(KINDS[kind]) * KINDS[kind](0.5)
        weights = [places(a, size)[as_slice(indices[a])] for a, size in enumerate(shape)]
        sums = of_bits(bits_in(held[as_slice(indices[0]), as_slice(indices[1])].copy(), kind), kind, weights)
        reports.append(Report([part("q"), Part(name, "u", tuple(box), kind, sums)]))
    reports[0] = replace(reports[0], parts=[*reports[0].parts, Part(name, "u", ((0, 7), (0, 48)), kind, Sums())])
    assert workers_with_others(claiming.done(), reports, name, x) == stale
    words = {1: "; worker 1 is wrong", 2: "; workers 0 and 2 are wrong"}.get(len(stale), "")
    assert in_workers(stale, 3) == words
    found = sentence("vLLM server 2", 7, ["q has other numbers (u)", "k …"], words)
    assert found.endswith(f"q has other numbers (u){words} (1 more differ)")


def test_a_workers_answer_is_read_and_one_that_is_none_refused() -> None:
    q = part("q")
    assert q.sums is not None
    written = [q.tensor, q.use, q.box, q.dtype, [q.sums.plain, q.sums.placed]]
    answer = json.loads(json.dumps({"parts": [written], "unproved": {}, "wrong": {}}))
    assert parsed(answer).parts == [q]
    with pytest.raises(EngineError, match="no room"):
        parsed({"error": "no room"})
    hostile: list[Any] = [None, "x", {}, answer | {"parts": [["q"]]}, answer | {"parts": [[*written[:4], [-1, 2]]]}]
    for other in hostile:
        with pytest.raises(EngineError, match="cannot be read"):
            parsed(other)


def test_a_slice_of_a_part_begins_where_the_part_does() -> None:
    x = np.arange(40)
    for indices in (range(3, 40, 8), range(20, 20), range(5, 40)):
        part_of_x = within(indices, 10, 30)
        np.testing.assert_array_equal(x[10:30][as_slice(part_of_x, 10)], [i for i in indices if 10 <= i < 30])
