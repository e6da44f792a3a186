"""Server processes: how they start, the error message when they die, and that none outlives its run."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from areal_x.engines.fleet import server as servers
from areal_x.engines.fleet.addresses import LOOPBACK, url_of
from areal_x.engines.fleet.config import default_threads
from areal_x.engines.fleet.server import reserve, start
from areal_x.engines.fleet.server_log import failure_in
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.dialects import Dialect
from areal_x.engines.vllm.server import Launch, command, environment
from areal_x.errors import ConfigError
from tests.processes import lives

LAUNCH = Launch(Path("model"), Path("log"), Path("staging"), context=128, concurrency=8, seed=3, threads=2)


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true"
        time.sleep(0.02)


def test_the_key_is_in_the_environment_and_nowhere_on_the_command_line() -> None:
    assert environment(LAUNCH, "the secret", cpu=True)["VLLM_API_KEY"] == "the secret"
    assert "key" not in " ".join(command(LAUNCH, 1, cpu=True))


def test_a_server_listens_on_the_loopback_address_alone() -> None:
    words = command(LAUNCH, 1234, cpu=True)
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert environment(LAUNCH, "", cpu=False)["VLLM_HOST_IP"] == "127.0.0.1"


def test_only_a_cpu_server_is_told_what_to_do_with_threads_and_precision() -> None:
    assert environment(LAUNCH, "", cpu=True)["OMP_NUM_THREADS"] == "2"
    assert "--enforce-eager" in command(LAUNCH, 1, cpu=True)
    assert environment(LAUNCH, "", cpu=False).get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS")
    assert not {"--enforce-eager", "--dtype"} & set(command(LAUNCH, 1, cpu=False))


def test_a_server_that_sleeps_is_told_so_except_on_a_cpu_where_the_plugin_does_it() -> None:
    sleeps = replace(LAUNCH, sleeps=True)
    assert "--enable-sleep-mode" in command(sleeps, 1, cpu=False)
    assert "--enable-sleep-mode" not in command(sleeps, 1, cpu=True)
    assert "--enable-sleep-mode" not in command(LAUNCH, 1, cpu=False)


def test_a_server_that_records_experts_runs_what_can_and_one_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = replace(LAUNCH, experts=True)
    assert "--enable-return-routed-experts" in command(launch, 1, cpu=False)
    assert environment(launch, "", cpu=False)["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "--enable-return-routed-experts" not in command(LAUNCH, 1, cpu=False)
    monkeypatch.setattr("areal_x.engines.vllm.server.is_cpu_build", lambda: True)
    with pytest.raises(ConfigError, match=r"trainer\.replay_experts = True .* needs a GPU"):
        start(launch)


def test_a_server_that_reports_kept_tokens_runs_the_model_runner_that_can() -> None:
    assert environment(replace(LAUNCH, kept=True), "", cpu=False)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    chosen = environment(LAUNCH, "", cpu=False).get("VLLM_USE_V2_MODEL_RUNNER")
    assert chosen == os.environ.get("VLLM_USE_V2_MODEL_RUNNER")


def test_a_server_sees_the_devices_that_it_is_given_whatever_their_kind() -> None:
    env = environment(replace(LAUNCH, device="2,3"), "", cpu=False)
    assert (env["CUDA_VISIBLE_DEVICES"], env["ASCEND_RT_VISIBLE_DEVICES"]) == ("2,3", "2,3")
    names = "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"
    assert [environment(LAUNCH, "", cpu=False).get(name) for name in names] == [os.environ.get(name) for name in names]


def test_servers_together_get_at_most_half_the_cores_unless_they_are_more_than_that() -> None:
    cores = len(os.sched_getaffinity(0))
    for count in (1, 2, 100):
        assert default_threads(count) * count <= max(cores // 2, count)


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match=r"vllm\.port = \d+ .* free port"):
        reserve(LOOPBACK, taken.getsockname()[1], "vllm.port")


def test_a_reserved_port_is_free_for_the_server_and_for_nobody_else() -> None:
    with reserve(LOOPBACK, 0) as reserved, socket.socket() as stranger, socket.socket() as server:
        address = reserved.getsockname()
        with pytest.raises(OSError, match="in use"):
            stranger.bind(address)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()


SLOW = """
import http.server, os, sys, time
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): ...
while not os.path.exists(sys.argv[2]):  # as long as vLLM takes to be imported
    time.sleep(0.01)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def test_nobody_takes_a_servers_port_while_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(launch: Launch, port: int, cpu: bool, dialect: Dialect) -> list[str]:
        return [sys.executable, "-c", SLOW, str(port), str(tmp_path / "imported")]

    monkeypatch.setattr("areal_x.engines.vllm.server.command", slow)
    server = start(replace(LAUNCH, log=tmp_path / "log", staging=tmp_path / "staging"))
    try:
        address = "127.0.0.1", int(server.url.rpartition(":")[2])
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(address)
        (tmp_path / "imported").touch()
        asyncio.run(servers.wait_until_ready(server, LAUNCH, "the server", 60, lambda line: None))
        assert server.reserved is not None
        assert server.reserved.fileno() == -1  # let go of
    finally:
        server.stop()


