"""Which rotations servers compute otherwise than transformers, and that exactly those are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_x.engines.fleet.rotations import check_rotations
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.engine import SGLangEngine
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.errors import ConfigError
from tests.model_families import CASES
from tests.thorough import further

# Rotation → a part of why it is refused, by vLLM and by SGLang.
LEFT_OUT, APPLIED, ALONE = "leaves out of proportional", "applies and transformers does not", "without its other fields"
PART, LLAMA3 = {"partial_rotary_factor": 0.5}, {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAR = {"factor": 4.0, "original_max_position_embeddings": 16}
ROTATIONS: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "default": ({"rope_type": "default"}, None, None),
    "default of a part": ({"rope_type": "default", **PART}, APPLIED, APPLIED),
    "proportional": ({"rope_type": "proportional", **PART}, None, None),
    "proportional by a factor": ({"rope_type": "proportional", "factor": 2.0, **PART}, LEFT_OUT, LEFT_OUT),
    "linear": ({"rope_type": "linear", "factor": 2.0}, None, ALONE),
    "yarn": ({"rope_type": "yarn", **FAR}, None, ALONE),
    "llama3": ({"rope_type": "llama3", **FAR, **LLAMA3}, None, ALONE),
}


def config_of(full: dict[str, Any]) -> dict[str, Any]:
    near = {"rope_type": "default", "rope_theta": 1e4}
    rotations = {"sliding_attention": near, "full_attention": {"rope_theta": 500.0, **full}}
    return CASES["gemma4_text-2"] | {"rope_parameters": rotations}


@pytest.mark.parametrize("name", ROTATIONS)
def test_a_rotation_that_servers_compute_otherwise_is_refused(name: str, tmp_path: Path) -> None:
    full, *why = ROTATIONS[name]
    whole = {"model_type": "gemma4", "text_config": config_of(full)}
    for kind, refused in zip(("vLLM", "SGLang"), why, strict=True):
        for config in (config_of(full), whole):
            (tmp_path / "config.json").write_text(json.dumps(config))
            if refused is None:
                check_rotations(kind, tmp_path)
                continue
            with pytest.raises(ConfigError, match=rf"full_attention layers, which .*{refused}.* train\.engine = 'embedded'"):
                check_rotations(kind, tmp_path)


def test_a_part_of_the_pairs_of_another_family_is_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "glm4", "rope_parameters": {"rope_type": "default", **PART}})
    )
    for kind in ("vLLM", "SGLang"):
        check_rotations(kind, tmp_path)


@pytest.mark.parametrize(("engine", "config"), [(VLLMEngine, VLLMConfig), (SGLangEngine, SGLangConfig)])
def test_an_engine_is_not_made_for_it(engine: Any, config: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config_of(ROTATIONS["proportional by a factor"][0])))
    settings = config(context=64, concurrency=4)
    with pytest.raises(ConfigError, match=LEFT_OUT):
        engine(settings, model, tmp_path)


@pytest.mark.parametrize("name", further(*ROTATIONS))
def test_vllm_turns_as_transformers_does_exactly_what_is_not_refused(name: str) -> None:
    pytest.importorskip("vllm")
    torch = pytest.importorskip("torch")
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    full, refused, _ = ROTATIONS[name]
    config = Gemma4TextConfig(**config_of(full))
    width, positions = config.per_layer_config["full_attention"].head_dim, torch.arange(40)
    with set_current_vllm_config(VllmConfig()):
        turn = get_rope(
            width, max_position=64, rope_parameters=dict(config.rope_parameters["full_attention"]), dtype=torch.float32
        )
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(0))
    found, _ = turn.forward_native(positions, x.clone(), x.clone())
    cos, sin = Gemma4TextRotaryEmbedding(config)(x[None], positions[None], "full_attention")
    turned = torch.cat([-x[:, width // 2 :], x[:, : width // 2]], dim=-1)
    deviation = float((found - (x * cos[0] + turned * sin[0])).abs().max())
    assert deviation > 0.1 if refused else deviation < 1e-5
