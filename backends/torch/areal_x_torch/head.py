"""The heads: log-probabilities of given tokens without an array of tokens by vocabulary, or one
number per token.

Logits are computed for one block of the vocabulary after another, and recomputed in the backward
pass, so that one block's logits exist at a time and the weight's gradient is written once, block by
block. A divergence is a function of all logits of a position: with a teacher, chunks of positions
take the place of blocks.

If the vocabulary is sharded over processes, each computes the logits of its own words, and sums
over the vocabulary are combined: three numbers per position instead of logits, except for a
divergence.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from areal_x.types import Divergence
from areal_x_torch.collectives import CopyToGroup, GatherFromGroup
from areal_x_torch.device import LOGITS
from areal_x_torch.fusion import fused
from areal_x_torch.model import Head, softcapped

NARROWEST = 512  # least columns of a block: narrower products are slow
# Blocks of logits whose products are worth saving on an accelerator.
SAVED_BLOCKS = 8
TILE = 128  # columns of a block are a multiple: products of odd numbers are several times slower
# Logits of a block that fit a CPU's cache, so that elementwise operations cost little beside the
# product.
CACHED = 2**22

LEFT_OUT = -1e30  # stands for a logit of -inf: its exponential is 0, and no difference is NaN

Each: TypeAlias = Float[Tensor, " positions"]


class Teacher(NamedTuple):
    """A frozen model's hidden states at the same positions and its head, with the divergence from
    it. The divergence is taken over the tokens that both vocabularies have, because either
    embedding may be padded further."""

    hidden: Float[Tensor, "positions teacher_features"]
    head: Head
    divergence: Divergence


def logprobs(
    hidden: Float[Tensor, "positions features"],
    head: Head,
    targets: Int[Tensor, " positions"],
    temperature: float,
    chunk: int = 0,
    entropy: bool = False,
    teacher: Teacher | None = None,
    kept: Kept | None = None,
    logits_at_once: int = LOGITS,
) -> tuple[Each, Each | None, Each | None]:
    """Returns log softmax(logits / temperature) of the target at each position, in fp32; then, if
    requested, that distribution's entropy and, with a teacher, the divergence of both logits /
    temperature.

    `hidden` is the state of the token before the target; the logits are computed in its dtype.
    chunk: as many logits exist at once as this many positions have; 0 makes them about
    `logits_at_once`. kept: the softmax of a position that has any is over these tokens alone, but not that of a
    divergence.
    """
    if head.others is not None:
        hidden = CopyToGroup.apply(hidden, head.others)
    vocabulary, positions = len(head.weight), len(targets)
    at_once = max(chunk or logits_at_once // vocabulary, 1)
    if teacher is not None:
        return _by_chunks(hidden, head, targets, temperature, at_once, entropy, teacher, kept)
    # Saved products are not recomputed, which saves a quarter of the work and is worth the memory of
    # some blocks: an accelerator's products are in bf16 and a block's logits are not.
    on_cpu = hidden.device.type == "cpu"
    saved = positions <= (at_once if chunk else (2 if on_cpu else SAVED_BLOCKS) * at_once)
    width = max(at_once * vocabulary // max(positions, 1), 1 if chunk else NARROWEST)
    if saved and on_cpu:
        width = max(CACHED // max(positions, 1), NARROWEST)
    width = even_width(vocabulary, width)
    how = Blocks(
        width=width,
        saved=saved,
        temperature=temperature,
        softcap=head.softcap,
        entropy=entropy,
        others=head.others,
        pairs=None if kept is None else kept.pairs(vocabulary, width, head.others),
    )
    return *ByBlocks.apply(hidden, head.weight, head.bias, targets, how), None


def values(
    hidden: Float[Tensor, "positions features"], weight: Float[Tensor, "1 features"]
) -> Float[Tensor, " positions"]:
    """Returns one number per position, in fp32 whatever the dtype of `hidden`: the cost is
    negligible."""
    return hidden.float() @ weight[0]


class Kept(NamedTuple):
    """The tokens that truncated sampling left to choose from, as pairs of a position's index and an
    id. A position without a pair keeps all."""

    positions: Int[Tensor, " pairs"]
    ids: Int[Tensor, " pairs"]
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    """Of all positions."""

    def pairs(self, words: int, width: int, others: ProcessGroup | None) -> Pairs:
        """Returns the pairs of this process's words, block by block. width: of a block."""
        ids, order = _own_words(self.ids, words, others).sort()
        edges = [part.start for part in _parts(words, width)]
        bounds = torch.searchsorted(ids, torch.tensor([*edges, words], device=ids.device)).tolist()
        own = slice(bounds[0], bounds[-1])
        return Pairs(
            positions=self.positions[order][own],
            ids=ids[own],
            bounds=[bound - bounds[0] for bound in bounds],
            whole=(~self.truncated()).nonzero()[:, 0],
        )

    def truncated(self) -> Bool[Tensor, " positions"]:
        """Returns which positions have any pair."""
        found = torch.zeros(self.count, dtype=torch.bool, device=self.ids.device)
        found[self.positions] = True
        return found

    def left_out(self, part: slice, words: int) -> Bool[Tensor, "columns words"]:
        """Returns which of all words some positions leave out."""
        here = (self.positions >= part.start) & (self.positions < part.stop)
        mask = self.truncated()[part, None].repeat(1, words)
        mask[self.positions[here] - part.start, self.ids[here]] = False
        return mask


