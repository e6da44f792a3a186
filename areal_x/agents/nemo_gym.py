"""Environments of NeMo Gym that run as servers: their rows as tasks, and an agent that plays one.

    train.dataset = @load_dataset()
    load_dataset.path = "data/train.jsonl"               # rows with `responses_create_params`
    load_dataset.to_task = @nemo_gym_task
    nemo_gym_task.base_url = "http://127.0.0.1:8080"     # of the environment's resources server
    train.workflow = @agent()
    agent.solve = @nemo_gym_agent

The agent does what NeMo Gym's `simple_agent` does with a server of tools, and its `gymnasium_agent` with
one of steps:

    tools   POST /seed_session, then per call of the model POST /NAME, then POST /verify → reward
    steps   POST /reset, then per reply of the model POST /step → observation, reward, the end

The model is reached by OpenAI's responses, at a session of the run's gateway. Needs the package `httpx`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import gin

from areal_x.agents.prompt_text import content_text
from areal_x.engines.fleet.http import trusted
from areal_x.errors import ConfigError, UserError, at_least, positive
from areal_x.types import Message, Task

if TYPE_CHECKING:
    import httpx

ABOUT = "nemo_gym"  # key of a task's metadata
PARAMS = "responses_create_params"
NO_ROOM = "context_length_exceeded"
NOT_THERE = (404, 405)  # a server of steps has no sessions to seed
ERROR_CHARACTERS = 400


@gin.configurable
def nemo_gym_task(
    record: Mapping[str, Any],
    id: str,
    base_url: str,
    headers: Mapping[str, str] | None = None,
    turns: int = 20,
    seconds: float = 60.0,
) -> Task:
    """Makes a task of a row of NeMo Gym, for `load_dataset.to_task` and `agent.solve =
    @nemo_gym_agent`.

    Args:
        record: The row: `responses_create_params` with the prompt and the tools, and what the
            environment's verifier reads.
        id: The task's.
        base_url: Address of the environment's resources server.
        headers: Of the requests to it, such as {"Authorization": "Bearer …"}.
        turns: Most replies of the model; then the conversation so far is scored.
        seconds: Longest time of one request to the server.

    Raises: UserError for a row without `responses_create_params.input`.
    """
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError("nemo_gym_task.base_url", base_url, "an address: http://127.0.0.1:8080")
    at_least("nemo_gym_task.turns", turns, 1)
    positive("nemo_gym_task.seconds", seconds)
    params = record.get(PARAMS)
    given = params.get("input") if isinstance(params, Mapping) else None
    if not isinstance(given, str | list) or not given:
        raise UserError(
            f"task {id!r} has no {PARAMS}.input: a row whose prompt NeMo Gym makes of a template must"
            " be written with its prompt"
        )
    about = {
        "base_url": base_url,
        "headers": dict(headers or {}),
        "turns": turns,
        "seconds": seconds,
    }
    return Task(id, prompt_of(given), metadata={ABOUT: about, "row": dict(record)})


def prompt_of(given: str | Sequence[Mapping[str, Any]]) -> str | list[Message]:
    """Returns the messages among the items of a response's input."""
    if isinstance(given, str):
        return given
    return [
        {"role": item["role"], "content": content_text(item)} for item in given if "role" in item
    ]


@gin.configurable(denylist=["base_url", "api_key"])
async def nemo_gym_agent(task: Task, base_url: str, api_key: str) -> float:
    """Plays a row with its environment's tools or steps, and returns the environment's reward: of
    steps, the sum, each of which is given to the reply that took it.

    A conversation that outgrows the model's context is scored as it is.

    Raises: RuntimeError for a server that does not answer or refuses, and for an episode of which it
    says that its reward is no measurement.
    """
    about, row = task.metadata[ABOUT], task.metadata["row"]
    key = {"Authorization": f"Bearer {api_key}"}
    async with (
        client(about["base_url"], about["headers"], about["seconds"]) as server,
        client(base_url, key, None) as model,
    ):
        conversation = Conversation(model, row[PARAMS])
        seeded = await post(server, "seed_session", row)
        if seeded.status_code in NOT_THERE:
            return await play_steps(server, conversation, row, about["turns"])
        result_of(seeded)
        return await play_with_tools(server, conversation, row, about["turns"])


