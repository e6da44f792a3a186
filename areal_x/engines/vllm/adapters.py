"""The arguments of a vLLM server that loads adapters."""

from __future__ import annotations

from areal_x.errors import ConfigError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank
BATCHED = 4  # versions that vLLM batches together
CACHED = 16  # versions that vLLM keeps in memory, before it reads one again from its folder


def arguments(rank: int) -> list[str]:
    """Returns arguments for the server's command line. Raises: ConfigError for a rank above vLLM's
    maximum."""
    room = next((size for size in RANKS if size >= rank), None)
    if room is None:
        raise ConfigError("lora.rank", rank, f"at most {RANKS[-1]} with train.engine = 'vllm'")
    sizes = {"--max-lora-rank": room, "--max-loras": BATCHED, "--max-cpu-loras": CACHED}
    return ["--enable-lora", *(word for name, size in sizes.items() for word in (name, str(size)))]
