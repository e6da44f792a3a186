"""Causal attention within the segments of packed rows, and which of several ways computes it.

`attend` is the entry point. `dense` builds all scores of a row; `blocked` builds those of one block of queries and one of keys
at a time, passes over the blocks in which nothing is seen, and computes the others again in the backward pass, so that memory
grows with the length and not with its square. CANDIDATES are the kernels that jax offers for one platform each: none is used
before it has agreed with `dense` on a small packed example in this process.

Padding has the segment id 0. What a query of padding gets is finite and means nothing.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from areal_x.errors import ConfigError, one_of

HIDDEN = -1e30  # the score of a key that is not seen: finite, as the difference of two infinities is NaN
CPU_BLOCK, BLOCK = 64, 512  # queries and keys of a block: what its cache holds; on others, few enough steps of the loop
# Up to this length dense is as fast as blocked on a CPU (forward and backward in fp32, one sequence a row); at 512 it takes 1.4
# times as long, at 2,048 nearly three times, and more where a row holds several sequences.
DENSE_KEYS = 256
MASK_BYTES = 2**27  # the largest mask [rows, queries, keys] in bf16 that cuDNN is given
KEPT = "attention"  # names for jax.checkpoint_policies.save_only_these_names what blocked's backward pass needs of its forward


class Seen(NamedTuple):
    """Which key a query may attend to: key j is seen by query i of the same segment if j <= start + i, and, with a window, if
    start + i - j < window.

    queries, keys: segment ids. start: the index in the row of the first query, 0 unless the row is split. window: 0 for no
    window. Both may be traced; as Python integers they cost less and more kernels take them. bias: see `prepare`.
    """

    queries: Int[Array, "rows queries"]
    keys: Int[Array, "rows keys"]
    start: int | Int[Array, ""] = 0
    window: int | Int[Array, ""] = 0
    bias: Float[Array, "rows 1 queries 1 keys"] | None = None


def prepare(seen: Seen, how: str = "auto") -> Seen:
    """Computes, where `attend` would read it, what segments and causality add to the scores: outside a scan over layers it is
    computed once and not once a layer. The window is left out, as each layer may bring its own."""
    if how == "auto":
        reads = seen.keys.shape[1] <= DENSE_KEYS or (jax.default_backend() == "gpu" and _mask_bytes(seen) <= MASK_BYTES)
    else:
        reads = how in ("dense", "cudnn")
    return seen._replace(bias=_bias(seen._replace(window=0))) if reads else seen


def attend(
    query: Float[Array, "rows queries heads head_dim"],
    key: Float[Array, "rows keys kv_heads head_dim"],
    value: Float[Array, "rows keys kv_heads head_dim"],
    seen: Seen,
    *,
    scale: float,
    softcap: float = 0.0,
    how: str = "auto",
) -> Float[Array, "rows queries features"]:
    """softmax(scale * query @ key) @ value over the keys that are seen; features are heads * head_dim. Softmax in fp32.

    heads share kv_heads in equal groups. softcap: if not 0, scores are softcap * tanh(scores / softcap). how: "dense",
    "blocked", a name of CANDIDATES, or "auto": this platform's candidate where it takes such a call and can be trusted, else
    dense for short rows and blocked for long ones. Raises: ConfigError for another name, and for a candidate that cannot work.
    """
    implementation = choose(query, key, seen, softcap, how)
    return implementation(query, key, value, seen, scale, softcap).reshape(*query.shape[:2], -1)


Attend = Callable[[Array, Array, Array, Seen, float, float], Array]  # query, key, value, seen, scale, softcap → as query


def choose(query: Array, key: Array, seen: Seen, softcap: float, how: str) -> Attend:
    """The function that `attend` calls."""
    one_of("model.attention", how, ("auto", "dense", "blocked", *CANDIDATES))
    if how in ("dense", "blocked"):
        return dense if how == "dense" else blocked
    plain = dense if key.shape[1] <= DENSE_KEYS else blocked
    platform = jax.default_backend()
    for name, candidate in CANDIDATES.items():
        if how not in ("auto", name):
            continue
        if platform == candidate.platform and candidate.takes(query, key, seen, softcap):
            group = query.shape[2] // key.shape[2]
            return candidate.attend if _trusted(name, candidate, group, query.shape[3], str(query.dtype), softcap) else plain
        if how == name:
            raise ConfigError("model.attention", how, f"'auto', 'dense' or 'blocked' here: {name} needs {candidate.needs}")
    return plain


# ---- which keys are seen


def _visible(
    queries: Int[Array, "rows queries"],
    keys: Int[Array, "rows keys"],
    query_at: Int[Array, " queries"],
    key_at: Int[Array, " keys"],
    window: int | Int[Array, ""] | None,
) -> Bool[Array, "rows queries keys"]:
    """Between queries and keys of these segments and indices in the row."""
    behind = query_at[:, None] - key_at
    near = behind >= 0
    if not _is_zero(window):
        near &= (behind < window) | (window == 0)
    return (queries[:, :, None] == keys[:, None, :]) & near


def _bias(seen: Seen) -> Float[Array, "rows 1 queries 1 keys"]:
    """What to add to the scores, from `prepare` if it was called."""
    query_at, key_at = seen.start + jnp.arange(seen.queries.shape[1]), jnp.arange(seen.keys.shape[1])
    if seen.bias is None:
        visible = _visible(seen.queries, seen.keys, query_at, key_at, seen.window)
        return jnp.where(visible, 0.0, HIDDEN)[:, None, :, None]
    if _is_zero(seen.window):
        return seen.bias
    near = (query_at[:, None] - key_at < seen.window) | (seen.window == 0)
    return jnp.where(near[:, None], seen.bias, HIDDEN)


def _is_zero(x: int | Array | None) -> bool:
    """Whether it is none, or 0 whatever the program will be given, so that what depends on it can be left out."""
    return x is None or (isinstance(x, int) and x == 0)


# ---- dense


def dense(
    query: Float[Array, "rows queries heads head_dim"],
    key: Float[Array, "rows keys kv_heads head_dim"],
    value: Float[Array, "rows keys kv_heads head_dim"],
    seen: Seen,
    scale: float,
    softcap: float = 0.0,
) -> Float[Array, "rows queries heads head_dim"]:
    """All scores at once; the queries of a group read their shared key and value in place.

    The scores are [rows, kv_heads, queries, group, keys], as the product gives them: any other order would copy them.
    """
    grouped = _grouped(query * scale, key.shape[2])
    scores = jnp.einsum("blgrd,bmgd->bglrm", grouped, key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(softcapped(scores, softcap) + _bias(seen), axis=-1).astype(value.dtype)
    attended = jnp.einsum("bglrm,bmgd->bglrd", weights, value)
    return jnp.moveaxis(attended, 1, 2).reshape(query.shape)


def _grouped(
    query: Float[Array, "rows queries heads head_dim"], kv_heads: int
) -> Float[Array, "rows queries kv_heads group _"]:
    rows, queries, heads, head_dim = query.shape
    return query.reshape(rows, queries, kv_heads, heads // kv_heads, head_dim)


def softcapped(x: Float[Array, ...], cap: float) -> Float[Array, ...]:
    return cap * jnp.tanh(x / cap) if cap else x


# ---- blocked


def blocked(
    query: Float[Array, "rows queries heads head_dim"],
    key: Float[Array, "rows keys kv_heads head_dim"],
    value: Float[Array, "rows keys kv_heads head_dim"],
    seen: Seen,
    scale: float,
    softcap: float = 0.0,
    block: int | None = None,
) -> Float[Array, "rows queries heads head_dim"]:
    """One block of queries and one of keys at a time, with a running softmax. Padding attends to nothing and gets 0.

    Saves of the forward pass the output and the logarithm of each softmax's denominator. Rows of a batch go through the blocks
    together, so a pair of blocks is computed if any row sees something in it. Source: arXiv 2205.14135 and 2307.08691.
    """
    block = block or (CPU_BLOCK if jax.default_backend() == "cpu" else BLOCK)
    queries, keys = (min(block, x.shape[1]) for x in (query, key))
    window = None if _is_zero(seen.window) else seen.window
    ids = _Ids(_split(seen.queries, queries), _split(seen.keys, keys), seen.start, window)
    # [blocks, rows, kv_heads, queries, group, head_dim] and [blocks, rows, kv_heads, keys, head_dim]
    grouped = jnp.moveaxis(_split(_grouped(query * scale, key.shape[2]), queries), 3, 2)
    key, value = (jnp.moveaxis(_split(x, keys), 3, 2) for x in (key, value))
    attended = _attend_blocks(softcap, grouped, key, value, ids)
    attended = jnp.moveaxis(attended, 0, 1)  # [rows, blocks, kv_heads, queries, group, head_dim]
    attended = jnp.moveaxis(attended, 2, 3).reshape(query.shape[0], -1, *query.shape[2:])
    return attended[:, : query.shape[1]]


class _Ids(NamedTuple):
    """`Seen` in blocks, padded with padding. Without a window that could hide something, window is None."""

    queries: Int[Array, "query_blocks rows block"]
    keys: Int[Array, "key_blocks rows block"]
    start: int | Int[Array, ""]
    window: int | Int[Array, ""] | None


def reach(ids: _Ids) -> tuple[Int[Array, " query_blocks"], Int[Array, " query_blocks"]]:
    """The first block of keys in which any row's block of queries may see something, and the one after the last.

    Segments meet where the ranges of their ids do: for any order of ids nothing that is seen is left out, and for rows packed
    one segment after the other little else is kept.
    """
    largest = jnp.iinfo(ids.queries.dtype).max

    def least_and_largest(x: Array) -> tuple[Array, Array]:
        return jnp.min(jnp.where(x > 0, x, largest), axis=-1), jnp.max(x, axis=-1)

    least, most = (x[:, None] for x in least_and_largest(ids.queries))
    key_least, key_most = least_and_largest(ids.keys)
    meet = jnp.any((least <= key_most) & (key_least <= most), axis=-1)  # [query_blocks, key_blocks]
    (count, _, queries), (key_count, _, keys) = ids.queries.shape, ids.keys.shape
    first_query, first_key = (ids.start + jnp.arange(count) * queries)[:, None], jnp.arange(key_count) * keys
    meet &= first_key < first_query + queries
    if not _is_zero(ids.window):
        meet &= (first_key + keys > first_query - ids.window + 1) | (ids.window == 0)
    end = key_count - jnp.argmax(meet[:, ::-1], axis=1)
    return jnp.argmax(meet, axis=1), jnp.where(jnp.any(meet, axis=1), end, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_blocks(softcap: float, query: Array, key: Array, value: Array, ids: _Ids) -> Array:
    return _forward(softcap, query, key, value, ids)[0]


def _forward(softcap: float, query: Array, key: Array, value: Array, ids: _Ids) -> tuple[Array, tuple[Any, ...]]:
    def one(at: tuple[Array, ...]) -> tuple[Array, Array]:
        index, first, end, query = at

        def add(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, attended = sums
            scores, visible = _scores(softcap, query, key[j], ids, index, j)
            scores = jnp.where(visible, scores, HIDDEN)
            new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
            weights, fade = jnp.exp(scores - new_top[..., None]), jnp.exp(top - new_top)
            product = jnp.einsum("bgqrk,bgkd->bgqrd", weights.astype(value.dtype), value[j], preferred_element_type=jnp.float32)
            return new_top, total * fade + jnp.sum(weights, axis=-1), attended * fade[..., None] + product

        nothing = jnp.zeros_like(query, jnp.float32)
        of_each = nothing[..., 0]
        top, total, attended = jax.lax.fori_loop(first, end, add, (of_each + HIDDEN, of_each, nothing))
        # The weights of a query that has seen nothing are those of hidden keys, which it met before any other or alone.
        sees = top > HIDDEN / 2
        top, total = jnp.where(sees, top, 0.0), jnp.where(sees, total, 1.0)
        attended = jnp.where(sees[..., None], attended, 0.0) / total[..., None]
        return attended.astype(query.dtype), top + jnp.log(total)

    attended, log_total = jax.lax.map(one, (jnp.arange(len(query)), *reach(ids), query))
    attended, log_total = checkpoint_name(attended, KEPT), checkpoint_name(log_total, KEPT)
    return attended, (query, key, value, ids, attended, log_total)


def _backward(softcap: float, saved: tuple[Any, ...], gradient: Array) -> tuple[Array, Array, Array, None]:
    query, key, value, ids, attended, log_total = saved

    def one(sums: tuple[Array, Array], at: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        index, first, end, query, gradient, attended, log_total = at
        shift = jnp.sum(gradient.astype(jnp.float32) * attended, axis=-1, keepdims=True)

        def add(j: Array, sums: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_query, d_key, d_value = sums
            scores, visible = _scores(softcap, query, key[j], ids, index, j)
            weights = jnp.where(visible, jnp.exp(scores - log_total[..., None]), 0.0)
            d_weights = jnp.einsum("bgqrd,bgkd->bgqrk", gradient, value[j], preferred_element_type=jnp.float32)
            d_scores = weights * (d_weights - shift)
            if softcap:
                d_scores *= 1 - jnp.square(scores / softcap)
            weights, d_scores = weights.astype(value.dtype), d_scores.astype(key.dtype)
            d_query += jnp.einsum("bgqrk,bgkd->bgqrd", d_scores, key[j], preferred_element_type=jnp.float32)
            return d_query, _add_at(d_key, j, d_scores, query), _add_at(d_value, j, weights, gradient)

        d_query, *sums = jax.lax.fori_loop(first, end, add, (jnp.zeros_like(query, jnp.float32), *sums))
        return tuple(sums), d_query.astype(query.dtype)

    nothing = jnp.zeros_like(key, jnp.float32), jnp.zeros_like(value, jnp.float32)
    blocks = jnp.arange(len(query)), *reach(ids), query, gradient, attended, log_total
    (d_key, d_value), d_query = jax.lax.scan(one, nothing, blocks)
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None


_attend_blocks.defvjp(_forward, _backward)


def _scores(
    softcap: float,
    query: Float[Array, "rows kv_heads queries group head_dim"],
    key: Float[Array, "rows kv_heads keys head_dim"],
    ids: _Ids,
    i: Array,
    j: Array,
) -> tuple[Float[Array, "rows kv_heads queries group keys"], Bool[Array, "rows 1 queries 1 keys"]]:
    """Those of blocks i and j, and which are seen. Padding sees nothing."""
    scores = jnp.einsum("bgqrd,bgkd->bgqrk", query, key, preferred_element_type=jnp.float32)
    queries, keys = ids.queries.shape[2], ids.keys.shape[2]
    query_at, key_at = ids.start + i * queries + jnp.arange(queries), j * keys + jnp.arange(keys)
    of_queries, of_keys = ids.queries[i], ids.keys[j]
    visible = _visible(of_queries, of_keys, query_at, key_at, ids.window) & (of_queries > 0)[..., None]
    return softcapped(scores, softcap), visible[:, None, :, None]


def _add_at(sums: Array, j: Array, of_scores: Array, of_queries: Array) -> Array:
    """sums[j] + of_scores.T @ of_queries, in place within a loop."""
    product = jnp.einsum("bgqrk,bgqrd->bgkd", of_scores, of_queries, preferred_element_type=jnp.float32)
    return jax.lax.dynamic_update_index_in_dim(sums, sums[j] + product, j, 0)


def _split(x: Array, block: int) -> Array:
    """[rows, length, …] → [blocks, rows, block, …], padded with zeros to whole blocks."""
    rows, length, *rest = x.shape
    blocks = -(-length // block)
    x = jnp.pad(x, ((0, 0), (0, blocks * block - length), *((0, 0) for _ in rest)))
    return jnp.moveaxis(x.reshape(rows, blocks, block, *rest), 1, 0)


# ---- the platforms' own kernels


class Candidate(NamedTuple):
    """takes: whether it computes such a call, with such a softcap. needs: the same in words."""

    platform: str
    attend: Attend
    takes: Callable[[Array, Array, Seen, float], bool]
    needs: str


def cudnn(query: Array, key: Array, value: Array, seen: Seen, scale: float, softcap: float = 0.0) -> Array:
    """NVIDIA's fused attention through jax's public function, which knows the lengths of rows and windows but no segments.

    Those need a mask [rows, queries, keys], which is cheap for rows of a few thousand tokens: longer ones are not taken. jax's
    packed layout would need none, but is not public and has given wrong results with grouped queries (jax 0.10.2).
    """
    bias = _bias(seen)[:, :, :, 0].astype(query.dtype)
    square = _is_zero(seen.start) and query.shape[1] == key.shape[1]  # then it skips the upper half, whatever the mask says
    return jax.nn.dot_product_attention(query, key, value, bias, scale=scale, is_causal=square, implementation="cudnn")


def _cudnn_takes(query: Array, key: Array, seen: Seen, softcap: float) -> bool:
    even = query.shape[1] % 2 == key.shape[1] % 2 == 0
    heads = query.shape[3] % 8 == 0 and query.shape[3] <= 128
    return query.dtype == jnp.bfloat16 and not softcap and even and heads and _mask_bytes(seen) <= MASK_BYTES


def _mask_bytes(seen: Seen) -> int:
    return 2 * seen.queries.size * seen.keys.shape[1]


def splash(
    query: Array, key: Array, value: Array, seen: Seen, scale: float, softcap: float = 0.0, interpret: bool = False
) -> Array:
    """jax's Pallas kernel for TPU, which knows segments, grouped queries, windows and soft caps.

    interpret: emulate it on any platform, slowly.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    heads, length = query.shape[2], query.shape[1]
    whole = (length, length)
    mask = kernels.LocalMask(whole, (seen.window - 1, 0), 0) if seen.window else kernels.CausalMask(whole)
    block = next(size for size in (512, 256, 128) if length % size == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = kernels.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block))
    cap = {"attn_logits_soft_cap": softcap or None, "interpret": interpret}
    kernel = kernels.make_splash_mha_single_device(kernels.MultiHeadMask([mask] * heads), block_sizes=sizes, **cap)
    heads_first = (jnp.moveaxis(x, 2, 1) for x in (query * scale, key, value))
    return jnp.moveaxis(jax.vmap(kernel)(*heads_first, kernels.SegmentIds(seen.queries, seen.keys)), 1, 2)


