"""Model directories in Hugging Face form, and the trainer state that every backend reads and writes
beside them.

A directory that a trainer saves holds config.json, the tokenizer's files and model.safetensors as
Hugging Face names them, so it loads in transformers and vLLM as it is (a critic or a reward model
as a sequence classifier with one label, whose matrix is `score.weight` [1, hidden]);
optimizer.safetensors (the moments of each tensor as `MOMENT.NAME`) and trainer.json (version and
optimizer) make it a checkpoint that any backend can continue. With adapters, what areal_x.hf.adapters
writes stands in place of model.safetensors.

Moments are AdamW's `exp_avg` and `exp_avg_sq`, Muon's `trace` (and AdamW's of what Muon leaves to
it), in the shape of the tensor, and Adafactor's `row` [..., 1] and `column` [1, ...], a vector
being a matrix of one column. Where a backend keeps a state that other backends cannot have, it
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
# the directory that a backend's sharded checkpoint has in place of both
SHARDS = {"jax": "arrays", "torch": "shards"}
ADAPTER_CONFIG = "adapter_config.json"
FILE_BYTES = 4 * 2**30  # of one file: as much as is held in memory to be written
# How the names of architectures end: of a language model, of one that sees, of one that judges.
CAUSAL, CONDITIONAL, CLASSIFIER = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForSequenceClassification",
)
NOT_COPIED = (".safetensors", ".bin", ".pt", ".gguf", ".index.json")


def resolve(path: str | Callable[[], str]) -> Path:
    """The local directory of a model path: made by calling it where it is a function, fetched where
    it is a hub name.

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
        raise UserError(f"{directory} holds adapters and not a whole model: {wanted}")
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
    """Raises: UserError for a file that is no config."""
    return read_object(directory / "config.json")


def read_object(file: Path) -> dict[str, Any]:
    """Of a JSON file. Raises: UserError for one that is not there, cannot be read, or holds
    anything else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): copy it again") from error
    except (ValueError, RecursionError) as error:  # of JSON and of UTF-8
        raise UserError(f"{file} is not JSON ({error}): copy it again, or mend it") from error
    if not isinstance(found, dict):
        raise UserError(
            f"{file} holds a {type(found).__name__} where an object is needed: copy it again, or"
            " mend it"
        )
    return found


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config says of the language model: all of it, or, of most models that see, a part."""
    of_text: Mapping[str, Any] = config.get("text_config") or config
    return of_text


def stem(architecture: str) -> str:
    """An architecture's name without what it is for."""
    return architecture.removesuffix(CAUSAL).removesuffix(CONDITIONAL).removesuffix(CLASSIFIER)


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds adapters in PEFT's form in place of a model's weights."""
    whole = directory / WEIGHTS, directory / f"{WEIGHTS}.index.json"
    return (directory / ADAPTER_CONFIG).is_file() and not any(file.is_file() for file in whole)


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a model of this config has a `score` in place of a language model's head."""
    return any(name.endswith(CLASSIFIER) for name in config.get("architectures") or ())


def check_head(directory: Path, head: str) -> None:
    """Raises: UserError where the model of `directory` cannot be trained with this head ("policy",
    "value" or "reward").

    A causal language model can have any; a sequence classifier has one label and is no policy.
    """
    config = read_config(directory)
    if not is_classifier(config):
        return
    kind = f"{directory} is a {config['architectures'][0]}"
    if head == "policy":
        raise UserError(
            f"{kind}, which judges text and cannot write it: a policy needs a causal language model"
        )
    labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    if labels != 1:
        raise UserError(
            f"{kind} of {labels} labels: the head {head!r} needs a classifier with one, or a causal"
            " language model"
        )


def tensor_files(directory: Path) -> list[Path]:
    """The safetensors files that hold the weights: those that the index names, or the single one,
    whatever its name."""
    files = _files(directory, WEIGHTS)
    return files if files[0].is_file() else sorted(directory.glob("*.safetensors"))


def _files(directory: Path, single: str) -> list[Path]:
    """What `_write_files` wrote under this name: the files that its index names, or it alone."""
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
    """Raises: UserError for a sharded checkpoint, which only the backend that wrote it reads."""
    for backend, name in SHARDS.items():
        if (directory / name).is_dir():
            raise UserError(
                f"{directory} is a sharded checkpoint of the {backend} backend: go on there with"
                " trainer.checkpoint = 'portable', whose next checkpoint every backend reads"
            )


def read_tensors(
    directory: Path, names: Collection[str] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor, or those of these names, under its Hugging Face name, one at a time (bfloat16
    as ml_dtypes' type)."""
    for file in tensor_files(directory):
        yield from read_file(file, names)


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, of which nothing else is read."""
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
    """A model directory with these tensors and the config and tokenizer files of `source`.

    directory: here and below, None writes nothing and goes through the tensors all the same, as it
    takes all processes that share a model to gather them, and one to write. head: with "value" or
    "reward" the config becomes that of a sequence classifier with one label.
    """
    if directory is None:
        return exhaust(tensors)
    copy_other_files(directory, source, head)
    return _write_files(directory, WEIGHTS, tensors, {"format": "pt"})


def exhaust(tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Takes each tensor and forgets it: what a process does that helps another to gather them."""
    for _ in tensors:
        pass


def copy_other_files(directory: Path, source: Path, head: str = "policy") -> None:
    """The config, for this head, and tokenizer files of `source`, without its weights and what a
    trainer left beside them."""
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
    """An optimizer's moments, or its tensors under the names of one backend, and small numbers,
    beside the weights."""
    if directory is None:
        return exhaust(tensors)
    _write_files(directory, MOMENTS, tensors, {})
    return write_trainer_state(directory, state)


def read_moments(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Moments under their names, one at a time."""
    for file in _files(directory, MOMENTS):
        yield from read_file(file)


def write_trainer_state(directory: Path, state: Mapping[str, Any]) -> None:
    """A trainer's small numbers, at least its version and its optimizer."""
    (directory / STATE).write_text(json.dumps(dict(state)))


def read_trainer_state(directory: Path) -> dict[str, Any]:
    """Raises: UserError for a file that cannot be read, or has no version."""
    state = read_object(directory / STATE)
    if not isinstance(state.get("version"), int):
        raise UserError(f"{directory / STATE} has no version: it is no trainer's, or damaged")
    return state


def write_tensors(file: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """One file of tensors that are few enough to be in memory together."""
    from safetensors.numpy import save_file

    save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors},
        file,
        metadata={"format": "pt"},
    )


def read_file(file: Path, names: Collection[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of one file, or those of these names, one at a time."""
    with _opened(file) as opened:
        for name in opened.keys():  # noqa: SIM118 - not a dict
            if names is None or name in names:
                yield name, opened.get_tensor(name)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Raises: UserError for a file that is damaged or cut short, which its length says without a
    tensor being read."""
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
    """The tensors in parts of at most so many bytes, or of one tensor. One at a time is in memory:
    the next one empties it."""
    part: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > most_bytes:
            yield part
            part.clear()
            size = 0
        part[name] = np.ascontiguousarray(tensor)
        size += tensor.nbytes
    yield part


def _write_files(
    directory: Path,
    single: str,
    tensors: Iterable[tuple[str, np.ndarray]],
    metadata: dict[str, str],
) -> None:
    """One file under this name, or, of more than FILE_BYTES, several, and an index that names them.
    A single one has an index too: of a directory without, vLLM reads every safetensors file as
    weights, the optimizer's too."""
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
