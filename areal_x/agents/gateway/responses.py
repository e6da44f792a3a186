"""OpenAI's responses: POST /v1/responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from areal_x.agents.chat.dialogue import ChatAnswer, ChatRequest
from areal_x.agents.gateway.errors import ApiError
from areal_x.agents.gateway.exchange import (
    IGNORED,
    ApiRequest,
    CallAnswer,
    Count,
    Lenient,
    Many,
    Positive,
    Probability,
    RequestedSampling,
    Temperature,
    Text,
    ToolName,
    check_tool_choice,
    is_truncated,
    logprobs_of,
    openai_tool,
    template_variables,
)
from areal_x.agents.gateway.items import (
    Item,
    MessageItem,
    full_name,
    item_events,
    messages_of,
)
from areal_x.agents.gateway.response_format import format_schema, with_format_instructions
from areal_x.agents.gateway.streams import event
from areal_x.agents.gateway.tools import (
    CUSTOM,
    FUNCTION,
    HOSTED,
    PARAMETERS,
    CustomDefinition,
    HostedTool,
    input_of_arguments,
    kind_of_tool,
    type_of,
)
from areal_x.types import Message

PREFIX = "resp_"
LOGPROBS = "message.output_text.logprobs"
# What else a response may hold, of tools that it cannot have and of images that it cannot show.
INCLUDED = frozenset(
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
        "web_search_call.results",
    }
)


class ToolDefinition(Lenient):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class CustomTool(CustomDefinition):
    type: Literal["custom"]


OwnTool = Annotated[
    Annotated[ToolDefinition, Tag(FUNCTION)]
    | Annotated[CustomTool, Tag(CUSTOM)]
    | Annotated[HostedTool, Tag(HOSTED)],
    Discriminator(kind_of_tool),
]


class Namespace(Lenient):
    """Tools with names of their own: each is shown to the model under the names of both, see
    `items.full_name`."""

    type: Literal["namespace"]
    name: ToolName
    tools: Many[OwnTool]


NAMESPACE = "a namespace"
AnyTool = Annotated[
    Annotated[ToolDefinition, Tag(FUNCTION)]
    | Annotated[CustomTool, Tag(CUSTOM)]
    | Annotated[Namespace, Tag(NAMESPACE)]
    | Annotated[HostedTool, Tag(HOSTED)],
    Discriminator(lambda tool: NAMESPACE if type_of(tool) == "namespace" else kind_of_tool(tool)),
]


class NamedTool(Lenient):
    type: Literal["function", "custom"]
    name: str


class Format(Lenient):
    type: str
    name: str | None = None
    strict: bool | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextSettings(Lenient):
    format: Format | None = None


class Reasoning(Lenient):
    effort: str | None = None


class ResponseRequest(ApiRequest):
    refused = frozenset({"conversation", "prompt"})

    model: str | None = None
    input: str | Annotated[Many[Item], Field(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: Many[AnyTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: Count | None = None
    stream: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    metadata: dict[str, str] | None = None
    user: Any = IGNORED
    max_tool_calls: Any = IGNORED
    service_tier: Any = IGNORED
    safety_identifier: Any = IGNORED
    prompt_cache_key: Any = IGNORED
    prompt_cache_options: Any = IGNORED
    prompt_cache_retention: Any = IGNORED
    stream_options: Any = IGNORED


class Responses:
    """One request. See `exchange.Exchange`.

    parsed: the body. id: of the response. created: seconds of Unix time. text: decodes tokens, for
    their log-probabilities. earlier: the conversation that `previous_response_id` continues; None
    if there is none. Raises: ApiError for a body that cannot be served.
    """

    count = 1
    tool_param, format_param = "tools.{}.parameters", "text.format"

    def __init__(
        self,
        parsed: ResponseRequest,
        id: str,
        created: int,
        text: Text,
        earlier: Sequence[Message] | None,
    ) -> None:
        before = parsed.previous_response_id
        if before is not None and earlier is None:
            raise ApiError(
                400,
                f"this session keeps no response {before!r}",
                "previous_response_not_found",
                "previous_response_id",
            )
        self.id = id
        self.created = created
        self.text = text
        self.parsed = parsed
        self.stream = bool(parsed.stream)
        self.stores = parsed.store is not False
        self.requested_sampling = RequestedSampling(
            parsed.max_output_tokens, parsed.temperature, parsed.top_p, parsed.top_k
        )
        self.format = (parsed.text and parsed.text.format) or Format(type="text")
        items = (
            [MessageItem(role="user", content=parsed.input)]
            if isinstance(parsed.input, str)
            else parsed.input
        )
        self.messages = (*(earlier or ()), *messages_of(items))
        # the tools by the names that the model is shown
        self.tools = {
            full_name(tool.name, space): (space, tool) for space, tool in self._own_tools()
        }
        self.chat_request = self._chat_request()
        included = set(parsed.include or ()) - INCLUDED
        self.ignored = parsed.ignored() | {f"include: {name}" for name in included}

    def conversation(self, answers: Sequence[CallAnswer]) -> tuple[Message, ...]:
        """Returns the conversation that a request with this one's id continues: without the
        instructions, which each request provides anew."""
        return (*self.messages, answers[0].answer.reply.message())

    def whole(self, answers: Sequence[CallAnswer]) -> dict[str, Any]:
        answer = answers[0].answer
        prompt = len(answer.prompt)
        completion = len(answer.completion.tokens)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + completion,
        }
        cut = is_truncated(answer)
        return {
            **self._begun(),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output(answer),
            "usage": usage,
        }

    def events(self, answers: Sequence[CallAnswer]) -> list[bytes]:
        response = self.whole(answers)
        found: list[dict[str, Any]] = [
            {"type": "response.created", "response": self._begun()},
            {"type": "response.in_progress", "response": self._begun()},
        ]
        for index, item in enumerate(response["output"]):
            found += item_events(index, item)
        found.append({"type": f"response.{response['status']}", "response": response})
        return [
            event({**data, "sequence_number": number}, data["type"])
            for number, data in enumerate(found)
        ]

    def _chat_request(self) -> ChatRequest:
        parsed = self.parsed
        choice = self.parsed.tool_choice
        tools = [
            shown_tool(name, tool, self.tool_param.format(i))
            for i, (name, (_, tool)) in enumerate(self.tools.items())
        ]
        tool_choice: str | dict[str, Any] | None
        if isinstance(choice, NamedTool):
            check_tool_choice(choice.name, tools)
            tool_choice = {"type": "function", "function": {"name": choice.name}}
        else:
            tool_choice = choice
        effort = parsed.reasoning.effort if parsed.reasoning is not None else None
        system: tuple[Message, ...] = ()
        if parsed.instructions is not None:
            system = ({"role": "system", "content": parsed.instructions},)
        schema = format_schema(self.format.type, self.format.schema_, self.format_param)
        return ChatRequest(
            messages=with_format_instructions((*system, *self.messages), schema),
            tools=() if choice == "none" else tuple(tools),
            template=template_variables(
                tool_choice, parsed.parallel_tool_calls, effort, parsed.chat_template_kwargs
            ),
            format=schema,
        )

    def _own_tools(self) -> Iterator[tuple[str | None, ToolDefinition | CustomTool]]:
        """Yields the tools with their namespaces. Raises: ApiError for one of OpenAI's own servers,
        in the API's words."""
        for index, given in enumerate(self.parsed.tools or []):
            space = given.name if isinstance(given, Namespace) else None
            for tool in given.tools if isinstance(given, Namespace) else (given,):
                if isinstance(tool, HostedTool):
                    raise ApiError(
                        400,
                        f"Hosted tool '{tool.type}' is not supported with"
                        f" {self.parsed.model or 'policy'}.",
                        "unsupported_parameter",
                        f"tools.{index}",
                    )
                yield space, tool

    def _begun(self) -> dict[str, Any]:
        """Returns the response before any output."""
        parsed = self.parsed
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": parsed.instructions,
            "max_output_tokens": parsed.max_output_tokens,
            "metadata": parsed.metadata or {},
            "model": parsed.model or "policy",
            "output": [],
            "parallel_tool_calls": parsed.parallel_tool_calls is not False,
            "previous_response_id": parsed.previous_response_id,
            "temperature": parsed.temperature,
            "text": {"format": self.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": (
                parsed.tool_choice.model_dump()
                if isinstance(parsed.tool_choice, NamedTool)
                else parsed.tool_choice or "auto"
            ),
            "tools": [
                {"strict": False, **tool.model_dump()}
                if isinstance(tool, ToolDefinition)
                else tool.model_dump(exclude_none=True)
                for tool in parsed.tools or []
            ],
            "top_p": parsed.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _output(self, answer: ChatAnswer) -> list[dict[str, Any]]:
        reply = answer.reply
        own = self.id.removeprefix(PREFIX)
        status = "incomplete" if is_truncated(answer) else "completed"
        items: list[dict[str, Any]] = []
        if reply.reasoning is not None:
            content = [{"type": "reasoning_text", "text": reply.reasoning}]
            items.append(
                {
                    "id": f"rs_{own}",
                    "type": "reasoning",
                    "summary": [],
                    "content": content,
                    "status": "completed",
                }
            )
        if reply.content or not (items or reply.tool_calls):
            logprobs = (
                logprobs_of(answer, self.text) if LOGPROBS in (self.parsed.include or ()) else []
            )
            part = {
                "type": "output_text",
                "text": reply.content or "",
                "annotations": [],
                "logprobs": logprobs,
            }
            items.append(
                {
                    "id": f"msg_{own}",
                    "type": "message",
                    "role": "assistant",
                    "status": status,
                    "content": [part],
                }
            )
        for index, call in enumerate(reply.tool_calls):
            space, tool = self.tools.get(call.name, (None, None))
            named = {"call_id": call.id, "name": call.name if tool is None else tool.name}
            if space is not None:
                named["namespace"] = space
            if isinstance(tool, CustomTool):
                about = {**named, "input": input_of_arguments(call.arguments)}
                items.append({"id": f"ctc_{own}_{index}", "type": "custom_tool_call", **about})
                continue
            about = {**named, "arguments": call.arguments, "status": "completed"}
            items.append({"id": f"fc_{own}_{index}", "type": "function_call", **about})
        return items


def shown_tool(name: str, tool: ToolDefinition | CustomTool, param: str) -> dict[str, Any]:
    """Returns a tool as the model is shown it. param: where the request has it, for errors."""
    if isinstance(tool, CustomTool):
        return openai_tool(name, tool.shown_description(), PARAMETERS, param)
    return openai_tool(name, tool.description, tool.parameters, param)
