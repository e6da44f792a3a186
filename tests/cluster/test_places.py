"""What a server needs of its node, and that its keeper ends with it."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from areal_x.cluster.config import ClusterConfig
from areal_x.cluster.places import server_room
from areal_x.errors import ConfigError

GPUS, CPUS = [{"CPU": 8.0}, {"CPU": 8.0, "GPU": 8.0}], [{"CPU": 8.0}]


@pytest.mark.parametrize(
    ("given", "there", "count"), [(None, GPUS, 4), (None, CPUS, 0), (2, GPUS, 2), (0, GPUS, 0), (1, CPUS, 1)]
)
def test_a_server_gets_the_accelerators_that_it_computes_on_unless_a_number_is_set(given, there, count):
    room = server_room(ClusterConfig(server_accelerators=given, server_cpus=3.0), width=4, there=there)
    assert (room.accelerators, room.cpus, room.labels) == (count, 3.0, {})
    assert room.bundle() == ({"CPU": 3.0, "GPU": count} if count else {"CPU": 3.0})


def test_a_server_is_placed_on_the_nodes_of_its_role():
    config = ClusterConfig(servers_on="serve", ranks_on="train", resource="NPU")
    room = server_room(config, width=1, there=[{"NPU": 2.0}])
    assert (room.labels, room.bundle()) == ({"role": "serve"}, {"CPU": 1.0, "NPU": 1.0})


@pytest.mark.parametrize(("setting", "value"), [("server_accelerators", -1), ("server_cpus", 0.0)])
def test_settings_that_cannot_work_are_refused(setting, value):
    with pytest.raises(ConfigError, match=rf"cluster\.{setting}"):
        ClusterConfig(**{setting: value})


WORKER = """
import time
from areal_x.cluster.places import made
assert made(lambda: "the object", 0) == "the object"
print("made", flush=True)
time.sleep(600)
"""
RAYLET = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
assert worker.stdout.readline() == "made\\n"
print(worker.pid, flush=True)
worker.wait()
"""


def test_a_keepers_process_ends_with_its_raylet() -> None:
    words = [sys.executable, "-c", RAYLET, WORKER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as raylet:
        assert raylet.stdout is not None
        worker = psutil.Process(int(raylet.stdout.readline()))
        raylet.kill()
        assert psutil.wait_procs([worker], timeout=30)[1] == []
