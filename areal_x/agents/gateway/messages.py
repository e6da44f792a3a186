"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from areal_x.agents.chat.dialogue import ChatAnswer, ChatRequest
from areal_x.agents.gateway.content import (
    DocumentBlock,
    ImageBlock,
    Part,
    ReadBlock,
    SearchResultBlock,
    TextBlock,
    ToolReferenceBlock,
    joined,
    seen,
)
from areal_x.agents.gateway.errors import ApiError
from areal_x.agents.gateway.exchange import (
    IGNORED,
    ApiRequest,
    CallAnswer,
    Count,
    Lenient,
    Many,
    NonEmpty,
    Positive,
    Probability,
    RequestedSampling,
    Temperature,
    ToolName,
    check_tool_choice,
    is_truncated,
    openai_tool,
    template_variables,
    text_chunks,
)
from areal_x.agents.gateway.response_format import format_schema, with_format_instructions
from areal_x.agents.gateway.streams import event
from areal_x.agents.gateway.tools import CUSTOM, HOSTED, HostedTool, type_of
from areal_x.agents.json_checks import json_bounds
from areal_x.types import Message

PREFIX = "msg_"
MOST_STOPS = 64
# the key under which tool arguments that are not a JSON object are passed on
UNPARSED = "unparsed_arguments"


class ThinkingBlock(Lenient):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Lenient):
    """Reasoning of another model, encrypted: the policy cannot be shown it."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Lenient):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Lenient):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[ReadBlock] | None = None


class UserMessage(Lenient):
    role: Literal["user"]
    content: (
        str
        | Many[
            Annotated[
                TextBlock
                | ImageBlock
                | DocumentBlock
                | SearchResultBlock
                | ToolReferenceBlock
                | ToolResultBlock,
                Field(discriminator="type"),
            ]
        ]
    )


class AssistantMessage(Lenient):
    role: Literal["assistant"]
    content: (
        str
        | Many[
            Annotated[
                TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock,
                Field(discriminator="type"),
            ]
        ]
    )


class SystemMessage(Lenient):
    role: Literal["system"]
    content: str | Many[TextBlock]


Sent = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class ToolDefinition(Lenient):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]


def kind_of_tool(tool: Any) -> str:
    """Returns the tag of a tool: of the request's own, or of Anthropic's."""
    return CUSTOM if type_of(tool) in (None, "custom") else HOSTED


AnyTool = Annotated[
    Annotated[ToolDefinition, Tag(CUSTOM)] | Annotated[HostedTool, Tag(HOSTED)],
    Discriminator(kind_of_tool),
]


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


class Conversation(ApiRequest):
    """The parameters that both routes have in common."""

    refused = frozenset({"container", "mcp_servers"})
    model: str | None = None
    messages: Annotated[Many[Sent], Field(min_length=1)]
    system: str | Many[TextBlock] | None = None
    tools: Many[AnyTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: Any = IGNORED


class MessageRequest(Conversation):
    max_tokens: Positive
    stop_sequences: Annotated[list[NonEmpty], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Count | None = None
    metadata: Any = IGNORED
    service_tier: Any = IGNORED
    inference_geo: Any = IGNORED
    speed: Any = IGNORED
    diagnostics: Any = IGNORED


class Messages:
    """One request. See `exchange.Exchange`.

    id: of the response. Raises: ApiError or pydantic's ValidationError for a body that cannot be
    served.
    """

    count = 1
    tool_param, format_param = "tools.{}.input_schema", "output_config.format"

    def __init__(self, body: bytes, id: str) -> None:
        parsed = MessageRequest.read(body)
        self.id = id
        self.parsed = parsed
        self.stream = bool(parsed.stream)
        self.requested_sampling = RequestedSampling(
            parsed.max_tokens, parsed.temperature, parsed.top_p, parsed.top_k
        )
        self.chat_request = chat_request_of(parsed, tuple(parsed.stop_sequences or ()))
        self.ignored = parsed.ignored()

    def whole(self, answers: Sequence[CallAnswer]) -> dict[str, Any]:
        answer = answers[0].answer
        content = blocks_of(answer, self.id)
        usage = self._usage(answer, len(answer.completion.tokens))
        return {**self._begun(), "content": content, **stop_fields(answer), "usage": usage}

    def events(self, answers: Sequence[CallAnswer]) -> list[bytes]:
        answer = answers[0].answer
        begun = {
            **self._begun(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(answer, 0),
        }
        found: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(blocks_of(answer, self.id)):
            empty, deltas = block_deltas(block)
            found.append({"type": "content_block_start", "index": index, "content_block": empty})
            found += [
                {"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas
            ]
            found.append({"type": "content_block_stop", "index": index})
        generated = {"output_tokens": len(answer.completion.tokens)}
        found.append({"type": "message_delta", "delta": stop_fields(answer), "usage": generated})
        found.append({"type": "message_stop"})
        return [event(data, data["type"]) for data in found]

    def _begun(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.parsed.model or "policy",
        }

    def _usage(self, answer: ChatAnswer, generated: int) -> dict[str, int]:
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        return {"input_tokens": len(answer.prompt), "output_tokens": generated, **cached}


def read_count_request(body: bytes) -> ChatRequest:
    """Returns the conversation in a request to count its tokens."""
    return chat_request_of(Conversation.read(body))


def chat_request_of(parsed: Conversation, stop: tuple[str, ...] = ()) -> ChatRequest:
    choice = parsed.tool_choice or ToolChoice(type="auto")
    output = parsed.output_config
    requested = (output and output.format) or Format(type="text")
    schema = format_schema(requested.type, requested.schema_, Messages.format_param)
    tools = shown_tools(parsed)
    tool_choice: str | dict[str, Any] = "required" if choice.type == "any" else choice.type
    if choice.type == "tool":
        check_tool_choice(choice.name or "", tools)
        tool_choice = {"type": "function", "function": {"name": choice.name}}
    template = template_variables(
        tool_choice,
        not choice.disable_parallel_tool_use,
        output.effort if output is not None else None,
    )
    if parsed.thinking is not None and parsed.thinking.type != "adaptive":
        template["enable_thinking"] = parsed.thinking.type == "enabled"
    template |= template_variables(None, None, given=parsed.chat_template_kwargs)
    system: list[Message] = []
    if parsed.system is not None:
        system.append({"role": "system", "content": joined(parsed.system)})
    messages = [message for sent in parsed.messages for message in messages_of(sent)]
    continue_final = messages[-1]["role"] == "assistant"
    if continue_final and "tool_calls" in messages[-1]:
        raise ApiError(
            400, "the last message uses tools: give their results", "invalid_value", "messages"
        )
    return ChatRequest(
        messages=with_format_instructions((*system, *messages), schema),
        tools=() if choice.type == "none" else tuple(tools),
        stop=stop,
        template=template,
        continue_final=continue_final,
        format=schema,
    )


def shown_tools(parsed: Conversation) -> list[dict[str, Any]]:
    """Returns the tools as the model is shown them. Raises: ApiError for those of Anthropic's own,
    in the API's words for a model without them."""
    tools = parsed.tools or []
    kinds = [tool.type for tool in tools if isinstance(tool, HostedTool)]
    if kinds:
        raise ApiError(
            400,
            f"'{parsed.model or 'policy'}' does not support tool types: {', '.join(kinds)}."
            " Did you mean one of custom?",
            "invalid_value",
            "tools",
        )
    return [
        openai_tool(t.name, t.description, t.input_schema, Messages.tool_param.format(i))
        for i, t in enumerate(tools)
        if isinstance(t, ToolDefinition)
    ]


