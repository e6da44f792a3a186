"""Silence is a defect: what is reported when nothing moves, and what is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from areal_x.runtime import waits
from areal_x.runtime.waits import Wait, is_due, moved, open_waits, waiting, watching

SILENCE = 0.3  # seconds: short, so that the tests are


class Heard:
    """The messages of a watch."""

    def __init__(self) -> None:
        self.said: SimpleQueue[str] = SimpleQueue()

    def next(self) -> str:
        return self.said.get(timeout=60)


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    found = Heard()
    with watching(found.said.put, tmp_path, silence_seconds=SILENCE):
        yield found


def test_a_silence_names_who_waits_for_whom_and_for_which_item(heard: Heard, tmp_path: Path) -> None:
    with waiting("the trainer", "the groups of step 7", lambda: "3 of 16 are finished"):
        said = heard.next()
    assert re.match(
        r"nothing has moved for \d+ s: the trainer has waited \d+ s for the groups of step 7 \(3 of 16 are finished\)", said
    )
    log = (tmp_path / waits.FILE).read_text()
    assert "the trainer has waited" in log
    assert "thread MainThread" in log
    assert "heard.next()" in log  # where each thread stands


def test_the_longest_wait_comes_first_and_an_idle_one_last() -> None:
    with waiting("a server", "requests", idle=True), waiting("an episode", "its reward"), waiting("the trainer", "groups"):
        # Servers that the session shares wait beside these.
        here = [wait.who for wait in open_waits() if wait.who in ("a server", "an episode", "the trainer")]
    assert here == ["an episode", "the trainer", "a server"]


def test_a_silence_is_reported_at_its_limit_and_again_when_it_has_lasted_twice_as_long() -> None:
    waiting_for_groups = [Wait("the trainer", "groups")]
    assert not is_due(29, 0, 30, waiting_for_groups)
    assert is_due(30, 0, 30, waiting_for_groups)
    assert not is_due(59, 30, 30, waiting_for_groups)
    assert is_due(60, 30, 30, waiting_for_groups)


def test_where_all_waits_are_idle_nothing_is_reported() -> None:
    assert not is_due(1e6, 0, 30, [Wait("a server", "requests", idle=True)])


def test_the_limit_follows_the_rhythm_of_the_run(tmp_path: Path) -> None:
    slow: SimpleQueue[str] = SimpleQueue()
    with watching(slow.put, tmp_path, lambda: 3600.0, SILENCE), waiting("the run", "a step"):
        said: SimpleQueue[str] = SimpleQueue()
        with watching(said.put, tmp_path, silence_seconds=SILENCE):
            said.get(timeout=60)
    assert slow.empty()


def test_movement_inside_a_wait_ends_a_silence(heard: Heard) -> None:
    with waiting("the run", "a long step"):
        heard.next()
        before = waits._last_moved
        moved()
        assert waits._last_moved > before
        heard.next()  # the silence that begins there


def test_a_detail_that_fails_does_not_end_the_watch(heard: Heard) -> None:
    with waiting("the trainer", "groups", lambda: {}["gone"]):
        assert "(unknown: 'gone')" in heard.next()
