"""Client for programs outside of a run: opens an episode of a run that waits for agents, and gives
it a reward.

    from areal_x.agents import session

    with session() as episode:                       # of the run that wrote gateway.json here (train.workflow = @online())
        client = OpenAI(base_url=episode.base_url, api_key=episode.key)
        ...                                          # any number of calls, by any program that has both
        episode.reward(1.0)

An agent that the run itself starts (`agent`, `agent_process`) already has a session: `session()`
finds it in the environment. Only the standard library is imported here.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

ADDRESS = "gateway.json"
URL, KEY, FILE = "AREAL_X_SESSION_URL", "AREAL_X_SESSION_KEY", "AREAL_X_GATEWAY"
SECONDS = 60.0  # timeout of one request


class SessionError(RuntimeError):
    """A request that the gateway refused, with its message. status: the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Session:
    """One episode. base_url: for an OpenAI client. url: the base_url of an Anthropic client. key:
    the API key of both.

    A context manager that ends the episode: scored by the rewards that it was given, failed if
    there were none.
    """

    url: str
    key: str = field(repr=False)
    ended: bool = False

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    @property
    def environment(self) -> dict[str, str]:
        """The variables that most agents read: those of both official clients, and of `session()`."""
        of_openai = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.key}
        return {
            **of_openai,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            URL: self.url,
            KEY: self.key,
        }

    def reward(self, value: float, call: str | None = None) -> None:
        """Gives a reward to the last call, or to the call of this id (the header `x-areal-call` of
        its response).

        Raises: SessionError if the call already has a reward, or if there is no such call.
        """
        ask(
            f"{self.url}/reward",
            self.key,
            {"reward": value} | ({} if call is None else {"call": call}),
        )

    def end(self, reward: float | None = None) -> None:
        """Ends the episode with this reward, or with the sum of the rewards of its calls."""
        ask(f"{self.url}/end", self.key, {} if reward is None else {"reward": reward})
        self.ended = True

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.ended:
            return
        try:
            self.end()
        except (SessionError, OSError):
            if error is None:
                raise


def session(
    address: str | Path | None = None, wait_seconds: float = 600.0, label: str | None = None
) -> Session:
    """Opens an episode of a run.

    address: the file that the run wrote; by default the one that AREAL_X_GATEWAY names, or
    gateway.json. wait_seconds: how long to wait while no episode is free. label: sessions with the
    same label are attempts at the same task; they form a group if train.group_size is larger than
    1.

    Raises: SessionError if no episode became free in time; FileNotFoundError without an address
    file.
    """
    if address is None and URL in os.environ:
        return Session(os.environ[URL], os.environ[KEY])
    gateway = json.loads(Path(address or os.environ.get(FILE, ADDRESS)).read_text())
    until = time.monotonic() + wait_seconds
    while True:
        try:
            opened = ask(
                f"{gateway['url']}/sessions",
                gateway["key"],
                {} if label is None else {"label": label},
            )
        except SessionError as error:
            if error.status != 503 or time.monotonic() > until:
                raise
            time.sleep(1)
        else:
            return Session(opened["url"], opened["key"])


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Whoever answers for the gateway could have the key sent elsewhere."""

    def redirect_request(self, *_: object) -> None:
        return None


def ask(url: str, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Sends a POST request and returns the gateway's JSON response. Raises: SessionError if it
    refuses; OSError if it cannot be reached."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        opener = urllib.request.build_opener(_NoRedirects)
        with opener.open(request, timeout=SECONDS) as answer:
            told: dict[str, Any] = json.load(answer)
            return told
    except urllib.error.HTTPError as error:
        with error:
            raise SessionError(error.code, _message(error)) from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error)
