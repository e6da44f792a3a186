"""Settings of speculative decoding for servers: what they are told, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_x.engines.fleet.speculation import check_draft, check_run
from areal_x.engines.sglang import server as sglang
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.vllm import server as vllm
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.cpu_guesses import repeated
from areal_x.errors import ConfigError
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.speculation import NOTHING, Speculation
from areal_x.testing.models import write_model, write_tokenizer

LOOKUP = Speculation(method="ngram", tokens=5, longest=4, shortest=3)


def launch_of(program: Any, model: Path, speculation: Speculation) -> Any:
    more = {"kept": True, "speculation": speculation}
    return program.Launch(model, Path("log"), Path("staging"), context=128, concurrency=8, seed=3, **more)


def after(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_vllm_is_told_in_its_own_words_which_it_understands(tiny_model_dir: Path) -> None:
    words = vllm.command(launch_of(vllm, tiny_model_dir, LOOKUP), 1, cpu=True)
    assert json.loads(after(words, "--speculative-config")) == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 3,
    }
    draft = Speculation(method="draft", tokens=2, draft=str(tiny_model_dir))
    words = vllm.command(launch_of(vllm, tiny_model_dir, draft), 1, cpu=True)
    expected = {"method": "draft_model", "num_speculative_tokens": 2, "model": str(tiny_model_dir)}
    assert json.loads(after(words, "--speculative-config")) == expected
    assert "--speculative-config" not in vllm.command(launch_of(vllm, tiny_model_dir, NOTHING), 1, cpu=True)


def test_sglang_is_told_to_guess_one_chain_and_not_on_a_cpu(tiny_model_dir: Path) -> None:
    words = sglang.command(launch_of(sglang, tiny_model_dir, LOOKUP), 1, cpu=False)
    assert after(words, "--speculative-algorithm") == "NGRAM"
    assert after(words, "--speculative-num-draft-tokens") == "6"
    assert after(words, "--speculative-ngram-max-bfs-breadth") == "1"
    with pytest.raises(ConfigError, match=r"speculation\.method = 'ngram'.*on a CPU.*most likely token"):
        sglang.command(launch_of(sglang, tiny_model_dir, LOOKUP), 1, cpu=True)
    assert "--speculative-algorithm" not in sglang.command(launch_of(sglang, tiny_model_dir, NOTHING), 1, cpu=True)


@pytest.mark.parametrize("config", [VLLMConfig(), SGLangConfig()], ids=["vllm", "sglang"])
def test_what_servers_would_report_wrongly_is_refused_by_name(config: Any) -> None:
    name = config.binding
    for sampling in (SamplingParams(top_p=0.9), SamplingParams(top_k=5), SamplingParams(min_p=0.1)):
        with pytest.raises(ConfigError, match=rf"speculation\.method = 'ngram'.*train\.engine = '{name}'.*kept tokens"):
            check_run(LOOKUP, config, sampling, experts=False)
    with pytest.raises(ConfigError, match="replay_experts"):
        check_run(LOOKUP, config, None, experts=True)
    if name == "vllm":
        with pytest.raises(ConfigError, match=r"speculation\.method.*lora\.rank"):
            check_run(LOOKUP, config, None, adapters=True)
    with pytest.raises(ConfigError, match=rf"{name}\.urls"):
        check_run(LOOKUP, replace(config, urls=("http://127.0.0.1:1",)), None, experts=False)
    check_run(LOOKUP, config, SamplingParams(temperature=0.7), experts=False)
    check_run(NOTHING, replace(config, urls=("http://127.0.0.1:1",)), SamplingParams(top_p=0.9), experts=True)
    draft = Speculation(method="draft", draft="somewhere")
    if name == "vllm":
        check_run(draft, config, None, experts=False)
    else:
        with pytest.raises(ConfigError, match="loads published weights into the smaller model"):
            check_run(draft, config, None, experts=False)


@pytest.mark.parametrize(
    ("config", "word"), [(VLLMConfig, "--speculative-config"), (SGLangConfig, "--speculative-algorithm=NGRAM")]
)
def test_guesses_are_no_argument_of_a_server(config: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=r"speculation\.method"):
        config(arguments=(word,))


def test_a_smaller_model_with_other_tokens_or_none_at_all_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    check_draft(LOOKUP, tiny_model_dir)
    check_draft(Speculation(method="draft", draft=str(tiny_model_dir)), tiny_model_dir)
    with pytest.raises(ConfigError, match=r"speculation\.draft = .*config\.json"):
        check_draft(Speculation(method="draft", draft=str(tmp_path / "nowhere")), tiny_model_dir)
    other = write_model(tmp_path / "other", vocab_size=30)
    write_tokenizer(other, "0123456789")
    with pytest.raises(ConfigError, match=r"speculation\.draft"):
        check_draft(Speculation(method="draft", draft=str(other)), tiny_model_dir)


def test_temperatures_are_repeated_for_guessed_positions_and_greedy_ones_replaced() -> None:
    torch = pytest.importorskip("torch")
    found = repeated(torch.tensor([0.5, 0.0, 0.25]), torch.tensor([2, 2, 5], dtype=torch.int32), 5, 0, 1)
    assert found.tolist() == [0.5, 0.5, 0.25, 0.25, 0.25]
    found = repeated(torch.tensor([0.0, 0.5]), torch.tensor([1, 3], dtype=torch.int32), 3, 0, 1)
    assert found.tolist() == [1.0, 0.5, 0.5]
    assert repeated(torch.tensor([7, 9]), torch.tensor([0, 1]), 1).tolist() == [9]
