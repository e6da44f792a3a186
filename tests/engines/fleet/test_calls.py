"""What the status of an answer means, for the servers of either program."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from areal_x.engines.fleet import calls
from areal_x.engines.fleet.calls import Calls
from areal_x.engines.fleet.failures import ServerFailed, ServerRefused
from areal_x.engines.sglang.client import SGLangClient
from areal_x.engines.vllm.client import VLLMClient
from areal_x.errors import UserError
from areal_x.testing.models import QWEN3, write_model

URL = "http://127.0.0.1:9"
LOAD = "/v1/load_lora_adapter"


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Returns what a client's call to a path becomes with an answer of this status and message."""
    model = write_model(tmp_path)

    def called(program: str, path: str, status: int, words: str) -> Any:
        async def answer_of(*_: Any, **__: Any) -> tuple[int, bytes]:
            return status, json.dumps({"error": {"message": words}}).encode() if words else b""

        async def call() -> Any:
            client = VLLMClient(URL, "key") if program == "vLLM" else SGLangClient(URL, "key", "admin", model)
            try:
                return await client.calls.json("POST", path, {})
            finally:
                await client.close()

        monkeypatch.setattr(calls, "answer_of", answer_of)
        return asyncio.run(call())

    return called


@pytest.mark.parametrize(
    ("program", "path", "status", "words", "kind", "sentence"),
    [
        ("vLLM", "/is_paused?a=b", 401, "", UserError, r"refused the key: set .* vllm\.key_variable"),
        ("vLLM", "/v1/models", 404, "Not Found", UserError, r"does not offer /v1/models \(404 .* address without a path"),
        (
            "vLLM",
            "/pause?mode=keep",
            404,
            "",
            UserError,
            r"does not offer /pause \(404 \): start it with VLLM_SERVER_DEV_MODE=1",
        ),
        ("vLLM", "/pause", 403, "", UserError, r"start it with .*'{.backend.:.areal_x.}', areal-x installed beside it"),
        ("vLLM", LOAD, 404, "Not Found", UserError, r"has no adapters enabled: start it with .* at least lora\.rank"),
        ("vLLM", LOAD, 404, "no adapter of this name", ServerRefused, r"answered /v1/load_lora_adapter with 404: no adapter"),
        ("SGLang", "/generate", 401, "", UserError, r"refused the key for /generate: .* sglang\.admin_key_variable"),
        ("SGLang", "/generate", 403, "", UserError, r"refused the key for /generate"),
        ("SGLang", "/generate", 404, "", UserError, r"does not offer /generate \(404 \): give the address of an SGLang"),
        (
            "SGLang",
            "/generate",
            400,
            "raise --sampling-mask-max-tokens",
            UserError,
            rf"--sampling-mask-max-tokens {QWEN3['vocab_size']}, or with",
        ),
        ("SGLang", LOAD, 400, "needs --enable-lora", UserError, r"has no adapters enabled: start it with --enable-lora"),
        *(
            row
            for program in ("vLLM", "SGLang")
            for row in (
                (program, "/a?b", 307, "", UserError, rf"^the {program} server at {URL} redirects /a: give"),
                (
                    program,
                    "/a?b",
                    400,
                    "too long",
                    ServerRefused,
                    rf"^the {program} server at {URL} answered /a with 400: too long$",
                ),
                (program, "/a", 503, "died", ServerFailed, r"answered /a with 503: died$"),
            )
        ),
    ],
)
def test_an_answer_other_than_200_is_an_error_that_says_what_would_work(
    answer: Any, program: str, path: str, status: int, words: str, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence) as raised:
        answer(program, path, status, words)
    assert type(raised.value) is kind
    if kind is ServerRefused:
        assert raised.value.words == words  # type: ignore[attr-defined]


def test_an_empty_answer_is_none_and_lines_are_text(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    assert answer("vLLM", "/a", 200, "") is None
    assert answer("SGLang", "/a", 200, "well") == {"error": {"message": "well"}}
    sent: list[Any] = []

    async def answer_of(*given: Any, **how: Any) -> tuple[int, bytes]:
        sent.append((*given[1:], how))
        return 200, b"lines\n"

    async def text() -> str:
        made = Calls(URL, None, "vLLM", lambda *_: None)
        try:
            return await made.text("GET", "/metrics", retry=True)
        finally:
            await made.close()

    monkeypatch.setattr(calls, "answer_of", answer_of)
    assert asyncio.run(text()) == "lines\n"
    assert sent == [(URL, "GET", "/metrics", {"body": None, "seconds": 600.0, "retry": True})]
