"""A reference or teacher on a real SGLang server computes the same numbers as a trainer of the same model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from areal_x.engines.scoring import server_scorer
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.errors import ConfigError, UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import EngineError, Request, SamplingParams
from areal_x.protocols.trainer import Scorer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.testing.models import CHARACTERS, write_model, write_tokenizer
from tests.engines.vllm.test_vllm_scorer import distillation, packed
from tests.servers import Run

pytestmark = [pytest.mark.sglang, pytest.mark.xdist_group("sglang")]

SGLANG = SGLangConfig(key_variable="SCORER_KEY")


@pytest.fixture
def url(sglang_engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the shared server, whose key the environment has."""
    (server,) = sglang_engine._servers
    monkeypatch.setenv("SCORER_KEY", server.key)
    return server.url


def scorer_on(url: str, tokenizer: Path) -> Scorer:
    return server_scorer([url], VLLMConfig(), SGLANG, load_tokenizer(tokenizer), 1.0)


def test_a_server_scores_as_a_trainer_of_its_model_beside_what_it_generates(
    url: str, sglang_engine: SGLangEngine, tiny_model_dir: Path, run: Run
) -> None:
    trainer = create_trainer("jax", TrainerConfig(model=ModelConfig(str(tiny_model_dir)), micro_batch_rows=4))
    rng = np.random.default_rng(0)
    last = len(CHARACTERS) + 1  # of the vocabulary, which SGLang names 0
    sequences = [rng.integers(2, 44, n) for n in (1, 2, 64, 17, 5, 30, 1, 40, 23)]
    batch = packed([*sequences, [2, last, 5, 0, last]], 64, rows_multiple=4)
    scorer = scorer_on(url, tiny_model_dir)

    async def beside() -> np.ndarray:
        request = Request(np.arange(2, 14, dtype=np.int32), SamplingParams(max_tokens=200))
        running = [asyncio.create_task(sglang_engine.generate(request)) for _ in range(8)]
        await sglang_engine.generate(Request(request.tokens, SamplingParams(max_tokens=2)))
        scores = await asyncio.to_thread(scorer.logprobs, batch)
        await asyncio.gather(*running)
        return scores

    np.testing.assert_allclose(run(beside()), trainer.logprobs(batch), atol=1e-4)


def test_what_the_server_cannot_score_is_refused_by_name_and_it_goes_on(url: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """A token outside the vocabulary would end the whole server."""
    scorer = scorer_on(url, tiny_model_dir)
    with pytest.raises(EngineError, match=r"out-of-vocabulary token id 999; valid range is \[0, "):
        scorer.logprobs(packed([[3, 999, 4]], 8))
    with pytest.raises(UserError, match=r"of 256 tokens does not fit .* SGLang .*--context-length 263 or more \(it has 262\)"):
        scorer.logprobs(packed([[3] * 256], 256))
    assert (scorer.logprobs(packed([[3] * 255], 256))[0, 1:255] < 0).all()
    write_tokenizer(tmp_path, CHARACTERS[::-1])
    with pytest.raises(UserError, match=r"the SGLang server at .* tokenises text differently"):
        scorer_on(url, tmp_path)
    with pytest.raises(ConfigError, match=r"sampling\.temperature = 0\.5"):
        server_scorer([url], VLLMConfig(), SGLANG, load_tokenizer(tiny_model_dir), 0.5)


def test_another_key_is_refused_by_the_setting_of_the_program_that_answers(
    url: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORER_KEY", "another")
    with pytest.raises(UserError, match=r"the SGLang server at .* refused the key .* sglang\.key_variable"):
        scorer_on(url, tiny_model_dir)


def test_a_run_learns_from_a_teacher_on_an_sglang_server(url: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    student = write_model(tmp_path / "student", seed=7)
    experiment = distillation(student, tmp_path, teacher=url, sglang=SGLANG)
    (turn,) = [turn for turn in experiment.turns(experiment.open()) if turn.groups]
    teacher = create_trainer("jax", TrainerConfig(model=ModelConfig(str(tiny_model_dir)), micro_batch_rows=4))
    assert turn.metrics["teacher_kl"] > 0.1
    np.testing.assert_allclose(turn.batch.reference_logp, teacher.logprobs(turn.batch), atol=1e-4)
