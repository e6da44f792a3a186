from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from areal_x.errors import ConfigError
from areal_x.protocols.tries import subtree_ends
from areal_x_jax import attention
from areal_x_jax.attention import attend, prepare
from areal_x_jax.attention_kernels import Candidate, splash
from areal_x_jax.blocked_attention import KEPT, _Ids, _split, blocked, reach
from areal_x_jax.dense_attention import AttentionMask, Blocks, Tries, dense
from tests.thorough import further

HEAD_DIM = 8
SCALE = HEAD_DIM**-0.5
WAYS: dict[str, Callable[..., jax.Array]] = {"dense": dense, "blocked": partial(blocked, block=16)}


def packed(*rows: tuple[int, ...], length: int) -> np.ndarray:
    """Segment ids of rows of sequences of these lengths, padded."""
    ids = np.zeros((len(rows), length), np.int32)
    for row, lengths in zip(ids, rows, strict=True):
        filled = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        row[: len(filled)] = filled
    return ids


IDS = packed((17, 1, 22, 7), (37, 13), (5,), length=53)  # no multiple of the block, no end of a segment at its ends


def draw(ids: np.ndarray, group: int = 2, kv_heads: int = 2, value_dim: int = HEAD_DIM) -> list[np.ndarray]:
    """Query, key, value and a gradient of what is attended, which is 0 at padding as a loss's is."""
    rng = np.random.default_rng(0)
    heads = (group * kv_heads, kv_heads, kv_heads, group * kv_heads)
    sizes = zip(heads, (HEAD_DIM, HEAD_DIM, value_dim, value_dim), strict=True)
    query, key, value, gradient = (rng.normal(size=(*ids.shape, *size)).astype(np.float32) for size in sizes)
    return [query, key, value, gradient * (ids > 0)[..., None, None]]


