"""Faults of weights that were published as bugs of other systems: a proof in full finds each at the publication in which it
comes, and raises no alarm without it. In real workers of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines import two_workers
from tests.engines.adapter_faults import FAULTS as ADAPTER_FAULTS
from tests.engines.adapter_faults import Fault as AdapterFault
from tests.engines.vllm.test_vllm_families import printed
from tests.engines.weight_faults import FAULTS, Fault
from tests.thorough import thorough

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("weight-faults")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    yield from printed(["tests.engines.weight_faults"], tmp_path_factory)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name}: {fault.like}")
def test_a_fault_is_found_and_named(fault: Fault, reports: dict[str, Any]) -> None:
    report = reports[fault.name]
    assert report["full"], fault.like
    assert report["sample"] or fault.few, fault.like
    assert report["false"] == []
    if fault.names is not None:
        assert {words.split()[0] for words in report["full"]} == set(fault.names)


@pytest.fixture(scope="module")
def adapter_reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    yield from printed(["tests.engines.adapter_faults"], tmp_path_factory)


@pytest.mark.parametrize("fault", ADAPTER_FAULTS, ids=lambda fault: f"{fault.name}: {fault.like}")
def test_a_fault_of_an_adapter_is_found(fault: AdapterFault, adapter_reports: dict[str, Any]) -> None:
    report = adapter_reports[fault.name]
    assert report["full"], fault.like
    assert report["sample"], fault.like
    assert report["false"] == []


@pytest.fixture(scope="module")
def reports_of_two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    yield from printed(["tests.engines.two_workers"], tmp_path_factory)


@thorough
@pytest.mark.parametrize("name", two_workers.FAULTS)
def test_a_fault_of_one_of_two_workers_is_found(name: str, reports_of_two: dict[str, Any]) -> None:
    report, (_, named) = reports_of_two[name], two_workers.FAULTS[name]
    assert report["false"] == []
    for kind in ("full", "sample"):
        found = {words.split()[0] for words in report[kind]}
        assert len(found) == report["tensors"] if named is None else found == set(named)


def test_there_are_more_than_thirty_and_each_is_another() -> None:
    names = [fault.name for fault in (*FAULTS, *ADAPTER_FAULTS)]
    assert len(set(names)) == len(names) > 40
