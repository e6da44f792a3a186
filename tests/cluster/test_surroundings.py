"""What a process of a gang takes over from the driver."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from areal_x.cluster.surroundings import THREADS, Surroundings, surroundings
from areal_x.errors import UserError
from areal_x.runtime import cores
from areal_x.runtime.shared_folder import marked

ENTER = """
import os, pickle, sys
from pathlib import Path
given = pickle.loads(bytes.fromhex(sys.argv[1]))
given.enter("rank-3")
print(os.getcwd(), "/elsewhere" in sys.path, os.environ.get("NCCL_DEBUG"), os.environ.get("OMP_NUM_THREADS"))
"""


def entered(given: Surroundings) -> None:
    variables = {**os.environ, THREADS: "1"} | {"NCCL_DEBUG": "the node's"}
    subprocess.run([sys.executable, "-c", ENTER, pickle.dumps(given).hex()], env=variables, check=True)


def test_a_process_takes_over_folder_imports_and_variables_and_writes_a_log(tmp_path: Path) -> None:
    entered(Surroundings(tmp_path, ("/elsewhere",), {"NCCL_DEBUG": "INFO"}, tmp_path))
    assert (tmp_path / "rank-3.log").read_text().split() == [str(tmp_path), "True", "INFO", "None"]


def test_only_what_libraries_read_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (THREADS, "XLA_FLAGS", cores.VARIABLE, "VLLM_API_KEY"):
        monkeypatch.setenv(name, "2")
    found = surroundings(None).environment
    assert {found[name] for name in (THREADS, "XLA_FLAGS", cores.VARIABLE)} == {"2"}
    assert "VLLM_API_KEY" not in found


def test_a_node_with_another_folder_at_the_same_path_is_refused(tmp_path: Path) -> None:
    """It has the folder of an earlier run, say, which it alone sees."""
    with marked(tmp_path) as mark:
        entered(Surroundings(tmp_path, (), {}, tmp_path, mark))  # the driver's own
        elsewhere = Surroundings(tmp_path, (), {}, tmp_path, tmp_path / "of the driver")
        sentence = rf"^the node \S+ has another folder {tmp_path} than the driver: train\.runs must be a folder that all"
        with pytest.raises(UserError, match=sentence):
            elsewhere.enter("rank-1")
    assert [file.name for file in tmp_path.iterdir()] == ["rank-3.log"]


def test_a_node_without_the_runs_folder_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)  # a process that enters its surroundings stays there
    with pytest.raises(UserError, match=r"cannot write to .*gone .*train\.runs must be a folder that all nodes share"):
        Surroundings(tmp_path, (), {THREADS: os.environ.get(THREADS, "1")}, tmp_path / "gone").enter("rank-0")