def _splash_takes(query: Array, key: Array, seen: Seen, softcap: float) -> bool:
    """On one device only: XLA cannot split a Pallas kernel over the devices that rows are sharded on."""
    square = _is_zero(seen.start) and query.shape[1] == key.shape[1] and query.shape[1] % 128 == 0
    return square and isinstance(seen.window, int) and jax.device_count() == 1


CANDIDATES = {
    "cudnn": Candidate(
        "gpu",
        cudnn,
        _cudnn_takes,
        "an NVIDIA GPU, bf16, even lengths, a head_dim of at most 128 that 8 divides, no soft cap, and rows short enough for "
        f"a mask of {MASK_BYTES // 2**20} MiB",
    ),
    "splash": Candidate(
        "tpu",
        splash,
        _splash_takes,
        "one TPU device, whole rows whose length 128 divides, and windows that are known when it is compiled",
    ),
}


@functools.cache
def _trusted(name: str, candidate: Candidate, group: int, head_dim: int, dtype: str, softcap: float) -> bool:
    """Whether it agrees with `dense` on a small packed example. Else a warning says why not."""
    # In a thread of its own, where no program is being traced: the first to ask is a program that is.
    with ThreadPoolExecutor(1) as thread:
        try:
            deviation = thread.submit(_deviation, candidate, group, head_dim, dtype, softcap).result()
            problem = f"deviates by {deviation:.1%}"
        except Exception as error:  # kernels refuse with errors of all kinds, the compiler's too
            deviation, problem = np.inf, f"raises {type(error).__name__}: {error}"
    # A wrong mask or a wrong head is off by the values' own size; rounding in bf16 by a hundredth of it.
    trusted = bool(deviation < 0.05)
    if not trusted:
        warnings.warn(
            f"the attention kernel {name!r} {problem} where it is compared with the plain formula, so it is not used",
            stacklevel=2,
        )
    return trusted


