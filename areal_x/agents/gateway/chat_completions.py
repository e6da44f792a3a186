"""OpenAI's chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from areal_x.agents.chat.dialogue import ChatAnswer, ChatRequest
from areal_x.agents.gateway.content import (
    FilePart,
    MediaPart,
    RefusalPart,
    TextBlock,
    joined,
    seen,
)
from areal_x.agents.gateway.errors import ApiError, unsupported
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
from areal_x.agents.gateway.tools import (
    CUSTOM,
    FUNCTION,
    HOSTED,
    PARAMETERS,
    CustomCall,
    CustomDefinition,
    HostedTool,
    arguments_of_input,
    input_of_arguments,
    kind_of_call,
    kind_of_tool,
)

MOST_STOPS = 16


Content = (
    str
    | Many[Annotated[TextBlock | RefusalPart | MediaPart | FilePart, Field(discriminator="type")]]
)


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

    def call(self) -> dict[str, Any]:
        return self.model_dump()


class CustomCallSent(Lenient):
    id: str
    type: Literal["custom"]
    custom: CustomCall

    def call(self) -> dict[str, Any]:
        about = {"name": self.custom.name, "arguments": arguments_of_input(self.custom.input)}
        return {"id": self.id, "type": "function", "function": about}


AnyCallSent = Annotated[
    Annotated[ToolCallSent, Tag(FUNCTION)] | Annotated[CustomCallSent, Tag(CUSTOM)],
    Discriminator(kind_of_call),
]


class AssistantMessage(Lenient):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Many[AnyCallSent] | None = None


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


class CustomTool(Lenient):
    type: Literal["custom"]
    custom: CustomDefinition


AnyTool = Annotated[
    Annotated[ToolDefinition, Tag(FUNCTION)]
    | Annotated[CustomTool, Tag(CUSTOM)]
    | Annotated[HostedTool, Tag(HOSTED)],
    Discriminator(kind_of_tool),
]


class NamedFunction(Lenient):
    name: str


class NamedTool(Lenient):
    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(Lenient):
    type: Literal["custom"]
    custom: NamedFunction

    @property
    def name(self) -> str:
        return self.custom.name


class NamedSchema(Lenient):
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Lenient):
    type: str
    json_schema: NamedSchema | None = None


class StreamOptions(Lenient):
    include_usage: bool | None = None


class ChatCompletionRequest(ApiRequest):
    refused = frozenset({"audio", "function_call", "functions", "web_search_options"})

    model: str | None = None
    messages: Annotated[Many[Sent], Field(min_length=1)]
    tools: Many[AnyTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | NamedCustomTool | None = None
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
        self.ignored = parsed.ignored()
        self.custom = frozenset(
            tool.custom.name for tool in parsed.tools or [] if isinstance(tool, CustomTool)
        )

    def whole(self, answers: Sequence[CallAnswer]) -> dict[str, Any]:
        choices = []
        for index, call in enumerate(answers):
            message = {"refusal": None, **call.answer.reply.message()}
            if "tool_calls" in message:
                message["tool_calls"] = [self._delivered(c) for c in message["tool_calls"]]
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
                {**head, "choices": [{**choice, "delta": delta}]}
                for delta in deltas(call.answer, self.custom)
            ]
            last = {**choice, "finish_reason": finish_reason(call.answer)}
            if self.parsed.logprobs:
                last["logprobs"] = {"content": logprobs_of(call.answer, self.text), "refusal": None}
            chunks.append({**head, "choices": [last]})
        if counts:
            chunks.append({**head, "choices": [], "usage": usage(answers)})
        return [*map(event, chunks), b"data: [DONE]\n\n"]

    def _delivered(self, call: dict[str, Any]) -> dict[str, Any]:
        """Returns a call in the form of its tool."""
        about = call["function"]
        if about["name"] not in self.custom:
            return call
        text = input_of_arguments(about["arguments"])
        return {
            "id": call["id"],
            "type": "custom",
            "custom": {"name": about["name"], "input": text},
        }

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.parsed.model or "policy",
        }


def chat_request_of(parsed: ChatCompletionRequest) -> ChatRequest:
    choice = parsed.tool_choice
    tools = [shown_tool(i, tool) for i, tool in enumerate(parsed.tools or [])]
    tool_choice: str | dict[str, Any] | None
    if isinstance(choice, (NamedTool, NamedCustomTool)):
        check_tool_choice(choice.name, tools)
        tool_choice = {"type": "function", "function": {"name": choice.name}}
    else:
        tool_choice = choice
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


def shown_tool(index: int, tool: ToolDefinition | CustomTool | HostedTool) -> dict[str, Any]:
    """Returns a tool as the model is shown it. Raises: ApiError for one of OpenAI's own servers, in
    the API's words."""
    match tool:
        case CustomTool():
            about = tool.custom
            return openai_tool(about.name, about.shown_description(), PARAMETERS, "")
        case HostedTool():
            raise ApiError(
                400,
                f"tools.{index}.type: Invalid value: '{tool.type}'. Supported values are: 'function' and 'custom'.",
                "invalid_value",
                f"tools.{index}.type",
            )
    given = tool.function
    param = ChatCompletions.tool_param.format(index)
    return openai_tool(given.name, given.description, given.parameters, param)


def message_of(
    sent: SystemMessage | UserMessage | AssistantMessage | ToolMessage,
) -> dict[str, Any]:
    """Returns a message in the form that chat templates know, without fields that clients add."""
    match sent:
        case SystemMessage():
            return {"role": "system", "content": joined(sent.content)}
        case UserMessage():
            return {"role": "user", "content": seen(sent.content)}
        case ToolMessage():
            return {
                "role": "tool",
                "content": seen(sent.content),
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
                message["tool_calls"] = [call.call() for call in sent.tool_calls]
            return message


def deltas(answer: ChatAnswer, custom: Collection[str] = ()) -> list[dict[str, Any]]:
    """Splits a message into the deltas that official clients reassemble. custom: names of the
    custom tools."""
    reply = answer.reply
    found: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    found += [{"reasoning_content": piece} for piece in text_chunks(reply.reasoning or "")]
    found += [{"content": piece} for piece in text_chunks(reply.content or "")]
    for index, call in enumerate(reply.tool_calls):
        if call.name in custom:
            about = {"name": call.name, "input": input_of_arguments(call.arguments)}
            one = {"index": index, "id": call.id, "type": "custom", "custom": about}
            found.append({"tool_calls": [one]})
            continue
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
