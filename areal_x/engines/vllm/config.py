"""The settings of vLLM servers."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import gin

from areal_x.engines.sampling_checks import check_arguments
from areal_x.engines.vllm.gpu_transfer import check_settings
from areal_x.engines.vllm.server import is_local
from areal_x.errors import ConfigError, at_least, positive


@gin.configurable("vllm")
@dataclass(frozen=True)
class VLLMConfig:
    """The servers that generate.

    servers: how many to start on this machine. urls: servers that run already (then none is
    started); the environment variable that key_variable names holds their API key. context: longest
    prompt and completion together, in tokens; 0 takes train.row_length. concurrency: requests that
    one server works on at once. port: of the first server, the next ones count up; 0 takes free
    ports. threads: compute threads of a server on a CPU; 0 shares half the cores. devices: the GPUs
    or NPUs that each server sees, as "0" or "0,1"; none for all. staging: the folder that weights
    pass through, which every server must see under the same path; '' is shared memory. arguments:
    more words for the server's command line, of which none may change what is sampled or its
    log-probabilities. start_timeout_seconds: how long a start may take. slice_tokens: a completion
    is drawn in requests of this many new tokens, so that a lost server takes no more with it; 0
    draws it in one. rolling: whether servers take new weights one after the other, and the others
    go on meanwhile. adaptive: whether each server gets as many requests as its cache holds,
    `concurrency` at the most. heartbeat_seconds: how often servers are asked whether they live, and
    how long an answer may take; three in a row that do not come lose a server. silence_seconds: a
    server that has requests and answers none for this long is lost too. wait_seconds: how long
    requests wait while no server is ready, and a trainer for room to stage, before the run ends.
    tolerance: how far a server that comes back, or one of several that hold the same weights, may
    be from the others in the log-probabilities of a known prompt, in nats a token; beyond it no
    token of it is trained on. drift: how far any server may be from the trainer in these (compared
    where sampling.temperature is 1 and no experts are replayed). transport: how weights reach the
    servers. "files" through `staging`; the servers read while generation stands still. "nccl" from
    the GPU of a torch trainer to other GPUs (those of `devices`, or of `urls`), broadcast while
    generation stands still. "handles" to one server on the trainer's own GPU, which opens the
    trainer's memory. docs/torch.md tells more. allow_unpickling: accepts that a server started here
    unpickles what requests with its key hold, which "handles" needs.
    """

    servers: int = 1
    urls: tuple[str, ...] = ()
    key_variable: str = "VLLM_API_KEY"
    context: int = 0
    concurrency: int = 64
    port: int = 0
    threads: int = 0
    devices: tuple[str, ...] = ()
    staging: str = ""
    arguments: tuple[str, ...] = ()
    start_timeout_seconds: float = 600.0
    slice_tokens: int = 0
    rolling: bool = False
    adaptive: bool = False
    heartbeat_seconds: float = 10.0
    silence_seconds: float = 1800.0
    wait_seconds: float = 900.0
    tolerance: float = 0.1
    drift: float = 0.5
    transport: str = "files"
    allow_unpickling: bool = False

    def __post_init__(self) -> None:
        positive("vllm.servers", self.servers)
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
                    "vllm.urls", self.urls, f"http:// or https:// addresses ({url!r} is none)"
                )
        if len(set(self.urls)) != len(self.urls):
            raise ConfigError(
                "vllm.urls",
                self.urls,
                "each server once: one that were updated twice at a time would break",
            )
        check_settings(self)
        check_arguments(self.arguments)
        far = [url for url in self.urls if not is_local(url)]
        if far and not self.staging and self.transport == "files":
            wanted = (
                f"a folder that {far[0]} sees under the same path: shared memory ends at this"
                " machine"
            )
            raise ConfigError("vllm.staging", self.staging, wanted)
