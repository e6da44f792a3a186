"""The arguments of a vLLM server that loads adapters."""

from __future__ import annotations

from areal_x.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank
BATCHED = 4  # adapters, or versions of one, that vLLM batches together
CACHED = 16  # of them that vLLM keeps in memory, before it reads one again from its folder


def arguments(rank: int, batched: int = 0) -> list[str]:
    """Returns arguments for the server's command line. batched: adapters in one batch, 0 for BATCHED.
    Raises: ConfigError for a rank above vLLM's maximum."""
    room = next((size for size in RANKS if size >= rank), None)
    if room is None:
        raise ConfigError("lora.rank", rank, f"at most {RANKS[-1]} with train.engine = 'vllm'")
    batched = batched or BATCHED
    sizes = {
        "--max-lora-rank": room,
        "--max-loras": batched,
        "--max-cpu-loras": max(CACHED, batched),
    }
    return ["--enable-lora", *(word for name, size in sizes.items() for word in (name, str(size)))]
