"""The end of a process of Ray together with its node."""

from __future__ import annotations

import os
import time

from areal_x.runtime import background

POLL_SECONDS = 0.5


def end_with_parent() -> None:
    """Ends this process soon after its parent, the node's raylet, has ended.

    Ray itself was seen to take more than 100 seconds for that, in which the process keeps its
    device. PR_SET_PDEATHSIG cannot be used: it fires when the raylet's *thread* that started the
    process ends.
    """
    background.thread(
        _watch, os.getppid(), what="the watch of the node", failed=_end, name="parent"
    )


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def _end(error: BaseException) -> None:
    os._exit(1)
