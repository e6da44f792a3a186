"""Turns a workflow's result into an episode, and decides which of its exceptions end the run.

An exception fails the episode that raised it. An EngineError or a UserError ends the run, even
inside an exception group; a TaskError, which concerns one task, does not.
"""

from __future__ import annotations

import asyncio
import math

import numpy as np

from areal_x.errors import TaskError, UserError, described, traceback_of
from areal_x.protocols.engine import EngineError
from areal_x.protocols.workflow import EpisodeResult, Generator, Workflow
from areal_x.rollout.time_limits import TimeLimits
from areal_x.runtime.waits import waiting, whose
from areal_x.types import NOT_THE_POLICY, Episode, Failed, Outcome, Scored, Task, TimedOut


async def run_episode(
    workflow: Workflow,
    task: Task,
    engine: Generator,
    seconds: float | None,
    row_length: int | None = None,
    together: int = 1,
    limits: TimeLimits | None = None,
) -> Episode:
    """Runs one episode, for at most `seconds`, and returns its outcome. row_length: of the rows that
    it is trained in, None if it is not trained on. together: see `check_fit`. limits: stops the clock
    while the engine sleeps.

    Raises only what ends the run: EngineError, UserError and cancellation, unwrapped from exception
    groups.
    """
    try:
        async with (limits or TimeLimits()).limited(seconds) as limit:
            with waiting(
                whose(), "its workflow", type(workflow).__name__, idle=workflow.open_ended
            ):
                result = await workflow.run(task, engine)
        episode = episode_of(result)
        if row_length is not None:
            check_fit(episode, row_length, together)
            check_kept(episode, workflow)
        return episode
    except TaskError as error:
        return Episode(failed_by(error))
    except (EngineError, UserError):
        raise
    except BaseExceptionGroup as errors:
        if not isinstance(errors, Exception) or ends_run(first := first_of(errors)):
            raise first_of(errors) from errors
        return Episode(failed_by(first))
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise
        return Episode(
            Failed("CancelledError: something that the episode was waiting for was cancelled")
        )
    except SystemExit as error:  # raised by the workflow's code: uncaught it ends the event loop
        return Episode(failed_by(error))
    except Exception as error:
        if isinstance(error, TimeoutError) and seconds is not None and limit.expired():
            return Episode(TimedOut(seconds))
        return Episode(failed_by(error))


def failed_by(error: BaseException) -> Failed:
    return Failed(described(error), traceback_of(error))


def ends_run(error: BaseException) -> bool:
    """True if an exception ends the run, not only the episode that raised it."""
    return isinstance(error, EngineError | UserError) and not isinstance(error, TaskError)


def check_fit(episode: Episode, row_length: int, together: int) -> None:
    """Raises: TaskError if trajectories that share a row have more tokens than the row. together:
    how many of the episode's trajectories share one."""
    lengths = [len(trajectory) for trajectory in episode.trajectories]
    longest = max(
        (sum(lengths[i : i + together]) for i in range(0, len(lengths), together)), default=0
    )
    if longest > row_length:
        what = "a trajectory" if together == 1 else f"a set of {together} trajectories"
        raise TaskError(
            f"{what} of {longest} tokens does not fit into a row: raise train.row_length ="
            f" {row_length}"
        )


def check_kept(episode: Episode, workflow: Workflow) -> None:
    """Raises: UserError for tokens that were sampled with truncation and do not tell what it kept:
    a trainer would compare them with whole distributions."""
    sampling = workflow.sampling_params()
    if sampling is None or not sampling.truncates:
        return
    for trajectory in episode.trajectories:
        sampled = trajectory.mask & (trajectory.versions != NOT_THE_POLICY)
        if trajectory.kept is None and sampled.any():
            raise UserError(
                f"{type(workflow).__name__} samples with sampling.top_p, top_k or min_p, but its"
                " trajectories do not hold what they kept: pass kept = completion.kept to"
                " Trajectory.from_completion"
            )


def episode_of(result: EpisodeResult) -> Episode:
    """Returns a workflow's result as an episode. Raises TypeError or ValueError for one that cannot
    be trained on."""
    if isinstance(result, Failed | TimedOut):
        return Episode(result)
    if isinstance(result, Episode):
        if isinstance(result.outcome, Scored) and not math.isfinite(result.outcome.reward):
            raise ValueError(
                f"an episode needs a finite reward, but the workflow returned"
                f" {result.outcome.reward}"
            )
        episode = result
    else:
        trajectories = tuple(result)
        if not trajectories:
            raise ValueError("the workflow returned no trajectory")
        rewards = [trajectory.reward for trajectory in trajectories]
        finite = [
            float(reward) for reward in rewards if reward is not None and math.isfinite(reward)
        ]
        if len(finite) < len(rewards):
            raise ValueError(
                f"every trajectory needs a finite reward, but the workflow returned {rewards}"
            )
        episode = Episode(Scored(sum(finite) / len(finite)), trajectories)
    for trajectory in episode.trajectories:
        if not len(trajectory):
            raise ValueError("the workflow returned a trajectory without tokens")
        if trajectory.token_rewards is not None and not np.isfinite(trajectory.token_rewards).all():
            raise ValueError("the workflow returned token rewards that are not finite")
        if trajectory.credit is not None and not np.isfinite(trajectory.credit).all():
            raise ValueError("the workflow returned token credits that are not finite")
    return episode


def error_of(outcome: Outcome) -> str | None:
    """Returns why the episode has no reward, or None if it was scored."""
    match outcome:
        case Failed(error=error):
            return error
        case TimedOut(seconds):
            return f"ended after {seconds:g} seconds"
        case _:
            return None


def first_of(error: BaseException) -> BaseException:
    """Returns the error itself, unwrapped from the exception groups of task groups: one that ends
    the run if there is any."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    inner = [first_of(one) for one in error.exceptions]
    return next((one for one in inner if not isinstance(one, Exception) or ends_run(one)), inner[0])
