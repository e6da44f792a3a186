"""The limit on a server's requests follows the capacity of its cache, on simulated servers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.engines.fleet.concurrency import INCREASE, Load, next_limit, parse_load
from areal_x.engines.vllm.client import LOAD_METRICS

MOST = 64


@dataclass
class Cache:
    """A server whose cache has room for `fits` requests, and that preempts those above. A request ends after `turns`
    heartbeats; as many as the limit allows are always in flight."""

    fits: int
    turns: int = 4
    running: int = 0
    preemptions: int = 0

    def look(self, limit: int) -> Load:
        ended = self.running // self.turns
        self.running = max(self.running - ended, min(limit, MOST))
        self.preemptions += max(0, self.running - self.fits)
        return Load(self.running, 0, min(1.0, self.running / self.fits), self.preemptions)


def trace(server: Cache, looks: int, limit: int) -> list[int]:
    limits, before = [], server.look(limit)
    for _ in range(looks):
        now = server.look(limit)
        limit = next_limit(limit, before, now, MOST)
        limits.append(limit)
        before = now
    return limits


@pytest.mark.parametrize("fits", [4, 10, 20, 40, 63, 64, 200])
@pytest.mark.parametrize("start", [1, MOST])
def test_the_limit_finds_what_the_cache_holds_and_stays_near(fits: int, start: int) -> None:
    end = trace(Cache(fits), 200, start)[-100:]
    step = max(1, round(MOST * INCREASE))
    best = min(fits, MOST)
    assert max(end) <= min(MOST, best + step)
    assert min(end) >= min(best, MOST) * 0.5
    assert max(end) - min(end) <= max(step, 0.5 * best)


def test_it_finds_the_new_size_when_answers_become_shorter_or_longer() -> None:
    server = Cache(16)
    limit = trace(server, 100, MOST)[-1]
    assert limit <= 16 + MOST * INCREASE
    server.fits = 60
    limit = trace(server, 100, limit)[-1]
    assert limit >= 45
    server.fits = 8
    assert trace(server, 100, limit)[-1] <= 8 + MOST * INCREASE


def test_a_decrease_is_not_repeated_before_it_has_taken_effect() -> None:
    before, now = Load(64, 0, 1.0, 0), Load(64, 0, 1.0, 5)
    limit = next_limit(64, before, now, MOST)
    assert limit == 48
    assert next_limit(limit, now, Load(60, 0, 1.0, 9), MOST) == 48
    assert next_limit(limit, now, Load(48, 0, 1.0, 9), MOST) == 36


def test_a_limit_that_nobody_reaches_does_not_grow() -> None:
    assert next_limit(16, Load(3, 0, 0.1, 0), Load(3, 0, 0.1, 0), MOST) == 16


def test_requests_that_wait_in_the_server_hold_the_limit() -> None:
    assert next_limit(16, Load(16, 0, 0.1, 0), Load(16, 2, 0.1, 0), MOST) == 16


loads = st.builds(Load, st.integers(0, 200), st.integers(0, 9), st.floats(0, 1), st.integers(0, 50))


@given(st.integers(1, MOST), loads, loads)
def test_the_limit_is_always_between_one_and_the_most(limit: int, before: Load, now: Load) -> None:
    assert 1 <= next_limit(limit, before, now, MOST) <= MOST


# As a vLLM 0.32 server gave it.
METRICS = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 12.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 3.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:num_preemptions_total{engine="0",model_name="policy"} 7.0
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.8e+09
"""


def test_a_servers_load_is_read_from_its_metrics() -> None:
    assert parse_load(METRICS, LOAD_METRICS) == Load(running=12, waiting=3, cache=0.25, preemptions=7)
    second = METRICS.replace('engine="0"', 'engine="1"').replace("0.25", "0.75")
    assert parse_load(METRICS + second, LOAD_METRICS) == Load(running=24, waiting=6, cache=0.5, preemptions=14)
    assert parse_load("python_info 1.0\n", LOAD_METRICS) is None