def _deviation(candidate: Candidate, group: int, head_dim: int, dtype: str, softcap: float) -> float:
    """The largest of output and gradients from those of `dense` in fp32, relative to the largest value of each."""
    rng = np.random.default_rng(0)
    ids = np.repeat([[1, 2, 3, 4, 0], [1, 2, 3, 4, 5]], [100, 61, 1, 70, 24], axis=1).astype(np.int32)
    sizes = [(2, 256, heads, head_dim) for heads in (2 * group, 2, 2, 2 * group)]
    *inputs, gradient = (jnp.asarray(rng.normal(size=size), dtype) for size in sizes)
    gradient *= (ids > 0)[..., None, None]

    def results(attend: Attend, seen: Seen, *inputs: Array) -> list[np.ndarray]:
        def loss(*inputs: Array) -> tuple[Array, Array]:
            attended = attend(*inputs, seen, head_dim**-0.5, softcap).astype(jnp.float32)
            return jnp.sum(attended * gradient), attended * (ids > 0)[..., None, None]

        (_, attended), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)
        return [np.asarray(x, np.float32) for x in (attended, *gradients)]

    worst = 0.0
    for window in (0, 50):
        seen = Seen(jnp.asarray(ids), jnp.asarray(ids), 0, window)
        found = results(candidate.attend, seen, *inputs)
        wanted = results(dense, seen, *(x.astype(jnp.float32) for x in inputs))
        for x, y in zip(found, wanted, strict=True):
            worst = float(np.maximum(worst, np.max(np.abs(x - y)) / np.max(np.abs(y))))  # np.maximum keeps a NaN
    return worst
