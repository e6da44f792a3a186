"""Conversations with a real model, through the embedded engine: log-probabilities by the engine and by a trainer."""

from __future__ import annotations

import asyncio

import numpy as np

from areal_x.agents.chat.dialogue import ChatEngine, Dialogue
from areal_x.agents.chat.merging import merge_calls
from areal_x.agents.chat.rendering import TemplateRenderer
from areal_x.batching.packing import pack
from areal_x.engines.embedded import EmbeddedEngine
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.testing.models import write_model
from tests.agents.chat.conversations import END, SAYINGS, TOOLS
from tests.agents.chat.speaking import tokenizer_of

CONTEXT, TURNS, REPLY = 1536, 3, 12  # tokens, completions of a conversation, tokens of each at most


def talked(family, backend, directory, seeds, slots=32):
    """Returns the trajectories of one conversation per seed, and for each of their trained tokens the log-probability by the
    engine and by the trainer."""
    tokenizer = tokenizer_of(family)
    write_model(directory, vocab_size=len(tokenizer), max_position_embeddings=CONTEXT)
    config = TrainerConfig(model=ModelConfig(str(directory)), optimizer=OptimizerConfig(), micro_batch_rows=8)
    trainer = create_trainer(backend, config)
    engine = EmbeddedEngine(trainer.sampler(slots, CONTEXT))
    end = tokenizer.convert_tokens_to_ids(END[family])
    sampling = SamplingParams(max_tokens=REPLY, temperature=1.0, stop_token_ids=(end,))
    free = asyncio.Semaphore(2 * slots)

    async def talk(seed):
        rng = np.random.default_rng(seed)
        thinks = {"enable_thinking": False} if family == "qwen3" and rng.random() < 0.5 else {}
        speaker = ChatEngine(TemplateRenderer(tokenizer), engine)
        dialogue = Dialogue(speaker, sampling, tools=TOOLS if rng.random() < 0.3 else (), template=thinks)
        async with free:
            for _ in range(TURNS):
                await dialogue.say({"role": "user", "content": str(rng.choice(SAYINGS))})
        return [line.trajectory for line in merge_calls(speaker.calls).trajectories]

    async def work():
        await engine.start()
        try:
            await engine.swap(engine.stage(trainer))
            return [line for lines in await asyncio.gather(*map(talk, seeds)) for line in lines]
        finally:
            await engine.close()

    trajectories = asyncio.run(work())
    batch = pack(trajectories, CONTEXT, rows_multiple=8).batch
    return trajectories, batch.behavior_logp[batch.mask], np.asarray(trainer.logprobs(batch))[batch.mask]