class Pairs(NamedTuple):
    """Kept tokens in the order of their ids. bounds: where those of each block begin. whole: the
    positions that keep all."""

    positions: Int[Tensor, " pairs"]
    ids: Int[Tensor, " pairs"]
    bounds: list[int]
    whole: Int[Tensor, " whole"]

    def of(self, number: int) -> slice:
        """Returns which pairs are of a block."""
        return slice(self.bounds[number], self.bounds[number + 1])

    def places(self, number: int, part: slice) -> tuple[Tensor, Tensor]:
        """Returns the places of a block's pairs among its logits."""
        pairs = self.of(number)
        return self.positions[pairs], self.ids[pairs] - part.start

    def sums(self, logits: Float[Tensor, " pairs"], count: int) -> tuple[Each, Each]:
        """Returns log Σ exp and the entropy of each position's kept tokens among these words; −inf
        and 0 for a position without any."""
        highest = logits.new_full((count,), -torch.inf)
        highest.scatter_reduce_(0, self.positions, logits, "amax")
        shifted = (logits - highest[self.positions]).exp_()
        total = highest + torch.zeros_like(highest).index_add_(0, self.positions, shifted).log_()
        logp = logits - total[self.positions]
        entropy = torch.zeros_like(total).index_add_(0, self.positions, -logp.exp() * logp)
        return total, entropy


class Blocks(NamedTuple):
    """How logits are computed in blocks. width: columns of a block. saved: True if logits are saved
    for the backward pass instead of recomputed. others: see `Head`. pairs: the kept tokens, if
    sampling was truncated."""

    width: int
    saved: bool
    temperature: float
    softcap: float
    entropy: bool
    others: ProcessGroup | None
    pairs: Pairs | None

    def logits(self, products: Tensor) -> Float[Tensor, "positions columns"]:
        return _scaled(products, self.softcap, self.temperature)


