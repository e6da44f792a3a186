"""Messages to the tokens of a prompt, and the tokens of a completion to a reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32

from areal_x.rollout.chat.reading import Reply
from areal_x.types import Message


class Renderer(Protocol):
    """How a model writes conversations. Messages and tools are OpenAI's dicts; template: more variables of its chat template.

    special: ids of the tokens that are no text, of which some end a turn.
    """

    special: frozenset[int]

    async def rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> str:
        """The prompt as text: the assistant's turn opened behind the messages, or with `continue_final` the last message, an
        assistant's, left open. Raises UserError for messages that the template refuses."""
        ...

    def encode(self, text: str, begins: bool = False) -> Int32[np.ndarray, " N"]:
        """The tokens of a text as it is, special tokens that are written out included. begins: it begins a prompt."""
        ...

    async def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any],
        continue_final: bool = False,
    ) -> Int32[np.ndarray, " P"]:
        """The tokens of `rendered`."""
        ...

    async def read(
        self, tokens: Int32[np.ndarray, " N"], tools: Sequence[Mapping[str, Any]], prompt: Int32[np.ndarray, " P"] | None = None
    ) -> Reply:
        """The reply that a completion's tokens are, with or without an end token. prompt: what they continue, in which a
        template may have begun the reply, as by opening its reasoning."""
        ...

    def text(self, tokens: Int32[np.ndarray, " N"]) -> str:
        """Special tokens left out."""
        ...
