"""Products of numbers rounded to fp8, on both backends, beside numpy's formula of each block."""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("areal_x_jax")

import areal_x_jax.fp8 as in_jax
import areal_x_torch.fp8 as in_torch
from areal_x.algorithms.losses import sft
from areal_x.algorithms.weighting import token_mean
from areal_x.batching.packing import pack
from areal_x.errors import ConfigError
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.sampler import SlotRequest
from areal_x.protocols.trainer_config import LoRAConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Trajectory
from areal_x_torch import loading
from tests.model_families import CASES
from tests.models import trajectories, write_config
from tests.thorough import further, thorough

RNG = np.random.default_rng(0)
X = (RNG.normal(size=(150, 200)) * np.exp(3 * RNG.normal(size=(150, 1)))).astype(np.float32)
X[7], X[8, :128], X[9], X[10] = 0, 448.0, 1e-38, X[10] * 1e30
X[11] = np.float32(17 * 2.0**-5) * np.arange(200)  # halves between two numbers of e4m3
W = RNG.normal(size=(200, 140)).astype(np.float32)
G = RNG.normal(size=(150, 140)).astype(np.float32)


def block(x: np.ndarray) -> np.ndarray:
    """One block: the scale is the power of two with which the largest is at most 448."""
    largest = max(float(np.abs(x).max()), 2.0**-100)
    scale = 2.0 ** np.ceil(np.log2(largest / 448))
    return ((x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).astype(x.dtype)


def by_blocks(x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    found = np.empty_like(x)
    for i, j in product(range(0, len(x), rows), range(0, x.shape[1], columns)):
        here = slice(i, i + rows), slice(j, j + columns)
        found[here] = block(x[here])
    return found


def test_both_backends_round_to_the_bits_of_the_formula() -> None:
    for rows, columns, name, more in (
        (1, 128, "round_tiles", {}),
        (128, 1, "round_tiles", {"axis": -2}),
        (128, 128, "round_blocks", {}),
    ):
        expected = by_blocks(X, rows, columns)
        assert np.abs(expected[20:] - X[20:]).max() > 0
        compiled = jax.jit(partial(getattr(in_jax, name), **more))
        ours = compiled(X)
        np.testing.assert_array_equal(np.asarray(ours), expected)
        theirs = getattr(in_torch, name)(torch.tensor(X), **more)
        np.testing.assert_array_equal(theirs.numpy(), expected)
        low = compiled(X.astype(ml_dtypes.bfloat16))
        also = getattr(in_torch, name)(torch.tensor(X).bfloat16(), **more)
        np.testing.assert_array_equal(np.asarray(low, np.float32), also.float().numpy())
    with pytest.warns(DeprecationWarning, match="torch.jit.trace"):
        graph = torch.jit.trace(in_torch.round_tiles, (torch.ones(150, 200),), check_trace=False)
    np.testing.assert_array_equal(graph(torch.tensor(X)).numpy(), by_blocks(X, 1, 128))
    stack = np.stack([W, -2 * W, W**3])
    each = np.stack([by_blocks(x, 128, 128) for x in stack])
    np.testing.assert_array_equal(np.asarray(in_jax.round_blocks(jax.numpy.asarray(stack))), each)
    np.testing.assert_array_equal(in_torch.round_blocks(torch.tensor(stack)).numpy(), each)
    np.testing.assert_array_equal(in_torch.round_blocks(torch.tensor(each)).numpy(), each)  # again


def products(backend: str) -> tuple[np.ndarray, ...]:
    """Output and gradients of x and W, of x · W."""
    if backend == "jax":

        @jax.jit
        def all_three(x: Any, w: Any, g: Any) -> tuple[Any, ...]:
            y, pull = jax.vjp(lambda x, w: in_jax.linear(x, in_jax.Kernel(w, False)), x, w)
            return y, *pull(g)

        return tuple(map(np.asarray, all_three(x(), W, G)))
    x_, w = (torch.tensor(np.array(v), requires_grad=True) for v in (x(), W.T))
    y = in_torch.product(x_, w, None)
    y.backward(torch.tensor(G))
    return y.detach().numpy(), x_.grad.numpy(), w.grad.numpy().T


def x() -> Any:
    return jax.numpy.asarray(np.where(np.abs(X) < 1e4, X, 1))


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_the_three_products_are_those_of_rounded_numbers(backend: str) -> None:
    y, d_x, d_w = products(backend)
    own, weights = np.asarray(x()), by_blocks(W, 128, 128)
    assert_near(y, by_blocks(own, 1, 128), weights)
    assert_near(d_x, by_blocks(G, 1, 128), weights.T)
    assert_near(d_w, by_blocks(own, 128, 1).T, by_blocks(G, 128, 1))


def assert_near(found: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    """A product of two matrices in fp32."""
    terms = np.abs(left).astype(np.float64) @ np.abs(right)
    assert (np.abs(found - left.astype(np.float64) @ right) <= 1e-5 * terms + 1e-30).all()


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_experts_products_are_those_of_rounded_numbers(backend: str) -> None:
    sizes, kernels = np.array([40, 0, 110], np.int32), np.stack([W, -W, W**2])
    tiles, g = by_blocks(np.asarray(x()), 1, 128), by_blocks(G, 1, 128)
    rounded = [by_blocks(w, 128, 128) for w in kernels]
    if backend == "jax":
        of = lambda x, w: in_jax.ragged_dot(x, in_jax.Kernel(w, False), jax.numpy.asarray(sizes))  # noqa: E731
        y, pull = jax.vjp(of, x(), jax.numpy.asarray(kernels))
        y, d_x, d_w = map(np.asarray, (y, *pull(jax.numpy.asarray(G))))
    else:
        left, right = (torch.tensor(np.array(v), requires_grad=True) for v in (x(), kernels))
        y = in_torch.grouped_product(left, right, torch.tensor(sizes))
        y.backward(torch.tensor(G))
        y, d_x, d_w = y.detach().numpy(), left.grad.numpy(), right.grad.numpy()
    for expert, here in ((0, slice(40)), (2, slice(40, 150))):
        assert_near(y[here], tiles[here], rounded[expert])
        assert_near(d_x[here], g[here], rounded[expert].T)
        assert_near(d_w[expert], tiles[here].T, g[here])


def make(backend: str, directory: Path, precision: str = "fp8", **changes: Any) -> Any:
    optimizer = OptimizerConfig(learning_rate=3e-3)
    config = TrainerConfig(ModelConfig(str(directory)), optimizer, precision=precision, **changes)
    return create_trainer(backend, config)


def batch_of_all() -> Any:
    packed = pack(trajectories(17, 9, 12), 32)
    weights = np.asarray(token_mean(packed.batch.mask, packed.batch.segment_ids), np.float32)
    return packed.batch.replace(weights=weights)


FURTHER = "qwen3_moe-0", "deepseek_v3-0", "qwen3_next-0", "gpt_oss-0"


@pytest.mark.parametrize(
    "backend, name", [("torch", "qwen3-0"), *further(("jax", "qwen3-0"), *product(("jax", "torch"), FURTHER))]
)
def test_training_follows_the_losses_of_fp32(backend: str, name: str, tmp_path: Path) -> None:
    directory, batch = write_config(CASES[name], tmp_path), batch_of_all()
    exact, low, rounded = (make(backend, directory, precision) for precision in ("fp32", "bf16", "fp8"))
    gaps = [np.abs(made.logprobs(batch) - exact.logprobs(batch)).sum() for made in (low, rounded)]
    assert 3 < gaps[1] / gaps[0] < 20  # e4m3 has 4 bits fewer than bf16
    curves: Any = np.array([[made.update(batch, sft)["loss"] for _ in range(12)] for made in (exact, rounded)])
    assert curves[:, -1].max() < 0.5 * curves[0, 0]
    assert np.abs(curves[1] - curves[0]).mean() < 0.1 * curves[0, 0]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_backends_agree_and_only_kernels_of_blocks_are_rounded(backend: str, tmp_path: Path) -> None:
    directory, batch = write_config(CASES["qwen3-0"], tmp_path), batch_of_all()
    made = make(backend, directory)
    if backend == "torch":
        other = make("jax", directory)
        gap = np.abs(made.logprobs(batch) - other.logprobs(batch)).sum() / batch.mask.sum()
        assert gap < 0.1  # that of fp32 is 0.19
        kinds = {name for name, module in made.model.named_modules() if isinstance(module, in_torch.Fp8Linear)}
        layers = made.model.config.num_hidden_layers
        assert len(kinds) == 7 * layers
        assert all(".layers." in name for name in kinds)
    assert {x.dtype.name for _, x in made.weights()} == {"bfloat16"}
    masters = (x for _, x in made.own_tensors())
    assert {x.dtype.name for x in masters} == {"float32"}


@pytest.mark.parametrize(
    "backend, name", [("torch", "qwen3-0"), *further(("jax", "qwen3-0"), ("jax", "qwen3_moe-0"), ("torch", "qwen3_moe-0"))]
)
def test_the_sampler_rounds_as_the_trainer_does(backend: str, name: str, tmp_path: Path) -> None:
    made = make(backend, write_config(CASES[name], tmp_path))
    sampler = made.sampler(2, 32)
    sampler.load(made.snapshot())
    prompt = np.arange(3, 9, dtype=np.int32)
    sampler.fill([SlotRequest(0, prompt, 0, SamplingParams(max_tokens=12), 0)])
    decoded = sampler.decode(12, 2)
    count = int(decoded.counts[0])
    tokens = np.concatenate([prompt, decoded.tokens[0, :count]])
    one = Trajectory.from_completion(prompt, tokens[len(prompt) :], np.zeros(count), np.zeros(count))
    packed = pack([one], 32)
    (found,) = packed.gather(made.logprobs(packed.batch))
    # Other sums of bf16 let a few numbers round elsewhere; a sampler that does not round is 0.19 away.
    assert np.abs(found[len(prompt) :] - decoded.logprobs[0, :count]).mean() < 0.1


@pytest.mark.parametrize(
    "backend, name", [("torch", "qwen3_moe-0"), *further(("jax", "qwen3_moe-0"), ("jax", "deepseek_v3-0"))]
)
def test_kernels_of_blocks_experts_too_can_be_rounded_before_and_nothing_else(backend: str, name: str, tmp_path: Path) -> None:
    made, batch = make(backend, write_config(CASES[name], tmp_path)), batch_of_all()
    before = made.logprobs(batch)
    if backend == "jax":
        low = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), made.params["layers"])
        rounded = in_jax.with_rounded_kernels(low)
        made.params = {**made.params, "layers": {n: x.astype(jax.numpy.float32) for n, x in rounded.items()}}
        kernels = {n for n, x in low.items() if (x != rounded[n]).any()}
        assert {n for n in kernels if n.startswith("experts_")} == {"experts_gate", "experts_up", "experts_down"}
        np.testing.assert_array_equal(made.logprobs(batch), before)
        made.params = {**made.params, "embed": in_jax.round_blocks(made.params["embed"])}
    else:
        with torch.no_grad():
            for place, p in made.model.named_parameters():
                if p.ndim == 3 or place.endswith("_proj.weight"):
                    p.copy_(in_torch.round_blocks(p.bfloat16()))
            np.testing.assert_array_equal(made.logprobs(batch), before)
            embedding = made.model.get_input_embeddings().weight
            embedding.copy_(in_torch.round_blocks(embedding))
    assert np.abs(made.logprobs(batch) - before).max() > 0.01


@pytest.mark.parametrize("backend", ["torch", *further("jax")])
def test_adapters_are_exact_beside_a_rounded_base(backend: str, tmp_path: Path) -> None:
    directory, batch = write_config(CASES["qwen3-0"], tmp_path), batch_of_all()
    made, plain = make(backend, directory, lora=LoRAConfig(4, 8.0)), make(backend, directory)
    np.testing.assert_array_equal(made.logprobs(batch), plain.logprobs(batch))
    losses = [made.update(batch, sft)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.02


@thorough
def test_compiled_blocks_round_alike(tmp_path: Path) -> None:
    directory, batch = write_config(CASES["qwen3-0"], tmp_path), batch_of_all()
    plain, compiled = (make("torch", directory, compile=x) for x in (False, True))
    losses = [[made.update(batch, sft)["loss"] for _ in range(3)] for made in (plain, compiled)]
    np.testing.assert_allclose(losses[1], losses[0], atol=0.1)


def test_a_head_inside_the_language_model_of_a_multimodal_one_is_not_rounded(tmp_path: Path) -> None:
    model = loading.build(write_config(CASES["llama4-0"], tmp_path), "policy")
    in_torch.install(model)
    rounded = {name for name, module in model.named_modules() if isinstance(module, in_torch.Fp8Linear)}
    assert len(rounded) > 10
    assert all(".layers." in name and "vision" not in name for name in rounded)


def test_other_precisions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one of .*'fp8'"):
        TrainerConfig(precision="fp4")
