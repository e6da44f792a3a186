"""The index over a journal, the selection of its rows, and the search for texts."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal_x.errors import ConfigError
from areal_x.lab import index as indexing
from areal_x.lab.columns import Columns, Names
from areal_x.lab.filters import ORDERS, Filter, by_ticket, ordered, select
from areal_x.lab.index import OTHER, Index
from areal_x.lab.reading import connection_to
from areal_x.lab.search import search
from areal_x.lab.vocabulary import Vocabulary
from areal_x.run.journal import FILE, Journal
from areal_x.types import Episode, Failed, Images, Trajectory
from tests.conftest import environment_with
from tests.lab.journals import FAILED, LATE, answer, group, scored, write_journal, write_tokenizer


@pytest.fixture(autouse=True)
def refreshed_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "REFRESH_SECONDS", 0.0)


def index_of(run: Path) -> Index:
    made = Index(run)
    made.refresh()
    return made


def rows_as_pandas(run: Path) -> list[tuple]:
    """What the journal's own table says, without the index."""
    with Journal(run) as journal:
        table = journal.to_pandas()
    found = []
    for row in table.to_dict("records"):
        step = -1 if np.isnan(row["step"]) else int(row["step"])
        has_tokens = isinstance(row.get("tokens"), np.ndarray)
        length = int(row["length"]) if has_tokens else 0
        trained = int(row["mask"].sum()) if has_tokens else 0
        reward = None if row["reward"] is None or np.isnan(row["reward"]) else np.float32(row["reward"])
        names = {"Scored": "scored", "Failed": "failed", "TimedOut": "timed_out"}
        found.append((row["ticket"], row["task"], step, row["episode"], names[row["outcome"]], reward, length, trained))
    return found


def rows_of(index: Index) -> list[tuple]:
    found = []
    for i in select(index, Filter(order="oldest")).page(0, 10**6):
        row = {name: index.rows.column(name)[i] for name in ("group", "episode", "outcome", "reward", "length", "trained")}
        g = int(row["group"])
        reward = None if np.isnan(row["reward"]) else row["reward"]
        outcome = indexing.OUTCOMES[row["outcome"]]
        numbers = (int(row["length"]), int(row["trained"]))
        ticket, step = (int(index.groups.column(name)[g]) for name in ("ticket", "step"))
        found.append((ticket, index.tasks[g], step, int(row["episode"]), outcome, reward, *numbers))
    return found


def mixed(count: int) -> list:
    """Groups of every kind of episode, also with several trajectories and with masks of every form."""
    random = np.random.default_rng(0)
    groups = []
    for ticket in range(count):
        twice = Episode(scored("a", 0.5).outcome, (answer("first", 0.25), answer("second one", None)))
        speckled = answer("x" * 40, 1.0)
        mask = random.random(len(speckled)) < 0.5
        speckled = Trajectory(speckled.tokens, mask, speckled.logprobs, speckled.versions, reward=1.0)
        episodes = [
            scored("yes" * (ticket + 1), ticket / count),
            FAILED,
            twice,
            LATE,
            Episode(scored("", 1).outcome, (speckled,)),
        ]
        groups.append(group(ticket, episodes, task=f"task {ticket % 3}"))
    return groups


def test_the_index_has_what_the_journals_own_table_has(tmp_path):
    write_journal(tmp_path, mixed(9), [[1, 0], [2, 4]])
    index = index_of(tmp_path)
    assert (index.error, index.unreadable, index.progress) == ("", 0, 1.0)
    assert rows_of(index) == rows_as_pandas(tmp_path)
    assert len(rows_of(index)) == 9 * 6


def test_an_index_that_grew_with_its_run_equals_one_that_is_built_at_the_end(tmp_path):
    (tmp_path / ".lock").touch()
    groups = mixed(12)
    index = Index(tmp_path)
    with Journal(tmp_path) as journal:
        for ticket, one in enumerate(groups):
            journal.admitted(one, ticket)
            if ticket >= 3:  # they finish in another order than they began
                late = groups[(ticket - 3) ^ 1]
                journal.finished(late) if ticket % 4 else journal.given_back(late)
            if ticket == 8:
                journal.consumed(1, [groups[1], groups[0]])
            journal.flush()
            index.refresh()
        assert index.number_of(11) == -1
        journal.consumed(2, [groups[3]])
        journal.flush()
        index.refresh()
        assert rows_of(index) == rows_of(index_of(tmp_path))
    assert rows_of(index) == rows_as_pandas(tmp_path)


def test_what_a_killed_run_did_not_complete_is_not_there_and_its_log_stays(tmp_path):
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom areal_x.run.journal import Journal\n"
        "from tests.lab.journals import group, scored\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for ticket in range(4):\n    one = group(ticket, [scored('yes', 1.0)])\n"
        "    journal.admitted(one, ticket), journal.finished(one), journal.flush()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment_with(1), check=False, timeout=60)
    log = tmp_path / f"{FILE}-wal"
    whole = log.read_bytes()
    assert len(rows_of(index_of(tmp_path))) == 4
    assert log.read_bytes() == whole
    log.write_bytes(whole[:-2000])  # the last transaction is torn
    (tmp_path / f"{FILE}-shm").unlink()
    index = index_of(tmp_path)
    assert (index.error, len(rows_of(index))) == ("", 3)


