"""Two of NeMo Gym's example environments by the protocol of its servers: a counter with tools, and questions in turn."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tests.agents.json_server import Asked, Route


def tools() -> dict[str, Route]:
    """A counter for each session. Not as NeMo Gym's: a row with `lost` cannot be measured."""
    counters: dict[str, int] = defaultdict(int)

    def seed(asked: Asked) -> tuple[int, Any]:
        counters[asked.session] = asked.body["initial_count"]
        return 200, {}

    def increment(asked: Asked) -> tuple[int, Any]:
        if not isinstance(asked.body.get("count"), int):
            return 422, {"detail": [{"loc": ["body", "count"], "msg": "Input should be a valid integer"}]}
        counters[asked.session] += asked.body["count"]
        return 200, {"success": True}

    def value(asked: Asked) -> tuple[int, Any]:
        return 200, {"count": counters[asked.session]}

    def verify(asked: Asked) -> tuple[int, Any]:
        body = asked.body
        assert body["response"]["object"] == "response"
        reward = float(counters.get(asked.session) == body["expected_count"])
        lost = body.get("lost")
        return 200, {**body, "reward": reward, "mask_sample": lost is not None, "failure_reason": lost}

    return {"/seed_session": seed, "/increment_counter": increment, "/get_counter_value": value, "/verify": verify}


def steps() -> dict[str, Route]:
    """Asks the row's follow_ups, and looks for its expected_answer in the last reply."""
    turns: dict[str, int] = {}

    def reset(asked: Asked) -> tuple[int, Any]:
        turns[asked.session] = 0
        return 200, {"observation": None, "info": {}}

    def step(asked: Asked) -> tuple[int, Any]:
        body, turn = asked.body, turns[asked.session]
        nothing = {"observation": None, "reward": 0.0, "terminated": False, "truncated": False, "info": {}}
        if turn < len(body["follow_ups"]):
            turns[asked.session] = turn + 1
            return 200, {**nothing, "observation": body["follow_ups"][turn]}
        said = "".join(part["text"] for item in body["response"]["output"] for part in item["content"])
        reward = float(body["expected_answer"].lower() in said.lower())
        return 200, {**nothing, "reward": reward, "terminated": True}

    return {"/reset": reset, "/step": step}
