"""Whatever a loss of power leaves of the journal, a resumed run repeats nothing and loses nothing; and it is the same run."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.batching.batch import Models
from areal_x.build import restore
from areal_x.errors import ConfigError, UserError
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.rollout import Rollout
from areal_x.rollout.runner import Runner
from areal_x.run import checkpoint, resuming
from areal_x.run.journal import FILE, Journal
from areal_x.simulation.clock import run
from areal_x.simulation.engine import FakeEngine, Speed, lognormal
from areal_x.simulation.ring import DAY, Attempt, FakeTrainer, ring
from areal_x.tasks.stream import TaskStream
from areal_x.types import Group, Task
from tests.run.test_journal import group

TASKS = [Task(f"task {i}", "") for i in range(7)]  # so few that a run goes through them many times
LOG = f"{FILE}-wal"


class Powered(Journal):
    """A journal of which a copy is what the disk held when so many of its entries had been written."""

    def __init__(self, folder: Path, entries: int, durable: Path) -> None:
        super().__init__(folder)
        self._left, self._durable = entries, durable

    def _say(self, statement: str, values: tuple[Any, ...]) -> None:
        super()._say(statement, values)
        self._left -= 1
        if self._left == 0:
            self.flush()
            self.copy()

    def copy(self) -> None:
        self._durable.mkdir()
        for name in (FILE, LOG):
            shutil.copy(self.path.with_name(name), self._durable / name)


def is_refused(ticket: int) -> bool:
    return ticket % 5 == 2


class Lives:
    """One run through several losses of power, on the virtual clock: the real runner, queue and journal.

    After each life the disk holds any checkpoint, and the journal as it was at any moment, before or after that.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder = np.random.default_rng(seed), folder
        self.groups_per_step, self.max_staleness, self.window = (int(self.rng.integers(*x)) for x in ((1, 4), (0, 4), (1, 5)))
        self.seed = seed
        self.consumed: dict[int, list[Group]] = {}  # by step
        self.saved: dict[int, dict[str, Any]] = {}  # by step
        self.lives = 0

    def live(self, steps: int, step: int = 0, journal_at: Path | None = None) -> Path:
        """So many steps from that checkpoint on; a folder with the journal as the disk has it."""
        self.lives += 1
        here, durable = self.folder / f"life-{self.lives}", self.folder / f"disk-{self.lives}"
        shutil.copytree(journal_at, here) if journal_at else here.mkdir()
        self.consumed = {k: x for k, x in self.consumed.items() if k <= step}
        self.saved = {k: x for k, x in self.saved.items() if k <= step}
        stream = TaskStream(TASKS, self.seed)
        engine = FakeEngine(
            Speed(1000.0, lambda n: 10.0 * n**0.5),
            concurrency=int(self.rng.integers(1, 9)),
            length=lognormal(20, 1.0, 90),
            context=2**10,
        )
        trainer = FakeTrainer(step_seconds=float(self.rng.exponential(5)), version=step)
        with Powered(here, int(self.rng.integers(1, 4 * steps * self.groups_per_step)), durable) as journal:
            resumed = None
            if step or journal_at:
                resumed = journal.resumed(step, stream.task_at, self.groups_per_step, saved=self.saved.get(step))
            runner = Runner(
                engine,
                Attempt(),
                stream,
                TrajectoryQueue(self.groups_per_step, self.max_staleness, self.window),
                group_size=1,
                seed=self.seed,
                episode_seconds=DAY * 365,
                filters=[lambda group: not is_refused(group.ticket)],
                recorder=journal,
            )

            def watch(groups: list[Group]) -> None:
                self.consumed[trainer.version + 1] = groups

            def save(state: dict[str, Any]) -> None:
                self.saved[trainer.version] = state

            run(ring(Rollout(runner), trainer, steps, watch, resumed, save))
            journal.flush()
            if not durable.exists():
                journal.copy()
        if self.rng.random() < 0.3:  # the last transaction was half on the disk
            log = durable / LOG
            with log.open("r+b") as file:
                file.truncate(int(self.rng.integers(0, log.stat().st_size + 1)))
        return durable


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_after_any_loss_of_power_nothing_is_trained_on_twice_or_lost_and_no_group_is_too_old(tmp_path_factory, seed):
    folder = tmp_path_factory.mktemp("power")
    try:
        lives = Lives(seed, folder)
        disk, step = lives.live(int(lives.rng.integers(2, 9))), 0
        for _ in range(int(lives.rng.integers(1, 3))):
            step = int(lives.rng.choice(list(lives.saved)))
            disk = lives.live(int(lives.rng.integers(1, 7)), step, disk)
    finally:
        shutil.rmtree(folder)
    consumed = [group for step in sorted(lives.consumed) for group in lives.consumed[step]]
    tickets = [group.ticket for group in consumed]
    assert len(set(tickets)) == len(tickets)
    last = lives.saved[max(lives.saved)]
    stream, positions = TaskStream(TASKS, lives.seed), dict(last["unfinished"])
    assert last["position"] == last["next_ticket"]
    assert all(position == ticket for ticket, position in positions.items())
    refused = set(filter(is_refused, range(last["next_ticket"]))) - positions.keys()
    assert {*tickets, *positions} | refused == set(range(last["next_ticket"]))  # each is trained on, under way or given back
    assert positions.keys().isdisjoint(tickets)
    assert refused.isdisjoint(tickets)
    assert [group.task for group in consumed] == [stream.task_at(ticket) for ticket in tickets]
    slots = (lives.max_staleness + 1) * lives.groups_per_step
    bound = (slots + lives.window - 2) // lives.groups_per_step
    assert max(step - 1 - g.admitted_version for step, groups in lives.consumed.items() for g in groups) <= bound