def test_the_reason_is_the_error_that_others_point_at() -> None:
    log = """
(EngineCore pid=7) ERROR 11-20 13:50:51 [core.py:1] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-20 13:50:51 [core.py:1]   File "x.py", line 1, in f
(EngineCore pid=7) ERROR 11-20 13:50:51 [core.py:1] ValueError: no room for the cache
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.
"""
    assert failure_in(log) == "ValueError: no room for the cache"


def test_a_mistake_on_the_command_line_is_the_reason() -> None:
    assert failure_in("usage: x\napi_server.py: error: unrecognized arguments: --x\n") == (
        "api_server.py: error: unrecognized arguments: --x"
    )


def test_an_error_that_points_at_others_is_the_reason_where_there_is_no_other() -> None:
    log = """
(APIServer pid=6) ERROR 11-20 14:45:19 [x.py:5]     raise self._format_exception(outputs) from None
(APIServer pid=6) ERROR 11-20 14:45:19 [x.py:5] vllm.v1.EngineDeadError: EngineCore encountered an issue. See above.
nanobind: leaked 514 functions!
"""
    assert failure_in(log) == "vllm.v1.EngineDeadError: EngineCore encountered an issue. See above."


def test_without_an_error_the_last_lines_are_the_reason() -> None:
    assert failure_in("a\n\nb\nKilled\n") == "a | b | Killed"
    assert failure_in("") == "it wrote nothing"


# A server in the small: two generations of processes that do not end when they are asked to, the second in its own session.
FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if sys.argv[1:]:
    subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(600)
