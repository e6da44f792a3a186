"""Families whose layers vLLM computes on a CPU in bfloat16 alone go through a swap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.half_families import AS_TRANSFORMERS, HALF_FAMILIES
from tests.engines.vllm.test_vllm_families import printed
from tests.thorough import further, run_values

FIRST = ("deepseek_v3",)  # latent attention, with a router whose choice is corrected
# Of what kernels read in a form of their own, nothing can be proved.
OWN_FORMS = {"conv1d.weight", "kv_b_proj.weight"}


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    asked = run_values(request, "name")
    yield from printed(["tests.engines.half_families", *(x for x in HALF_FAMILIES if x in asked)], tmp_path_factory)


@pytest.mark.server
@pytest.mark.xdist_group("vllm-families")
@pytest.mark.parametrize("name", [*FIRST, *further(*(name for name in HALF_FAMILIES if name not in FIRST))])
def test_after_a_swap_a_family_says_what_an_engine_does_that_began_with_the_new_weights(
    name: str, reports: dict[str, Any]
) -> None:
    report = reports[name]
    assert report.get("error") is None
    assert report["after"] == report["again"] == 0 < 1 < report["changed"]
    assert report["unnoticed"] == report["proof"]["differences"] == []
    assert {name.split(".", 4)[4] for name in report["proof"]["unproved"]} <= OWN_FORMS
    if name in AS_TRANSFORMERS:
        assert report["before"] < 3
