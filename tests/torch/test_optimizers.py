"""The torch optimizers beside the JAX backend's, in their states' precision, in files, and in parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.multiprocessing as multiprocessing
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import OptimizerConfig
from areal_x_torch.optimizers import Optimizer
from tests.backend_moves import LOSS, deviations, learn, recorded_batches, trainer
from tests.thorough import thorough

KINDS = {"adamw": {}, "adamw-bf16": {"moments": "bf16"}, "adafactor": {}, "muon": {}, "muon-bf16": {"moments": "bf16"}}
SETTINGS = {"learning_rate": 1e-3, "warmup_steps": 3, "schedule": "cosine", "schedule_steps": 10, "weight_decay": 0.1}


def config_of(kind: str) -> OptimizerConfig:
    return OptimizerConfig(name=kind.split("-")[0], **SETTINGS, **KINDS[kind])


@pytest.fixture(scope="module")
def batches(tiny_model_dir):
    return recorded_batches(10, trainer("torch", tiny_model_dir, config_of("adamw")), mean=1.0)


@pytest.mark.parametrize("kind", ["adafactor", "muon"])
def test_ten_updates_are_those_of_the_jax_backend(tiny_model_dir, batches, kind):
    pytest.importorskip("areal_x_jax")
    ours, theirs = (learn([backend], tiny_model_dir, batches, optimizer=config_of(kind)) for backend in ("torch", "jax"))
    found = deviations(ours, theirs)
    assert found[0] < 1e-5
    assert found[2] < 1e-5
    unmoved = dict(model_dir.read_tensors(tiny_model_dir))
    assert deviations(theirs._replace(weights=unmoved), theirs)[2] > 1e-3  # they went somewhere


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest(tiny_model_dir):
    made = trainer("torch", tiny_model_dir, config_of("muon"))
    found = {name for name, p in made.model.named_parameters() if "trace" in made.optimizer.state[p]}
    assert found == {name for name, p in made.model.named_parameters() if ".layers." in name and p.ndim == 2}
    assert "model.embed_tokens.weight" not in found
    assert len(found) == 2 * 7


def test_what_says_one_number_of_a_token_is_adamws():
    names = ("model.layers.0.mlp.shared_expert_gate.weight", "h.3.mlp.c_fc.weight", "visual.merger.mlp.0.weight")
    shapes = (1, 8), (4, 8), (4, 8)
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = Optimizer(zip(names, parameters, strict=True), config_of("muon"))
    assert ["trace" in optimizer.state[p] for p in parameters] == [False, True, False]


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix(tiny_model_dir):
    made = trainer("torch", tiny_model_dir, config_of("adafactor"))
    for p in made.model.parameters():
        rows, columns = p.shape if p.ndim == 2 else (len(p), 1)
        state = made.optimizer.state[p]
        assert (state["row"].shape, state["column"].shape) == ((rows, 1), (1, columns))


@pytest.mark.parametrize("kind", ["adafactor", "adamw-bf16", "muon-bf16"])
def test_training_goes_on_from_a_saved_state_bit_by_bit(tiny_model_dir, tmp_path, batches, kind):
    first, second = (trainer("torch", tiny_model_dir, config_of(kind)) for _ in range(2))
    for batch in batches[:2]:
        first.update(batch, LOSS)
    first.save(tmp_path)
    second.restore(tmp_path)
    kept = torch.bfloat16 if kind.endswith("bf16") else torch.float32
    for p in second.model.parameters():
        assert {x.dtype for name, x in second.optimizer.state[p].items() if name != "step"} == {kept}
    assert [first.update(batch, LOSS) for batch in batches[2:4]] == [second.update(batch, LOSS) for batch in batches[2:4]]
    theirs = dict(second.weights())
    for name, x in first.weights():
        np.testing.assert_array_equal(x, theirs[name])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_first_step_from_bf16_moments_is_that_of_fp32(tiny_model_dir, batches, name):
    """They are rounded between steps, never within one."""
    exact, ours = (learn(["torch"], tiny_model_dir, batches[:2], optimizer=config_of(kind)) for kind in (name, f"{name}-bf16"))
    assert exact.losses[1] == ours.losses[1]
    assert 0 < deviations(ours, exact)[2] < 1e-3


def test_moments_go_on_in_the_type_that_is_kept_here(tiny_model_dir, tmp_path, batches):
    rough, exact = (trainer("torch", tiny_model_dir, config_of(kind)) for kind in ("adamw-bf16", "adamw"))
    rough.update(batches[0], LOSS)
    rough.save(tmp_path)
    for name, x in model_dir.read_moments(tmp_path):
        assert x.dtype.name == "bfloat16"
        assert x.any(), name
    exact.restore(tmp_path)
    # The first step is from the same moments, and to be rounded after it; the second shows what it left.
    for batch in batches[1:3]:
        assert exact.update(batch, LOSS)["loss"] == rough.update(batch, LOSS)["loss"]


# ---- parts of parameters on two processes

SHAPES = {"embed": (9, 6), "norm": (7,), "layers.0.q": (6, 8), "layers.0.down": (8, 6), "layers.0.up": (3, 5, 4)}


def drawn(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def stepped(kind: str, lay) -> dict[str, torch.Tensor]:
    """The parameters after three steps, each laid out as `lay` does."""
    named = {name: torch.nn.Parameter(lay(x)) for name, x in drawn(0).items()}
    optimizer = Optimizer(named.items(), replace(config_of(kind), learning_rate=1e-1))
    for seed in (1, 2, 3):
        for name, gradient in drawn(seed).items():
            named[name].grad = lay(gradient)
        optimizer.step()
    for p in named.values():
        for name, x in optimizer.state[p].items():
            assert name == "step" or not isinstance(x, DTensor) or not any(at.is_partial() for at in x.placements)
    return {name: p.detach() for name, p in named.items()}


def one_of_two(rank: int, directory: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for kind in KINDS:
        for axis in (0, -1):
            whole = stepped(kind, lambda x, axis=axis: distribute_tensor(x, mesh, [Shard(axis % x.ndim)]))
            alone = stepped(kind, lambda x: x)
            for name, x in whole.items():
                np.testing.assert_allclose(x.full_tensor(), alone[name], atol=1e-5, rtol=1e-5, err_msg=f"{kind} {axis} {name}")
    distributed.destroy_process_group()


@thorough
def test_two_processes_with_parts_of_the_moments_do_what_one_does(tmp_path: Path):
    multiprocessing.spawn(one_of_two, (str(tmp_path),), nprocs=2)
