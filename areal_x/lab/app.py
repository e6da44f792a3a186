"""The routes of the page, and who may use them.

Whoever can open a socket of this machine, and every website in a browser of it, can reach a server
on loopback. So each route needs the key, which is the first part of its path; the Host header must
name this server, which a name that was bound to 127.0.0.1 (DNS rebinding) does not; and the pages
may load nothing from elsewhere nor run a script that is not a file of this package.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from areal_x.errors import UserError
from areal_x.lab import answers, notes
from areal_x.lab.filters import Filter
from areal_x.lab.index import Index
from areal_x.lab.runs import Run, Runs

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
THREADS = 4  # that read files
BUILDERS = 2  # threads that build indexes: one run does not wait for another
MOST_WAITING = 64  # requests at once
LIST_SECONDS = 0.5  # for which one answer reads metrics of all runs
BUILD_SECONDS = 0.1  # for which an answer waits for what the journal has got
MOST_POINTS, MOST_CURVES = 2000, 64
MOST_TEXT = 1000  # characters that are searched for
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src"
        " 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
FLOATS = ("reward_min", "reward_max")
INTEGERS = ("step_min", "step_max", "length_min", "length_max", "error", "ticket")


class Lab:
    """The server's state: the runs, and the threads that read them.

    tokenizer: a tokenizer.json for all runs; None takes each run's own.
    """

    def __init__(self, place: Path, tokenizer: Path | None = None) -> None:
        self.runs = Runs(place)
        self.tokenizer = tokenizer
        self._readers = ThreadPoolExecutor(THREADS, "lab")
        self._builder = ThreadPoolExecutor(BUILDERS, "lab-index")
        self._waiting = 0

    def close(self) -> None:
        """Ends the threads; a build of an index ends at its next groups."""
        self.runs.close()
        for threads in (self._readers, self._builder):
            threads.shutdown(wait=True, cancel_futures=True)

    async def read(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Runs work that reads files on a thread, and returns its result.

        Raises: HTTPException while too many requests wait.
        """
        if self._waiting >= MOST_WAITING:
            raise HTTPException(503, "too many requests at once")
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._readers, work, *arguments)
        finally:
            self._waiting -= 1

    async def run(self, request: Request) -> Run:
        """Raises: HTTPException for a name that no run has."""
        name = request.path_params["run"]
        run: Run | None = await self.read(self.runs.get, name)
        if run is None:
            raise HTTPException(404, f"there is no run {name!r}")
        return run

    async def index(self, run: Run) -> Index:
        """Returns a run's index with what its journal has got, or as far as it is."""
        index = self.runs.index(run)
        loop = asyncio.get_running_loop()
        done, _ = await asyncio.wait(
            {loop.run_in_executor(self._builder, index.refresh)}, timeout=BUILD_SECONDS
        )
        for refreshed in done:
            refreshed.result()
        return self.runs.index(run)


