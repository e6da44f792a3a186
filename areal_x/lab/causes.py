"""Names the first cause of a slow step, and the setting to change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LABELS = {
    "trainer": "trainer",
    "rewards": "rewards",
    "generation": "generation",
    "environment": "environment and tools",
    "weights": "new weights",
    "evaluation": "evaluations",
    "checkpoint": "checkpoints",
    "turns": "turns of trainer and servers",
    "idle": "nothing in flight",
    "other": "other",
    "rollout": "waits for groups",
}
# What each part is, for "… % of a step: …".
WHAT = {
    "trainer": "the trainer computes",
    "generation": "the trainer waits for answers to be generated",
    "rewards": "the trainer waits for rewards",
    "environment": "the trainer waits for the workflow's own code: its environment and tools",
    "weights": "new weights are published",
    "evaluation": "the trainer waits for evaluations",
    "checkpoint": "checkpoints are written",
    "turns": "trainer and servers pass the accelerators to each other",
    "idle": "the trainer waits, and no episode is in flight",
    "other": "nothing of the run is timed: code between its steps, trackers, a notebook",
    "rollout": "the trainer waits for groups",
}
ALTERNATES = 0.3  # of a step, in which each side waits for the other
SLOTS = {"embedded": "embedded.slots", "vllm": "vllm.servers", "sglang": "sglang.servers"}


@dataclass(frozen=True)
class Cause:
    """Why a step takes as long as it does."""

    part: str
    """In areal_x.lab.time_parts.PARTS, "rollout", or "alternation": trainer and rollout take
    turns."""

    share: float
    """Of a step's time."""

    sentence: str
    """What takes the time, and which setting changes it."""


def first_cause(shares: Mapping[str, float], settings: Mapping[str, Any]) -> Cause | None:
    """Returns the cause that would save most. shares: of a step's time, by part. settings: of the
    run, by name.

    It is the largest part, unless the trainer and the rollout each take a large share while the
    other waits, and the settings forbid them to work at the same time.
    """
    if not shares or max(shares.values()) <= 0:
        return None
    waits = sum(shares.get(x, 0.0) for x in ("generation", "rewards", "environment", "rollout"))
    overlap = min(waits, shares.get("trainer", 0.0))
    alternates = (
        settings.get("train.max_staleness") == 0
        and not settings.get("train.colocate")
        and settings.get("train.engine") != "none"
    )
    if alternates and overlap >= ALTERNATES:
        what = "of a step each of trainer and rollout waits for the other"
        return Cause(
            "alternation",
            overlap,
            f"At least {overlap:.0%} {what}: set train.max_staleness = 1, so that both work at the"
            " same time.",
        )
    part = max(shares, key=lambda name: shares[name])
    what = f"{shares[part]:.0%} of a step: {WHAT[part]}"
    return Cause(part, shares[part], f"{what}; {advice(part, settings)}.")


def advice(part: str, settings: Mapping[str, Any]) -> str:
    """Returns what to change, with the setting's name."""
    engine = str(settings.get("train.engine", "embedded"))
    slots = SLOTS.get(engine, SLOTS["embedded"])
    workflow = str(settings.get("train.workflow", "@single_turn()")).lstrip("@").removesuffix("()")
    match part:
        case "trainer":
            if not settings.get("train.share_prompts") and settings.get("train.group_size", 8) > 1:
                more = ", or train.share_prompts = True where prompts are long"
            else:
                more = ""
            return f"more devices (mesh.fsdp) make it faster{more}"
        case "generation":
            return (
                f"raise {_now(slots, settings)} if answers wait for a place, or lower"
                f" {_now('sampling.max_tokens', settings)} if a few long ones are the last"
            )
        case "rewards":
            workers = f"{workflow}.reward_workers"
            if f"{workflow}.reward" not in settings and workers not in settings:
                return f"make what {workflow} scores with faster"
            return f"raise {_now(workers, settings)} up to the cores there are, or make the reward faster"
        case "environment":
            return (
                f"make it faster, or raise {_now('train.max_staleness', settings)}, so that more"
                " episodes are in flight while the trainer computes"
            )
        case "weights":
            if engine in ("vllm", "sglang"):
                return (
                    f"see {_now(f'{engine}.transport', settings)}, or publish less often: raise"
                    f" {_now('train.groups_per_step', settings)}"
                )
            return f"publish less often: raise {_now('train.groups_per_step', settings)}"
        case "evaluation":
            return f"raise {_now('train.evaluate_every', settings)}, or hold out fewer tasks"
        case "checkpoint":
            return f"raise {_now('train.checkpoint_every', settings)}"
        case "turns":
            return (
                "with accelerators for both sides set train.colocate = False, else raise"
                f" {_now('train.groups_per_step', settings)}"
            )
        case "idle":
            return f"raise {_now('train.max_staleness', settings)}, which bounds what is in flight"
        case "other":
            return f"look at {_now('train.loggers', settings)} and at what runs between steps"
        case _:
            return (
                "what they wait for is known once timeline.json is written, seconds after the start"
            )


def _now(name: str, settings: Mapping[str, Any]) -> str:
    value = settings.get(name)
    plain = isinstance(value, int | float | str | tuple) and not str(value).startswith("@")
    return f"{name} (now {value!r})" if plain else name
