"""Every planted bug."""

from __future__ import annotations

from tests.mutants import of_algorithms, of_ends, of_runs, of_trainers

MUTANTS = [*of_algorithms.MUTANTS, *of_trainers.MUTANTS, *of_runs.MUTANTS, *of_ends.MUTANTS]
