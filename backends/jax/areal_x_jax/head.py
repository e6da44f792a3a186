"""The heads: log-probabilities of given tokens without an array of tokens by vocabulary, or one
number per token.

The shift by one, from a position's output to the token it predicts, happens here and nowhere else.

Logits are computed for one block of the vocabulary after another, and recomputed in the backward
pass, so that one block's logits exist at a time and the kernel's gradient is written once, block by
block. A divergence is a function of all logits of a position: with a teacher, chunks of positions
take the place of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from areal_x.types import Divergence
from areal_x_jax.dense_attention import HIDDEN, softcapped
from areal_x_jax.device import LOGITS
from areal_x_jax.sharding import AXES, ONE_DEVICE, ROW_AXES, Partitioner

NARROWEST = 512  # least columns or positions at once: narrower products are slow
WORD = 32  # bits of a word


class Teacher(NamedTuple):
    """A frozen model's hidden states for the same tokens and its head kernel, with the divergence
    from it. The divergence is taken over the tokens that both vocabularies have, because either
    embedding may be padded further."""

    hidden: Float[Array, "rows length teacher_features"]
    kernel: Float[Array, "teacher_features teacher_vocab"]
    divergence: Divergence
    softcap: float = 0.0


def logprobs(
    hidden: Float[Array, "rows length features"],
    kernel: Float[Array, "features vocab"],
    tokens: Int[Array, "rows length"],
    segment_ids: Int[Array, "rows length"],
    temperature: float,
    chunk: int = 0,
    entropy: bool = False,
    teacher: Teacher | None = None,
    softcap: float = 0.0,
    partitioner: Partitioner = ONE_DEVICE,
    tied: bool = False,
    kept: Int[Array, "rows most 2"] | None = None,
    logits_at_once: int = LOGITS,
    parents: Int[Array, "rows length"] | None = None,
) -> tuple[
    Float[Array, "rows length"],
    Float[Array, "rows length"] | None,
    Float[Array, "rows length"] | None,
]:
    """Returns log softmax(logits / temperature) of each token, predicted from the one before it in
    its segment, else 0; then the entropy and the divergence, or None. In fp32.

    entropy: also return the entropy of softmax(logits / temperature), in nats, at the same tokens.
    teacher: also return the divergence of both logits / temperature. kernel: in fp32, so that its
    gradient is; products are in hidden's dtype. chunk: as many logits exist at once as this many
    positions have, but at least one position of each row; 0 makes them about `logits_at_once`.
    softcap: of the logits, before the temperature. partitioner: with its axis "tensor" each device
    has the logits of a part of the vocabulary, and only sums are exchanged. tied: True if the
    kernel is a transposed array, which is then read in place instead of copied. kept: see
    `areal_x.types.Batch`; the softmax of a token that has any is over these ids alone, but not that
    of a divergence. parents: of tokens that sequences share, see there too: a token is predicted from
    its parent.
    """
    if parents is not None:
        hidden = _before_next(hidden, parents)
        if teacher is not None:
            teacher = teacher._replace(hidden=_before_next(teacher.hidden, parents))
    rows, length = tokens.shape
    apart, least = partitioner.size(*ROW_AXES), 1 if chunk else NARROWEST
    # of one device
    vocab, positions = kernel.shape[1] // partitioner.size("tensor"), rows * length // apart
    at_once = max(chunk // apart if chunk else logits_at_once // vocab, 1)
    # All at once nothing is computed twice, which saves a quarter of the work and is worth the
    # memory of two blocks.
    if teacher is None and positions > (at_once if chunk else 2 * at_once):
        width = _width(vocab, max(at_once * vocab // positions, least))
        blocks = Blocks(width, temperature, softcap, entropy, tied, partitioner)
        flat = (
            hidden.reshape(-1, hidden.shape[-1]),
            kernel.T if tied else kernel,
            jnp.roll(tokens, -1, axis=1).reshape(-1),
            kept,
        )
        outputs = jax.tree.map(
            lambda x: x.reshape(rows, length)[:, :-1], (*_by_blocks(blocks, *flat), None)
        )
        return jax.tree.map(lambda x: _shift_to_next(x, segment_ids, parents), outputs)
    kernel = partitioner.constrain(kernel, None, "vocab")

    def logits_of(
        hidden: Array, kernel: Array, softcap: float
    ) -> Float[Array, "rows columns vocab"]:
        logits = jnp.dot(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)
        return partitioner.constrain(
            softcapped(logits, softcap) / temperature, "rows", None, "vocab"
        )

    def chosen_of(logits: Array, targets: Array) -> Float[Array, "rows columns"]:
        if partitioner.size("tensor") == 1:
            return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(
            jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], logits, 0), axis=-1
        )

    def one(
        part: tuple[Array, Array, Array | None, KeptWords | None],
    ) -> tuple[Array, Array | None, Array | None]:
        hidden, targets, of_teacher, words = part
        logits = every_logit = logits_of(hidden, kernel, softcap)
        if words is not None:
            logits = jnp.where(words.mask(logits.shape[-1]), logits, HIDDEN)
        chosen = chosen_of(logits, targets)
        total = jax.nn.logsumexp(logits, axis=-1)
        divergence = None
        if teacher is not None:
            theirs = logits_of(of_teacher, teacher.kernel, teacher.softcap)
            both = min(logits.shape[-1], theirs.shape[-1])
            divergence = teacher.divergence(every_logit[..., :both], theirs[..., :both])
        return chosen - total, _entropy(logits - total[..., None]) if entropy else None, divergence

    words = None
    if kept is not None:
        bits, truncated = kept_words(kept, length, np.zeros((1, 2), np.int32), kernel.shape[1])
        bits = bits.reshape(rows, length, -1)
        words = KeptWords(bits[:, :-1], truncated.reshape(rows, length)[:, :-1])
    whole = (
        hidden[:, :-1],
        tokens[:, 1:],
        None if teacher is None else teacher.hidden[:, :-1],
        words,
    )
    chunks = 1 if teacher is None else -(-rows * (length - 1) // (max(at_once, least) * apart))
    if chunks <= 1:
        outputs = one(whole)
    else:
        columns = -(-(length - 1) // chunks)
        split = jax.tree.map(lambda x: _split(x, columns), whole)
        outputs = jax.lax.map(jax.checkpoint(one), split)  # each [chunks, rows, columns]
        outputs = jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, : length - 1], outputs
        )
    return jax.tree.map(lambda x: _shift_to_next(x, segment_ids, parents), outputs)


def values(
    hidden: Float[Array, "rows length features"],
    kernel: Float[Array, "features 1"],
    segment_ids: Int[Array, "rows length"],
    before: bool,
    parents: Int[Array, "rows length"] | None = None,
) -> Float[Array, "rows length"]:
    """Returns hidden @ kernel for each token of a segment, else 0. In fp32.

    before: for each token the value after the token before it in its segment, as for a
    log-probability; 0 for a segment's first token. parents: see `logprobs`.
    """
    if parents is not None and before:
        hidden = _before_next(hidden, parents)
    of_each = (hidden.astype(jnp.float32) @ kernel)[..., 0]
    return (
        _shift_to_next(of_each[:, :-1], segment_ids, parents)
        if before
        else jnp.where(segment_ids > 0, of_each, 0.0)
    )


def _before_next(
    hidden: Float[Array, "rows length features"], parents: Int[Array, "rows length"]
) -> Float[Array, "rows length features"]:
    """Returns in each place the state of the next token's parent, from which that is predicted: that
    of the place itself, but before a node of a trie."""
    at = jnp.pad(jnp.maximum(parents[:, 1:], 0), ((0, 0), (0, 1)))
    return jnp.take_along_axis(hidden, at[..., None], axis=1)


def _shift_to_next(
    outputs: Float[Array, "rows length-1"],
    segment_ids: Int[Array, "rows length"],
    parents: Int[Array, "rows length"] | None,
) -> Float[Array, "rows length"]:
    """Moves each position's output to the next token, which it predicts; 0 at padding and at the
    first token of a segment, or one without a parent."""
    follows = segment_ids[:, 1:] > 0
    if parents is None:
        follows &= segment_ids[:, 1:] == segment_ids[:, :-1]
    else:
        follows &= parents[:, 1:] >= 0
    return jnp.pad(jnp.where(follows, outputs, 0.0), ((0, 0), (1, 0)))


def _entropy(logp: Float[Array, "... vocab"]) -> Float[Array, ...]:
    return -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def _split(x: Array, columns: int) -> Array:
    """Reshapes [rows, length, …] to [chunks, rows, columns, …], padded with zeros to whole
    chunks."""
    rows, length, *rest = x.shape
    chunks = -(-length // columns)
    x = jnp.pad(x, ((0, 0), (0, chunks * columns - length), *((0, 0) for _ in rest)))
    return jnp.moveaxis(x.reshape(rows, chunks, columns, *rest), 1, 0)


# ---- truncated sampling


class KeptWords(NamedTuple):
    """Which tokens of the vocabulary each position's softmax is over. bits: of 32 tokens in each
    word, the first being the lowest. truncated: False for a position that keeps all."""

    bits: UInt32[Array, "*positions words"]
    truncated: Bool[Array, "*positions"]

    def mask(self, width: int) -> Bool[Array, "*positions width"]:
        bit = jnp.arange(WORD, dtype=jnp.uint32)
        bits = (self.bits[..., None] >> bit) & 1
        unpacked = bits.reshape(*self.bits.shape[:-1], -1)[..., :width]
        return (unpacked > 0) | ~self.truncated[..., None]


def kept_words(
    kept: Int[Array, "rows most 2"],
    length: int,
    starts: Int[np.ndarray, "blocks 2"],
    width: int,
    first: Array | int = 0,
) -> KeptWords:
    """Returns the kept tokens of each block of the vocabulary, with bits [blocks, positions, words]
    and truncated [positions]. The positions are those before the tokens, of all rows.

    starts, width: of the blocks, from the token `first` on (see `_starts`). A bit per token of the
    vocabulary is an eighth of a byte where a logit is four: 1/32 of what the logits of all blocks
    would take.
    """
    rows = kept.shape[0]
    at, ids = kept[..., 0] - 1, kept[..., 1] - first
    # Padding is at a negative index, which has to be out of range instead.
    positions = jnp.where(at >= 0, jnp.arange(rows)[:, None] * length + at, rows * length)
    truncated = jnp.zeros(rows * length, bool).at[positions].set(True, mode="drop")
    own = (ids >= 0) & (ids < starts[-1, 0] + width)
    block = jnp.where(own, ids // width, len(starts))
    column = ids - jnp.asarray(starts[:, 0])[jnp.minimum(block, len(starts) - 1)]
    bits = jnp.zeros((len(starts), rows * length, -(-width // WORD)), jnp.uint32)
    # Each token's own bit: their sum is their union.
    bits = bits.at[block, positions, column // WORD].add(
        jnp.uint32(1) << (column % WORD).astype(jnp.uint32), mode="drop"
    )
    return KeptWords(bits, truncated)


# ---- by blocks of the vocabulary


class Blocks(NamedTuple):
    """How logits are computed in blocks. width: columns of a block. tied: True if the kernel is
    [vocab, features]."""

    width: int
    temperature: float
    softcap: float
    entropy: bool
    tied: bool
    partitioner: Partitioner

    @property
    def axis(self) -> int:
        """The kernel's vocabulary axis."""
        return 0 if self.tied else 1

    def of_kernel(self, kernel: Array, start: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(kernel, start, self.width, self.axis)

    def logits(self, products: Float[Array, "positions width"]) -> Float[Array, "positions width"]:
        return softcapped(products, self.softcap) / self.temperature


PerPosition: TypeAlias = Float[Array, " positions"]
TokenStatistics: TypeAlias = tuple[
    PerPosition, PerPosition | None
]  # log-probabilities and entropies


def _width(vocab: int, most: int) -> int:
    """Returns the width of the fewest equally wide blocks that are no wider than `most`."""
    most = min(most, vocab)
    step = 128 if most >= 128 else 1  # the hardware's tile
    count = -(-vocab // (most - most % step))
    return min(-(-vocab // (count * step)) * step, vocab)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_blocks(
    blocks: Blocks,
    hidden: Array,
    kernel: Array,
    targets: Int[Array, " positions"],
    kept: Int[Array, "rows most 2"] | None,
) -> TokenStatistics:
    return _forward(blocks, hidden, kernel, targets, kept)[0]


def _forward(
    blocks: Blocks, hidden: Array, kernel: Array, targets: Array, kept: Array | None
) -> tuple[TokenStatistics, tuple[Array | None, ...]]:
    of_hidden, of_kernel, each = _specs(blocks)
    chosen, total, entropy = _on_each_device(
        blocks, _block_statistics, (of_hidden, of_kernel, each, each), each
    )(hidden, kernel, targets, kept)
    return (chosen - total, entropy), (hidden, kernel, targets, kept, total, entropy)


def _backward(
    blocks: Blocks, saved: tuple[Array | None, ...], gradients: TokenStatistics
) -> tuple[Array, Array, None, None]:
    of_hidden, of_kernel, each = _specs(blocks)
    inputs, outputs = (of_hidden, of_kernel, *[each] * 5), (of_hidden, of_kernel)
    return *_on_each_device(blocks, _differentiate, inputs, outputs)(*saved, gradients), None, None


_by_blocks.defvjp(_forward, _backward)


def _specs(blocks: Blocks) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
    """Returns the partition specs of hidden, of the kernel and of one number per position."""
    spec = blocks.partitioner.spec
    return (
        spec("rows", None),
        spec("vocab", None) if blocks.tied else spec(None, "vocab"),
        spec("rows"),
    )


def _on_each_device(
    blocks: Blocks, function: Callable[..., Any], inputs: Any, outputs: Any
) -> Callable[..., Any]:
    """Applies a function to each device's rows and part of the vocabulary."""
    function = partial(function, blocks)
    return (
        function
        if blocks.partitioner.size(*AXES) == 1
        else blocks.partitioner.shard_map(function, inputs, outputs)
    )


def _block_statistics(
    blocks: Blocks,
    hidden: Float[Array, "positions features"],
    kernel: Float[Array, "vocab features"] | Float[Array, "features vocab"],
    targets: Int[Array, " positions"],
    kept: Int[Array, "rows most 2"] | None,
) -> tuple[PerPosition, PerPosition, PerPosition | None]:
    """Returns each target's logit, the log of the sum of all logits' exponentials, and the entropy.

    A running softmax: relative to the largest logit so far, the sum of exponentials and that of
    logit times exponential.
    """

    def add(
        sums: tuple[Array, ...], block: tuple[Array, Array | None]
    ) -> tuple[tuple[Array, ...], None]:
        (starts, bits), (chosen, largest, total, weighted) = block, sums
        logits = blocks.logits(_products(blocks, hidden, blocks.of_kernel(kernel, starts[0])))
        new, hits = _columns(blocks, kernel, targets, starts)
        if truncated is not None:
            new &= KeptWords(bits, truncated).mask(blocks.width)
        logits = jnp.where(new, logits, HIDDEN)
        chosen += jnp.sum(jnp.where(hits, logits, 0), axis=-1)
        above = jnp.maximum(largest, jnp.max(logits, axis=-1))
        exponentials = jnp.exp(logits - above[:, None])
        if blocks.entropy:
            of_block = jnp.sum(exponentials * (logits - above[:, None]), axis=-1)
            weighted = _rescaled(weighted, total, largest, above) + of_block
        total = jnp.exp(largest - above) * total + jnp.sum(exponentials, axis=-1)
        return (chosen, above, total, weighted), None

    bits, truncated = _own_words(blocks, kernel, targets, kept)
    zeros = jnp.zeros(targets.shape, jnp.float32)
    (chosen, largest, total, weighted), _ = jax.lax.scan(
        add, (zeros, zeros + HIDDEN, zeros, zeros), (_starts(blocks, kernel), bits)
    )
    if blocks.partitioner.size("tensor") > 1:
        above = jax.lax.pmax(largest, "tensor")
        parts = chosen, jnp.exp(largest - above) * total, _rescaled(weighted, total, largest, above)
        (chosen, total, weighted), largest = jax.lax.psum(parts, "tensor"), above
    return (
        chosen,
        largest + jnp.log(total),
        jnp.log(total) - weighted / total if blocks.entropy else None,
    )


def _rescaled(
    weighted: PerPosition, total: PerPosition, origin: PerPosition, to: PerPosition
) -> PerPosition:
    """Rebases a sum of (logit - origin) · exp(logit - origin) to another origin; `total` is the sum
    of exponentials."""
    return jnp.exp(origin - to) * (weighted + (origin - to) * total)


def _differentiate(
    blocks: Blocks,
    hidden: Float[Array, "positions features"],
    kernel: Float[Array, "vocab features"] | Float[Array, "features vocab"],
    targets: Int[Array, " positions"],
    kept: Int[Array, "rows most 2"] | None,
    total: PerPosition,
    entropy: PerPosition | None,
    gradients: TokenStatistics,
) -> tuple[Array, Array]:
    """Returns the gradients of hidden and kernel.

    With p = softmax(logits) and entropy H, the derivative by logit j of log p_t is 1[j = t] - p_j,
    and that of H is -p_j (log p_j + H).
    """
    d_logp, d_entropy = gradients
    d_logp = d_logp[:, None]

    bits, truncated = _own_words(blocks, kernel, targets, kept)

    def add(
        sums: tuple[Array, Array], number: tuple[Array, Array | None]
    ) -> tuple[tuple[Array, Array], None]:
        (starts, bits), (d_hidden, d_kernel) = number, sums
        block = blocks.of_kernel(kernel, starts[0])
        logits, of_products = jax.vjp(blocks.logits, _products(blocks, hidden, block))
        new, hits = _columns(blocks, kernel, targets, starts)
        if truncated is not None:
            new &= KeptWords(bits, truncated).mask(blocks.width)
        logp = jnp.where(new, logits - total[:, None], HIDDEN)
        of_softmax = d_logp
        if d_entropy is not None and entropy is not None:
            of_softmax = d_logp + d_entropy[:, None] * (logp + entropy[:, None])
        (d_products,) = of_products(jnp.where(hits, d_logp, 0) - jnp.exp(logp) * of_softmax)
        d_products = d_products.astype(hidden.dtype)
        d_hidden += _product(d_products, block.astype(hidden.dtype), 1, blocks.axis)
        both = (d_products, hidden) if blocks.tied else (hidden, d_products)
        d_block = blocks.of_kernel(d_kernel, starts[0]) + _product(*both, 0, 0)
        return (
            d_hidden,
            jax.lax.dynamic_update_slice_in_dim(d_kernel, d_block, starts[0], blocks.axis),
        ), None

    zeros = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros(kernel.shape, jnp.float32)
    (d_hidden, d_kernel), _ = jax.lax.scan(add, zeros, (_starts(blocks, kernel), bits))
    if blocks.partitioner.size(*AXES) > 1:
        d_hidden, d_kernel = jax.lax.psum(d_hidden, "tensor"), jax.lax.psum(d_kernel, ROW_AXES)
    return d_hidden.astype(hidden.dtype), d_kernel


def _starts(blocks: Blocks, kernel: Array) -> Int[np.ndarray, "blocks 2"]:
    """Returns where each block starts and its first column that is not in the block before: the
    last block ends with the kernel."""
    vocab = kernel.shape[blocks.axis]
    first = np.arange(0, vocab, blocks.width, dtype=np.int32)
    return np.stack([np.minimum(first, vocab - blocks.width), first], axis=1)


def _own_words(
    blocks: Blocks, kernel: Array, targets: Array, kept: Array | None
) -> tuple[Array, Array] | tuple[None, None]:
    """Returns the kept tokens of each block of this device's part of the vocabulary."""
    if kept is None:
        return None, None
    starts, first = _starts(blocks, kernel), 0
    if blocks.partitioner.size("tensor") > 1:
        first = jax.lax.axis_index("tensor") * kernel.shape[blocks.axis]
    return kept_words(kept, len(targets) // len(kept), starts, blocks.width, first)


def _columns(
    blocks: Blocks, kernel: Array, targets: Array, starts: Array
) -> tuple[Bool[Array, "1 width"], Array]:
    """Returns which of a block's columns are not in the block before, and [positions, width] which
    of those each target is."""
    columns = starts[0] + jnp.arange(blocks.width)
    new = columns >= starts[1]
    if blocks.partitioner.size("tensor") > 1:
        columns += jax.lax.axis_index("tensor") * kernel.shape[blocks.axis]
    return new[None], new & (columns == targets[:, None])


def _products(blocks: Blocks, hidden: Array, block: Array) -> Float[Array, "positions width"]:
    return _product(hidden, block.astype(hidden.dtype), 1, 1 - blocks.axis)


def _product(x: Array, y: Array, x_axis: int, y_axis: int) -> Float[Array, "_ _"]:
    """The product of two matrices over these axes, in fp32."""
    return jax.lax.dot_general(
        x, y, (((x_axis,), (y_axis,)), ((), ())), preferred_element_type=jnp.float32
    )
