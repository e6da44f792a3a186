"""Runs inside the vLLM worker on a CPU: the moment at which vLLM's sampling code can be corrected."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def once_made(correct: Callable[[], None]) -> None:
    """Calls `correct` whenever a sampler of this process was made, if it computes on a CPU. What is to
    be corrected can be imported then, and not before: its kernels depend on the platform."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.sample.sampler import Sampler

    make = Sampler.__init__

    @wraps(make)
    def make_and_correct(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        correct()

    Sampler.__init__ = make_and_correct
