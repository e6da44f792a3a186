"""The output that a supervisor keeps of a program, and the status that it reports."""

from __future__ import annotations

import json
import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.sandbox.supervisor import HeadAndTail, _has_no_reader
from areal_x.sandbox.verdict import verdict

SETTINGS = {"seconds": 5, "cpu_seconds": 3, "memory_mb": 100, "processes": 8, "files": 9, "file_mb": 2}


@given(st.lists(st.binary(max_size=40)), st.integers(1, 20))
def test_the_first_and_the_last_bytes_are_kept_and_never_more(pieces, most):
    kept, whole = HeadAndTail(most), b"".join(pieces)
    for piece in pieces:
        kept.add(piece)
        assert len(kept.head) <= most
        assert len(kept.tail) <= most
    assert kept.head == whole[:most]
    assert kept.dropped == (len(whole) > 2 * most)
    assert kept.tail == (whole[-most:] if kept.dropped else whole[most:])


def test_a_pipe_that_nobody_reads_any_more_is_known():
    reading, writing = os.pipe()
    assert not _has_no_reader(writing)
    os.close(reading)
    assert _has_no_reader(writing)
    os.close(writing)


@pytest.mark.parametrize("reason", ["timeout", "memory", "processes", "files"])
def test_what_was_ended_is_told_by_its_limit_whatever_the_program_says(reason):
    reported = json.dumps({"status": "error", "error": "mine"}).encode()
    found = verdict(reason, -9, reported, SETTINGS)
    assert found["status"] in ("timeout", "memory", "killed")
    assert "mine" not in found["error"]


@pytest.mark.parametrize(
    "reported", [b"", b"{", b"[]", b"3", b'{"status": "ok", "error": "x"}', b'{"status": "error"}', b"[" * 100_000]
)
def test_a_report_that_is_none_is_left_out(reported):
    assert verdict("ended", 3, reported, SETTINGS) == {"status": "error", "error": "exit status 3"}


def test_a_report_is_told_with_nothing_beside_it():
    reported = json.dumps({"status": "memory", "error": "MemoryError", "output": "forged"}).encode()
    assert verdict("ended", 1, reported, SETTINGS) == {"status": "memory", "error": "MemoryError"}
    assert verdict("ended", 0, reported, SETTINGS) == {"status": "ok", "error": None}


@pytest.mark.parametrize("code", [-signal.SIGXCPU, 128 + signal.SIGXCPU])
def test_a_signal_is_known_as_a_number_below_zero_or_as_a_shell_says_it(code):
    assert verdict("ended", code, b"", SETTINGS)["status"] == "timeout"
