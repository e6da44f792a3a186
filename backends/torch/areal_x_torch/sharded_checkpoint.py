"""Checkpoints of which every process writes its own part, in the background, by
torch.distributed.checkpoint; any other mesh reads them.

shards/ holds tensors under the names of transformers' model, in which a mixture's experts are
joined, and an optimizer's under its own, each process's in a safetensors file that says where they
lie: torch's own form has a pickle, which can run any code. What no process holds whole is never
gathered; the price is that only this backend reads it. `Trainer.save` makes of it what every
backend reads.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from areal_x.errors import UserError
from areal_x.hf.model_dir import SHARDS
from areal_x.protocols.trainer import Wait

INDEX = "shapes.json"  # of the whole tensors

# as one process says here
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


def is_sharded(directory: Path) -> bool:
    return (directory / SHARDS["torch"]).is_dir()


def save(directory: Path, tensors: Mapping[str, Tensor], together: bool) -> Wait:
    """Returns as soon as the tensors may change; what it returns waits until all is on disk, and
    raises what went wrong.

    together: whether all processes call both, with parts of the same tensors and a directory that
    all of them see.
    """
    place = directory / SHARDS["torch"]
    writer = _Writer(str(place), save_distributed=True)
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
    reader = dcp.HuggingFaceStorageReader(str(place))
    try:
        shapes = {
            name: tuple(shape) for name, shape in json.loads((place / INDEX).read_text()).items()
        }
        parts: Any = reader.read_metadata().state_dict_metadata
    except Exception as error:
        raise UserError(
            f"{place} is not whole ({_last_line(error)}): copy the checkpoint again"
        ) from error
    for name in sorted({*tensors, *shapes}):
        here = tuple(tensors[name].shape) if name in tensors else None
        if shapes.get(name) != here:
            told = (
                f"its {name} has the shape {shapes[name]}"
                if name in shapes
                else f"it has no {name}"
            )
            raise UserError(
                f"{directory} holds another model or optimizer: {told} where {here or 'none'} is"
                " needed"
            )
        if name not in parts or sum(chunk.sizes.numel() for chunk in parts[name].chunks) != prod(
            shapes[name]
        ):
            raise UserError(
                f"{place} is not whole (a part of {name} is missing): copy the checkpoint again"
            )
    try:
        dcp.load(dict(tensors), storage_reader=reader, **_who(together))
    except (Exception, CheckpointException) as error:
        raise UserError(
            f"{place} cannot be read ({_last_line(error)}): copy the checkpoint again"
        ) from error


class _Writer(dcp.HuggingFaceStorageWriter):
    def finish(self, metadata: dcp.Metadata, results: Any) -> None:
        """The last of all that is written: what the parts make up."""
        shapes = {name: list(x.size) for name, x in metadata.state_dict_metadata.items()}
        (Path(self.path) / INDEX).write_text(json.dumps(shapes))


def _who(together: bool) -> dict[str, Any]:
    return {"process_group": _group()} if together else {"no_dist": True}


@cache
def _group() -> dist.ProcessGroup:
    """A group beside the trainer's: what is agreed on in the background would get into the way of
    its sums."""
    return dist.new_group(backend="gloo")


def _last_line(error: BaseException) -> str:
    """A CheckpointException's lines are tracebacks."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
