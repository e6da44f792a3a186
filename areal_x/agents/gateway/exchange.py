"""Shared by the three APIs: request bodies, sampling and tool parameters, and the parts of
responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
from jaxtyping import Int32
from pydantic import BaseModel, ConfigDict, Field

from areal_x.agents.chat.dialogue import ChatAnswer, ChatRequest
from areal_x.agents.chat.parsing import Reply
from areal_x.agents.gateway.errors import SUPPORTED, ApiError, unsupported
from areal_x.agents.gateway.response_format import invalid_schema
from areal_x.agents.json_checks import json_bounds, schemas
from areal_x.agents.json_checks.schemas import CheckedSchemas
from areal_x.protocols.engine import SamplingParams

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]  # reporting 10,000 wrong parts costs 0.1 s
Text = Callable[[Int32[np.ndarray, " N"]], str]  # decodes tokens

IGNORED: Any = None  # the default of parameters that are accepted without effect
Zero = Annotated[float, Field(ge=0, le=0)]
Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
NonEmpty = Annotated[str, Field(min_length=1)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]

CHUNK = 48  # characters per event of a stream

# Parameters that change the distribution of completions, and their values that do not.
WITHOUT_EFFECT: Mapping[str, Any] = {
    "bad_words": [],
    "allowed_token_ids": [],
    "frequency_penalty": 0,
    "length_penalty": 1,
    "logit_bias": {},
    "min_tokens": 0,
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
}


class Body(BaseModel):
    """A request body, in which undeclared parameters are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Raises: ApiError for JSON beyond the bounds, pydantic's ValidationError."""
        try:
            json_bounds.check(body)
        except json_bounds.TooMuch as error:
            raise ApiError(400, f"the body {error}", "invalid_json") from None
        return cls.model_validate_json(body)


class ApiRequest(Body):
    """A request of one of the three APIs, whose clients send more than its page lists: parameters
    that are unknown are ignored and counted, so that no real client is refused because of them.
    Refused by name are those that would change the distribution of completions, or what the
    response holds."""

    model_config = ConfigDict(extra="allow", strict=True)
    refused: ClassVar[frozenset[str]] = frozenset()
    """Parameters of the API that are not served."""

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Raises: ApiError for JSON beyond the bounds and for refused parameters, pydantic's
        ValidationError."""
        parsed = super().read(body)
        for name, value in (parsed.model_extra or {}).items():
            if value is None or (name in WITHOUT_EFFECT and value == WITHOUT_EFFECT[name]):
                continue
            if name in WITHOUT_EFFECT:
                raise unsupported(name, SamplingParams.REFUSED[name])
            if name in cls.refused:
                raise unsupported(name, SUPPORTED)
        return parsed

    def ignored(self) -> frozenset[str]:
        """Returns the names of unknown parameters, and of parts of messages that the model cannot
        be shown."""
        unknown = {name for name, value in (self.model_extra or {}).items() if value is not None}
        return frozenset({*unknown - set(WITHOUT_EFFECT), *omitted_parts(self)})


class Lenient(BaseModel):
    """A part of a body in which clients may send back any other fields of earlier responses."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Omitted(Lenient):
    """A part of a message that may be one that the model cannot be shown. A notice replaces it."""

    def omitted(self) -> str | None:
        """Returns the kind of part for the count of them, None if it is shown."""
        raise NotImplementedError


def omitted_parts(model: BaseModel) -> set[str]:
    """Returns the kinds of parts below this one that the model cannot be shown."""
    found = set()
    below = [model]
    while below:
        part = below.pop()
        if isinstance(part, Omitted) and (kind := part.omitted()) is not None:
            found.add(f"messages: {kind}")
        for value in vars(part).values():
            values = value if isinstance(value, list) else (value,)
            below += [one for one in values if isinstance(one, BaseModel)]
    return found


