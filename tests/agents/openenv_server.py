"""A server of the package openenv: guess a number. Prints its port."""

from __future__ import annotations

import random
import socket
from typing import Any

import uvicorn
from openenv.core import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int | str


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, most: int = 100, **_: Any) -> Hint:
        self.number = random.Random(seed).randint(1, most)
        return Hint(hint=f"1 to {most}")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:  # type: ignore[override]
        guess = int(action.number)
        if guess == self.number:
            return Hint(hint="right", reward=1.0, done=True)
        return Hint(hint="higher" if guess < self.number else "lower", reward=0.0, done=False)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listening])
