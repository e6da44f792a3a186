"""docs/models.md claims what a test proves, and nothing else."""

from __future__ import annotations

from importlib import import_module
from itertools import product

import pytest

from tests.model_families import COLUMNS, PROOFS, SERVED, TITLES, is_proven


def cases_of(test: str) -> set[str]:
    """Returns the values of a test function's first parameter, in the cases of `make thorough` too."""
    file, _, function = test.partition("::")
    marks = getattr(import_module(file.removesuffix(".py").replace("/", ".")), function).pytestmark
    values = [value for mark in marks if mark.name == "parametrize" for value in mark.args[1]]
    plain = [value.values if hasattr(value, "values") else value for value in values]
    return {str(value[0] if isinstance(value, tuple) else value) for value in plain}


@pytest.mark.parametrize(("backend", "column"), PROOFS)
def test_each_cell_of_the_page_of_models_has_a_case_of_a_test(backend: str, column: str) -> None:
    for test, cases in PROOFS[backend, column].items():
        assert set(cases.values()) <= cases_of(test), test
        assert cases.keys() <= TITLES.keys()


@pytest.mark.parametrize("engine", SERVED)
def test_each_family_that_an_engine_serves_has_a_case_of_a_test(engine: str) -> None:
    for test, cases in SERVED[engine].items():
        file, _, function = test.partition("::")
        marks = getattr(import_module(file.removesuffix(".py").replace("/", ".")), function).pytestmark
        (values,) = (mark.args[1] for mark in marks if mark.name == "parametrize" and mark.args[0] in ("name", "family"))
        assert set(cases.values()) <= {value.values[0] if hasattr(value, "values") else value for value in values}
        assert cases.keys() <= TITLES.keys()


def test_each_column_has_a_proof_for_either_backend_and_each_family_a_title() -> None:
    assert PROOFS.keys() == set(product(("JAX", "torch"), COLUMNS))
    from areal_x_jax.families import FAMILIES

    of_jax = {family.model_type for family in FAMILIES.values()}
    assert of_jax <= TITLES.keys()
    assert all(is_proven(family, "torch", "full") for family in TITLES.keys() - of_jax)
