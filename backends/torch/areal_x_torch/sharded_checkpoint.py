"""Checkpoints of which every process writes its own part in the background, by
torch.distributed.checkpoint; any other mesh reads them.

shards/ holds tensors under the names of transformers' model, in which a mixture's experts are
joined, and an optimizer's under its own, each process's in a safetensors file that records their
places: torch's own form contains a pickle, which can run any code. Nothing is ever gathered; the
price is that only this backend can read it. `Trainer.save` converts it into what every backend
reads.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
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

# torch warns so in a single process.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


def save(directory: Path, tensors: Mapping[str, Tensor], together: bool) -> Wait:
    """Starts to write the tensors and returns once they may change; the result waits until
    everything is on disk, and raises what went wrong.

    together: True if all processes call both, with parts of the same tensors and a directory that
    is visible to all of them.
    """
    place = directory / SHARDS["torch"]
    writer = _Writer(str(place), save_distributed=True)
    saving: Any = dcp.async_save(dict(tensors), storage_writer=writer, **_who(together))

    def wait() -> None:
        try:
            saving.result()
        except CheckpointException as error:  # a BaseException, which callers do not expect
            raise RuntimeError(f"{place} could not be written: {_last_line(error)}") from error

    return wait


def restore(
    directory: Path,
    tensors: Mapping[str, Tensor],
    together: bool,
    elsewhere: Mapping[str, Sequence[int]],
) -> None:
    """Fills the tensors with what `save` wrote, whatever their shardings.

    elsewhere: shapes of the tensors that only other processes have. Raises: UserError for those of
    another model or optimizer, or if a part is missing.
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
    needed = {name: tuple(x.shape) for name, x in tensors.items()}
    needed |= {name: tuple(shape) for name, shape in elsewhere.items()}
    for name in sorted({*needed, *shapes}):
        here = needed.get(name)
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
        """Writes the shapes of the whole tensors, last of all."""
        shapes = {name: list(x.size) for name, x in metadata.state_dict_metadata.items()}
        (Path(self.path) / INDEX).write_text(json.dumps(shapes))


def _who(together: bool) -> dict[str, Any]:
    return {"process_group": _group()} if together else {"no_dist": True}


@cache
def _group() -> dist.ProcessGroup:
    """Returns a group beside the trainer's: background communication would interfere with its
    collectives."""
    return dist.new_group(backend="gloo")


def _last_line(error: BaseException) -> str:
    """The last line of an error; a CheckpointException's others are tracebacks."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
