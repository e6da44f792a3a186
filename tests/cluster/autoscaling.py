"""A cluster whose nodes Ray's autoscaler starts and stops, as processes of this machine by Ray's fake provider of nodes.

`ray.cluster_utils.AutoscalingCluster` ends every Ray of the machine when it begins; this ends its own processes only, which it
knows by the folder that is on their command lines.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.cluster.cluster import ENVIRONMENT

HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"  # the fake provider's


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def config(address: str, most: int, cpus: int, idle_seconds: float, role: str) -> dict[str, object]:
    phases = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        **{f"{phase}_commands": [] for phase in phases},
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "cluster_name": "fake",
        "max_workers": most,
        "idle_timeout_minutes": idle_seconds / 60,
        "provider": {
            "type": "external",  # the wheel lacks the defaults of the type "fake_multinode"
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "launch_multiple": True,
            "disable_node_updaters": True,
            "head_node_id": HEAD_ID,
            "gcs_address": address,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
            "server": {
                "resources": {"CPU": cpus, "object_store_memory": 100 << 20},
                "labels": {"role": role},
                "node_config": {},
                "min_workers": 0,
                "max_workers": most,
            },
        },
        "head_node_type": "ray.head.default",
    }


@contextmanager
def autoscaling_cluster(most: int, cpus: int = 2, idle_seconds: float = 3.0, role: str = "other") -> Iterator[dict[str, str]]:
    """Yields the environment of a driver. The cluster begins with its head alone, and has at most so many other nodes."""
    host = subprocess.check_output(
        [sys.executable, "-c", "import ray; print(ray.util.get_node_ip_address())"], text=True, env=os.environ | ENVIRONMENT
    ).split()[-1]
    address = f"{host}:{free_port()}"
    folder = Path(tempfile.gettempdir(), f"ray-{secrets.token_hex(4)}")  # short: a socket's path has 107 characters
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(address, most, cpus, idle_seconds, role)))
    words = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port", address.rpartition(":")[2]]
    words += ["--autoscaling-config", str(folder / "config.json"), "--temp-dir", str(folder), "--num-cpus", "1"]
    words += [
        "--object-store-memory",
        str(100 << 20),
        "--include-dashboard",
        "false",
        "--ray-client-server-port",
        str(free_port()),
    ]
    words += ["--node-ip-address", host, "--dashboard-agent-listen-port", "0"]
    version_2 = {"RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": HEAD_ID, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID}
    fake = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1", "RAY_TMPDIR": str(folder)}
    with (folder / "out").open("w") as out:
        head = subprocess.Popen(words, env=os.environ | ENVIRONMENT | version_2 | fake, stdout=out, stderr=out)
    try:
        until = time.monotonic() + 60
        while "Ray runtime started" not in (folder / "out").read_text():
            assert head.poll() is None, (folder / "out").read_text()
            assert time.monotonic() < until, (folder / "out").read_text()
            time.sleep(0.1)
        yield {"RAY_ADDRESS": address, **ENVIRONMENT}
    finally:
        head.terminate()
        with suppress(subprocess.TimeoutExpired):
            head.wait(timeout=20)
        end_processes(folder)
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def end_processes(folder: Path) -> None:
    """Kills what has the folder on its command line, and what that started."""
    while True:
        left = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if any(str(folder) in word for word in process.cmdline()) and process.pid != os.getpid():
                    left += [process, *process.children(recursive=True)]
        if not left:
            return
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=10)
