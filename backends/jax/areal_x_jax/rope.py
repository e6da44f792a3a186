"""Rotary positions: how a config scales them, and the frequencies that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from areal_x.errors import UserError
from areal_x_jax.families import ParsedConfig, refuse_features

KINDS = ("default", "linear", "llama3", "yarn")
# Every field of rope_parameters that transformers knows, whether the kind reads it or not.
FIELDS = {
    *(
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
    ),
    *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
    *(
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    ),
    *("mrope_section", "mrope_interleaved"),
}


@dataclass(frozen=True)
class Rope:
    """Rotary positions with base theta, and how they are scaled beyond the length of a model's
    first training.

    kind: "default", "linear" (positions divided by factor), "llama3", "yarn", "proportional", or
    "none" for layers that do not rotate. low, high: where
    scaling of frequencies begins and ends; for yarn in rotations over the original length
    (beta_slow, beta_fast), which truncate widens to whole pairs of features. scale: of cosines and
    sines (yarn's attention factor). part: of the features of a head, the first that are rotated; of
    "proportional", whose pairs are those of whole heads, the part of the pairs that are. features: of
    a head, where they are not those of all layers.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 0
    scale: float = 1.0
    truncate: bool = True
    part: float = 1.0
    features: int = 0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Returns radians per position for each pair of rotated features, [part · head_dim / 2], in
        fp32.

        Sources: RoFormer, arXiv 2104.09864; linear, arXiv 2306.15595; yarn, arXiv 2309.00071, eq.
        23; llama3, arXiv 2407.21783.
        """
        head_dim = self.features or head_dim
        if self.kind == "proportional":
            turned = np.arange(head_dim // 2) < int(self.part * head_dim // 2)
            return (self._plain(head_dim) * turned / np.float32(self.factor)).astype(np.float32)
        head_dim = int(head_dim * self.part)
        plain = self._plain(head_dim)
        if self.kind == "none":
            return np.zeros_like(plain)
        if self.kind == "default":
            return plain
        stretched = plain / np.float32(self.factor)
        if self.kind == "linear":
            return stretched
        if self.kind == "llama3":
            rotations = self.original * plain / (2 * np.pi)
            if self.high == self.low:  # Llama 4's: nothing in between
                return np.where(rotations < self.low, stretched, plain).astype(np.float32)
            kept: np.ndarray = (rotations - self.low) / (self.high - self.low)
        else:
            first, last = self._pair(self.high, head_dim), self._pair(self.low, head_dim)
            if self.truncate:
                first, last = np.floor(first), np.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            kept = 1 - (np.arange(head_dim // 2, dtype=np.float32) - first) / (
                last - first if last != first else 0.001
            )
        kept = np.clip(kept, 0, 1)
        return (plain * kept + stretched * (1 - kept)).astype(np.float32)

    def _plain(self, head_dim: int) -> np.ndarray:
        pairs = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
        return (self.theta**-pairs).astype(np.float32)

    def _pair(self, rotations: float, head_dim: int) -> float:
        """Returns the pair of features that rotates this often over the original length."""
        return float(
            head_dim * np.log(self.original / (rotations * 2 * np.pi)) / (2 * np.log(self.theta))
        )


def ropes_of(described: ParsedConfig) -> tuple[Rope, ...]:
    """Returns the rotations of layers: of those with full attention and of those with a window, if
    they differ; or of those that rotate, and "none" (see `rope_indices`).

    Raises: UserError for unsupported scalings.
    """
    text, family = described.text, described.family
    parameters: Mapping[str, Any] = text.rope_parameters or {}
    most = text.max_position_embeddings
    if not family.ropes_by_kind:
        refuse_features({"a rotation for each kind of layers": "rope_type" not in parameters})
        rope = rope_of(parameters, most, "partial_rotary_factor" in family.reads)
        return (rope, replace(rope, kind="none", scale=1.0)) if family.unturned else (rope,)
    kinds = ("full_attention", "sliding_attention")
    others = ", ".join(sorted(set(parameters) - set(kinds)))
    refuse_features({f"rope_parameters for all layers alike ({others})": bool(others)})
    # transformers looks for it beside the kinds of layers, where nothing else is allowed.
    refuse_features(
        {
            "truncate in one kind of layers": any(
                "truncate" in (parameters.get(kind) or ()) for kind in kinds
            )
        }
    )
    return tuple(rope_of_kind(described, kind) for kind in kinds)


def rope_of_kind(described: ParsedConfig, kind: str) -> Rope:
    """Returns the rotation of layers of this kind.

    Raises: UserError if there are any and the config has none for them.
    """
    text, varied = described.text, described.family.varied
    fields = text.rope_parameters.get(kind)
    used = kind in text.layer_types
    if fields is None and used:
        raise UserError(f"config.json: rope_parameters has none for layers of the kind {kind}")
    if fields is None:
        return Rope(kind="none")
    rope = rope_of(fields, text.max_position_embeddings, whole_heads=varied)
    return replace(rope, features=text.per_layer_config[kind].head_dim) if varied and used else rope


def rope_indices(described: ParsedConfig, windows: Sequence[int]) -> tuple[int, ...]:
    """Returns for each layer the index of its rotation in `ropes_of`. windows: the layers'."""
    family = described.family
    if family.unturned == "listed":
        listed = described.text.no_rope_layers
        if len(listed) < len(windows):
            raise UserError(
                f"config.json: no_rope_layers has {len(listed)} entries for {len(windows)} layers:"
                " give each layer one"
            )
        return tuple(int(not turns) for turns in listed[: len(windows)])
    if family.unturned == "full":
        return tuple(int(not window) for window in windows)
    return tuple(int(family.ropes_by_kind and window > 0) for window in windows)


def rope_of(
    fields: Mapping[str, Any], longest: int, partial: bool = False, whole_heads: bool = False
) -> Rope:
    """longest: the config's max_position_embeddings. partial: whether the family reads the share of
    features that are rotated. whole_heads: whether it has the kind "proportional"."""
    part = float(fields.get("partial_rotary_factor") or 1)
    kind, unknown = fields["rope_type"], ", ".join(sorted(set(fields) - FIELDS))
    if whole_heads and kind == "proportional" and not unknown:
        part, divisor = (float(fields.get(x, 1)) for x in ("partial_rotary_factor", "factor"))
        return Rope(float(fields["rope_theta"]), kind, divisor, part=part)
    refuse_features(
        {
            f"rope scaling {kind!r}": kind not in KINDS,
            f"{unknown} in rope_parameters": bool(unknown),
            "a rotation of some features only": part != 1 and not partial,
        }
    )
    theta, factor = float(fields["rope_theta"]), fields.get("factor")
    if kind == "default":
        return Rope(theta, part=part)
    if kind == "linear":
        return Rope(theta, kind, float(fields["factor"]), part=part)
    original = int(fields["original_max_position_embeddings"])
    if kind == "llama3":
        low, high = float(fields["low_freq_factor"]), float(fields["high_freq_factor"])
        return Rope(theta, kind, float(fields["factor"]), low, high, original, part=part)
    factor = float(longest / original if factor is None else factor)
    low, high = float(fields.get("beta_slow") or 1), float(fields.get("beta_fast") or 32)
    return Rope(
        theta,
        kind,
        factor,
        low,
        high,
        original,
        yarn_scale(fields, factor),
        bool(fields.get("truncate", True)),
        part,
    )


def yarn_scale(fields: Mapping[str, Any], factor: float) -> float:
    """Returns the factor of cosines and sines: as given, or the quotient of two that DeepSeek's
    mscale gives."""
    if fields.get("attention_factor") is not None:
        return float(fields["attention_factor"])

    def of(mscale: float) -> float:
        return float(0.1 * mscale * np.log(factor) + 1) if factor > 1 else 1.0

    mscale, of_all = fields.get("mscale"), fields.get("mscale_all_dim")
    return of(mscale) / of(of_all) if mscale and of_all else of(1)
