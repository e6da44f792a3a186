"""The addition model is an ordinary Hugging Face directory: transformers agrees with what was written without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.arithmetic.model import END, PAD, VOCABULARY, encode, write_model
from examples.arithmetic.task import ALPHABET
from examples.tiny.model import config_of, tensor_shapes


def expected_spread(name: str) -> float:
    """1 / sqrt(inputs): 128 but for the MLP's output (384); by sqrt(2 · 3 layers) less for the two that add to the residual."""
    if "embed" in name:
        return 0.3
    return {"o_proj": 1 / (128 * 6) ** 0.5, "down_proj": 1 / (384 * 6) ** 0.5}.get(name.split(".")[-2], 1 / 128**0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("arithmetic")
    write_model(directory, seed=0)
    return directory


def test_the_tokenizer_has_one_token_a_character_in_transformers_too(model: Path) -> None:
    from areal_x.hf.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    text = "730+8594=0+4=4,3+9=12,7+5+1=13,0+8+1=9>9324"
    assert tokenizer.encode(text) == encode(text).tolist()
    assert tokenizer.encode(ALPHABET) == list(range(2, 2 + len(ALPHABET)))
    assert tokenizer.decode([*encode(text), END], skip_special_tokens=True) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (END, PAD)
    assert len(tokenizer) == len(VOCABULARY)


def test_transformers_expects_the_very_tensors_that_are_written(model: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    shapes = {name: tuple(x.shape) for name, x in expected.state_dict().items()}
    assert shapes == dict(tensor_shapes(config_of(ALPHABET)))
    assert {name: x.shape for name, x in load_file(model / "model.safetensors").items()} == shapes
    assert sum(x.numel() for x in expected.parameters()) == 595_008


def test_random_weights_keep_the_scale_of_what_flows_through_and_are_fixed_by_the_seed(model: Path, tmp_path: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    for name, x in tensors.items():
        if x.ndim == 1:
            assert (x == 1).all(), name
        else:
            assert x.std() == pytest.approx(expected_spread(name), rel=0.06), name
    write_model(tmp_path / "again", seed=0)
    write_model(tmp_path / "other", seed=1)
    again, other = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "other"))
    assert all(np.array_equal(again[name], x) for name, x in tensors.items())
    assert not np.array_equal(other["lm_head.weight"], tensors["lm_head.weight"])
