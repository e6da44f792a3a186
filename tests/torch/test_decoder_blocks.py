"""Blocks that are compiled, computed again, or kept on the host: the same steps, and what they are for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

from areal_x.algorithms import losses
from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, TrainerConfig
from areal_x_torch import attention, decoder_blocks, loading
from areal_x_torch import trainer as trainer_module
from areal_x_torch.sharding import make_mesh, shard_model
from tests.model_families import CASES
from tests.models import MODELS, trajectories, write_config
from tests.thorough import thorough

from .test_trainer import all_weights, batch_of, save_model, sequences, trainer_of

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", head_dim=16, tie_word_embeddings=False)


def computed_by(directory, remat):
    """Returns the metrics of an update, the weights after it, and its numbers of matrix products and of saved values."""
    trainer, saved = trainer_of(directory, remat=remat), []
    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x),
    ):
        found = trainer.update(batch_of(sequences())[0], losses.ppo_clip)
    return found, all_weights(trainer), counter.get_total_flops(), sum(saved)


def test_what_is_computed_again_gives_the_same_step_without_products_or_with_them(qwen3):
    ways = "auto", "products", "attention", "layers"
    nothing, products, keeping, layers = (computed_by(qwen3, remat) for remat in ways)
    for other in (products, keeping, layers):
        assert other[0] == nothing[0]
        for name, x in nothing[1].items():
            np.testing.assert_array_equal(other[1][name], x)
        assert other[3] < nothing[3] / 3  # beside the products, or attention's own
    assert products[2] == nothing[2] < keeping[2] == layers[2]  # the counter does not know attention on a CPU


def test_attention_that_is_kept_is_not_computed_again(qwen3, monkeypatch):
    calls = []
    plain = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", lambda *q, **how: calls.append(1) or plain(*q, **how))
    counts = {}
    for remat in ("auto", "attention", "layers"):
        calls.clear()
        trainer_of(qwen3, remat=remat).update(batch_of(sequences())[0], losses.ppo_clip)
        counts[remat] = len(calls)
    assert 0 < counts["auto"] == counts["attention"] == counts["layers"] / 2


def test_auto_takes_the_first_that_fits_into_three_fifths_of_what_is_left(qwen3):
    built = loading.build(qwen3, "policy")
    products = decoder_blocks.product_width(built)
    assert products == 2 * (64 + 32 + 32 + 32 + 48 + 48 + 32)  # q, k, v, o, gate, up and down of both layers
    config = TrainerConfig(ModelConfig(str(qwen3)), mesh=MeshConfig(fsdp=2, processes=2))
    state = 16 * sum(x.numel() for x in built.parameters()) // 2
    assert decoder_blocks.free_bytes(built, config, state + 1000) == 600
    assert decoder_blocks.free_bytes(built, config, None) is None
    kept = decoder_blocks.attention_bytes(built, torch.bfloat16)
    assert kept == 2 * ((64 + 32 + 32 + 64) * 2 + 32 * 4)  # q, k, v and what attention gives; the input in fp32
    least = 10 * kept / (2 * products)
    for room, wanted in (
        (None, "nothing"),
        (55, "nothing"),
        (54, "products"),
        (20, "products"),
        (19, "attention"),
        (least, "attention"),
        (least - 0.1, "layers"),
    ):
        bytes_of_room = room if room is None else room * products * 2
        assert decoder_blocks.choose(config, torch.bfloat16, products, bytes_of_room, kept, 10) == wanted
    compiled = replace(config, compile=True)  # which recomputes what is elementwise
    for room, wanted in ((20, "nothing"), (19, "attention")):
        assert decoder_blocks.choose(compiled, torch.bfloat16, products, room * products * 2, kept, 10) == wanted


def test_what_latent_attention_keeps_has_the_widths_of_its_heads(tmp_path):
    """In bf16, of both layers: queries and keys of 12 features, values and what attention gives of 6; the input in fp32."""
    built = loading.build(write_config(CASES["deepseek_v3-0"] | {"num_hidden_layers": 2}, tmp_path / "model"), "policy")
    assert decoder_blocks.attention_bytes(built, torch.bfloat16) == 2 * (2 * 4 * (12 + 6) * 2 + 32 * 4)


@thorough
def test_the_same_programs_serve_every_block_and_every_length(tmp_path):
    counts = {}
    torch._dynamo.reset()
    for depth in (1, 2):
        directory = write_config({**MODELS["qwen3"], "num_hidden_layers": depth}, tmp_path / str(depth))
        plain, compiled = trainer_of(directory), trainer_of(directory, compile=True)
        counters.clear()
        for lengths in ((9, 5, 12), (3, 8, 4, 11), (16,)):
            batch, _ = batch_of(trajectories(*lengths, vocab=40))
            expected, found = (trainer.update(batch, losses.ppo_clip) for trainer in (plain, compiled))
            assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        counts[depth] = counters["stats"]["unique_graphs"]
    # The norm, what goes into attention, what comes out of it, and the MLP; a model of another depth needs no others.
    assert 0 < counts[1] <= 4
    assert counts[2] == 0


@pytest.fixture
def alone() -> Iterator[None]:
    """A test that makes a mesh of one process, and leaves none."""
    yield
    dist.destroy_process_group()


def test_a_model_on_the_host_learns_the_same(qwen3, alone, monkeypatch):
    # On a CPU the host is the device: that each block is brought and given up is tested, not that memory is saved.
    mesh = make_mesh(MeshConfig(), CPU, offload=True)
    monkeypatch.setattr(trainer_module, "make_mesh", lambda *_: mesh)
    monkeypatch.setattr(trainer_module, "shard_model", lambda *of, **_: shard_model(*of, offload=True))
    offloaded = trainer_of(qwen3)
    monkeypatch.undo()
    plain, (batch, _) = trainer_of(qwen3), batch_of(sequences())
    for _ in range(2):
        expected, found = (trainer.update(batch, losses.ppo_clip) for trainer in (plain, offloaded))
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
    for name, x in offloaded.weights():
        np.testing.assert_allclose(x, dict(plain.weights())[name], atol=1e-6)


def test_only_an_accelerator_offloads(qwen3, monkeypatch):
    asked = []

    def noting(mesh, device, offload):
        asked.append(offload)
        raise StopIteration

    monkeypatch.setattr(trainer_module, "make_mesh", noting)
    for kind in ("cpu", "cuda"):
        monkeypatch.setattr(trainer_module, "find_device", lambda kind=kind: torch.device(kind))
        with pytest.raises(StopIteration):
            trainer_of(qwen3, offload=True)
    assert asked == [False, True]
