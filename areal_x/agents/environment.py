"""Environments with text observations and text actions, in the style of Gymnasium: the model acts
turn by turn.

    train.workflow = @environment()
    environment.make = @my_game           # a function, or the name of a Gymnasium environment
    train.dataset = @environment_tasks()  # one task per seed
    credit.how = "given"                  # each turn is trained on its own reward

The user's messages are the observations, the model's replies are the actions. The reward of an
environment step is credited to the turn that took it (see areal_x.agents.chat.credit); the
episode's reward is their sum.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gin

from areal_x.agents.chat.calls import Call
from areal_x.agents.chat.credit import Credit, episode_of_calls
from areal_x.agents.chat.dialogue import ChatEngine, Dialogue
from areal_x.agents.chat.rendering import Renderer, TemplateRenderer
from areal_x.agents.multi_turn import next_reply, was_aborted
from areal_x.errors import UserError, at_least, positive, sentence
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.workflow import EpisodeResult, Generator, Workflow
from areal_x.runtime.thread import OneThread
from areal_x.types import Message, Scored, Task
from areal_x.workflows.single_turn import ABORTED, with_end

ReadAction = Callable[[str], Any]


@gin.configurable("environment", denylist=["renderer"])
@dataclass(frozen=True)
class Environment(Workflow):
    """One episode of an environment, in which each turn is one reply of the model.

    The task's `metadata` may hold a "seed" and "options" for `reset`; its prompt, if not empty,
    precedes the first observation. An episode also ends, with the rewards so far, when the
    conversation has no room for another reply.
    """

    make: Callable[..., Any] | str
    """A function that returns an environment with Gymnasium's `reset` and `step`, or the name of a
    registered one ("module:Name-v0" also imports the module), which needs the package `gymnasium`.
    """
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for `make`."""
    read_action: ReadAction | None = None
    """Converts the model's text to the action that `step` takes; by default the text itself. If it
    raises ValueError, the model reads the message and the turn passes without a step."""
    turns: int = 20
    """Most turns."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How replies are sampled; the model's end tokens are added to its stop tokens."""
    instructions: str = ""
    """A system message that comes first."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the chat template, such as {"enable_thinking": False}."""
    credit: Credit = field(default_factory=Credit)
    """How the reward is credited to each turn's tokens."""
    renderer: Renderer | None = None

    def __post_init__(self) -> None:
        if not (callable(self.make) or (isinstance(self.make, str) and self.make)):
            raise UserError(
                f"environment.make = {self.make!r} cannot work: it must be a function (in gin"
                " `@name`, without parentheses) or the name of a Gymnasium environment"
            )
        if self.read_action is not None and not callable(self.read_action):
            raise UserError(
                f"environment.read_action = {self.read_action!r} cannot work: it must be a function"
                " (in gin `@name`)"
            )
        at_least("environment.turns", self.turns, 1)

    def setup(self, tokenizer: Any) -> Environment:
        """Raises: UserError for a tokenizer without a chat template or an end token, and if
        Gymnasium is not installed."""
        if isinstance(self.make, str):
            _gymnasium()
        return replace(
            self, sampling=with_end(self.sampling, tokenizer), renderer=TemplateRenderer(tokenizer)
        )

    def greedy(self) -> Environment:
        return replace(self, sampling=replace(self.sampling, temperature=0.0))

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        assert self.renderer is not None, "call setup(tokenizer) first"
        dialogue = Dialogue(
            ChatEngine(self.renderer, engine), self.sampling, template=self.template
        )
        # one per episode: some environments must stay on the thread that made them
        thread = OneThread("areal-x environment")
        world: Any = None
        try:
            world = await thread.run(self._made)
            options = {
                name: task.metadata[name] for name in ("seed", "options") if name in task.metadata
            }
            shown = await thread.run(lambda: text_of(world.reset(**options)[0]))
            return await self._play(task, dialogue, world, thread, shown)
        finally:
            if close := getattr(world, "close", None):
                thread.run_unobserved(close)
            thread.close()

    async def _play(
        self, task: Task, dialogue: Dialogue, world: Any, thread: OneThread, shown: str
    ) -> EpisodeResult:
        messages = opening_messages(self.instructions, task.prompt, shown)
        rewards: list[float] = []
        refused = 0
        over = False
        room = True
        while len(rewards) < self.turns and not over:
            reply = await next_reply(dialogue, messages)
            if reply is None:
                room = False
                break
            if was_aborted(dialogue):
                return ABORTED
            try:
                action = await thread.run(self._action, reply.content or "")
            except ValueError as error:
                rewards.append(0.0)
                refused += 1
                messages = [{"role": "user", "content": sentence(error)}]
                continue
            shown, reward, over = await thread.run(take_step, world, action)
            rewards.append(reward)
            messages = [{"role": "user", "content": shown}]
        details = {
            "turns": len(rewards),
            "refused_actions": refused,
            "ended": float(over),
            "had_room": float(room),
        }
        return episode_of_calls(
            with_rewards(dialogue.calls, rewards), Scored(sum(rewards), details), self.credit
        )

    def _action(self, text: str) -> Any:
        return text if self.read_action is None else self.read_action(text)

    def _made(self) -> Any:
        if isinstance(self.make, str):
            return _gymnasium().make(self.make, **self.options)
        return self.make(**self.options)


def opening_messages(
    instructions: str, prompt: str | Sequence[Message], observation: str
) -> list[Message]:
    """Returns the first messages: instructions, the task's prompt, and the first observation."""
    before: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(prompt, str):
        shown = f"{prompt}\n\n{observation}" if prompt else observation
        return [*before, {"role": "user", "content": shown}]
    return [*before, *prompt, {"role": "user", "content": observation}]


def with_rewards(calls: Sequence[Call], rewards: Sequence[float]) -> list[Call]:
    """Returns each call with its turn's reward."""
    return [replace(call, reward=reward) for call, reward in zip(calls, rewards, strict=True)]


def take_step(world: Any, action: Any) -> tuple[str, float, bool]:
    """Returns the observation of a step, its reward, and True if it was the last."""
    observation, reward, terminated, truncated, _ = world.step(action)
    return text_of(observation), float(reward), bool(terminated or truncated)


def text_of(observation: Any) -> str:
    return (
        observation
        if isinstance(observation, str)
        else json.dumps(observation, ensure_ascii=False, default=str)
    )


@gin.configurable
def environment_tasks(size: int = 1000, seed: int = 0, prompt: str = "") -> list[Task]:
    """Returns tasks for `environment`, each with its own seed for the environment's `reset`. The
    episodes of one task start alike, so that they can be compared.

    Args:
        size: Number of tasks.
        seed: The first task's seed; the others follow consecutively.
        prompt: Text before the first observation.
    """
    positive("environment_tasks.size", size)
    return [
        Task(f"seed/{number}", prompt, metadata={"seed": number})
        for number in range(seed, seed + size)
    ]


def _gymnasium() -> Any:
    try:
        import gymnasium
    except ImportError:
        raise UserError(
            "an environment given by name needs gymnasium: pip install 'areal-x[environments]'"
        ) from None
    return gymnasium
