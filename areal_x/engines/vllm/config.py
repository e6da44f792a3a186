"""The settings of vLLM servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import gin

from areal_x.engines.fleet.config import FleetConfig, check_without
from areal_x.engines.vllm.transports import check_settings
from areal_x.errors import ConfigError, at_least
from areal_x.runtime.credentials import VLLM_KEY

UNCOUNTED = "it takes accelerators that no setting counts"
TYPED = "speculation.method = 'ngram' or 'draft' has vLLM guess, with what it would report wrongly refused"
REFUSED = {
    "--prefill-context-parallel-size": UNCOUNTED,
    "-pcp": UNCOUNTED,
    **dict.fromkeys(("--speculative-config", "-sc", "--spec-method"), TYPED),
}


@gin.configurable("vllm")
@dataclass(frozen=True)
class VLLMConfig(FleetConfig):
    """The vLLM servers that generate: started by the run, or already running."""

    kind: ClassVar[str] = "vLLM"

    key_variable: str = VLLM_KEY
    """Environment variable that holds the API key of the servers at `urls`."""
    prove_every: int = 100
    """Every so many publications, and at the first, servers prove before they go on that all numbers
    that their workers use are those that were published; at the others, a sample of each tensor. 0
    leaves the proofs out. Only with vllm.transport = "files"."""
    transport: str = "files"
    """How weights reach the servers. "files": through `staging`; generation is paused while servers
    read them. "nccl" (experimental: it never ran on GPUs): broadcast from the GPU of
    the trainer's first process to other GPUs (those of `devices`, or of `urls`) while generation is
    paused. "hccl" (experimental: it never ran on NPUs): the same by HCCL, from an NPU of a torch
    trainer to the vllm-ascend servers on its machine. "rdt" (experimental: it never ran on GPUs): with
    train.cluster = "ray", each worker of a server pulls the slices that it needs from all processes
    that train, by Ray and NIXL, while generation is paused. "handles" (experimental: it never ran with
    a real server): one server on a torch trainer's own GPU opens the trainer's memory. See
    docs/torch.md and docs/ascend.md."""
    allow_unpickling: bool = False
    """True accepts that a server started here unpickles the content of requests with its key, which
    "handles" needs."""

    def check_program(self) -> None:
        at_least("vllm.prove_every", self.prove_every, 0)
        whole = self.tensor * self.data
        if self.expert not in (1, whole):
            wanted = (
                f"1 or {whole}: vLLM divides experts among all accelerators of vllm.tensor × data"
            )
            raise ConfigError("vllm.expert", self.expert, wanted)
        check_without(self, REFUSED)
        check_settings(self)
