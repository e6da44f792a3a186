"""Parsing a server's responses, without a server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.engines.fleet.failures import ServerFailed, error_message
from areal_x.engines.fleet.versions import Span, versions_from
from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.responses import (
    Generated,
    completion_from,
    experts_from,
    generated_from,
    kept_from,
)
from areal_x.errors import UserError
from areal_x.protocols.engine import EngineError, SamplingParams


def body(**changes: Any) -> bytes:
    """A generate endpoint's response of two tokens."""
    choice = {
        "index": 0,
        "finish_reason": "stop",
        "token_ids": [5, 6],
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
        "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -1.5}]},
    }
    return json.dumps({"choices": [{**choice, **changes}], "model": "policy"}).encode()


def answer(**changes: Any) -> Generated:
    return generated_from(body(**changes))


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"Internal Server Error",
        b'{"choices": []}',
        b'{"choices": [{}, {}]}',
        b'{"choices": [{"token_ids": ["5"]}]}',
        b'{"choices": [{"token_ids": [1.5]}]}',
        b"[" * 100_000,
    ],
    ids=["nothing", "a sentence", "no choice", "two choices", "text for a token", "a fraction", "nested deeply"],
)
def test_what_is_no_response_of_a_generate_endpoint_is_an_error_of_the_server(said: bytes) -> None:
    with pytest.raises(ServerFailed, match="responded to a generate request with"):
        generated_from(said)


def test_an_answer_becomes_a_completion_of_aligned_arrays() -> None:
    completion = completion_from(answer())
    np.testing.assert_array_equal(completion.tokens, [5, 6])
    np.testing.assert_array_equal(completion.logprobs, np.float32([-0.5, -1.5]))
    np.testing.assert_array_equal(completion.versions, [3, 3])
    assert completion.finish_reason == "stop"


def test_a_request_aborted_before_its_first_token_is_an_empty_completion() -> None:
    completion = completion_from(answer(finish_reason="abort", token_ids=[], weight_versions=None, logprobs=None))
    assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) == 0


@pytest.mark.parametrize(
    "logprobs",
    [None, {"content": [{"logprob": -0.5}]}, {"content": [{"logprob": -0.5}, {"logprob": -9999.0}]}],
    ids=["none", "too few", "the number that stands for a missing one"],
)
def test_a_missing_logprob_is_an_error(logprobs: Any) -> None:
    with pytest.raises(EngineError, match="omitted the log-probability"):
        completion_from(answer(logprobs=logprobs))


def test_a_request_that_the_server_failed_is_an_error() -> None:
    with pytest.raises(EngineError, match="'error'"):
        completion_from(answer(finish_reason="error"))


def test_kept_tokens_are_those_of_each_token() -> None:
    kept = kept_from(answer(sampling_mask=[[5, 1, 9], [6]]))
    assert (kept.counts.dtype, kept.ids.dtype) == (np.int32, np.int32)
    assert (kept.counts.tolist(), kept.ids.tolist()) == ([3, 1], [5, 1, 9, 6])
    assert len(kept_from(answer(token_ids=[], finish_reason="abort"))) == 0


@pytest.mark.parametrize(
    "said",
    [None, [], [[5]], [[5], [6], [7]], [[5], []], [[5], [5]], [[6], [5]]],
    ids=["none", "of no token", "of too few", "of too many", "an empty one", "of another", "in another order"],
)
def test_kept_tokens_that_are_missing_or_cannot_be_are_an_error(said: Any) -> None:
    with pytest.raises(EngineError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        kept_from(answer(sampling_mask=said))


@pytest.mark.parametrize("token", [-1, 2**31, 2**80, 0.5, "x"])
def test_kept_tokens_that_are_no_tokens_are_an_error_of_the_server(token: Any) -> None:
    with pytest.raises(ServerFailed, match="sampling_mask"):
        answer(sampling_mask=[[5, token], [6]])


def encoded(array: np.ndarray) -> str:
    """An array in vLLM's encoding."""
    with io.BytesIO() as file:
        np.save(file, array, allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode("ascii")


def test_recorded_experts_are_those_of_each_token_but_the_last() -> None:
    recorded = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)  # of 3 tokens of a prompt and the first of 2 drawn
    experts = experts_from(answer(routed_experts=encoded(recorded)), 5)
    assert experts.dtype == np.int16
    np.testing.assert_array_equal(experts[:4], recorded)
    assert (experts[4] == -1).all()


@pytest.mark.parametrize("sent", [None, np.zeros((3, 3, 2), np.uint8), np.zeros((4, 6), np.uint8)])
def test_experts_that_are_missing_or_of_other_tokens_are_an_error(sent: np.ndarray | None) -> None:
    with pytest.raises(EngineError, match="experts"):
        experts_from(answer(routed_experts=None if sent is None else encoded(sent)), 5)


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 5))))
def test_spans_give_each_token_the_version_of_its_span(runs: list[tuple[int, int]]) -> None:
    expected = [version for version, count in runs for _ in range(count)]
    ends = np.cumsum([0] + [count for _, count in runs])
    spans = [Span(int(a), int(b), str(v)) for (v, _), a, b in zip(runs, ends, ends[1:], strict=False)]
    np.testing.assert_array_equal(versions_from(spans, len(expected)), expected)


