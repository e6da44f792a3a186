"""The timeline says what happened, in a format that viewers read, and stays small."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from areal_x.monitor.timeline_plot import in_flight, plot_timeline
from areal_x.runtime import timeline
from areal_x.runtime.timeline import LANES, Interval, Recorder, Span, rows_of, trace_events
from tests.experiments import TASKS, tiny_experiment

STEPS = 3


@pytest.fixture(scope="module")
def finished(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory):
    experiment = tiny_experiment(tiny_model_dir, tmp_path_factory.mktemp("timeline"))
    experiment = replace(experiment, steps=STEPS, max_staleness=1, held_out=TASKS[:2])
    run, groups = experiment.open(), []
    rows = [turn.metrics for turn in experiment.turns(run) if groups.extend(turn.groups) or turn.groups]
    return run, rows, groups


def test_every_episode_that_was_consumed_has_a_span_and_its_requests_and_rewards_too(finished) -> None:
    run, _, groups = finished
    lanes = timeline.read(run)
    episodes = Counter(i.arguments["ticket"] for i in lanes["episodes"])
    requests = Counter(i.arguments["ticket"] for i in lanes["generation"] if "ticket" in i.arguments)
    assert len(groups) == 2 * STEPS
    for group in groups:
        assert episodes[group.ticket] == requests[group.ticket] == len(group.episodes)
    judged = Counter(i.arguments["task"] for i in lanes["rewards"])
    assert all(judged[group.task.id] >= len(group.episodes) for group in groups)
    for request in (i for i in lanes["generation"] if i.arguments.get("ticket") == groups[0].ticket):
        assert request.arguments["version"] == groups[0].admitted_version
        trajectory = groups[0].episodes[0].trajectories[0]
        assert 0 < request.arguments["tokens"] <= len(trajectory)


def test_the_trainers_spans_are_the_seconds_of_the_metrics(finished) -> None:
    run, rows, _ = finished
    spans = {(i.name, i.arguments.get("step")): i.end - i.start for i in timeline.read(run)["trainer"]}
    for row in rows:
        for seconds, name in (("update_seconds", "update"), ("wait_seconds", "wait"), ("logprob_seconds", "log-probabilities")):
            assert spans[name, row["step"]] == pytest.approx(row[seconds], abs=2e-6)
    assert Counter(name for name, _ in spans)["checkpoint"] == 1


def test_each_version_that_was_published_paused_the_engine_once(finished) -> None:
    run, rows, _ = finished
    pauses = timeline.read(run)["engine"]
    assert [i.arguments["version"] for i in pauses] == list(range(STEPS + 1))
    assert pauses[-1].end - pauses[-1].start == pytest.approx(rows[-1]["pause_seconds"], abs=0.05)


def test_both_idle_shares_are_shares_and_the_trainers_is_its_waiting(finished) -> None:
    _, rows, _ = finished
    for row in rows:
        assert 0 <= row["rollout_idle"] <= 1
        assert row["trainer_idle"] == row["wait_seconds"] / row["seconds"]


def test_the_file_is_a_trace_of_complete_events_none_of_which_overlap_in_a_thread(finished) -> None:
    run, _, _ = finished
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(named.values()) == list(LANES)
    ends: dict[tuple[int, int], int] = {}
    for e in (e for e in events if e["ph"] != "M"):
        assert e["ph"] == "X"
        assert isinstance(e["ts"], int)
        assert isinstance(e["dur"], int)
        assert e["ts"] >= 0
        if named[e["pid"]] != "trainer":
            assert e["ts"] >= ends.get((e["pid"], e["tid"]), 0) - 1  # a microsecond of rounding
            ends[e["pid"], e["tid"]] = e["ts"] + e["dur"]


def test_a_run_that_is_left_early_leaves_what_it_has(tiny_model_dir: Path, tmp_path: Path) -> None:
    experiment = tiny_experiment(tiny_model_dir, tmp_path)
    run = experiment.open()
    turns = experiment.turns(run)
    assert [next(turns).metrics["step"] for _ in range(2)] == [0, 1]
    turns.close()
    assert [i.arguments["step"] for i in timeline.read(run)["trainer"] if i.name == "update"] == [1]


def test_the_picture_shows_the_last_steps(finished, tmp_path: Path) -> None:
    run, _, _ = finished
    figure = plot_timeline(run, tmp_path / "timeline.png", steps=2)
    trainer, generation, _ = figure.axes
    begins = [i.start for i in timeline.read(run)["trainer"] if i.name == "wait"]
    assert generation.get_xlim()[0] == begins[-2]
    assert [label.get_text() for label in trainer.get_yticklabels()][:3] == ["wait", "log-probabilities", "update"]
    assert imread(tmp_path / "timeline.png").shape[:2] == (825, 1500)


def test_the_newest_spans_of_a_lane_stay_and_no_lane_takes_anothers_place() -> None:
    recorder = Recorder(capacity=10)
    recorder.add("update", 0.0, 1.0, step=1)
    for i in range(1000):
        recorder.add("generate", float(i), i + 0.5, ticket=i)
    assert [i.arguments["ticket"] for i in recorder.of("generation")] == list(range(990, 1000))
    assert len(recorder.of("trainer")) == 1


def test_what_has_not_ended_is_there_up_to_now() -> None:
    recorder = Recorder()
    with Span(recorder, "generate", {"ticket": 1}) as span:
        (running,) = recorder.of("generation")
        assert running.start == span.start
        assert running.end > span.start
    assert recorder.of("generation")[0].end >= running.end


def test_a_span_that_fails_is_a_span() -> None:
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError), Span(recorder, "reward", {}):
        1 / 0  # noqa: B018
    assert len(recorder.of("rewards")) == 1
    assert recorder._open == {}


def test_threads_may_record_and_read_at_once() -> None:
    recorder, threads, each = Recorder(capacity=100_000), 8, 2000

    def record(thread: int) -> None:
        for i in range(each):
            with Span(recorder, "generate", {"thread": thread, "i": i}):
                pass
            if i % 500 == 0:
                trace_events(recorder)
                recorder.idle_share("generation", 0.0, 1e9)

    running = [threading.Thread(target=record, args=(t,)) for t in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    found = recorder.of("generation")
    assert len(found) == threads * each
    assert len({(i.arguments["thread"], i.arguments["i"]) for i in found}) == threads * each


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=30))
def test_rows_hold_no_two_that_overlap_and_are_as_few_as_can_be(drawn: list[tuple[int, int]]) -> None:
    intervals = [Interval("generate", float(s), float(s + n), {}) for s, n in sorted(drawn)]
    rows = rows_of(intervals)
    for row in set(rows):
        own = [i for i, r in zip(intervals, rows, strict=True) if r == row]
        assert all(a.end <= b.start for a, b in pairwise(own))
    open_at_once = [sum(i.start <= t < i.end for i in intervals) for t in range(71)]
    assert len(set(rows)) == max(open_at_once)


@given(spans, st.integers(0, 60), st.integers(1, 20))
def test_the_idle_share_is_that_of_the_moments_in_which_none_was_open(drawn, start: int, length: int) -> None:
    recorder = Recorder()
    for s, n in drawn:
        recorder.add("generate", float(s), float(s + n))
    busy = sum(any(s <= t < s + n for s, n in drawn) for t in range(start, start + length))
    assert recorder.idle_share("generation", start, start + length) == pytest.approx(1 - busy / length)


@given(spans)
def test_in_flight_counts_what_is_open(drawn: list[tuple[int, int]]) -> None:
    intervals = [Interval("generate", float(s), float(s + n), {}) for s, n in drawn]
    times, counts = in_flight(intervals)
    assert counts[-1] == 0
    for t in range(70):
        last = max(i for i, x in enumerate(times) if x <= t + 0.5)
        assert counts[last] == sum(s <= t < s + n for s, n in drawn)


def test_spans_that_are_taken_are_forgotten() -> None:
    recorder = timeline.begin()
    with timeline.span("update", step=1), timeline.span("generate", ticket=2):
        assert recorder.take() == []
    assert sorted(span.name for span in recorder.take()) == ["generate", "update"]
    assert recorder.take() == []


def test_a_span_is_moved_to_another_clock() -> None:
    span = Interval("update", 3.0, 4.5, {"step": 1})
    assert span.shifted(-1.25) == Interval("update", 1.75, 3.25, {"step": 1})