class ByBlocks(torch.autograd.Function):
    """log softmax(capped(hidden @ weightᵀ + bias) / temperature)[target], one number per position;
    and -Σ p log p or None.

    Of a position whose sampling was truncated, only the logits of its kept tokens are read: all of
    them are saved, and their gradient is all that the backward pass needs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "positions features"],
        weight: Float[Tensor, "vocabulary features"],
        bias: Float[Tensor, " vocabulary"] | None,
        targets: Int[Tensor, " positions"],
        how: Blocks,
    ) -> tuple[Each, Each | None]:
        targets = _own_words(targets, len(weight), how.others)
        chosen = torch.zeros(len(targets), device=hidden.device)
        pairs, of_pairs = how.pairs, []
        count = len(targets) if pairs is None else len(pairs.whole)
        total, entropy = chosen.new_full((count,), -torch.inf), chosen.new_zeros(count)
        ctx.saved = []
        for number, part in enumerate(_parts(len(weight), how.width)):
            products = _products(hidden, _columns(weight, bias, part, how))
            here, own = _within(targets, part)
            if pairs is not None:
                logits = how.logits(products)
                chosen = torch.where(here, logits.gather(1, own)[:, 0], chosen)
                of_pairs.append(logits[pairs.places(number, part)])
                if not count:
                    continue
                products, own = products[pairs.whole], own[pairs.whole]
            picked, of_block, entropy_of_block = fused(_statistics, products)(
                products, own, how.softcap, how.temperature, how.entropy, how.saved
            )
            if pairs is None:
                chosen = torch.where(here, picked, chosen)
            both = torch.logaddexp(total, of_block)
            if entropy_of_block is not None:
                entropy = _part_of(both, total, entropy) + _part_of(
                    both, of_block, entropy_of_block
                )
            total = both
            if how.saved:
                ctx.saved.append(products)
        kept = None
        if pairs is not None:
            kept = torch.cat(of_pairs)
            of_whole = total, entropy
            total, entropy = pairs.sums(kept, len(targets))
            total[pairs.whole], entropy[pairs.whole] = of_whole
        if how.others is not None:
            chosen, total, entropy = _of_all_words(chosen, total, entropy, how.others)
        ctx.save_for_backward(
            hidden, weight, bias, targets, total, entropy if how.entropy else None, kept
        )
        ctx.how = how
        return chosen - total, entropy if how.entropy else None

    @staticmethod
    def backward(ctx: Any, grad: Each, grad_entropy: Each | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, total, entropy, kept = ctx.saved_tensors
        grad_hidden = torch.zeros(hidden.shape, device=hidden.device)
        grad_weight, grad_bias = (
            torch.empty_like(x) if ctx.needs_input_grad[i] else None
            for i, x in ((1, weight), (2, bias))
        )
        how: Blocks = ctx.how
        every = Upstream(
            targets,
            total,
            grad / how.temperature,
            entropy,
            None if grad_entropy is None else grad_entropy / how.temperature,
        )
        pairs, of_whole = how.pairs, every
        if pairs is not None:
            of_whole = every.at(pairs.whole)
            of_pairs = every.at(pairs.positions).of_pairs(kept.clone(), pairs.ids, how)
        # May be overwritten below: a second backward pass recomputes them.
        saved, ctx.saved = ctx.saved, []
        low = hidden.dtype if grad_bias is None and pairs is None else grad.dtype
        read = hidden if pairs is None else hidden[pairs.whole]
        for number, part in enumerate(_parts(len(weight), how.width)):
            columns = _columns(weight, bias, part, how)
            grad_logits = None
            if len(read):
                products = saved[number] if saved else _products(read, columns)
                of_each = of_whole._replace(targets=of_whole.targets - part.start)
                grad_logits = fused(_gradient, products)(
                    products, of_each, how.softcap, how.temperature, low
                )
            if pairs is not None:
                dense = grad.new_zeros(len(targets), part.stop - part.start)
                if grad_logits is not None:
                    dense[pairs.whole] = grad_logits
                dense[pairs.places(number, part)] = of_pairs[pairs.of(number)]
                grad_logits = dense
            if grad_logits is None:  # of no position
                grad_logits = grad.new_zeros(0, part.stop - part.start)
            if grad_bias is not None:
                torch.sum(grad_logits, 0, out=grad_bias[part])
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_weight is not None:
                grad_weight[part] = grad_logits.T @ hidden
            grad_hidden += grad_logits @ columns.weight.to(hidden.dtype)
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None


class Upstream(NamedTuple):
    """What the gradient of logits is computed from, of each position. grad, grad_entropy: of the
    log-probability and of the entropy, divided by the temperature.

    Times the temperature: d logp / d logits = one-hot of the target - p, d entropy / d logits =
    -p (log p + H); and d logits / d products = 1 - (logits / softcap)², before the temperature.
    """

    targets: Int[Tensor, " positions"]
    total: Each
    grad: Each
    entropy: Each | None
    grad_entropy: Each | None

    def at(self, positions: Int[Tensor, " some"]) -> Upstream:
        return Upstream(*(None if x is None else x[positions] for x in self))

    def of_pairs(
        self, logits: Float[Tensor, " pairs"], ids: Int[Tensor, " pairs"], how: Blocks
    ) -> Float[Tensor, " pairs"]:
        """Returns the gradient of one product at each position, in the place of its logit. ids: of
        the products' words."""
        of_cap = _slope_of_cap(logits, how.softcap, how.temperature)
        grad_logits = self.of_softmax(logits, columns=False)
        grad_logits += torch.where(ids == self.targets, self.grad, 0)
        return grad_logits if of_cap is None else grad_logits.mul_(of_cap)

    def of_softmax(self, logits: Tensor, columns: bool) -> Tensor:
        def each(x: Each) -> Tensor:
            return x[:, None] if columns else x

        logp, slope = logits.sub_(each(self.total)), each(self.grad)
        if self.entropy is not None and self.grad_entropy is not None:
            slope = (logp + each(self.entropy)).mul_(each(self.grad_entropy)).add_(slope)
        return logp.exp_().mul_(-slope)


