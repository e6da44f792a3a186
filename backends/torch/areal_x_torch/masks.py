"""The masks of transformers' layers as numbers: this backend's attention functions know their
sequences themselves, and need from a mask only how far back a token sees.

Some models (Qwen2-MoE, Phi-MoE) give a layer its window in the mask alone. transformers lets a mask
function be registered under the name of an attention function; `visible` is that function, and its
result is what a layer passes as its mask.
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
    """Gives the layers that use the attention function of this name a `Visible` in place of a
    mask."""
    AttentionMaskInterface.register(name, visible)


def visible(
    *,
    config: PreTrainedConfig,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool | None = None,
    **_: Any,
) -> Visible:
    """The mask function that transformers calls for each kind of layer in a pass. It ignores which sequences are
    neighbours in a row, which transformers infers from positions: attention knows them.

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


@cache  # one object per window, because compiled blocks are specialised for it
def _seen(window: int | None) -> Visible:
    return Visible(window)


def window_of(module: Any, mask: Visible | None, sliding_window: int | None) -> int | None:
    """Returns how many tokens a layer sees, from its mask if transformers made one, else from its
    own argument.

    Raises: NotImplementedError for a mask that the model has computed itself.
    """
    if mask is None:
        return sliding_window
    if not isinstance(mask, Visible):
        raise NotImplementedError(f"{type(module).__name__} computes a mask of its own")
    return mask.window
