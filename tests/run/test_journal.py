"""Entries are read back as written, whenever the process ends, and a resumed run continues as if it had never ended."""

import dataclasses
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.errors import UserError
from areal_x.run.group_bytes import decode, decode_array, encode, encode_array
from areal_x.run.journal import FILE, Journal
from areal_x.types import Episode, Failed, Group, Images, Kept, Scored, Task, TimedOut, Trajectory
from tests.kept import kept_with

TASKS = [Task(f"task {i}", f"{i}") for i in range(100)]


def trajectory(length=5, experts=False, images=False, seed=0, kept=False):
    rng, prompt = np.random.default_rng(seed), length // 2
    tokens = rng.integers(0, 152_000, length).astype(np.int32)
    return Trajectory(
        tokens=tokens,
        mask=np.arange(length) >= prompt,
        logprobs=-rng.exponential(1, length).astype(np.float32),
        versions=np.where(np.arange(length) >= prompt, 3, -1).astype(np.int32),
        reward=1 / 3,
        token_rewards=rng.normal(size=length).astype(np.float32) if experts else None,
        finish_reason="length",
        experts=rng.integers(-1, 8, (length, 2, 3)).astype(np.int16) if experts else None,
        images=Images(rng.normal(size=(8, 6)).astype(np.float32), np.array([[1, 2, 4]], np.int32)) if images else None,
        kept=Kept.joined([Kept.everything(prompt), kept_with(tokens[prompt:], 152_000, seed)]) if kept else None,
    )


def group(ticket, version=0, lengths=(5, 7)):
    episodes = [Episode(Scored(0.5, {"exact": np.float32(0.25)}), (trajectory(n, seed=ticket),)) for n in lengths]
    return Group(TASKS[ticket], ticket, version, (*episodes, Episode(Failed("no\nanswer"))))


def assert_same(x, y):
    if isinstance(x, np.ndarray):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    elif dataclasses.is_dataclass(x):
        assert type(x) is type(y)
        for f in dataclasses.fields(x):
            assert_same(getattr(x, f.name), getattr(y, f.name))
    elif isinstance(x, tuple | list):
        assert len(x) == len(y)
        for a, b in zip(x, y, strict=True):
            assert_same(a, b)
    else:
        assert x == y


