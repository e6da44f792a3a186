"""The items of OpenAI's responses: parsed into messages, and written as events of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from areal_x.agents.gateway.content import InputFilePart, MediaPart, RefusalPart, joined, seen
from areal_x.agents.gateway.exchange import Lenient, Many, text_chunks
from areal_x.agents.gateway.tools import arguments_of_input
from areal_x.types import Message


class TextPart(Lenient):
    type: Literal["input_text", "output_text"]
    text: str

    def shown(self) -> str:
        return self.text


AnyPart = Annotated[TextPart | RefusalPart | MediaPart | InputFilePart, Field(discriminator="type")]


class MessageItem(Lenient):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[AnyPart]


class ReasoningPart(Lenient):
    text: str


class ReasoningItem(Lenient):
    content: Many[ReasoningPart] | None = None
    summary: Many[ReasoningPart] | None = None


class CallItem(Lenient):
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CallOutputItem(Lenient):
    call_id: str
    output: str | Many[AnyPart]


class CustomCallItem(Lenient):
    call_id: str
    name: str
    namespace: str | None = None
    input: str


def full_name(name: str, namespace: str | None) -> str:
    """Returns the name by which the model knows a tool."""
    return name if namespace is None else f"{namespace}.{name}"


def kind_of(item: Any) -> str:
    return (item.get("type") if isinstance(item, dict) else None) or "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("custom_tool_call_output")],
    Discriminator(kind_of),
]


def item_events(index: int, item: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events of one output item: added, filled and done."""
    where = {"item_id": item["id"], "output_index": index}
    empty = {**item, "status": "in_progress"}
    if item["type"] == "custom_tool_call":
        empty = {**item, "input": ""}
        name = "response.custom_tool_call_input"
        filled = [
            {"type": f"{name}.delta", **where, "delta": piece}
            for piece in text_chunks(item["input"])
        ]
        filled.append({"type": f"{name}.done", **where, "input": item["input"]})
    elif item["type"] == "function_call":
        empty["arguments"] = ""
        name = "response.function_call_arguments"
        filled = [
            {"type": f"{name}.delta", **where, "delta": piece}
            for piece in text_chunks(item["arguments"])
        ]
        filled.append(
            {"type": f"{name}.done", **where, "arguments": item["arguments"], "name": item["name"]}
        )
    else:
        empty["content"] = []
        (part,) = item["content"]
        where["content_index"] = 0
        is_text = part["type"] == "output_text"
        name = "response.output_text" if is_text else "response.reasoning_text"
        extra: dict[str, Any] = {"logprobs": []} if is_text else {}
        blank = {**part, "text": "", **extra}
        filled = [{"type": "response.content_part.added", **where, "part": blank}]
        filled += [
            {"type": f"{name}.delta", **where, "delta": piece, **extra}
            for piece in text_chunks(part["text"])
        ]
        last = {"logprobs": part["logprobs"]} if is_text else {}
        filled.append({"type": f"{name}.done", **where, "text": part["text"], **last})
        filled.append({"type": "response.content_part.done", **where, "part": part})
    return [
        {"type": "response.output_item.added", "output_index": index, "item": empty},
        *filled,
        {"type": "response.output_item.done", "output_index": index, "item": item},
    ]


def messages_of(
    items: Sequence[MessageItem | ReasoningItem | CallItem | CallOutputItem | CustomCallItem],
) -> list[Message]:
    """Converts items to messages: consecutive reasoning, text and calls become one assistant
    message."""
    found: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant message that the next item may extend

    def belonging(fits: bool) -> dict[str, Any]:
        nonlocal turn
        if turn is None or not fits:
            turn = {"role": "assistant", "content": None}
            found.append(turn)
        return turn

    for item in items:
        match item:
            case ReasoningItem():
                parts = item.content or item.summary or []
                belonging(False)["reasoning_content"] = "\n".join(part.text for part in parts)
            case CallItem() | CustomCallItem():
                arguments = (
                    item.arguments if isinstance(item, CallItem) else arguments_of_input(item.input)
                )
                name = full_name(item.name, item.namespace)
                about = {"name": name, "arguments": arguments}
                call = {"id": item.call_id, "type": "function", "function": about}
                belonging(True).setdefault("tool_calls", []).append(call)
            case MessageItem(role="assistant"):
                fresh = turn is not None and turn["content"] is None and "tool_calls" not in turn
                belonging(fresh)["content"] = joined(item.content)
            case CallOutputItem():
                turn = None
                found.append(
                    {"role": "tool", "content": seen(item.output), "tool_call_id": item.call_id}
                )
            case MessageItem():
                turn = None
                role = "user" if item.role == "user" else "system"
                content = seen(item.content) if role == "user" else joined(item.content)
                found.append({"role": role, "content": content})
    return list(found)
