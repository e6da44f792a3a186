"""What a step of an algorithm would do to each token, against the formulas of its paper."""

from __future__ import annotations

import numpy as np
import pytest

from areal_x.algorithms.recipes import cispo, distill, dr_grpo, grpo, gspo, ppo, rloo
from areal_x.batching.gradients import token_gradients
from areal_x.errors import UserError
from areal_x.types import Episode, Failed, Group, Scored, Task, Trajectory
from tests.thorough import further

REWARDS, LENGTHS = (1.0, 0.0, 0.0), (2, 5, 3)
ADVANTAGES = (np.array(REWARDS) - np.mean(REWARDS)) / (np.std(REWARDS, ddof=1) + 1e-6)


def episode(reward: float, length: int) -> Episode:
    prompt, tokens = np.array([1, 2], np.int32), np.arange(length, dtype=np.int32)
    logprobs = np.linspace(-1, -0.1, length, dtype=np.float32)
    trajectory = Trajectory.from_completion(prompt, tokens, logprobs, np.zeros(length, np.int32), reward)
    return Episode(Scored(reward), (trajectory,))


GROUP = Group(Task("t", ""), 4, 0, (*map(episode, REWARDS, LENGTHS), Episode(Failed("no"))))


def shifted(by: float) -> list[np.ndarray]:
    return [np.where(t.mask, t.logprobs + by, 0).astype(np.float32) for e in GROUP.scored for t in e.trajectories]


def answers(gradients: list[np.ndarray]) -> list[np.ndarray]:
    """Those of the tokens that are trained on; all others must be 0."""
    assert all(not g[:2].any() for g in gradients)
    return [g[2:] for g in gradients]


@pytest.fixture(params=["torch", *further("jax")])
def backend(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(f"areal_x_{request.param}")
    return str(request.param)


def test_a_policy_that_is_not_stale_gets_its_advantages_times_the_weights(backend):
    for g, advantage, length in zip(
        answers(token_gradients(grpo(), [GROUP], backend=backend)), ADVANTAGES, LENGTHS, strict=True
    ):
        assert g == pytest.approx(np.full(length, advantage / (len(LENGTHS) * length)), rel=1e-5)
    dr = answers(token_gradients(dr_grpo(max_tokens=10), [GROUP], backend=backend))
    for g, reward, length in zip(dr, REWARDS, LENGTHS, strict=True):
        assert g == pytest.approx(np.full(length, (reward - np.mean(REWARDS)) / (len(LENGTHS) * 10)), rel=1e-5)


@pytest.mark.parametrize(("by", "kept"), [(0.1, (True, True)), (0.5, (False, True)), (-0.5, (True, False))])
def test_a_clip_cuts_what_is_already_far_in_its_direction(backend, by, kept):
    found = answers(token_gradients(grpo(), [GROUP], shifted(by), backend=backend))
    for i, k in enumerate((kept[0], kept[1], kept[1])):
        expected = ADVANTAGES[i] * np.exp(by) / (len(LENGTHS) * LENGTHS[i]) if k else 0
        assert found[i] == pytest.approx(np.full(LENGTHS[i], expected), rel=1e-4)


def test_corrections_read_the_given_policy(backend):
    """Tokens that the trainer finds twice as likely as the engine did count twice, but no more than the correction's cap."""
    from areal_x.algorithms import corrections

    algorithm = grpo(corrections=corrections.truncated)
    plain = answers(token_gradients(algorithm, [GROUP], backend=backend))
    for by, factor in ((0.5, np.exp(0.5)), (3.0, 2.0)):
        found = answers(token_gradients(algorithm, [GROUP], shifted(by), backend=backend))
        assert [list(x) for x in found] == [pytest.approx(list(factor * x), rel=1e-4) for x in plain]


def test_a_ratio_of_the_sequence_moves_all_of_its_tokens(backend):
    far = shifted(0)
    far[0][2] += 1.0  # one of two tokens: GRPO cuts that one, GSPO the sequence
    assert [bool(x) for x in answers(token_gradients(grpo(), [GROUP], far, backend=backend))[0]] == [False, True]
    assert not answers(token_gradients(gspo(), [GROUP], far, backend=backend))[0].any()
    assert answers(token_gradients(cispo(), [GROUP], far, backend=backend))[0].all()


def test_what_depends_on_another_model_is_refused():
    for algorithm, what in ((ppo(), "values"), (distill(), "teacher"), (grpo(kl_coefficient=0.1), "reference")):
        with pytest.raises(UserError, match=f"{algorithm.name} depends on more .* needs {what}"):
            token_gradients(algorithm, [GROUP])


def test_wrong_logprobs_and_groups_without_any_are_refused():
    with pytest.raises(UserError, match=r"must be 3 arrays, .* tokens: 4, 7, 5"):
        token_gradients(rloo(), [GROUP], shifted(0)[:2])
    with pytest.raises(UserError, match=r"no scored episode"):
        token_gradients(rloo(), [Group(Task("t", ""), 0, 0, (Episode(Failed("no")),))])
