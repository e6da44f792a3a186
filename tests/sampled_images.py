"""Prompts with images for the embedded engine, and what it samples of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from areal_x.engines.embedded import EmbeddedEngine
from areal_x.protocols.engine import Completion, Request, SamplingParams
from areal_x.protocols.sampler import SlotRequest
from areal_x.protocols.trainer import Trainer
from areal_x.types import Trajectory
from tests.models import shown_to

CONTEXT, ANSWER = 64, 24


def requests_of(directory: Path, seed: int = 0) -> list[Request]:
    """Prompts of all lengths for this model, some without images, some with two. The last token of each is text, as in every
    chat template."""
    made = shown_to(directory, answer=1, seed=seed, ends=(2,))
    how = SamplingParams(max_tokens=ANSWER)
    return [Request(t.tokens[~t.mask], how, seed + i, images=t.images) for i, t in enumerate(made)]


def sampled(trainer: Trainer, requests: list[Request], slots: int) -> list[Completion]:
    async def run() -> list[Completion]:
        engine = EmbeddedEngine(trainer.sampler(slots, CONTEXT))
        await engine.start()
        try:
            await engine.swap(engine.stage(trainer))
            return list(await asyncio.gather(*map(engine.generate, requests)))
        finally:
            await engine.close()

    return asyncio.run(run())


def trajectories_of(requests: list[Request], completions: list[Completion]) -> list[Trajectory]:
    return [
        Trajectory.from_completion(r.tokens, c.tokens, c.logprobs, c.versions, images=r.images)
        for r, c in zip(requests, completions, strict=True)
    ]


def in_slot(request: Request, slot: int, so_far: tuple[int, ...] = ()) -> SlotRequest:
    """The request with what was generated for it so far."""
    tokens = np.concatenate([request.tokens, np.array(so_far, np.int32)]).astype(np.int32)
    return SlotRequest(slot, tokens, len(so_far), request.sampling, request.seed or 0, request.images)
