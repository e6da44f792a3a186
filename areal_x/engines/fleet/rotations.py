"""Rotations of positions that servers compute otherwise than transformers, and so than the trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_x.errors import ConfigError
from areal_x.hf.model_dir import read_config

GEMMA4 = ("gemma4_text", "gemma4_unified_text")
# What SGLang 0.5.23 reads of Gemma 4's rotations: no factor and no other field of these kinds.
READ_BY_SGLANG = ("default", "proportional")


def check_rotations(kind: str, model: Path) -> None:
    """kind: of servers, "vLLM" or "SGLang". Compared with the rotations of vLLM 0.32 and the source of
    SGLang 0.5.23.

    Raises: ConfigError for a model of whose `rope_parameters` these servers leave out a field, or
    apply one that transformers does not.
    """
    config = read_config(model)
    text = config.get("text_config") or config
    for layers, rotation in _rotations_of(text):
        found = _differing(kind, text.get("model_type") in GEMMA4, rotation)
        if found is not None:
            field, why = found
            where = f" of {layers} layers" if layers else ""
            wanted = (
                f"a model without {field} = {rotation[field]!r} in the rope_parameters{where}, which"
                f" {why}: train it with train.engine = 'embedded'"
            )
            raise ConfigError("model.path", str(model), wanted)


def _rotations_of(text: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns each rotation of a language model's config, with the kind of its layers if there are
    several."""
    rotations = text.get("rope_parameters") or text.get("rope_scaling") or {}
    nested = [(name, x) for name, x in rotations.items() if isinstance(x, Mapping)]
    return nested or [("", rotations)]


def _differing(kind: str, gemma4: bool, rotation: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns the field of a rotation that servers read otherwise, and how."""
    rotates = rotation.get("rope_type") or "default"
    if rotates == "proportional" and (rotation.get("factor") or 1) != 1:
        return "factor", f"{kind} leaves out of proportional rotations"
    if gemma4 and rotates == "default" and (rotation.get("partial_rotary_factor") or 1) != 1:
        return "partial_rotary_factor", f"{kind} applies and transformers does not"
    if gemma4 and kind == "SGLang" and rotates not in READ_BY_SGLANG:
        return "rope_type", "SGLang serves without its other fields"
    return None
