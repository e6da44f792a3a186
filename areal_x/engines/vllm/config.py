"""The settings of vLLM servers."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import gin

from areal_x.engines.sampling_checks import check_arguments
from areal_x.engines.vllm.addresses import is_local
from areal_x.engines.vllm.transports import check_settings
from areal_x.errors import ConfigError, at_least, positive
from areal_x.runtime.credentials import VLLM_KEY


@gin.configurable("vllm")
@dataclass(frozen=True)
class VLLMConfig:
    """The vLLM servers that generate: started by the run, or already running."""

    servers: int = 1
    """Number of servers to start: on this machine, or with train.cluster = 'ray' on the nodes of the
    cluster."""
    least: int = 0
    """With `most`: the number of servers that the run begins with and never has fewer of; 0 is
    1."""
    most: int = 0
    """The largest number of servers, in place of a fixed number, with train.cluster = 'ray': one
    more is placed while the trainer waits for groups, and one leaves while generation has nothing
    to do. 0 is the fixed number `servers`."""
    hosts: int = 1
    """Number of nodes that one server computes on, with train.cluster = 'ray': each has an equal
    part of its accelerators."""
    urls: tuple[str, ...] = ()
    """Addresses of running servers; if given, none is started."""
    key_variable: str = VLLM_KEY
    """Environment variable that holds the API key of the servers at `urls`."""
    context: int = 0
    """Maximum length of prompt and completion together, in tokens; 0 takes train.row_length."""
    concurrency: int = 64
    """Number of requests that one server works on at once; with `adaptive` the maximum."""
    port: int = 0
    """Port of the first server; the next servers count up from it. 0 picks free ports."""
    threads: int = 0
    """Compute threads of a server on a CPU; 0 divides half the cores among the servers."""
    devices: tuple[str, ...] = ()
    """The GPUs or NPUs visible to each server, as "0" or "0,1", one entry per server; empty makes
    all visible to all."""
    staging: str = ""
    """Folder through which weights are passed; every server must see it under the same path. '' is
    shared memory."""
    arguments: tuple[str, ...] = ()
    """More arguments for the command line of the started servers. None may change what is sampled
    or its log-probabilities."""
    start_timeout_seconds: float = 600.0
    """Time limit for the start of a server."""
    slice_tokens: int = 0
    """Generates a completion in requests of this many new tokens each, so that a lost server loses
    no more than one; 0 uses a single request."""
    waves: int = 1
    """Number of groups in which the servers load new weights: one group after the other, while the
    others go on generating. 1 updates all servers together."""
    adaptive: bool = False
    """True gives each server as many requests as fit into its KV cache, at most `concurrency`."""
    heartbeat_seconds: float = 10.0
    """Interval between health checks of each server, and time limit of each; after three failures
    in a row the server is lost."""
    silence_seconds: float = 1800.0
    """A server that has requests and completes none for this long is lost."""
    wait_seconds: float = 900.0
    """How long requests wait while no server is ready, and a trainer for room to stage weights,
    before the run ends."""
    tolerance: float = 0.1
    """Largest mean absolute difference (nats per token) between servers' log-probabilities on a
    probe prompt; a server beyond it is quarantined, and none of its tokens is trained on."""
    drift: float = 0.5
    """Largest mean absolute difference (nats per token) between a server's and the trainer's
    log-probabilities on the probe prompt. Only checked if sampling.temperature is 1 and no experts
    are replayed."""
    transport: str = "files"
    """How weights reach the servers. "files": through `staging`; generation is paused while servers
    read them. "nccl" (experimental: it never ran on GPUs): broadcast from the GPU of
    the trainer's first process to other GPUs (those of `devices`, or of `urls`) while generation is
    paused. "rdt" (experimental: it never ran on GPUs): with train.cluster = "ray", each worker of a
    server pulls the slices that it needs from all processes that train, by Ray and NIXL, while
    generation is paused. "handles" (experimental: it never ran with a real server): one server on a torch
    trainer's own GPU opens the trainer's memory. See docs/torch.md."""
    allow_unpickling: bool = False
    """True accepts that a server started here unpickles the content of requests with its key, which
    "handles" needs."""

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of servers that the run starts."""
        return (max(self.least, 1), self.most) if self.most else (self.servers, self.servers)

    @property
    def requests(self) -> int:
        """Number of requests that all servers together work on at once, at most."""
        return self.concurrency * (len(self.urls) or self.bounds[1])

    def __post_init__(self) -> None:
        positive("vllm.servers", self.servers)
        at_least("vllm.least", self.least, 0)
        at_least("vllm.most", self.most, 0)
        positive("vllm.hosts", self.hosts)
        check_number(self)
        positive("vllm.waves", self.waves)
        at_least("vllm.context", self.context, 0)
        positive("vllm.concurrency", self.concurrency)
        at_least("vllm.port", self.port, 0)
        at_least("vllm.threads", self.threads, 0)
        at_least("vllm.slice_tokens", self.slice_tokens, 0)
        for name in (
            "start_timeout_seconds",
            "heartbeat_seconds",
            "silence_seconds",
            "wait_seconds",
            "tolerance",
            "drift",
        ):
            positive(f"vllm.{name}", getattr(self, name))
        if self.devices and len(self.devices) != self.servers:
            raise ConfigError(
                "vllm.devices",
                self.devices,
                f"empty, or one entry for each of the {self.servers} servers",
            )
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https"):
                raise ConfigError(
                    "vllm.urls", self.urls, f"http:// or https:// addresses (not {url!r})"
                )
        if len(set(self.urls)) != len(self.urls):
            raise ConfigError(
                "vllm.urls",
                self.urls,
                "each server once: concurrent updates of one server would break it",
            )
        check_settings(self)
        check_arguments(self.arguments)
        far = [url for url in self.urls if not is_local(url)]
        if far and not self.staging and self.transport == "files":
            wanted = (
                f"a folder that {far[0]} sees under the same path: shared memory is local to this"
                " machine"
            )
            raise ConfigError("vllm.staging", self.staging, wanted)


def check_number(config: VLLMConfig) -> None:
    """Raises: ConfigError for numbers of servers that contradict each other."""
    least, most = config.bounds
    if config.urls:
        for name, value, default in (
            ("least", config.least, 0),
            ("most", config.most, 0),
            ("hosts", config.hosts, 1),
        ):
            if value != default:
                wanted = "left out with vllm.urls, whose servers the run does not start"
                raise ConfigError(f"vllm.{name}", value, wanted)
    if config.least and not config.most:
        wanted = "left out, or given with the largest number of servers, vllm.most"
        raise ConfigError("vllm.least", config.least, wanted)
    if most < least:
        raise ConfigError("vllm.most", most, f"at least vllm.least = {least}")
    if config.most and config.servers not in (1, least):
        wanted = f"left out with vllm.most: the run begins with vllm.least = {least} servers"
        raise ConfigError("vllm.servers", config.servers, wanted)
