"""Deltas: exact whatever the bits, refused whatever is wrong with them, and then replaced by whole files. No server."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from areal_x.engines.fleet.delta import CACHED, COPIED, codec
from areal_x.engines.fleet.delta import cache as caches
from areal_x.engines.fleet.delta.cache import Cache, Order, parsed
from areal_x.engines.fleet.delta.codec import BLOCK, Broken, Reader, encoded, words_of
from areal_x.engines.fleet.delta.feed import Feed, place_in
from areal_x.engines.fleet.delta.files import DELTA, INDEX, Digest
from areal_x.engines.fleet.delta.history import History
from areal_x.engines.fleet.delta.maker import Maker
from areal_x.engines.fleet.delta.version import write_version
from areal_x.engines.fleet.division import check_division
from areal_x.engines.fleet.failures import ServerLost, ServerRefused
from areal_x.engines.fleet.folders import LOCK, remove_left_behind
from areal_x.engines.fleet.manifest import shards
from areal_x.engines.fleet.stager import Stager
from areal_x.engines.fleet.staging import StagedFiles, Staging
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.transports import check_run
from areal_x.errors import ConfigError
from areal_x.protocols.trainer_config import LoRAConfig

KINDS: dict[str, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float64": np.float64, "int8": np.int8,
    "uint16": np.uint16, "int32": np.int32, "int64": np.int64, "bool": np.bool_, "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip
SHAPES = st.one_of(
    st.just(()), st.just((0,)), st.just((3, 0, 2)), st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
)
Tensors = dict[str, np.ndarray]


@st.composite
def versions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """A tensor of any bits, and its next version, of which none, some or all bits of any numbers are others."""
    kind, shape, seed = draw(st.sampled_from(sorted(KINDS))), draw(SHAPES), draw(st.integers(0, 2**32))
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape)) * np.dtype(KINDS[kind]).itemsize
    high = 2 if kind == "bool" else 256
    base = rng.integers(0, high, size, np.uint8)
    new = base.copy()
    share = draw(st.sampled_from((0.0, 0.05, 0.5, 1.0)))
    new[rng.random(size) < share] = rng.integers(0, high)
    return tuple(x.view(KINDS[kind]).reshape(shape) for x in (base, new))  # type: ignore[return-value]


def applied(data: bytes, base: np.ndarray, size: int) -> np.ndarray:
    result = base.copy()
    words, reader = words_of(result, result.dtype.itemsize), Reader(memoryview(data))
    for start in range(0, len(words), size):
        reader.apply(words[start : start + size])
    reader.end()
    return result


def change(new: np.ndarray, base: np.ndarray, size: int) -> bytes:
    a, b = words_of(new, new.dtype.itemsize), words_of(base, base.dtype.itemsize)
    return b"".join(encoded(a[start : start + size], b[start : start + size]) for start in range(0, len(a), size))


@given(pair=versions(), size=st.sampled_from((1, 7, 64)))
def test_a_change_applied_to_the_base_is_the_new_tensor_bit_for_bit(pair: Any, size: int) -> None:
    base, new = pair
    assert applied(change(new, base, size), base, size).tobytes() == new.tobytes()


def test_zeros_of_either_sign_and_payloads_of_nan_are_different_numbers() -> None:
    base = np.array([0.0, np.nan, np.inf, 1.0, 1e-45], np.float32)
    new = np.array([-0.0, np.nan, -np.inf, 1.0, 0.0], np.float32)
    new.view(np.uint32)[1] ^= 1
    assert applied(change(new, base, 8), base, 8).tobytes() == new.tobytes()
    assert applied(change(new, new, 8), new, 8).tobytes() == new.tobytes()


def test_a_part_that_compression_makes_no_shorter_is_stored_as_it_is() -> None:
    rng, alike = np.random.default_rng(0), 0
    for size in range(1, 120):
        base, new = np.zeros(size, np.uint8), rng.integers(1, 40, size).astype(np.uint8)
        folded = (new << 1) ^ (0 - (new >> 7))
        alike += len(codec.compressed(folded.tobytes())) == size
        assert applied(change(new, base, size), base, size).tobytes() == new.tobytes()
    assert alike  # such a part may not be taken for a compressed one


def test_what_a_small_step_changes_takes_few_bytes() -> None:
    base = np.random.default_rng(0).normal(0, 0.02, 2**18).astype(np.float32)
    new = base + np.float32(1e-6)
    assert len(change(new, base, BLOCK)) < 0.45 * base.nbytes
    served = [x.astype(ml_dtypes.bfloat16) for x in (new, base)]
    assert len(change(*served, BLOCK)) < 0.05 * served[0].nbytes
    assert len(change(base, base, BLOCK)) <= 4
    noise = np.random.default_rng(1).integers(0, 2**32, 2**18, np.uint32)
    assert len(change(noise, words_of(base, 4), BLOCK)) < 1.01 * base.nbytes


@given(pair=versions(), cut=st.integers(0, 200), flip=st.integers(0, 2**16), extra=st.binary(max_size=3))
@settings(max_examples=300)
def test_bytes_that_are_no_change_are_refused_or_change_no_more_than_the_tensor(
    pair: Any, cut: int, flip: int, extra: bytes
) -> None:
    base, new = pair
    data = bytearray(change(new, base, 16))
    if data:
        data[flip % len(data)] ^= 1 + flip % 255
    data = data[: max(0, len(data) - cut)] + extra
    with suppress(Broken):
        assert applied(bytes(data), base, 16).nbytes == base.nbytes


def test_truncated_changes_positions_outside_and_too_much_data_have_sentences() -> None:
    base, new = np.zeros(9, np.uint8), np.array([0, 0, 5, 0, 0, 0, 0, 0, 7], np.uint8)
    data, one = change(new, base, 16), change(np.where(new == 5, new, base), base, 16)
    for broken, what in (
        (data[:-1], "truncated"),
        (data + b"x", "more than the changes"),
        ((10).to_bytes(4, "little") + data[4:], "changes 10 of 9"),
        (data.replace(bytes([0x20, 0x80]), bytes([0x20, 0xC0])), "positions"),  # ten bits of nine
        (data.replace(bytes([0x20, 0x80]), bytes([0x20, 0x40])), "positions"),
        (one.replace(bytes([0x20, 0x00]), bytes([0x28, 0x00])), "positions"),  # two for one value
    ):
        assert broken not in (data, one)
        with pytest.raises(Broken, match=what):
            applied(broken, base, 16)
    bomb = codec.compressed(bytes(10**6))
    packed = (9).to_bytes(4, "little") + (0).to_bytes(4, "little") + len(bomb).to_bytes(4, "little") + bomb
    tracemalloc.start()
    with pytest.raises(Broken, match="another length"):
        applied(packed, base, 16)
    assert tracemalloc.get_traced_memory()[1] < 10**5  # of the million bytes that it would be
    tracemalloc.stop()


# ---- files and digests


def weights(step: int, kind: str = "bfloat16") -> Tensors:
    """A version: of most tensors a few numbers change from one step to the next, of one all, of one none."""
    rng = np.random.default_rng(7)
    made = {f"layer.{i}": rng.normal(size=(40, 50)).astype(np.float32) for i in range(3)}
    made |= {"norm": rng.normal(size=50).astype(np.float32), "scale": np.float32(step).reshape(())}
    made |= {"still": np.ones(5, np.float32), "empty": np.zeros((0, 4), np.float32)}
    for later in range(step):
        rng = np.random.default_rng(later)
        for i in range(3):
            made[f"layer.{i}"][rng.random((40, 50)) < 0.02] += np.float32(0.5)
        made["norm"] += 1
    return {name: x.astype(KINDS[kind]) for name, x in made.items()}


def digest_of(tensors: Tensors) -> str:
    digest = Digest()
    list(digest.of(reversed(tensors.items())))  # in whatever order
    return digest.hexdigest()


def test_a_digest_is_of_names_types_shapes_and_bits_in_any_order() -> None:
    tensors = weights(0)
    listed = {
        name: ["BF16", list(x.shape) or [1], hashlib.sha256(x.tobytes()).hexdigest()] for name, x in sorted(tensors.items())
    }
    assert digest_of(tensors) == hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    named = {"other" if name == "norm" else name: x for name, x in tensors.items()}
    shaped = {**tensors, "norm": tensors["norm"].reshape(5, 10)}
    typed = {**tensors, "norm": tensors["norm"].view(np.float16)}
    flipped = {**tensors, "empty": np.zeros((4, 0), KINDS["bfloat16"])}
    assert len({digest_of(x) for x in (tensors, named, shaped, typed, flipped, weights(1))}) == 6


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"float8_e4m3fn", "float8_e5m2", "bool"}))
def test_types_have_the_names_that_safetensors_writes(kind: str, tmp_path: Path) -> None:
    save_file({"a": np.zeros(3, KINDS[kind])}, tmp_path / "a.safetensors")
    (tmp_path / "copy").mkdir()
    found = write_version(tmp_path / "copy", [tmp_path / "a.safetensors"], None)
    assert found == digest_of({"a": np.zeros(3, KINDS[kind])})
    assert (tmp_path / "copy" / "a.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


# ---- the trainer's side and the server's


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    staging = Staging(tmp_path / "staging")
    yield staging
    staging.close()


@pytest.fixture
def history() -> History:
    return History(1000, iter)


@pytest.fixture
def opened() -> Iterator[Callable[[Path, str], Cache]]:
    """Opens caches, and closes them."""
    with ExitStack() as files:

        def cache(parent: Path, run: str) -> Cache:
            made = Cache(f"{parent}", run)
            files.callback(made.close)
            return made

        yield cache


def publish(history: History, staging: Staging, version: int, base: StagedFiles | None, tensors: Tensors) -> StagedFiles:
    history.take(version, tensors.items(), base)
    return history.stage(staging, version, base, lambda: None)


def order_of(staging: Staging, staged: StagedFiles, parent: Path) -> Order:
    return Order(f"{parent}", staging.root.name, f"{staging.root}", f"{staged.folder}", staged.digest, staged.base)


def read(folder: Path) -> Tensors:
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


def same(found: Tensors, tensors: Tensors) -> None:
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype
        assert found[name].shape == x.shape
        assert found[name].tobytes() == x.tobytes()


@pytest.mark.parametrize("kind", ["bfloat16", "float32"])
def test_a_chain_of_deltas_gives_each_version_exactly_in_the_room_of_one(
    kind: str, staging: Staging, history: History, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []

    def keep(cache: Cache, kept: Path | None) -> None:
        held.append(sum(len(path.name) == 64 for path in cache.folder.iterdir()))
        removed(cache, kept)

    removed = Cache.keep
    monkeypatch.setattr(Cache, "keep", keep)
    cache, staged = None, None
    for version in range(6):
        staged = publish(history, staging, version, staged, weights(version, kind))
        assert bool(staged.base) == (version > 0)
        order = order_of(staging, staged, tmp_path / "cache")
        cache = cache or opened(tmp_path / "cache", order.run)
        made = cache.make(order)
        assert made is not None
        same(read(made), weights(version, kind))
        assert len(shards(f"{cache.folder}", f"{made}")) == 1  # what a server checks before it loads
        assert sorted(path.name for path in cache.folder.iterdir()) == sorted([LOCK, "making", made.name])
        if version:
            assert staged.bytes < sum(x.nbytes for x in weights(version, kind).values()) / 2
            assert history.metrics["published_bytes"] == staged.bytes
    assert (max(held), len(history._copies)) == (CACHED, COPIED)  # what `check` counts


def test_any_block_of_a_tensor_may_be_all_that_changed(
    staging: Staging, history: History, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("files", "version"):
        monkeypatch.setattr(f"areal_x.engines.fleet.delta.{module}.BLOCK", 16)
    before = {name: np.zeros(40, np.float32) for name in ("first", "middle", "last")}
    after = {name: x.copy() for name, x in before.items()}
    for name, place in (("first", 3), ("middle", 20), ("last", 39)):
        after[name][place] = 1
    first = publish(history, staging, 0, None, before)
    cache = opened(tmp_path, staging.root.name)
    cache.make(order_of(staging, first, tmp_path))
    second = publish(history, staging, 1, first, after)
    assert second.base
    same(read(cache.make(order_of(staging, second, tmp_path))), after)


def test_a_version_that_changed_nothing_is_there_already(
    staging: Staging, history: History, opened: Any, tmp_path: Path
) -> None:
    first = publish(history, staging, 0, None, weights(0))
    cache = opened(tmp_path, staging.root.name)
    made = cache.make(order_of(staging, first, tmp_path))
    second = publish(history, staging, 1, first, weights(0))
    assert second.base == second.digest == first.digest
    assert cache.find(second.digest) == made


def test_whole_weights_are_published_first_every_kth_time_and_where_a_delta_does_not_pay(staging: Staging) -> None:
    history, staged, whole = History(3, iter), None, []
    for version in range(8):
        staged = publish(history, staging, version, staged, weights(version))
        whole.append(not staged.base)
    assert whole == [True, False, False] * 2 + [True, False]
    rng = np.random.default_rng(0)
    others = {name: rng.integers(0, 2**16, x.shape, np.uint16).view(x.dtype) for name, x in weights(0).items()}
    assert not publish(History(9, iter), staging, 9, staged, others).base  # its copies are not there
    staged = publish(history, staging, 9, staged, others)
    assert not staged.base  # nothing in common: the delta would be larger
    assert history.metrics["published_share"] >= 1
    same(read(staged.folder), others)
    for changed in (
        {"new": others["norm"]},
        {"norm": others["norm"].reshape(5, 10)},
        {"norm": others["norm"].reshape(5, 10).view(np.uint16)},
    ):
        staged = publish(history, staging, staged.version + 1, staged, others | changed)
        assert not staged.base
        others |= changed
    del others["new"]
    assert not publish(history, staging, 30, staged, others).base


def test_a_version_is_written_whole_from_its_copy_until_there_are_two_newer_ones(staging: Staging, history: History) -> None:
    first = publish(history, staging, 0, None, weights(0))
    second = publish(history, staging, 1, first, weights(1))
    whole = history.stage_whole(staging, second)
    assert (whole.digest, whole.base, whole.version) == (second.digest, "", 1)
    same(read(whole.folder), weights(1))
    assert history.metrics["published_bytes"] == second.bytes + whole.bytes
    third = publish(history, staging, 2, second, weights(2))
    same(read(history.stage_whole(staging, replace(second, folder=whole.folder)).folder), weights(1))
    publish(history, staging, 3, third, weights(3))
    with pytest.raises(Exception, match="no longer held"):
        history.stage_whole(staging, second)
    assert len(history._copies) == 2
    staging.keep(third)
    assert sorted(path.name for path in staging.root.glob("v*")) == ["v00000002", "v00000003"]


def test_a_version_that_no_server_took_is_no_base(staging: Staging, history: History, opened: Any, tmp_path: Path) -> None:
    first = publish(history, staging, 0, None, weights(0))
    cache = opened(tmp_path, staging.root.name)
    assert cache.make(order_of(staging, first, tmp_path)) is not None
    publish(history, staging, 1, first, weights(1))  # its swap failed: servers still have the first
    again = publish(history, staging, 2, first, weights(2))
    assert again.base == first.digest
    same(read(cache.make(order_of(staging, again, tmp_path))), weights(2))


# ---- what is refused


@pytest.fixture
def chain(staging: Staging, history: History, opened: Any, tmp_path: Path) -> Any:
    """A cache with version 0, and version 1 as a delta."""
    first = publish(history, staging, 0, None, weights(0))
    cache = opened(tmp_path / "cache", staging.root.name)
    assert cache.make(order_of(staging, first, tmp_path / "cache")) is not None
    second = publish(history, staging, 1, first, weights(1))
    return SimpleNamespace(
        cache=cache, first=first, second=second, order=order_of(staging, second, tmp_path / "cache"), staging=staging
    )


def truncate(chain: Any) -> None:
    file = chain.second.folder / DELTA
    file.write_bytes(file.read_bytes()[:-5])


def flip(chain: Any) -> None:
    file = chain.second.folder / DELTA
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.write_bytes(data)


def index(chain: Any, **changes: Any) -> None:
    file = chain.second.folder / INDEX
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def places(chain: Any, edit: Callable[[dict[str, Any]], Any]) -> None:
    found = json.loads((chain.second.folder / INDEX).read_text())["tensors"]
    edit(found)
    index(chain, tensors=found)


def link(chain: Any, name: str) -> None:
    file = chain.second.folder / name
    file.symlink_to(file.rename(chain.staging.root / f"moved-{name}"))


def order(chain: Any, **changes: Any) -> None:
    chain.order = replace(chain.order, **changes)


def other_base(chain: Any) -> None:
    """The base that the cache has is damaged on its disk."""
    (file,) = chain.cache.find(chain.first.digest).glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def shorter_base(chain: Any) -> None:
    (file,) = chain.cache.find(chain.first.digest).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-7])


def no_base(chain: Any) -> None:
    chain.cache.keep(None)


def outside(chain: Any) -> None:
    target = chain.staging.root.parent / "elsewhere"
    chain.second.folder.rename(target)
    order(chain, folder=f"{target}")


def pipe(chain: Any) -> None:
    (chain.second.folder / INDEX).unlink()
    os.mkfifo(chain.second.folder / INDEX)


BREAKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "truncated": (truncate, "outside delta.bin"),
    "another bit": (flip, "unpacked|not what the trainer published|another length|positions"),
    "no delta.bin": (lambda c: (c.second.folder / DELTA).unlink(), r"delta\.bin cannot be read"),
    "no index": (lambda c: (c.second.folder / INDEX).unlink(), r"delta\.json cannot be read"),
    "an index of nothing": (lambda c: (c.second.folder / INDEX).write_text("[]"), "no index of a delta"),
    "a pipe for an index": (pipe, "no index of a delta|cannot be read"),
    "nested deeply": (lambda c: (c.second.folder / INDEX).write_text("[" * 10**5), "no index of a delta"),
    "of another base": (lambda c: index(c, base="0" * 64), "of other versions"),
    "of another result": (lambda c: index(c, digest="0" * 64), "of other versions"),
    "a replayed one": (lambda c: order(c, digest="1" * 64), "of other versions"),
    "a base that is not there": (lambda c: order(c, base="1" * 64), "does not have the version before"),
    "an empty cache": (no_base, "does not have the version before"),
    "a damaged base": (other_base, "not what the trainer published"),
    "a truncated base": (shorter_base, "truncated"),
    "positions outside": (lambda c: places(c, lambda x: x.update(norm=[10**9, 5])), r"outside delta\.bin"),
    "before the file": (lambda c: places(c, lambda x: x.update(norm=[-4, 8])), r"outside delta\.bin"),
    "a tensor too much": (lambda c: places(c, lambda x: x.update(more=[0, 4])), "changes more, which the base has not"),
    "a name outside": (lambda c: places(c, lambda x: x.update({"../../x": [0, 4]})), "which the base has not"),
    "a tensor less": (lambda c: places(c, lambda x: x.pop("norm")), "not what the trainer published"),
    "changes of another tensor": (lambda c: places(c, lambda x: x.update(norm=x["layer.0"])), "truncated|changes|length|more"),
    "a folder outside": (outside, "outside the staging folder"),
    "links to the changes": (lambda c: link(c, DELTA), r"delta\.bin cannot be read"),
    "a link to the index": (lambda c: link(c, INDEX), r"delta\.json cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_delta_is_refused_in_a_sentence_and_whole_files_mend_it(name: str, chain: Any, history: History) -> None:
    spoil, what = BREAKS[name]
    spoil(chain)
    with pytest.raises(Broken, match=what):
        chain.cache.make(chain.order)
    assert not (chain.cache.folder / "partial").exists()
    assert chain.cache.find(chain.order.digest) is None
    whole = history.stage_whole(chain.staging, chain.second)
    made = chain.cache.make(order_of(chain.staging, whole, chain.cache.folder.parent))
    same(read(made), weights(1))
    third = publish(history, chain.staging, 2, chain.second, weights(2))
    same(read(chain.cache.make(order_of(chain.staging, third, chain.cache.folder.parent))), weights(2))


def test_whole_files_that_are_others_than_the_trainers_are_refused(chain: Any, history: History) -> None:
    whole = history.stage_whole(chain.staging, chain.second)
    (file,) = whole.folder.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    whole_order = order_of(chain.staging, whole, chain.cache.folder.parent)
    with pytest.raises(Broken, match="not what the trainer published"):
        chain.cache.make(whole_order)
    assert chain.cache.find(chain.first.digest) is not None


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"run": "areal_x-1"}',
        *(
            json.dumps({"parent": "", "run": "areal_x-1", "staging_root": "/", "folder": "/a", "digest": "a" * 64} | wrong)
            for wrong in ({"run": "../x"}, {"run": "areal_x-/../../x"}, {"digest": ".."}, {"base": "../.."}, {"more": 1})
        ),
    ],
)
def test_an_order_with_names_that_lead_elsewhere_is_refused(text: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        parsed(text)
    assert "refused" in Maker().answer(text)


def test_two_runs_in_one_folder_have_caches_of_their_own_and_a_dead_ones_is_removed(opened: Any, tmp_path: Path) -> None:
    first, second = opened(tmp_path, "areal_x-1"), opened(tmp_path, "areal_x-2")
    beside = opened(tmp_path, "areal_x-1")  # another server of the run
    assert first.folder != second.folder
    first.close()
    remove_left_behind(tmp_path)
    assert beside.is_there()
    assert second.is_there()
    beside.close()
    third = opened(tmp_path, "areal_x-3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["areal_x-2-cache", "areal_x-3-cache"]
    third.remove()
    assert not third.folder.exists()


@pytest.mark.parametrize("form", ["link", "readable"])
def test_a_folder_that_somebody_else_has_made_there_is_no_cache(form: str, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir(mode=0o700)
    folder = tmp_path / "areal_x-1-cache"
    if form == "link":
        folder.symlink_to(target)
    else:
        folder.mkdir(mode=0o755)
    with pytest.raises(Broken, match="belongs to somebody else"):
        Cache(f"{tmp_path}", "areal_x-1")
    assert list(target.iterdir()) == []


def test_one_process_makes_a_version_while_the_others_wait(chain: Any) -> None:
    import fcntl

    with (chain.cache.folder / "making").open("r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert chain.cache.make(chain.order) is None
    assert chain.cache.make(chain.order) is not None


def test_a_full_disk_costs_the_delta_and_whole_files_take_the_room_of_the_old_ones(
    chain: Any, history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(target: Path, sources: Any, delta: Any) -> str:
        if any(path.name == chain.first.digest for path in chain.cache.folder.iterdir()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_version(target, sources, delta)

    monkeypatch.setattr(caches, "write_version", write)
    with pytest.raises(Broken, match="has no room for it"):
        chain.cache.make(chain.order)
    assert chain.cache.find(chain.first.digest) is not None
    whole = history.stage_whole(chain.staging, chain.second)
    made = chain.cache.make(order_of(chain.staging, whole, chain.cache.folder.parent))
    same(read(made), weights(1))
    assert chain.cache.find(chain.first.digest) is None


# ---- a server's answers, and which way a version takes


class Server:
    """The side of a server that makes versions, with the real thing behind the calls."""

    def __init__(self, name: str = "vLLM server 1", workers: int = 1) -> None:
        self.name, self.client, self.makers = name, self, [Maker() for _ in range(workers)]
        self.error: Exception | None = None

    async def make_version(self, order: str) -> list[Any]:
        if self.error is not None:
            raise self.error
        return [maker.answer(order) for maker in self.makers]

    async def forget_versions(self) -> None:
        for maker in self.makers:
            maker.forget()


class Trainer:
    def __init__(self) -> None:
        self.version = 0

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        yield from weights(self.version).items()


@pytest.fixture
def published(tmp_path: Path) -> Iterator[Any]:
    """A stager, a feed, and what was reported."""
    said: list[str] = []
    config = VLLMConfig(delta=100, staging=f"{tmp_path / 'staging'}", delta_cache=f"{tmp_path / 'cache'}", wait_seconds=20.0)
    stager = Stager(
        config, tmp_path, lora=None, scorer=None, probe_prompt=lambda: np.zeros(1, np.int32), report=said.append, prove_every=2
    )
    stager.open()
    trainer = Trainer()
    feed = Feed(config, stager, said.append)

    async def publish() -> StagedFiles:
        staged = stager.current = await stager.written(stager.stage(trainer, trainer.version))
        trainer.version += 1
        return staged

    async def loaded(server: Any) -> Tensors:
        root, folder = await feed.place(server, stager.current)
        assert shards(f"{root}", f"{folder}")
        return read(folder)

    yield SimpleNamespace(
        publish=publish,
        loaded=loaded,
        feed=feed,
        stager=stager,
        said=said,
        version=lambda: trainer.version - 1,
        folder=tmp_path,
    )
    stager.remove_files()


def test_servers_get_deltas_and_one_that_joined_or_returned_gets_whole_files_once(published: Any) -> None:
    async def scenario() -> None:
        old, far = Server(), Server("vLLM server 2", workers=2)
        for _ in range(3):
            await published.publish()
            for server in (old, far):
                same(await published.loaded(server), weights(published.version()))
        assert published.said == []
        assert published.stager.metrics["published_share"] < 0.5
        for server in (old, far):
            await published.feed.forget(server)
        assert list((published.folder / "cache").iterdir()) == []
        await published.publish()
        same(await published.loaded(far), weights(3))
        same(await published.loaded(old), weights(3))  # from the same cache
        assert published.said == ["vLLM server 2 gets version 3 whole: the server does not have the version before"]
        assert published.stager.metrics["published_share"] > 1
        await published.publish()
        same(await published.loaded(far), weights(4))
        assert len(published.said) == 1
        await published.feed.forget(far)  # removes that of the other server too
        same(await published.loaded(old), weights(4))
        assert len(published.said) == 2
        await published.feed.forget(old)

    asyncio.run(scenario())


def test_what_a_server_refuses_or_does_not_know_it_reads_from_the_staging_folder(published: Any) -> None:
    async def scenario() -> None:
        server = Server()
        server.error = ServerRefused("it has no such method")
        for version in range(2):
            await published.publish()
            root, folder = await published.feed.place(server, published.stager.current)
            assert root == published.stager.root == folder.parent
            same(read(folder), weights(version))
        assert [sentence.partition(":")[0] for sentence in published.said] == [
            "vLLM server 1 gets version 0 from the staging folder, without its cache",
            "vLLM server 1 gets version 1 whole",
            "vLLM server 1 gets version 1 from the staging folder, without its cache",
        ]
        server.error = ServerLost("it is gone")
        with pytest.raises(ServerLost):
            await published.loaded(server)

    asyncio.run(scenario())


def test_workers_must_agree_on_the_place() -> None:
    here, there = {"folder": "/c/1", "root": "/c"}, {"folder": "/d/1", "root": "/d"}
    assert place_in([here, here]) == (Path("/c"), Path("/c/1"))
    assert place_in([here, {"working": True}]) is None
    for answers, what in (([here, there], "same path"), ([here, {"refused": "full"}], "full"), ([None], "answered None")):
        with pytest.raises(ServerRefused, match=what):
            place_in(answers)


def test_what_servers_import_needs_numpy_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import areal_x.engines.fleet.delta.maker\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name for name in done.stdout.split() if not name.startswith("_")} == {"areal_x", "numpy"}


# ---- settings


def test_deltas_are_refused_by_name_where_they_cannot_be_sent(tiny_model_dir: Path, tmp_path: Path) -> None:
    for settings_, what in (
        ({"delta": -1}, "vllm.delta"),
        ({"delta": 5, "transport": "nccl"}, r"vllm\.delta = 5 .*0 with vllm\.transport = 'nccl'"),
        ({"delta_cache": "/x"}, r"vllm\.delta_cache"),
    ):
        with pytest.raises(ConfigError, match=what):
            VLLMConfig(**settings_)
    with pytest.raises(ConfigError, match=r"sglang\.delta = 5 .*run no code of AReaL-X"):
        SGLangConfig(delta=5)
    with pytest.raises(ConfigError, match=r"vllm\.delta = 5 .*adapters"):
        check_run(VLLMConfig(delta=5), "torch", here=True, lora_rank=8)
    with pytest.raises(ConfigError, match=r"vllm\.delta = 5 .*adapters"):
        VLLMEngine(VLLMConfig(delta=5, urls=("http://127.0.0.1:9",)), tiny_model_dir, tmp_path, lora=LoRAConfig(rank=8))
    with pytest.raises(ConfigError, match=r"vllm\.delta = 5 .*cluster\.shards"):
        check_division(VLLMConfig(delta=5, servers=2), 2)
    check_run(VLLMConfig(delta=5), "torch", here=True, lora_rank=0)
