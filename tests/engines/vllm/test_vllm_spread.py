"""Requests survive the loss of servers: with scripted servers."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_x.engines.fleet import dispatcher, fleet, stager, staging
from areal_x.engines.fleet.failures import ServerFailed, ServerLost
from areal_x.engines.fleet.manifest import shards
from areal_x.engines.fleet.proof.claims import Claiming
from areal_x.engines.fleet.staging import NoRoom, StagedFiles
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.errors import UserError
from areal_x.hf.model_dir import read_tensors
from areal_x.hf.weight_copy import write_shards
from areal_x.protocols.engine import Completion, EngineError, Request, SamplingParams
from areal_x.runtime import waits
from areal_x.types import Batch
from tests.rollout.fakes import until
from tests.servers import Weights

REQUEST = Request(np.int32([1, 2, 3]), SamplingParams(max_tokens=4))
URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3")


class Told:
    """A server, in place of its client. holds: its version. dead: it answers nothing. held: requests wait until they are let
    go. frozen: a pause never ends. offset: how far what it says of a prompt is from what a right server says. error and
    swap_error: what it answers to each request and swap. stale: a tensor of which it has other numbers than it was given.
    proved: the version of each proof, whether of whole tensors, and whether it was paused. so_far: tokens of each held request
    when it hands them over."""

    def __init__(self, url: str) -> None:
        self.url, self.holds, self.dead, self.held = url, 0, False, False
        self.offset, self.swap_error, self.error = 0.0, None, None
        self.waiting: list[asyncio.Event] = []
        self.served: list[tuple[list[int], int]] = []
        self.pauses, self.handing, self.so_far = 0, False, 2
        self.paused, self.frozen, self.torn, self.door_is_open = False, False, False, False
        self.stale, self.proof_error, self.proved = "", None, []
        self.folder = Path()

    def _alive(self) -> None:
        if self.dead:
            raise ServerLost(f"no vLLM server answers at {self.url}")

    async def negotiate(self, ours: bool) -> None:
        self._alive()

    async def generate(
        self,
        tokens: np.ndarray,
        sampling: SamplingParams,
        model: str,
        experts: bool,
        kept: bool,
        stop: tuple[str, ...],
        features: object,
    ) -> Completion:
        await asyncio.sleep(0)  # a request to a server takes at least a turn of the loop
        self._alive()
        if self.error is not None:
            raise self.error
        assert not self.torn
        self.served.append((tokens.tolist(), sampling.max_tokens))
        if self.held:
            self.waiting.append(asyncio.Event())
            await self.waiting[-1].wait()
        handed_over = self.handing and self.held
        # As a deterministic model would: the next token is the last one plus one; 20 ends it.
        drawn = [int(tokens[-1]) + 1 + i for i in range(sampling.max_tokens)]
        if stop := set(sampling.stop_token_ids) & set(drawn):
            drawn = drawn[: drawn.index(min(stop)) + 1]
        if handed_over:
            drawn = drawn[: self.so_far]
        logprobs = -np.float32(drawn) / 10
        reason = "abort" if handed_over else "stop" if stop else "length"
        return Completion(np.int32(drawn), logprobs, np.full(len(drawn), self.holds, np.int32), reason)

    async def hand_over(self) -> None:
        self._alive()
        self.handing = True
        for event in self.waiting:
            event.set()

    async def is_healthy(self, seconds: float) -> bool:
        return not self.dead

    async def context(self) -> int:
        self._alive()
        return 256

    async def set_version(self, version: int) -> None:
        self.holds = version

    async def pause(self) -> None:
        self._alive()
        self.paused, self.pauses = True, self.pauses + 1
        if self.frozen:
            await asyncio.Event().wait()

    async def resume(self, seconds: float = 1.0) -> None:
        assert not self.torn, "it holds parts of two policies"
        self.paused = False

    async def validate_folder(self, staging_root: Path, folder: Path) -> None:
        self._alive()
        if not folder.exists():
            raise ServerFailed("nothing there")

    async def is_paused(self) -> bool:
        return self.paused

    async def accepts_without_key(self) -> bool:
        return self.door_is_open

    async def update_weights(self, info: Any) -> None:
        assert self.paused
        self.torn, self.folder = True, Path(info["folder"])
        if self.swap_error is not None:
            raise self.swap_error
        self.torn = False

    async def finish_update(self, version: str) -> None:
        self.holds = int(version)

    async def probe(self, model: str, tokens: list[int]) -> np.ndarray:
        self._alive()
        return np.full(len(tokens), self.offset - self.holds, np.float32)

    async def prove(self, question: str) -> list[Any]:
        """As a worker that has what the folder has, except of the tensor `stale`."""
        if self.proof_error is not None:
            raise self.proof_error
        asked = json.loads(question)
        self.proved.append((asked["version"], asked["full"], self.paused))
        claiming = Claiming(asked["version"], asked["full"])
        for name, x in read_tensors(self.folder):
            assert asked["tensors"][name] == list(x.shape)
            claiming.add(name, x * 2 if name == self.stale else x)
        parts = [
            [name, name, [[0, size] for size in claim.shape], kind, [sums.plain, sums.placed]]
            for name, claim in claiming.done().tensors.items()
            for kind, sums in claim.sums.items()
        ]
        return [{"parts": parts, "unproved": {}, "wrong": {}}]

    async def init_weight_transfer(self, info: Any) -> None: ...

    async def start_update(self) -> None: ...

    async def close(self) -> None: ...


Try = Callable[[VLLMEngine, list[Told]], Coroutine[Any, Any, None]]


@pytest.fixture
def trying(tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Runs a coroutine with a started engine over servers that do as they are told; gives what was reported."""
    monkeypatch.setattr(fleet, "FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(fleet, "LONGEST_RETRY_SECONDS", 0.02)
    told = {url: Told(url) for url in URLS}
    monkeypatch.setattr("areal_x.engines.vllm.engine.VLLMClient", lambda url, key, transfer: told[url])
    lines: list[str] = []

    def run(attempt: Try, servers: int = 2, **settings: Any) -> list[str]:
        settings = {"heartbeat_seconds": 0.01, "staging": str(tmp_path / "staging"), **settings}

        async def main() -> None:
            config = VLLMConfig(urls=URLS[:servers], **settings)
            started = VLLMEngine(config, tiny_model_dir, tmp_path, lines.append)
            await started.start()
            try:
                await attempt(started, [told[url] for url in URLS])
            finally:
                await started.close()

        asyncio.run(main())
        return lines

    return run


async def publish(engine: VLLMEngine, model: Path, version: int) -> float:
    return await engine.swap(await asyncio.to_thread(engine.stage, Weights(model, version)))


class Says:
    """A trainer that says of every token what servers of version 0 do, less the version."""

    version = 0

    def logprobs(self, batch: Batch) -> np.ndarray:
        return np.where(batch.segment_ids > 0, np.float32(-self.version), np.float32(0.0))


def test_each_request_goes_to_the_server_with_the_fewest_in_flight(trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        first, second, _ = told
        first.held = second.held = True
        tasks = [asyncio.create_task(engine.generate(REQUEST)) for _ in range(6)]
        await until(lambda: len(first.waiting) + len(second.waiting) == 6)
        assert [len(first.waiting), len(second.waiting)] == [3, 3]
        for event in second.waiting:
            event.set()
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await until(lambda: sum(task.done() for task in tasks) == 3)
        tasks += [asyncio.create_task(engine.generate(REQUEST)) for _ in range(4)]
        await until(lambda: len(first.waiting) + len(second.waiting) == 10)
        assert [len(first.waiting), len(second.waiting)] == [4, 6]
        for event in first.waiting + second.waiting:
            event.set()
        await asyncio.gather(*tasks)
        assert engine.fleet.placed == {}

    trying(attempt)


def test_young_garbage_is_collected_after_so_many_requests_and_not_when_python_would(
    trying: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "COLLECTED", 4)

    def garbage() -> weakref.ref[asyncio.Event]:
        ring = asyncio.Event()
        ring.itself = ring  # type: ignore[attr-defined]
        return weakref.ref(ring)

    alive = []

    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        for _ in range(9):
            made = garbage()
            await engine.generate(REQUEST)
            alive.append(made() is not None)

    gc.disable()
    try:
        trying(attempt)
    finally:
        gc.enable()
    assert alive == [False, True, True, True, False, True, True, True, False]


@pytest.mark.loses(r":1 (is lost \(no answer to 3 heartbeats|does not come back \(no vLLM server answers)")
def test_a_dead_servers_requests_are_answered_by_another_and_it_comes_back_with_the_newest_weights(
    trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        first, second, _ = told
        await publish(engine, tiny_model_dir, 1)
        first.held = True
        tasks = [asyncio.create_task(engine.generate(REQUEST)) for _ in range(8)]
        await until(lambda: len(first.waiting) == 4)
        first.dead = True
        done = await asyncio.gather(*tasks)
        assert [completion.tokens.tolist() for completion in done] == [[4, 5, 6, 7]] * 8
        assert len(second.served) == 8
        await publish(engine, tiny_model_dir, 2)
        assert engine.version == 2
        first.dead = first.held = False
        first.holds = 77  # as it was started anew with some weights of its own
        await until(lambda: len(engine.fleet.serving()) == 2)
        assert first.holds == 2

    lines = trying(attempt)
    assert any("no answer to 3 heartbeats" in line for line in lines)
    assert lines[-1] == f"the vLLM server at {URLS[0]} serves again, with the weights of version 2"


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_call_to_a_lost_server_ends_and_a_cancelled_caller_stays_cancelled(
    cancelled: bool, trying: Callable[..., list[str]]
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        there = True

        async def ask() -> int:
            with pytest.raises(ServerLost, match="was lost meanwhile"):
                await engine.supervisor.unless_lost(asyncio.Event().wait(), lambda: there)
            task = asyncio.current_task()
            assert task is not None
            return task.cancelling()

        task = asyncio.create_task(ask())
        await asyncio.sleep(0)
        there = False
        engine.supervisor.settle()
        if cancelled:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert await task == 0  # a time limit around it works as before

    trying(attempt)


def test_a_call_that_ends_with_an_error_of_its_own_as_its_server_is_lost_leaves_no_cancellation(
    trying: Callable[..., list[str]],
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        there = True

        async def call() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise ServerFailed("it broke off") from None

        async def ask() -> None:
            async with asyncio.timeout(0.01):
                with pytest.raises(ServerFailed, match="it broke off"):
                    await engine.supervisor.unless_lost(call(), lambda: there)
                await asyncio.Event().wait()

        task = asyncio.create_task(ask())
        await asyncio.sleep(0)
        there = False
        engine.supervisor.settle()
        with pytest.raises(TimeoutError):
            await task

    trying(attempt)


@pytest.mark.parametrize("slice_tokens", [0, 1, 3, 4, 64])
def test_slices_change_nothing_about_a_completion(slice_tokens: int, trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        for most, stop, wanted in ((9, (), "length"), (30, (10,), "stop"), (8, (11,), "stop"), (1, (), "length")):
            said = await engine.generate(Request(REQUEST.tokens, SamplingParams(max_tokens=most, stop_token_ids=stop)))
            count = next((i + 1 for i in range(most) if 4 + i in stop), most)
            np.testing.assert_array_equal(said.tokens, np.arange(4, 4 + count))
            np.testing.assert_allclose(said.logprobs, -np.arange(4, 4 + count) / 10, rtol=1e-6)
            assert len(said.versions) == count
            assert said.finish_reason == wanted

    trying(attempt, slice_tokens=slice_tokens)


@pytest.mark.loses(r":[12] (is lost \(no answer to 3 heartbeats|does not come back \(no vLLM server answers)")
def test_a_lost_server_takes_only_the_slice_with_it_that_it_was_drawing(trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        first, second, _ = told
        first.held = second.held = True
        task = asyncio.create_task(engine.generate(Request(REQUEST.tokens, SamplingParams(max_tokens=6))))
        await until(lambda: first.waiting or second.waiting)
        (*first.waiting, *second.waiting)[0].set()
        await until(lambda: len(first.waiting) + len(second.waiting) == 2)
        at, other = (first, second) if any(not gate.is_set() for gate in first.waiting) else (second, first)
        at.dead, other.held = True, False
        assert (await task).tokens.tolist() == [4, 5, 6, 7, 8, 9]
        assert (await task).finish_reason == "length"
        assert [tokens for tokens, _ in other.served][-2:] == [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]]

    trying(attempt, slice_tokens=2)


@pytest.mark.loses(r":1 (is lost \(no answer to 3 heartbeats|does not come back \(no vLLM server answers)")
def test_requests_are_placed_in_the_order_in_which_they_came_and_a_lost_servers_go_first(
    trying: Callable[..., list[str]],
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        gone, left, _ = told
        gone.held = left.held = True
        for name in engine.fleet.members:
            engine.fleet.set_limit(name, 1)
        tasks = []
        for prompt in range(30, 36):
            tasks.append(asyncio.create_task(engine.generate(Request(np.int32([prompt]), REQUEST.sampling))))
            await asyncio.sleep(0)
        await until(lambda: gone.waiting and left.waiting)
        tasks[3].cancel()  # 32, 33, 34 and 35 wait
        with pytest.raises(asyncio.CancelledError):
            await tasks.pop(3)
        lost = gone.served[0][0][0]
        gone.dead, left.held = True, False
        await until(lambda: engine.dispatcher._waiting[0].request < 2)
        left.waiting[0].set()
        await asyncio.gather(*tasks)
        assert [prompt for ((prompt,), _) in left.served] == [61 - lost, lost, 32, 34, 35]

    trying(attempt)


def test_a_new_request_finds_room_for_those_that_waited_before_it(trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        servers = told[:2]
        prompts = [Request(np.int32([prompt]), REQUEST.sampling) for prompt in range(30, 35)]
        for name, server in zip(engine.fleet.members, servers, strict=True):
            engine.fleet.set_limit(name, 1)
            server.held = True
        tasks = [asyncio.create_task(engine.generate(request)) for request in prompts[:4]]
        await until(lambda: all(server.waiting for server in servers))
        for name in engine.fleet.members:
            engine.fleet.set_limit(name, 2)
        tasks.append(asyncio.create_task(engine.generate(prompts[4])))
        await until(lambda: sum(len(server.waiting) for server in servers) == 4)
        served = [tokens for server in servers for tokens, _ in server.served]
        assert sorted(served) == [[30], [31], [32], [33]]
        for server in servers:
            server.held = False
            for gate in server.waiting:
                gate.set()
        await asyncio.gather(*tasks)

    trying(attempt)


@pytest.mark.loses(r":1 is lost \(500\)")
def test_a_server_that_answers_with_errors_loses_no_request(trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        told[0].error = ServerFailed("500")
        done = await asyncio.gather(*(engine.generate(REQUEST) for _ in range(20)))
        assert all(len(completion.tokens) == 4 for completion in done)

    trying(attempt)


@pytest.mark.loses(r"is lost \(500: no kernel for this\)")
def test_what_every_server_fails_at_ends_with_its_reason(trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        for server in told:
            server.error = ServerFailed("500: no kernel for this")
        with pytest.raises(EngineError, match=r"10 servers in a row failed .* no kernel for this"):
            await engine.generate(REQUEST)

    trying(attempt)


@pytest.mark.loses(r"is lost \(no answer to 3 heartbeats", r"does not come back \(no vLLM server answers")
def test_requests_wait_while_no_server_is_ready_but_not_forever(trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        for server in told:
            server.dead = True
        await until(lambda: not engine.fleet.serving())
        task = asyncio.create_task(engine.generate(REQUEST))
        await until(lambda: engine.fleet.placed)
        told[1].dead = False
        assert len((await task).tokens) == 4
        told[1].dead = True
        engine.dispatcher._config = VLLMConfig(urls=URLS, wait_seconds=0.05)
        with pytest.raises(EngineError, match=r"no vLLM server was ready for 0\.05 s .*no answer.* vllm\.wait_seconds"):
            await engine.generate(REQUEST)

    trying(attempt)


@pytest.mark.loses(r":1 is lost \(out of memory; it stays paused")
def test_a_swap_that_one_server_fails_at_gives_the_others_the_weights(
    trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        first, second, _ = told
        first.swap_error = ServerFailed("out of memory")
        await publish(engine, tiny_model_dir, 1)
        assert (engine.version, second.holds, engine.fleet.serving()) == (1, 1, [f"the vLLM server at {URLS[1]}"])
        first.swap_error = None
        await until(lambda: len(engine.fleet.serving()) == 2)
        assert first.holds == 1

    assert any("out of memory" in line for line in trying(attempt))


@pytest.mark.loses(r":1 is lost \(no answer to 3 heartbeats")
def test_a_swap_does_not_wait_for_a_server_that_hangs(trying: Callable[..., list[str]], tiny_model_dir: Path) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        told[0].frozen = True
        swap = asyncio.create_task(publish(engine, tiny_model_dir, 1))
        await until(lambda: told[0].pauses)
        told[0].dead = True
        await swap
        assert engine.fleet.serving() == [f"the vLLM server at {URLS[1]}"]

    trying(attempt)


@pytest.mark.loses(r":1 is lost \(a wrong shape; it stays paused", r":2 is lost \(a wrong shape; it stays paused")
def test_servers_whose_update_broke_off_draw_only_after_they_have_whole_weights_again(
    trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        await publish(engine, tiny_model_dir, 1)
        for server in told[:2]:
            server.swap_error = ServerFailed("a wrong shape")
        with pytest.raises(EngineError, match="a wrong shape; it stays paused until it has whole weights"):
            await publish(engine, tiny_model_dir, 2)
        assert [(server.torn, server.paused) for server in told[:2]] == [(True, True)] * 2
        asked = asyncio.create_task(engine.generate(REQUEST))
        for server in told[:2]:
            server.swap_error = None
        assert (await asked).versions.tolist() == [1] * 4
        assert engine.version == 1

    trying(attempt)


def test_a_server_that_obeys_anybody_is_reported(trying: Callable[..., list[str]], tiny_model_dir: Path) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        await publish(engine, tiny_model_dir, 1)
        told[2].door_is_open = True
        await engine.join(URLS[2])

    (line,) = [line for line in trying(attempt) if "without a key" in line]
    assert f"{URLS[2]} can replace its weights, without a key: start it with VLLM_API_KEY set" in line


def test_weights_that_every_server_refuses_are_an_error_and_the_old_ones_go_on(
    trying: Callable[..., list[str]], tiny_model_dir: Path, tmp_path: Path
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        await publish(engine, tiny_model_dir, 1)
        with pytest.raises(EngineError, match="nothing there"):
            await engine.swap(StagedFiles(folder=tmp_path / "nothing", version=2))
        assert (await engine.generate(REQUEST)).versions.tolist() == [1] * 4
        assert engine.version == 1

    trying(attempt)


@pytest.mark.parametrize("waves, at_once", [(1, 3), (2, 2), (3, 1), (7, 1)])
def test_swaps_in_waves_stop_no_more_servers_at_a_time_than_a_wave_has(
    waves: int, at_once: int, trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    most = 0

    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        async def note(server: Told, info: Any) -> None:
            nonlocal most
            await asyncio.sleep(0)
            most = max(most, sum(other.paused for other in told))
            said = await asyncio.gather(*(engine.generate(REQUEST) for _ in range(4)))
            assert {int(v) for completion in said for v in completion.versions} <= {0, 1}

        for server in told:
            server.update_weights = lambda info, server=server: note(server, info)
        await publish(engine, tiny_model_dir, 1)
        assert [server.holds for server in told] == [1, 1, 1]
        assert (await engine.generate(REQUEST)).versions.tolist() == [1] * 4

    trying(attempt, servers=3, waves=waves)
    assert most == at_once


@pytest.mark.loses(
    r":1 (is lost \(no answer to 3 heartbeats|does not come back \(no vLLM server answers)",
    r":1 was quarantined: .* 0\.5 nats per token from the others'",
)
def test_a_server_that_comes_back_and_says_something_else_is_quarantined(
    trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        await publish(engine, tiny_model_dir, 1)
        told[0].dead = True
        await until(lambda: len(engine.fleet.serving()) == 1)
        told[0].dead, told[0].offset = False, 0.5
        await until(lambda: any(m.state is fleet.State.QUARANTINED for m in engine.fleet.members.values()))
        assert len((await engine.generate(REQUEST)).tokens) == 4

    assert "0.5 nats per token" in trying(attempt)[-1]


@pytest.mark.loses(r":3 was quarantined: .* 0\.5 nats per token from most others'")
def test_of_three_servers_the_one_that_drifts_is_quarantined_after_a_swap(
    trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        told[2].offset = 0.5
        await publish(engine, tiny_model_dir, 1)
        await until(lambda: len(engine.fleet.serving()) == 2)
        assert [await engine.generate(REQUEST) for _ in range(3)]
        assert told[2].served == []

    assert "quarantined" in trying(attempt, servers=3)[-1]


@pytest.mark.loses(r":1 was quarantined: .* 2 nats per token from the trainer's")
@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_that_drifts_from_the_trainer_is_quarantined_after_a_swap(
    trying: Callable[..., list[str]], tiny_model_dir: Path, servers: int
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        engine.stager._scorer = says = Says()
        for says.version in (1, 2):
            await publish(engine, tiny_model_dir, says.version)
            await until(lambda: engine.supervisor._consensus is not None and engine.supervisor._consensus[0] == says.version)
        assert len(engine.fleet.serving()) == servers
        says.version, told[0].offset = 3, -2.0
        await publish(engine, tiny_model_dir, 3)
        await until(lambda: len(engine.fleet.serving()) == servers - 1)
        if servers == 1:
            with pytest.raises(EngineError, match=r"no server is left: .* from the trainer's \(vllm\.drift\)"):
                await engine.generate(REQUEST)
        else:
            assert len((await engine.generate(REQUEST)).tokens) == 4

    assert "quarantined" in trying(attempt, servers=servers)[-1]


@pytest.mark.loses(
    r":1 (is lost \(no answer to 3 heartbeats|does not come back \(no vLLM server answers)",
    r":1 was quarantined: .* 4 nats per token from the trainer's",
)
def test_a_server_that_comes_back_far_from_the_trainer_is_quarantined(
    trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        engine.stager._scorer = says = Says()
        says.version = 1
        await publish(engine, tiny_model_dir, 1)
        told[0].dead = True
        await until(lambda: not engine.fleet.serving())
        told[0].dead, told[0].offset = False, 4.0
        await until(lambda: bool(engine.fleet.why_hopeless()))

    assert "4 nats per token from the trainer's" in trying(attempt, servers=1)[-1]


def test_servers_join_and_leave_while_requests_are_in_flight(trying: Callable[..., list[str]], tiny_model_dir: Path) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        await publish(engine, tiny_model_dir, 3)
        told[0].held = True
        tasks = [asyncio.create_task(engine.generate(REQUEST)) for _ in range(2)]
        await until(lambda: len(told[0].waiting) == 2)
        await engine.join(URLS[2])
        assert (told[2].holds, engine.concurrency) == (3, 128)
        await engine.leave(URLS[0])
        assert [len(completion.tokens) for completion in await asyncio.gather(*tasks)] == [4, 4]
        assert len(told[2].served) == 2
        with pytest.raises(UserError, match="no server at http://nowhere is in use"):
            await engine.leave("http://nowhere")
        told[1].dead = True
        with pytest.raises(UserError, match="cannot join: no vLLM server answers"):
            await engine.join(URLS[1])
        assert list(engine.supervisor.replicas) == [f"the vLLM server at {URLS[2]}"]

    trying(attempt, servers=1)


@pytest.mark.parametrize("so_far", [0, 1, 3])
def test_another_server_continues_what_one_that_leaves_has_generated(
    so_far: int, trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        await publish(engine, tiny_model_dir, 3)
        told[0].held, told[0].so_far = True, so_far
        tasks = [asyncio.create_task(engine.generate(REQUEST)) for _ in range(2)]
        await until(lambda: len(told[0].waiting) == 2)
        await engine.join(URLS[1])
        told[1].holds = 4  # as in a swap that has reached it before the other
        await engine.leave(URLS[0])
        for completion in await asyncio.gather(*tasks):
            assert completion.tokens.tolist() == [4, 5, 6, 7]
            assert completion.finish_reason == "length"
            assert completion.versions.tolist() == [3] * so_far + [4] * (4 - so_far)
            np.testing.assert_allclose(completion.logprobs, -np.float32([4, 5, 6, 7]) / 10)
        assert told[1].served == 2 * [([1, 2, 3, 4, 5, 6][: 3 + so_far], 4 - so_far)]

    trying(attempt, servers=1)


def test_a_string_that_ends_a_completion_is_looked_for_by_one_server(trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        told[0].held = told[1].held = True
        task = asyncio.create_task(engine.generate(replace(REQUEST, stop=("67",))))
        await until(lambda: told[0].waiting or told[1].waiting)
        first, second = told[:2] if told[0].waiting else told[1::-1]
        second.held = False
        await engine.leave(first.url)
        assert (await task).tokens.tolist() == [4, 5, 6, 7]
        assert second.served == [([1, 2, 3], 4)]

    trying(attempt)


@pytest.mark.parametrize("how", ["dead", "deaf"])
def test_what_a_leaving_server_does_not_give_back_is_generated_anew(
    how: str, trying: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_x.engines.fleet.supervisor.HAND_OVER_SECONDS", 0.1)

    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        first = told[0]
        first.held = True
        tasks = [asyncio.create_task(engine.generate(REQUEST)) for _ in range(4)]
        await until(lambda: len(first.waiting) == 2)
        asked = asyncio.Event()

        async def deaf() -> None:
            asked.set()
            if how == "dead":
                first._alive()

        first.hand_over, first.dead = deaf, how == "dead"
        await engine.leave(URLS[0])
        assert asked.is_set()
        assert [completion.tokens.tolist() for completion in await asyncio.gather(*tasks)] == [[4, 5, 6, 7]] * 4
        assert list(engine.fleet.members) == [f"the vLLM server at {URLS[1]}"]

    trying(attempt, heartbeat_seconds=100.0)


def test_a_full_file_system_is_waited_for(
    trying: Callable[..., list[str]], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stager, "FULL_SECONDS", 0.001)

    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        full = 3
        stage = engine.stager.staging.stage

        def refusing(*arguments: Any) -> StagedFiles:
            nonlocal full
            full -= 1
            if full >= 0:
                raise NoRoom("no room to stage the weights")
            return stage(*arguments)

        monkeypatch.setattr(engine.stager.staging, "stage", refusing)
        with pytest.raises(NoRoom):  # the first version, which nothing says will ever fit
            await publish(engine, tiny_model_dir, 1)
        full = 0
        await publish(engine, tiny_model_dir, 1)
        full = 3
        await publish(engine, tiny_model_dir, 2)
        assert told[0].holds == 2

    lines = trying(attempt)
    assert len([line for line in lines if "staging is tried again" in line]) == 1


class Slow:
    """A trainer of one tensor. Its files wait for a gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.value, self.gate, self.writing = np.zeros(4, np.float32), threading.Event(), threading.Event()

        def write(folder: Path, tensors: Any) -> dict[str, int]:
            self.writing.set()
            assert self.gate.wait(60)
            return write_shards(folder, tensors)

        monkeypatch.setattr(staging, "write_shards", write)

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        yield "a", self.value

    def step(self) -> None:
        self.value += 1


def test_the_trainer_goes_on_while_its_weights_are_written_and_they_are_those_of_before(
    trying: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Slow(monkeypatch)

    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        for version in (1, 2):
            trainer.gate.clear()
            copied = engine.stage(trainer, version)
            assert copied.bytes == trainer.value.nbytes
            swap = asyncio.create_task(engine.swap(copied))
            await asyncio.to_thread(trainer.writing.wait)
            trainer.step()
            assert (engine.version, told[0].pauses) == (version - 1, version - 1)
            trainer.gate.set()
            await swap
            folder = engine.stager.current.folder
            (file,) = shards(str(engine.stager.staging.root), str(folder))
            assert load_file(file)["a"].tolist() == [version - 1] * 4
            assert (engine.version, told[0].holds) == (version, version)

    trying(attempt)


def test_a_publication_that_was_interrupted_does_not_share_its_copy_with_the_next(
    trying: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Slow(monkeypatch)

    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        first = engine.stage(trainer, 1)
        swap = asyncio.create_task(engine.swap(first))
        await asyncio.to_thread(trainer.writing.wait)
        swap.cancel()
        trainer.step()
        second = asyncio.create_task(asyncio.to_thread(engine.stage, trainer, 2))
        await until(lambda: any(wait.what == "the version before to be written" for wait in list(waits._open.values())))
        assert not second.done()
        trainer.gate.set()
        await engine.swap(await second)
        assert first.files.done()
        (file,) = engine.stager.current.folder.glob("*.safetensors")
        assert load_file(file)["a"].tolist() == [1] * 4
        assert (engine.version, told[0].holds) == (2, 2)

    trying(attempt)


def test_an_engine_that_is_closed_ends_the_writing_and_leaves_no_files(
    trying: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trainer = Slow(monkeypatch)

    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        copied = engine.stage(trainer, 1)
        await asyncio.to_thread(trainer.writing.wait)
        closing = asyncio.create_task(engine.close())
        await until(lambda: engine.stager._closing)
        trainer.gate.set()
        await closing
        with pytest.raises(EngineError, match="was closed while weights were written"):
            copied.files.result()
        assert list((tmp_path / "staging").iterdir()) == []

    trying(attempt)


def test_a_request_that_is_wanted_no_longer_leaves_nothing(trying: Callable[..., list[str]]) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        told[0].held = told[1].held = True
        task = asyncio.create_task(engine.generate(REQUEST))
        await until(lambda: told[0].waiting or told[1].waiting)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.fleet.placed == {}
        assert engine.supervisor._calls == set()

    trying(attempt)


# ---- proofs

STALE = "model.layers.1.self_attn.k_proj.weight"
DIFFERS = rf"does not use the weights of version 2: {STALE} has other numbers"


@pytest.mark.loses(rf":2 was quarantined: .*:2 {DIFFERS}")
@pytest.mark.parametrize("waves", [1, 3])
def test_a_server_that_does_not_use_the_published_weights_is_quarantined_before_it_goes_on(
    waves: int, trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        await publish(engine, tiny_model_dir, 1)
        told[1].held, told[1].stale = True, STALE
        tasks = [asyncio.create_task(engine.generate(REQUEST)) for _ in range(6)]
        await until(lambda: len(told[1].waiting) == 2)
        await publish(engine, tiny_model_dir, 2)
        assert [server.paused for server in told] == [False, True, False]  # it never goes on
        done = await asyncio.gather(*tasks)
        assert len(done) == 6
        assert engine.version == 2
        assert {server.url for server in told if server.url in " ".join(engine.fleet.serving())} == {URLS[0], URLS[2]}

    trying(attempt, servers=3, waves=waves)


@pytest.mark.loses(rf":1 was quarantined: .*:1 {DIFFERS}")
def test_if_no_server_uses_the_published_weights_the_publication_fails_with_the_tensors_name(
    trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        await publish(engine, tiny_model_dir, 1)
        told[0].stale = STALE
        with pytest.raises(EngineError, match=DIFFERS):
            await publish(engine, tiny_model_dir, 2)
        assert engine.version == 1
        with pytest.raises(EngineError, match=f"no server is left: .* {DIFFERS}"):
            await engine.generate(REQUEST)

    trying(attempt, servers=1)


@pytest.mark.loses(r":1 is lost", rf":1 was quarantined: .* {DIFFERS}")
def test_a_server_that_comes_back_proves_its_weights_before_it_serves(
    trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        await publish(engine, tiny_model_dir, 2)
        told[0].dead, told[0].stale = True, STALE
        await until(lambda: len(engine.fleet.serving()) == 1)
        told[0].dead = False
        await until(
            lambda: any("was quarantined" in m.reason or m.state.value == "quarantined" for m in engine.fleet.members.values())
        )
        assert told[0].served == []

    trying(attempt)


def test_whole_tensors_are_proved_at_first_and_then_at_every_so_many_publications_while_the_server_is_paused(
    trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        for version in range(1, 8):
            await publish(engine, tiny_model_dir, version)
        assert told[0].proved == [(version, version in (1, 4, 7), True) for version in range(1, 8)]

    assert len(trying(attempt, servers=1, prove_every=3)) <= 1


def test_without_proofs_no_server_is_asked_for_one(trying: Callable[..., list[str]], tiny_model_dir: Path) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        await publish(engine, tiny_model_dir, 1)
        assert told[0].proved == []

    trying(attempt, servers=1, prove_every=0)


def test_a_server_that_cannot_prove_its_weights_is_reported_once_and_serves(
    trying: Callable[..., list[str]], tiny_model_dir: Path
) -> None:
    async def attempt(engine: VLLMEngine, told: list[Told]) -> None:
        told[0].proof_error = ServerFailed("it has no such method")
        for version in (1, 2):
            await publish(engine, tiny_model_dir, version)
        assert (await engine.generate(REQUEST)).versions.tolist() == [2] * 4

    lines = [line for line in trying(attempt, servers=1) if "cannot prove" in line]
    assert len(lines) == 1
    assert "cannot prove its weights: it has no such method; only its log-probabilities" in lines[0]
