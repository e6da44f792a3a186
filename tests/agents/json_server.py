"""A server of a few routes that take and give JSON, on threads. Each client has a session by its cookie."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from uuid import uuid4


@dataclass(frozen=True)
class Asked:
    """session: the same for requests with the same cookie, new for one without."""

    path: str
    body: dict[str, Any]
    key: str | None
    session: str


Route = Callable[[Asked], tuple[int, Any]]


@contextmanager
def serving(routes: Mapping[str, Route]) -> Iterator[tuple[str, list[Asked]]]:
    """Yields the address, and the requests as they come."""
    asked: list[Asked] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            cookies = SimpleCookie(self.headers.get("Cookie", ""))
            session = cookies["session"].value if "session" in cookies else uuid4().hex
            asked.append(Asked(self.path, body, self.headers.get("Authorization"), session))
            status, answer = routes[self.path](asked[-1]) if self.path in routes else (404, {"detail": "Not Found"})
            content = json.dumps(answer, separators=(",", ":")).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Set-Cookie", f"session={session}; path=/; httponly; samesite=lax")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
