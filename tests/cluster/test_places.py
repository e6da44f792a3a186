"""What a server needs of its node, and that its keeper ends with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import psutil
import pytest

from areal_x.cluster import places
from areal_x.cluster.config import ClusterConfig
from areal_x.cluster.gang import Room
from areal_x.cluster.places import server_room
from areal_x.cluster.room import check_room
from areal_x.errors import ConfigError, UserError

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


THERE = [{"CPU": 8.0}, {"CPU": 8.0, "GPU": 8.0}, {"CPU": 8.0, "GPU": 8.0}]


@pytest.mark.parametrize(("hosts", "fits"), [(1, True), (2, True), (3, False)])
def test_a_server_on_several_nodes_needs_room_on_as_many(hosts, fits, monkeypatch):
    monkeypatch.setattr("areal_x.cluster.room.nodes", lambda labels: THERE)
    room = server_room(ClusterConfig(), width=8, there=THERE)
    if fits:
        check_room(room, "cluster.server_accelerators", "cluster.server_cpus", hosts)
    else:
        with pytest.raises(UserError, match=r"a server on 3 nodes needs .* lower vllm\.hosts"):
            check_room(room, "cluster.server_accelerators", "cluster.server_cpus", hosts)


def test_a_call_for_room_that_is_cancelled_leaves_no_placement_group(monkeypatch):
    groups = pytest.importorskip("ray.util.placement_group")
    asked, goes_on, removed = threading.Event(), threading.Event(), threading.Event()

    def reserve(room, hosts):
        asked.set()
        assert goes_on.wait(60)
        return "the group"

    monkeypatch.setattr(places, "reserve", reserve)
    monkeypatch.setattr(groups, "remove_placement_group", lambda group: group == "the group" and removed.set())

    async def cancelled():
        calling = asyncio.ensure_future(places.reserved(Room(), 1))
        await asyncio.to_thread(asked.wait, 60)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert not removed.is_set()
        goes_on.set()
        while not removed.is_set():
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(cancelled(), 60))


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
