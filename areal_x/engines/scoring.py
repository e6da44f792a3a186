"""Servers that score given tokens, of any program: which one answers at an address, the address tells."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from areal_x.engines.fleet.scorer import ScoringClient, ServerScorer, check_temperature
from areal_x.engines.sglang.client import SGLangClient, serves
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.errors import UserError
from areal_x.runtime.loop import run, together


def server_scorer(
    urls: Sequence[str],
    vllm: VLLMConfig,
    sglang: SGLangConfig,
    tokenizer: Any,
    temperature: float,
) -> ServerScorer:
    """Returns a scorer on vLLM and SGLang servers of one model, started with nothing but `vllm serve
    MODEL` or `sglang serve --model-path MODEL`.

    vllm, sglang: name the variables that hold the keys of either program's servers. tokenizer: see
    ServerScorer. temperature: that the tokens to score are sampled at.

    Raises: ConfigError for another temperature than 1; UserError for a server that cannot score.
    """
    check_temperature(temperature)

    async def client_of(url: str) -> Callable[[], ScoringClient]:
        is_sglang = await serves(url)
        if is_sglang is None:
            raise UserError(
                f"no server answers at {url}, which is to be the reference or teacher: start it, or"
                " correct the address"
            )
        if is_sglang:
            return partial(SGLangClient, url, *sglang.keys(), Path())
        return partial(VLLMClient, url, os.environ.get(vllm.key_variable))

    async def clients() -> list[Callable[[], ScoringClient]]:
        return await together(client_of(url) for url in urls)

    return ServerScorer(run(clients(), "scorer"), tokenizer)
