"""Checkpoints of which every device writes its own part in the background, by orbax; any other mesh
reads them.

arrays/ holds parameters and moments under the names of this backend's trees. Nothing is ever
gathered, so that saving a large model takes as long as a small one if devices grow with it; the
price is that only this backend can read it. `Trainer.save` with trainer.checkpoint = "portable"
converts it into what every backend reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from jax.tree_util import keystr, tree_flatten_with_path

from areal_x.errors import UserError
from areal_x.hf.model_dir import SHARDS
from areal_x.protocols.trainer import Wait
from areal_x_jax.parameters import Params

PLACE = SHARDS["jax"]


def save(directory: Path, params: Params, moments: Any) -> Wait:
    """Starts to write the arrays and returns once they may be donated; the result waits until
    everything is on disk, and raises what went wrong.

    Every process calls both; the directory is visible to all of them.
    """
    import orbax.checkpoint.experimental.v1 as orbax

    wait: Wait = orbax.save_async(
        directory / PLACE, _named({"params": params, "moments": moments})
    ).result
    return wait


def restore(
    directory: Path, params: Params, shardings: Params, moments: Any, moment_shardings: Any
) -> tuple[Params, Any]:
    """Returns parameters and moments as `save` wrote them, with the dtypes and shapes of the given
    ones and these shardings.

    Raises: UserError for those of another model or optimizer, or if a part is missing.
    """
    import orbax.checkpoint.experimental.v1 as orbax

    state, shardings = (
        {"params": params, "moments": moments},
        {"params": shardings, "moments": moment_shardings},
    )
    wanted = jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, shardings
    )
    named = _named(wanted)
    try:
        found = orbax.metadata(directory / PLACE).metadata
        if found is None:  # orbax has logged why
            raise FileNotFoundError("a part is missing")
    except Exception as error:  # orbax and tensorstore raise errors of many types
        raise UserError(
            f"{directory / PLACE} is not whole ({_first_line(error)}): copy the checkpoint again"
        ) from error
    for name in sorted(set(named) | set(found)):
        there, here = (tuple(x[name].shape) if name in x else None for x in (found, named))
        if there != here:
            found_shape = (
                f"its {name} has the shape {there}" if there is not None else f"it has no {name}"
            )
            raise UserError(
                f"{directory} holds another model or optimizer: {found_shape} where {here or 'none'} is"
                " needed"
            )
    try:
        read = orbax.load(directory / PLACE, named)
    except Exception as error:
        raise UserError(
            f"{directory / PLACE} cannot be read ({_first_line(error)}): copy the checkpoint again"
        ) from error
    paths, tree = tree_flatten_with_path(wanted)
    whole: dict[str, Any] = jax.tree.unflatten(tree, [read[_name(path)] for path, _ in paths])
    return whole["params"], whole["moments"]


def _named(tree: Any) -> dict[str, Any]:
    """Returns one dict of leaves: how orbax treats tuple types depends on its release."""
    return {_name(path): x for path, x in tree_flatten_with_path(tree)[0]}


def _name(path: Any) -> str:
    return keystr(path, simple=True, separator=".")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