def application(lab: Lab, key: str, hosts: Callable[[], set[str]]) -> ASGIApp:
    """Returns the application. hosts: returns the Host headers that name this server."""

    async def list_runs(_: Request) -> Any:
        def work() -> Any:
            # a folder of many runs is read in several answers, its newest runs first
            until = time.monotonic() + LIST_SECONDS
            return [run.summary(until) for run in lab.runs.all()]

        return {"place": str(lab.runs.place.absolute()), "runs": await lab.read(work)}

    async def overview(request: Request) -> Any:
        run = await lab.run(request)
        found = await lab.read(run.overview)
        if found["has_journal"]:
            index = await lab.index(run)
            found["outcomes"] = await lab.read(answers.outcome_counts, index)
            found["journal"] = answers.about(index)
        return found

    async def metrics(request: Request) -> Any:
        run = await lab.run(request)
        keys = request.query_params.getlist("key")[:MOST_CURVES]
        points = min(integer(request, "points", 1000), MOST_POINTS)

        def work() -> Any:
            run.metrics.refresh()
            return {"keys": run.metrics.keys, "curves": run.metrics.curves(keys, max(points, 1))}

        return await lab.read(work)

    async def trajectories(request: Request) -> Any:
        run, wanted = await lab.run(request), filter_of(request)
        begin, count = integer(request, "begin", 0), integer(request, "count", 50)
        index = await lab.index(run)
        return await lab.read(answers.rows_page, index, wanted, begin, count)

    async def previews(request: Request) -> Any:
        run = await lab.run(request)
        words = request.query_params.get("of", "").split(",")[: answers.MOST_ROWS]
        try:
            of = [(int(a), int(b)) for a, _, b in (word.partition(".") for word in words if word)]
        except ValueError:
            raise UserError("of must be TICKET.NUMBER,TICKET.NUMBER …") from None

        def work() -> Any:
            vocabulary, reason = run.vocabulary(lab.tokenizer)
            if vocabulary is None:
                return {"reason": reason}
            return {"texts": answers.previews(run.path, vocabulary, of)}

        return await lab.read(work)

    async def search(request: Request) -> Any:
        run, wanted = await lab.run(request), filter_of(request)
        begin = integer(request, "begin", 0)
        text = request.query_params.get("text", "")
        if not 0 < len(text) <= MOST_TEXT:
            raise UserError(f"a search is for 1 to {MOST_TEXT} characters")
        index = await lab.index(run)

        def work() -> Any:
            vocabulary, reason = run.vocabulary(lab.tokenizer)
            if vocabulary is None:
                raise UserError(reason)
            return answers.searched(run.path, index, vocabulary, wanted, text, begin)

        return await lab.read(work)

    async def group(request: Request) -> Any:
        run = await lab.run(request)

        def work() -> Any:
            vocabulary, reason = run.vocabulary(lab.tokenizer)
            found = answers.group_view(run.path, request.path_params["ticket"], vocabulary)
            return found | {"no_text": reason}

        return await lab.read(work)

    async def tokens(request: Request) -> Any:
        run = await lab.run(request)
        ticket, number = (request.path_params[name] for name in ("ticket", "number"))
        begin, count = integer(request, "begin", 0), integer(request, "count", 2000)

        def work() -> Any:
            vocabulary, reason = run.vocabulary(lab.tokenizer)
            return answers.tokens_view(run.path, ticket, number, vocabulary, begin, count) | {
                "no_text": reason
            }

        return await lab.read(work)

    async def failures(request: Request) -> Any:
        index = await lab.index(await lab.run(request))
        found = await lab.read(answers.failures, index)
        return {
            "failures": found,
            "outcomes": await lab.read(answers.outcome_counts, index),
            **answers.about(index),
        }

    async def settings(request: Request) -> Any:
        run = await lab.run(request)
        name = request.query_params.get("with")
        other = None if name is None else await lab.read(lab.runs.get, name)
        if name is not None and other is None:
            raise HTTPException(404, f"there is no run {name!r}")

        def work() -> Any:
            (own, why), (theirs, why_not) = (
                run.settings(),
                other.settings() if other else (None, ""),
            )
            return {"settings": answers.compared(own, theirs), "error": why or why_not}

        return await lab.read(work)

    async def read_notes(request: Request) -> Any:
        run = await lab.run(request)
        text, version = await lab.read(notes.read, run.path)
        return {"text": text, "version": version}

    async def write_notes(request: Request) -> Any:
        run = await lab.run(request)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > 2 * notes.MOST_BYTES:
                raise HTTPException(413, "the notes are too long")
        try:
            sent = json.loads(body)
            text, version = str(sent["text"]), str(sent["version"])
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UserError("the body must be JSON with text and version") from None
        return {"version": await lab.read(notes.write, run.path, text, version)}

    files = {
        file.name: Response(file.read_bytes(), media_type=TYPES[file.suffix])
        for file in STATIC.iterdir()
        if file.suffix in TYPES
    }

    async def static(request: Request) -> Response:
        found = files.get(request.path_params.get("name", "index.html"))
        if found is None:
            raise HTTPException(404, "there is no such file")
        return found

    of_run = "/api/runs/{run}"
    routes = [
        Route("/", static),
        Route("/static/{name}", static),
        Route("/api/runs", as_json(list_runs)),
        Route(of_run, as_json(overview)),
        Route(f"{of_run}/metrics", as_json(metrics)),
        Route(f"{of_run}/trajectories", as_json(trajectories)),
        Route(f"{of_run}/previews", as_json(previews)),
        Route(f"{of_run}/search", as_json(search)),
        Route(f"{of_run}/groups/{{ticket:int}}", as_json(group)),
        Route(f"{of_run}/groups/{{ticket:int}}/{{number:int}}", as_json(tokens)),
        Route(f"{of_run}/failures", as_json(failures)),
        Route(f"{of_run}/settings", as_json(settings)),
        Route(f"{of_run}/notes", as_json(read_notes)),
        Route(f"{of_run}/notes", as_json(write_notes), methods=["PUT"]),
    ]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: refused})
    return guarded(inner, key, hosts)


