"""Causal attention within the segments of packed rows, and which of several ways computes it.

`attend` is the entry point. `dense` builds all scores of a row; `blocked` those of one block of
queries and one of keys at a time, so that memory grows with the length and not with its square;
CANDIDATES are the kernels that jax offers for one platform each.

Padding has the segment id 0. What a query of padding gets is finite and means nothing.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from areal_x.errors import ConfigError, one_of
from areal_x_jax.attention_kernels import CANDIDATES, MASK_BYTES, mask_bytes, trusted
from areal_x_jax.blocked_attention import blocked
from areal_x_jax.dense_attention import Attend, AttentionMask, Keys, Queries, attention_bias, dense

# Up to this length dense is as fast as blocked on a CPU (forward and backward in fp32, one sequence
# a row); at 512 it takes 1.4 times as long, at 2,048 nearly three times, and more where a row holds
# several sequences.
DENSE_KEYS = 256


def prepare(seen: AttentionMask, implementation: str = "auto") -> AttentionMask:
    """Computes, where `attend` would read it, what segments and causality add to the scores:
    outside a scan over layers it is computed once and not once a layer. The window is left out, as
    each layer may bring its own."""
    if implementation == "auto":
        reads = seen.keys.shape[1] <= DENSE_KEYS or (
            jax.default_backend() == "gpu" and mask_bytes(seen) <= MASK_BYTES
        )
    else:
        reads = implementation in ("dense", "cudnn")
    return seen._replace(bias=attention_bias(seen._replace(window=0))) if reads else seen


def attend(
    query: Queries,
    key: Keys,
    value: Keys,
    seen: AttentionMask,
    *,
    scale: float,
    softcap: float = 0.0,
    implementation: str = "auto",
) -> Float[Array, "rows queries features"]:
    """softmax(scale * query @ key) @ value over the keys that are seen; features are heads *
    head_dim. Softmax in fp32.

    heads share kv_heads in equal groups. softcap: if not 0, scores are softcap * tanh(scores /
    softcap). how: "dense", "blocked", a name of CANDIDATES, or "auto": this platform's candidate
    where it takes such a call and can be trusted, else dense for short rows and blocked for long
    ones. Raises: ConfigError for another name, and for a candidate that cannot work.
    """
    chosen = choose(query, key, seen, softcap, implementation)
    return chosen(query, key, value, seen, scale, softcap).reshape(*query.shape[:2], -1)


def choose(
    query: Array, key: Array, seen: AttentionMask, softcap: float, implementation: str
) -> Attend:
    """The function that `attend` calls."""
    one_of("model.attention", implementation, ("auto", "dense", "blocked", *CANDIDATES))
    if implementation in ("dense", "blocked"):
        return dense if implementation == "dense" else blocked
    plain = dense if key.shape[1] <= DENSE_KEYS else blocked
    platform = jax.default_backend()
    for name, candidate in CANDIDATES.items():
        if implementation not in ("auto", name):
            continue
        if platform == candidate.platform and candidate.takes(query, key, seen, softcap):
            group = query.shape[2] // key.shape[2]
            return (
                candidate.attend
                if trusted(name, candidate, group, query.shape[3], str(query.dtype), softcap)
                else plain
            )
        if implementation == name:
            raise ConfigError(
                "model.attention",
                implementation,
                f"'auto', 'dense' or 'blocked' here: {name} needs {candidate.needs}",
            )
    return plain
