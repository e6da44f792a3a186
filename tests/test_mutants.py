"""That every planted bug (tests/mutants) can still be planted; `make mutants` runs the tests that must see them."""

from __future__ import annotations

import pytest

from tests.mutants.all import MUTANTS
from tests.mutants.mutant import ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.bug for mutant in MUTANTS])
def test_each_bug_has_its_place_in_the_code_and_its_tests_are_there(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert mutant.applied(text) != text
    compile(mutant.applied(text), mutant.file, "exec")
    assert [test for test in mutant.tests if not (ROOT / test.partition("::")[0]).is_file()] == []


def test_there_are_at_least_a_hundred_different_ones() -> None:
    assert len({mutant.bug for mutant in MUTANTS}) == len(MUTANTS) >= 100
