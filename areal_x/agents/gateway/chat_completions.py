"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from areal_x.agents.chat.dialogue import ChatAnswer, ChatRequest
from areal_x.agents.gateway.errors import ApiError, unsupported
from areal_x.agents.gateway.exchange import (
    IGNORED,
    Body,
    CallAnswer,
    Count,
    Lenient,
    Many,
    NonEmpty,
    Positive,
    Probability,
    RequestedSampling,
    Share,
    Temperature,
    Text,
    ToolName,
    Zero,
    check_tool_choice,
    is_truncated,
    logprobs_of,
    openai_tool,
    template_variables,
    text_chunks,
)
from areal_x.agents.gateway.response_format import format_schema, with_format_instructions
from areal_x.agents.gateway.streams import event

MOST_STOPS = 16


class TextPart(Lenient):
    type: Literal["text"]
    text: str


Content = str | Many[TextPart]


class SystemMessage(Lenient):
    role: Literal["system", "developer"]
    content: Content


class UserMessage(Lenient):
    role: Literal["user"]
    content: Content


class CalledFunction(Lenient):
    name: str
    arguments: str


class ToolCallSent(Lenient):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Lenient):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Many[ToolCallSent] | None = None


class ToolMessage(Lenient):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Sent = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class FunctionDefinition(Lenient):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolDefinition(Lenient):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class NamedSchema(Lenient):
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Lenient):
    type: str
    json_schema: NamedSchema | None = None


class StreamOptions(Lenient):
    include_usage: bool | None = None