"""
OWNER = """
import json, os, subprocess, sys
from areal_x.runtime import guard
folder, family = sys.argv[1:]
command = [sys.executable, "-c", family, family]
words = guard.command("areal_x.engines.fleet.watchdog", os.getpid(), folder, command, 0.2, flags=("-I",))
process = subprocess.Popen(words, start_new_session=True)
print(process.pid, flush=True)
process.wait()
"""


def family_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


ENDINGS = [
    "the owner is killed",
    "the watchdog is stopped",
    "the watchdog is killed",
    "the second watchdog is killed",
    "the second watchdog is stopped",
    "the watchdog and the server die",
    "the server dies",
]


@pytest.mark.parametrize("ending", ENDINGS)
def test_however_it_ends_no_process_of_a_server_is_left(ending: str, tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    staged.mkdir()
    words = [sys.executable, "-c", OWNER, str(staged), FAMILY]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as owner:
        try:
            watchdog_pid = int(owner.stdout.readline())
            wait_for(lambda: len(family_of(watchdog_pid)) == 3)
            processes = [psutil.Process(watchdog_pid), *family_of(watchdog_pid)]
            watchdog, second, server, _ = processes
            if ending == "the owner is killed":
                owner.kill()
            elif ending == "the watchdog and the server die":
                second.suspend()  # both are gone before it looks
                watchdog.kill()
                server.kill()
                wait_for(lambda: not lives(watchdog) and not lives(server))
                second.resume()
            elif ending.endswith("is stopped"):
                (second if "second" in ending else watchdog).terminate()
            elif ending.endswith("is killed"):
                (second if "second" in ending else watchdog).kill()
            else:
                server.kill()
            wait_for(lambda: not any(map(lives, processes)))
            assert staged.exists() == (ending != "the owner is killed")
        finally:
            owner.kill()


def test_a_server_on_another_address_listens_there_alone_and_answers_to_that_name() -> None:
    launch = replace(LAUNCH, host="10.0.0.7")
    words = command(launch, 1234, cpu=False)
    assert words[words.index("--host") + 1] == "10.0.0.7"
    assert environment(launch, "", cpu=False)["AREAL_X_HOSTS"] == "10.0.0.7"
    assert environment(LAUNCH, "", cpu=False)["AREAL_X_HOSTS"] == ""
    assert (url_of("10.0.0.7", 80), url_of("fd00::7", 80)) == ("http://10.0.0.7:80", "http://[fd00::7]:80")


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_a_port_is_reserved_on_the_address_that_the_server_listens_on(host: str) -> None:
    try:
        reserved = reserve(host, 0)
    except ConfigError:
        pytest.skip(f"this machine has no {host}")
    with reserved, socket.socket(reserved.family) as stranger:
        assert reserved.getsockname()[0] == host
        with pytest.raises(OSError, match="in use"):
            stranger.bind(reserved.getsockname())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"servers": 0}, r"vllm\.servers"),
        ({"devices": ("0",), "servers": 2}, r"vllm\.devices .* each of the 2 servers"),
        ({"urls": ("localhost:8000",)}, r"vllm\.urls .*not 'localhost:8000'"),
        ({"urls": ("http://localhost:8000",) * 2}, r"vllm\.urls .* each server once"),
        ({"urls": ("http://far.example:8000",)}, r"vllm\.staging .* under the same path"),
        ({"least": -1}, r"vllm\.least"),
        ({"most": -1}, r"vllm\.most"),
        ({"hosts": 0}, r"vllm\.hosts"),
        ({"least": 2}, r"vllm\.least = 2 .* given with the largest number of servers, vllm\.most"),
        ({"least": 3, "most": 2}, r"vllm\.most = 2 .* at least vllm\.least = 3"),
        ({"servers": 2, "most": 3}, r"vllm\.servers = 2 .* begins with vllm\.least = 1"),
        ({"servers": 1, "least": 2, "most": 3, "urls": ("http://localhost:1",)}, r"vllm\.least = 2 .* with vllm\.urls"),
        ({"most": 3, "urls": ("http://localhost:1",)}, r"vllm\.most = 3 .* with vllm\.urls"),
        ({"hosts": 2, "urls": ("http://localhost:1",)}, r"vllm\.hosts = 2 .* with vllm\.urls"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        VLLMConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "bounds", "requests"),
    [
        ({}, (1, 1), 64),
        ({"servers": 3}, (3, 3), 192),
        ({"most": 3}, (1, 3), 192),
        ({"least": 2, "most": 3, "servers": 2}, (2, 3), 192),
        ({"urls": ("http://localhost:1", "http://localhost:2")}, (1, 1), 128),
    ],
)
def test_the_number_of_servers_has_bounds(settings: dict[str, Any], bounds: tuple[int, int], requests: int) -> None:
    config = VLLMConfig(**settings)
    assert (config.bounds, config.requests) == (bounds, requests)
