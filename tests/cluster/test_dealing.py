"""Which rows of a batch each process reads, and that none is lost or read twice."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.algorithms import losses
from areal_x.cluster.dealing import Dealer, speakers
from areal_x.cluster.gang import PerNode
from areal_x.cluster.ganged import GangTrainer
from areal_x.cluster.on_ray import bytes_of
from areal_x.cluster.rank import Built, Rank, RankSpec
from areal_x.cluster.sent_batch import arrived
from areal_x.protocols import backends
from areal_x.protocols.shares import Purpose, Shares, SharingBackend, own_rows
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.types import Batch

BACKENDS = ("areal_x_jax", "areal_x_torch")


def batch_of(lengths: list[int], length: int = 8) -> Batch:
    """A row for each number of tokens; each token is unique."""
    filled = np.arange(length) < np.array(lengths)[:, None]
    tokens = np.arange(filled.size).reshape(filled.shape)
    return Batch(tokens, filled.astype(np.int32), tokens % length, filled, weights=filled.astype(np.float32))


def config_of(rows: int) -> TrainerConfig:
    return TrainerConfig(model=ModelConfig(path="unread"), micro_batch_rows=rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("purpose", ["update", "outputs"])
@given(lengths=st.lists(st.integers(0, 8), min_size=1, max_size=20), count=st.integers(2, 5), rows=st.integers(1, 3))
def test_every_row_with_a_sequence_is_read_by_one_share(
    backend: str, purpose: Purpose, lengths: list[int], count: int, rows: int
) -> None:
    module = pytest.importorskip(backend)
    batch = batch_of(lengths)
    dealer = Dealer(module, config_of(rows), [Shares((share,), count) for share in range(count)], ["node"] * count)
    dealt, division = dealer.deal(batch, purpose)
    parts = dealt.values["node"]
    read = np.concatenate([part.rows.tokens[part.rows.mask] for part in parts.values()])
    assert sorted(read) == sorted(batch.tokens[batch.mask])
    if purpose == "outputs":
        returned = [parts[(share,)].rows.tokens.astype(np.float32) for share in range(count)]
        np.testing.assert_array_equal(dealer.outputs(batch.shape, division, returned), batch.tokens)


def test_a_node_is_given_the_rows_of_its_processes_alone_and_once() -> None:
    module = pytest.importorskip("areal_x_torch")
    batch = batch_of([8] * 64)
    # Two nodes; the processes of a pair, a tensor group, read the same rows.
    shares = [Shares((rank // 2,), 4) for rank in range(8)]
    nodes = ["first"] * 4 + ["second"] * 4
    dealt, _ = Dealer(module, config_of(2), shares, nodes).deal(batch, "update")
    assert [sorted(parts) for parts in dealt.values.values()] == [[(0,), (1,)], [(2,), (3,)]]
    assert sum(map(bytes_of, dealt.values.values())) < 1.1 * bytes_of(batch)


def with_images(rows: int, each: int = 4) -> Batch:
    """A batch each of whose rows has a sequence of the one group with the group's image, then one of its own."""
    batch, noise = batch_of([8] * rows), np.random.default_rng(0)
    shared, own = noise.normal(size=(each, 50)), noise.normal(size=(rows, each, 50))
    patches = np.zeros((rows, 3 * each, 50), np.float32)  # with room for one more
    patches[:, :each], patches[:, each : 2 * each] = shared, own
    grids, segments = np.zeros((rows, 3, 3), np.int32), np.zeros((rows, 3), np.int32)
    grids[:, :2], segments[:, :2] = (1, 2, each // 2), 1
    return batch.replace(patches=patches, grids=grids, image_segments=segments)


def assert_same(found: Batch, wanted: Batch) -> None:
    assert found.patches is not None
    for name, x in vars(wanted).items():
        np.testing.assert_array_equal(getattr(found, name), x, err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_node_is_sent_one_copy_of_an_image_of_several_rows(backend: str) -> None:
    module, each = pytest.importorskip(backend), 64
    batch = with_images(8, each)
    shares = [Shares((rank,), 4) for rank in range(4)]
    dealt, division = Dealer(module, config_of(1), shares, ["first", "first", "second", "second"]).deal(batch, "update")
    assert division is not None
    image = each * 50 * 4
    for node, own in (("first", [(0,), (1,)]), ("second", [(2,), (3,)])):
        message = pickle.dumps(dealt.values[node])
        assert 5 * image < len(message) < 5.5 * image  # the group's, and one of each of its four rows
        assert bytes_of(dealt.values[node]) < len(message)
        for share in own:
            rows = pickle.loads(message)[share].rows
            assert_same(arrived(rows), own_rows(batch, division.rows(share)))


def test_whole_batches_are_sent_with_one_copy_of_each_image_and_those_of_text_as_they_are() -> None:
    module = pytest.importorskip("areal_x_torch")
    dealer = Dealer(module, config_of(1), [Shares((0, 1), 2)] * 2, ["first", "second"])
    batch = with_images(8, 64)
    dealt, _ = dealer.deal(batch, "update")
    assert dealt.values["first"] is dealt.values["second"]
    message = pickle.dumps(dealt.values["first"])
    assert len(message) < 9.5 * 64 * 50 * 4
    assert_same(arrived(pickle.loads(message)), batch)


@pytest.mark.parametrize("shares", [[None, Shares((0,), 2)], [Shares((0, 1), 2)] * 2])
def test_processes_that_need_all_rows_get_the_batch_itself(shares: list[Shares | None]) -> None:
    module = pytest.importorskip("areal_x_torch")
    batch = batch_of([3, 4])
    dealer = Dealer(module, config_of(1), shares, ["first", "second"])
    dealt, division = dealer.deal(batch, "update")
    assert division is None
    assert all(x is batch for x in dealt.values.values())
    assert dealer.speakers == [0]


def test_a_backend_that_does_not_divide_gets_whole_batches() -> None:
    module = pytest.importorskip("areal_x_torch")
    other = SimpleNamespace(**{name: getattr(module, name) for name in backends.DECLARED})
    batch = batch_of([3, 4])
    dealt, division = Dealer(other, config_of(1), [Shares((0,), 2), Shares((1,), 2)], ["first", "second"]).deal(batch, "update")
    assert division is None
    assert all(x is batch for x in dealt.values.values())


def test_only_a_trainer_that_reads_shares_declares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """`shares` alone is not enough: it may be a trainer's own."""
    whole = SimpleNamespace(version=3, threads=2, shares=Shares((0,), 2))
    sharing = SimpleNamespace(version=4, threads=None, shares=Shares((1,), 2), update_share=print, outputs_share=print)
    built = {"whole": whole, "sharing": sharing}
    configs = {name: TrainerConfig(model=ModelConfig(path=name)) for name in built}
    monkeypatch.setattr("areal_x.cluster.rank.create_trainer", lambda backend, config: built[config.model.path])
    spec = RankSpec(backend="any", size=2, configs=configs, losses={}, bindings="")
    assert Rank(spec, 0).build() == {"whole": Built(3, None, 2), "sharing": Built(4, Shares((1,), 2), None)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_both_backends_divide_batches(backend: str) -> None:
    assert isinstance(pytest.importorskip(backend), SharingBackend)


class Kept(SimpleNamespace):
    """A trainer whose outputs of a step are the tokens that it read, and their negatives."""

    version, threads = 0, None

    def update_share(self, rows: Batch, whole: object, loss: object) -> dict[str, float]:
        self.rows = np.where(rows.mask, rows.tokens, 0).astype(np.float32)
        return {"loss": 0.0}

    def update(self, batch: Batch, loss: object) -> dict[str, float]:
        return self.update_share(batch, None, loss)

    def outputs_share(self, *_: object) -> None: ...

    def step_share(self, output: str) -> np.ndarray:
        return self.rows if output == "logprobs" else -self.rows

    def step_logprobs(self) -> np.ndarray:
        return self.step_share("logprobs")

    def step_entropies(self) -> np.ndarray:
        return self.step_share("entropies")


class Processes:
    """The processes of a gang, one after the other, each on a node of its own."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks, self.nodes = ranks, [str(rank.rank) for rank in ranks]

    def gather(self, method: str, *arguments: object, batch: PerNode | None = None) -> list[Any]:
        of_node = [()] * len(self.ranks) if batch is None else [(batch.values[node],) for node in self.nodes]
        return [getattr(rank, method)(*arguments, *more) for rank, more in zip(self.ranks, of_node, strict=True)]

    def call(self, *arguments: Any, **batch: Any) -> Any:
        return self.gather(*arguments, **batch)[0]

    def measured(self, *arguments: Any, **batch: Any) -> tuple[Any, dict[str, float]]:
        return self.call(*arguments, **batch), {}


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_processes_keep_of_a_step_comes_back_in_the_order_of_the_batch(
    backend: str, divides: bool, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainerConfig(model=ModelConfig(path="policy"), micro_batch_rows=1, entropy=entropy)
    ranks = [Rank(RankSpec(backend, 4, {"policy": config}, {"policy": losses.sft}, ""), number) for number in range(4)]
    built = []
    for number, rank in enumerate(ranks):  # the processes of a pair read the same rows
        trainer = Kept(shares=Shares((number // 2,), 2) if divides else Shares((0,), 1))
        monkeypatch.setattr("areal_x.cluster.rank.create_trainer", lambda *_, trainer=trainer: trainer)
        built.append(rank.build()["policy"])
    gang: Any = Processes(ranks)
    dealer = Dealer(pytest.importorskip(backend), config, [one.shares for one in built], gang.nodes)
    trainer = GangTrainer(gang, "policy", built[0], dealer, losses.sft)
    assert trainer.step_logprobs() is None  # before any step
    for lengths in ([3, 8, 0, 5, 1], [4, 2]):
        batch = batch_of(lengths)
        trainer.update(batch, losses.sft)
        expected = np.where(batch.mask, batch.tokens, 0)
        np.testing.assert_array_equal(trainer.step_logprobs(), expected)
        if entropy:
            np.testing.assert_array_equal(trainer.step_entropies(), -expected)
        else:
            assert trainer.step_entropies() is None


def test_each_share_is_returned_by_the_first_process_that_has_it() -> None:
    own = [(0, 1), (0, 1), (2,), (3,), (2, 3)]
    assert speakers([Shares(of_rank, 4) for of_rank in own]) == [0, 2, 3]


@given(lengths=st.lists(st.integers(0, 8), min_size=1, max_size=20), count=st.integers(2, 5), rows=st.integers(1, 3))
def test_all_processes_of_torch_make_the_same_passes(lengths: list[int], count: int, rows: int) -> None:
    """Counted anew from the rows that each has."""
    shares = pytest.importorskip("areal_x_torch.shares")
    flat_rows = pytest.importorskip("areal_x_torch.flat_rows")
    batch = batch_of(lengths)
    division = shares.divide(config_of(rows), batch, count, "update")
    whole = division.whole
    made = []
    for share in range(count):
        cut = list(whole.cut(own_rows(batch, division.rows([share])), share))
        assert all(1 <= len(micro.tokens) <= rows for micro in cut)
        made.append([len(flat_rows.flatten_rows(micro.segment_ids, rows * 8)) for micro in cut])
    assert whole.passes == tuple(np.max(made, axis=0).tolist())
    assert whole.step_trained == max(sum(lengths), 1)
    assert sum(whole.tokens) == sum(whole.trained) == sum(lengths)