def test_looking_at_a_closed_journal_leaves_no_file(tmp_path):
    write_journal(tmp_path, mixed(2))
    before = sorted(p.name for p in tmp_path.iterdir())
    index_of(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_damaged_group_is_counted_and_a_damaged_journal_named(tmp_path):
    write_journal(tmp_path, mixed(3))
    with sqlite3.connect(tmp_path / FILE) as connection:
        connection.execute("UPDATE groups SET content = x'00000000ff' WHERE ticket = 1")
    connection.close()
    index = index_of(tmp_path)
    assert index.unreadable == 1
    assert {row[0] for row in rows_of(index)} == {0, 2}
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    assert "cannot be read" in index_of(tmp_path).error


def test_a_run_that_was_resumed_makes_its_index_stale(tmp_path):
    write_journal(tmp_path, mixed(3), [[0]])
    index = index_of(tmp_path)
    os.utime(tmp_path / ".lock", ns=(1, 1))  # as opening it again does
    write_journal(tmp_path, mixed(4)[3:])
    index.refresh()
    assert index.stale
    assert len(rows_of(index)) == 18


def test_groups_that_the_journal_no_longer_keeps_are_not_selected(tmp_path):
    write_journal(tmp_path, mixed(6), [[0], [1], [3]])
    index = index_of(tmp_path)
    with Journal(tmp_path, keep_steps=1) as journal:
        journal.prune(oldest_checkpoint=2, step=3)
    index.refresh()
    assert {row[0] for row in rows_of(index)} == {2, 3, 4, 5}
    assert rows_of(index) == rows_as_pandas(tmp_path)


def test_errors_are_counted_by_text_and_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(indexing, "MOST_ERRORS", 2)
    errors = ["a", "b", "a", "c", "d"]
    groups = [group(i, [Episode(Failed(error, f"trace {i}" if i < 2 else ""))]) for i, error in enumerate(errors)]
    write_journal(tmp_path, groups)
    found = [(f.error, f.count, f.traceback, f.first_ticket) for f in index_of(tmp_path).failures]
    assert found == [("a", 2, "trace 0", 0), ("b", 1, "trace 1", 1), (OTHER, 2, "", 3)]


@pytest.mark.parametrize("order", ORDERS)
def test_pages_in_any_order_are_the_sorted_rows_each_once(tmp_path, order):
    write_journal(tmp_path, mixed(9))
    index = index_of(tmp_path)
    selection = select(index, Filter(order=order))
    pages = [row for begin in range(0, len(selection), 7) for row in selection.page(begin, 7).tolist()]
    assert len(set(pages)) == len(pages) == len(selection)
    by = {"newest": "group", "oldest": "group"}.get(order, order.removeprefix("-"))
    values = index.rows.column(by)[pages]
    falls = order.startswith("-") or order == "newest"
    assert (np.diff(-values if falls else values) >= 0).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_page_by_ticket_is_found_wherever_it_is(data):
    """Groups that ended out of order, some without a chosen row or without any, against the sorted rows."""
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=12))
    tickets = data.draw(st.permutations(range(len(sizes))))
    first = np.cumsum([0, *sizes])
    chosen = np.array(data.draw(st.lists(st.booleans(), min_size=int(first[-1]), max_size=int(first[-1]))), np.bool_)
    made = Index(Path("nowhere"))
    made.oldest = 0
    columns = {name: np.zeros(len(sizes), np.int64) for name in indexing.GROUP_COLUMNS}
    made.groups.append(columns | {"ticket": tickets, "first": first[:-1], "rows": sizes})
    for number, ticket in enumerate(tickets):
        made._number(ticket, number)
    descending = data.draw(st.booleans())
    by_number = sorted(range(len(chosen)), key=lambda row: (tickets[int(np.searchsorted(first, row, "right")) - 1], row))
    wanted = [row for row in by_number if chosen[row]][:: -1 if descending else 1]
    found = by_ticket(made, chosen, descending)
    assert len(found) == len(wanted)
    for begin in range(len(wanted) + 2):
        count = data.draw(st.integers(1, 5))
        assert found.page(begin, count).tolist() == wanted[begin : begin + count]


def test_floats_keep_their_order_as_integers():
    x = np.array([-np.inf, -3.5, -1e-30, -0.0, 0.0, 1e-30, 2, np.inf], np.float32)
    assert (np.diff(ordered(x).astype(np.int64)) > 0).all()


