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
    """The keys that a token sees: its own and the `window` − 1 before it; None: all before it. chunk:
    if it is not None, sequences are cut into chunks of so many tokens, and a token sees those of its
    own."""

    window: int | None
    chunk: int | None = None

    def __getitem__(self, _: Any) -> None:
        """Raises: NotImplementedError, in a layer that takes this for a tensor."""
        raise NotImplementedError("its layers choose among the keys that its mask shows")

    def hides(self, tokens: int) -> bool:
        """True if a token of a sequence of so many may not see one before it."""
        return any(span is not None and span < tokens for span in (self.window, self.chunk))


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

    Raises: NotImplementedError for masks that are not causal or are made of other functions.
    """
    if allow_is_bidirectional_skip is not None:
        raise NotImplementedError("its tokens see those after them")
    if use_vmap:
        raise NotImplementedError("its attention is masked by a function of its own")
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if local_size is None or local_size == window != chunk:
        return _seen(local_size, None)
    if local_size == chunk != window:
        return _seen(None, local_size)
    raise NotImplementedError(f"its attention sees windows or chunks of {local_size} tokens")


@cache  # one object per window, because compiled blocks are specialised for it
def _seen(window: int | None, chunk: int | None) -> Visible:
    return Visible(window, chunk)


def seen_of(module: Any, mask: Visible | None, sliding_window: int | None) -> Visible:
    """Returns the keys that a layer's tokens see, from its mask if transformers made one, else from
    its own argument.

    Raises: NotImplementedError for a mask that the model has computed itself.
    """
    if mask is None:
        return _seen(sliding_window, None)
    if not isinstance(mask, Visible):
        raise NotImplementedError(f"{type(module).__name__} computes a mask of its own")
    return mask