def formula(
    inputs: list[np.ndarray],
    ids: np.ndarray,
    window: int = 0,
    softcap: float = 0.0,
    parents: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    blocks: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Returns the attention output and the gradients of query, key and value (and sinks), in fp64, one query of one head at a
    time. parents: a batch's; a query sees the last `window` of its ancestors and itself. blocks: see `Blocks`."""
    query, key, value, gradient = (x.astype(np.float64) for x in inputs)
    group = query.shape[2] // key.shape[2]
    attended, d_query, d_key, d_value = (np.zeros_like(x) for x in (gradient, query, key, value))
    d_sinks = np.zeros(query.shape[2])
    for row, i, head in np.ndindex(query.shape[:3]):
        first = max(0, i - window + 1) if window else 0
        own = 0 if blocks is None else blocks[row, i]
        after = [j for j in range(i + 1, ids.shape[1]) if blocks is not None and blocks[row, j] == own > 0]
        at = [j for j in [*range(first, i + 1), *after] if ids[row, j] == ids[row, i] > 0]
        if parents is not None:
            at = ancestors(parents[row], i)[-window:] if ids[row, i] else []
        if not at:
            continue
        keys, values = key[row, at, head // group], value[row, at, head // group]
        scores = keys @ query[row, i, head] * SCALE
        slope = 1 / np.cosh(scores / softcap) ** 2 if softcap else 1.0
        scores = softcap * np.tanh(scores / softcap) if softcap else scores
        weights = np.exp(scores - scores.max())
        sink = 0.0 if sinks is None else np.exp(sinks[head] - scores.max())
        total = weights.sum() + sink
        weights /= total
        attended[row, i, head] = weights @ values
        d_weights = values @ gradient[row, i, head]
        d_scores = weights * (d_weights - weights @ d_weights) * slope * SCALE
        d_sinks[head] -= sink / total * (weights @ d_weights)
        d_query[row, i, head] = d_scores @ keys
        d_key[row, at, head // group] += np.outer(d_scores, query[row, i, head])
        d_value[row, at, head // group] += np.outer(weights, gradient[row, i, head])
    return [attended, d_query, d_key, d_value, *([] if sinks is None else [d_sinks])]


def computed(
    way: Callable[..., jax.Array],
    inputs: list[Any],
    seen: AttentionMask,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Returns the same as `formula`, computed by `way`; seen's window and start are traced unless they are integers."""
    *qkv, gradient = inputs

    @jax.jit
    def run(seen_arrays: tuple[Any, ...], *given: jax.Array) -> tuple[jax.Array, ...]:
        static = {name: x for name, x in seen._asdict().items() if isinstance(x, int)}
        known = AttentionMask(*seen_arrays)._replace(**static)

        def attend(query: jax.Array, key: jax.Array, value: jax.Array, *sinks: jax.Array) -> jax.Array:
            return way(query, key, value, known, SCALE, softcap, **({"sinks": sinks[0]} if sinks else {}))

        attended, back = jax.vjp(attend, *given)
        return attended, *back(jnp.asarray(gradient, attended.dtype))

    given = qkv if sinks is None else [*qkv, sinks]
    attended, *gradients = (np.asarray(x, np.float32) for x in run(tuple(seen), *given))
    return [attended * (np.asarray(seen.queries) > 0)[..., None, None], *gradients]


def assert_close(found: list[np.ndarray], wanted: list[np.ndarray], most: float = 1e-5) -> None:
    for name, x, y in zip(("attended", "query", "key", "value", "sinks")[: len(wanted)], found, wanted, strict=True):
        assert np.max(np.abs(x - y)) <= most, name


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("group", [1, 2, 4])
def test_packed_rows_attend_as_the_formula_says(way: Callable[..., jax.Array], group: int) -> None:
    inputs = draw(IDS, group)
    assert_close(computed(way, inputs, AttentionMask(IDS, IDS)), formula(inputs, IDS))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("window, traced", [(1, False), (3, False), (99, False), (1, True), (20, True), (99, True)])
def test_a_window_hides_what_is_further_back(way: Callable[..., jax.Array], window: int, traced: bool) -> None:
    inputs = draw(IDS)
    seen = AttentionMask(IDS, IDS, window=jnp.int32(window) if traced else window)
    assert_close(computed(way, inputs, seen), formula(inputs, IDS, window))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("group, window, traced, softcap", [(1, 0, False, 0.0), (2, 5, True, 0.0), (4, 3, False, 2.0)])
def test_a_sink_takes_part_in_the_softmax_of_its_head(
    way: Callable[..., jax.Array], group: int, window: int, traced: bool, softcap: float
) -> None:
    inputs, sinks = draw(IDS, group), np.linspace(-2, 3, 2 * group).astype(np.float32)
    seen = AttentionMask(IDS, IDS, window=jnp.int32(window) if traced else window)
    wanted = formula(inputs, IDS, window, softcap, sinks=sinks)
    assert_close(computed(way, inputs, seen, softcap, sinks), wanted)
    assert np.abs(wanted[-1]).min() > 0.01


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("value_dim", [5, *further(12)])
def test_values_may_have_other_features_than_keys(way: Callable[..., jax.Array], value_dim: int) -> None:
    inputs = draw(IDS, value_dim=value_dim)
    assert_close(computed(way, inputs, AttentionMask(IDS, IDS)), formula(inputs, IDS))


def test_no_kernel_of_a_platform_is_given_sinks_or_values_of_another_width(monkeypatch: pytest.MonkeyPatch) -> None:
    takes_all = Candidate(jax.default_backend(), dense, lambda *_: True, "nothing")
    monkeypatch.setattr(attention, "CANDIDATES", {"any": takes_all})
    query, key, *_ = draw(IDS)
    seen = AttentionMask(IDS, IDS)
    with pytest.raises(ConfigError, match="no sinks"):
        attention.choose(query, key, seen, 0.0, "any", special=True)
    assert attention.choose(query, key, seen, 0.0, "auto", special=True) is dense
    query, key, value, _ = draw(IDS, value_dim=5)
    with pytest.raises(ConfigError, match="values as wide as keys"):
        attend(query, key, value, seen, scale=SCALE, implementation="any")


def ancestors(parents: np.ndarray, i: int) -> list[int]:
    """A token and those before it in its sequences, the first one first."""
    return [*(ancestors(parents, parents[i]) if parents[i] >= 0 else []), i]


def trie(*rows: tuple[tuple[int, int], ...], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and parents of rows of nodes, each as its length and the number of the one that it continues, or −1."""
    ids, parents = np.zeros((len(rows), length), np.int32), np.full((len(rows), length), -1, np.int32)
    for row, of_row in enumerate(rows):
        ends: list[int] = []
        for number, (tokens, parent) in enumerate(of_row):
            start = ends[-1] if ends else 0
            ids[row, start : start + tokens] = number + 1
            parents[row, start : start + tokens] = [ends[parent] - 1 if parent >= 0 else -1, *range(start, start + tokens - 1)]
            ends.append(start + tokens)
    return ids, parents


def tries_of(ids: np.ndarray, parents: np.ndarray) -> Tries:
    until = np.stack([subtree_ends(own, of_row) for own, of_row in zip(parents, ids, strict=True)])
    positions = np.array([[len(ancestors(own, i)) - 1 for i in range(ids.shape[1])] for own in parents], np.int32)
    return Tries(until, positions, positions)


# Nodes that several go on from, below others that several go on from, between sequences that share nothing.
SHARING, PARENTS = trie(
    ((5, -1), (9, -1), (6, 1), (4, 2), (3, 2), (5, 1), (8, -1)),
    ((12, -1), (3, 0), (9, 1), (1, 1), (7, 0), (14, 0)),
    ((5, -1),),
    length=53,
)


@pytest.mark.parametrize("way", [*WAYS.values(), partial(blocked, block=7)], ids=[*WAYS, "blocks of 7"])
@pytest.mark.parametrize("group", [1, *further(2)])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.7), (6, 0.0), *further((1, 0.0), (13, 0.7))])
def test_branches_see_what_they_share_and_not_each_other(
    way: Callable[..., jax.Array], group: int, window: int, softcap: float
) -> None:
    inputs = draw(SHARING, group)
    seen = AttentionMask(SHARING, SHARING, window=window, tries=tries_of(SHARING, PARENTS))
    wanted = formula(inputs, SHARING, window, softcap, PARENTS)
    assert_close(computed(way, inputs, seen, softcap), wanted)
    assert_close(computed(way, inputs, prepare(seen, "dense"), softcap), wanted)


def test_a_part_of_the_queries_sees_of_a_trie_what_all_see() -> None:
    query, key, value, gradient = draw(SHARING)
    whole, at = tries_of(SHARING, PARENTS), slice(20, 41)
    wanted = computed(WAYS["dense"], draw(SHARING), AttentionMask(SHARING, SHARING, window=6, tries=whole))
    for way in (WAYS["dense"], partial(blocked, block=7)):
        tries = Tries(whole.until, whole.query_positions[:, at], whole.key_positions)
        seen = AttentionMask(SHARING[:, at], SHARING, jnp.int32(at.start), 6, tries=tries)
        found = computed(way, [query[:, at], key, value, gradient[:, at]], seen)
        assert_close(found[:2], [x[:, at] for x in wanted[:2]])


# In the first row two blocks in a sequence, one of a whole sequence and one at the end of another; in the second a long one.
BLOCKS = np.zeros_like(IDS)
for row, first, end, number in ((0, 2, 7, 1), (0, 8, 17, 2), (0, 17, 18, 3), (0, 30, 40, 4), (1, 3, 33, 1)):
    BLOCKS[row, first:end] = number


@pytest.mark.parametrize("way", [*WAYS.values(), partial(blocked, block=7)], ids=[*WAYS, "blocks of 7"])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.7), (4, 0.0), *further((1, 0.0), (13, 0.7))])
def test_tokens_of_a_block_see_those_of_it_after_them(way: Callable[..., jax.Array], window: int, softcap: float) -> None:
    inputs, seen = draw(IDS), AttentionMask(IDS, IDS, window=window, blocks=Blocks(BLOCKS, BLOCKS))
    wanted = formula(inputs, IDS, window, softcap, blocks=BLOCKS)
    assert_close(computed(way, inputs, seen, softcap), wanted)
    assert_close(computed(way, inputs, prepare(seen, "dense"), softcap), wanted)
    query, key, value, gradient = inputs
    at = slice(5, 31)  # a part of a row, which begins and ends within blocks
    part = AttentionMask(IDS[:, at], IDS, jnp.int32(at.start), window, blocks=Blocks(BLOCKS[:, at], BLOCKS))
    found = computed(way, [query[:, at], key, value, gradient[:, at]], part, softcap)
    assert_close(found[:2], [x[:, at] for x in wanted[:2]])


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_traced_window_of_zero_hides_nothing(way: Callable[..., jax.Array]) -> None:
    inputs = draw(IDS)
    assert_close(computed(way, inputs, AttentionMask(IDS, IDS, window=jnp.int32(0))), formula(inputs, IDS))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("window", [0, 5])
def test_a_soft_cap_bends_the_scores(way: Callable[..., jax.Array], window: int) -> None:
    inputs = draw(IDS)
    assert_close(computed(way, inputs, AttentionMask(IDS, IDS, window=window), 0.7), formula(inputs, IDS, window, 0.7))


@pytest.mark.parametrize("block", [7, 53, 512])
def test_blocks_of_any_size_give_the_same(block: int) -> None:
    inputs = draw(IDS)
    assert_close(computed(partial(blocked, block=block), inputs, AttentionMask(IDS, IDS)), formula(inputs, IDS))


def test_segments_may_come_in_any_order() -> None:
    ids = np.random.default_rng(1).integers(0, 4, IDS.shape).astype(np.int32)
    inputs = draw(ids)
    assert_close(computed(WAYS["blocked"], inputs, AttentionMask(ids, ids, window=30)), formula(inputs, ids, 30))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("window", [0, 9])
def test_the_parts_of_a_row_attend_as_the_whole(way: Callable[..., jax.Array], window: int) -> None:
    inputs = draw(IDS)
    query, key, value, gradient = inputs
    parts = [
        computed(way, [query[:, at], key, value, gradient[:, at]], AttentionMask(IDS[:, at], IDS, jnp.int32(at.start), window))
        for at in (slice(0, 21), slice(21, 53))
    ]
    attended, d_query = (np.concatenate([part[i] for part in parts], axis=1) for i in (0, 1))
    d_key, d_value = (sum(part[i] for part in parts) for i in (2, 3))
    assert_close([attended, d_query, d_key, d_value], formula(inputs, IDS, window))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_parts_of_a_row_may_be_on_their_devices(way: Callable[..., jax.Array]) -> None:
    """Under shard_map, which checks that what a loop carries varies over devices as it did before."""
    mesh = jax.make_mesh((1,), ("context",), axis_types=(AxisType.Auto,))
    part = PartitionSpec(None, "context")

    def split(ids: jax.Array, *qkv: jax.Array) -> jax.Array:
        whole, key, value = (jax.lax.all_gather(x, "context", axis=1, tiled=True) for x in (ids, *qkv[1:]))
        return way(qkv[0], key, value, AttentionMask(ids, whole, jax.lax.axis_index("context") * ids.shape[1]), SCALE)

    def on_mesh(query: jax.Array, key: jax.Array, value: jax.Array, seen: AttentionMask, *_: float) -> jax.Array:
        return jax.shard_map(split, mesh=mesh, in_specs=part, out_specs=part)(seen.queries, query, key, value)

    inputs = draw(IDS)
    assert_close(computed(on_mesh, inputs, AttentionMask(IDS, IDS)), formula(inputs, IDS))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_sequence_alone_attends_as_it_does_packed(way: Callable[..., jax.Array]) -> None:
    inputs, at = draw(IDS), slice(18, 40)
    whole = computed(way, inputs, AttentionMask(IDS, IDS))
    alone = computed(way, [x[:1, at] for x in inputs], AttentionMask(IDS[:1, at], IDS[:1, at]))
    assert_close(alone, [x[:1, at] for x in whole], 2e-6)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_bf16_rounds_and_no_more(way: Callable[..., jax.Array]) -> None:
    inputs = [jnp.asarray(x, jnp.bfloat16) for x in draw(IDS)]
    wanted = formula([np.asarray(x) for x in inputs], IDS)
    assert_close(computed(way, inputs, AttentionMask(IDS, IDS)), wanted, 0.05)
    assert way(*inputs[:3], AttentionMask(IDS, IDS), SCALE).dtype == jnp.bfloat16


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_scores_and_softmax_are_in_fp32_whatever_the_input(way: Callable[..., jax.Array]) -> None:
    """Scores of 512, 513, 514 and 515, ten times each: the next number to 512 in bf16 is 516."""
    more, ids = np.arange(40) % 4, np.ones((1, 40), np.int32)
    key = jnp.asarray(np.stack([np.full(40, 8), more], axis=-1)[None, :, None], jnp.bfloat16)
    query = jnp.broadcast_to(jnp.asarray([64, 1], jnp.bfloat16), key.shape)
    attended = np.asarray(way(query, key, key, AttentionMask(ids, ids), 1.0), np.float32)
    assert abs(attended[0, -1, 0, 1] - np.average(more, weights=np.exp(more))) < 0.02


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("softcap", [0.0, 1.0])
def test_nothing_is_nan_whatever_is_padding(way: Callable[..., jax.Array], softcap: float) -> None:
    """Large scores and gradients at padding included."""
    ids = packed((), (3,), (20,), length=53)
    inputs = [1e3 * x for x in draw(ids)]
    inputs[3] = inputs[0]
    assert all(np.isfinite(x).all() for x in computed(way, inputs, AttentionMask(ids, ids, window=jnp.int32(2)), softcap))


def test_padding_gets_nothing_from_blocks() -> None:
    attended = np.asarray(WAYS["blocked"](*draw(IDS)[:3], AttentionMask(IDS, IDS), SCALE))
    np.testing.assert_array_equal((attended == 0).all(axis=(2, 3)), IDS == 0)


def test_what_is_prepared_is_what_dense_adds() -> None:
    inputs, windows = draw(IDS), (0, 3, jnp.int32(3))
    for window in windows:
        seen = AttentionMask(IDS, IDS, window=window)
        ready = prepare(seen, "dense")
        assert ready.bias is not None
        np.testing.assert_array_equal(dense(*inputs[:3], ready, SCALE), dense(*inputs[:3], seen, SCALE))
    assert prepare(AttentionMask(IDS, IDS), "blocked").bias is None
    assert prepare(AttentionMask(IDS, IDS)).bias is not None
    long = np.ones((1, attention.DENSE_KEYS + 1), np.int32)
    assert prepare(AttentionMask(long, long)).bias is None


# ---- what blocked costs


def pairs(ids: np.ndarray, block: int, window: int = 0, tries: Tries | None = None) -> int:
    split = partial(_split, block=block)
    of_blocks = None if tries is None else Tries(*(split(jnp.asarray(x)) for x in tries))
    reached = reach(_Ids(split(jnp.asarray(ids)), split(jnp.asarray(ids)), 0, window, of_blocks))
    return int(np.sum(reached.count))


def test_pairs_of_blocks_in_which_nothing_is_seen_are_passed_over() -> None:
    one = packed((1024,), length=1024)
    assert pairs(one, 64) == 16 * 17 // 2
    assert pairs(one, 64, window=64) == 16 + 15
    assert pairs(one, 64, window=1) == 16
    assert pairs(packed((128,) * 8, length=1024), 64) == 8 * 3
    assert pairs(packed((100,) * 10, length=1024), 64) <= 16 * 3
    assert pairs(packed((64,), length=1024), 64) == 1  # padding costs nothing
    assert pairs(packed((100,), (), length=1024), 64) == 3


def test_of_a_trie_those_blocks_are_computed_in_which_something_is_seen_and_no_others() -> None:
    ids, parents = trie(((256, -1), *((64, 0) for _ in range(8))), length=768)
    assert pairs(ids, 64, tries=tries_of(ids, parents)) == 4 * 5 // 2 + 8 * (4 + 1)
    nodes = ((128, -1), (192, -1), (64, 1), (128, 2), (64, 2), (64, 1))
    ids, parents = trie(nodes, length=768)
    tries = tries_of(ids, parents)
    assert pairs(ids, 64, tries=tries) == 3 + 3 * 4 // 2 + 4 + (5 + 6) + 5 + 4  # padding costs nothing
    assert pairs(ids, 64, 64, tries) == 3 + 5 + 2 + 4 + 2 + 2  # own blocks and the one before
    for block in (32, 48):
        until = tries.until
        i, j = np.meshgrid(np.arange(768), np.arange(768), indexing="ij")
        seen = (j <= i) & (i < until[0][None]) & (ids[0] > 0)[:, None]
        count = sum(seen[a : a + block, b : b + block].any() for a in range(0, 768, block) for b in range(0, 768, block))
        assert pairs(ids, block, tries=tries) == count


def arrays_of(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """The shapes of all results in a jaxpr and those in it."""
    for equation in jaxpr.eqns:
        yield from (x.aval.shape for x in equation.outvars if hasattr(x.aval, "shape"))
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from arrays_of(inner)


@pytest.mark.parametrize("way, squares", [("dense", True), ("blocked", False)])
def test_blocked_never_builds_an_array_of_queries_by_keys(way: str, squares: bool) -> None:
    length = 16384
    query, key = (jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32) for heads in (4, 2))
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def loss(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(attend(query, key, value, AttentionMask(ids, ids), scale=0.125, implementation=way))

    for function in (loss, jax.grad(loss, argnums=(0, 1, 2))):
        shapes = list(arrays_of(jax.make_jaxpr(function)(query, key, key, ids).jaxpr))
        assert any(sum(n >= length for n in shape) >= 2 for shape in shapes) is squares
        largest = length * 4 * 64
        assert any(np.prod(shape) > largest for shape in shapes) is squares


def test_its_backward_pass_runs_no_forward_pass_where_a_policy_keeps_its_names() -> None:
    inputs = draw(IDS)
    seen = AttentionMask(IDS, IDS)

    def loops(policy: Any) -> int:
        layer = jax.checkpoint(lambda *qkv: jnp.sum(blocked(*qkv, seen, SCALE) ** 2), policy=policy)
        return str(jax.make_jaxpr(jax.grad(layer))(*inputs[:3])).count("while[")

    kept = jax.checkpoint_policies.save_only_these_names(KEPT)
    assert loops(kept) == loops(jax.checkpoint_policies.nothing_saveable) - 1


# ---- which way is taken


def call(implementation: str = "auto", **change: Any) -> np.ndarray:
    return np.asarray(attend(*draw(IDS)[:3], AttentionMask(IDS, IDS, **change), scale=SCALE, implementation=implementation))


def test_names_force_a_way_and_all_agree() -> None:
    rows, length = IDS.shape
    wanted = formula(draw(IDS), IDS)[0].reshape(rows, length, -1)
    for implementation in ("auto", "dense", "blocked"):
        np.testing.assert_allclose(call(implementation) * (IDS > 0)[..., None], wanted, atol=1e-5)
    arguments = [*(jnp.asarray(x) for x in draw(IDS)[:2]), AttentionMask(IDS, IDS), 0.0]
    assert attention.choose(*arguments, "blocked") is blocked
    assert attention.choose(*arguments, "dense") is dense
    assert attention.choose(*arguments, "auto") is dense
    long = jnp.zeros((1, attention.DENSE_KEYS + 1, 1, 8))
    assert attention.choose(long, long, AttentionMask(long[..., 0, 0], long[..., 0, 0]), 0.0, "auto") is blocked


def test_an_unknown_name_and_another_platforms_kernel_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.attention = 'dens' .* did you mean 'dense'"):
        call("dens")
    with pytest.raises(ConfigError, match=r"model\.attention = 'splash' .* splash needs one TPU"):
        call("splash")
    with pytest.raises(ConfigError, match=r"cudnn needs an NVIDIA GPU, bf16"):
        call("cudnn")


def with_candidate(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., jax.Array]) -> list[str]:
    """Makes it the CPU's candidate for calls without a soft cap, and gives what is traced of it by name."""
    traced: list[str] = []

    def attend_and_tell(*arguments: Any) -> jax.Array:
        traced.append("kernel")
        return kernel(*arguments)

    candidate = Candidate("cpu", attend_and_tell, lambda query, key, seen, softcap: not softcap, "no soft cap")
    monkeypatch.setattr(attention, "CANDIDATES", {"fake": candidate})
    return traced


def in_a_program(softcap: float = 0.0) -> np.ndarray:
    """Asked for within a scan that is being traced and differentiated, as a model does."""
    query, key, value, _ = (jnp.asarray(x) for x in draw(IDS))
    seen = AttentionMask(jnp.asarray(IDS), jnp.asarray(IDS))

    @jax.jit
    @jax.grad
    def program(query: jax.Array) -> jax.Array:
        def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return x + attend(x, key, value, seen, scale=SCALE, softcap=softcap).reshape(x.shape), None

        return jnp.sum(jnp.where(seen.queries[..., None, None] > 0, jax.lax.scan(layer, query, None, 2)[0], 0.0) ** 2)

    return np.asarray(program(query))


def test_no_kernel_is_used_for_tokens_that_see_those_after_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, traced = AttentionMask(IDS, IDS, blocks=Blocks(BLOCKS, BLOCKS)), with_candidate(monkeypatch, blocked)
    attend(*draw(IDS)[:3], seen, scale=SCALE)
    assert not traced
    with pytest.raises(ConfigError, match="no images that see themselves whole"):
        attend(*draw(IDS)[:3], seen, scale=SCALE, implementation="fake")


def test_a_kernel_that_agrees_is_used_and_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = in_a_program()
    traced = with_candidate(monkeypatch, blocked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(in_a_program(), wanted, atol=1e-4)
        first = len(traced)
        in_a_program()
    assert 0 < len(traced) - first < first
    traced.clear()
    in_a_program(softcap=1.0)  # which it does not take
    assert not traced
    with pytest.raises(ConfigError, match=r"model\.attention = 'fake' .* fake needs no soft cap"):
        attend(*draw(IDS)[:3], AttentionMask(IDS, IDS), scale=SCALE, softcap=1.0, implementation="fake")


def swapped_heads(query: jax.Array, key: jax.Array, value: jax.Array, *rest: Any) -> jax.Array:
    """Right for one query a key; for grouped queries each head reads another's keys."""
    order = jnp.arange(query.shape[2]) % key.shape[2]
    return dense(query, key[:, :, order], value[:, :, order], *rest)


def no_segments(query: jax.Array, key: jax.Array, value: jax.Array, seen: AttentionMask, *rest: Any) -> jax.Array:
    ids = jnp.ones_like(seen.queries), jnp.ones_like(seen.keys)
    return dense(query, key, value, AttentionMask(*ids, window=seen.window), *rest)


def no_window(query: jax.Array, key: jax.Array, value: jax.Array, seen: AttentionMask, *rest: Any) -> jax.Array:
    return dense(query, key, value, seen._replace(window=0), *rest)


def no_gradient(query: jax.Array, key: jax.Array, *rest: Any) -> jax.Array:
    return dense(query, jax.lax.stop_gradient(key), *rest)


def not_a_number(*arguments: Any) -> jax.Array:
    return dense(*arguments) * jnp.nan


def broken(*arguments: Any) -> jax.Array:
    raise NotImplementedError("this GPU is too old")


@pytest.mark.parametrize(
    "kernel, problem",
    [
        (swapped_heads, r"'fake' deviates by \d+\.\d%"),
        (no_segments, "deviates by"),
        (no_window, "deviates by"),
        (no_gradient, "deviates by"),
        (not_a_number, "deviates by nan"),
        (broken, "raises NotImplementedError: this GPU is too old"),
    ],
)
def test_a_kernel_that_deviates_or_raises_is_not_used(
    monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., jax.Array], problem: str
) -> None:
    wanted = in_a_program()
    with_candidate(monkeypatch, kernel)
    with pytest.warns(UserWarning, match=problem):
        found = in_a_program()
    np.testing.assert_array_equal(found, wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        in_a_program()


@pytest.mark.parametrize("window, softcap", [(50, 2.0), *further((0, 0.0))])
def test_the_kernel_for_tpu_agrees_where_it_is_emulated(window: int, softcap: float) -> None:
    ids = packed((50, 71, 7), (100,), length=128)
    inputs = draw(ids)
    seen = AttentionMask(ids, ids, window=window)
    assert_close(computed(partial(splash, interpret=True), inputs, seen, softcap), formula(inputs, ids, window, softcap))
