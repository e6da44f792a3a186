"""What teachers read, and which of them teaches what: parts of `self_distill` and `multi_distill`.
On the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import gin

from areal_x.errors import UserError
from areal_x.types import Episode, Group, Message, Scored, Task

Prompt = str | Sequence[Message]

HINT = """{prompt}

Here is a reference solution:
{hint}

Now solve the problem yourself, step by step."""


def shown(prompt: Prompt, hint: str, template: str) -> Prompt:
    """Returns the prompt with a hint in its last user message, or in the text that it is. template:
    where {prompt} and {hint} stand."""

    def filled(text: str) -> str:
        # not str.format, which would read braces of the prompt and of the template's other text
        before, _, after = template.partition("{prompt}")
        return before.replace("{hint}", hint) + text + after.replace("{hint}", hint)

    if isinstance(prompt, str):
        return filled(prompt)
    messages = [dict(message) for message in prompt]
    for message in reversed(messages):
        if message.get("role") == "user" and isinstance(message.get("content"), str):
            message["content"] = filled(message["content"])
            return messages
    raise UserError(
        "there is no user message of text that a hint could be added to: give self_distill.context a"
        " function of your own, (task) → prompt"
    )


@gin.configurable(module="contexts")
def solution(task: Task, template: str = HINT, key: str = "") -> Prompt:
    """The teacher reads a reference solution beside the prompt. Source: OPSD, arXiv 2601.18734.

    Args:
        template: What the last user message, or a prompt of plain text, becomes; {prompt} stands for
            it, {hint} for the solution.
        key: The solution is `task.metadata[key]`; "" for the task's answer.

    Raises: UserError for a task without a solution.
    """
    found = task.metadata.get(key) if key else task.answer
    if not isinstance(found, str | int | float):
        where = f"metadata[{key!r}]" if key else "answer"
        raise UserError(
            f"task {task.id!r} has no solution to show its teacher: its {where} is {found!r}, and"
            " contexts.solution wants a text or a number (contexts.solution.key names another place)"
        )
    return shown(task.prompt, str(found), template)


@gin.configurable(module="contexts")
def solved_attempt(
    group: Group, episode: Episode, tokenizer: Any, template: str = HINT, reward: float = 1.0
) -> Prompt | None:
    """The teacher reads another attempt of the group that succeeded, beside the prompt; its own prompt
    if no other did. Needs no solutions. Source: SDPO, arXiv 2601.20802.

    Args:
        template: As that of `solution`.
        reward: The smallest reward of a success.
    """
    for other in group.scored:
        assert isinstance(other.outcome, Scored)
        if other is not episode and other.outcome.reward >= reward and other.trajectories:
            last = other.trajectories[-1]
            text = tokenizer.decode(last.tokens[last.mask].tolist(), skip_special_tokens=True)
            return shown(group.task.prompt, text, template)
    return None


@gin.configurable(module="teachers")
def by_domain(task: Task, key: str = "domain") -> dict[str, float]:
    """One teacher a domain: the one of `train.teachers` that `task.metadata[key]` names.

    Args:
        key: The entry of the task's metadata.

    Raises: UserError for a task without it.
    """
    if key not in task.metadata:
        raise UserError(
            f"task {task.id!r} names no teacher: it has no metadata[{key!r}] (teachers.by_domain.key"
            " names another entry, and multi_distill.weights another rule)"
        )
    return {str(task.metadata[key]): 1.0}


def shares(weights: Mapping[str, float], task: Task) -> dict[str, float]:
    """Returns the weights above 0, divided by their sum.

    Raises: UserError for negative or infinite weights, or none above 0.
    """
    total = sum(weights.values())
    if not all(isfinite(x) and x >= 0 for x in weights.values()) or total <= 0:
        raise UserError(
            f"the weights of the teachers of task {task.id!r} are {dict(weights)}: they must be"
            " finite, at least 0 and not all 0"
        )
    return {name: x / total for name, x in weights.items() if x > 0}