@pytest.mark.parametrize("length", [0, 1, 40])
@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("images", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_a_group_comes_back_to_the_last_bit(length, experts, images, kept):
    given = (
        trajectory(length, experts, images, kept=kept),
        trajectory(length + 1),
        trajectory(length + 2, seed=1, kept=kept),
    )
    pair = Episode(Scored(-0.1, {"a": 1.5}), given)
    written = Group(TASKS[4], 9, 2, (pair, Episode(Failed("x: ü")), Episode(TimedOut(2.5)), Episode(Scored(1.0))), 0.25)
    assert_same(decode(encode(written), TASKS[4], 9, 2), written)


def test_a_journal_from_before_truncated_sampling_was_recorded_is_still_read():
    written = Group(TASKS[4], 9, 2, (Episode(Scored(1.0), (trajectory(), trajectory(7))),))
    content = encode(written)
    end = 4 + int.from_bytes(content[:4], "little")
    head = json.loads(zlib.decompress(content[4:end]))
    del head["kept"]
    old = zlib.compress(json.dumps(head).encode())
    assert_same(decode(len(old).to_bytes(4, "little") + old + content[end:], TASKS[4], 9, 2), written)


def test_images_that_episodes_share_are_written_once_and_shared_again():
    one, other = trajectory(3, images=True), trajectory(4, images=True, seed=1)
    same = dataclasses.replace(other, images=one.images)
    written = Group(TASKS[0], 1, 0, (Episode(Scored(1.0), (one, same)), Episode(Scored(0.0), (other, same))))
    read = decode(encode(written), TASKS[0], 1, 0)
    assert_same(read, written)
    first, second, third, fourth = (t.images for episode in read.episodes for t in episode.trajectories)
    assert first is second is fourth is not third


def turns(number, images=32):
    """A trajectory with an image that every other has, in a copy of its own, and one that no other has."""
    shared, own = (np.random.default_rng(seed).normal(size=(images, 50)).astype(np.float32) for seed in (0, 1 + number))
    shown = Images(np.concatenate([shared, own]), np.array([[1, 4, images // 4]] * 2, np.int32))
    return dataclasses.replace(trajectory(6, seed=number), images=shown)


def test_an_image_of_a_group_is_in_the_file_once_though_each_episode_has_a_copy(tmp_path):
    episodes = tuple(Episode(Scored(0.5), (turns(number),)) for number in range(8))
    written, one = Group(TASKS[0], 0, 0, episodes), 32 * 50 * 4
    with Journal(tmp_path) as journal:
        journal.admitted(written, 0)
        journal.finished(written)
        journal.consumed(1, [written])
        journal.flush()
        (read,) = journal.groups_of(1, TASKS.__getitem__)
    assert_same(read, written)
    with sqlite3.connect(tmp_path / FILE) as connection:
        ((size,),) = connection.execute("SELECT length(content) FROM groups")
    connection.close()
    assert 9 * one < size < 10 * one


def test_a_journal_with_images_beside_trajectories_is_still_read():
    """Each set of images stood beside the first trajectory that has it, and the others named that one."""
    shown = [trajectory(3 + seed, images=True, seed=seed) for seed in range(3)]
    shown = [*shown, dataclasses.replace(trajectory(4), images=shown[1].images), trajectory(5)]
    written = Group(TASKS[4], 9, 2, (Episode(Scored(1.0), tuple(shown)),))
    content = encode(written)
    end = 4 + int.from_bytes(content[:4], "little")
    head = json.loads(zlib.decompress(content[4:end]))
    apart = [(x.pop(), x)[1] for x in head["trajectories"]]
    for x, beside in zip(apart, [*head.pop("images"), 1, None], strict=True):
        x.append(beside)
    old = zlib.compress(json.dumps(head).encode())
    read = decode(len(old).to_bytes(4, "little") + old + content[end:], TASKS[4], 9, 2)
    assert_same(read, written)
    _, second, third, fourth, fifth = (t.images for t in read.episodes[0].trajectories)
    assert second is fourth is not third
    assert fifth is None


@settings(max_examples=300, deadline=None)
@given(data=st.data(), dtype=st.sampled_from(["bool", "int8", "int16", "int32", "int64"]), runs=st.booleans())
def test_every_array_of_whole_numbers_comes_back_whatever_its_range(data, dtype, runs):
    low, high = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    bounds = sorted(data.draw(st.lists(st.integers(low, high), min_size=2, max_size=2)))
    numbers = data.draw(st.lists(st.integers(*bounds), max_size=30))
    x = np.repeat(np.array(numbers, dtype), 40 if runs else 1)
    how, content = encode_array(x)
    assert_same(decode_array(json.loads(json.dumps(how)), content), x)


def test_a_groups_masks_and_versions_take_next_to_nothing():
    long = Group(TASKS[0], 0, 0, (Episode(Scored(1.0), (trajectory(4000),)),))
    assert len(encode(long)) < 4000 * (3 + 4) + 500


def stream(position):
    return TASKS[position]


def write(journal, version=0):
    """Tickets 0 … 5 admitted, all but 2 and 5 finished, 3 given back, 0 and 1 consumed by step 1."""
    for ticket in range(6):
        journal.admitted(group(ticket, version), ticket)
    for ticket in (4, 0, 1):
        journal.finished(group(ticket, version))
    journal.given_back(group(3, version))
    journal.consumed(1, [group(0), group(1)])


def test_what_was_consumed_before_the_checkpoint_is_done_and_the_rest_is_where_it_was(tmp_path):
    with Journal(tmp_path) as journal:
        write(journal)
        journal.flush()
        found = journal.resumed(1, stream, 2)
    assert (found.position, found.next_ticket, dict(found.unfinished), found.order) == (6, 6, {2: 2, 5: 5}, [])
    ((position, waiting),) = found.finished
    assert position == 4
    assert_same(waiting, group(4))


def test_what_was_consumed_after_the_checkpoint_is_consumed_again_in_the_same_order(tmp_path):
    with Journal(tmp_path) as journal:
        write(journal)
    with Journal(tmp_path) as journal:
        found = journal.resumed(0, stream, 2)
        assert [g.ticket for _, g in found.finished] == [0, 1, 4]
        assert found.order == [[0, 1]]
        assert journal.resumed(0, stream, 2).order == [[0, 1]]  # also when that run is killed before it says so
        assert journal.resumed(0, stream, 3).order == []  # steps of another size


def test_a_run_without_a_journal_is_told_apart_from_one_that_has_drawn_nothing(tmp_path):
    with Journal(tmp_path) as journal:
        assert journal.resumed(0, stream, 2) is None


def test_a_group_that_is_admitted_again_has_the_newer_version(tmp_path):
    with Journal(tmp_path) as journal:
        write(journal)
        journal.admitted(group(2, version=1), 2)
        journal.finished(group(2))
        journal.flush()
        found = {g.ticket: g for _, g in journal.resumed(1, stream, 2).finished}
    assert found[2].admitted_version == 1


def test_a_group_of_weights_that_are_lost_is_generated_again(tmp_path):
    with Journal(tmp_path) as journal:
        write(journal)
        journal.admitted(group(2, version=3), 2)
        journal.finished(group(2, version=3))
        found = journal.resumed(1, stream, 2)  # steps 2 and 3 were never written down
    assert [g.ticket for _, g in found.finished] == [4]
    assert dict(found.unfinished) == {2: 2, 5: 5}


def test_a_group_whose_bytes_are_damaged_is_generated_again(tmp_path):
    with Journal(tmp_path) as journal:
        write(journal)
        journal.flush()
        with journal._open() as connection, connection:
            connection.execute("UPDATE groups SET content = ? WHERE ticket = 4", (b"nonsense",))
        found = journal.resumed(1, stream, 2)
    assert (dict(found.unfinished), found.finished) == ({2: 2, 4: 4, 5: 5}, [])


def test_where_the_journals_end_is_missing_the_checkpoint_holds(tmp_path):
    """Tickets 0 to 3 and 5 were consumed by then, and 4, 6 and 7 waited; of all this the journal says what `write` wrote."""
    saved = {"position": 8, "next_ticket": 8, "unfinished": [[4, 4], [6, 6], [7, 7]]}
    with Journal(tmp_path) as journal:
        assert dict(journal.resumed(3, stream, 2, saved=saved).unfinished) == {4: 4, 6: 6, 7: 7}  # of an empty one
        write(journal)
        found = journal.resumed(3, stream, 2, saved=saved)
    assert (found.position, found.next_ticket, dict(found.unfinished), found.order) == (8, 8, {6: 6, 7: 7}, [])
    assert [g.ticket for _, g in found.finished] == [4]


def test_steps_are_read_back_whole_and_in_order(tmp_path):
    with Journal(tmp_path) as journal:
        write(journal)
        journal.consumed(2, [group(4), group(2)])  # 2 was never finished: no such step
        journal.flush()
        assert journal.steps() == [1]
        assert [g.ticket for g in journal.groups_of(1)] == [0, 1]
        assert_same(journal.groups_of(1, stream), [group(0), group(1)])


def test_what_is_forgotten_is_what_nobody_needs(tmp_path):
    with Journal(tmp_path, keep_steps=1) as journal:
        write(journal)
        journal.finished(group(2))
        journal.consumed(2, [group(4), group(2)])
        journal.prune(oldest_checkpoint=0, step=2)
        journal.flush()
        assert journal.steps() == [1, 2]  # a run may go on from the checkpoint of step 0
        journal.prune(oldest_checkpoint=2, step=2)
        journal.flush()
        assert journal.steps() == [2]
        found = journal.resumed(2, stream, 2)
        assert (found.position, found.next_ticket, dict(found.unfinished)) == (6, 6, {5: 5})
        journal.consumed(3, [group(5)])
        journal.prune(oldest_checkpoint=9, step=9)
        journal.flush()
        assert journal.resumed(9, stream, 2).next_ticket == 6  # though all is done


def test_a_table_has_a_row_a_trajectory(tmp_path):
    with Journal(tmp_path) as journal:
        write(journal)
        journal.flush()
        table = journal.to_pandas()
    assert len(table) == 4 * 3  # four groups that ended, of three episodes
    consumed = table[table.step == 1]
    assert list(consumed.ticket) == [0, 0, 0, 1, 1, 1]
    assert list(consumed.outcome[:3]) == ["Scored", "Scored", "Failed"]
    np.testing.assert_array_equal(consumed.iloc[0].tokens, group(0).episodes[0].trajectories[0].tokens)
    assert table[table.status == "given back"].length.isna().all()  # its outcomes are kept, its tokens are not


KILLED = """
import os, signal, sys
from pathlib import Path
from areal_x.run.journal import Journal
from tests.run.test_journal import group

journal = Journal(Path(sys.argv[1]))
for ticket in range(60):
    journal.admitted(group(ticket), ticket)
    journal.finished(group(ticket))
    if ticket % 2:
        journal.consumed((ticket + 1) // 2, [group(ticket - 1), group(ticket)])
    if ticket == int(sys.argv[2]):
        journal.flush()
        print("flushed", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("flushed", [0, 31])
def test_what_was_flushed_outlives_a_kill_and_the_rest_is_there_up_to_some_moment(tmp_path, flushed):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(flushed)], check=False, capture_output=True)
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, b"flushed\n"), ended.stderr
    with Journal(tmp_path) as journal:
        found = journal.resumed(0, stream, 2)
        tickets = [g.ticket for _, g in found.finished]
        assert tickets == list(range(len(tickets)))
        assert len(tickets) >= flushed + 1
        assert list(found.unfinished) in ([], [len(tickets)])
        assert found.order == [[i, i + 1] for i in range(0, 2 * len(found.order), 2)]
        assert len(found.order) >= (flushed + 1) // 2


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "journal.sqlite").write_bytes(b"this is not a database, it is something else altogether" * 20)
    with pytest.raises(UserError, match=r"the journal .* cannot be opened \(file is not a database\)"):
        Journal(tmp_path)


def test_what_goes_wrong_on_the_thread_is_told_by_the_next_call(tmp_path):
    with Journal(tmp_path) as journal:
        with journal._open() as connection:
            connection.execute("DROP TABLE groups")
        journal.admitted(group(0), 0)
        with pytest.raises(
            UserError, match=r"could not be written \(no such table: groups\): make room and continue with --resume"
        ):
            journal.flush()
        with pytest.raises(UserError, match="could not be written"):
            journal.finished(group(0))


def limited(pages, monkeypatch):
    """A disk that is full at so many pages: SQLite says and does the same at this limit of its own."""
    connect = Journal._connect

    def connect_limited(journal):
        connection = connect(journal)
        connection.execute(f"PRAGMA max_page_count = {pages}").fetchall()
        return connection

    monkeypatch.setattr(Journal, "_connect", connect_limited)


def test_after_a_transaction_that_failed_nothing_is_written_so_that_there_is_no_gap(tmp_path, monkeypatch):
    limited(12, monkeypatch)
    with Journal(tmp_path) as journal:
        written = 0
        try:
            for written in range(100):
                journal.admitted(group(written), written)
                journal.finished(group(written, lengths=(500, 500)))
                journal.flush()
        except UserError as error:
            told = str(error)
        assert "could not be written (database or disk is full): make room and continue with --resume" in told
        assert 0 < written < 50
        journal._writing.execute("PRAGMA max_page_count = 1000000").fetchall()  # somebody made room
        with pytest.raises(UserError, match="could not be written"):
            journal.admitted(group(99), 99)
        journal._entries.put(("INSERT INTO consumed VALUES (9, 9, 9)", ()))  # as what was under way when it failed
        with pytest.raises(UserError, match="could not be written"):
            journal.flush()
    monkeypatch.undo()
    with Journal(tmp_path) as journal, journal._open() as connection:
        assert connection.execute("SELECT ticket FROM groups ORDER BY ticket").fetchall() == [(i,) for i in range(written)]
        assert connection.execute("SELECT count(*) FROM consumed").fetchone() == (0,)


def test_a_write_waits_for_a_program_that_holds_the_file_and_then_gives_up_in_a_sentence(tmp_path, monkeypatch):
    with Journal(tmp_path) as journal:
        with sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None) as holding:
            holding.execute("BEGIN EXCLUSIVE")
            journal.admitted(group(0), 0)
            waiting = threading.Thread(target=journal.flush)
            waiting.start()
            waiting.join(0.5)
            assert waiting.is_alive()
            holding.execute("COMMIT")
            waiting.join(60)
            assert not waiting.is_alive()
        assert dict(journal.resumed(0, stream, 1).unfinished) == {0: 0}
    monkeypatch.setattr("areal_x.run.journal.LOCKED_SECONDS", 0.01)
    with Journal(tmp_path) as journal:
        holding.execute("BEGIN EXCLUSIVE")
        journal.admitted(group(1), 1)
        with pytest.raises(UserError, match=r"journal .* could not be written \(database is locked\)"):
            journal.flush()
    holding.execute("COMMIT")
    holding.execute("PRAGMA locking_mode = EXCLUSIVE")
    holding.execute("DELETE FROM consumed")
    with pytest.raises(UserError, match=r"cannot be opened \(database is locked\): another program has locked it"):
        Journal(tmp_path)
    holding.close()


@pytest.fixture
def read_only(tmp_path):
    """A folder that becomes one that cannot be written, also by root."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "none", folder], capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield folder, lambda: subprocess.run([mount, "-o", "remount,ro", folder], check=True)
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_journal_in_a_folder_that_cannot_be_written_is_read(read_only):
    folder, lock = read_only
    with Journal(folder) as journal:
        write(journal)
    lock()
    with Journal(folder) as journal:
        assert journal.steps() == [1]
        assert_same(journal.groups_of(1, stream), [group(0), group(1)])
        journal.admitted(group(0), 0)
        with pytest.raises(UserError, match=r"could not be written \(it can only be read\)"):
            journal.flush()


def test_a_journal_that_was_killed_in_a_folder_that_cannot_be_written_is_a_sentence(read_only):
    folder, lock = read_only
    command = [sys.executable, "-c", KILLED, str(folder), "31"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == -signal.SIGKILL
    (folder / "journal.sqlite-shm").unlink()
    lock()
    with (
        Journal(folder) as journal,
        pytest.raises(UserError, match=r"was not closed and is in a folder that cannot be written"),
    ):
        journal.steps()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(allow_nan=False, width=64), max_size=4), st.lists(st.text(max_size=20), max_size=3))
def test_numbers_and_words_of_outcomes_come_back_exactly(numbers, words):
    episodes = [Episode(Scored(x, {"x": x})) for x in numbers] + [Episode(Failed(word)) for word in words]
    written = Group(TASKS[0], 0, 0, tuple(episodes))
    assert decode(encode(written), TASKS[0], 0, 0) == written
