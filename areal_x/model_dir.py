"""Model directories in Hugging Face form, and the trainer state that every backend reads and writes beside them.

A directory that a trainer saves holds config.json, the tokenizer's files and model.safetensors as Hugging Face names them, so
it loads in transformers and vLLM as it is; optimizer.safetensors (AdamW's moments as `exp_avg.NAME` and `exp_avg_sq.NAME`) and
trainer.json (version and optimizer step) make it a checkpoint that any backend can continue.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.errors import UserError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MOMENTS = "optimizer.safetensors"
STATE = "trainer.json"
FIRST, SECOND = "exp_avg.", "exp_avg_sq."  # AdamW's two moments of the tensor whose name follows
NOT_COPIED = (".safetensors", ".bin", ".pt", ".gguf", ".index.json")


def resolve(path: str | Callable[[], str]) -> Path:
    """The local directory of a model path: made by calling it where it is a function, fetched where it is a hub name.

    Raises: UserError naming what is missing (the directory, config.json, the weights).
    """
    if callable(path):
        path = path()
    directory = Path(path).expanduser()
    if not directory.is_dir():
        if directory.is_absolute() or path.count("/") != 1 or path.startswith("."):
            wanted = "give a Hugging Face model directory or a hub name like 'Qwen/Qwen3-0.6B'"
            raise UserError(f"model.path = {path!r} is not a directory: {wanted}")
        directory = _download(path)
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} has no config.json: model.path must be a Hugging Face model directory")
    if not any(directory.glob("*.safetensors")):
        raise UserError(
            f"{directory} has no *.safetensors weights: save the model in Hugging Face form (save_pretrained) first"
        )
    return directory


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]))
    except Exception as error:
        wanted = "check the name and the network, or give a directory"
        raise UserError(
            f"model.path = {name!r} could not be fetched from the hub ({type(error).__name__}): {wanted}"
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


def tensor_files(directory: Path) -> list[Path]:
    """The safetensors files that hold the weights: those that the index names, or the single one."""
    index = directory / INDEX
    if not index.is_file():
        return [directory / WEIGHTS] if (directory / WEIGHTS).is_file() else sorted(directory.glob("*.safetensors"))
    files = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise UserError(f"{directory} lacks the weight files {', '.join(missing)} that {INDEX} names: copy the model again")
    return files


def read_tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor under its Hugging Face name, one at a time (bfloat16 as ml_dtypes' type)."""
    for file in tensor_files(directory):
        yield from _read_file(file)


def write_model(directory: Path, source: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """A model directory with these tensors and the config and tokenizer files of `source`."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(NOT_COPIED) and file.name != STATE and source != directory:
            shutil.copy2(file, directory / file.name)
    _write_file(directory / WEIGHTS, tensors, {"format": "pt"})


def write_state(directory: Path, moments: Iterable[tuple[str, np.ndarray, np.ndarray]], state: Mapping[str, Any]) -> None:
    """The optimizer's moments (name, first, second) and small numbers (version, step), beside the weights."""
    named = (pair for name, first, second in moments for pair in ((FIRST + name, first), (SECOND + name, second)))
    _write_file(directory / MOMENTS, named, {})
    (directory / STATE).write_text(json.dumps(dict(state)))


def read_moments(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Moments under `exp_avg.NAME` and `exp_avg_sq.NAME`, one at a time."""
    yield from _read_file(directory / MOMENTS)


def read_state(directory: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((directory / STATE).read_text())
    return state


def _read_file(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as opened:
        for name in opened.keys():  # noqa: SIM118 - not a dict
            yield name, opened.get_tensor(name)


def _write_file(file: Path, tensors: Iterable[tuple[str, np.ndarray]], metadata: dict[str, str]) -> None:
    from safetensors.numpy import save_file

    save_file({name: np.ascontiguousarray(x) for name, x in tensors}, file, metadata=metadata or None)
