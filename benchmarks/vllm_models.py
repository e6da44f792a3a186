"""Deviation of vLLM from the JAX trainer that saved a model, for every architecture that both support, as a markdown table.

    python -m benchmarks.vllm_models [MODEL …]

Claim: saved models load in vLLM unchanged, and both compute the same log-probabilities for the same tokens (1e-4).

Each model is random and tiny, trained for one update and saved; a real server, started for it, scores sequences that the
trainer scores too.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np

from areal_x.algorithms import losses
from areal_x.algorithms.weighting import token_mean
from areal_x.batching.packing import pack
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.testing.models import CHARACTERS, write_tokenizer
from areal_x.trainer import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x_jax.trainer import Trainer
from tests.models import GEMMA3, MODELS, MORE, trajectories, write_config

VOCABULARY = len(CHARACTERS) + 2
WIDE = {"head_dim": 32, "hidden_size": 128, "vocab_size": VOCABULARY}  # vLLM's attention on CPUs needs heads of 32
CHOSEN = {
    **{name: MODELS[name] | WIDE for name in ("qwen3", "qwen3-tied", "qwen2", "llama")},
    **{name: MORE[name] | WIDE for name in ("llama3", "mistral", "mistral-window", "qwen3-moe", "qwen2-moe", "gemma3")},
    "gemma3": GEMMA3 | WIDE | {"sliding_window": 8, "query_pre_attn_scalar": 32},
}


def main() -> None:
    print("| model | log-probabilities, largest difference |\n|---|---|")
    for name in sys.argv[1:] or CHOSEN:
        with tempfile.TemporaryDirectory() as root:
            try:
                print(f"| {name} | {deviation(Path(root), CHOSEN[name]):.0e} |", flush=True)
            except Exception as error:
                print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0][:200]} |", flush=True)


def deviation(root: Path, config: dict[str, object]) -> float:
    start, saved = write_config(config, root / "start"), root / "saved"
    write_tokenizer(start)
    trainer = Trainer(TrainerConfig(ModelConfig(str(start)), OptimizerConfig(learning_rate=1e-3)))
    made = trajectories(12, 30, 7, vocab=VOCABULARY)
    packed = pack(made, 64)
    weights = np.asarray(token_mean(packed.batch.mask, packed.batch.segment_ids), np.float32)
    trainer.update(packed.batch.replace(weights=weights), losses.sft)
    trainer.save(saved)
    ours = packed.gather(trainer.logprobs(packed.batch))
    theirs = asyncio.run(scored(saved, [one.tokens.tolist() for one in made], root))
    return max(float(np.abs(x - y).max()) for x, y in zip(ours, theirs, strict=True))


async def scored(model: Path, sequences: list[list[int]], logs: Path) -> list[np.ndarray]:
    engine = VLLMEngine(VLLMConfig(context=64, concurrency=8), model, logs, report=lambda _: None)
    await engine.start()
    try:
        (client,) = engine._clients
        return [await client.score("policy", tokens) for tokens in sequences]
    finally:
        await engine.close()


if __name__ == "__main__":
    main()
