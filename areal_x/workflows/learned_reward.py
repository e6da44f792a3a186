"""Rewards from a reward model that `recipes.reward_model` trained, for the trajectories of another
workflow.

train.workflow = @learned_reward()
learned_reward.workflow = @single_turn()
learned_reward.path = "runs/judge/checkpoints/100/trainer"
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import gin
import numpy as np

from areal_x.batching.packing import pack
from areal_x.errors import ConfigError, TaskError, positive
from areal_x.hf.model_dir import is_classifier, read_config, resolve
from areal_x.hf.tokenizer import check_tokens
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.protocols.workflow import EpisodeResult, Generator, Workflow
from areal_x.rollout.episode import episode_of
from areal_x.runtime import background, timeline
from areal_x.runtime.waits import waiting, whose
from areal_x.types import Episode, Scored, Task, Trajectory
from areal_x.workflows.wrapper import Wrapper

MAX_BATCH = 256  # trajectories scored in one call


@gin.configurable("learned_reward", denylist=["reward_model"])
@dataclass(frozen=True)
class LearnedReward(Wrapper):
    """Runs another workflow and replaces the reward of each trajectory by a reward model's score at
    its last token.

    The workflow's own reward stays as the detail `verified`, and is the only reward of greedy
    answers in an evaluation: comparing the two shows what the learned reward is worth.
    """

    path: str | Callable[[], str]
    """The reward model, which must have the policy's vocabulary: a directory, a hub name, or a
    function that makes one."""

    backend: str | None = None
    """"jax" or "torch"; None uses the run's backend."""

    row_length: int = 1024
    """Maximum tokens of a trajectory, prompt and answer together; a longer one fails its episode."""

    reward_model: RewardModel | None = None

    def __post_init__(self) -> None:
        positive("learned_reward.row_length", self.row_length)

    def computed_by(self, backend: str) -> LearnedReward:
        return replace(super().computed_by(backend), backend=self.backend or backend)

    def find(self, tokenizer: Any) -> Path:
        """Returns the reward model's directory. tokenizer: the policy's, or None to compare no
        vocabularies.

        Raises: ConfigError for a model without a score head or with another vocabulary.
        """
        directory = resolve(self.path)
        if not is_classifier(read_config(directory)):
            raise ConfigError(
                "learned_reward.path",
                str(directory),
                "a model with a score head, as reward_model trains one",
            )
        if tokenizer is not None:
            check_tokens(
                "learned_reward.path",
                directory,
                tokenizer.get_vocab(),
                "the policy, whose answers it scores",
            )
        return directory

    def setup(self, tokenizer: Any) -> LearnedReward:
        """Loads the reward model. Raises: as `find`."""
        directory = self.find(tokenizer)
        backend = self.backend or min(entry_points(group="areal_x.backends").names)
        config = TrainerConfig(
            model=ModelConfig(path=str(directory)),
            head="reward",
            frozen=True,
            row_length=self.row_length,
        )
        config = replace(config, mesh=config.mesh.within_one_process())
        reward_model = RewardModel(create_trainer(backend, config), self.row_length)
        return replace(super().setup(tokenizer), reward_model=reward_model)

    def greedy(self) -> Workflow:
        """Returns the inner workflow greedily, so that an evaluation uses the verifier's reward."""
        return self.workflow.greedy()

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        assert self.reward_model is not None, "call setup(tokenizer) first"
        episode = episode_of(await self.workflow.run(task, engine))
        if not isinstance(episode.outcome, Scored):
            return episode
        if (longest := max(map(len, episode.trajectories), default=0)) > self.row_length:
            raise TaskError(
                f"a trajectory of {longest} tokens is longer than learned_reward.row_length ="
                f" {self.row_length}"
            )
        scores = await self.reward_model.score(episode.trajectories)
        details = {**episode.outcome.details, "verified": episode.outcome.reward}
        trajectories = tuple(
            replace(t, reward=score) for t, score in zip(episode.trajectories, scores, strict=True)
        )
        return Episode(Scored(float(np.mean(scores)), details), trajectories)

    async def close(self) -> None:
        await super().close()
        if self.reward_model is not None:
            self.reward_model.close()


class RewardModel:
    """Scores trajectories on its own thread; those that wait when the thread becomes free are
    scored in one batch."""

    def __init__(self, model: Trainer, row_length: int) -> None:
        self._model = model
        self._row_length = row_length
        self._queue: list[tuple[Trajectory, asyncio.Future[float]]] = []
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reward model")

    async def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Returns the score of each trajectory at its last token."""
        loop = asyncio.get_running_loop()
        mine = [(trajectory, loop.create_future()) for trajectory in trajectories]
        self._queue += mine
        if self._worker is None or self._worker.done():
            self._worker = background.start(self._score_queue(), "the learned reward")
        with (
            timeline.span("reward", of=whose()),
            waiting(whose(), "the learned reward", lambda: f"{len(self._queue)} trajectories wait"),
        ):
            return list(await asyncio.gather(*(score for _, score in mine)))

    def close(self) -> None:
        """Stops the thread; safe to call twice."""
        if self._worker is not None:
            self._worker.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _score_queue(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            taken = self._queue[:MAX_BATCH]
            self._queue = self._queue[MAX_BATCH:]
            try:
                scores: Sequence[Any] = await loop.run_in_executor(
                    self._thread, self._scores, [t for t, _ in taken]
                )
            except Exception as error:
                for _, future in taken:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), score in zip(taken, scores, strict=True):
                if not future.done():  # its episode may have been cancelled meanwhile
                    future.set_result(float(score))

    def _scores(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        packed = pack(trajectories, self._row_length)
        return [values[-1] for values in packed.gather(self._model.values(packed.batch))]