async def play_with_tools(
    server: httpx.AsyncClient, conversation: Conversation, row: Mapping[str, Any], turns: int
) -> float:
    tools = frozenset(
        tool["name"] for tool in row[PARAMS].get("tools") or [] if tool["type"] == "function"
    )
    for _ in range(turns):
        response = await conversation.reply()
        if response is None or response["incomplete_details"]:
            break
        calls = [item for item in response["output"] if item["type"] == "function_call"]
        if not calls:
            break
        for call in calls:  # one after another, as one may change what the next one finds
            conversation.add_output(call["call_id"], await tool_output(server, call, tools))
    verdict = result_of(await post(server, "verify", {**row, "response": conversation.response()}))
    if verdict.get("mask_sample"):
        reason = verdict.get("failure_reason") or verdict.get("failure_kind") or "no reason given"
        raise RuntimeError(f"the environment could not measure the episode: {reason}")
    return float(verdict["reward"])


async def tool_output(
    server: httpx.AsyncClient, call: Mapping[str, Any], tools: frozenset[str]
) -> str:
    """Returns what the model is shown of a call: what the server answers, an error too. Only tools of
    the row are called, as /verify is a path of the same server."""
    name = call["name"]
    if name not in tools:
        return json.dumps({"error": f"there is no tool {name!r}"})
    try:
        arguments = json.loads(call["arguments"])
    except ValueError as error:
        return json.dumps({"error": f"the arguments are not JSON: {error}"})
    return (await post(server, name, arguments)).text


async def play_steps(
    server: httpx.AsyncClient, conversation: Conversation, row: Mapping[str, Any], turns: int
) -> float:
    begun = result_of(await post(server, "reset", row))
    features = begun.get("info") or {}
    total = 0.0
    try:
        conversation.add_observation(begun.get("observation"))
        for _ in range(turns):
            response = await conversation.reply()
            if response is None:
                break
            once = (
                {"_ng_step_request_id": uuid.uuid4().hex}
                if features.get("supports_step_idempotency") is True
                else {}
            )
            step = result_of(await post(server, "step", {**row, "response": response, **once}))
            reward = float(step.get("reward") or 0.0)
            total += reward
            await conversation.give(reward)
            if step.get("terminated") or step.get("truncated"):
                break
            for output in (step.get("info") or {}).get("tool_outputs", []):
                conversation.add_output(output["call_id"], output["output"])
            conversation.add_observation(step.get("observation"))
    finally:
        if features.get("supports_explicit_close") is True:
            with suppress(RuntimeError):  # the episode's own end counts
                await post(server, "close", {})
    return total


class Conversation:
    """The items of one conversation by OpenAI's responses. params: of each request."""

    def __init__(self, model: httpx.AsyncClient, params: Mapping[str, Any]) -> None:
        self._model = model
        given = params["input"]
        self._input = [{"role": "user", "content": given}] if isinstance(given, str) else given
        self._params = {**params, "model": "policy", "stream": False, "store": False}
        self._items: list[dict[str, Any]] = []  # since the input
        self._last: dict[str, Any] | None = None

    async def reply(self) -> dict[str, Any] | None:
        """Returns the model's next response; None if the conversation has no room for one."""
        answer = await post(
            self._model, "responses", {**self._params, "input": [*self._input, *self._items]}
        )
        full = answer.status_code == 400 and answer.json()["error"]["code"] == NO_ROOM
        if full and self._last is not None:
            return None
        self._last = result_of(answer)
        self._items += self._last["output"]
        return self._last

    async def give(self, reward: float) -> None:
        """Gives a reward to the last reply."""
        if reward:
            result_of(await post(self._model, "reward", {"reward": reward}))

    def add_output(self, call: str, output: str) -> None:
        self._items.append({"type": "function_call_output", "call_id": call, "output": output})

    def add_observation(self, text: str | None) -> None:
        if text:
            self._items.append({"role": "user", "content": text})

    def response(self) -> dict[str, Any]:
        """Returns the whole conversation since the input as one response."""
        assert self._last is not None, "there is no reply yet"
        return {**self._last, "output": self._items, "usage": None}


def client(url: str, headers: Mapping[str, str], seconds: float | None) -> httpx.AsyncClient:
    """Opens connections to one server, whose cookies are kept. Raises: UserError without httpx."""
    try:
        import httpx
    except ImportError:
        raise UserError("nemo_gym_agent needs the package httpx: pip install httpx") from None
    return httpx.AsyncClient(base_url=url, headers=dict(headers), timeout=seconds, verify=trusted())


async def post(server: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    """Raises: RuntimeError if there is no answer."""
    import httpx

    try:
        return await server.post(path, json=body)
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise RuntimeError(f"{server.base_url.join(path)} gives no answer: {reason}") from None


def result_of(answer: httpx.Response) -> dict[str, Any]:
    """Returns an answer's object. Raises: RuntimeError for an answer that is none."""
    with suppress(ValueError):
        if answer.status_code == 200 and isinstance(result := answer.json(), dict):
            return result
    words = " ".join(answer.text.split())[:ERROR_CHARACTERS]
    raise RuntimeError(f"{answer.url} answers with {answer.status_code}: {words}")