def _slope_of_cap(logits: Tensor, softcap: float, temperature: float) -> Tensor | None:
    return 1 - (logits * (temperature / softcap)).square_() if softcap else None


def _statistics(
    products: Float[Tensor, "positions columns"],
    own: Int[Tensor, "positions 1"],
    softcap: float,
    temperature: float,
    entropy: bool,
    saved: bool,
) -> tuple[Each, Each, Each | None]:
    """Returns a block's logit at the columns `own`, the log of the sum of all logits' exponentials
    and, if requested, the entropy of their softmax. saved: True if the products are still needed."""
    logits = _scaled(products, softcap, temperature)
    picked, total = logits.gather(1, own)[:, 0], logits.logsumexp(-1)
    if not entropy:
        return picked, total, None
    logp = (logits.clone() if saved else logits).sub_(total[:, None])
    return picked, total, -logp.exp().mul_(logp).sum(-1)


def _gradient(
    products: Float[Tensor, "positions columns"],
    upstream: Upstream,
    softcap: float,
    temperature: float,
    dtype: torch.dtype,
) -> Float[Tensor, "positions columns"]:
    """Returns the gradient of a block's products, perhaps in their place. upstream: with targets
    relative to the block's first column."""
    logits, columns = _scaled(products, softcap, temperature), products.shape[1]
    of_cap = _slope_of_cap(logits, softcap, temperature)
    grad_logits = upstream.of_softmax(logits, columns=True)
    targets, grad = upstream.targets[:, None], upstream.grad[:, None]
    if torch.compiler.is_compiling():  # a scatter would be a pass of its own
        at = torch.arange(columns, device=targets.device)
        grad_logits = grad_logits + torch.where(at == targets, grad, 0)
    else:
        here = (targets >= 0) & (targets < columns)
        grad_logits.scatter_add_(1, targets.clamp(0, columns - 1), torch.where(here, grad, 0))
    return (grad_logits if of_cap is None else grad_logits.mul_(of_cap)).to(dtype)


def _own_words(
    targets: Int[Tensor, " positions"], count: int, others: ProcessGroup | None
) -> Int[Tensor, " positions"]:
    """Returns target indices relative to this process's first word; others' words are out of
    range."""
    return targets if others is None else targets - others.rank() * count


