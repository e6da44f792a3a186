"""Rotary scalings that depend on the length of a sequence: "longrope" (Phi-3 mini, Phi-3.5, Phi-4
mini) and "dynamic".

transformers rotates all tokens of a pass by what its longest sequence requires, so beyond some
length a sequence's numbers would depend on its neighbours; and while a sequence is being sampled
its final length is unknown. Up to that length every sequence is rotated the same way, here, in
transformers and in vLLM: a run stays within it. Static scalings (linear, yarn, llama3) are not
affected.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from areal_x.errors import ConfigError, UserError

# Fields that hold that length.
LENGTH_FIELDS = {
    "longrope": "original_max_position_embeddings",
    "dynamic": "max_position_embeddings",
}


def stable_length(config: PreTrainedConfig) -> tuple[int, str] | None:
    """Returns the longest sequence that is rotated like shorter ones, and the kind of scaling; None
    if all are."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    found = []
    for of in (rope, *rope.values()):  # for all layers, or for each kind
        kind: Any = of.get("rope_type") if isinstance(of, dict) else None
        if kind in LENGTH_FIELDS:
            found.append(
                (int(of.get(LENGTH_FIELDS[kind]) or getattr(text, LENGTH_FIELDS[kind])), kind)
            )
    return min(found, default=None)


def check_length(binding: str, length: int, config: PreTrainedConfig, directory: Path) -> None:
    """Raises: ConfigError for a setting that allows sequences beyond the stable length."""
    steady = stable_length(config)
    if steady is not None and length > steady[0]:
        raise ConfigError(
            binding, length, f"at most {steady[0]} with {directory}: {_why(steady[1])}"
        )


def check_longest(longest: int, config: PreTrainedConfig, directory: Path) -> None:
    """Raises: UserError for a batch whose longest sequence is beyond the stable length."""
    steady = stable_length(config)
    if steady is not None and longest > steady[0]:
        wanted = f"sequences of at most {steady[0]} tokens with {directory}"
        raise UserError(f"a sequence has {longest} tokens: give {wanted}: {_why(steady[1])}")


def _why(kind: str) -> str:
    return (
        f"for longer sequences its rotations ({kind}) depend on the length, which sampling does not"
        " know beforehand"
    )
