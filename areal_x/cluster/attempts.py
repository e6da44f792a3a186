"""Whether a run that lost its processes goes on."""

from __future__ import annotations

from areal_x.cluster.gang import Lost

STEPS = 10  # losses that are further apart have nothing to do with each other


class Attempts:
    """The losses of a run. most: how many there may be within STEPS steps."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lost_at: list[int] = []  # steps, in the order of the losses
        self._began_at = 0

    def begin(self, step: int) -> int:
        """Records that an attempt begins after this step, and returns it."""
        self._began_at = step
        return step

    def worthwhile(self, lost: Lost, step: int) -> bool:
        """Returns True if the run should continue after a loss. step: the last step that it took.

        A call that raises in the first step of an attempt, or where one raised before, is a mistake
        that the next attempt would repeat.
        """
        repeated = step in self._lost_at or step <= self._began_at
        self._lost_at.append(step)
        recent = [at for at in self._lost_at if at > step - STEPS]
        return (lost.died or not repeated) and len(recent) < self._most
