"""The head: log-probabilities, entropies and their gradients, chunk by chunk; values."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from areal_x.algorithms.distillation import generalized_jsd
from areal_x_torch import fusion, head
from areal_x_torch.model import Head
from tests.thorough import thorough

POSITIONS, FEATURES, VOCABULARY = 7, 5, 11


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    hidden = torch.randn(POSITIONS, FEATURES, requires_grad=True)
    weight, bias = torch.randn(VOCABULARY, FEATURES, requires_grad=True), torch.randn(VOCABULARY, requires_grad=True)
    return hidden, weight, bias, torch.randint(VOCABULARY, (POSITIONS,))


def whole(hidden, weight, bias, targets, temperature, teacher, softcap=0.0):
    """Log-probabilities, entropies and KL(student ‖ teacher) on the full array of logits."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    logp = ((softcap * torch.tanh(logits / softcap) if softcap else logits) / temperature).log_softmax(-1)
    of_teacher = ((teacher.hidden @ teacher.head.weight.T + teacher.head.bias) / temperature).log_softmax(-1)
    kl = (logp.exp() * (logp - of_teacher)).sum(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1), kl


@pytest.fixture
def teacher():
    torch.manual_seed(1)
    layer = Head(torch.randn(VOCABULARY, 3), torch.randn(VOCABULARY))
    return head.Teacher(torch.randn(POSITIONS, 3), layer, partial(generalized_jsd, beta=1))


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("of", [[0], [1], [0, 1], [2], [0, 1, 2]])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_numbers_and_gradients_are_those_of_the_whole_softmax(inputs, teacher, chunk, temperature, has_bias, of, softcap):
    hidden, weight, bias, targets = inputs
    bias = bias if has_bias else None
    leaves = [hidden, weight] + ([bias] if has_bias else [])
    beside = teacher if 2 in of else None
    ours = head.logprobs(hidden, Head(weight, bias, softcap), targets, temperature, chunk, 1 in of, beside)
    theirs = whole(hidden, weight, bias, targets, temperature, teacher, softcap)
    for i in of:
        torch.testing.assert_close(ours[i], theirs[i], atol=1e-6, rtol=1e-5)
    upstream = torch.randn(3, POSITIONS)
    mine, its = (torch.autograd.grad(sum((x[i] * upstream[i]).sum() for i in of), leaves) for x in (ours, theirs))
    rounding = 1e-5 if 2 in of else 2e-6  # autograd's way through a divergence sums more over the vocabulary
    torch.testing.assert_close(mine, its, atol=rounding, rtol=1e-5)


KEPT = ([3, 0, 9], None, [4], list(range(VOCABULARY)), [1, 10], None, [2, 5, 6, 7])  # by position; None keeps all


def pairs() -> head.Kept:
    found = [(i, token) for i, kept in enumerate(KEPT) for token in kept or ()]
    positions, ids = torch.tensor(found[::-1]).T  # in any order
    return head.Kept(positions, ids, POSITIONS)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("has_teacher", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_a_truncated_softmax_is_over_the_kept_tokens_alone(inputs, teacher, chunk, has_teacher, softcap):
    """Against autograd of a sum over each position's own tokens. The divergence is of everything."""
    hidden, weight, bias, _ = inputs
    targets = torch.tensor([(kept or [8])[-1] for kept in KEPT])
    beside = teacher if has_teacher else None
    ours = head.logprobs(hidden, Head(weight, bias, softcap), targets, 0.7, chunk, True, beside, pairs())
    logits = hidden @ weight.T + bias
    logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) / 0.7
    expected = []
    for own, kept, target in zip(logits, KEPT, targets.tolist(), strict=True):
        of_kept = own[kept or list(range(VOCABULARY))].log_softmax(-1)
        expected.append(torch.stack([own[target] - own[kept or slice(None)].logsumexp(-1), -(of_kept.exp() * of_kept).sum()]))
    theirs = list(torch.stack(expected).T)
    if has_teacher:
        theirs.append(whole(hidden, weight, bias, targets, 0.7, teacher, softcap)[2])
    torch.testing.assert_close(ours[: len(theirs)], tuple(theirs), atol=1e-5, rtol=1e-5)
    upstream = torch.randn(len(theirs), POSITIONS)
    mine, its = (
        torch.autograd.grad(sum((x * y).sum() for x, y in zip(outputs, upstream, strict=True)), [hidden, weight, bias])
        for outputs in (ours[: len(theirs)], theirs)
    )
    torch.testing.assert_close(mine, its, atol=1e-5, rtol=1e-5)


