"""The worker processes of a gateway, from the side of the run: starts them, answers their requests,
and starts another in place of one that dies.

Every worker shares the listening socket, so that a connection is served by whichever is free, and
one that waits to be accepted outlives a worker. A worker that dies takes the requests with it that it
was serving, and no session: calls without a completion are dropped, those whose response may not
have been sent count only if the agent goes on from them (as SessionState.unseen), and a client that
tries again gets the answer that was made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from areal_x.agents.chat.dialogue import ChatAnswer
from areal_x.agents.chat.prompts import reasonings_of
from areal_x.agents.gateway.channel import Channel, ChannelLost
from areal_x.agents.gateway.connections import CLOSING_SECONDS
from areal_x.agents.gateway.errors import ApiError, api_error
from areal_x.agents.gateway.exchange import CallAnswer
from areal_x.agents.gateway.http import traceback_end
from areal_x.agents.gateway.network import Network
from areal_x.agents.gateway.retries import Attempt, Client, SentAnswer
from areal_x.agents.gateway.session import GatewaySession, StoredResponse
from areal_x.agents.gateway.work import WorkAnswer, WorkOver
from areal_x.errors import UserError
from areal_x.protocols.engine import Completion, Request
from areal_x.runtime import background, guard
from areal_x.runtime.credentials import without_credentials
from areal_x.runtime.loop import together
from areal_x.runtime.waits import waiting, whose

if TYPE_CHECKING:
    from areal_x.agents.gateway.gateway import Gateway

LOG = logging.getLogger(__name__)

MODULE = "areal_x.agents.gateway.worker"
START_SECONDS = 300.0  # imports, and the tokenizer
END_SECONDS = CLOSING_SECONDS + 5.0
CLIENTS_SECONDS = 1.0  # to report open connections, which takes a turn of a worker's loop
MOST_FAILURES = 3  # starts in a row that did not end with a worker that serves
KEY = 64  # bytes of the key of a reply


class Workers:
    """All worker processes of a gateway. renderer: of its sessions, see worker.described."""

    def __init__(
        self, gateway: Gateway, listener: socket.socket, renderer: Mapping[str, Any]
    ) -> None:
        self.gateway = gateway
        self.listener = listener
        network = gateway.network
        self.settings = {
            "renderer": dict(renderer),
            "network": {
                f.name: getattr(network, f.name)
                for f in fields(Network)
                if f.init and f.name != "networks"
            },
            "networks": list(network.networks),
            "beat_seconds": gateway.beat_seconds,
        }
        self.workers = [Worker(self) for _ in range(gateway.workers)]
        self._keeping: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns once all serve. Raises: UserError."""
        try:
            await together(worker.start() for worker in self.workers)
        except BaseException:
            await self.close()
            raise
        self._keeping = [
            background.start(worker.keep(), "a worker of the gateway") for worker in self.workers
        ]

    async def close(self) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self.workers))
        self.listener.close()

    async def open_clients(self) -> set[Client] | None:
        """Returns the addresses whose connections are open; None if a worker does not answer soon,
        so that any may be."""
        try:
            async with asyncio.timeout(CLIENTS_SECONDS):
                found = await asyncio.gather(*(worker.clients() for worker in self.workers))
        except TimeoutError:
            return None
        return {client for clients in found for client in clients}


