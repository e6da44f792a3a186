"""Models that SGLang would serve with a head that nobody gave it are refused before a server is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine, check_head
from areal_x.errors import ConfigError
from tests.engines.families import TIED, UNTIED, widened
from tests.model_families import CASES, ON_SGLANG
from tests.models import write_config

# Of the families that it serves else. What it did with them: tests/engines/sglang/test_sglang_families.py.
NO_SUCH_HEAD = {
    "mixtral-tied": "a head of its own (tie_word_embeddings = False), as SGLang fills no tied head of a MixtralForCausalLM",
    "qwen3_moe-tied": "a head of its own (tie_word_embeddings = False), as SGLang fills no tied head of a Qwen3MoeForCausalLM",
    "gemma3_text": "its embedding as head (tie_word_embeddings = True), as SGLang reads no head of a Gemma3ForCausalLM",
}


@pytest.mark.parametrize("head", ["", "-tied"])
@pytest.mark.parametrize("family", ON_SGLANG)
def test_a_model_whose_head_sglang_does_not_have_is_refused(family: str, head: str, tmp_path: Path) -> None:
    model = write_config(widened(CASES[f"{family}-0"]) | (TIED if head else UNTIED), tmp_path / "model")
    if (why := NO_SUCH_HEAD.get(f"{family}{head}")) is None:
        check_head(model)
        return
    with pytest.raises(ConfigError) as refused:
        SGLangEngine(SGLangConfig(context=64, concurrency=4), model, tmp_path)
    assert why in str(refused.value)


@pytest.mark.parametrize("tied", [True, False])
def test_a_config_that_does_not_say_is_taken_as_its_files_are(tied: bool, tmp_path: Path) -> None:
    model = write_config(widened(CASES["gemma3_text-0"]) | (TIED if tied else UNTIED), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    del config["tie_word_embeddings"]
    (model / "config.json").write_text(json.dumps(config))
    if tied:
        check_head(model)
    else:
        with pytest.raises(ConfigError):
            check_head(model)
