"""Multi-turn workflows: repeated attempts with feedback in between, and tool use.

    train.workflow = @multi_turn()
    multi_turn.reward = @arithmetic.verify
    multi_turn.turns = 3

docs/agents.md describes the trajectories that a conversation becomes, and how its reward is
credited to its turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import gin

from areal_x.agents.chat.credit import Credit, episode_of_calls
from areal_x.agents.chat.dialogue import ChatEngine, Dialogue
from areal_x.agents.chat.parsing import Reply
from areal_x.agents.chat.rendering import PlainRenderer, Renderer, TemplateRenderer, Unrenderable
from areal_x.agents.tools.toolbox import PythonExecutor, Toolbox
from areal_x.errors import at_least, within
from areal_x.protocols.engine import PromptTooLong
from areal_x.protocols.workflow import EpisodeResult, Generator
from areal_x.runtime.hosts import Hosts
from areal_x.runtime.thread import in_thread
from areal_x.types import Failed, Message, Outcome, Scored, Task
from areal_x.workflows.single_turn import ABORTED, RewardedWorkflow, prompt_tokens

Feedback = str | Callable[[Task, str, float], str]


@gin.configurable("multi_turn", denylist=["tokenizer", "pool"])
@dataclass(frozen=True)
class MultiTurn(RewardedWorkflow):
    """Tries again after feedback, until an answer is right or no attempt is left. The reward is
    that of the last attempt.

    A task's messages go through the model's chat template. A task's plain text is continued as it
    is: answers and feedback are concatenated, so feedback must include its own leading and trailing
    spaces.
    """

    binding: ClassVar[str] = "multi_turn"

    turns: int = 2
    """Most attempts."""
    feedback: Feedback = "That is not right. Try again."
    """The user's message after a wrong attempt: a text, or a function (task, text, reward) -> text,
    which runs on a thread of this process."""
    enough: float = 1.0
    """An attempt whose reward is at least this is right, and the last one."""
    discount_turns: float = 1.0
    """The reward is multiplied by this for each attempt after the first; between 0 and 1."""
    credit: Credit = field(default_factory=Credit)
    """How the reward is credited to each attempt's tokens."""
    template: Mapping[str, Any] | None = None
    """More variables of the chat template, such as {"enable_thinking": False}."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("multi_turn.turns", self.turns, 1)
        within("multi_turn.discount_turns", self.discount_turns, 0, 1)

    def tokens_of(self, task: Task, tokenizer: Any) -> int | None:
        return prompt_tokens(task.prompt, tokenizer)

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        renderer: Renderer = PlainRenderer(self.tokenizer)
        messages = opening_messages(task)
        if not isinstance(task.prompt, str):
            renderer = TemplateRenderer(self.tokenizer)
        dialogue = Dialogue(ChatEngine(renderer, engine), self.sampling, template=self.template)
        outcome: Outcome = ABORTED
        tries = 0
        while tries < self.turns:
            if await next_reply(dialogue, messages) is None:
                break
            if was_aborted(dialogue):
                return ABORTED
            text = dialogue.text
            outcome = await self.score(task, text)
            tries += 1
            if not isinstance(outcome, Scored) or outcome.reward >= self.enough:
                break
            feedback = self.feedback
            if not isinstance(feedback, str):
                feedback = await in_thread(feedback, task, text, outcome.reward)
            messages = [{"role": "user", "content": feedback}]
        if isinstance(outcome, Scored):
            details = {**outcome.details, "tries": tries}
            outcome = Scored(outcome.reward * self.discount_turns ** (tries - 1), details)
        return episode_of_calls(dialogue.calls, outcome, self.credit)


@gin.configurable("tool_use", denylist=["tokenizer", "pool", "toolbox"])
@dataclass(frozen=True)
class ToolUse(RewardedWorkflow):
    """Answers with the help of tools: calls the tools that a reply asks for and shows their
    results, until a reply calls none.

    The calls of one reply run concurrently. The chat template must support tools. A task's plain
    text becomes the user's message. The reward scores the last reply.
    """

    binding: ClassVar[str] = "tool_use"

    tools: Sequence[Any] = ()
    """Functions (see areal_x.agents.tools.toolbox.tool_of), python_executor, calculator,
    mcp_server, or objects with a name, a schema and a coroutine call(arguments)."""
    max_turns: int = 8
    """Most replies; the last one is scored even if it calls a tool."""
    tool_seconds: float = 30.0
    """Timeout of a tool call, after which the model reads that the tool did not answer."""
    result_characters: int = 16_000
    """Most characters of a tool's result that the model sees."""
    credit: Credit = field(default_factory=Credit)
    """How the reward is credited to each reply's tokens."""
    template: Mapping[str, Any] | None = None
    """More variables of the chat template, such as {"enable_thinking": False}."""
    toolbox: Toolbox | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("tool_use.max_turns", self.max_turns, 1)

    def setup(self, tokenizer: Any) -> Self:
        """Raises: UserError for invalid tools, and as `single_turn` does."""
        toolbox = Toolbox(self.tools, self.tool_seconds, self.result_characters)
        return replace(super().setup(tokenizer), toolbox=toolbox)

    def on_hosts(self, hosts: Hosts) -> Self:
        tools = [x.on_hosts(hosts) if isinstance(x, PythonExecutor) else x for x in self.tools]
        toolbox = Toolbox(tools, self.tool_seconds, self.result_characters)
        return replace(super().on_hosts(hosts), toolbox=toolbox)

    def tokens_of(self, task: Task, tokenizer: Any) -> int | None:
        return prompt_tokens(opening_messages(task), tokenizer)

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        assert self.toolbox is not None, "call setup(tokenizer) first"
        await self.toolbox.setup()
        chat = ChatEngine(TemplateRenderer(self.tokenizer), engine)
        dialogue = Dialogue(chat, self.sampling, tools=self.toolbox.schemas, template=self.template)
        messages = opening_messages(task)
        called = 0
        for turn in range(self.max_turns):
            try:
                reply = await next_reply(dialogue, messages)
            except Unrenderable as error:
                if turn == 0:
                    raise
                return Failed(f"{error}")  # caused by the tool calls of the model
            if reply is None:
                break
            if was_aborted(dialogue):
                return ABORTED
            if not reply.tool_calls:
                break
            if turn < self.max_turns - 1:
                called += len(reply.tool_calls)
                messages = await self._results(reply)
        outcome = await self.score(task, dialogue.text)
        if isinstance(outcome, Scored):
            details = {**outcome.details, "turns": len(dialogue.calls), "tool_calls": called}
            outcome = Scored(outcome.reward, details)
        return episode_of_calls(dialogue.calls, outcome, self.credit)

    async def close(self) -> None:
        await super().close()
        if self.toolbox is not None:
            await self.toolbox.close()

    async def _results(self, reply: Reply) -> list[Message]:
        assert self.toolbox is not None
        results = await asyncio.gather(
            *(self.toolbox.call(call.name, call.arguments) for call in reply.tool_calls)
        )
        return [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result}
            for call, result in zip(reply.tool_calls, results, strict=True)
        ]


def opening_messages(task: Task) -> list[Message]:
    """Returns the first messages of a conversation about a task."""
    return (
        [{"role": "user", "content": task.prompt}]
        if isinstance(task.prompt, str)
        else list(task.prompt)
    )


async def next_reply(dialogue: Dialogue, messages: Sequence[Message]) -> Reply | None:
    """Returns the reply, or None if a conversation that already has a reply no longer fits into the
    engine's context."""
    try:
        return await dialogue.say(*messages)
    except PromptTooLong:
        if dialogue.latest is None:
            raise
        return None


def was_aborted(dialogue: Dialogue) -> bool:
    return dialogue.latest is not None and dialogue.latest.completion.finish_reason == "abort"
