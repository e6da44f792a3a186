"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from areal_x.agents.chat.dialogue import ChatAnswer, ChatRequest
from areal_x.agents.gateway.errors import ApiError
from areal_x.agents.gateway.exchange import (
    WITHOUT_EFFECT,
    Body,
    CallAnswer,
    Count,
    Lenient,
    Many,
    Positive,
    RequestedSampling,
    Share,
    Some,
    Temperature,
    ToolName,
    as_object,
    function,
    is_cut,
    named,
    pieces,
    template_of,
)
from areal_x.agents.gateway.response_format import asked_for, schema_of
from areal_x.agents.gateway.streams import event
from areal_x.types import Message

PREFIX = "msg_"
MOST_STOPS = 64
# holds what a model wrote as a tool's arguments where that is no JSON object
UNPARSED = "unparsed_arguments"


class TextBlock(Lenient):
    type: Literal["text"]
    text: str


class ThinkingBlock(Lenient):
    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[TextBlock] | None = None


class FromUser(Lenient):
    role: Literal["user"]
    content: str | Many[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]]


class FromAssistant(Lenient):
    role: Literal["assistant"]
    content: (
        str | Many[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]]
    )


class FromSystem(Lenient):
    role: Literal["system"]
    content: str | Many[TextBlock]


Sent = Annotated[FromUser | FromAssistant | FromSystem, Field(discriminator="role")]


class ToolGiven(Lenient):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Lenient):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Lenient):
    type: Literal["enabled", "disabled", "adaptive"]


class Format(Lenient):
    type: str
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class OutputConfig(Lenient):
    effort: str | None = None
    format: Format | None = None


class Conversation(Body):
    """What both routes take."""

    model: str | None = None
    messages: Annotated[Many[Sent], Field(min_length=1)]
    system: str | Many[TextBlock] | None = None
    tools: Many[ToolGiven] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = WITHOUT_EFFECT