class Worker:
    """One of them: its process, and what it asks of the run."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._gateway = workers.gateway
        self._channel: Channel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[None] | None = None
        self._lost = asyncio.Event()
        # sessions of the calls that have begun and whose responses are not known to be sent, by id
        self._open: dict[str, str] = {}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Returns once the process serves. Raises: UserError with its reason."""
        ours, theirs = socket.socketpair()
        self._lost.clear()
        self._ready = asyncio.get_running_loop().create_future()
        self._channel = Channel(self._serve, failure, self._end, "a request to the gateway")
        settings = {
            **self._workers.settings,
            "channel": theirs.fileno(),
            "listener": self._workers.listener.fileno(),
        }
        try:
            await self._channel.open(ours)
            with waiting(whose(), "the gateway to serve"):
                with theirs:
                    self._process = await asyncio.create_subprocess_exec(
                        *guard.command(MODULE, sys.path, settings, os.getpid()),
                        env=without_credentials(os.environ),
                        stdin=asyncio.subprocess.DEVNULL,
                        stdout=asyncio.subprocess.DEVNULL,
                        pass_fds=(theirs.fileno(), self._workers.listener.fileno()),
                        process_group=0,  # an interrupt at the terminal is the run's
                    )
                async with asyncio.timeout(START_SECONDS):
                    await self._ready
        except TimeoutError:
            await self.close()
            raise UserError(
                f"a worker of the gateway did not start within {START_SECONDS:g} seconds"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def keep(self) -> None:
        """Starts another process whenever this one ends. Raises: UserError if none serves."""
        while True:
            await self._lost.wait()
            assert self._process is not None
            code = await self._process.wait()
            LOG.warning(
                "a worker of the gateway %s, and the requests that it was answering were cut off:"
                " another one is starting",
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}",
            )
            for failures in range(1, MOST_FAILURES + 1):
                try:
                    await self.start()
                    break
                except UserError:
                    if failures == MOST_FAILURES:
                        raise

    async def close(self) -> None:
        """Ends the process: once it has sent what it has begun to, or by a signal."""
        if self._channel is None:
            return
        if self._process is not None:
            await self._end_process(self._process, self._channel)
        self._channel.close()

    async def _end_process(self, process: asyncio.subprocess.Process, channel: Channel) -> None:
        if self.serves:
            channel.tell("close")
        with waiting("the rollout", "the gateway to end"):
            try:
                async with asyncio.timeout(END_SECONDS if self.serves else 0):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def clients(self) -> Sequence[Client]:
        """Returns the addresses of its open connections, of which it has none before it serves."""
        assert self._channel is not None
        if not self.serves:
            return []
        try:
            found = await self._channel.call("clients")
        except (ChannelLost, ApiError):  # its connections ended with it
            return []
        return [(host, port) for host, port in found]

    @property
    def serves(self) -> bool:
        ready = self._ready
        return (
            ready is not None and ready.done() and not ready.cancelled() and not ready.exception()
        )

    def _opened(self, id: str, calls: Iterable[str]) -> None:
        self._open |= dict.fromkeys(calls, id)

    def _end(self) -> None:
        """The process has ended, or is about to."""
        opened, self._open = self._open, {}
        for call, id in opened.items():
            self._drop(id, [call])
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(UserError("a worker of the gateway ended as it started"))
        self._lost.set()

    # ---- what the process asks for

    def _serve(self, operation: str, *arguments: Any) -> Any:
        if (found := getattr(self, f"_serve_{operation}", None)) is not None:
            return found(*arguments)
        id, *rest = arguments
        return getattr(self, f"_session_{operation}")(self._gateway.session(id), *rest)

    def _serve_ready(self) -> None:
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_result(None)

    def _serve_failed(self, why: str) -> None:
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(UserError(why))

    def _serve_sent(self, id: str, calls: list[str]) -> None:
        for call in calls:
            self._open.pop(call, None)

    def _serve_drop(self, id: str, calls: list[str]) -> None:
        self._serve_sent(id, calls)
        self._drop(id, calls)

    def _drop(self, id: str, calls: list[str]) -> None:
        with contextlib.suppress(ApiError):  # the session was closed meanwhile
            self._gateway.session(id).drop(calls)

    def _serve_log(self, level: int, line: str) -> None:
        LOG.log(level, "%s", line)

    def _serve_find(self, name: str | None, keys: list[str]) -> list[Any]:
        session = self._gateway.find(name, keys)
        session.touch()
        return [session.id, session.limits, session.engine.context]

    def _serve_admit(self, keys: list[str]) -> None:
        self._gateway.admit(keys)

    async def _serve_open_session(self, keys: list[str], label: str | None) -> dict[str, str]:
        self._gateway.admit(keys)
        return (await self._gateway.open_waiting(label)).about()

    def _serve_admit_worker(self, keys: list[str]) -> None:
        self._gateway.work_for(keys)

    async def _serve_take(self, keys: list[str], worker: str, seconds: float) -> list[Any]:
        try:
            return [False, await self._gateway.work_for(keys).take(worker, seconds)]
        except WorkOver:
            return [True, None]

    def _serve_renew(self, keys: list[str], ids: list[str]) -> list[str]:
        return self._gateway.work_for(keys).renew(ids)

    def _serve_answer(self, keys: list[str], id: str, answer: dict[str, Any]) -> bool:
        return self._gateway.work_for(keys).answer(id, WorkAnswer(**answer))

    def _serve_give_back(self, keys: list[str], id: str) -> bool:
        return self._gateway.work_for(keys).give_back(id)

    async def _session_find_lost(
        self, session: GatewaySession, attempt: Attempt, client: Client | None
    ) -> SentAnswer | None:
        is_open = await self._workers.open_clients()
        found = session.find_lost(attempt, client, lambda x: is_open is None or x in is_open)
        if found is not None:
            self._opened(session.id, [one.id for one in found.answers])
        return found

    def _session_begin(self, session: GatewaySession, ids: list[str], *rest: Any) -> Any:
        chosen = session.begin(ids, *rest)
        self._opened(session.id, ids)
        return chosen

    async def _session_generate(
        self, session: GatewaySession, id: str, request: Request
    ) -> Completion:
        return await session.generate(id, request)

    def _session_finish(
        self,
        session: GatewaySession,
        replies: list[list[Any]],
        attempt: Attempt,
        client: Client | None,
        stored: StoredResponse | None,
    ) -> None:
        answers = []
        for id, reply, stopped_by in replies:
            call = session.made(id)
            answer = ChatAnswer(call.prompt, call.completion, reply, stopped_by, call.images)
            answers.append(CallAnswer(id, answer))
        session.finish(answers, attempt, client, stored)

    def _session_conversation(self, session: GatewaySession, id: str) -> bytes | None:
        return session.conversations.get(id)

    def _session_stored(self, session: GatewaySession, id: str) -> bytes | None:
        return session.stored.get(id)

    def _session_forget(self, session: GatewaySession, id: str) -> bool:
        return session.forget(id)

    def _session_reward(self, session: GatewaySession, value: float, call: str | None) -> str:
        return session.reward(value, call)

    def _session_end(self, session: GatewaySession, reward: float | None) -> dict[str, Any]:
        session.end(reward)
        return session.summary()

    def _session_summary(self, session: GatewaySession) -> dict[str, Any]:
        return session.summary()

    def _session_count_unmet(self, session: GatewaySession, unmet: dict[str, str]) -> None:
        session.count_unmet(unmet)

    def _session_remember(
        self, session: GatewaySession, key: bytes, reasoning: str | None, held: bytes
    ) -> None:
        session.replies[key] = reasoning, held

    def _session_reasonings(
        self, session: GatewaySession, joined: bytes, count: int
    ) -> tuple[list[tuple[int, str | None]], bytes | None]:
        """Returns also the latest of these replies."""
        keys = [joined[place * KEY : (place + 1) * KEY] for place in range(count)]
        found = reasonings_of(session.replies, keys)
        latest = session.replies[keys[max(found)]][1] if found else None
        return list(found.items()), latest

    def _session_recall(self, session: GatewaySession, key: bytes) -> bytes:
        held: bytes = session.replies[key][1]
        return held


def failure(error: BaseException) -> ApiError:
    """Returns what a worker is told; its own line of the log would have no traceback."""
    found = api_error(error)
    if found.code == "internal_error":
        LOG.error("the gateway could not answer a request\n%s", traceback_end(error))
    return found
