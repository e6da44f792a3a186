"""Runs inside the SGLang server: makes its top-p a share of what min-p and top-k keep.

SGLang takes top-p of the whole distribution, as of the order in which PyTorch's or FlashInfer's
kernels truncate. The other engines apply it last, to what min-p and top-k keep
(areal_x.protocols.engine.SamplingParams). So the sampler is given the distribution without what
these two leave out, renormalised, and what it does then, whatever its kernels, has the same meaning.
What it samples from and what it reports as kept come from the same numbers, as before.

Only torch is imported here, and by the server alone.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal_x.protocols.engine import SamplingParams

WHOLE_SHARE = (
    "which the run did not start: of the whole distribution, and on other engines of what these keep;"
    " leave one out, or let the run start the servers (sglang.servers)"
)


def combines(sampling: SamplingParams) -> bool:
    """True if the meaning of its top-p depends on the order of truncations."""
    if not sampling.truncates or sampling.top_p == 1:
        return False
    return sampling.top_k > 0 or sampling.min_p > 0


def install(sampler: Any) -> None:
    """Patches the class of sglang.srt.layers.sampler."""
    sample = sampler.Sampler._sample_from_probs

    @wraps(sample)
    def sample_in_order(self: Any, probs: Any, info: Any, *others: Any, **named: Any) -> Any:
        if info.need_top_p_sampling and (info.need_top_k_sampling or info.need_min_p_sampling):
            probs = narrowed(probs, info.top_ks, info.top_ps, info.min_ps, info.max_top_k)
        return sample(self, probs, info, *others, **named)

    sampler.Sampler._sample_from_probs = sample_in_order


def narrowed(probs: Any, top_ks: Any, top_ps: Any, min_ps: Any, most: int | None) -> Any:
    """Returns the distributions [rows, vocabulary] after min-p and top-k, and as they are where there
    is no top-p. most: the largest of the top_ks; None if one keeps all."""
    import torch

    within = probs >= probs.amax(-1, keepdim=True) * min_ps[:, None]
    width = min(most or probs.shape[-1], probs.shape[-1])
    likeliest = probs.topk(width).indices  # of the whole vocabulary as fast as sorting
    ranks = torch.arange(width, device=probs.device)
    among = torch.zeros_like(within).scatter_(-1, likeliest, ranks < top_ks[:, None])
    left = probs.masked_fill(~(within & among), 0.0)
    left /= left.sum(-1, keepdim=True)
    return torch.where(top_ps[:, None] < 1, left, probs)
