"""Workers pull the weights of every model family, whose loaders vLLM's sharded-RDT class has to plan, with an untied and a tied
head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines.families import FAMILIES
from tests.engines.vllm.test_vllm_families import FIRST, reports_of
from tests.thorough import further


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    pytest.importorskip("ray")
    yield from reports_of("tests.engines.pulled_families", request, tmp_path_factory)


@pytest.mark.server
@pytest.mark.xdist_group("vllm-families")
@pytest.mark.parametrize("name", [*FIRST, *further(*(name for name in FAMILIES if name not in FIRST))])
def test_a_family_computes_with_what_its_workers_pulled_and_none_joins_without_a_part(
    name: str, reports: dict[str, Any]
) -> None:
    report = reports[name]
    assert report.get("error") is None
    assert report["before"] < 1e-4
    assert report["after"] < 1e-4
    assert report["unnoticed"] == []
    assert report["again"] < 1e-4
