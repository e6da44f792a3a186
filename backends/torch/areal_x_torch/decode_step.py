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
from areal_x_torch.slot_adapters import Running, SlotAdapters

# (tokens, their positions, *Cache.newest(their columns, used)) → the logits of the tokens after them
Step = Callable[..., Float[Tensor, "fed vocabulary"]]


class NextLogits(nn.Module):
    """Feeds the newest `width` tokens of each row."""

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[Layer | StateLayer], width: int
    ) -> None:
        super().__init__()
        self.width = width
        self.model = model
        self.layers = layers
        self.visible = visible_of(layers)

    def forward(
        self,
        tokens: Int[Tensor, "rows width"],
        positions: Int[Tensor, "rows width"],
        places: Int[Tensor, " fed"],
        masks: list[Tensor],
        keys: list[Tensor],
        values: list[Tensor],
        pending: Sequence[Tensor] = (),
    ) -> Float[Tensor, "fed vocabulary"]:
        own = places, masks, keys, values, self.width, pending
        cache = DecodeCache(self.layers, self.visible, *own)
        out = decoder(self.model)(
            input_ids=tokens, position_ids=positions, use_cache=False, cache=cache
        )
        last = out.last_hidden_state.flatten(0, 1)
        return head(self.model).logits(head_input(self.model, last))


class AdaptedLogits(nn.Module):
    """The same with rows' own adapters: first those (`Running`), then what NextLogits gets."""

    def __init__(self, step: NextLogits, slots: SlotAdapters) -> None:
        super().__init__()
        self.step, self.slots = step, slots

    def forward(self, columns: Tensor, rows: Tensor, *given: object) -> Tensor:
        with self.slots.being(Running(columns, rows)):
            logits: Tensor = self.step(*given)
        return logits


@torch.inference_mode()
def trace_step(
    model: PreTrainedModel,
    layers: Sequence[Layer | StateLayer],
    width: int = 1,
    slots: SlotAdapters | None = None,
) -> Step:
    """Returns the step as a graph for any number of rows and columns; without a graph, with a
    warning, if it would compute something else. width: tokens of each row in one pass. slots: for
    AdaptedLogits."""
    step: NextLogits | AdaptedLogits = NextLogits(model, layers, width)
    if slots is not None:
        step = AdaptedLogits(step, slots)
    reason = "it gives other logits than the model"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            longer = width - 1
            example = _example(step, rows=3, used=5 + longer)
            graph = torch.jit.trace(step, example, check_trace=False)
        for rows, used in ((1, 2 + longer), (5, 9 + longer), (3, 5 + longer)):
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


def _example(step: NextLogits | AdaptedLogits, rows: int, used: int) -> tuple[object, ...]:
    """Returns inputs for rows of unequal lengths, none longer than `used`, with random keys and
    values before the newest token."""
    if isinstance(step, AdaptedLogits):
        return *step.slots.running([None] * rows), *_example(step.step, rows, used)
    weight = head(step.model).weight
    random = torch.Generator().manual_seed(rows)
    cache = Cache(step.layers, rows, used, weight.dtype, weight.device, step.width)
    for x in (*cache.keys, *cache.values):
        x.copy_(torch.randn(x.shape, generator=random))
    tokens = torch.randint(len(weight), (rows, step.width), generator=random).to(weight.device)
    last = torch.arange(used - step.width, used - step.width - rows, -1, device=weight.device)
    positions = last.clamp(min=0)[:, None] + torch.arange(step.width, device=weight.device)
    return tokens, positions, *cache.newest(positions, used)
