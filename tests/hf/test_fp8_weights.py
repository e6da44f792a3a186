"""Weights in block-scaled fp8: the numbers that trainers round to, and models that transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from areal_x.engines.fleet.config import FP8
from areal_x.engines.fleet.quantised import check_quantised
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.errors import ConfigError
from areal_x.hf import fp8_weights
from areal_x.hf.model_dir import read_tensors, shapes
from tests.model_families import CASES
from tests.models import write_config
from tests.thorough import further

RNG = np.random.default_rng(0)
# Blocks of other sizes at the ends, one of zeros, and numbers that e4m3 and its scales only just hold.
W = RNG.normal(size=(300, 200)).astype(np.float32) * np.exp2(RNG.integers(-30, 30, (300, 200)))
W[:128, :128], W[200, 150], W[299, 3] = 0, 448 * 2.0**40, -(2.0**-120)


def dequantised(rounded: np.ndarray, scales: np.ndarray) -> np.ndarray:
    each = np.kron(scales, np.ones((fp8_weights.BLOCK, fp8_weights.BLOCK), np.float32))
    return rounded.astype(np.float32) * each[: rounded.shape[0], : rounded.shape[1]]


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_numbers_are_those_that_trainers_round_to(dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    from areal_x_torch.fp8 import round_blocks

    weight = W.astype(dtype)
    rounded, scales = fp8_weights.round_blocks(weight)
    assert (rounded.dtype, rounded.shape, scales.dtype) == (ml_dtypes.float8_e4m3fn, W.shape, np.float32)
    assert scales.shape == (3, 2)
    assert (np.frexp(scales)[0] == 0.5).all()
    expected = round_blocks(torch.tensor(weight.astype(np.float32))).numpy()
    np.testing.assert_array_equal(dequantised(rounded, scales), expected)
    again = dequantised(*fp8_weights.round_blocks(expected))
    np.testing.assert_array_equal(again, expected)


WIDE = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 384}
FP8_MODELS = {
    "qwen3": CASES["qwen3-0"] | WIDE,
    "llama-tied": CASES["llama-1"] | WIDE,
    "qwen3_moe": CASES["qwen3_moe-0"] | WIDE | {"moe_intermediate_size": 128},
}


@pytest.mark.parametrize("name", ["qwen3", *further("llama-tied", "qwen3_moe")])
def test_transformers_reads_the_model_with_the_rounded_numbers(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8

    # It asks for accelerate, which places layers on devices, and needs it for nothing here.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)

    source, stored = write_config(FP8_MODELS[name], tmp_path / "source"), tmp_path / "fp8"
    fp8_weights.write_model(stored, source)
    whole = {tensor: torch.tensor(x) for tensor, x in read_tensors(source)}
    quantised = {tensor for tensor, x in whole.items() if fp8_weights.is_kernel(tensor, tuple(x.shape))}
    found = shapes(stored)
    assert found.keys() == whole.keys() | {f"{tensor}_scale_inv" for tensor in quantised}
    assert {tensor.rpartition(".layers.")[2].partition(".")[2].rpartition(".")[0] for tensor in quantised} >= {
        *(f"self_attn.{x}_proj" for x in "qkvo")
    }
    assert not any("norm" in tensor or tensor.endswith("mlp.gate.weight") for tensor in quantised)
    read = AutoModelForCausalLM.from_pretrained(
        stored, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    from areal_x_torch.fp8 import round_blocks

    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for place, p in expected.named_parameters():
        if p.ndim == 3 or (".layers." in place and place.endswith("_proj.weight")):
            p.data = round_blocks(p.data)
    state = read.state_dict()
    for place, x in expected.state_dict().items():
        torch.testing.assert_close(state[place], x, rtol=0, atol=0, msg=place)


@pytest.mark.parametrize(
    ("config", "tensor", "why"),
    [
        (FP8_MODELS["qwen3"], 1, None),
        (
            FP8_MODELS["qwen3"] | {"intermediate_size": 512},
            2,
            "the 128 rows of .*k_proj.* are no whole blocks of 128 in 2 parts",
        ),
        (CASES["qwen3-0"], 1, r"rows of .* are no whole blocks of 128"),
        (CASES["gpt_oss-0"], 1, "holds all experts of a layer"),
    ],
)
def test_a_model_that_servers_cannot_take_in_blocks_is_refused(
    config: dict[str, Any], tensor: int, why: str | None, tmp_path: Path
) -> None:
    model = write_config(config, tmp_path)
    engine = VLLMConfig(quantization=FP8, tensor=tensor)
    if why is None:
        check_quantised(engine, False, model)
        with pytest.raises(ConfigError, match=r"vllm\.quantization = 'fp8' .* left out with adapters"):
            check_quantised(engine, True, model)
        return
    with pytest.raises(ConfigError, match=why):
        check_quantised(engine, False, model)


@pytest.mark.parametrize(
    ("beside", "why"),
    [
        ({"urls": ("http://127.0.0.1:1",)}, "another form"),
        ({"delta": 3}, "single numbers"),
    ],
)
@pytest.mark.parametrize("engine", [VLLMConfig, SGLangConfig])
def test_what_is_not_written_in_fp8_is_refused(engine: Any, beside: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        engine(quantization=FP8, **beside)
    with pytest.raises(ConfigError, match=r"one of .*'fp8'"):
        engine(quantization="int4")


def test_weights_from_the_trainers_own_memory_are_not_in_fp8() -> None:
    with pytest.raises(ConfigError, match="only files are written so"):
        VLLMConfig(quantization=FP8, transport="nccl")


def test_matrices_outside_of_the_decoders_layers_stay_as_they_are(tmp_path: Path) -> None:
    names = {
        "model.language_model.layers.0.mlp.up_proj.weight": True,
        "model.visual.blocks.0.mlp.up_proj.weight": False,
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.weight": False,
        "model.layers.0.mlp.gate.weight": False,
        "model.layers.0.mlp.experts.3.gate_proj.weight": True,
        "model.layers.1.linear_attn.in_proj_ba.weight": False,
        "model.embed_tokens.weight": False,
        "lm_head.weight": False,
    }
    of = dict.fromkeys(names, (128, 128))
    assert {name: fp8_weights.is_kernel(name, shape) for name, shape in of.items()} == names
    config = fp8_weights.config_of({}, of | {"model.layers.0.input_layernorm.weight": (128,)})["quantization_config"]
    kept = {name.removesuffix(".weight") for name, stored in names.items() if not stored}
    assert set(config["modules_to_not_convert"]) == kept
