"""Model directories in Hugging Face form, and the trainer state that every backend reads and writes
beside them.

A directory that a trainer saves contains config.json, the tokenizer's files and model.safetensors
under Hugging Face's names, so it loads in transformers and vLLM as it is (a critic or a reward
model as a sequence classifier with one label, whose matrix is `score.weight` [1, hidden]).
optimizer.safetensors (the moments of each tensor as `MOMENT.NAME`) and trainer.json (version and
optimizer) make it a checkpoint that any backend can continue. With adapters, the files of
areal_x.hf.adapters take the place of model.safetensors.

Moments are AdamW's `exp_avg` and `exp_avg_sq`, Muon's `trace` (and AdamW's for the tensors that
Muon leaves to it), in the shape of the tensor, and Adafactor's `row` [..., 1] and `column` [1,
...], where a vector is a matrix of one column. A backend whose state other backends cannot read
writes it under names of its own, and trainer.json names the "backend".
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.errors import UserError
from areal_x.runtime.command import command_of

WEIGHTS = "model.safetensors"
MOMENTS = "optimizer.safetensors"
STATE = "trainer.json"
# the directory that replaces both files in a backend's sharded checkpoint
SHARDS = {"jax": "arrays", "torch": "shards"}
ADAPTER_CONFIG = "adapter_config.json"
FILE_BYTES = 4 * 2**30  # largest file, and most memory that writing one takes
# Suffixes of architecture names: language model, vision-language model, classifier.
CAUSAL, CONDITIONAL, CLASSIFIER = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForSequenceClassification",
)
NOT_COPIED = (".safetensors", ".bin", ".pt", ".gguf", ".index.json")


def resolve(path: str | Callable[[], str]) -> Path:
    """The local directory of a model path: a function is called to make it, and a hub name is
    downloaded.

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
    if is_adapter(directory):
        wanted = (
            f"merge them into a plain model with `{command_of('export')} {directory} DIRECTORY`,"
            " and give that"
        )
        raise UserError(f"{directory} contains adapters and not a whole model: {wanted}")
    if not (directory / "config.json").is_file():
        raise UserError(
            f"{directory} has no config.json: model.path must be a Hugging Face model directory"
        )
    if not any(directory.glob("*.safetensors")):
        raise UserError(
            f"{directory} has no *.safetensors weights: save the model in Hugging Face form"
            " (save_pretrained) first"
        )
    return directory


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"])
        )
    except Exception as error:
        wanted = "check the name and the network, or give a directory"
        raise UserError(
            f"model.path = {name!r} could not be fetched from the hub ({type(error).__name__}):"
            f" {wanted}"
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    """Reads config.json. Raises: UserError for a file that is not a JSON object."""
    return read_object(directory / "config.json")


def read_object(file: Path) -> dict[str, Any]:
    """Reads the object in a JSON file. Raises: UserError for a file that is missing, cannot be read
    or contains anything else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): copy it again") from error
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8
        raise UserError(f"{file} is not JSON ({error}): copy it again, or repair it") from error
    if not isinstance(found, dict):
        raise UserError(
            f"{file} contains a {type(found).__name__} instead of an object: copy it again, or"
            " repair it"
        )
    return found


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: for most vision-language models a part, else all of
    it."""
    text: Mapping[str, Any] = config.get("text_config") or config
    return text


def stem(architecture: str) -> str:
    """An architecture's name without the suffix for its task."""
    return architecture.removesuffix(CAUSAL).removesuffix(CONDITIONAL).removesuffix(CLASSIFIER)


def is_adapter(directory: Path) -> bool:
    """True if a directory contains adapters in PEFT's form instead of a model's weights."""
    weights = directory / WEIGHTS, directory / f"{WEIGHTS}.index.json"
    return (directory / ADAPTER_CONFIG).is_file() and not any(file.is_file() for file in weights)


def is_classifier(config: Mapping[str, Any]) -> bool:
    """True if a model of this config has a `score` matrix instead of a language model's head."""
    return any(name.endswith(CLASSIFIER) for name in config.get("architectures") or ())


def check_head(directory: Path, head: str) -> None:
    """Checks that the model of `directory` can be trained with this head ("policy", "value" or
    "reward").

    A causal language model can have any; a sequence classifier must have one label, and cannot be a
    policy.

    Raises: UserError.
    """
    config = read_config(directory)
    if not is_classifier(config):
        return
    kind = f"{directory} is a {config['architectures'][0]}"
    if head == "policy":
        raise UserError(
            f"{kind}, which classifies text and cannot generate it: a policy needs a causal"
            " language model"
        )
    labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    if labels != 1:
        raise UserError(
            f"{kind} with {labels} labels: the head {head!r} needs a classifier with one, or a"
            " causal language model"
        )


def tensor_files(directory: Path) -> list[Path]:
    """The safetensors files of the weights: those that the index names, or the single file, or all
    that there are."""
    files = _files(directory, WEIGHTS)
    return files if files[0].is_file() else sorted(directory.glob("*.safetensors"))


def _files(directory: Path, single: str) -> list[Path]:
    """The files that `_write_files` wrote under this name: those that its index names, or the
    single one."""
    index = directory / f"{single}.index.json"
    if not index.is_file():
        return [directory / single]
    names = read_object(index).get("weight_map")
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(name, str) for name in names.values())
    ):
        raise UserError(f"{index} has no weight_map from tensors to files: copy the model again")
    files = sorted({directory / name for name in names.values()})
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise UserError(
            f"{directory} lacks the files {', '.join(missing)} that {index.name} names: copy the"
            " model again"
        )
    return files


