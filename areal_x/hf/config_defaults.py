"""What config.json leaves to transformers' defaults: Gemma 3's on the hub names neither its vocabulary
nor its heads."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from areal_x.hf import model_dir


def with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the language model's part of a config; see `Model.config`. What transformers cannot
    read is left as it is: the backend's check says why."""
    from transformers import CONFIG_MAPPING

    text, model_type = model_dir.text_config(config), str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return text
    try:
        described = CONFIG_MAPPING[model_type].from_dict(deepcopy(dict(config))).get_text_config()
        common = {name: getattr(described, name) for name in described.attribute_map}
        return {**described.to_dict(), **common, **text}
    except Exception:  # each config's class validates in its own way
        return text


def described_text(directory: Path) -> Mapping[str, Any]:
    """Returns the language model's config of a directory: with transformers' defaults where it is a
    part of another, as a text model's own names all fields."""
    config = model_dir.read_config(directory)
    return with_defaults(config) if "text_config" in config else config


def vocabulary_of(directory: Path) -> int:
    """Returns the number of tokens in a model's vocabulary."""
    return int(described_text(directory)["vocab_size"])
