"""Speculative decoding in the torch sampler: guesses of the next tokens, from the sequences themselves
or by a smaller model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float32, Int
from transformers import PreTrainedModel

from areal_x.engines.speculation import continuations
from areal_x.errors import ConfigError
from areal_x.protocols.sampler import SlotRequest
from areal_x.protocols.speculation import Speculation
from areal_x_torch import loading, rope
from areal_x_torch.decode_step import Step, trace_step
from areal_x_torch.kv_cache import Cache, Layer, StateLayer, attend_to_cache, layers_of
from areal_x_torch.model import vocabulary_size
from areal_x_torch.prefill import prefill
from areal_x_torch.sampling import RowSampling, sample

if TYPE_CHECKING:
    from areal_x_torch.sampler import Rows


@dataclass(frozen=True)
class Draft:
    """A smaller model that guesses, with a cache of its own, whose rows are those of the lane's."""

    model: PreTrainedModel
    step: Step
    cache: Cache
    words: int
    """Tokens of the policy's vocabulary, which may be padded to another size than the draft's."""
    context: int

    def prefill(self, first: int, requests: Sequence[SlotRequest]) -> None:
        """Caches the sequences' tokens, without what their images show."""
        own = vocabulary_size(self.model)
        read = [replace(r, images=None, tokens=np.minimum(r.tokens, own - 1)) for r in requests]
        prefill(self.model, self.cache, first, read)

    def guess(
        self, rows: Rows, uniforms: Float32[np.ndarray, "rows tokens"]
    ) -> Int[np.ndarray, "rows tokens"]:
        """Samples as the policy will, with the same random numbers: two models that nearly agree
        choose the same token nearly always. Returns -1 for a token that the policy lacks."""
        device, tokens = self.model.device, uniforms.shape[1]
        row_sampling = RowSampling.of(rows.temperature, rows.top_p, rows.top_k, rows.min_p, device)
        numbers = torch.from_numpy(uniforms).to(device)
        first = torch.from_numpy(rows.column).to(device)[:, None]
        token = torch.from_numpy(rows.token).to(device)
        used, own = int(rows.column.max()) + 1, vocabulary_size(self.model)
        guessed = []
        for ahead in range(tokens + 1):
            # The last guess is fed, too, so that all of them are cached if all are right.
            column, fed = first + ahead, token.clamp(max=own - 1)[:, None]
            place = column.clamp(max=self.context - 1)
            logits = self.step(fed, place, *self.cache.newest(column, used + ahead))
            if ahead < tokens:
                token, _, _ = sample(logits, numbers[:, ahead, None], row_sampling)
                guessed.append(torch.where(token < self.words, token, -1))
        return torch.stack(guessed, dim=1).cpu().numpy()


@dataclass(frozen=True)
class Guesser:
    """What a lane needs to guess ahead. verify: a step over the newest token and all guesses."""

    speculation: Speculation
    verify: Step
    draft: Draft | None = None

    @property
    def tokens(self) -> int:
        return self.speculation.tokens

    def __call__(
        self, rows: Rows, uniforms: Float32[np.ndarray, "rows tokens"]
    ) -> Int[np.ndarray, "rows tokens"]:
        """Returns guesses of the rows' next tokens, -1 for none. uniforms: the numbers that these
        will be sampled with."""
        if self.draft is not None:
            return self.draft.guess(rows, uniforms)
        history = rows.history[:, : int(rows.column.max()) + 1 + self.tokens]
        found: np.ndarray = continuations(np, history, rows.column + 1, self.speculation)
        return found


def guessers(
    speculation: Speculation,
    model: PreTrainedModel,
    layers: Sequence[Layer | StateLayer],
    caches: Sequence[Cache],
    context: int,
) -> list[Guesser]:
    """Returns one for each lane's cache of the policy, which share the smaller model.

    Raises: ConfigError for a smaller model that cannot be used.
    """
    verify = trace_step(model, layers, 1 + speculation.tokens)
    if speculation.method != "draft":
        return [Guesser(speculation, verify) for _ in caches]
    directory = Path(speculation.draft)
    keys = caches[0].keys[0]
    smaller = loading.frozen(directory, keys.device, keys.dtype).requires_grad_(False)
    rope.check_length("embedded.context", context, smaller.config, directory)
    attend_to_cache(smaller)
    own = layers_of(smaller)
    if any(isinstance(layer, StateLayer) for layer in own):
        wanted = (
            "a model whose layers all have attention: a wrong guess would change the states of gated"
            " delta rule layers"
        )
        raise ConfigError("speculation.draft", speculation.draft, wanted)
    step, words = trace_step(smaller, own), vocabulary_size(model)
    return [
        Guesser(
            speculation,
            verify,
            Draft(smaller, step, cache.like(own), words, context),
        )
        for cache in caches
    ]
