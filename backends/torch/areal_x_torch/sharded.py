"""Checkpoints of which every process writes its own part, in the background, by torch.distributed.checkpoint; any other mesh
reads them.

shards/ holds tensors under the names of transformers' model, in which a mixture's experts are joined, and an optimizer's under
its own. What no process holds whole is never gathered; the price is that only this backend reads it. `Trainer.save` makes of it
what every backend reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from areal_x.checkpoint import Wait
from areal_x.errors import UserError
from areal_x.model_dir import SHARDS

warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")  # as one process says here


def is_sharded(directory: Path) -> bool:
    return (directory / SHARDS["torch"]).is_dir()


def save(directory: Path, tensors: Mapping[str, Tensor], together: bool) -> Wait:
    """Returns as soon as the tensors may change; what it returns waits until all is on disk, and raises what went wrong.

    together: whether all processes call both, with parts of the same tensors and a directory that all of them see.
    """
    place = directory / SHARDS["torch"]
    writer = dcp.FileSystemWriter(place)
    saving: Any = dcp.async_save(dict(tensors), storage_writer=writer, **_who(together))

    def wait() -> None:
        try:
            saving.result()
        except CheckpointException as error:  # a BaseException, which nobody expects
            raise RuntimeError(f"{place} could not be written: {_last_line(error)}") from error

    return wait


def restore(directory: Path, tensors: Mapping[str, Tensor], together: bool) -> None:
    """Fills the tensors with what `save` wrote, wherever they lie.

    Raises: UserError for those of another model or optimizer, or where a part is missing.
    """
    place = directory / SHARDS["torch"]
    try:
        found: Any = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    except Exception as error:
        raise UserError(f"{place} is not whole ({_last_line(error)}): copy the checkpoint again") from error
    for name in sorted({*tensors, *found}):
        there, here = (tuple(x[name].size if x is found else x[name].shape) if name in x else None for x in (found, tensors))
        if there != here:
            told = f"its {name} has the shape {there}" if there is not None else f"it has no {name}"
            raise UserError(f"{directory} holds another model or optimizer: {told} where {here or 'none'} is needed")
    try:
        dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(place), **_who(together))
    except (Exception, CheckpointException) as error:
        raise UserError(f"{place} cannot be read ({_last_line(error)}): copy the checkpoint again") from error


def _who(together: bool) -> dict[str, Any]:
    return {"process_group": _group()} if together else {"no_dist": True}


@cache
def _group() -> dist.ProcessGroup:
    """A group beside the trainer's: what is agreed on in the background would get into the way of its sums."""
    return dist.new_group(backend="gloo")


def _last_line(error: BaseException) -> str:
    """A CheckpointException's lines are tracebacks."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
