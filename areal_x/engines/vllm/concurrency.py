"""How many requests a server should work on: as many as its cache holds, found by trying.

Too many, and a server preempts: it drops the cache of a request and computes it again later. Too
few leave it idle. How many fit depends on how long answers become, which no setting knows. Additive
increase, multiplicative decrease, as TCP finds a network's rate (Chiu and Jain, 1989).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CACHE_MARK = 0.85  # of the cache: no more requests above it, as those in flight still grow
INCREASE = 1 / 16  # of the most, at each look
DECREASE = 0.75


@dataclass(frozen=True)
class Load:
    """What a server says of itself. cache: part of it in use, 0 to 1. preemptions: since its
    start."""

    running: int
    waiting: int
    cache: float
    preemptions: int


NAMES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "cache": "vllm:kv_cache_usage_perc",
    "preemptions": "vllm:num_preemptions_total",
}


def next_limit(limit: int, before: Load, now: Load, most: int) -> int:
    """The next limit on a server's requests, between 1 and `most`.

    Less when it preempted since the last look, but only once an earlier decrease has taken effect:
    requests in flight stay, and may preempt each other until some have ended. More while its cache
    has room, nothing waits and the limit is reached.
    """
    preempted = (
        now.preemptions - before.preemptions
        if now.preemptions >= before.preemptions
        else now.preemptions
    )
    if preempted:
        return max(1, int(limit * DECREASE)) if now.running <= limit else limit
    if now.cache < CACHE_MARK and not now.waiting and now.running >= limit:
        return min(most, limit + max(1, round(most * INCREASE)))
    return limit


def parse_load(text: str) -> Load | None:
    """Out of a server's /metrics (Prometheus' text); None where one is missing. Engines behind one
    server are summed, their caches averaged."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if match := re.match(r"(vllm:\w+)(?:\{.*\})? (\S+)", line):
            found.setdefault(match[1], []).append(float(match[2]))
    if not all(name in found for name in NAMES.values()):
        return None
    sums = {key: sum(found[name]) for key, name in NAMES.items()}
    engines = len(found[NAMES["cache"]])
    return Load(
        int(sums["running"]),
        int(sums["waiting"]),
        sums["cache"] / engines,
        int(sums["preemptions"]),
    )