@dataclass(frozen=True)
class RequestedSampling:
    """The sampling parameters in a request; None for those that it leaves out."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None


@dataclass(frozen=True)
class CallAnswer:
    """One completion of a response. id: of the call."""

    id: str
    answer: ChatAnswer


class Exchange(Protocol):
    """A parsed request, and how its response is written. chat_request: with any sampling; the
    client's wishes are in `requested_sampling`. tool_param, format_param: where the request holds
    the schemas of its tools (formatted with their index) and of its format."""

    tool_param: str
    format_param: str
    chat_request: ChatRequest
    requested_sampling: RequestedSampling
    count: int  # completions
    stream: bool
    ignored: frozenset[str]  # see ApiRequest.ignored

    def whole(self, answers: Sequence[CallAnswer]) -> dict[str, Any]:
        """Returns the response as one JSON object."""
        ...

    def events(self, answers: Sequence[CallAnswer]) -> list[bytes]:
        """Returns the same response as the server-sent events of a stream."""
        ...


def sampling_for(
    run: SamplingParams, requested: RequestedSampling, policy: str
) -> tuple[SamplingParams, tuple[str, ...]]:
    """Returns the sampling of a completion, and the names of the requested parameters that it does
    not follow.

    policy: "run" keeps the run's own distribution, "client" lets the client choose it. A completion
    is never longer than the run allows.
    """
    asked = {name: value for name, value in vars(requested).items() if value is not None}
    given = {"max_tokens": min(run.max_tokens, asked.get("max_tokens", run.max_tokens))}
    if policy == "client":
        given |= {name: value for name, value in asked.items() if name != "max_tokens"}
    sampling = replace(run, **given)
    return sampling, tuple(
        name for name, value in asked.items() if getattr(sampling, name) != value
    )


def openai_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, param: str
) -> dict[str, Any]:
    """Returns a tool in OpenAI's form, with the fields that a chat template shows. Raises: ApiError
    for parameters that are not an object's; `check_schemas` validates the schema itself."""
    about: dict[str, Any] = {"name": name}
    if description is not None:
        about["description"] = description
    if parameters is not None:
        if (error := schemas.type_error(parameters)) is not None:
            raise invalid_tool_schema(name, param, error)
        about["parameters"] = dict(parameters)
    return {"type": "function", "function": about}


def invalid_tool_schema(name: str, param: str, why: str) -> ApiError:
    return ApiError(
        400,
        f"the parameters of the tool {name!r} are not a JSON schema: {why}",
        "invalid_tool_schema",
        param,
    )


async def check_schemas(
    checked: CheckedSchemas, chat_request: ChatRequest, tool_param: str, format_param: str
) -> None:
    """Raises: ApiError if the schema of a tool or of the format is invalid, or too expensive to
    check."""
    for index, tool in enumerate(chat_request.tools):
        about = tool["function"]
        if (
            "parameters" in about
            and (error := await checked.error(about["parameters"])) is not None
        ):
            raise invalid_tool_schema(about["name"], tool_param.format(index), error)
    if chat_request.format is None:
        return
    if (error := await checked.error(chat_request.format)) is not None:
        raise invalid_schema(format_param, error)


def template_variables(
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
    effort: str | None = None,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the variables of the chat template beside messages and tools; none if the request
    leaves everything at its default.

    choice: "auto" and "none" set no variable, since "none" removes the tools instead. effort:
    "none" also sets `enable_thinking`. given: the client's own variables; the renderer knows which
    are allowed.
    """
    template: dict[str, Any] = {}
    if choice not in (None, "auto", "none"):
        template["tool_choice"] = choice
    if parallel is False:
        template["parallel_tool_calls"] = False
    if effort is not None:
        template["reasoning_effort"] = effort
        if effort == "none":
            template["enable_thinking"] = False
    return template | dict(given or {})


def check_tool_choice(choice: str | None, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises: ApiError if a tool is to be called that the request does not have."""
    names = [tool["function"]["name"] for tool in tools]
    if choice is not None and choice not in names:
        raise ApiError(
            400,
            f"tool_choice names {choice!r}, the tools are {names}",
            "invalid_value",
            "tool_choice",
        )


async def unmet_constraints(chat_request: ChatRequest, reply: Reply) -> tuple[str, ...]:
    """Returns the names of the request's constraints, on tool calls and format, that the reply does
    not meet; they are not enforced."""
    template = chat_request.template
    called = [call.name for call in reply.tool_calls]
    choice = template.get("tool_choice")
    requested = choice["function"]["name"] if isinstance(choice, Mapping) else None
    found = (
        ["tool_choice"]
        if (choice == "required" and not called) or (requested and set(called) != {requested})
        else []
    )
    if template.get("parallel_tool_calls") is False and len(called) > 1:
        found.append("parallel_tool_calls")
    if (
        chat_request.format is not None
        and not called
        and not await schemas.matches(chat_request.format, reply.content or "")
    ):
        found.append("format")
    return tuple(found)


def logprobs_of(answer: ChatAnswer, text: Text) -> list[dict[str, Any]]:
    """Returns the log-probability of every generated token, in OpenAI's form."""
    found = []
    for token, logprob in zip(answer.completion.tokens, answer.completion.logprobs, strict=True):
        piece = text(np.asarray([token], np.int32))
        found.append(
            {
                "token": piece,
                "logprob": float(logprob),
                "bytes": list(piece.encode()),
                "top_logprobs": [],
            }
        )
    return found


def is_truncated(answer: ChatAnswer) -> bool:
    """Returns True if the completion ended because of its length. A stop text may precede its last
    token."""
    return answer.completion.finish_reason == "length" and answer.stopped_by is None


def text_chunks(text: str) -> list[str]:
    return [text[begin : begin + CHUNK] for begin in range(0, len(text), CHUNK)]
