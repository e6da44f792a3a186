"""Weights that the processes of a gang copy and write, and their threads: here objects of this process, called as those of a
gang are."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_x.algorithms import losses
from areal_x.cluster import rank as rank_module
from areal_x.cluster.dealing import Dealer
from areal_x.cluster.ganged import GangTrainer
from areal_x.cluster.rank import Built, Rank, RankSpec
from areal_x.engines.fleet.manifest import shards
from areal_x.engines.fleet.staging import NoRoom, StagedFiles, Staging
from areal_x.hf.weight_copy import write_shards
from areal_x.protocols.trainer import CopiesWeights, Mine
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.runtime.cores import Threads


@dataclass
class Shared:
    """A trainer that several processes share. fetched: the tensors that this process copied to its host."""

    tensors: dict[str, np.ndarray]
    fetched: list[str] = field(default_factory=list)

    def weights(self, mine: Mine | None = None) -> Iterator[tuple[str, np.ndarray]]:
        for name, x in self.tensors.items():
            if mine is None or mine(x.nbytes):
                self.fetched.append(name)
                yield name, x


class Gang:
    """The processes of a gang, one after the other."""

    def __init__(self, size: int) -> None:
        spec = RankSpec("torch", size, {}, {}, "")
        self.nodes, self.ranks = ["one"] * size, [Rank(spec, rank) for rank in range(size)]

    def gather(self, method: str, *arguments: Any) -> list[Any]:
        return [getattr(rank, method)(*arguments) for rank in self.ranks]

    def call(self, method: str, *arguments: Any) -> Any:
        return self.gather(method, *arguments)[0]

    beside = call


def ganged(gang: Any, threads: int | None = None) -> GangTrainer:
    nobody: Any = None
    return GangTrainer(gang, "policy", Built(0, None, threads), Dealer(nobody, TrainerConfig(), [], []), losses.sft)


SIZES = (700, 1, 40, 40, 300, 2, 2, 90)
Make = Callable[[int], tuple[Gang, GangTrainer, list[Shared]]]


@pytest.fixture
def make() -> Make:
    def made(size: int) -> tuple[Gang, GangTrainer, list[Shared]]:
        rng = np.random.default_rng(0)
        tensors = {f"w{i}": rng.random(n).astype(np.float32) for i, n in enumerate(SIZES)}
        gang, shared = Gang(size), [Shared(tensors) for _ in range(size)]
        for rank, trainer in zip(gang.ranks, shared, strict=True):
            rank._trainers["policy"] = trainer  # type: ignore[assignment]
        return gang, ganged(gang), shared

    return made


def stage(staging: Staging, trainer: GangTrainer, version: int) -> StagedFiles:
    return staging.stage((), version, lambda folder, _: trainer.write_weights(folder))


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    staging = Staging(tmp_path)
    yield staging
    staging.close()


def away(rank: Rank) -> None:
    """Puts a process on a node that does not see the staged weights."""
    rank.mark = lambda folder: Rank.mark(rank, Path("/proc/nowhere"))  # type: ignore[method-assign]


@pytest.mark.parametrize(("size", "elsewhere"), [(1, []), (2, []), (3, []), (12, []), (3, [0]), (3, [1, 2])])
def test_the_processes_that_see_the_folder_write_the_weights_as_they_were(
    size: int, elsewhere: list[int], make: Make, staging: Staging
) -> None:
    gang, trainer, shared = make(size)
    for number in elsewhere:
        away(gang.ranks[number])
    assert isinstance(trainer, CopiesWeights)
    for version in (1, 2):
        assert trainer.copy_weights(staging.root) == 4 * sum(SIZES)
        expected = {name: x.copy() for name, x in shared[0].tensors.items()}
        for x in shared[0].tensors.values():
            x += 1  # the next step
        files = shards(str(staging.root), str(stage(staging, trainer, version).folder))
        found = {name: x for file in files for name, x in load_file(file).items()}
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            np.testing.assert_array_equal(found[name], x)
    fetched = [name for one in shared for name in one.fetched]
    assert sorted(fetched) == sorted(2 * list(shared[0].tensors))  # each by one of them
    assert not any(shared[number].fetched for number in elsewhere)
    assert sorted(path.name for path in staging.root.iterdir()) == ["lock", "v00000001", "v00000002"]


def test_without_any_that_sees_the_folder_nothing_is_copied(make: Make, staging: Staging) -> None:
    gang, trainer, shared = make(2)
    for rank in gang.ranks:
        away(rank)
    assert trainer.copy_weights(staging.root) is None
    assert not any(one.fetched for one in shared)


def test_a_process_whose_disk_is_full_does_not_end_the_gang(
    make: Make, staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, trainer, _ = make(2)
    trainer.copy_weights(staging.root)

    def full(folder: Path, copy: Any, writer: int) -> dict[str, int]:
        sizes = write_shards(folder, copy, writer=writer)
        if writer == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return sizes

    monkeypatch.setattr(rank_module, "write_shards", full)
    with pytest.raises(NoRoom, match="no room to stage the weights"):
        stage(staging, trainer, 1)
    assert [path.name for path in staging.root.iterdir()] == ["lock"]
    monkeypatch.undo()
    assert stage(staging, trainer, 1).bytes > 4 * sum(SIZES)


def test_the_driver_streams_only_the_tensors_that_it_is_asked_for(make: Make) -> None:
    _, trainer, _ = make(1)
    trainer._gang = SimpleNamespace(stream=lambda *_: iter([("a", np.zeros(3)), ("b", np.zeros(4))]))  # type: ignore[assignment]
    assert [name for name, _ in trainer.weights(lambda size: size > 24)] == ["b"]


def test_a_function_is_called_with_the_trainer_of_every_process(make: Make) -> None:
    _, trainer, shared = make(3)
    assert trainer.apply(lambda one, rank, name: one.fetched.append(f"{name} {rank}"), "here") is None
    assert trainer.apply(lambda one, rank: (id(one), one.fetched), beside=True) == (id(shared[0]), ["here 0"])
    assert [one.fetched for one in shared] == [["here 0"], ["here 1"], ["here 2"]]


def test_a_meeting_place_needs_an_address_of_this_machine() -> None:
    rank = Rank(RankSpec("torch", 1, {}, {}, ""), 0)
    assert rank.meeting_place("127.0.0.1")[0] == "127.0.0.1"
    with pytest.raises(OSError, match="assign"):
        rank.meeting_place("203.0.113.1")  # reserved for documentation (RFC 5737)


def test_the_number_of_threads_is_that_of_the_process() -> None:
    gang, own = Gang(1), SimpleNamespace(threads=2)
    gang.ranks[0]._trainers["policy"] = own  # type: ignore[assignment]
    trainer = ganged(gang, own.threads)
    with Threads(trainer, generating=1) as threads:
        assert threads.before(waited=0.0) == own.threads == 2
        assert threads.before(waited=0.5) == own.threads == trainer.threads == 1
    assert own.threads == 2
