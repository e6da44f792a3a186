"""More requests in flight than this process may have files open: they wait for each other, and no server is lost for it."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_x.engines.vllm.config import VLLMConfig
from areal_x.preflight import servers
from areal_x.runtime import open_files

ROOT = Path(__file__).parents[2]
LIMIT = 128

# A server in its own process, whose limit is not the client's: answers `generate` once as many requests wait as it was told.
SERVER = """
import asyncio, resource, sys
from aiohttp import web

resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
waiting, least = 0, int(sys.argv[1])
enough = asyncio.Event()

async def answer(request):
    global waiting
    if request.path == "/most":
        return web.json_response(waiting)
    if request.path != "/inference/v1/generate":
        return web.json_response({})
    body = await request.json()
    waiting += 1
    if waiting >= least:
        enough.set()
    await enough.wait()
    versions = [{"version": "0", "start": 0, "end": 1}]
    logprobs = {"content": [{"logprob": -1.0}]}
    choice = {"token_ids": [3], "finish_reason": "length", "weight_versions": versions, "logprobs": logprobs}
    return web.json_response({"choices": [choice]})

async def main():
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(main())
"""

# The client's process: so many files, so many requests at a time; and whether all files are taken at first.
CLIENT = """
import asyncio, contextlib, json, os, resource, sys
import numpy as np
from areal_x.runtime import open_files
from areal_x.protocols.engine import SamplingParams
from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.fleet.replica import ExternalServer, Replica
from areal_x.engines.fleet.supervisor import Supervisor

url, limit, requests, held = sys.argv[1], *map(int, sys.argv[2:])

async def main():
    client = VLLMClient(url, None)
    assert await client.is_healthy()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    taken, noticed, ran_out = [], [], open_files.ran_out

    def noticing(error):
        noticed.append(ran_out(error))
        return noticed[-1]

    open_files.ran_out = noticing
    with contextlib.suppress(OSError):
        while held:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    said = []
    async def nothing(*of): return False
    supervisor = Supervisor(VLLMConfig(urls=(url,)), said.append, nothing, nothing, nothing, lambda: None)
    replica = Replica("the server", ExternalServer(url, lambda: VLLMClient(url, None)), iter(()))
    replica._client = VLLMClient(url, None)
    supervisor.add(replica)
    (name,) = supervisor.fleet.due(float("inf"))
    supervisor.fleet.reached(name)
    supervisor.fleet.accepted(name, 0, 0.0)
    prompt, sampling = np.arange(4, dtype=np.int32), SamplingParams(max_tokens=1)
    running = [asyncio.create_task(replica.client.generate(prompt, sampling)) for _ in range(requests)]
    beats = asyncio.create_task(asyncio.wait_for(several(supervisor, name), 60))
    while held and sum(noticed) < 10:
        await asyncio.sleep(0.01)
    for file in taken:
        os.close(file)
    found = await asyncio.gather(*running)
    await beats
    member = supervisor.fleet.members[name]
    about = {"state": member.state.value, "misses": member.misses, "said": said, "ran out": any(noticed)}
    print(json.dumps({"answered": len(found), **about}), flush=True)
    await client.close()
    await replica.close()

async def several(supervisor, name):
    for _ in range(5):
        await supervisor._heartbeat(name)

asyncio.run(main())
"""


def served(least: int) -> Iterator[str]:
    words = [sys.executable, "-c", SERVER, str(least)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def client(url: str, *numbers: int) -> Any:
    words = [sys.executable, "-c", CLIENT, url, *map(str, numbers)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_more_requests_than_files_are_all_answered_and_no_heartbeat_is_missed() -> None:
    for url in served(least=LIMIT // 2):  # as many are with the server at a time as may be
        found = client(url, LIMIT, 3 * LIMIT, 0)
        assert found == {"answered": 3 * LIMIT, "state": "ready", "misses": 0, "said": [], "ran out": False}


def test_a_server_that_cannot_be_asked_for_want_of_files_is_not_lost() -> None:
    for url in served(least=1):
        found = client(url, LIMIT, LIMIT // 4, 1)
        assert found == {"answered": LIMIT // 4, "state": "ready", "misses": 0, "said": [], "ran out": True}


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_command_raises_the_limit_and_an_import_does_not(limits: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, limits[1]), limits[1]))
    code = "import resource, areal_x.train; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    command = "; areal_x.train.main(['no-such-file.gin']); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    done = subprocess.run([sys.executable, "-c", code + command], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == [str(min(1024, limits[1])), str(min(limits[1], open_files.MOST))]


def test_check_says_what_to_set(limits: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "is_cpu_build", lambda: True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
    assert servers.check_engine_servers(VLLMConfig(servers=2, concurrency=300)).endswith("by vLLM for CPU")
    asked = servers.check_engine_servers(VLLMConfig(servers=4, concurrency=512), placed=True)
    assert asked.startswith("4 will be started on the nodes of the cluster; ")
    assert "only 768 of 2048 requests are in flight at a time, because this process may open only 1024 files" in asked
    assert ": set `ulimit -n 2304`" in asked


def test_a_name_that_cannot_be_looked_up_is_another_mistake_than_no_files() -> None:
    assert open_files.ran_out(OSError(24, "Too many open files"))
    assert not open_files.ran_out(socket.gaierror(-3, "Temporary failure in name resolution"))
    assert not open_files.ran_out(ConnectionRefusedError(111, "Connection refused"))
