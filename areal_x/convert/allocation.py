"""AReaL's allocation: which servers generate on how many accelerators, and how the trainer is
divided.

    sglang:d4p1t1+d4p1t1            vllm.d4t2+fsdp:d8            d8 (training only)
    sglang[rollout]:d8|fsdp[actor]:d8 (both on the same accelerators)
    vllm:d2t4+megatron:(attn:d4p2t2c1|ffn:d2p2t2e2)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from areal_x.errors import UserError

PROGRAMS = ("sglang", "vllm")
SIZES = re.compile(r"([dptce])(\d+)")
PART = re.compile(r"(?:([a-z]+)(?:\[\w+\])?[:.])?((?:[dptce]\d+)+)")
HYBRID = re.compile(r"([a-z]+)(?:\[\w+\])?[:.]\(attn:([dptce\d]+)\|ffn:([dptce\d]+)\)")


@dataclass(frozen=True)
class Allocation:
    """Sizes by AReaL's letters: d data, p pipeline, t tensor, c context, e expert."""

    program: str | None
    """"sglang" or "vllm"; None if nothing generates."""

    generation: dict[str, int]

    training: dict[str, int]

    shared: bool
    """True if both use the same accelerators."""

    @property
    def processes(self) -> int:
        """The accelerators that train."""
        sizes = self.training
        return sizes.get("d", 1) * sizes.get("p", 1) * sizes.get("t", 1) * sizes.get("c", 1)


def parse_allocation(text: str, field: str = "allocation_mode") -> Allocation:
    """Raises: UserError for a form that is none of the above."""
    plain = text.replace(" ", "")
    if hybrid := HYBRID.search(plain):
        # Experts are divided among the processes that attention is: e counts among them.
        experts = _sizes(hybrid[3]).get("e", 1)
        plain = plain.replace(hybrid[0], f"{hybrid[1]}:{hybrid[2]}e{experts}")
    shared = "|" in plain
    parts = [PART.fullmatch(part) for part in re.split(r"[+|]", plain)]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or not 1 <= len(found) <= 2:
        raise UserError(
            f"{field} = {text!r} is of an unknown form: write it as in 'sglang:d4t1p1+fsdp:d4'"
        )
    servers = [part for part in found if part[1] in PROGRAMS]
    trainers = [part for part in found if part[1] not in PROGRAMS]
    if len(servers) > 1 or len(trainers) > 1:
        raise UserError(f"{field} = {text!r} has more than one server program or trainer")
    return Allocation(
        program=servers[0][1] if servers else None,
        generation=_sizes(servers[0][2]) if servers else {},
        training=_sizes(trainers[0][2]) if trainers else {},
        shared=shared,
    )


def _sizes(text: str) -> dict[str, int]:
    return {letter: int(number) for letter, number in SIZES.findall(text)}
