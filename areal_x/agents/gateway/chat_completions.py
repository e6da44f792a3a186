"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from areal_x.agents.chat.dialogue import ChatAnswer, ChatRequest
from areal_x.agents.gateway.errors import ApiError, unsupported
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
    Text,
    ToolName,
    Zero,
    function,
    is_cut,
    logprobs_of,
    named,
    pieces,
    template_of,
)
from areal_x.agents.gateway.response_format import asked_for, schema_of
from areal_x.agents.gateway.streams import event

MOST_STOPS = 16


class TextPart(Lenient):
    type: Literal["text"]
    text: str


Content = str | Many[TextPart]


class FromSystem(Lenient):
    role: Literal["system", "developer"]
    content: Content


class FromUser(Lenient):
    role: Literal["user"]
    content: Content


class CalledFunction(Lenient):
    name: str
    arguments: str


class ToolCallSent(Lenient):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class FromAssistant(Lenient):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Many[ToolCallSent] | None = None


class FromTool(Lenient):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Sent = Annotated[FromSystem | FromUser | FromAssistant | FromTool, Field(discriminator="role")]


class FunctionGiven(Lenient):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolGiven(Lenient):
    type: Literal["function"]
    function: FunctionGiven


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
    tools: Many[ToolGiven] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Some | Annotated[list[Some], Field(max_length=MOST_STOPS)] | None = None
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
    seed: Any = WITHOUT_EFFECT
    user: Any = WITHOUT_EFFECT
    metadata: Any = WITHOUT_EFFECT
    store: Any = WITHOUT_EFFECT
    service_tier: Any = WITHOUT_EFFECT
    safety_identifier: Any = WITHOUT_EFFECT
    prompt_cache_key: Any = WITHOUT_EFFECT
    prompt_cache_options: Any = WITHOUT_EFFECT
    prompt_cache_retention: Any = WITHOUT_EFFECT
    verbosity: Any = WITHOUT_EFFECT


class ChatCompletions:
    """One request. See `asking.Exchange`.

    id: of the answer. created: in seconds of Unix time. text: of tokens, for their
    log-probabilities. Raises: ApiError or pydantic's ValidationError for a body that cannot be
    answered.
    """

    tool_param, format_param = "tools.{}.function.parameters", "response_format"

    def __init__(self, body: bytes, id: str, created: int, text: Text) -> None:
        asked = ChatCompletionRequest.read(body)
        self.id, self.created, self.text, self.asked = id, created, text, asked
        self.count, self.stream = asked.n or 1, bool(asked.stream)
        self.wanted = RequestedSampling(
            asked.max_completion_tokens or asked.max_tokens,
            asked.temperature,
            asked.top_p,
            asked.top_k,
        )
        self.ask = ask_of(asked)

    def whole(self, said: Sequence[CallAnswer]) -> dict[str, Any]:
        choices = []
        for index, one in enumerate(said):
            message = {"refusal": None, **one.answer.reply.message()}
            choice = {
                "index": index,
                "message": message,
                "finish_reason": finish_reason(one.answer),
                "logprobs": None,
            }
            if self.asked.logprobs:
                choice["logprobs"] = {
                    "content": logprobs_of(one.answer, self.text),
                    "refusal": None,
                }
            choices.append(choice)
        return {**self._head("chat.completion"), "choices": choices, "usage": usage(said)}

    def events(self, said: Sequence[CallAnswer]) -> list[bytes]:
        counts = bool(self.asked.stream_options and self.asked.stream_options.include_usage)
        head = self._head("chat.completion.chunk") | ({"usage": None} if counts else {})
        chunks = []
        for index, one in enumerate(said):
            choice = {"index": index, "delta": {}, "finish_reason": None, "logprobs": None}
            chunks += [
                {**head, "choices": [{**choice, "delta": delta}]} for delta in deltas(one.answer)
            ]
            last = {**choice, "finish_reason": finish_reason(one.answer)}
            if self.asked.logprobs:
                last["logprobs"] = {"content": logprobs_of(one.answer, self.text), "refusal": None}
            chunks.append({**head, "choices": [last]})
        if counts:
            chunks.append({**head, "choices": [], "usage": usage(said)})
        return [*map(event, chunks), b"data: [DONE]\n\n"]

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.asked.model or "policy",
        }


def ask_of(asked: ChatCompletionRequest) -> ChatRequest:
    choice = asked.tool_choice
    tools = [
        function(
            t.function.name,
            t.function.description,
            t.function.parameters,
            ChatCompletions.tool_param.format(i),
        )
        for i, t in enumerate(asked.tools or [])
    ]
    if isinstance(choice, NamedTool):
        named(choice.function.name, tools)
    told = choice.model_dump() if isinstance(choice, NamedTool) else choice
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    going_on = bool(asked.continue_final_message)
    if going_on and (asked.add_generation_prompt or asked.messages[-1].role != "assistant"):
        raise ApiError(
            400,
            "continue_final_message needs an assistant's message at the end, and"
            " add_generation_prompt = false",
            "invalid_value",
            "continue_final_message",
        )
    if asked.add_generation_prompt is False and not going_on:
        raise unsupported(
            "add_generation_prompt = false",
            "a completion is an assistant's message, or the rest of one",
        )
    wanted = asked.response_format or ResponseFormat(type="text")
    given = None if wanted.json_schema is None else wanted.json_schema.schema_
    schema = schema_of(wanted.type, given, ChatCompletions.format_param)
    return ChatRequest(
        messages=asked_for([message_of(message) for message in asked.messages], schema),
        tools=() if choice == "none" else tuple(tools),
        stop=tuple(stop),
        template=template_of(
            told, asked.parallel_tool_calls, asked.reasoning_effort, asked.chat_template_kwargs
        ),
        continue_final=going_on,
        format=schema,
    )


def message_of(sent: FromSystem | FromUser | FromAssistant | FromTool) -> dict[str, Any]:
    """A message as chat templates know it, without what clients add to it."""
    match sent:
        case FromSystem():
            return {"role": "system", "content": joined(sent.content)}
        case FromUser():
            return {"role": "user", "content": joined(sent.content)}
        case FromTool():
            return {
                "role": "tool",
                "content": joined(sent.content),
                "tool_call_id": sent.tool_call_id,
            }
        case FromAssistant():
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
    """A message in pieces, as official clients put it together again."""
    reply = answer.reply
    found: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    found += [{"reasoning_content": piece} for piece in pieces(reply.reasoning or "")]
    found += [{"content": piece} for piece in pieces(reply.content or "")]
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
            for piece in pieces(call.arguments)
        ]
    return found


def finish_reason(answer: ChatAnswer) -> str:
    if answer.reply.tool_calls:
        return "tool_calls"
    return "length" if is_cut(answer) else "stop"


def usage(said: Sequence[CallAnswer]) -> dict[str, int]:
    """Of all completions; the prompt that they share counts once."""
    prompt = len(said[0].answer.prompt)
    completion = sum(len(one.answer.completion.tokens) for one in said)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
