"""The FLOPs that benchmarks/update.py and gpu.py take a step for, against torch's own count of transformers' models."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from areal_x_jax.architecture import read_architecture
from areal_x_torch.experts import is_experts
from benchmarks.shapes import LARGE, SMALL, attention_flops, flops_of, parameters_in_products, parameters_of
from tests.thorough import further

TOKENS = 32


@pytest.mark.parametrize("family", ["latent", "gpt-oss", "hybrid-mixture", *further("dense", "mixture", "hybrid", "gemma4")])
def test_parameters_in_products_are_those_that_torch_multiplies_with(family: str) -> None:
    config = SMALL[family] | {"num_hidden_layers": 4, "vocab_size": 512}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(TOKENS)[None])
    found = counter.get_flop_counts()
    multiplies = [
        f"{type(model).__name__}.{name}"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or is_experts(module) or type(module).__name__.endswith("Router")
    ]
    counted = sum(sum(found[name].values()) for name in multiplies if name in found)
    # Short convolutions of hybrids, a few thousandths, are no modules that multiply.
    assert counted == pytest.approx(2 * TOKENS * parameters_in_products(read_architecture(config)), rel=5e-3)


def test_attention_counts_the_pairs_that_a_window_leaves() -> None:
    arch = read_architecture(SMALL["gpt-oss"])
    lengths = np.array([4096, 100])
    pairs = sum(np.minimum(np.arange(1, n + 1), window or n).sum() for n in lengths for window in arch.windows)
    assert 128 in arch.windows
    assert 0 in arch.windows
    assert attention_flops(arch, lengths) == pytest.approx(6 * 6 * 128 * pairs, rel=2e-3)


def test_a_step_of_the_dense_model_is_what_it_was_counted_as_before_there_were_families() -> None:
    arch, lengths = read_architecture(SMALL["dense"]), np.array([1000, 24])
    products = 8 * (2 * 384 * 384 + 2 * 384 * 128 + 3 * 384 * 1152) + 384 * 32000
    assert flops_of(arch, lengths) == 6 * products * 1024 + 6 * 8 * 6 * 64 * (1000**2 + 24**2)


@pytest.mark.parametrize("name", LARGE)
def test_a_few_layers_of_a_published_model_fit_one_gpu_with_16_bytes_a_parameter(name: str) -> None:
    assert 1e9 < parameters_of(read_architecture(LARGE[name])) < 78 * 2**30 / 16 * 0.8