def guarded(inner: ASGIApp, key: str, hosts: Callable[[], set[str]]) -> ASGIApp:
    """Wraps the application: removes the key from paths, refuses requests without it or for another
    host, and adds the headers to every answer."""

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        headers = dict(scope["headers"])
        given, _, rest = scope["path"].removeprefix("/").partition("/")
        host = headers.get(b"host", b"").decode("latin-1")
        origin = headers.get(b"origin", b"").decode("latin-1")
        refusal = None
        if host not in hosts():
            refusal = (421, f"this server is not {host[:200]}")
        elif not hmac.compare_digest(given.encode(), key.encode()):
            refusal = (403, "the address lacks the key: use the one that areal-x lab printed")
        elif origin and origin.removeprefix("http://") != host:
            refusal = (403, "requests of other pages are refused")
        if refusal is not None:
            answer = Response(refusal[1], refusal[0], media_type="text/plain")
            await answer(scope, receive, send_with_headers)
            return
        path = f"/{rest}"
        await inner({**scope, "path": path, "raw_path": path.encode()}, receive, send_with_headers)

    return outer


def as_json(handler: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Any]:
    """Wraps a handler whose result is plain data: numbers that JSON does not have become null."""

    async def endpoint(request: Request) -> Response:
        try:
            content = msgspec.json.encode(answers.without_surrogates(await handler(request)))
            return Response(content, media_type="application/json")
        except notes.Conflict as error:
            return told(409, str(error))
        except UserError as error:
            return told(400, str(error))
        except OSError as error:  # a folder that is gone, or may not be read
            return told(500, f"{error.filename or 'a file'} cannot be read: {error.strerror}")
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it

    return endpoint


async def refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return told(error.status_code, error.detail)


def told(status: int, what: str) -> Response:
    body = msgspec.json.encode({"error": answers.without_surrogates(what)})
    return Response(body, status, media_type="application/json")


def filter_of(request: Request) -> Filter:
    """Returns the filter of a request's parameters. Raises: UserError for one that cannot be."""
    found: dict[str, Any] = {}
    for name in (f.name for f in fields(Filter)):
        text = request.query_params.get(name, "")
        if text == "":
            continue
        if name in FLOATS:
            found[name] = number(name, text)
        elif name in INTEGERS:
            found[name] = integer(request, name, 0, least=None)
        else:
            found[name] = text
    return Filter(**found)


def number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UserError(f"{name} = {text[:50]!r} must be a number")
    return value


def integer(request: Request, name: str, default: int, least: int | None = 0) -> int:
    text = request.query_params.get(name, "")
    try:
        value = int(text) if text else default
    except ValueError:
        raise UserError(f"{name} = {text[:50]!r} must be a whole number") from None
    if not (least is None or value >= least) or abs(value) > 1 << 62:
        raise UserError(f"{name} = {text[:50]} is out of range")
    return value
