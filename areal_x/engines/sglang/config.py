"""The settings of SGLang servers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import ClassVar

import gin

from areal_x.engines.fleet.config import FleetConfig, check_places, check_without
from areal_x.engines.sglang.truncation import WHOLE_SHARE, combines
from areal_x.errors import ConfigError, at_least
from areal_x.protocols.engine import SamplingParams
from areal_x.runtime.credentials import SGLANG_ADMIN_KEY, SGLANG_KEY

# Arguments that the engine gives itself, and what another value would break.
OWN = {
    "--api-key": "the engine's own key opens its servers",
    "--admin-api-key": "the engine's own key opens its servers",
    "--weight-version": "tokens are traced by the versions that the engine sets",
    "--use-ray": "what the launcher changes in SGLang does not reach processes that Ray starts",
}
TYPED = (
    "speculation.method = 'ngram' has SGLang guess, and refuses what it would not sample exactly"
)
OWN |= dict.fromkeys(("--speculative-algorithm", "--speculative-algo"), TYPED)
SEEDED = "--enable-deterministic-inference"


@gin.configurable("sglang")
@dataclass(frozen=True)
class SGLangConfig(FleetConfig):
    """The SGLang servers that generate: started by the run, or already running."""

    kind: ClassVar[str] = "SGLang"

    pipeline: int = 1
    """Must be 1: a pause does not take back the requests of a pipeline, so that no weights can be
    swapped while it generates."""
    data: int = 1
    """Must be 1: the replicas of an SGLang server draw from the same random numbers, so that they
    would sample the same tokens; `servers` starts as many of different ones."""
    expert: int = 1
    """Number of accelerators among which a server divides whole experts, in place of slices of each
    (SGLang's --ep-size); a divisor of `tensor`."""
    hosts: int = 1
    """Must be 1: a server is on one node."""
    adaptive: bool = False
    """Must be False: SGLang does not count preemptions, by which the number of requests is found."""
    key_variable: str = SGLANG_KEY
    """Environment variable that holds the API key of the servers at `urls`."""
    admin_key_variable: str = SGLANG_ADMIN_KEY
    """Environment variable that holds the servers' admin key, which pauses them and replaces their
    weights; without it the API key is used for that too."""
    prove_every: int = 100
    """Every so many publications, and at the first, servers that the run starts prove before they go on that all
    numbers that their workers use are those that were published; at the others, a sample of each tensor. 0 leaves
    the proofs out. Adapters are not proved."""
    python: str = ""
    """The Python interpreter that has SGLang, of an environment of its own since SGLang pins other
    versions than trainers and vLLM do; '' is this process's. With train.cluster = 'ray' it has the same
    path on every node that serves."""

    delta: int = 0
    """Must be 0: SGLang servers apply no deltas."""
    delta_cache: str = ""
    """Must be left out, as `delta`."""

    def keys(self) -> tuple[str | None, str | None]:
        """Returns the API key and the admin key of the servers at `urls`."""
        key = os.environ.get(self.key_variable)
        return key, os.environ.get(self.admin_key_variable) or key

    def check_program(self) -> None:
        at_least("sglang.prove_every", self.prove_every, 0)
        if self.direct:
            wanted = "'files': SGLang servers get their weights from staged files alone"
            raise ConfigError("sglang.transport", self.transport, wanted)
        if self.delta:
            wanted = "0: SGLang servers run no code of AReaL-X that could apply deltas"
            raise ConfigError("sglang.delta", self.delta, wanted)
        if self.hosts > 1:
            wanted = "1: the engine starts SGLang servers on one node each"
            raise ConfigError("sglang.hosts", self.hosts, wanted)
        if self.pipeline > 1:
            wanted = (
                "1: SGLang's pause leaves requests in the stages of a pipeline, which then refuses new"
                " weights; set sglang.tensor"
            )
            raise ConfigError("sglang.pipeline", self.pipeline, wanted)
        if self.data > 1:
            wanted = (
                f"1: replicas of one SGLang server would sample the same tokens; set sglang.servers ="
                f" {self.servers * self.data}, whose random numbers differ"
            )
            raise ConfigError("sglang.data", self.data, wanted)
        if self.tensor % self.expert:
            wanted = (
                f"a divisor of sglang.tensor = {self.tensor}, among whose accelerators it divides"
            )
            raise ConfigError("sglang.expert", self.expert, wanted)
        if self.adaptive:
            wanted = (
                "False: SGLang does not count the requests that it had to recompute, by which the"
                " number that fits is found; set sglang.concurrency"
            )
            raise ConfigError("sglang.adaptive", True, wanted)
        check_without(self, OWN)


def check_run(
    config: SGLangConfig, here: bool, shards: int, sampling: SamplingParams | None
) -> None:
    """Raises: ConfigError for a run that SGLang servers do not serve yet, or servers that cannot be
    placed. here: the trainer is in this process, and the servers that the run starts are on this
    machine. sampling: of its episodes, where it is known."""
    check_places(config, here)
    if config.urls and sampling is not None and combines(sampling):
        wanted = f"1.0 beside top_k or min_p with servers of sglang.urls, {WHOLE_SHARE}"
        raise ConfigError("sampling.top_p", sampling.top_p, wanted)
    if sampling is not None and sampling.min_p and SEEDED in config.arguments:
        wanted = f"0 with {SEEDED} in sglang.arguments, with which it ends SGLang's server"
        raise ConfigError("sampling.min_p", sampling.min_p, wanted)
    if shards:
        wanted = "0 with train.engine = 'sglang': shards divide vLLM servers alone"
        raise ConfigError("cluster.shards", shards, wanted)
