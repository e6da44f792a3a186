"""Checks staged weights before an SGLang server reads them.

The server answers "Success" to tensors that it does not know, keeps the old values of those that it
is not given, and dies of a wrong shape. So what is staged must be what the model's own files have.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from areal_x.engines.fleet.failures import ServerRefused
from areal_x.engines.fleet.manifest import header, shards
from areal_x.hf.model_dir import read_config, text_config

HEAD = "lm_head.weight"
# Tensors of old checkpoints that models compute and never read.
COMPUTED = ("rotary_emb.inv_freq",)
SHOWN = 3  # names in a message
Shapes = Mapping[str, tuple[int, ...]]


def check_covers(model: Path, staging_root: Path, folder: Path) -> None:
    """Raises: ServerRefused unless the folder is complete and has the names and shapes of the served
    model's files. Reads headers alone."""
    try:
        staged = shapes_in(shards(str(staging_root), str(folder)))
    except ValueError as error:
        raise ServerRefused(f"the staged weights cannot be loaded: {error}") from error
    served = served_shapes(model)
    optional = {HEAD} if is_tied(model) else set()
    complaints = [
        (served.keys() - staged.keys() - optional, "lack"),
        (staged.keys() - served.keys() - optional, "have, and the model has not,"),
        (
            {name for name, shape in staged.items() if served.get(name, shape) != shape},
            "have other shapes for",
        ),
    ]
    for names, verb in complaints:
        if names:
            some = ", ".join(sorted(names)[:SHOWN])
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise ServerRefused(
                f"the staged weights {verb} {some}{more}: they must have the tensors of {model}"
            )


@cache
def served_shapes(model: Path) -> Shapes:
    """Returns the shapes of the tensors in a model's files, by their names."""
    found = shapes_in(sorted(model.glob("*.safetensors")))
    return {name: shape for name, shape in found.items() if not name.endswith(COMPUTED)}


def shapes_in(files: list[Path]) -> Shapes:
    """Returns the shapes of the tensors in safetensors files, from their headers."""
    found: dict[str, tuple[int, ...]] = {}
    for file in files:
        with file.open("rb") as opened:
            _, entries = header(opened)
        found |= {name: tuple(entry["shape"]) for name, entry in entries.items()}
    return found


def is_tied(model: Path) -> bool:
    """True if the head is the embedding, and need not be among the tensors."""
    config = read_config(model)
    tied = config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings"))
    # The hub's Gemmas leave it to transformers' default, which is theirs.
    return HEAD not in served_shapes(model) if tied is None else bool(tied)
