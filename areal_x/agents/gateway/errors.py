"""Errors of clients and of the engine: raised as one exception, then written in the form of the
client's API.

Official clients choose their exception class by the status, and whether to retry by
`x-should-retry`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from areal_x.errors import UserError
from areal_x.protocols.engine import EngineError, PromptTooLong, SamplingParams

NO_PENALTY = ("frequency_penalty", "presence_penalty")  # which clients send with the value 0
SUPPORTED = "docs/gateway.md lists what is supported"

# Each API's name for a status. A status that is missing here uses that of its hundred.
OPENAI = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "server_error",
}
ANTHROPIC = {**OPENAI, 500: "api_error"}


class ApiError(Exception):
    """A response other than 200.

    code: for programs, by OpenAI's names. param: the parameter that was wrong. retry_after: seconds
    after which the same request may succeed; None if it will not.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after is None:
            return {"x-should-retry": "false"}
        return {"x-should-retry": "true", "retry-after": f"{self.retry_after:g}"}


def unsupported(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param} is not supported: {why}", "unsupported_parameter", param)


def api_error(error: BaseException) -> ApiError:
    """Converts any exception of an exchange."""
    match error:
        case ApiError():
            return error
        case ValidationError():
            return _invalid(error)
        case PromptTooLong():
            return ApiError(
                400,
                f"prompt is too long for the model's context length: {error}",
                "context_length_exceeded",
                "messages",
            )
        case UserError():
            return ApiError(400, str(error), "invalid_request")
        case EngineError():
            return ApiError(503, f"the engine was lost: {error}", "engine_lost")
        case _:
            return ApiError(
                500, f"{type(error).__name__}: {' '.join(str(error).split())}", "internal_error"
            )


def openai_body(error: ApiError) -> dict[str, Any]:
    kind = _kind(OPENAI, error.status)
    return {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    }


def anthropic_body(error: ApiError) -> dict[str, Any]:
    return {
        "type": "error",
        "error": {"type": _kind(ANTHROPIC, error.status), "message": error.message},
    }


def _kind(kinds: Mapping[int, str], status: int) -> str:
    return kinds.get(status) or kinds[status // 100 * 100]


def _of_the_body(part: str | int) -> bool:
    """Returns True for a part of the body's path, False for the name of a branch that pydantic
    tried."""
    return isinstance(part, int) or (re.fullmatch("[a-z_]+", part) is not None and part != "str")


def _reason(param: str, message: str) -> str:
    """Returns why a parameter that may only have the value without an effect is refused, or
    pydantic's message."""
    return SamplingParams.REFUSED[param] if param in NO_PENALTY else message


def _invalid(error: ValidationError) -> ApiError:
    """Reports the deepest finding, which is the most informative: for a value that may be text or a
    list, the other branches fail at its top."""
    worst = max(error.errors(include_url=False), key=lambda found: len(found["loc"]))
    *path, last = worst["loc"] or ("",)
    param = ".".join(str(part) for part in (*filter(_of_the_body, path), last))
    match worst["type"]:
        case "json_invalid":
            return ApiError(400, f"the body is not JSON: {worst['ctx']['error']}", "invalid_json")
        case "extra_forbidden":
            return unsupported(param, SamplingParams.REFUSED.get(param, SUPPORTED))
        case "missing":
            return ApiError(400, f"{param} is missing", "missing_required_parameter", param)
        case _:
            return ApiError(
                400,
                f"{param or 'the body'} cannot work: {_reason(param, worst['msg'])}",
                "invalid_value",
                param or None,
            )
