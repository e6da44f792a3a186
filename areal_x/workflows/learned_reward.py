"""A reward model as the judge: what another workflow answers is scored by a model that
`recipes.reward_model` trained.

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
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.protocols.workflow import EpisodeResult, Generator, Workflow
from areal_x.rollout.episode import episode_of
from areal_x.runtime import background
from areal_x.runtime.waits import waiting, whose
from areal_x.types import Episode, Scored, Task, Trajectory

AT_ONCE = 256  # trajectories scored in one call


@gin.configurable("learned_reward", denylist=["judge"])
@dataclass(frozen=True)
class LearnedReward(Workflow):
    """The episodes of another workflow with a reward model's score of each trajectory, at its last
    token, for its reward.

    workflow: what answers. Its own reward stays as the detail `verified`, and alone judges the
    greedy answers of an evaluation: the two together show what the learned reward is worth. path:
    of the reward model, which must have the policy's tokens: a directory, a hub name or a function
    that makes one. backend: what computes it, "jax" or "torch"; by default what trains the run.
    row_length: the longest prompt and answer together.
    """

    workflow: Workflow
    path: str | Callable[[], str]
    backend: str | None = None
    row_length: int = 1024
    judge: Judge | None = None

    def __post_init__(self) -> None:
        positive("learned_reward.row_length", self.row_length)

    @property
    def open_ended(self) -> bool:  # type: ignore[override]
        return self.workflow.open_ended

    def sampling_params(self) -> SamplingParams | None:
        return self.workflow.sampling_params()

    def wrapped(self) -> Workflow:
        return self.workflow

    def computed_by(self, backend: str) -> LearnedReward:
        return replace(
            self, workflow=self.workflow.computed_by(backend), backend=self.backend or backend
        )

    def find(self, tokenizer: Any) -> Path:
        """The reward model's directory. tokenizer: the policy's, None for a workflow of numbers.
        Raises: ConfigError for a model that gives no rewards, or of other tokens."""
        directory = resolve(self.path)
        if not is_classifier(read_config(directory)):
            raise ConfigError(
                "learned_reward.path",
                str(directory),
                "a model with a score head, as reward_model trains it",
            )
        if tokenizer is not None:
            check_tokens(
                "learned_reward.path",
                directory,
                tokenizer.get_vocab(),
                "the policy, whose answers it reads",
            )
        return directory

    def setup(self, tokenizer: Any) -> LearnedReward:
        """Raises: as `find` does."""
        directory = self.find(tokenizer)
        backend = self.backend or min(entry_points(group="areal_x.backends").names)
        config = TrainerConfig(
            model=ModelConfig(path=str(directory)),
            head="reward",
            frozen=True,
            row_length=self.row_length,
        )
        config = replace(config, mesh=config.mesh.within_one_process())
        judge = Judge(create_trainer(backend, config), self.row_length)
        return replace(self, workflow=self.workflow.setup(tokenizer), judge=judge)

    def greedy(self) -> Workflow:
        """For an evaluation: the inner workflow, with the verifier's reward."""
        return self.workflow.greedy()

    def baseline(self) -> Workflow:
        return replace(self, workflow=self.workflow.baseline())

    def tokens_of(self, task: Task, tokenizer: Any) -> int | None:
        return self.workflow.tokens_of(task, tokenizer)

    def state(self) -> Any:
        return self.workflow.state()

    def restore(self, state: Any) -> None:
        self.workflow.restore(state)

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        assert self.judge is not None, "call setup(tokenizer) first"
        episode = episode_of(await self.workflow.run(task, engine))
        if not isinstance(episode.outcome, Scored):
            return episode
        if (longest := max(map(len, episode.trajectories), default=0)) > self.row_length:
            raise TaskError(
                f"a trajectory of {longest} tokens is longer than learned_reward.row_length ="
                f" {self.row_length}"
            )
        scores = await self.judge.score(episode.trajectories)
        details = {**episode.outcome.details, "verified": episode.outcome.reward}
        trajectories = tuple(
            replace(t, reward=score) for t, score in zip(episode.trajectories, scores, strict=True)
        )
        return Episode(Scored(float(np.mean(scores)), details), trajectories)

    async def close(self) -> None:
        await self.workflow.close()
        if self.judge is not None:
            self.judge.close()


class Judge:
    """Scores trajectories on a thread of its own: all that wait when it becomes free, together."""

    def __init__(self, model: Trainer, row_length: int) -> None:
        self._model, self._row_length = model, row_length
        self._waiting: list[tuple[Trajectory, asyncio.Future[float]]] = []
        self._serving: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge")

    async def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        loop = asyncio.get_running_loop()
        mine = [(trajectory, loop.create_future()) for trajectory in trajectories]
        self._waiting += mine
        if self._serving is None or self._serving.done():
            self._serving = background.start(self._serve(), "the learned reward")
        with waiting(
            whose(), "the learned reward", lambda: f"{len(self._waiting)} trajectories wait"
        ):
            return list(await asyncio.gather(*(score for _, score in mine)))

    def close(self) -> None:
        """Ends the thread; safe to call twice."""
        if self._serving is not None:
            self._serving.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            taken, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
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
                if not future.done():  # whoever asked may have been ended meanwhile
                    future.set_result(float(score))

    def _scores(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        packed = pack(trajectories, self._row_length)
        return [values[-1] for values in packed.gather(self._model.values(packed.batch))]
