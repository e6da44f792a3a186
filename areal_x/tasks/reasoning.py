"""Tasks that reasoning-gym makes as many of as asked, and its judgement of answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gin

from areal_x.errors import UserError, nearest, positive
from areal_x.types import Task

INSTRUCTION = "Think first, then give the final answer between <answer> and </answer>."


@gin.configurable
def reasoning_gym(
    name: str,
    size: int = 1000,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    instruction: str = INSTRUCTION,
) -> list[Task]:
    """Tasks of one of reasoning-gym's datasets, as messages. Needs the package `reasoning-gym`.

    name: of the dataset, as "leg_counting". size: how many. seed: of all of them; another gives
    other tasks. settings: the dataset's own, by name. instruction: a system message, which should
    ask for <answer>; "" for none. Judged by `reasoning_gym_answer`. Raises: UserError for a name
    that reasoning-gym does not know, and settings that it refuses.
    """
    gym = _package()
    positive("reasoning_gym.size", size)
    if name not in gym.factory.DATASETS:
        raise UserError(
            f"reasoning_gym.name = {name!r} is none of its"
            f" datasets{nearest(name, list(gym.factory.DATASETS))}"
        )
    try:
        dataset = gym.create_dataset(name, size=size, seed=seed, **(settings or {}))
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(
            f"reasoning-gym refuses the settings of {name!r} ({' '.join(str(error).split())})"
        ) from None
    before = [{"role": "system", "content": instruction}] if instruction else []
    return [
        Task(
            f"{name}/{seed}/{number}",
            [*before, {"role": "user", "content": entry["question"]}],
            entry["answer"],
            {"dataset": name, "metadata": entry["metadata"]},
        )
        for number, entry in enumerate(dataset)
    ]


@gin.configurable
def reasoning_gym_answer(task: Task, text: str) -> float:
    """From 0 to 1, as the task's dataset judges what stands last between <answer> and </answer>,
    else the whole text.

    Raises: UserError where reasoning-gym is not installed.
    """
    gym = _package()
    found = gym.utils.extract_answer(text)
    score = gym.get_score_answer_fn(task.metadata["dataset"])
    question = task.prompt[-1]["content"]  # type: ignore[index]
    metadata = task.metadata["metadata"]
    entry = {"question": question, "answer": task.answer, "metadata": metadata}
    return float(score(text.strip() if found is None else found, entry))


def _package() -> Any:
    try:
        import reasoning_gym.factory
        import reasoning_gym.utils
    except ImportError:
        raise UserError(
            "reasoning_gym needs the package reasoning-gym: pip install 'areal-x[environments]'"
        ) from None
    return reasoning_gym
