"""The settings that every fleet of servers has, whatever program serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlsplit

from areal_x.engines.fleet.addresses import is_local
from areal_x.engines.fleet.widths import Widths, check_hosts, widths_of
from areal_x.engines.sampling_checks import check_arguments
from areal_x.errors import ConfigError, at_least, one_of, positive
from areal_x.runtime import cores

FP8 = "fp8"  # a value of `quantization`
PROGRAMS = ("vllm", "sglang")
"""Values of train.engine with servers, and the names of their settings in gin."""


@dataclass(frozen=True)
class FleetConfig:
    """Servers that generate: started by the run, or already running."""

    kind: ClassVar[str]
    """The program's name, as messages have it."""

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
    tensor: int = 1
    """Number of accelerators among which a server divides each matrix (tensor parallelism). A server
    has tensor × pipeline × data accelerators."""
    pipeline: int = 1
    """Number of stages in which a server computes the layers one after the other, each on accelerators
    of its own (pipeline parallelism)."""
    data: int = 1
    """Number of engines in one server, each with all layers and requests of its own (data
    parallelism). Of a dense model they are copies, which `servers` gives as well; of a mixture they
    compute the experts together."""
    expert: int = 1
    """Number of accelerators among which a server divides whole experts, in place of slices of each
    (expert parallelism). It takes no more accelerators: the experts of a stage are on those of tensor ×
    data. It is a number because SGLang's may be any divisor of `tensor`, and mesh.expert is one; vLLM
    only has a flag, so there it is 1 or tensor × data."""
    hosts: int = 1
    """Number of nodes that one server computes on, with train.cluster = 'ray': each has an equal
    part of its accelerators, so it divides tensor × pipeline × data."""
    urls: tuple[str, ...] = ()
    """Addresses of running servers; if given, none is started."""
    key_variable: str = ""
    """Environment variable that holds the API key of the servers at `urls`."""
    context: int = 0
    """Maximum length of prompt and completion together, in tokens; 0 takes train.row_length."""
    concurrency: int = 64
    """Number of requests that one server works on at once; with `adaptive` the maximum."""
    port: int = 0
    """Port of the first server; the next servers count up from it. 0 picks free ports."""
    threads: int = 0
    """Compute threads of each worker of a server on a CPU (a server of one accelerator is one worker);
    0 divides half the cores among all."""
    devices: tuple[str, ...] = ()
    """The GPUs or NPUs visible to each server, as "0" or "0,1", one entry per server with as many as
    it computes on; empty makes all visible to all."""
    staging: str = ""
    """Folder through which weights are passed; every server must see it under the same path. '' is
    shared memory."""
    delta: int = 0
    """Every so many publications, and at the first, all weights are published; the others publish
    the values that changed, exactly, for servers behind slow links. Needs a second copy of the weights
    in host memory, and one beside the servers (`delta_cache`). 0 always publishes all."""
    delta_cache: str = ""
    """With `delta`: folder, on each server's own machine, in which it keeps the newest weights, and
    makes the next ones; '' is shared memory. Needs room for two versions."""
    arguments: tuple[str, ...] = ()
    """More arguments for the command line of the started servers. None may change what is sampled
    or its log-probabilities. Parallel sizes are settings of their own; those in the arguments of
    older files count as if they were given there."""
    start_timeout_seconds: float = 600.0
    """Time limit for the start of a server."""
    quantization: str = ""
    """"fp8" publishes the matrices of decoder layers in e4m3, with a scale for each block of 128 × 128,
    and starts servers on such a model, which they compute in fp8: half the memory and half the bytes of
    a publication. Sampled tokens and their log-probabilities are then those of the rounded weights, and
    the gap to the trainer that of the rounding, unless trainer.precision is "fp8" too. '' publishes
    weights in the trainer's precision."""
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
    read them."""

    @property
    def binding(self) -> str:
        """The name of these settings in gin, as train.engine has it."""
        return self.kind.lower()

    @property
    def widths(self) -> Widths:
        """The parallel sizes of a server."""
        return Widths(self.tensor, self.pipeline, self.data, self.expert, self.hosts)

    @property
    def divides(self) -> bool:
        """True if the run starts servers that divide the model."""
        return not self.urls and self.widths != Widths()

    @property
    def workers(self) -> int:
        """Number of processes that compute, of all servers that the run starts."""
        return self.servers * self.widths.accelerators

    @property
    def direct(self) -> bool:
        """True if weights go from the trainer's own memory to the servers, not through files."""
        return self.transport != "files"

    @property
    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of servers that the run starts."""
        return (max(self.least, 1), self.most) if self.most else (self.servers, self.servers)

    @property
    def requests(self) -> int:
        """Number of requests that all servers together work on at once, at most."""
        return self.concurrency * (len(self.urls) or self.bounds[1])

    def __post_init__(self) -> None:
        positive(f"{self.binding}.servers", self.servers)
        self._take_widths()
        for name in ("least", "most"):
            at_least(f"{self.binding}.{name}", getattr(self, name), 0)
        check_number(self)
        for name in ("waves", "concurrency"):
            positive(f"{self.binding}.{name}", getattr(self, name))
        for name in ("context", "port", "threads", "slice_tokens"):
            at_least(f"{self.binding}.{name}", getattr(self, name), 0)
        for name in (
            "start_timeout_seconds",
            "heartbeat_seconds",
            "silence_seconds",
            "wait_seconds",
            "tolerance",
            "drift",
        ):
            positive(f"{self.binding}.{name}", getattr(self, name))
        if self.devices and len(self.devices) != self.servers:
            raise ConfigError(
                f"{self.binding}.devices",
                self.devices,
                f"empty, or one entry for each of the {self.servers} servers",
            )
        for device in self.devices:
            if len(device.split(",")) != (width := self.widths.accelerators):
                wanted = (
                    f"{width} in each entry, as many as a server computes on ({self.binding}.tensor ×"
                    " pipeline × data)"
                )
                raise ConfigError(f"{self.binding}.devices", self.devices, wanted)
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https"):
                raise ConfigError(
                    f"{self.binding}.urls",
                    self.urls,
                    f"http:// or https:// addresses (not {url!r})",
                )
        if len(set(self.urls)) != len(self.urls):
            raise ConfigError(
                f"{self.binding}.urls",
                self.urls,
                "each server once: concurrent updates of one server would break it",
            )
        check_delta(self)
        check_quantization(self)
        self.check_program()
        check_arguments(self.arguments, f"{self.binding}.arguments")
        far = [url for url in self.urls if not is_local(url)]
        if far and not self.staging and not self.direct:
            wanted = (
                f"a folder that {far[0]} sees under the same path: shared memory is local to this"
                " machine"
            )
            raise ConfigError(f"{self.binding}.staging", self.staging, wanted)

    def _take_widths(self) -> None:
        """Moves the parallel sizes that `arguments` has to their own settings."""
        widths, others = widths_of(self.binding, partial(getattr, self))
        for name, size in {**vars(widths), "arguments": others}.items():
            object.__setattr__(self, name, size)  # of a frozen dataclass, before anyone has seen it

    def check_program(self) -> None:
        """Raises: ConfigError for settings that the program does not support."""


def program_of(value: Callable[[str], Any]) -> str:
    """Returns the program of a run's servers, which is the name of their settings in gin; "" for an
    engine without servers. value: returns a setting by its name, as "train.engine"."""
    engine: str = value("train.engine")
    return engine if engine in PROGRAMS else ""


def widths_in(value: Callable[[str], Any]) -> Widths:
    """Returns the parallel sizes of one server of a run. value: see `program_of`."""
    program = program_of(value)
    if not program:
        return Widths()
    return widths_of(program, lambda name: value(f"{program}.{name}"))[0]


def check_without(config: FleetConfig, refused: Mapping[str, str]) -> None:
    """Raises: ConfigError if the servers' arguments have one of these names. refused: with the
    reasons."""
    for word in config.arguments:
        name = word.partition("=")[0].replace("_", "-")
        if name in refused:
            wanted = f"without {name}: {refused[name]}"
            raise ConfigError(f"{config.binding}.arguments", config.arguments, wanted)


def check_number(config: FleetConfig) -> None:
    """Raises: ConfigError for numbers of servers that contradict each other."""
    least, most = config.bounds
    if config.urls:
        for name, value, default in (
            ("least", config.least, 0),
            ("most", config.most, 0),
            ("hosts", config.hosts, 1),
        ):
            if value != default:
                wanted = (
                    f"left out with {config.binding}.urls, whose servers the run does not start"
                )
                raise ConfigError(f"{config.binding}.{name}", value, wanted)
    if config.least and not config.most:
        wanted = f"left out, or given with the largest number of servers, {config.binding}.most"
        raise ConfigError(f"{config.binding}.least", config.least, wanted)
    if most < least:
        raise ConfigError(
            f"{config.binding}.most", most, f"at least {config.binding}.least = {least}"
        )
    if config.most and config.servers not in (1, least):
        wanted = (
            f"left out with {config.binding}.most: the run begins with {config.binding}.least ="
            f" {least} servers"
        )
        raise ConfigError(f"{config.binding}.servers", config.servers, wanted)


def check_places(config: FleetConfig, here: bool) -> None:
    """Raises: ConfigError for servers that need the nodes of a cluster, that do not divide among
    them, or that choose accelerators where Ray does. here: the servers that the run starts are on
    this machine."""
    name = config.binding
    if here and config.most:
        wanted = (
            f"left out with train.cluster = 'here', where no machine joins: set {name}.servers, or"
            " train.cluster = 'ray'"
        )
        raise ConfigError(f"{name}.most", config.most, wanted)
    if here and config.hosts > 1:
        wanted = "1 with train.cluster = 'here', which is one machine; 'ray' has several"
        raise ConfigError(f"{name}.hosts", config.hosts, wanted)
    check_hosts(name, config.widths)
    if config.devices and not here:
        wanted = (
            "left out with train.cluster = 'ray', where Ray gives each server its accelerators"
            " (cluster.server_accelerators)"
        )
        raise ConfigError(f"{name}.devices", config.devices, wanted)


def check_delta(config: FleetConfig) -> None:
    """Raises: ConfigError for deltas that could not be sent."""
    binding = f"{config.binding}.delta"
    at_least(binding, config.delta, 0)
    if config.delta and config.direct:
        wanted = (
            f"0 with {config.binding}.transport = {config.transport!r}: deltas are of weights that"
            " pass through files"
        )
        raise ConfigError(binding, config.delta, wanted)
    if config.delta_cache and not config.delta:
        wanted = f"left out, or given with {binding}: only deltas need it"
        raise ConfigError(f"{binding}_cache", config.delta_cache, wanted)


def check_quantization(config: FleetConfig) -> None:
    """Raises: ConfigError for weights that could not be sent in fp8."""
    binding, form = f"{config.binding}.quantization", config.quantization
    one_of(binding, form, ("", FP8))
    beside = {
        "urls": "whose servers began with a model in another form",
        "delta": "which sends single numbers of the trainer's precision",
    }
    for name, why in beside.items():
        if form and getattr(config, name):
            raise ConfigError(binding, form, f"left out with {config.binding}.{name}, {why}")
    if form and config.direct:
        wanted = f"left out with {config.binding}.transport = {config.transport!r}: only files are written so"
        raise ConfigError(binding, form, wanted)


def default_threads(workers: int) -> int:
    """Returns the compute threads of one server's worker on a CPU: half the cores are divided among
    the workers, the rest is left to the trainer.

    More threads than free cores are a trap: OpenMP threads spin while they wait for each other, and
    two processes of two threads on two cores slow each other down manyfold (a vLLM server of two
    threads beside other work: 900 tokens/s spinning, 6,500 waiting passively; of one thread: 7,900).
    """
    return max(1, cores.available() // 2 // workers)
