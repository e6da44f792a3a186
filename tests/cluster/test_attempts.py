"""Whether a run that lost its processes goes on."""

from __future__ import annotations

import pytest

from areal_x.cluster.attempts import STEPS, Attempts
from areal_x.cluster.gang import Lost, loss_behind

DIED, RAISED = Lost("rank 1 is gone", died=True), Lost("rank 1 failed", died=False)


def test_three_losses_within_ten_steps_end_a_run():
    attempts = Attempts(3)
    assert [attempts.worthwhile(DIED, step) for step in (4, 8, 12)] == [True, True, False]


def test_losses_far_apart_do_not():
    attempts = Attempts(2)
    assert all(attempts.worthwhile(DIED, step) for step in range(0, 10 * STEPS, STEPS))


@pytest.mark.parametrize("lost, again", [(DIED, True), (RAISED, False)])
def test_what_raises_in_the_first_step_of_an_attempt_would_raise_again(lost, again):
    attempts = Attempts(3)
    attempts.begin(7)
    assert attempts.worthwhile(lost, 7) is again


@pytest.mark.parametrize("lost, again", [(DIED, True), (RAISED, False)])
def test_what_raises_at_the_same_step_again_is_no_accident(lost, again):
    attempts = Attempts(3)
    assert attempts.worthwhile(RAISED, 7)
    attempts.begin(3)
    assert attempts.worthwhile(lost, 7) is again


def test_a_loss_is_found_behind_its_consequences():
    error = RuntimeError("the engine failed")
    error.__cause__ = OSError("its sampler failed")
    assert loss_behind(error) is None
    error.__cause__.__cause__ = DIED
    assert loss_behind(error) is DIED
