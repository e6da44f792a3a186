"""How layers are split over a tensor group: rows of fused layers, and what is refused."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoConfig, AutoModelForCausalLM

from areal_x.errors import ConfigError
from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, TrainerConfig
from areal_x_torch import preflight
from areal_x_torch.split_linear import exchanged_rows
from areal_x_torch.tensor_split import SUMMED, _own_head, styles_of
from tests.model_families import CASES
from tests.models import write_config

from .test_context_parallel import together


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("fused", [(8, 8), (16, 4, 4), (4, 12, 8)])
def test_each_process_has_its_part_of_every_fused_layer(monkeypatch: Any, processes: int, fused: tuple[int, ...]) -> None:
    whole = torch.arange(sum(fused) * 3.0).view(-1, 3)
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(0))
    of_layers = [layer.chunk(processes) for layer in whole.split(fused)]
    expected = [torch.cat([layer[rank] for layer in of_layers]) for rank in range(processes)]
    weights_of = [torch.cat([x.chunk(processes)[rank] for x in weights.split(fused)]) for rank in range(processes)]

    def compute(group: Any, rank: int) -> Any:
        part = whole.chunk(processes)[rank].clone().requires_grad_()
        own = exchanged_rows(part, fused, group)
        return own, torch.autograd.grad((own * weights_of[rank]).sum(), part)[0]

    for rank, (own, gradient) in enumerate(together(monkeypatch, processes, compute)):
        torch.testing.assert_close(own, expected[rank])
        torch.testing.assert_close(gradient, weights.chunk(processes)[rank])


SIX_HEADS = {"hidden_size": 48, "num_attention_heads": 6}


def model_of(case: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**CASES[case], **changes}))


def test_norms_of_single_heads_that_no_plan_names_are_summed() -> None:
    styles = styles_of(model_of("glm4_moe-0"), 2)
    assert "layers.*.self_attn.q_norm" not in AutoConfig.for_model("glm4_moe", head_dim=8).base_model_tp_plan
    assert styles["layers.0.self_attn.q_norm"] == styles["layers.1.self_attn.k_norm"] == SUMMED


def test_latent_attention_is_split_by_heads_whatever_transformers_plan_says() -> None:
    for case in ("deepseek_v2-0", "deepseek_v3-1", "youtu-0", "glm4_moe_lite-0"):
        styles = styles_of(model_of(case), 2)
        names = {name.rpartition(".")[2] for name in styles if name.startswith("layers.0.self_attn.")}
        assert names == {"q_proj" if case == "deepseek_v3-1" else "q_b_proj", "kv_b_proj", "kv_a_proj_with_mqa", "o_proj"}


def test_a_parameter_among_split_ones_that_no_plan_names_is_refused() -> None:
    model = model_of("llama-0")
    model.model.layers[1].self_attn.index_norm = torch.nn.LayerNorm(5)
    with pytest.raises(ConfigError, match=r"no plan names layers\.1\.self_attn\.index_norm .*llama model: use mesh\.fsdp"):
        styles_of(model, 2)
    model = model_of("llama-0")
    model.model.layers[0].self_attn.slopes = torch.nn.Parameter(torch.zeros(8))  # as many as a head is wide
    with pytest.raises(ConfigError, match=r"no plan names layers\.0\.self_attn among"):
        styles_of(model, 2)


@pytest.mark.parametrize(
    ("case", "changes", "wanted"),
    [
        (
            "qwen2_moe-0",
            {"shared_expert_intermediate_size": 39},
            r"of the 39 outputs of the model's layers\.0\.mlp\.share",
        ),
        ("glm-0", {"intermediate_size": 47}, r"of the 47 outputs of the model's layers\.0\.mlp\.gate_up_proj"),
        ("phi3-0", {"num_key_value_heads": 1}, "of the model's num_key_value_heads = 1"),
        ("olmo2-0", {"num_key_value_heads": 1}, "of the model's num_key_value_heads = 1"),
        ("llama-0", SIX_HEADS | {"num_key_value_heads": 3}, "or a multiple of the model's num_key_value_heads = 3"),
        (
            "gemma4_text-1",
            SIX_HEADS | {"num_key_value_heads": 2, "num_global_key_value_heads": 3},
            "or a multiple of the model's num_key_value_heads = 3 in layer 1",
        ),
        ("gemma4_text-0", {"vocab_size_per_layer_input": 51}, "of the model's vocab_size_per_layer_input = 51"),
    ],
)
def test_what_a_tensor_group_does_not_divide_is_refused_at_check(
    case: str, changes: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CASES[case], **changes}))
    mesh = MeshConfig(processes=2, tensor=2)
    with pytest.raises(ConfigError, match=rf"mesh\.tensor = 2 cannot work: it must be a divisor {wanted}"):
        preflight.check(TrainerConfig(model=ModelConfig(path=str(tmp_path)), mesh=mesh))


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_that_share_a_key_head_take_it_from_all_and_sum_its_gradient(monkeypatch: Any, processes: int) -> None:
    torch.manual_seed(0)
    heads, width = 2, 3
    keys, weight = torch.nn.Linear(5, heads * width), torch.randn(processes, width)
    x = torch.randn(7, 5)
    expected = torch.stack([keys(x).view(7, heads, width)[:, rank * heads // processes] for rank in range(processes)])
    (whole,) = torch.autograd.grad((expected * weight[:, None]).sum(), keys.weight)

    def compute(group: Any, rank: int) -> Any:
        own = copy.deepcopy(keys)
        own.register_forward_hook(partial(_own_head, width, group))
        found = own(x)
        return found, torch.autograd.grad((found * weight[rank]).sum(), own.weight)[0]

    for rank, (found, gradient) in enumerate(together(monkeypatch, processes, compute)):
        torch.testing.assert_close(found, expected[rank])
        torch.testing.assert_close(gradient, whole)


@pytest.mark.parametrize(
    ("case", "mesh", "changes", "wanted"),
    [
        ("llama-0", {"processes": 4, "stage": 2}, {}, r"mesh\.stage > 1, whose stages exchange whole rows"),
        ("llama-0", {}, {"compile": True}, r"trainer\.compile, whose programs"),
        ("qwen3_5-0", {}, {}, "a model with images"),
    ],
)
def test_what_tokens_cannot_be_exchanged_in_is_refused_at_check(
    case: str, mesh: dict[str, int], changes: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    write_config(CASES[case], tmp_path)
    config = MeshConfig(**{"processes": 2, "tensor": 2, "sequence": True, **mesh})
    with pytest.raises(ConfigError, match=rf"mesh\.sequence = True cannot work: it must be False with {wanted}"):
        preflight.check(TrainerConfig(model=ModelConfig(path=str(tmp_path)), mesh=config, **changes))


def test_tokens_are_exchanged_in_tensor_groups_alone() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.sequence = True .* False with mesh\.tensor = 1"):
        MeshConfig(processes=2, fsdp=2, sequence=True)