class MessageRequest(Conversation):
    max_tokens: Positive
    stop_sequences: Annotated[list[Some], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    metadata: Any = WITHOUT_EFFECT
    service_tier: Any = WITHOUT_EFFECT
    inference_geo: Any = WITHOUT_EFFECT
    speed: Any = WITHOUT_EFFECT
    diagnostics: Any = WITHOUT_EFFECT


class Messages:
    """One request. See `asking.Exchange`.

    id: of the answer. Raises: ApiError or pydantic's ValidationError for a body that cannot be
    answered.
    """

    count = 1
    tool_param, format_param = "tools.{}.input_schema", "output_config.format"

    def __init__(self, body: bytes, id: str) -> None:
        asked = MessageRequest.read(body)
        self.id, self.asked, self.stream = id, asked, bool(asked.stream)
        self.wanted = RequestedSampling(
            asked.max_tokens, asked.temperature, asked.top_p, asked.top_k
        )
        self.ask = ask_of(asked, tuple(asked.stop_sequences or ()))

    def whole(self, said: Sequence[CallAnswer]) -> dict[str, Any]:
        answer = said[0].answer
        content = blocks_of(answer, self.id)
        usage = self._usage(answer, len(answer.completion.tokens))
        return {**self._begun(), "content": content, **ending(answer), "usage": usage}

    def events(self, said: Sequence[CallAnswer]) -> list[bytes]:
        answer = said[0].answer
        begun = {
            **self._begun(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(answer, 0),
        }
        found: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(blocks_of(answer, self.id)):
            empty, deltas = in_pieces(block)
            found.append({"type": "content_block_start", "index": index, "content_block": empty})
            found += [
                {"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas
            ]
            found.append({"type": "content_block_stop", "index": index})
        generated = {"output_tokens": len(answer.completion.tokens)}
        found.append({"type": "message_delta", "delta": ending(answer), "usage": generated})
        found.append({"type": "message_stop"})
        return [event(data, data["type"]) for data in found]

    def _begun(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.asked.model or "policy",
        }

    def _usage(self, answer: ChatAnswer, generated: int) -> dict[str, int]:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": len(answer.prompt), "output_tokens": generated, **cached}


def counted(body: bytes) -> ChatRequest:
    """The conversation of a request to count its tokens."""
    return ask_of(Conversation.read(body))


def ask_of(asked: Conversation, stop: tuple[str, ...] = ()) -> ChatRequest:
    choice, output = asked.tool_choice or ToolChoice(type="auto"), asked.output_config
    wanted = (output and output.format) or Format(type="text")
    schema = schema_of(wanted.type, wanted.schema_, Messages.format_param)
    tools = [
        function(t.name, t.description, t.input_schema, Messages.tool_param.format(i))
        for i, t in enumerate(asked.tools or [])
    ]
    told: str | dict[str, Any] = "required" if choice.type == "any" else choice.type
    if choice.type == "tool":
        named(choice.name or "", tools)
        told = {"type": "function", "function": {"name": choice.name}}
    template = template_of(
        told, not choice.disable_parallel_tool_use, output.effort if output is not None else None
    )
    if asked.thinking is not None and asked.thinking.type != "adaptive":
        template["enable_thinking"] = asked.thinking.type == "enabled"
    template |= template_of(None, None, given=asked.chat_template_kwargs)
    system: list[Message] = []
    if asked.system is not None:
        system.append({"role": "system", "content": joined(asked.system)})
    messages = [message for sent in asked.messages for message in messages_of(sent)]
    going_on = messages[-1]["role"] == "assistant"
    if going_on and "tool_calls" in messages[-1]:
        raise ApiError(
            400, "the last message uses tools: give their results", "invalid_value", "messages"
        )
    return ChatRequest(
        messages=asked_for((*system, *messages), schema),
        tools=() if choice.type == "none" else tuple(tools),
        stop=stop,
        template=template,
        continue_final=going_on,
        format=schema,
    )


def messages_of(sent: FromUser | FromAssistant | FromSystem) -> list[Message]:
    """A message of Anthropic's as those of OpenAI's: a user's becomes several where it brings
    results of tools."""
    if isinstance(sent.content, str):
        return [{"role": sent.role, "content": sent.content}]
    match sent:
        case FromSystem():
            return [{"role": "system", "content": joined(sent.content)}]
        case FromAssistant():
            return [of_assistant(sent.content)]
    found: list[Message] = []
    texts: list[TextBlock] = []
    for block in sent.content:
        if isinstance(block, TextBlock):
            texts.append(block)
            continue
        if texts:
            found.append({"role": "user", "content": joined(texts)})
            texts = []
        found.append(
            {
                "role": "tool",
                "content": joined(block.content or ""),
                "tool_call_id": block.tool_use_id,
            }
        )
    if texts or not found:
        found.append({"role": "user", "content": joined(texts)})
    return found


def of_assistant(blocks: Sequence[TextBlock | ThinkingBlock | ToolUseBlock]) -> Message:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": arguments_of(block.input)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": joined(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def arguments_of(given: dict[str, Any]) -> str:
    match given:
        case {"unparsed_arguments": str(text)} if len(given) == 1:
            return text
        case _:
            return json.dumps(given, ensure_ascii=False)


def blocks_of(answer: ChatAnswer, id: str) -> list[dict[str, Any]]:
    """What was said, as content blocks. A tool's arguments that are no JSON object are handed on as
    text in one."""
    reply = answer.reply
    found: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        found.append({"type": "thinking", "thinking": reply.reasoning, "signature": id})
    if reply.content:
        found.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        arguments = as_object(call.arguments)
        given = {UNPARSED: call.arguments} if arguments is None else arguments
        found.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return found


def in_pieces(block: dict[str, Any]) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """A block as it begins, and what is then added to it."""
    match block["type"]:
        case "thinking":
            added = [
                {"type": "thinking_delta", "thinking": piece} for piece in pieces(block["thinking"])
            ]
            added.append({"type": "signature_delta", "signature": block["signature"]})
            return {**block, "thinking": "", "signature": ""}, iter(added)
        case "text":
            return {**block, "text": ""}, iter(
                [{"type": "text_delta", "text": piece} for piece in pieces(block["text"])]
            )
        case _:
            written = json.dumps(block["input"])
            return {**block, "input": {}}, iter(
                [{"type": "input_json_delta", "partial_json": p} for p in pieces(written)]
            )


def ending(answer: ChatAnswer) -> dict[str, str | None]:
    if answer.reply.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stopped_by}
    reason = "max_tokens" if is_cut(answer) else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def joined(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
