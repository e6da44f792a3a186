"""What a job does on each of its nodes before Ray or the run starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from areal_x.cluster.node import address_towards, main, nodes_of, wait_for_nodes, without_task
from areal_x.cluster.rank import Rank
from areal_x.cluster.ray_job import check_runs
from areal_x.errors import ConfigError, UserError
from tests.launching import free_port


def test_a_command_has_no_variables_of_a_task() -> None:
    task = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "PMI_RANK": "3", "PMIX_NAMESPACE": "x", "OMPI_COMM_WORLD_RANK": "3"}
    kept = {"SLURM_JOB_ID": "7", "PATH": "/bin", "RAY_ADDRESS": "a:1", "NCCL_DEBUG": "INFO"}
    assert without_task(task | kept) == kept


def test_the_process_becomes_the_command() -> None:
    show = "import os; print(os.getpid(), os.environ.get('SLURM_PROCID'))"
    words = [sys.executable, "-m", "areal_x.cluster.node", "after", "0", sys.executable, "-c", show]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"SLURM_PROCID": "3"}) as process:
        said, _ = process.communicate(timeout=100)
    assert said == f"{process.pid} None\n"


def test_a_cluster_that_does_not_come_is_one_sentence() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert nodes_of(address) == 0
    with pytest.raises(UserError, match=rf"^0 of 2 nodes are in the Ray cluster at {address} after 0 s: "):
        wait_for_nodes(address, 2, seconds=0)


def test_a_node_without_a_network_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for name, sentence in (
        ("localhost", "error: no network of this node leads to the node localhost: "),
        ("no-such-host.invalid", "error: the node no-such-host.invalid has no address here ("),
    ):
        assert main(["address", name]) == 1
        assert capsys.readouterr().err.startswith(sentence)


def test_the_address_is_not_that_of_the_nodes_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """For another node on a network of this machine, if it has one: an address that is routed there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("no route")
        expected = probe.getsockname()[0]
    assert address_towards("192.0.2.1") == expected


def test_ranks_meet_at_a_port_that_no_outgoing_connection_takes() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    for address in ("127.0.0.1", "::1"):
        found, port = Rank(None, 0).meeting_place(address)  # type: ignore[arg-type]
        assert found == address
        assert not first <= port <= last
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as server:
            server.bind((address, port))


def test_a_command_line_that_is_not_understood_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["after", "all", "true"]) == 2
    assert "areal_x.cluster.node after COUNT COMMAND" in capsys.readouterr().err


def test_relative_runs_are_refused_in_a_copy_of_the_working_directory() -> None:
    copy = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1")
    with pytest.raises(ConfigError, match=r"^train\.runs = 'runs' cannot work: it must be an absolute path on all nodes"):
        check_runs(Path("runs"), copy)
    check_runs(Path("/shared/runs"), copy)
    check_runs(Path("runs"), Path("/home/me"))
