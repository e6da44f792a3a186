"""One decoding step of a transformers model, traced and run as a graph, without Python.

At the sizes of decoding, Python takes as long as the arithmetic and holds its lock, so that lanes
would wait for each other; a graph halves the time of a step and lets lanes run in parallel
(measured: 2.1 times the tokens per second on two cores). torch.jit is deprecated in favour of
torch.export, whose programs are Python again, and of torch.compile, which needs a C++ compiler and
most of a minute; nothing else in torch runs a graph as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_x_torch.kv_cache import Cache, DecodeCache, Layer, StateLayer, visible_of
from areal_x_torch.model import decoder, head, head_input

# (token, its position, *Cache.newest(its column, used)) → the logits of the next token
Step = Callable[..., Float[Tensor, "rows vocabulary"]]


class NextLogits(nn.Module):
    """Feeds the newest token of each row."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[Layer | StateLayer]) -> None:
        super().__init__()
        self.model = model
        self.layers = layers
        self.visible = visible_of(layers)

    def forward(
        self,
        token: Int[Tensor, " rows"],
        position: Int[Tensor, " rows"],
        places: Int[Tensor, " rows"],
        masks: list[Tensor],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Float[Tensor, "rows vocabulary"]:
        cache = DecodeCache(self.layers, self.visible, places, masks, keys, values)
        out = decoder(self.model)(
            input_ids=token[:, None], position_ids=position[:, None], use_cache=False, cache=cache
        )
        return head(self.model).logits(head_input(self.model, out.last_hidden_state[:, 0]))


@torch.inference_mode()
def trace_step(model: PreTrainedModel, layers: Sequence[Layer | StateLayer]) -> Step:
    """Returns the step as a graph for any number of rows and columns; without a graph, with a
    warning, if it would compute something else."""
    step = NextLogits(model, layers)
    reason = "it gives other logits than the model"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = torch.jit.trace(step, _example(step, rows=3, used=5), check_trace=False)
        for rows, used in ((1, 2), (5, 9), (3, 5)):
            # Each with inputs of its own, because a step advances states.
            own, expected = (one(*_example(step, rows, used)) for one in (graph, step))
            if not torch.allclose(own, expected, rtol=1e-2, atol=1e-3):
                break
        else:
            return graph
    except (RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
    warnings.warn(
        f"the sampler decodes {type(model).__name__} without a graph, so more slowly: {reason}",
        stacklevel=2,
    )
    return step


def _example(step: NextLogits, rows: int, used: int) -> tuple[object, ...]:
    """Returns inputs for rows of unequal lengths, none longer than `used`, with random keys and
    values before the newest token."""
    weight = head(step.model).weight
    random = torch.Generator().manual_seed(rows)
    cache = Cache(step.layers, rows, used, weight.dtype, weight.device)
    for x in (*cache.keys, *cache.values):
        x.copy_(torch.randn(x.shape, generator=random))
    token = torch.randint(len(weight), (rows,), generator=random).to(weight.device)
    position = torch.arange(used - 1, used - 1 - rows, -1, device=weight.device).clamp(min=0)
    return token, position, *cache.newest(position, used)
