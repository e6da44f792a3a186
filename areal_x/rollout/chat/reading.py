"""What a completion's text says: content, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """A tool that the model wants called. id: unique in its conversation. arguments: JSON text; where it does not parse, as the
    model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """What the model said. content: None where it said nothing but tool calls or reasoning."""

    content: str | None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """The assistant's message in OpenAI's form, for the conversation that goes on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message