def check_portable(directory: Path) -> None:
    """Raises: UserError for a sharded checkpoint, which only the backend that wrote it can read."""
    for backend, name in SHARDS.items():
        if (directory / name).is_dir():
            raise UserError(
                f"{directory} is a sharded checkpoint of the {backend} backend: resume there with"
                " trainer.checkpoint = 'portable', whose next checkpoint every backend can read"
            )


def read_tensors(
    directory: Path, names: Collection[str] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every tensor, or those of these names, under its Hugging Face name, one at a time
    (bfloat16 as ml_dtypes' type)."""
    for file in tensor_files(directory):
        yield from read_file(file, names)


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, read without the tensors."""
    found: dict[str, tuple[int, ...]] = {}
    for file in tensor_files(directory):
        with _opened(file) as opened:
            found |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - not a dict
    return found


def write_model(
    directory: Path | None,
    source: Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    head: str = "policy",
) -> None:
    """Writes a model directory with these tensors and the config and tokenizer files of `source`.

    directory: here and below, None writes nothing but still iterates over the tensors, because
    gathering them takes all processes that share a model, and writing them takes one. head: with
    "value" or "reward", the config becomes that of a sequence classifier with one label.
    """
    if directory is None:
        return exhaust(tensors)
    copy_other_files(directory, source, head)
    return _write_files(directory, WEIGHTS, tensors, {"format": "pt"})


def write_whole(
    directory: Path,
    source: Path,
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    head: str = "policy",
) -> None:
    """Writes a model directory as `write_model` does, completely or not at all, in the place of an
    earlier one."""
    directory = directory.absolute()
    unfinished = directory.with_name(f".{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        write_model(unfinished, source, tensors, head=head)
        shutil.rmtree(directory, ignore_errors=True)
        unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def exhaust(tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Iterates over the tensors and discards them, as a process does that helps another to gather
    them."""
    for _ in tensors:
        pass


def copy_other_files(directory: Path, source: Path, head: str = "policy") -> None:
    """Copies the config, adapted to this head, and the tokenizer's files of `source`, without the
    weights and the trainer's state."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        copied = not file.name.endswith(NOT_COPIED) and file.name not in (STATE, ADAPTER_CONFIG)
        if file.is_file() and copied and source != directory:
            shutil.copy2(file, directory / file.name)
    if head != "policy":
        (directory / "config.json").write_text(
            json.dumps(_as_classifier(read_config(directory)), indent=2)
        )


def _as_classifier(config: Mapping[str, Any]) -> dict[str, Any]:
    names = [stem(name) + CLASSIFIER for name in config.get("architectures") or ()]
    one_label = {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {**config, "architectures": names, **one_label}


def write_optimizer_state(
    directory: Path | None, tensors: Iterable[tuple[str, np.ndarray]], state: Mapping[str, Any]
) -> None:
    """Writes an optimizer's moments, or its tensors under one backend's own names, and
    trainer.json, beside the weights."""
    if directory is None:
        return exhaust(tensors)
    _write_files(directory, MOMENTS, tensors, {})
    return write_trainer_state(directory, state)


def read_moments(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the optimizer's tensors under their names, one at a time."""
    for file in _files(directory, MOMENTS):
        yield from read_file(file)


def write_trainer_state(directory: Path, state: Mapping[str, Any]) -> None:
    """Writes trainer.json: at least the trainer's version and its optimizer."""
    (directory / STATE).write_text(json.dumps(dict(state)))


def read_trainer_state(directory: Path) -> dict[str, Any]:
    """Reads trainer.json. Raises: UserError for a file that cannot be read or has no version."""
    state = read_object(directory / STATE)
    if not isinstance(state.get("version"), int):
        raise UserError(
            f"{directory / STATE} has no version: it was not written by a trainer, or is damaged"
        )
    return state


def contiguous(x: np.ndarray) -> np.ndarray:
    """Returns the same array in one piece, also one of no axes, which numpy's function gives an axis."""
    return np.ascontiguousarray(x).reshape(x.shape)


def write_tensors(file: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes one file of tensors that fit into memory together."""
    from safetensors.numpy import save_file

    save_file(
        {name: contiguous(tensor) for name, tensor in tensors},
        file,
        metadata={"format": "pt"},
    )


def read_file(file: Path, names: Collection[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of one file, or those of these names, one at a time."""
    with _opened(file) as opened:
        for name in opened.keys():  # noqa: SIM118 - not a dict
            if names is None or name in names:
                yield name, opened.get_tensor(name)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opens a safetensors file. Raises: UserError for one that is damaged or truncated, which its
    length shows before any tensor is read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            yield opened
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} is not a whole safetensors file ({error}): copy it again"
        ) from error


def in_chunks(
    tensors: Iterable[tuple[str, np.ndarray]], most_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the tensors in dicts of at most `most_bytes`, or of one tensor. Only one dict is in
    memory at a time: the next iteration clears it."""
    part: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > most_bytes:
            yield part
            part.clear()
            size = 0
        part[name] = contiguous(tensor)
        size += tensor.nbytes
    yield part


def _write_files(
    directory: Path,
    single: str,
    tensors: Iterable[tuple[str, np.ndarray]],
    metadata: dict[str, str],
) -> None:
    """Writes one file under this name, or several if there are more than FILE_BYTES, and an index
    that names them. A single file gets an index too: without one, vLLM loads every safetensors file
    of a directory as weights, the optimizer's included."""
    from safetensors.numpy import save_file

    stem = single.removesuffix(".safetensors")
    parts: list[tuple[Path, list[str]]] = []
    total = 0
    for part in in_chunks(tensors, FILE_BYTES):
        parts.append((directory / f"{stem}-{len(parts) + 1:05d}.safetensors", list(part)))
        save_file(part, parts[-1][0], metadata=metadata or None)
        total += sum(tensor.nbytes for tensor in part.values())
    weight_map: dict[str, str] = {}
    for number, (file, names) in enumerate(parts, 1):
        name = single if len(parts) == 1 else f"{stem}-{number:05d}-of-{len(parts):05d}.safetensors"
        weight_map |= dict.fromkeys(names, file.rename(directory / name).name)
    index = directory / f"{single}.index.json"
    index.write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    )
