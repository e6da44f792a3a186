"""LoRA's files, in the form of PEFT, and what they say of a model: a tensor of the base plus the
product of two narrow ones.

A trainer with adapters saves adapter_config.json and adapter_model.safetensors in place of the
model's weights, beside the base's config.json and tokenizer. PEFT and vLLM load them as they are.
Source: arXiv 2106.09685.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import LoRAConfig

CONFIG, WEIGHTS = model_dir.ADAPTER_CONFIG, "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # what PEFT puts before the names of a model's parts
BLOCKS, BLOCK = 64, 2**16  # of a file of weights, that tell one model from another

Tensors = Iterable[tuple[str, np.ndarray]]


def write(
    directory: Path, tensors: Tensors, *, config: LoRAConfig, base: Path, head: str = "policy"
) -> None:
    """An adapter in PEFT's form. tensors: under PEFT's names; a `score` among them is trained in
    full."""
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
    """The adapter's tensors under PEFT's names."""
    return model_dir.read_file(directory / WEIGHTS)


def merge(base: Tensors, adapter: Tensors, scale: float) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of one plain model: base + scale · B @ A, computed in fp32 and given in the
    base's type, one at a time.

    A score among the adapter's replaces the base's, and a head that writes."""
    parts = {name.removeprefix(PEFT_PREFIX): x.astype(np.float32) for name, x in adapter}
    score = parts.pop("score.weight", None)
    for name, tensor in base:
        module = name.removesuffix(".weight")
        if score is not None and module in ("score", "lm_head"):
            continue
        if f"{module}.lora_A.weight" in parts:
            a, b = parts[f"{module}.lora_A.weight"], parts[f"{module}.lora_B.weight"]
            tensor = (tensor.astype(np.float32) + np.float32(scale) * (b @ a)).astype(tensor.dtype)
        yield name, tensor
    if score is not None:
        yield "score.weight", score


def check_saved(directory: Path, config: LoRAConfig, base: Path) -> None:
    """Raises: UserError for a checkpoint with which a trainer of this config and base cannot go
    on."""
    here = model_dir.is_adapter(directory)
    if not here and not config.rank:
        return
    if not here or not config.rank:
        saved, wanted = (
            ("adapters", "lora.rank = 0") if here else ("no adapters", f"lora.rank = {config.rank}")
        )
        raise UserError(
            f"{directory} holds {saved}, with which {wanted} cannot go on: resume with the settings"
            " it was saved under"
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
                f"{directory} holds adapters of lora.{name} = {value!r}, with which lora.{name} ="
                f" {ours[name]!r} cannot go on: set lora.{name} = {value!r}"
            )
    if model_dir.read_trainer_state(directory)["base"] != fingerprint(base):
        raise UserError(
            f"{directory} holds adapters of another model than {base}: set model.path to the one"
            f" that they were trained beside, which was {found['base_model_name_or_path']}"
        )


def fingerprint(directory: Path) -> str:
    """A digest of evenly spaced blocks of each file of weights: reading all of a large model would
    take minutes."""
    digest = hashlib.sha256()
    for file in model_dir.tensor_files(directory):
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            for start in np.linspace(0, max(size - BLOCK, 0), BLOCKS, dtype=np.int64):
                opened.seek(int(start))
                digest.update(opened.read(BLOCK))
    return digest.hexdigest()


def read_config(directory: Path) -> dict[str, Any]:
    """What adapter_config.json says. Raises: UserError for a file that does not say what adapters
    are of."""
    found = model_dir.read_object(directory / CONFIG)
    if missing := [
        name for name in ("base_model_name_or_path", "r", "lora_alpha") if name not in found
    ]:
        raise UserError(f"{directory / CONFIG} has no {missing[0]}: copy it again")
    return found
