"""Seeds of requests on a CPU, whose generators vLLM takes back after samples that it discards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from areal_x.engines.vllm.cpu_seeds import correct


def test_what_is_discarded_takes_no_random_numbers_and_what_was_drawn_before_is_not_repeated() -> None:
    torch = pytest.importorskip("torch")

    class Batch:
        def add_request(self, request: Any) -> None:
            self.request = request

    correct(Batch)
    correct(Batch)  # once
    batch, alone = Batch(), torch.Generator().manual_seed(7)
    request = SimpleNamespace(generator=torch.Generator().manual_seed(7))
    plain = SimpleNamespace(generator=None)
    batch.add_request(plain)
    assert plain.generator is None

    def draw(generator: Any) -> int:
        return int(torch.randint(0, 2**31, (1,), generator=generator))

    expected = [draw(alone) for _ in range(6)]
    found = []
    for kept in range(3):  # preempted twice
        batch.add_request(request)
        for _ in range(kept):  # parts of its prompt
            draw(request.generator)
            request.generator.set_offset(request.generator.get_offset() - 4)
        found += [draw(request.generator) for _ in range(2)]
    assert found == expected
