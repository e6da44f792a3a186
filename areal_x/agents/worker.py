"""A worker: takes episodes of a run on another machine, runs an agent on each, and answers them.

    poll ──episode──▶ agent, with a session of its own ──result──▶ answer
           └── signs of life for all episodes that it has

Ends when the run does. An episode that it cannot finish is given back, or, if it has died, given to
another worker by the run; so nothing is lost, and nothing counts twice.
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from areal_x.agents.calling import BackgroundLoop, Solve, call_function
from areal_x.agents.client import Session, SessionError, ask
from areal_x.agents.external_program import inherited_environment, run_program
from areal_x.errors import UserError, described, printable
from areal_x.runtime import background
from areal_x.runtime.thread import in_thread
from areal_x.types import Task

WAIT_SECONDS = 20.0  # one request for an episode
SIGNS = 3  # of life in the time after which the run takes a worker for dead
RETRY_SECONDS = 0.2, 10.0  # after a request that failed: at first, and at most
RETURN_SECONDS = 5.0  # to give episodes back at the end
MOST_BYTES = 1 << 20  # of an answer
MOST_ERROR = 4000  # characters
# of other TLS errors the next attempt may be free
HOPELESS = ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")

Answer = Mapping[str, Any]
Attempt = Callable[[Task, Session], Awaitable[Answer]]


@dataclass
class Worker:
    """url: of the run's gateway. key: the gateway's own. attempt: runs the agent on one task.
    episodes: how many at once. name: for the run's log. patience_seconds: how long to wait for a run
    that does not answer. message: shows a line."""

    url: str
    key: str = field(repr=False)
    attempt: Attempt
    episodes: int = 8
    name: str = ""
    patience_seconds: float = 600.0
    message: Callable[[str], None] = print
    answered: int = 0
    _running: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by lease
    _lease_seconds: float = 0.0  # the run's, once it has given an episode

    async def run(self) -> None:
        """Works until the run ends or this is cancelled. Raises: UserError if the run refuses this
        worker, or does not answer for too long."""
        free = asyncio.Semaphore(self.episodes)
        signs: asyncio.Task[None] | None = None
        try:
            while True:
                await free.acquire()
                about = {"worker": self.name, "wait_seconds": WAIT_SECONDS}
                given = await self._post("work", about)
                if given.get("over"):
                    return
                if given.get("lease") is None:
                    free.release()
                    continue
                # the first one, or that of another run at the same address
                if given["lease_seconds"] != self._lease_seconds:
                    self._lease_seconds = float(given["lease_seconds"])
                    if signs is not None:
                        signs.cancel()
                    signs = background.start(self._show_signs(), "signs of life", failed=_ignore)
                lease = str(given["lease"])
                task = background.start(
                    self._episode(lease, given["key"], given["task"]), "an episode of the worker"
                )
                self._running[lease] = task
                task.add_done_callback(lambda _: free.release())
        finally:
            if signs is not None:
                signs.cancel()
            await self._give_back()

    async def _episode(self, lease: str, key: str, about: Mapping[str, Any]) -> None:
        try:
            task = Task(about["id"], about["prompt"], about["answer"], about["metadata"])
            answer = await self._answer(task, Session(f"{self.url}/sessions/{lease}", key))
            # after that time it is another worker's
            told = await self._post(f"work/{lease}/answer", answer, self._lease_seconds)
            self.answered += bool(told["counts"])
            if "error" in answer:
                self.message(f"task {printable(task.id)} failed: {printable(answer['error'])}")
        except UserError as error:
            self.message(f"an episode could not be answered: {error}")
        finally:
            self._running.pop(lease, None)

    async def _answer(self, task: Task, session: Session) -> Answer:
        try:
            answer = await self.attempt(task, session)
            if len(json.dumps(answer)) > MOST_BYTES:
                return {"error": f"the agent's result is larger than {MOST_BYTES >> 20} MB"}
            return answer
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            return {"error": described(error)[:MOST_ERROR]}

    async def _show_signs(self) -> None:
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while True:
            await asyncio.sleep(self._lease_seconds / SIGNS)
            if not self._running:
                heard = loop.time()
                continue
            lost = []
            try:
                lost = (await self._ask("work/alive", {"leases": list(self._running)}))["lost"]
                heard = loop.time()
            except (OSError, SessionError):
                if loop.time() - heard > self._lease_seconds:  # the run has given them to others
                    lost = list(self._running)
            for lease in lost:
                if lease in self._running:
                    self._running.pop(lease).cancel()
                    self.message("an episode was lost to another worker, or to the end of the run")

    async def _give_back(self) -> None:
        """Ends the agents, and returns their episodes to the run if it still answers."""
        running = dict(self._running)
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
        returns = [self._ask(f"work/{lease}/return", {}) for lease in running]
        try:
            async with asyncio.timeout(RETURN_SECONDS):
                await asyncio.gather(*returns, return_exceptions=True)
        except TimeoutError:
            return

    async def _post(
        self, path: str, body: Answer, most_seconds: float = math.inf
    ) -> dict[str, Any]:
        """Repeats a request until the run answers it. Raises: UserError, see `run`."""
        loop = asyncio.get_running_loop()
        patience = min(self.patience_seconds, most_seconds)
        until = loop.time() + patience
        pause, longest = RETRY_SECONDS
        while True:
            try:
                return await self._ask(path, body)
            except SessionError as refused:
                if refused.status < 500:
                    raise UserError(f"the run at {self.url} refuses: {refused}") from None
                why: Exception = refused
            except OSError as error:
                if (reason := _hopeless(error)) is not None:
                    raise UserError(f"no secure connection to {self.url}: {reason}") from None
                why = error
            if loop.time() + pause > until:
                raise UserError(f"no run has answered at {self.url} for {patience:g} s: {why}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, longest)

    async def _ask(self, path: str, body: Answer) -> dict[str, Any]:
        return await in_thread(ask, f"{self.url}/{path}", self.key, body)


@dataclass(frozen=True)
class FunctionAttempt:
    """Runs a function as `agent` does, on a loop beside that of the worker's signs of life."""

    solve: Solve
    background_loop: BackgroundLoop = field(default_factory=BackgroundLoop)

    async def __call__(self, task: Task, session: Session) -> Answer:
        call = call_function(self.solve, task, session.base_url, session.key)
        result = await self.background_loop.run(call)
        if result is None:
            return {"result": None}
        if isinstance(result, Real) and not isinstance(result, bool):
            if not math.isfinite(value := float(result)):
                return {"error": f"the agent returned {value} for its reward"}
            return {"result": value}
        return {"result": str(result)}


@dataclass(frozen=True)
class ProgramAttempt:
    """Runs a command as `agent_process` does. variables: those that it inherits beside harmless
    ones."""

    command: tuple[str, ...]
    variables: tuple[str, ...] = ()
    directory: str = "."
    output_bytes: int = 1 << 16
    processes: int = 64

    async def __call__(self, task: Task, session: Session) -> Answer:
        environment = {**inherited_environment(self.variables), **session.environment}
        printed = await run_program(
            self.command, task, environment, self.directory, self.output_bytes, self.processes
        )
        return {"printed": printed}


def _hopeless(error: OSError) -> str | None:
    """Returns what is wrong with a connection that no repetition can mend."""
    inner = getattr(error, "reason", error)
    if isinstance(inner, ssl.SSLError) and inner.reason in HOPELESS:
        return getattr(inner, "verify_message", "") or str(inner.reason)
    return None


def _ignore(error: BaseException) -> None:
    """The run takes a worker without signs of life for dead, and gives its episodes to others."""
