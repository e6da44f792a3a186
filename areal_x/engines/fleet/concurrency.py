"""Adaptive concurrency: how many requests a server should work on, found by trial.

With too many, a server preempts: it drops a request's KV cache and recomputes it later. Too few
leave it idle. How many fit depends on the length of answers, which no setting knows. The limit
follows additive increase, multiplicative decrease, as TCP finds a network's rate (Chiu and Jain,
1989).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

CACHE_MARK = 0.85  # cache use above which the limit does not grow, as requests in flight still do
INCREASE = 1 / 16  # share of `most` that is added per heartbeat
DECREASE = 0.75  # factor after preemptions


@dataclass(frozen=True)
class Load:
    """A server's own metrics."""

    running: int
    waiting: int
    cache: float
    """Share of the KV cache in use, 0 to 1."""
    preemptions: int
    """Count since the server's start."""


def next_limit(limit: int, before: Load, now: Load, most: int) -> int:
    """Returns the next limit on a server's requests, between 1 and `most`.

    It decreases after preemptions, but only once an earlier decrease has taken effect: requests in
    flight stay, and may preempt each other until some have ended. It increases while the cache has
    room, nothing waits and the limit is reached.
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


def parse_load(text: str, names: Mapping[str, str]) -> Load | None:
    """Parses a server's /metrics (Prometheus text format); None if a metric is missing. Several
    engines behind one server are summed, their cache use is averaged.

    names: of the metrics, for each field of Load.
    """
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        if match := re.match(r"(\w+:\w+)(?:\{.*\})? (\S+)", line):
            found.setdefault(match[1], []).append(float(match[2]))
    if not all(name in found for name in names.values()):
        return None
    sums = {key: sum(found[name]) for key, name in names.items()}
    engines = len(found[names["cache"]])
    return Load(
        int(sums["running"]),
        int(sums["waiting"]),
        sums["cache"] / engines,
        int(sums["preemptions"]),
    )
