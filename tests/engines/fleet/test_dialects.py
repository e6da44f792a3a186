"""The room of fleets knows no program that serves; each program's room knows the fleet, and no other program's."""

from __future__ import annotations

import pytest

from tests.imports import arrows

FLEET, VLLM, SGLANG = (f"areal_x.engines.{room}" for room in ("fleet", "vllm", "sglang"))


def lies_in(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


@pytest.mark.parametrize(("room", "others"), [(FLEET, (VLLM, SGLANG)), (VLLM, (SGLANG,)), (SGLANG, (VLLM,))])
def test_a_room_imports_no_other_programs_room(room: str, others: tuple[str, ...]) -> None:
    own = [(one, other) for one, other in arrows() if lies_in(one, room)]
    assert own
    assert [(one, other) for one, other in own if any(lies_in(other, far) for far in others)] == []
