"""Rotations that change with the length of a sequence: "longrope" (Phi-3 mini, Phi-3.5, Phi-4 mini)
and "dynamic".

transformers turns all tokens of a pass by what its longest sequence asks for, so beyond some length
a sequence's numbers would depend on its neighbours; and while a sequence is sampled no one knows
how long it becomes. Up to that length every sequence is turned alike, here, in transformers and in
vLLM: a run stays there. Static scalings (linear, yarn, llama3) are not concerned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from areal_x.errors import ConfigError, UserError

# what names that length
LENGTH_FIELDS = {
    "longrope": "original_max_position_embeddings",
    "dynamic": "max_position_embeddings",
}


def stable_length(config: PreTrainedConfig) -> tuple[int, str] | None:
    """The longest sequence that is turned as shorter ones are, and the kind of the rotation; None
    where all are."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    found = []
    for of in (rope, *rope.values()):  # of all layers, or of each kind of them
        kind: Any = of.get("rope_type") if isinstance(of, dict) else None
        if kind in LENGTH_FIELDS:
            found.append(
                (int(of.get(LENGTH_FIELDS[kind]) or getattr(text, LENGTH_FIELDS[kind])), kind)
            )
    return min(found, default=None)


def check_length(binding: str, length: int, config: PreTrainedConfig, directory: Path) -> None:
    """Raises: ConfigError for a setting by which sequences may be longer than all of them can be to
    be turned alike."""
    steady = stable_length(config)
    if steady is not None and length > steady[0]:
        raise ConfigError(
            binding, length, f"at most {steady[0]} with {directory}: {_why(steady[1])}"
        )


def check_longest(longest: int, config: PreTrainedConfig, directory: Path) -> None:
    """Raises: UserError for a batch whose longest sequence has so many tokens, where that is too
    many."""
    steady = stable_length(config)
    if steady is not None and longest > steady[0]:
        wanted = f"sequences of at most {steady[0]} tokens with {directory}"
        raise UserError(f"a sequence has {longest} tokens: give {wanted}: {_why(steady[1])}")


def _why(kind: str) -> str:
    return (
        f"of longer sequences its rotations ({kind}) change with the length, which sampling does"
        " not know beforehand"
    )
