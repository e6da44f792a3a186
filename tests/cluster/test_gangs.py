"""Gangs of two processes on a cluster: their calls, and how their failures are reported."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.conftest import environment_with
from tests.thorough import run_values

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(300)]

EXPECTED = {
    # The first's result; all results, of a batch that went through the object store; a stream; another process; one thread.
    "works": r"\(3, \[100000, 100010\]\) \[0, 1, 2, 3, 4\] True True",
    "first gone while idle": r"Lost: rank 0 is gone: .+",
    "second gone while idle": r"Lost: rank 1 is gone: .+",
    "second raises": r"Lost: rank 1 failed: ArithmeticError: too many numbers",
    "first raises": r"Lost: rank 0 failed: ArithmeticError: too many numbers",
    "second refuses": r"UserError: too many numbers",
    "all refuse": r"UserError: rank [01] refuses",
    "second ends": r"Lost: rank 1 is gone: .+",
    "first ends": r"Lost: rank 0 is gone: .+",
    "second raises alone": r"Lost: rank 1 failed: ArithmeticError: too many numbers",
    "second computes": "0 1 True",
    "beside": r"Lost: rank 1 is gone: .+",
    "another version": r"the node [\d.]+ has areal-x [\d.]+, the driver 0\.0: install the same version on all nodes",
    "no folder": r"UserError: the node \S+ cannot write to /proc/nowhere \(.*\): train\.runs must be a folder .*",
    "larger than the store": r"\['returned \[40000000, 40000010\]', 'returned \[100000, 100010\]'\] UserError: a batch of"
    r" 2 MB does not fit into Ray's object store on this node, nor on its disk: raise ray start --object-store-memory, .+",
}


QUICK = ("works", "second gone while idle", "another version", "no folder", "second raises alone", "second computes")
CASES = [case if case in QUICK else pytest.param(case, marks=pytest.mark.cluster) for case in EXPECTED]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, ray: Cluster) -> dict[str, str]:
    """The line of each case that this session runs."""
    command = [sys.executable, "-m", "tests.cluster.gangs", *run_values(request, "case")]
    environment = environment_with(1, **ray.environment)
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


@pytest.mark.parametrize("case", CASES)
def test_a_gang_calls_all_and_names_who_fails(case: str, found: dict[str, str]) -> None:
    assert re.fullmatch(EXPECTED[case], found[case])