def test_what_is_synced_is_in_the_file_itself_and_on_the_disk(tmp_path, monkeypatch):
    synced: list[str] = []
    fsync = resuming.checkpoint.os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", noted)
    with Journal(tmp_path) as journal:
        for ticket in range(20):
            journal.admitted(group(ticket), ticket)
        journal.sync()
        assert synced == [LOG, tmp_path.name]
        # SQLite syncs its own file where no program sees it: that it moved everything there is what can be seen.
        (tmp_path / "lost").mkdir()
        shutil.copy(tmp_path / FILE, tmp_path / "lost" / FILE)
        with closing(sqlite3.connect(tmp_path / "lost" / FILE)) as lost:
            assert lost.execute("SELECT count(*) FROM groups").fetchone() == (20,)


def test_a_journal_that_somebody_reads_is_synced_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("areal_x.run.journal.LOCKED_SECONDS", 0.01)
    with Journal(tmp_path) as journal, closing(sqlite3.connect(tmp_path / FILE)) as reader:
        journal.admitted(group(0), 0)
        journal.flush()
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM groups").fetchone() == (1,)
        journal.admitted(group(1), 1)
        journal.sync()
        journal.admitted(group(2), 2)
        journal.sync()
        (tmp_path / "lost").mkdir()
        for name in (FILE, LOG):
            shutil.copy(tmp_path / name, tmp_path / "lost" / name)
    with Journal(tmp_path / "lost") as journal:
        assert list(journal.resumed(0, lambda i: TASKS[0], 1).unfinished) == [0, 1, 2]


@pytest.mark.parametrize("how", ["garbage", "page"])
def test_a_damaged_journal_is_set_aside_and_the_checkpoint_goes_on_alone(tmp_path, how):
    with Journal(tmp_path) as journal:
        for ticket in range(50):
            journal.admitted(group(ticket), ticket)
            journal.finished(group(ticket))
        journal.sync()
    file = tmp_path / FILE
    content = bytearray(file.read_bytes())
    content[slice(None) if how == "garbage" else slice(4096, 8192)] = b"x" * (len(content) if how == "garbage" else 4096)
    file.write_bytes(content)
    state = {"position": 9, "next_ticket": 9, "unfinished": [[7, 7], [8, 8]]}
    checkpoint.save(tmp_path, 4, lambda path: None, {"rollout": state, "drawn_from": resuming.stream_identity(TASKS, 3)})
    said: list[str] = []
    began = resuming.find_start(tmp_path, TASKS, 3, said.append)
    assert len(said) == 1
    assert said[0].startswith(f"the journal {file} is damaged (")
    assert (tmp_path / f"{FILE}.damaged-1").read_bytes() == content
    with Journal(tmp_path) as journal:
        resumed = began.rollout(journal, lambda: TaskStream(TASKS, 3), 2)
    assert (resumed.position, resumed.next_ticket, resumed.unfinished, resumed.finished) == (9, 9, {7: 7, 8: 8}, [])


def test_other_tasks_or_another_seed_are_refused_at_a_resume(tmp_path):
    state = {"rollout": {}, "drawn_from": resuming.stream_identity(TASKS, 3)}
    checkpoint.save(tmp_path, 4, lambda path: None, state)
    assert resuming.find_start(tmp_path, list(TASKS), 3, print).step == 4
    with pytest.raises(ConfigError, match=r"train\.seed = 4 cannot work: it must be 3, with which .* began"):
        resuming.find_start(tmp_path, TASKS, 4, print)
    changed = [*TASKS[:-1], Task(TASKS[-1].id, "another prompt")]
    for tasks in (TASKS[:-1], TASKS[::-1], changed):
        with pytest.raises(ConfigError, match=r"train\.dataset = .* it must be the 7 tasks of .*, in their order"):
            resuming.find_start(tmp_path, tasks, 3, print)


def test_the_digest_of_tasks_is_the_same_in_every_process_and_does_not_read_all_of_a_long_dataset(monkeypatch):
    odd = [Task("a", "b", object()), Task("b", [{"role": "user", "content": "x"}], {1: {2, 3}}), Task("c", "d", np.zeros(3))]
    again = [Task("a", "b", object()), Task("b", [{"role": "user", "content": "x"}], {1: {3, 2}}), Task("c", "d", np.ones(3))]
    assert resuming.stream_identity(odd, 0) == resuming.stream_identity(again, 0)
    monkeypatch.setattr("areal_x.runtime.digest.MAX_DIGESTED_TASKS", 10)
    read: list[int] = []

    class Long:
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> Task:
            read.append(index)
            return Task(str(index), "")

    assert resuming.stream_identity(Long(), 0)["tasks"] == 10**6
    assert (len(read), read[0], read[-1]) == (10, 0, 10**6 - 1)


def test_an_algorithm_that_now_needs_a_critic_is_a_sentence(tmp_path):
    class Model:
        def restore(self, path: Path) -> None:
            assert path == tmp_path / "trainer"

    with pytest.raises(UserError, match=r"has no critic, which train\.algorithm now needs"):
        restore(Models(Model(), None, Model()), resuming.Start(4, tmp_path), print)
