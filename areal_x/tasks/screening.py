"""Skips tasks whose prompts are too long. Prompts are counted at the start for as long as that is
quick, and the rest when they are sampled.

Whether a task fits depends on the task alone, and each position of the stream has a fixed task. So
the order of tasks is the same however many were counted at the start, and a resumed run skips the
same tasks.
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
SCAN_SECONDS = 10.0  # at the start
# tokens a message: next to a template's own text, a text may be split into other tokens than alone
MARGIN = 8


class Screen:
    """Decides which tasks of a dataset have prompts of at most `longest` tokens.

    setting: the binding that `longest` comes from, and its value, for the error if no task fits.
    left_out: number of times a task was skipped.

    A prompt has at most as many tokens as bytes, plus those of the chat template, so most are known
    to fit without the tokenizer. A task that cannot be counted (it has images, or the workflow
    raises an error) counts as fitting: its episode will report the error.
    """

    def __init__(
        self, tokens_of: TokensOf, longest: int, setting: tuple[str, int] | None = None
    ) -> None:
        self.tokens_of, self.longest = tokens_of, longest
        self.setting = setting or (LONGEST_PROMPT, longest)
        self.left_out = 0
        self._fits: dict[int, bool] = {}  # by index, for tasks whose tokens were counted
        # by the messages' roles
        self._template_tokens: dict[tuple[Any, ...], int | None] = {}

    def scan(self, tasks: Sequence[Task], seconds: float = SCAN_SECONDS) -> str | None:
        """Counts the tasks' prompts for at most `seconds`. Returns a sentence about the tasks that
        are left out, or None if all fit.

        Raises: ConfigError if none fits.
        """
        end = time.monotonic() + seconds
        counted = long = 0
        for index in range(len(tasks)):
            if time.monotonic() > end:
                break
            counted += 1
            long += not self.fits(index, tasks[index])
        if counted and long == counted:
            raise self._no_task_fits(counted)
        rest = (
            ""
            if counted == len(tasks)
            else f"; {len(tasks) - counted:,} more are counted when they are sampled"
        )
        if not long:
            return None
        which = f"{counted:,} tasks" if not rest else f"the first {counted:,} tasks"
        return (
            f"{long:,} of {which} have prompts longer than {self.longest:,} tokens and are left"
            f" out{rest}"
        )

    async def skip_long_prompts(self, stream: TaskStream) -> None:
        """Advances the stream to the next task that fits. Raises: ConfigError if none does."""
        skipped = 0
        while not await self.fits_at(stream):
            stream.position += 1
            self.left_out += 1
            skipped += 1
            if skipped == len(stream.dataset):
                raise self._no_task_fits(skipped)

    async def fits_at(self, stream: TaskStream) -> bool:
        """True if the task at the stream's position fits."""
        index = stream.index_at(stream.position)
        if index in self._fits:
            return self._fits[index]
        task = stream.dataset[index]
        if self._surely_fits(task):
            return True
        return await in_thread(
            self.fits, index, task
        )  # a long prompt must not block the event loop

    def fits(self, index: int, task: Task) -> bool:
        """True if the task, number `index` of the dataset, fits."""
        if index in self._fits:
            return self._fits[index]
        if self._surely_fits(task):
            return True
        tokens = self._count(task)
        self._fits[index] = tokens is None or tokens <= self.longest
        return self._fits[index]

    def _surely_fits(self, task: Task) -> bool:
        try:
            texts = task_texts(task)
        except (AttributeError, TypeError):  # not a valid prompt: the episode will report it
            return True
        if sum(map(len, texts)) > self.longest:  # each character is at least a byte
            return False
        roles = (
            ("",)
            if isinstance(task.prompt, str)
            else tuple(message.get("role") for message in task.prompt)
        )
        if roles not in self._template_tokens:
            self._template_tokens[roles] = self._count(without_text(task))
        template = self._template_tokens[roles]
        if template is None:
            return False
        text_bytes = sum(len(text.encode(errors="replace")) for text in texts)
        return template + MARGIN * len(roles) + text_bytes <= self.longest

    def _no_task_fits(self, tasks: int) -> ConfigError:
        return ConfigError(
            *self.setting,
            f"greater: all {tasks:,} tasks have prompts longer than {self.longest} tokens",
        )

    def _count(self, task: Task) -> int | None:
        try:
            return self.tokens_of(task)
        except Exception:  # a faulty template or task: the episode will raise and report it
            return None


def task_texts(task: Task) -> list[str]:
    """All texts of a task that may be part of its prompt: messages and written answers."""
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


def without_text(task: Task) -> Task:
    """The task with the contents of all messages and answers empty."""
    prompt = (
        ""
        if isinstance(task.prompt, str)
        else [{**message, "content": ""} for message in task.prompt]
    )
    answer = dict.fromkeys(task.answer, "") if isinstance(task.answer, Mapping) else ""
    return replace(task, prompt=prompt, answer=answer)


def create_screen(
    workflow: Any,
    tokenizer: Any,
    longest: int | None,
    context: int,
    binding: str = "train.row_length",
) -> Screen | None:
    """Returns the screen for a workflow's prompts, or None if the workflow cannot count them.

    longest: None for the context minus the workflow's sampling.max_tokens, but at least half the
    context. binding: the setting that `context` comes from.
    """
    innermost = workflow  # a wrapper's episodes begin with the prompts of what it wraps
    while (inner := innermost.wrapped()) is not None:
        innermost = inner
    if not counts_own_prompts(type(innermost)):
        return None
    sampling = workflow.sampling_params()
    answer = 0 if sampling is None else min(sampling.max_tokens, context // 2)
    most = context - answer if longest is None else longest

    def tokens_of(task: Task) -> int | None:
        prompt = (
            [task.prompt] if isinstance(task.prompt, str) else text_length.texts_of(task.prompt)
        )
        try:  # a tokenizer call on a very long text would hold Python's global lock
            text_length.raise_if_too_long(
                lambda piece: len(tokenizer.encode(piece, add_special_tokens=False)), prompt, most
            )
        except PromptTooLong:
            return most + 1
        counted: int | None = workflow.tokens_of(task, tokenizer)
        return counted

    return Screen(tokens_of, most, (binding, context) if longest is None else None)


def scan_dataset(
    tasks: Sequence[Task],
    workflow: Any,
    tokenizer: Any,
    longest: int | None,
    context: int,
    message: Callable[[str], None],
) -> Screen | None:
    """Returns the screen of a run's dataset, after scanning the dataset. `message` is called with
    the sentence about the tasks that are left out.

    Raises: ConfigError if no task fits.
    """
    screen = create_screen(workflow, tokenizer, longest, context)
    if screen is not None and (text := screen.scan(tasks)):
        message(f"{text} ({LONGEST_PROMPT})")
    return screen


def counts_own_prompts(workflow: type) -> bool:
    """True if `tokens_of` describes the workflow's own `run`: a subclass that overrides only `run`
    may begin with other prompts."""

    def definer(name: str) -> type | None:
        return next((c for c in workflow.__mro__ if name in vars(c)), None)

    counting, running = definer("tokens_of"), definer("run")
    return counting is not None and running is not None and issubclass(counting, running)
