"""Checkpoints of which every device writes its own part in the background, by orbax; any other mesh
reads them.

arrays/ holds parameters and moments under the names of this backend's trees. Nothing is ever
gathered, so that saving a large model takes as long as a small one if devices grow with it; the
price is that only this backend can read it. `Trainer.save` with trainer.checkpoint = "portable"
converts it into what every backend reads.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path
from jaxtyping import Array

from areal_x.errors import UserError
from areal_x.hf.model_dir import SHARDS
from areal_x.protocols.trainer import Wait
from areal_x_jax.architecture import Architecture
from areal_x_jax.optimizers import parameter_path
from areal_x_jax.parameters import Params
from areal_x_jax.stack_order import in_model_order, stored, stored_order

PLACE = SHARDS["jax"]
STAGES = "stages"  # of the mesh that wrote the arrays: `Architecture.stages`; absent for (…, 1)


def save(directory: Path, arch: Architecture, params: Params, moments: Any) -> Wait:
    """Starts to write the arrays and returns once they may be donated; the result waits until
    everything is on disk, and raises what went wrong.

    arch: of what is trained; stacks are written in its order. Every process calls both; the directory
    is visible to all of them.
    """
    import orbax.checkpoint.experimental.v1 as orbax

    arrays = _named({"params": params, "moments": moments})
    if arch.stages[1] > 1:
        arrays[STAGES] = np.array(arch.stages, np.int32)
    wait: Wait = orbax.save_async(directory / PLACE, arrays).result
    return wait


def restore(
    directory: Path,
    arch: Architecture,
    params: Params,
    shardings: Params,
    moments: Any,
    moment_shardings: Any,
) -> tuple[Params, Any]:
    """Returns parameters and moments as `save` wrote them, with the dtypes and shapes of the given
    ones and these shardings, and stacks in the order of `arch`, whatever that of the mesh before.

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
    if STAGES in found:
        named[STAGES] = np.zeros(2, np.int32)
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
    stages, groups = np.asarray(read.get(STAGES, (1, 1))).tolist()
    before = replace(arch, stages=(stages, groups))

    def in_order(path: Any, x: Any) -> Any:
        own = parameter_path(path)
        own = own[1:] if own[:1] == ("params",) else own
        if stored_order(before, own) == stored_order(arch, own):
            return x
        order = partial(_reordered, before=before, arch=arch, path=own)
        return jax.jit(order, donate_argnums=0, out_shardings=x.sharding)(x)

    paths, tree = tree_flatten_with_path(wanted)
    leaves = [in_order(path, read[_name(path)]) for path, _ in paths]
    whole: dict[str, Any] = jax.tree.unflatten(tree, leaves)
    return whole["params"], whole["moments"]


def _reordered(x: Array, before: Architecture, arch: Architecture, path: tuple[str, ...]) -> Array:
    found: Array = stored(arch, path, in_model_order(before, path, x))
    return found


def _named(tree: Any) -> dict[str, Any]:
    """Returns one dict of leaves: how orbax treats tuple types depends on its release."""
    return {_name(path): x for path, x in tree_flatten_with_path(tree)[0]}


def _name(path: Any) -> str:
    return keystr(path, simple=True, separator=".")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
