"""Causal attention within the segments of packed rows, in both directions within blocks of tokens if
there are any (`dense_attention.Blocks`), and the choice of its implementation.

`attend` is the entry point. `dense` computes all scores of a row; `blocked` those of one block of
queries and one block of keys at a time, so that memory grows linearly with the length; CANDIDATES
are platform-specific kernels of jax.

Padding has segment id 0. The output at padding is finite and meaningless.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from areal_x.errors import ConfigError, one_of
from areal_x_jax.attention_kernels import CANDIDATES, MASK_BYTES, mask_bytes, trusted
from areal_x_jax.blocked_attention import blocked
from areal_x_jax.dense_attention import (
    Attend,
    AttentionMask,
    Keys,
    Queries,
    Values,
    attention_bias,
    dense,
)

# Up to this length dense is as fast as blocked on a CPU (forward and backward in fp32, one sequence
# per row); at 512 it takes 1.4 times as long, at 2,048 nearly three times, and more if a row holds
# several sequences.
DENSE_KEYS = 256


def prepare(mask: AttentionMask, implementation: str = "auto") -> AttentionMask:
    """Precomputes the bias of segments and causality if `attend` will read it: outside a scan over
    layers it is computed once instead of once per layer. The window is left out, because layers may
    differ in it."""
    if implementation == "auto":
        reads = mask.keys.shape[1] <= DENSE_KEYS or (
            jax.default_backend() == "gpu" and mask_bytes(mask) <= MASK_BYTES
        )
    else:
        reads = implementation in ("dense", "cudnn")
    return mask._replace(bias=attention_bias(mask._replace(window=0))) if reads else mask


def attend(
    query: Queries,
    key: Keys,
    value: Values,
    mask: AttentionMask,
    *,
    scale: float,
    softcap: float = 0.0,
    implementation: str = "auto",
    sinks: Float[Array, " heads"] | None = None,
) -> Float[Array, "rows queries features"]:
    """Returns softmax(scale * query @ key) @ value over the visible keys; features are heads *
    value_dim. The softmax is in fp32.

    heads share kv_heads in equal groups. sinks: a score of each head that the softmax has beside
    the keys', with a value of 0. softcap: if not 0, scores are softcap * tanh(scores / softcap).
    implementation: "dense", "blocked", a name in CANDIDATES, or "auto": this platform's candidate
    if it supports the call and is trusted, else dense for short rows and blocked for long ones.

    Raises: ConfigError for an unknown name, or a candidate that cannot work here.
    """
    unlike = value.shape[-1] != key.shape[-1]
    special = sinks is not None or mask.blocks is not None or unlike
    chosen = choose(query, key, mask, softcap, implementation, special)
    with_sinks = {} if sinks is None else {"sinks": sinks}
    attended = chosen(query, key, value, mask, scale, softcap, **with_sinks)
    return attended.reshape(*query.shape[:2], -1)


def choose(
    query: Array,
    key: Array,
    mask: AttentionMask,
    softcap: float,
    implementation: str,
    special: bool = False,
) -> Attend:
    """Returns the implementation that `attend` calls. special: whether there are sinks, blocks, or
    values of other features than keys, which no candidate takes."""
    one_of("model.attention", implementation, ("auto", "dense", "blocked", *CANDIDATES))
    if implementation in ("dense", "blocked"):
        return dense if implementation == "dense" else blocked
    plain = dense if key.shape[1] <= DENSE_KEYS else blocked
    platform = jax.default_backend()
    for name, candidate in CANDIDATES.items():
        if implementation not in ("auto", name):
            continue
        takes = not special and candidate.takes(query, key, mask, softcap)
        if platform == candidate.platform and takes:
            group = query.shape[2] // key.shape[2]
            if trusted(name, candidate, group, query.shape[3], str(query.dtype), softcap):
                return candidate.attend
        elif implementation == name:
            raise ConfigError(
                "model.attention",
                implementation,
                f"'auto', 'dense' or 'blocked' here: {name} needs {candidate.needs}, no sinks, no"
                " images that see themselves whole, and values as wide as keys",
            )
    return plain