def _of_all_words(
    chosen: Each, total: Each, entropy: Each, others: ProcessGroup
) -> tuple[Each, Each, Each]:
    """Combines each process's target logit, log Σ exp and entropy into those of the whole
    vocabulary."""
    highest = total.clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=others)
    summed = torch.stack([chosen, (total - highest).exp()])
    dist.all_reduce(summed, group=others)
    both = highest + summed[1].log()
    entropy = _part_of(both, total, entropy)
    dist.all_reduce(entropy, group=others)
    return summed[0], both, entropy


def _within(
    targets: Int[Tensor, " positions"], part: slice
) -> tuple[Tensor, Int[Tensor, "positions 1"]]:
    """Returns which targets are among a block's columns, and their column in the block (any, for
    the others)."""
    here = (targets >= part.start) & (targets < part.stop)
    return here, (targets - part.start).clamp_(0, part.stop - part.start - 1)[:, None]


def _part_of(both: Each, one: Each, entropy: Each) -> Each:
    """Returns the contribution of one of two blocks to their joint entropy, from the logs of their
    sums of exponentials."""
    log_share = one - both
    return torch.where(one == -torch.inf, 0.0, log_share.exp() * (entropy - log_share))


def _by_chunks(
    hidden: Float[Tensor, "positions features"],
    head: Head,
    targets: Int[Tensor, " positions"],
    temperature: float,
    chunk: int,
    entropy: bool,
    teacher: Teacher,
    kept: Kept | None,
) -> tuple[Each, Each | None, Each]:
    """All logits of a chunk of positions at a time. The divergence may be any function, so autograd
    differentiates it."""

    def one(
        hidden: Tensor,
        of_teacher: Tensor,
        targets: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        part: slice,
    ) -> tuple[Tensor, ...]:
        logits = _logits(hidden, Head(weight, bias, head.softcap), temperature)
        if head.others is not None:
            logits = GatherFromGroup.apply(logits, head.others)
        theirs = _logits(of_teacher, teacher.head, temperature)
        both = min(logits.shape[-1], theirs.shape[-1])
        divergence = teacher.divergence(logits[..., :both], theirs[..., :both])
        if kept is not None:
            logits = logits.masked_fill(kept.left_out(part, logits.shape[-1]), LEFT_OUT)
        logp = logits.log_softmax(-1)
        of_all = -(logp.exp() * logp).sum(-1) if entropy else None
        return logp.gather(1, targets[:, None])[:, 0], of_all, divergence

    again = partial(checkpoint, one, use_reentrant=False, preserve_rng_state=False)
    # One chunk even without positions: a pass that other processes need has a gradient of zeros.
    computed = [
        again(
            hidden[p],
            teacher.hidden[p],
            targets[p],
            head.weight,
            head.bias,
            p,
        )
        for p in _parts(max(len(targets), 1), chunk)
    ]
    logp, of_all, divergence = zip(*computed, strict=True)
    return torch.cat(logp), torch.cat(of_all) if entropy else None, torch.cat(divergence)


def _products(hidden: Tensor, head: Head) -> Float[Tensor, "positions columns"]:
    """Logits before any cap, in the dtype of `hidden`."""
    return head._replace(softcap=0.0).logits(hidden)


def _scaled(
    products: Float[Tensor, "positions columns"], softcap: float, temperature: float
) -> Float[Tensor, "positions columns"]:
    """Returns logits from products, in fp32."""
    logits = softcapped(products.float(), softcap)
    return logits if temperature == 1 else logits / temperature


def _logits(hidden: Tensor, head: Head, temperature: float) -> Float[Tensor, "positions columns"]:
    return _scaled(_products(hidden, head), head.softcap, temperature)


def _columns(weight: Tensor, bias: Tensor | None, part: slice, how: Blocks) -> Head:
    return Head(weight[part], None if bias is None else bias[part], how.softcap)


def even_width(vocabulary: int, most: int) -> int:
    """Returns the width of the fewest equally wide blocks of at most this many columns; the last may
    be narrower."""
    if most >= vocabulary or most < TILE:
        return min(most, vocabulary)
    count = -(-vocabulary // (most - most % TILE))
    return -(-vocabulary // (count * TILE)) * TILE


def _parts(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
