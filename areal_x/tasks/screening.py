"""Tasks whose prompts are too long are left out: counted at the start as far as that is quick, else
when their turn comes.

Whether a task fits depends on the task alone, and a position of the stream keeps its task. So the
order of what is drawn is the same however much was looked at before, and a resumed run passes by
the same tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from areal_x.errors import ConfigError, PromptTooLong
from areal_x.runtime.thread import in_thread
from areal_x.tasks import text_length
from areal_x.tasks.stream import TaskStream
from areal_x.types import Task

TokensOf = Callable[[Task], int | None]  # see Workflow.tokens_of

LONGEST_PROMPT = "train.longest_prompt"
LOOK_SECONDS = 10.0  # for the look at the start
# tokens a message: text beside a template's own may be split otherwise than the template's alone
MARGIN = 8


class Screen:
    """Which tasks of a dataset begin with at most `longest` tokens. setting: the binding that this
    comes of, and its value, for the error where no task fits. left_out: how often one that does not
    was passed by.

    A prompt has at most as many tokens as bytes, beside those of the chat template. So most are
    known to fit without a tokenizer. A task that cannot be counted (it has images, or it makes the
    workflow raise) is drawn: its episode shows why.
    """

    def __init__(
        self, tokens_of: TokensOf, longest: int, setting: tuple[str, int] | None = None
    ) -> None:
        self.tokens_of, self.longest = tokens_of, longest
        self.setting = setting or (LONGEST_PROMPT, longest)
        self.left_out = 0
        self._fits: dict[int, bool] = {}  # by index, of those whose tokens were counted
        # tokens of the chat template, by the messages' roles
        self._around: dict[tuple[Any, ...], int | None] = {}

    def look(self, tasks: Sequence[Task], seconds: float = LOOK_SECONDS) -> str | None:
        """Looks at the tasks for so long. A sentence about those that are left out, None where all
        fit.

        Raises: ConfigError where none fits.
        """
        end = time.monotonic() + seconds
        looked = long = 0
        for index in range(len(tasks)):
            if time.monotonic() > end:
                break
            looked += 1
            long += not self.fits(index, tasks[index])
        if looked and long == looked:
            raise self._none_fits(looked)
        rest = (
            ""
            if looked == len(tasks)
            else f"; {len(tasks) - looked:,} more are looked at when they are drawn"
        )
        if not long:
            return None
        which = f"{looked:,} tasks" if not rest else f"the first {looked:,} tasks"
        return (
            f"{long:,} of {which} have prompts longer than {self.longest:,} tokens and are left"
            f" out{rest}"
        )

    async def pass_by(self, stream: TaskStream) -> None:
        """Moves the stream on to the next task that fits. Raises: ConfigError where none does."""
        passed = 0
        while not await self.fits_at(stream):
            stream.position += 1
            self.left_out += 1
            passed += 1
            if passed == len(stream.dataset):
                raise self._none_fits(passed)

    async def fits_at(self, stream: TaskStream) -> bool:
        index = stream.index_at(stream.position)
        if index in self._fits:
            return self._fits[index]
        task = stream.dataset[index]
        if self._surely_fits(task):
            return True
        return await in_thread(self.fits, index, task)  # no prompt's length may hold up the loop

    def fits(self, index: int, task: Task) -> bool:
        """index: of the task in the dataset."""
        if index in self._fits:
            return self._fits[index]
        if self._surely_fits(task):
            return True
        tokens = self._counted(task)
        self._fits[index] = tokens is None or tokens <= self.longest
        return self._fits[index]

    def _surely_fits(self, task: Task) -> bool:
        try:
            texts = texts_of(task)
        except (AttributeError, TypeError):  # a prompt that is none
            return True
        if sum(map(len, texts)) > self.longest:  # a byte or more each
            return False
        roles = (
            ("",)
            if isinstance(task.prompt, str)
            else tuple(message.get("role") for message in task.prompt)
        )
        if roles not in self._around:
            self._around[roles] = self._counted(emptied(task))
        around = self._around[roles]
        if around is None:
            return False
        return (
            around + MARGIN * len(roles) + sum(len(text.encode(errors="replace")) for text in texts)
            <= self.longest
        )

    def _none_fits(self, tasks: int) -> ConfigError:
        return ConfigError(
            *self.setting,
            f"greater: all {tasks:,} tasks have prompts longer than {self.longest} tokens",
        )

    def _counted(self, task: Task) -> int | None:
        try:
            return self.tokens_of(task)
        except Exception:  # of a template, of a task: the episode meets it again and says so
            return None


def texts_of(task: Task) -> list[str]:
    """All text of a task that an episode may begin with."""
    contents = (
        [task.prompt]
        if isinstance(task.prompt, str)
        else [message.get("content") for message in task.prompt]
    )
    parts = [
        part
        for content in contents
        for part in ([content] if isinstance(content, str) else content or ())
    ]
    answers = list(task.answer.values()) if isinstance(task.answer, Mapping) else [task.answer]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in (*parts, *answers)]
    return [text for text in texts if isinstance(text, str)]


def emptied(task: Task) -> Task:
    """The task with the same messages and answers, all of them empty."""
    prompt = (
        ""
        if isinstance(task.prompt, str)
        else [{**message, "content": ""} for message in task.prompt]
    )
    answer = dict.fromkeys(task.answer, "") if isinstance(task.answer, Mapping) else ""
    return replace(task, prompt=prompt, answer=answer)


def screen_of(
    workflow: Any,
    tokenizer: Any,
    longest: int | None,
    context: int,
    binding: str = "train.row_length",
) -> Screen | None:
    """None where a workflow does not know what its episodes begin with. longest: by default what
    leaves room for an answer in `context`: of the workflow's sampling.max_tokens, but at most half
    of it. binding: of the context."""
    if not counts_its_own(type(workflow)):
        return None
    sampling = getattr(workflow, "sampling", None)
    answer = 0 if sampling is None else min(sampling.max_tokens, context // 2)
    most = context - answer if longest is None else longest

    def tokens_of(task: Task) -> int | None:
        prompt = (
            [task.prompt] if isinstance(task.prompt, str) else text_length.texts_of(task.prompt)
        )
        try:  # a tokenizer's call on all of a long text would hold Python's lock
            text_length.raise_if_too_long(
                lambda piece: len(tokenizer.encode(piece, add_special_tokens=False)), prompt, most
            )
        except PromptTooLong:
            return most + 1
        counted: int | None = workflow.tokens_of(task, tokenizer)
        return counted

    return Screen(tokens_of, most, (binding, context) if longest is None else None)


def screened(
    tasks: Sequence[Task],
    workflow: Any,
    tokenizer: Any,
    longest: int | None,
    context: int,
    message: Callable[[str], None],
) -> Screen | None:
    """The screen of a run's dataset, after its look at it. message: told what is left out. Raises
    what `Screen.look` does."""
    screen = screen_of(workflow, tokenizer, longest, context)
    if screen is not None and (text := screen.look(tasks)):
        message(f"{text} ({LONGEST_PROMPT})")
    return screen


def counts_its_own(workflow: type) -> bool:
    """Whether `tokens_of` is of the class whose `run` it speaks of, and not of one that this was
    overridden in."""

    def definer(name: str) -> type | None:
        return next((c for c in workflow.__mro__ if name in vars(c)), None)

    counting, running = definer("tokens_of"), definer("run")
    return counting is not None and running is not None and issubclass(counting, running)