@pytest.mark.parametrize(
    "spans",
    [
        [],
        [{"version": "1", "start": 0, "end": 2}],
        [{"version": "1", "start": 1, "end": 3}],
        [{"version": "1", "start": 0, "end": 4}],
        [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 2, "end": 3}],
        [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 1, "end": 2}],
        [{"version": "default", "start": 0, "end": 3}],
    ],
    ids=["none", "too short", "late start", "too long", "a hole", "an overlap", "never told its version"],
)
def test_spans_that_leave_a_token_without_a_version_are_an_error(spans: list[dict[str, Any]]) -> None:
    with pytest.raises(EngineError, match="for 3 tokens"):
        versions_from(msgspec.convert(spans, list[Span]), 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"error": {"message": "no such model", "code": 404}}', "no such model"),
        ('{"error": "Unauthorized"}', "Unauthorized"),
        ('{"detail": "Not Found"}', "Not Found"),
        ("Internal Server Error", "Internal Server Error"),
    ],
)
def test_a_servers_words_are_found_in_each_form_of_its_errors(text: str, words: str) -> None:
    assert error_message(text.encode()) == words


def talk(answers: list[bytes], talk_to: Any) -> tuple[Any, int]:
    """Returns or raises the result of `talk_to(client)`, and the number of connections that a server saw which answers each
    with the next bytes."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answers[min(connections, len(answers) - 1)])
        connections += 1
        await writer.drain()
        writer.close()

    async def main() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = VLLMClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", "key")
        try:
            return await talk_to(client)
        finally:
            await client.close()
            server.close()

    try:
        return asyncio.run(main()), connections
    except (EngineError, UserError) as error:
        return error, connections


def http(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


def test_a_question_is_asked_again_when_the_connection_ends_before_an_answer() -> None:
    prompt, sampling = np.int32([1, 2]), SamplingParams(max_tokens=2)
    completion, connections = talk([b"", http("200 OK", body().decode())], lambda client: client.generate(prompt, sampling))
    assert (list(completion.tokens), connections) == ([5, 6], 2)


def test_a_server_that_always_hangs_up_is_lost() -> None:
    error, connections = talk([b""], lambda client: client.resume())
    assert isinstance(error, EngineError)
    assert "broke the connection" in str(error)
    assert connections == 3


def test_a_step_of_a_weight_update_is_never_sent_twice() -> None:
    error, connections = talk([b""], lambda client: client.init_weight_transfer({"staging_root": "/folder"}))
    assert isinstance(error, EngineError)
    assert connections == 1


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        ("401 Unauthorized", UserError, "vllm.key_variable"),
        ("404 Not Found", UserError, "VLLM_SERVER_DEV_MODE=1"),
        ("500 Internal Server Error", EngineError, "with 500: out of memory"),
    ],
)
def test_a_refusal_says_what_would_work(status: str, kind: type[Exception], words: str) -> None:
    error, _ = talk([http(status, '{"error": {"message": "out of memory"}}')], lambda client: client.version())
    assert isinstance(error, kind)
    assert words in str(error)


def test_a_server_that_is_not_there_is_named() -> None:
    async def ask() -> None:
        client = VLLMClient("http://127.0.0.1:1", None)
        try:
            await client.version()
        finally:
            await client.close()

    with pytest.raises(EngineError, match=r"no vLLM server answers at http://127\.0\.0\.1:1: "):
        asyncio.run(ask())
