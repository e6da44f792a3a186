"""OpenEnv environments that run as servers, for the workflow `environment`.

    train.workflow = @environment()
    environment.make = @openenv
    openenv.base_url = "http://127.0.0.1:8000"
    openenv.action = "message"             # the model's reply is this field of the action
    train.dataset = @environment_tasks()

Needs the package `openenv` (tried with 0.4.1), whose client speaks to the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import gin

from areal_x.errors import ConfigError, UserError

FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


@gin.configurable
def openenv(
    base_url: str,
    action: str | None = None,
    observation: str | None = None,
    seconds: float = 60.0,
    headers: Mapping[str, str] | None = None,
) -> OpenEnvEnvironment:
    """Connects to an OpenEnv server: one session, which is one episode.

    Args:
        base_url: The server's address.
        action: The field of an action that holds the model's reply. Without it, a reply is a JSON
            object with all fields (`environment.read_action = @openenv_action` reads it).
        observation: The field of an observation that the model is shown; without it, all fields as
            JSON.
        seconds: Longest time of a reset or step.
        headers: Of the connection, such as {"Authorization": "Bearer …"}.

    Raises: UserError if the package is missing, RuntimeError if the server does not answer.
    """
    if not base_url.startswith(("http://", "https://", "ws://", "wss://")):
        raise ConfigError("openenv.base_url", base_url, "an address, as http://127.0.0.1:8000")
    try:
        from openenv.core import GenericEnvClient
    except ImportError:
        raise UserError("openenv needs the package openenv: pip install openenv") from None
    given = {"headers": dict(headers)} if headers else {}  # older versions have none
    client = GenericEnvClient(base_url=base_url, message_timeout_s=seconds, **given).sync()
    try:
        client.connect()
    except Exception as error:  # the client's own, whatever they are
        raise RuntimeError(f"the OpenEnv server at {base_url} does not answer: {error}") from None
    return OpenEnvEnvironment(client, action, observation)


class OpenEnvEnvironment:
    """An OpenEnv session with Gymnasium's `reset` and `step`."""

    def __init__(self, client: Any, action: str | None, observation: str | None) -> None:
        self._client = client
        self._action = action
        self._observation = observation

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode. options: more arguments of the server's reset."""
        given = {} if seed is None else {"seed": seed}
        result = self._client.reset(**given, **(options or {}))
        return self._shown(result.observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes an action: a text for the field `action`, or an object with all fields."""
        if self._action is not None:
            action = {self._action: action}
        result = self._client.step(action)
        shown = self._shown(result.observation)
        return shown, float(result.reward or 0.0), bool(result.done), False, {}

    def close(self) -> None:
        self._client.close()

    def _shown(self, observation: Any) -> Any:
        return observation if self._observation is None else observation[self._observation]


@gin.configurable
def openenv_action(text: str) -> dict[str, Any]:
    """Reads a reply as an action: a JSON object, which may be in a fenced block.

    Raises: ValueError for anything else.
    """
    fenced = FENCED.findall(text)
    try:
        action = json.loads(fenced[-1] if fenced else text)
    except ValueError:
        action = None
    if not isinstance(action, dict):
        raise ValueError("Answer with an action as a JSON object.")
    return action