class ChatCompletionRequest(Body):
    model: str | None = None
    messages: Annotated[Many[Sent], Field(min_length=1)]
    tools: Many[ToolDefinition] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: NonEmpty | Annotated[list[NonEmpty], Field(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    modalities: list[Literal["text"]] | None = None
    seed: Any = IGNORED
    user: Any = IGNORED
    metadata: Any = IGNORED
    store: Any = IGNORED
    service_tier: Any = IGNORED
    safety_identifier: Any = IGNORED
    prompt_cache_key: Any = IGNORED
    prompt_cache_options: Any = IGNORED
    prompt_cache_retention: Any = IGNORED
    verbosity: Any = IGNORED


class ChatCompletions:
    """One request. See `exchange.Exchange`.

    id: of the response. created: seconds of Unix time. text: decodes tokens, for their
    log-probabilities. Raises: ApiError or pydantic's ValidationError for a body that cannot be
    served.
    """

    tool_param, format_param = "tools.{}.function.parameters", "response_format"

    def __init__(self, body: bytes, id: str, created: int, text: Text) -> None:
        parsed = ChatCompletionRequest.read(body)
        self.id = id
        self.created = created
        self.text = text
        self.parsed = parsed
        self.count = parsed.n or 1
        self.stream = bool(parsed.stream)
        self.requested_sampling = RequestedSampling(
            parsed.max_completion_tokens or parsed.max_tokens,
            parsed.temperature,
            parsed.top_p,
            parsed.top_k,
            parsed.min_p,
        )
        self.chat_request = chat_request_of(parsed)

    def whole(self, answers: Sequence[CallAnswer]) -> dict[str, Any]:
        choices = []
        for index, call in enumerate(answers):
            message = {"refusal": None, **call.answer.reply.message()}
            choice = {
                "index": index,
                "message": message,
                "finish_reason": finish_reason(call.answer),
                "logprobs": None,
            }
            if self.parsed.logprobs:
                choice["logprobs"] = {
                    "content": logprobs_of(call.answer, self.text),
                    "refusal": None,
                }
            choices.append(choice)
        return {**self._head("chat.completion"), "choices": choices, "usage": usage(answers)}

    def events(self, answers: Sequence[CallAnswer]) -> list[bytes]:
        counts = bool(self.parsed.stream_options and self.parsed.stream_options.include_usage)
        head = self._head("chat.completion.chunk") | ({"usage": None} if counts else {})
        chunks = []
        for index, call in enumerate(answers):
            choice = {"index": index, "delta": {}, "finish_reason": None, "logprobs": None}
            chunks += [
                {**head, "choices": [{**choice, "delta": delta}]} for delta in deltas(call.answer)
            ]
            last = {**choice, "finish_reason": finish_reason(call.answer)}
            if self.parsed.logprobs:
                last["logprobs"] = {"content": logprobs_of(call.answer, self.text), "refusal": None}
            chunks.append({**head, "choices": [last]})
        if counts:
            chunks.append({**head, "choices": [], "usage": usage(answers)})
        return [*map(event, chunks), b"data: [DONE]\n\n"]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.parsed.model or "policy",
        }


def chat_request_of(parsed: ChatCompletionRequest) -> ChatRequest:
    choice = parsed.tool_choice
    tools = [
        openai_tool(
            t.function.name,
            t.function.description,
            t.function.parameters,
            ChatCompletions.tool_param.format(i),
        )
        for i, t in enumerate(parsed.tools or [])
    ]
    if isinstance(choice, NamedTool):
        check_tool_choice(choice.function.name, tools)
    tool_choice = choice.model_dump() if isinstance(choice, NamedTool) else choice
    stop = [parsed.stop] if isinstance(parsed.stop, str) else parsed.stop or []
    continue_final = bool(parsed.continue_final_message)
    if continue_final and (parsed.add_generation_prompt or parsed.messages[-1].role != "assistant"):
        raise ApiError(
            400,
            "continue_final_message needs an assistant's message at the end and"
            " add_generation_prompt = false",
            "invalid_value",
            "continue_final_message",
        )
    if parsed.add_generation_prompt is False and not continue_final:
        raise unsupported(
            "add_generation_prompt = false",
            "a completion is an assistant's message, or the rest of one",
        )
    requested = parsed.response_format or ResponseFormat(type="text")
    given = None if requested.json_schema is None else requested.json_schema.schema_
    schema = format_schema(requested.type, given, ChatCompletions.format_param)
    return ChatRequest(
        messages=with_format_instructions(
            [message_of(message) for message in parsed.messages], schema
        ),
        tools=() if choice == "none" else tuple(tools),
        stop=tuple(stop),
        template=template_variables(
            tool_choice,
            parsed.parallel_tool_calls,
            parsed.reasoning_effort,
            parsed.chat_template_kwargs,
        ),
        continue_final=continue_final,
        format=schema,
    )


def message_of(
    sent: SystemMessage | UserMessage | AssistantMessage | ToolMessage,
) -> dict[str, Any]:
    """Returns a message in the form that chat templates know, without fields that clients add."""
    match sent:
        case SystemMessage():
            return {"role": "system", "content": joined(sent.content)}
        case UserMessage():
            return {"role": "user", "content": joined(sent.content)}
        case ToolMessage():
            return {
                "role": "tool",
                "content": joined(sent.content),
                "tool_call_id": sent.tool_call_id,
            }
        case AssistantMessage():
            message: dict[str, Any] = {
                "role": "assistant",
                "content": None if sent.content is None else joined(sent.content),
            }
            if (reasoning := sent.reasoning_content or sent.reasoning) is not None:
                message["reasoning_content"] = reasoning
            if sent.tool_calls:
                message["tool_calls"] = [call.model_dump() for call in sent.tool_calls]
            return message


def joined(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def deltas(answer: ChatAnswer) -> list[dict[str, Any]]:
    """Splits a message into the deltas that official clients reassemble."""
    reply = answer.reply
    found: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    found += [{"reasoning_content": piece} for piece in text_chunks(reply.reasoning or "")]
    found += [{"content": piece} for piece in text_chunks(reply.content or "")]
    for index, call in enumerate(reply.tool_calls):
        begun = {
            "index": index,
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": ""},
        }
        found.append({"tool_calls": [begun]})
        found += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}
            for piece in text_chunks(call.arguments)
        ]
    return found


def finish_reason(answer: ChatAnswer) -> str:
    if answer.reply.tool_calls:
        return "tool_calls"
    return "length" if is_truncated(answer) else "stop"


def usage(answers: Sequence[CallAnswer]) -> dict[str, int]:
    """Counts the tokens of all completions; their shared prompt counts once."""
    prompt = len(answers[0].answer.prompt)
    completion = sum(len(call.answer.completion.tokens) for call in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