CONDITIONS = [
    (Filter(outcome="failed"), lambda r: r[4] == "failed"),
    (Filter(reward_min=0.25), lambda r: r[5] is not None and r[5] >= 0.25),
    (Filter(reward_max=0.3), lambda r: r[5] is not None and r[5] <= np.float32(0.3)),
    (Filter(step_min=2), lambda r: r[2] >= 2),
    (Filter(step_max=1), lambda r: 0 <= r[2] <= 1),
    (Filter(task="sk 1"), lambda r: r[1] == "task 1"),
    (Filter(task="nowhere"), lambda r: False),
    (Filter(length_min=20, length_max=30), lambda r: 20 <= r[6] <= 30),
    (Filter(ticket=3), lambda r: r[0] == 3),
    (Filter(error=0, outcome="failed"), lambda r: r[4] == "failed"),
    (Filter(finish="length"), lambda r: False),
]


@pytest.mark.parametrize("wanted, meets", CONDITIONS, ids=[str(i) for i in range(len(CONDITIONS))])
def test_a_filter_selects_exactly_the_rows_that_meet_it(tmp_path, wanted, meets):
    write_journal(tmp_path, mixed(9), [[0, 1], [2, 3]])
    index = index_of(tmp_path)
    chosen = select(index, wanted).page(0, 1000)
    every = select(index, Filter(order="oldest")).page(0, 1000)
    expected = {int(i) for i, row in zip(every, rows_of(index), strict=True) if meets(row)}
    assert set(chosen.tolist()) == expected


def test_an_order_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'reward'"):
        Filter(order="rewards")


def test_columns_keep_their_rows_when_they_grow():
    table, names = Columns(x="i4"), Names()
    for i in range(3000):
        table.append({"x": [i, -i]})
        names.extend([f"näme {i}\0{i}"])
    assert table.column("x").tolist() == [x for i in range(3000) for x in (i, -i)]
    assert names[2999] == "näme 2999\x002999"
    assert names.containing("näme 299").tolist() == [299, *range(2990, 3000)]
    assert names.containing("").tolist() == []


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Index, Vocabulary]:
    said = ["the Answer is 42", "no answer", "ünïcode is 42", "nothing"]
    write_journal(tmp_path / "run", [group(i, [scored(x, 1.0), FAILED]) for i, x in enumerate(said)])
    with sqlite3.connect(tmp_path / "run" / FILE) as connection:
        pass
    connection.close()
    return tmp_path / "run", index_of(tmp_path / "run"), Vocabulary(write_tokenizer(tmp_path))


def test_a_search_finds_texts_in_order_and_goes_on_where_it_stopped(texts):
    run, index, vocabulary = texts
    rows = select(index, Filter(order="oldest")).page(0, 100)
    found = search(run, index, vocabulary, rows, "ANSWER", most=1)
    assert [(f.before, f.match, f.after) for f in found.found] == [("ask: the ", "Answer", " is 42")]
    found = search(run, index, vocabulary, rows[found.next :], "ANSWER", most=9, begin=found.next)
    assert [f.row for f in found.found] == [2]
    assert (found.next, found.left_out) == (len(rows), 0)


def test_a_search_finds_texts_of_sequences_with_images(tmp_path):
    """Whose patches stand before the tokens, one copy for all of a group that have them."""
    shown = [Images(np.full((4, 2), x, np.float32), np.array([[1, 2, 2]], np.int32)) for x in (1, 2, 1)]
    said = [scored(f"it shows {x.patches[0, 0]:g}", 1.0) for x in shown]
    seen = [replace(e, trajectories=(replace(e.trajectories[0], images=x),)) for e, x in zip(said, shown, strict=True)]
    write_journal(tmp_path / "run", [group(0, [*seen, scored("it shows 3", 1.0)])])
    index, vocabulary = index_of(tmp_path / "run"), Vocabulary(write_tokenizer(tmp_path))
    rows = select(index, Filter(order="oldest")).page(0, 100)
    found = search(tmp_path / "run", index, vocabulary, rows, "it shows ", most=9)
    assert [(f.row, f.before, f.after) for f in found.found] == [(i, "ask: ", x) for i, x in enumerate("1213")]


def test_a_search_ends_with_its_time_and_always_advances(texts):
    run, index, vocabulary = texts
    rows = select(index, Filter(order="oldest")).page(0, 100)
    at, calls = 0, 0
    while at < len(rows):
        at = search(run, index, vocabulary, rows[at:], "42", most=9, begin=at, seconds=0.0).next
        calls += 1
    assert calls == len(rows)


def test_a_group_that_was_pruned_during_a_search_is_left_out(texts):
    run, index, vocabulary = texts
    with sqlite3.connect(run / FILE) as connection:
        connection.execute("DELETE FROM groups WHERE ticket = 0")
    connection.close()
    rows = select(index, Filter(order="oldest")).page(0, 100)
    assert search(run, index, vocabulary, rows, "42", most=9).left_out == 1


def test_a_folder_without_a_journal_is_named(tmp_path):
    assert "has no journal.sqlite" in index_of(tmp_path).error
    write_journal(tmp_path / "run", mixed(1))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    with connection_to(tmp_path / "copy") as connection, pytest.raises(sqlite3.OperationalError):
        connection.execute("DELETE FROM groups")
