"""What the masks of transformers' layers say, as numbers: each attention function of this backend
knows its sequences itself, and needs from a mask no more than how far back a token sees.

Some models (Qwen2-MoE, Phi-MoE) give a layer its window in the mask alone. transformers lets a mask
function be registered under the name of an attention function; `visible` is that function, and what
it returns is what a layer passes as its mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import AttentionMaskInterface, PreTrainedConfig


@dataclass(frozen=True)
class Visible:
    """The keys that a token sees: its own and the `window` − 1 before it; None: all before it."""

    window: int | None


def register(name: str) -> None:
    """Gives the layers that attend by the function of this name `Visible` in place of a mask."""
    AttentionMaskInterface.register(name, visible)


def visible(
    *,
    config: PreTrainedConfig,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool | None = None,
    **_: Any,
) -> Visible:
    """What transformers calls for each kind of layer in a pass. Which sequences are neighbours in a
    row, which it reads from positions, is left out: attention knows them.

    Raises: NotImplementedError for masks that are not causal, are made of other functions, or cut
    sequences into chunks.
    """
    if allow_is_bidirectional_skip is not None:
        raise NotImplementedError("its tokens see those after them")
    if use_vmap:
        raise NotImplementedError("its attention is masked by a function of its own")
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        raise NotImplementedError(f"its attention sees chunks of {local_size} tokens")
    return _seen(local_size)


@cache  # one object for each window, as compiled blocks are made for those they were given
def _seen(window: int | None) -> Visible:
    return Visible(window)


def window_of(module: Any, mask: Visible | None, sliding_window: int | None) -> int | None:
    """How many tokens a layer sees, by its mask where transformers made one, else by what it was
    told.

    Raises: NotImplementedError for a mask that the model has computed itself.
    """
    if mask is None:
        return sliding_window
    if not isinstance(mask, Visible):
        raise NotImplementedError(f"{type(module).__name__} computes a mask of its own")
    return mask.window
