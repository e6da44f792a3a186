"""A factor of queries that grows with their position, in layers that do not rotate (Llama 4): 1 + a ·
log(1 + ⌊(position + 1) / n⌋). Source: arXiv 2501.19399.

transformers takes a token's index in the pass for its position, which it is not in a packed row or
in a step of the sampler: `retempered` puts the right factor in place of that one.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


def tempers(module: Any) -> bool:
    """True for an attention layer whose queries have such a factor."""
    tuned = getattr(module, "attn_temperature_tuning", None)
    return bool(tuned) and not getattr(module, "use_rope", True)


def retempered(
    module: Any,
    query: Float[Tensor, "rows heads tokens head_dim"],
    positions: Int[Tensor, "*rows tokens"],
) -> Float[Tensor, "rows heads tokens head_dim"]:
    """Returns queries with the factor of their positions in place of that of their indices."""
    index = torch.arange(query.shape[2], device=query.device)
    ratio = factor(module, positions) / factor(module, index)
    return (query * ratio[..., None, :, None]).to(query.dtype)


def factor(module: Any, positions: Tensor) -> Tensor:
    steps = torch.floor((positions.float() + 1) / module.floor_scale)
    return 1 + module.attn_scale * torch.log1p(steps)
