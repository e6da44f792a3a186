"""The warm start of every tiny example: a random model, fine-tuned once on demonstrations and
cached."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from areal_x import Batch, at_least, within
from examples.tiny.cached import made_once
from examples.tiny.supervised import installed, supervise


def supervised_model(
    name: str,
    settings: Mapping[str, Any],
    *,
    write: Callable[[Path], object],
    batches: Callable[[Path], Iterable[Batch]],
    code: Sequence[ModuleType],
    backend: str,
    share: str | None = None,
    binding: str | None = None,
) -> str:
    """Returns the directory of the fine-tuned model, from $XDG_CACHE_HOME/areal_x/NAME if it was
    already made with the same settings and code.

    Args:
        name: The example, and its directory in the cache.
        settings: The arguments of the example's `warm_start` on which the model depends, with
            `seed`, `steps` and `learning_rate`.
        write: Fills a directory with a model of random weights.
        batches: The training batches, given the directory of that model.
        code: The modules on which the model depends, besides those of every tiny model.
        backend: The backend that trains; if it is not installed, another one that is.
        share: The setting that must be between 0 and 1, if there is one.
        binding: The gin module of `warm_start` if it is not `name`, for error messages.

    Raises: ConfigError for fewer than 2 steps, or a share outside [0, 1].
    """
    parameter = f"{binding or name}.warm_start"
    at_least(f"{parameter}.steps", settings["steps"], 2)
    if share is not None:
        within(f"{parameter}.{share}", settings[share], 0, 1)

    def make(directory: Path) -> None:
        write(directory)
        supervise(
            directory,
            batches(directory),
            backend=installed(backend),
            seed=settings["seed"],
            learning_rate=settings["learning_rate"],
        )

    return str(made_once(name, settings, [sys.modules[__name__], *code], make))