def messages_of(sent: UserMessage | AssistantMessage | SystemMessage) -> list[Message]:
    """Converts a message of Anthropic's into OpenAI's: a user's becomes several if it holds tool
    results."""
    if isinstance(sent.content, str):
        return [{"role": sent.role, "content": sent.content}]
    match sent:
        case SystemMessage():
            return [{"role": "system", "content": joined(sent.content)}]
        case AssistantMessage():
            return [assistant_message(sent.content)]
    found: list[Message] = []
    parts: list[Part] = []
    for block in sent.content:
        if not isinstance(block, ToolResultBlock):
            parts.append(block)
            continue
        if parts:
            found.append({"role": "user", "content": seen(parts)})
            parts = []
        found.append(
            {
                "role": "tool",
                "content": seen(block.content or ""),
                "tool_call_id": block.tool_use_id,
            }
        )
    if parts or not found:
        found.append({"role": "user", "content": seen(parts)})
    return found


def assistant_message(
    blocks: Sequence[TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock],
) -> Message:
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
    """Returns the reply as content blocks. Tool arguments that are not a JSON object are passed on
    as text in one."""
    reply = answer.reply
    found: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        found.append({"type": "thinking", "thinking": reply.reasoning, "signature": id})
    if reply.content:
        found.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        arguments = json_bounds.loads_object(call.arguments)
        given = {UNPARSED: call.arguments} if arguments is None else arguments
        found.append({"type": "tool_use", "id": call.id, "name": call.name, "input": given})
    return found


def block_deltas(block: dict[str, Any]) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Returns a block as it starts, and the deltas that complete it."""
    match block["type"]:
        case "thinking":
            added = [
                {"type": "thinking_delta", "thinking": piece}
                for piece in text_chunks(block["thinking"])
            ]
            added.append({"type": "signature_delta", "signature": block["signature"]})
            return {**block, "thinking": "", "signature": ""}, iter(added)
        case "text":
            return {**block, "text": ""}, iter(
                [{"type": "text_delta", "text": piece} for piece in text_chunks(block["text"])]
            )
        case _:
            written = json.dumps(block["input"])
            return {**block, "input": {}}, iter(
                [{"type": "input_json_delta", "partial_json": p} for p in text_chunks(written)]
            )


def stop_fields(answer: ChatAnswer) -> dict[str, str | None]:
    if answer.reply.tool_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stopped_by}
    reason = "max_tokens" if is_truncated(answer) else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}
