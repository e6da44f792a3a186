"""The head: log-probabilities and their gradient, chunk by chunk."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from areal_x_torch import head  # noqa: E402
from areal_x_torch.model import Head  # noqa: E402

ROWS, LENGTH, FEATURES, VOCABULARY = 3, 7, 5, 11


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, LENGTH, FEATURES, requires_grad=True)
    weight, bias = torch.randn(VOCABULARY, FEATURES, requires_grad=True), torch.randn(VOCABULARY, requires_grad=True)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH))
    wanted = torch.tensor([1, 2, 5, 6, LENGTH + 3, 2 * LENGTH + 1, 2 * LENGTH + 6])
    return hidden, weight, bias, tokens, wanted


def whole(hidden, weight, bias, tokens, wanted, temperature):
    """The formula on the full array of logits."""
    logits = (hidden @ weight.T + (0 if bias is None else bias)) / temperature
    logp = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    logp = torch.nn.functional.pad(logp, (1, 0))
    chosen = torch.zeros(tokens.numel(), dtype=torch.bool)
    chosen[wanted] = True
    return torch.where(chosen.reshape(tokens.shape), logp, 0)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_are_those_of_the_whole_softmax(inputs, chunk, temperature, has_bias):
    hidden, weight, bias, tokens, wanted = inputs
    bias = bias if has_bias else None
    leaves = [hidden, weight] + ([bias] if has_bias else [])
    ours = head.logprobs(hidden, Head(weight, bias), tokens, wanted, temperature, chunk)
    theirs = whole(hidden, weight, bias, tokens, wanted, temperature)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
    upstream = torch.randn(ROWS, LENGTH)
    pairs = zip(torch.autograd.grad(ours, leaves, upstream), torch.autograd.grad(theirs, leaves, upstream), strict=True)
    for mine, its in pairs:
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=1e-5)


def test_tokens_that_nobody_wants_get_zero_and_cost_nothing(inputs):
    hidden, weight, _, tokens, wanted = inputs
    with Largest(VOCABULARY) as seen:
        logp = head.logprobs(hidden, Head(weight, None), tokens, wanted, 1.0, 100)
    assert (logp != 0).sum() == len(wanted)
    assert seen.rows == len(wanted)


def test_no_chunk_of_logits_is_larger_than_asked_for_in_either_direction(inputs):
    hidden, weight, _, tokens, wanted = inputs
    with Largest(VOCABULARY) as seen:
        head.logprobs(hidden, Head(weight, None), tokens, wanted, 1.0, 6).sum().backward()
    assert seen.rows == 6  # of 7 wanted; the transposed weight has 5


class Largest(TorchDispatchMode):
    """Notes the most rows of any array [rows, vocabulary] that is made."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.rows = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == self.vocabulary:
            self.rows = max(self.rows, out.shape[0])
        return out
