"""Servers of several workers, by the settings of their parallel sizes, and the rules that vLLM itself has for them."""

from __future__ import annotations

import asyncio
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from areal_x.engines.fleet.widths import Widths, obstacles
from areal_x.engines.vllm.client import vllm_client
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.testing.models import write_model
from tests.engines import conformance
from tests.engines.conformance import expected_logprobs
from tests.servers import Run, Weights

HEADS = [(6, 3), (8, 2), (12, 1), (12, 4), (12, 6)]


@pytest.mark.thorough  # imports all of vLLM's layers
def test_a_size_is_refused_exactly_if_vllms_own_layers_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers of attention, of the perceptron and of the vocabulary, as they are made in a worker."""
    pytest.importorskip("vllm")
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    tensor = 1
    for module in (parameter, linear, vocab_parallel_embedding):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: tensor)
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 0)
    outcomes = set()
    with set_current_vllm_config(VllmConfig()), torch.device("meta"):
        for (heads, key_heads), (inner, vocabulary) in product(HEADS, [(96, 44), (90, 44), (96, 150)]):
            config = {
                "num_attention_heads": heads,
                "num_key_value_heads": key_heads,
                "intermediate_size": inner,
                "vocab_size": vocabulary,
            }
            for tensor in range(1, 13):
                try:
                    linear.QKVParallelLinear(8, 2, heads, key_heads)
                    linear.MergedColumnParallelLinear(8, [inner, inner])
                    vocab_parallel_embedding.VocabParallelEmbedding(vocabulary, 8)
                    accepts = True
                except AssertionError:
                    accepts = False
                assert (not list(obstacles("vLLM", Widths(tensor=tensor), config))) == accepts, (config, tensor)
                outcomes.add(accepts)
    assert outcomes == {True, False}


# ---- real servers

SIZES = [{"tensor": 2}, {"pipeline": 2}, {"data": 2}]
PROMPT = np.arange(2, 14, dtype=np.int32)


@pytest.mark.server
@pytest.mark.thorough
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_server_of_any_width_samples_swaps_and_proves_as_a_narrow_one_does(
    sizes: dict[str, int], run: Run, tmp_path: Path
) -> None:
    """Every swap is proved in full, in every worker."""
    first, second = (write_model(tmp_path / f"{version}", seed=version) for version in (1, 2))
    config = VLLMConfig(context=256, concurrency=16, prove_every=1, **sizes)
    said: list[str] = []
    engine = VLLMEngine(config, first, tmp_path / "logs", report=said.append, kept=True)

    async def compare() -> None:
        await engine.start()
        try:
            await engine.swap(await asyncio.to_thread(engine.stage, Weights(first, 1)))
            await check_first_samples_differ(engine, first)
            await check_every_worker_answers(engine, config.widths)
            await conformance.check_weights_swapped_in_flight(engine, first, Weights(second, 2), second)
            await conformance.check_truncated_sampling(engine, second, 5, 1.0, samples=100, deviations=12)
        finally:
            await engine.close()

    run(compare())
    assert not [line for line in said if "prove" in line]


async def check_first_samples_differ(engine: VLLMEngine, model: Path) -> None:
    """One after the other, so that each of two engines samples its first tokens for the same prompt."""
    request = Request(PROMPT, SamplingParams(max_tokens=40))
    completions = [await engine.generate(request) for _ in range(2)]
    for completion in completions:
        np.testing.assert_allclose(completion.logprobs, expected_logprobs(model, request, completion), atol=1e-4)
    assert len({tuple(completion.tokens) for completion in completions}) == 2


async def check_every_worker_answers(engine: VLLMEngine, widths: Widths) -> None:
    (client,) = map(vllm_client, engine.supervisor.replicas.values())
    asked = {"version": 1, "full": False, "adapter": False, "tensors": {}}
    assert len(await client.prove(json.dumps(asked))) == widths.accelerators == await client.workers()
