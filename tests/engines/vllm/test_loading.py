"""What a version of the weights must fill, by the models of transformers: all that their files have, buffers too."""

from __future__ import annotations

import pytest

from areal_x.engines.vllm.loading import needed
from tests.model_families import CASES

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Of each family, the shape that has buffers.
WITH_BUFFERS = ("deepseek_v3-0", "gemma4_text-0", "glm4_moe-0")


@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_every_buffer_that_a_file_has_must_be_filled_and_no_other(name: str) -> None:
    config = transformers.AutoConfig.for_model(**CASES[name])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    saved, trained = set(model.state_dict()), {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert saved - trained  # it has some
    assert {name for name, _ in model.named_buffers()} - saved  # and some that are computed
    assert needed(model) - trained == saved - trained


def test_scales_of_a_quantised_cache_which_files_may_lack_need_not_be_filled() -> None:
    layer, attention = torch.nn.Linear(1, 1, bias=False), torch.nn.Module()
    for scale in ("k_scale", "v_scale", "q_scale", "prob_scale"):
        attention.register_parameter(scale, torch.nn.Parameter(torch.ones(())))
    layer.attn = attention
    layer.weight_scale_inv = torch.nn.Parameter(torch.ones(1, 1))
    assert needed(torch.nn.ModuleDict({"self_attn": layer})) == {"self_attn.weight", "self_attn.weight_scale_inv"}
