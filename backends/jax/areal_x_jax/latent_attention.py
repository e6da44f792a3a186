"""Multi-head latent attention, as a config describes it: the keys and values of all heads come from
one narrow vector of a token, and one rotated key is shared by all heads.

    x ──▶ vector, norm ──▶ each head's key (not rotated) and value
      ──▶ key (rotated), the same for all heads
      ──▶ (vector, norm) ──▶ each head's query, of which the last features are rotated

`areal_x_jax.projections.project_latent` computes it. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from areal_x_jax.families import ParsedConfig, refuse_features
from areal_x_jax.rope import Rope

# transformers normalises latent vectors with this, whatever the config's rms_norm_eps.
EPS = 1e-6


@dataclass(frozen=True)
class Latent:
    """Widths of latent attention. A head's queries and keys have plain + rotated features."""

    rank: int
    """Width of the vector of keys and values."""

    query_rank: int
    """Width of the vector of queries; 0 if they come from the layer's input."""

    plain: int
    """Features of a head's queries and keys that are not rotated."""

    rotated: int
    """Features that are."""

    value_dim: int
    """Features of a head's values."""


def latent_of(described: ParsedConfig, written: Mapping[str, Any]) -> Latent | None:
    """Returns None for a family with other attention. written: config.json.

    Raises: UserError for heads that transformers' model of the family cannot compute.
    """
    if not described.family.latent:
        return None
    text = described.text
    heads, kv_heads, head_dim = (
        text.num_attention_heads,
        text.num_key_value_heads,
        written.get("head_dim"),
    )
    refuse_features(
        {
            f"num_key_value_heads = {kv_heads} beside {heads} heads of latent attention": (
                kv_heads != heads
            ),
            f"head_dim = {head_dim} beside qk_rope_head_dim = {text.qk_rope_head_dim}": (
                head_dim not in (None, text.qk_rope_head_dim)
            ),
        },
        "correct its config.json",
    )
    return Latent(
        rank=text.kv_lora_rank,
        query_rank=text.q_lora_rank or 0,
        plain=text.qk_nope_head_dim,
        rotated=text.qk_rope_head_dim,
        value_dim=text.v_head_dim,
    )


def latent_scale(latent: Latent, rope: Rope, parameters: Mapping[str, Any]) -> float:
    """Returns the factor of queries, which grows with the context that yarn stretches to. parameters:
    the config's rope_parameters. Source: the code beside the DeepSeek-V2 checkpoints."""
    scale = (latent.plain + latent.rotated) ** -0.5
    mscale = parameters.get("mscale_all_dim")
    if rope.kind == "default" or not mscale or rope.factor <= 1:
        return float(scale)
    return float(scale * (0.1 * mscale * np.log(rope.factor) + 1) ** 2)
