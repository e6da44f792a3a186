"""LoRA adapters in PEFT's files. An adapted tensor is the base's plus the product of two low-rank
matrices.

A trainer with adapters saves adapter_config.json and adapter_model.safetensors instead of the
model's weights, beside the base's config.json and tokenizer. PEFT and vLLM load them as they are.
Source: arXiv 2106.09685.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import LoRAConfig

CONFIG, WEIGHTS = model_dir.ADAPTER_CONFIG, "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # PEFT's prefix to the names of a model's modules
BLOCKS = 64  # blocks that the fingerprint reads of a file of weights
BLOCK_BYTES = 2**16

Tensors = Iterable[tuple[str, np.ndarray]]


def write(
    directory: Path, tensors: Tensors, *, config: LoRAConfig, base: Path, head: str = "policy"
) -> None:
    """Writes an adapter in PEFT's form. tensors: under PEFT's names; a `score` among them is
    trained in full."""
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "policy" else "SEQ_CLS",
        "base_model_name_or_path": str(base.absolute()),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": sorted(config.targets),
        "modules_to_save": None if head == "policy" else ["score"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(settings, indent=2))
    model_dir.write_tensors(directory / WEIGHTS, tensors)


def read(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the adapter's tensors under PEFT's names."""
    return model_dir.read_file(directory / WEIGHTS)


def merge(base: Tensors, adapter: Tensors, scale: float) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of the merged model, one at a time: base + scale · B @ A, computed in fp32
    and converted to the base's type.

    A `score` of the adapter replaces the base's, or its language-model head."""
    parts = {_within(name.removeprefix(PEFT_PREFIX)): x.astype(np.float32) for name, x in adapter}
    score = parts.pop("score.weight", None)
    for name, tensor in base:
        module = _within(name).removesuffix(".weight")
        if score is not None and module in ("score", "lm_head"):
            continue
        if f"{module}.lora_A.weight" in parts:
            a, b = parts[f"{module}.lora_A.weight"], parts[f"{module}.lora_B.weight"]
            tensor = (tensor.astype(np.float32) + np.float32(scale) * (b @ a)).astype(tensor.dtype)
        yield name, tensor
    if score is not None:
        yield "score.weight", score


def _within(name: str) -> str:
    """Returns a tensor's name in the language model: those of multimodal models have other prefixes
    in files ("language_model.model.") than in memory, which PEFT's names follow."""
    return re.sub(r"^(?:model\.|language_model\.)+", "", name)


def check_saved(directory: Path, config: LoRAConfig, base: Path) -> None:
    """Raises: UserError for a checkpoint that a trainer of this config and base cannot resume."""
    saved = model_dir.is_adapter(directory)
    if not saved and not config.rank:
        return
    if not saved or not config.rank:
        content = "adapters" if saved else "no adapters"
        raise UserError(
            f"{directory} contains {content} and cannot be resumed with lora.rank = {config.rank}:"
            " resume with the settings that it was saved with"
        )
    found = read_config(directory)
    ours = {"rank": config.rank, "alpha": config.alpha, "targets": tuple(sorted(config.targets))}
    theirs = {
        "rank": found["r"],
        "alpha": found["lora_alpha"],
        "targets": tuple(sorted(found["target_modules"])),
    }
    for name, value in theirs.items():
        if value != ours[name]:
            raise UserError(
                f"{directory} contains adapters of lora.{name} = {value!r} and cannot be resumed"
                f" with lora.{name} = {ours[name]!r}: set lora.{name} = {value!r}"
            )
    if model_dir.read_trainer_state(directory)["base"] != fingerprint(base):
        raise UserError(
            f"{directory} contains adapters of another model than {base}: set model.path to the one"
            f" that they were trained on, which was {found['base_model_name_or_path']}"
        )


def fingerprint(directory: Path) -> str:
    """A digest of evenly spaced blocks of each file of weights, which identifies a model. Reading
    all of a large model would take minutes."""
    digest = hashlib.sha256()
    for file in model_dir.tensor_files(directory):
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            for start in np.linspace(0, max(size - BLOCK_BYTES, 0), BLOCKS, dtype=np.int64):
                opened.seek(int(start))
                digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()


def read_config(directory: Path) -> dict[str, Any]:
    """Reads adapter_config.json. Raises: UserError if it lacks the base, the rank or alpha."""
    found = model_dir.read_object(directory / CONFIG)
    if missing := [
        name for name in ("base_model_name_or_path", "r", "lora_alpha") if name not in found
    ]:
        raise UserError(f"{directory / CONFIG} has no {missing[0]}: copy it again")
    return found
