"""Writes a checkpoint as a plain Hugging Face model.

    python -m areal_x.export runs/arithmetic-lora-1 my-model
    python -m areal_x.export runs/arithmetic-lora-1/checkpoints/50 my-model

The first argument is a run, whose newest checkpoint is used, a checkpoint, the trainer's directory
in one, or an adapter that PEFT saved. Adapters are merged into their base model, which must still be
where it was; the optimizer's state is left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from areal_x.errors import UserError
from areal_x.hf import adapters, model_dir
from areal_x.run import checkpoint
from areal_x.runtime.command import command_of, in_this_form


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 after one sentence about a mistake."""
    parser = argparse.ArgumentParser(
        prog=command_of("export"),
        description=in_this_form(str(__doc__), "export"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("directory", metavar="DIRECTORY", type=Path)
    options = parser.parse_args(arguments)
    try:
        export(options.checkpoint, options.directory)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"model: {options.directory}")
    return 0


def export(source: Path, directory: Path) -> None:
    """Writes the model of a run, a checkpoint or a trainer's directory, completely or not at all, with
    one tensor in memory at a time.

    Raises: UserError if there is no checkpoint, if `directory` exists, or if the adapters' base
    model has changed.
    """
    source = find(source)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(f"{directory} exists and is not overwritten: choose another directory")
    model_dir.check_portable(source)
    model_dir.write_whole(directory, files_of(source), tensors_of(source))


def files_of(source: Path) -> Path:
    """Returns the directory of the model's config and tokenizer: of an adapter of PEFT's, its base's."""
    if (source / "config.json").is_file() or not model_dir.is_adapter(source):
        return source
    return model_dir.resolve(adapters.read_config(source)["base_model_name_or_path"])


def tensors_of(source: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a trainer's directory, with adapters merged, one at a time. Raises: as
    `export`."""
    if not model_dir.is_adapter(source):
        return model_dir.read_tensors(source)
    found = adapters.read_config(source)
    base = model_dir.resolve(found["base_model_name_or_path"])
    of_trainer = (source / model_dir.STATE).is_file()
    if of_trainer and model_dir.read_trainer_state(source).get("base") != adapters.fingerprint(
        base
    ):
        raise UserError(
            f"{base} is not the base model with which the adapters of {source} were trained: restore"
            " that model there"
        )
    model_type = model_dir.read_config(base)["model_type"]
    return adapters.merge(model_dir.read_tensors(base), adapters.read(source), found, model_type)


def find(source: Path) -> Path:
    """Returns the trainer's directory of a run, of a checkpoint, or the directory itself.

    Raises: UserError for anything else, and for a damaged checkpoint.
    """
    if (source / "checkpoints").is_dir():
        _, source, _ = checkpoint.newest(source)  # verifies its digests
    else:
        for place in (source, source.parent):  # a checkpoint, or the trainer's directory in one
            if (place / checkpoint.MANIFEST).exists() and (damage := checkpoint.find_damage(place)):
                raise UserError(f"{place} is damaged ({damage}): use another checkpoint")
    if (source / "trainer").is_dir():
        source = source / "trainer"
    if not (source / model_dir.STATE).is_file() and not model_dir.is_adapter(source):
        raise UserError(
            f"{source} is neither a run nor a checkpoint: name runs/NAME or runs/NAME/checkpoints/STEP"
        )
    return source


if __name__ == "__main__":
    sys.exit(main())