def test_what_nobody_wants_is_not_there(inputs):
    hidden, weight, _, targets = inputs
    assert head.logprobs(hidden, Head(weight, None), targets, 1.0, 3)[1:] == (None, None)


def test_the_entropy_of_an_even_and_of_a_certain_distribution():
    hidden = torch.tensor([[0.0], [1000.0]], requires_grad=True)
    weight = torch.linspace(0, 1, VOCABULARY)[:, None]
    entropy = head.logprobs(hidden, Head(weight, None), torch.zeros(2, dtype=torch.int64), 1.0, 10, True)[1]
    torch.testing.assert_close(entropy, torch.tensor([math.log(VOCABULARY), 0.0]))
    assert torch.isfinite(torch.autograd.grad(entropy.sum(), hidden)[0]).all()


@pytest.mark.parametrize("entropy, has_teacher", [(False, False), (True, False), (True, True)])
def test_no_chunk_of_logits_is_larger_than_asked_for_in_either_direction(inputs, teacher, entropy, has_teacher):
    hidden, weight, _, targets = inputs
    with Largest() as seen:
        said = head.logprobs(hidden, Head(weight, None), targets, 1.0, 6, entropy, teacher if has_teacher else None)
        sum(x.sum() for x in said if x is not None).backward()
    assert 55 < seen.numbers <= 6 * VOCABULARY  # of 77; the weight has 55


def test_a_value_is_computed_in_fp32_from_what_bf16_left(inputs):
    hidden, weight = inputs[0].detach().bfloat16(), inputs[1][:1].detach()
    expected = hidden.double().numpy() @ weight[0].double().numpy()
    np.testing.assert_allclose(head.values(hidden, weight).numpy(), expected, rtol=1e-6, atol=1e-6)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest array has that is made."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numbers = max(self.numbers, out.numel())
        return out


def test_blocks_are_equal_and_of_whole_tiles():
    assert [head.even_width(151_936, most) for most in (2_000, 16_384, 151_936, 10**6)] == [1_920, 15_232, 151_936, 151_936]
    assert head.even_width(1_000, 100) == 100  # narrower than a tile, as a caller's chunk may make it


@thorough
def test_compiled_blocks_are_the_plain_ones_in_one_program_for_all_numbers_of_rows():
    torch._dynamo.reset()
    counters.clear()
    random = torch.Generator().manual_seed(0)
    statistics, gradient = (fusion._of_any_rows(f) for f in (head._statistics, head._gradient))
    for rows in (5, 9):
        for columns in (256, 128):
            products = torch.randn(rows, columns, generator=random).bfloat16()
            targets = torch.randint(-50, columns + 50, (rows,), generator=random)
            asked = products, targets.clamp(0, columns - 1)[:, None], 3.0, 0.7, True, True
            found, wanted = statistics(*asked), head._statistics(*asked)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
            upstream = torch.randn(2, rows, generator=random)
            of = head.Upstream(targets, wanted[1], upstream[0], wanted[2], upstream[1])
            asked = products, of, 3.0, 0.7, torch.bfloat16
            torch.testing.assert_close(gradient(*asked), head._gradient(*asked))
    assert counters["stats"]["unique_graphs"] == 4
