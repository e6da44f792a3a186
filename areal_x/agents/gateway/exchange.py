"""What the three APIs have in common: reading a body, what a client may say of sampling and tools,
and what it is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol, Self, TypeVar

import numpy as np
from jaxtyping import Int32
from pydantic import BaseModel, ConfigDict, Field

from areal_x.agents.chat.dialogue import ChatAnswer, ChatRequest
from areal_x.agents.chat.parsing import Reply
from areal_x.agents.gateway.errors import ApiError
from areal_x.agents.gateway.response_format import invalid_schema
from areal_x.agents.json_checks import json_bounds, schemas
from areal_x.agents.json_checks.schemas import CheckedSchemas
from areal_x.protocols.engine import SamplingParams

T = TypeVar("T")
Many = Annotated[list[T], Field(fail_fast=True)]  # findings for 10,000 wrong parts cost 0.1 s
Text = Callable[[Int32[np.ndarray, " N"]], str]  # of tokens

IGNORED: Any = None  # the default of parameters that are taken and change nothing
Zero = Annotated[float, Field(ge=0, le=0)]
Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
NonEmpty = Annotated[str, Field(min_length=1)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]

CHUNK = 48  # characters of a stream's piece


class Body(BaseModel):
    """What a client sent: a parameter that is not declared is refused by its name."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def read(cls, body: bytes) -> Self:
        """Raises: ApiError for JSON beyond the bounds, pydantic's ValidationError."""
        try:
            json_bounds.check(body)
        except json_bounds.TooMuch as error:
            raise ApiError(400, f"the body {error}", "invalid_json") from None
        return cls.model_validate_json(body)


class Lenient(BaseModel):
    """A part of a body in which clients send back what else they were ever answered."""

    model_config = ConfigDict(extra="ignore", strict=True)


@dataclass(frozen=True)
class RequestedSampling:
    """The sampling that a client asked for; None where it did not say."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class CallAnswer:
    """One completion as a client is told of it. id: of the call."""

    id: str
    answer: ChatAnswer


class Exchange(Protocol):
    """A request, read, and how its answers are written. ask: with any sampling; `wanted` says what
    the client would like. tool_param, format_param: where the request has the schemas of tools (of
    their number) and of the format."""

    tool_param: str
    format_param: str
    chat_request: ChatRequest
    requested_sampling: RequestedSampling
    count: int  # completions
    stream: bool

    def whole(self, answers: Sequence[CallAnswer]) -> dict[str, Any]:
        """The answer as one JSON object."""
        ...

    def events(self, answers: Sequence[CallAnswer]) -> list[bytes]:
        """The same answer as the server-sent events of a stream."""
        ...


def sampling_for(
    run: SamplingParams, requested: RequestedSampling, policy: str
) -> tuple[SamplingParams, tuple[str, ...]]:
    """How a completion is drawn, and the names of what the client asked for and did not get.

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
    """A tool in OpenAI's form, with what a chat template shows of it. Raises: ApiError for a schema
    that is no object's; whether it is a schema is for KnownSchemas to see."""
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
        f"the parameters of the tool {name!r} are no JSON schema: {why}",
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
    """What the chat template is told beside messages and tools; nothing where the client left
    everything at its default.

    choice: "auto" and "none" say nothing, as `none` takes the tools away instead. effort: "none"
    also sets `enable_thinking`. given: the client's own words to the template; which of them it may
    say is for the renderer to know.
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
    """Raises: ApiError where a tool is to be called that was not given."""
    names = [tool["function"]["name"] for tool in tools]
    if choice is not None and choice not in names:
        raise ApiError(
            400,
            f"tool_choice names {choice!r}, the tools are {names}",
            "invalid_value",
            "tool_choice",
        )


async def unmet_constraints(chat_request: ChatRequest, reply: Reply) -> tuple[str, ...]:
    """The names of what was asked of tool calls and the format and the reply is not, as nothing
    holds a model to it."""
    template, called = chat_request.template, [call.name for call in reply.tool_calls]
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
    """Of every generated token, as OpenAI writes it."""
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
    """Whether it ended for its length. A text that stops it may stand before its last token."""
    return answer.completion.finish_reason == "length" and answer.stopped_by is None


def text_chunks(text: str) -> list[str]:
    return [text[begin : begin + CHUNK] for begin in range(0, len(text), CHUNK)]
