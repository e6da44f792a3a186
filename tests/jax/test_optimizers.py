"""The optimizers beside torch's and beside numpy, one matrix at a time; then in a trainer: saved, skipped, on a mesh."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from areal_x.algorithms import losses
from areal_x.errors import ConfigError, UserError
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch
from areal_x_jax.optimizers import make_optimizer, orthogonal
from areal_x_jax.trainer import Trainer
from tests.conftest import QUICK, python_with
from tests.thorough import further, thorough

from .meshes import batch_of

MadeModel = Callable[[str], Path]
Trained = tuple[str, Trainer, list[float]]
# Of every kind: matrices and vectors, outside and in a stack of three layers, and of two experts within each.
SHAPES = {"embed": (9, 6), "norm": (6,), "layers": {"q": (3, 6, 8), "q_bias": (3, 8), "down": (3, 8, 6), "up": (3, 2, 6, 4)}}
LEAVES, MATRICES_OF_LAYERS = {"embed", "norm", "q", "q_bias", "down", "up"}, {"q", "down", "up"}
CLIP, DECAY, EPS = 5.0, 0.1, 1e-4
RATES = [1e-2 * min((step + 1) / 4, 1) for step in range(10)]


def config_of(name: str, **changes: Any) -> OptimizerConfig:
    defaults = {"learning_rate": 1e-2, "warmup_steps": 4, "weight_decay": DECAY, "clip_norm": CLIP, "eps": EPS}
    return OptimizerConfig(**{**defaults, "name": name, **changes})


def draw(seed: int, scale: float) -> Any:
    """A tree of SHAPES, drawn."""
    rng = np.random.default_rng(seed)
    by_name = lambda shape: (scale * rng.normal(size=shape)).astype(np.float32)  # noqa: E731
    return jax.tree.map(by_name, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


GRADIENTS = [draw(seed + 1, 0.1 * 3.0 ** (seed % 3)) for seed in range(10)]  # of which CLIP clips some


def steps_of(config: OptimizerConfig, tree: Any, gradients: list[Any]) -> tuple[Any, Any]:
    """The parameters and the optimizer's state after a step with each gradient."""
    optimizer = make_optimizer(config)
    state = jax.jit(optimizer.init)(tree)

    @jax.jit
    def step(tree: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradient, state, tree)
        return optax.apply_updates(tree, updates), state

    for gradient in gradients:
        tree, state = step(tree, state, gradient)
    return tree, state


def apart(tree: Any) -> dict[str, np.ndarray]:
    """Every matrix and vector of a tree of SHAPES on its own."""
    found = {name: np.asarray(x) for name, x in tree.items() if name != "layers"}
    for name, stack in tree["layers"].items():
        for layer, x in enumerate(np.asarray(stack)):
            found |= {f"{name}.{layer}.{i}": part for i, part in enumerate(x)} if x.ndim == 3 else {f"{name}.{layer}": x}
    return found


def clipped(gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in gradients.values()))
    return {name: x * min(1.0, CLIP / norm) for name, x in gradients.items()}


def assert_close(ours: Any, expected: dict[str, np.ndarray], atol: float) -> None:
    for name, x in apart(ours).items():
        np.testing.assert_allclose(x, expected[name], atol=atol, err_msg=name)


def torch_steps(count: int, make: Callable[..., Any], leaves: set[str] = LEAVES) -> dict[str, np.ndarray]:
    """The same steps by torch, every matrix a parameter. make: an optimizer of parameters and their decay; leaves: of which."""
    import torch

    torch.set_num_threads(1)
    parameters = {
        name: torch.nn.Parameter(torch.tensor(x)) for name, x in apart(draw(0, 0.3)).items() if name.split(".")[0] in leaves
    }
    of_rank = {rank: [p for p in parameters.values() if p.ndim == rank] for rank in (1, 2)}
    made = [make(of_rank[rank], DECAY if rank == 2 else 0.0) for rank in (1, 2) if of_rank[rank]]
    for rate, gradient in zip(RATES[:count], GRADIENTS[:count], strict=True):
        for name, x in clipped(apart(gradient)).items():
            if name in parameters:
                parameters[name].grad = torch.tensor(x, dtype=torch.float32)
        for optimizer in made:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    return {name: p.detach().numpy() for name, p in parameters.items()}


def torch_adamw(parameters: list[Any], decay: float) -> Any:
    import torch

    return torch.optim.AdamW(parameters, betas=(0.9, 0.98), eps=EPS, weight_decay=decay)


def torch_adafactor(parameters: list[Any], decay: float) -> Any:
    """The scale of a parameter is taken for 1 at least, which of these it is not: so without that scaling."""
    import torch

    return torch.optim.Adafactor(parameters, weight_decay=decay, eps=(1e-15, 1.0))


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("name, make", [("adamw", torch_adamw), ("adafactor", torch_adafactor)])
def test_steps_are_those_that_torch_makes_with_every_matrix_a_parameter(name: str, make: Any, count: int) -> None:
    ours, _ = steps_of(config_of(name), draw(0, 0.3), GRADIENTS[:count])
    assert_close(ours, torch_steps(count, make), atol=1e-6)


def orthogonal_in_numpy(x: np.ndarray) -> np.ndarray:
    """By singular values: the quintic acts on each alone."""
    u, s, v = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    s = s / np.sqrt(np.sum(s**2))
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u * s @ v


def muon_in_numpy(count: int) -> dict[str, np.ndarray]:
    """Returns a layer's matrices after `count` steps."""
    values = {name: x.astype(np.float64) for name, x in apart(draw(0, 0.3)).items() if name.split(".")[0] in MATRICES_OF_LAYERS}
    momentum = {name: np.zeros_like(x) for name, x in values.items()}
    for rate, gradient in zip(RATES[:count], GRADIENTS[:count], strict=True):
        for name, x in clipped(apart(gradient)).items():
            if name in values:
                momentum[name] = 0.95 * momentum[name] + x
                update = 0.2 * np.sqrt(max(x.shape)) * orthogonal_in_numpy(x + 0.95 * momentum[name])
                values[name] = values[name] - rate * (update + DECAY * values[name])
    return values


@pytest.mark.parametrize("count", [1, 10])
def test_muon_orthogonalises_each_matrix_of_a_layer_and_leaves_the_rest_to_adamw(count: int) -> None:
    ours, _ = steps_of(config_of("muon"), draw(0, 0.3), GRADIENTS[:count])
    of_adamw = torch_steps(count, torch_adamw, LEAVES - MATRICES_OF_LAYERS)
    assert_close(ours, of_adamw | muon_in_numpy(count), atol=1e-6)


def test_muon_is_torchs_but_for_torchs_bf16() -> None:
    def make(parameters: list[Any], decay: float) -> Any:
        import torch

        return torch.optim.Muon(parameters, weight_decay=decay, adjust_lr_fn="match_rms_adamw")

    theirs = torch_steps(10, make, MATRICES_OF_LAYERS)
    ours, before = apart(steps_of(config_of("muon"), draw(0, 0.3), GRADIENTS)[0]), apart(draw(0, 0.3))
    for name, x in theirs.items():
        assert np.linalg.norm(ours[name] - x) < 0.03 * np.linalg.norm(x - before[name]), name


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (7, 7)])
def test_orthogonal_brings_singular_values_near_one_and_keeps_directions(shape: tuple[int, int]) -> None:
    x = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    made = np.asarray(orthogonal(jnp.array(x)))
    for one, expected in zip(made, x, strict=True):
        np.testing.assert_allclose(one, orthogonal_in_numpy(expected), atol=1e-5)
        assert np.all(np.abs(np.linalg.svd(one, compute_uv=False) - 1) < 0.35)


def test_a_stack_of_three_layers_moves_as_three_layers_apart() -> None:
    """With more layers than rows or columns, too: the axis of layers is never one of those that are factored."""
    rng = np.random.default_rng(0)
    stacks = {"tall": rng.normal(size=(9, 4, 3)), "router": rng.normal(size=(9, 5, 2)), "bias": rng.normal(size=(9, 7))}
    stacks = jax.tree.map(lambda x: x.astype(np.float32), stacks)
    gradients = [jax.tree.map(lambda x, s=s: np.float32(s) * x[::-1] ** 3, stacks) for s in (1.0, -0.2, 3.0)]
    for name in ("adamw", "adafactor", "muon"):
        config = config_of(name, clip_norm=0)
        together, _ = steps_of(config, {"layers": stacks}, [{"layers": g} for g in gradients])
        for layer in (0, 4, 8):
            start, *slopes = jax.tree.map(lambda x, at=layer: x[at : at + 1], [stacks, *gradients])
            alone, _ = steps_of(config, {"layers": start}, [{"layers": g} for g in slopes])
            for leaf, x in alone["layers"].items():
                np.testing.assert_allclose(together["layers"][leaf][layer], x[0], atol=2e-6, err_msg=f"{name} {leaf}")


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix() -> None:
    _, state = steps_of(config_of("adafactor"), draw(0, 0.3), GRADIENTS[:1])
    row, column = (jax.tree.map(np.shape, optax.tree.get(state, which)) for which in ("row", "column"))
    assert (row["embed"], column["embed"]) == ((9, 1), (1, 6))
    assert (row["layers"]["up"], column["layers"]["up"]) == ((3, 2, 6, 1), (3, 2, 1, 4))
    assert (row["norm"], column["layers"]["q_bias"]) == ((6, 1), (3, 1, 1))


def test_adafactor_takes_gradients_of_nothing_and_almost_nothing() -> None:
    tree = {"layers": {"q": np.ones((1, 4, 3), np.float32)}}
    gradient = np.zeros((1, 4, 3), np.float32)
    gradient[0, 1, 1] = 1e-12
    for x in (np.zeros_like(gradient), gradient):
        moved, _ = steps_of(config_of("adafactor", weight_decay=0.0), tree, [{"layers": {"q": x}}])
        assert np.isfinite(moved["layers"]["q"]).all()
        np.testing.assert_array_equal(np.asarray(moved["layers"]["q"] != 1), x != 0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_bf16_moments_are_bf16_and_steps_from_them_close_to_those_from_fp32(name: str) -> None:
    start = draw(0, 0.3)
    exact, _ = steps_of(config_of(name), start, GRADIENTS)
    ours, state = steps_of(config_of(name, moments="bf16"), start, GRADIENTS)
    kinds = {x.dtype for x in jax.tree.leaves(state) if x.dtype != np.int32}
    assert kinds == {jnp.dtype("bfloat16")}
    for (leaf, x), before in zip(apart(ours).items(), apart(start).values(), strict=True):
        gap, way = (np.linalg.norm(y - apart(exact)[leaf]) for y in (x, before))
        assert 0 < gap < 0.02 * way, leaf


def test_one_step_from_bf16_moments_is_the_step_from_what_they_hold() -> None:
    """Rounded between steps, never within one: the first step is that of fp32, bit for bit."""
    exact, ours = (steps_of(config_of("adamw", moments=m), draw(0, 0.3), GRADIENTS[:1])[0] for m in ("fp32", "bf16"))
    jax.tree.map(np.testing.assert_array_equal, exact, ours)


# ---- in a trainer

KINDS = {"adamw": {}, "adamw-bf16": {"moments": "bf16"}, "adafactor": {}, "muon": {}, "muon-bf16": {"moments": "bf16"}}


def make_trainer(directory: Path, kind: str, **changes: Any) -> Trainer:
    optimizer = OptimizerConfig(name=kind.split("-")[0], learning_rate=1e-2, warmup_steps=2, **KINDS[kind])
    return Trainer(TrainerConfig(ModelConfig(str(directory)), optimizer, micro_batch_rows=8, head_chunk=64, **changes))


@pytest.fixture(scope="module")
def batch() -> Batch:
    return batch_of(50, 0)


@pytest.fixture(scope="module", params=["adamw", "adafactor", "muon", *further("adamw-bf16", "muon-bf16")])
def trained(request: pytest.FixtureRequest, model_dir_of: MadeModel, batch: Batch) -> Trained:
    """An optimizer, a trainer after five of its steps, and the losses; the model has experts, biases and a router."""
    trainer = make_trainer(model_dir_of("qwen2-moe"), request.param)
    return request.param, trainer, [trainer.update(batch, losses.sft)["loss"] for _ in range(5)]


def same(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_learning_lowers_the_loss_in_one_program(trained: Trained) -> None:
    _, trainer, said = trained
    assert all(np.diff(said) < 0)
    assert said[-1] < said[0] - 0.1
    assert trainer.programs == 1


def test_a_step_that_is_not_finite_moves_neither_weights_nor_moments(trained: Trained, batch: Batch) -> None:
    _, trainer, _ = trained
    before, version = jax.device_get((trainer.params, trainer.moments)), trainer.version
    learned = trainer.update(batch.replace(weights=np.full_like(batch.weights, np.inf)), losses.sft)
    after = jax.device_get((trainer.params, trainer.moments))
    assert (learned["skipped"], trainer.version) == (1.0, version + 1)

    def compare(old: np.ndarray, new: np.ndarray) -> None:
        np.testing.assert_array_equal(new, old + 1 if old.dtype == np.int32 else old)

    jax.tree.map(compare, before, after)


def test_training_goes_on_from_a_saved_state_bit_for_bit(
    trained: Trained, batch: Batch, model_dir_of: MadeModel, tmp_path: Path
) -> None:
    kind, trainer, _ = trained
    trainer.save(tmp_path)
    again = make_trainer(model_dir_of("qwen2-moe"), kind)
    again.restore(tmp_path)
    same((trainer.params, trainer.moments), (again.params, again.moments))
    assert jax.tree.map(lambda x: x.dtype, trainer.moments) == jax.tree.map(lambda x: x.dtype, again.moments)
    for _ in range(2):
        assert trainer.update(batch, losses.sft) == again.update(batch, losses.sft)
    same((trainer.params, trainer.moments), (again.params, again.moments))
    assert trainer.programs == again.programs == 1


def test_the_state_of_another_optimizer_is_refused_saying_what_to_set(
    trained: Trained, model_dir_of: MadeModel, tmp_path: Path
) -> None:
    kind, trainer, _ = trained
    trainer.save(tmp_path)
    name, other = kind.split("-")[0], "adafactor" if kind.startswith("muon") else "muon"
    refuses = make_trainer(model_dir_of("qwen2-moe"), other)
    before = jax.device_get((refuses.params, refuses.moments))
    with pytest.raises(UserError, match=f"the state of {name}, .*'{other}' cannot continue: set optimizer.name = '{name}', or"):
        refuses.restore(tmp_path)
    same(before, (refuses.params, refuses.moments))
    assert refuses.version == 0


def test_adamws_bf16_moments_go_on_in_fp32_and_in_torch(batch: Batch, model_dir_of: MadeModel, tmp_path: Path) -> None:
    from areal_x_torch.trainer import Trainer as TorchTrainer

    trainer, exact = (make_trainer(model_dir_of("qwen3"), kind) for kind in ("adamw-bf16", "adamw"))
    trainer.update(batch, losses.sft)
    trainer.save(tmp_path)
    assert {x.dtype for _, x in model_dir.read_moments(tmp_path)} == {jnp.dtype("bfloat16")}
    exact.restore(tmp_path)
    theirs = TorchTrainer(exact.config)
    theirs.restore(tmp_path)
    for _ in range(2):
        expected = theirs.update(batch, losses.sft)["loss"]
        assert exact.update(batch, losses.sft)["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("model, name", [("qwen3", "row.model.layers.0.self_attn.q_proj.weight"), ("even-moe", "row.layers.q")])
def test_a_state_that_is_of_another_model_or_lacks_something_is_one_sentence(
    model_dir_of: MadeModel, tmp_path: Path, model: str, name: str
) -> None:
    from safetensors.numpy import save_file

    trainer = make_trainer(model_dir_of(model), "adafactor")
    trainer.save(tmp_path)
    moments = dict(model_dir.read_moments(tmp_path))
    whole = {**moments, name: moments[name][:1]}
    save_file(whole, tmp_path / model_dir.MOMENTS)
    with pytest.raises(UserError, match=rf"another model: its {re.escape(name)} has no place"):
        trainer.restore(tmp_path)
    del whole[name]
    save_file(whole, tmp_path / model_dir.MOMENTS)
    with pytest.raises(UserError, match=f"lacks {re.escape(name)}"):
        trainer.restore(tmp_path)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"name": "adam"}, r"optimizer\.name = 'adam' .*did you mean 'adamw'"),
        ({"moments": "fp16"}, r"optimizer\.moments = 'fp16' .*'bf16'"),
        ({"name": "adafactor", "moments": "bf16"}, r"optimizer\.moments = 'bf16' .*'fp32' with optimizer\.name = 'adafactor'"),
        ({"moments": "bf16", "beta2": 0.999}, r"optimizer\.beta2 = 0\.999 .*at most 0\.996 with optimizer\.moments = 'bf16'"),
    ],
)
def test_what_cannot_work_is_refused_at_once(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        OptimizerConfig(**changes)


def test_a_bf16_moment_falls_with_the_largest_beta_that_is_taken() -> None:
    tree = {"norm": np.ones(128, np.float32)}
    first = {"norm": np.linspace(1, 1.41, 128, dtype=np.float32)}  # whose squares are all the numbers of a binade
    config = OptimizerConfig(moments="bf16", beta2=0.996, clip_norm=0, learning_rate=1e-3)
    _, before = steps_of(config, tree, [first])
    _, after = steps_of(config, tree, [first, jax.tree.map(np.zeros_like, first)])
    before, after = (np.asarray(optax.tree.get(state, "nu")["norm"], np.float32) for state in (before, after))
    assert (after < before).all()


def test_torch_refuses_the_state_of_another_optimizer(model_dir_of: MadeModel, tmp_path: Path) -> None:
    from areal_x_torch.trainer import Trainer as TorchTrainer

    make_trainer(model_dir_of("qwen3"), "muon").save(tmp_path)
    with pytest.raises(UserError, match=r"the state of muon, .* set optimizer\.name = 'muon', or"):
        TorchTrainer(TrainerConfig(ModelConfig(str(model_dir_of("qwen3"))))).restore(tmp_path)


# ---- on a mesh

ROOT = Path(__file__).parents[2]

ON_DEVICES = """
import json, sys
import jax, numpy as np
from pathlib import Path
from areal_x.algorithms import losses
from areal_x.trainer import MeshConfig
from tests.jax.meshes import batch_of
from tests.jax.test_optimizers import make_trainer

directory, out = map(Path, sys.argv[1:])
for kind in ("adafactor", "muon"):
    trainer = make_trainer(directory, kind, mesh=MeshConfig(fsdp=2, expert=2, tensor=2))
    learned = [trainer.update(batch_of(64, 0), losses.sft) for _ in range(3)]
    trainer.save(out / kind)
    before = jax.device_get(trainer.moments)
    trainer.restore(out / kind)
    jax.tree.map(np.testing.assert_array_equal, before, trainer.moments)
    trainer.update(batch_of(64, 0), losses.sft)
    moments = jax.tree.leaves(trainer.moments)
    here = sum(x.addressable_shards[0].data.nbytes for x in moments) / sum(x.nbytes for x in moments)
    print(json.dumps({"programs": trainer.programs, "loss": [row["loss"] for row in learned], "share": here}))
"""


@thorough
def test_eight_devices_with_parts_of_the_moments_do_what_one_does(model_dir_of: MadeModel, tmp_path: Path) -> None:
    said = python_with(8, "-c", ON_DEVICES, str(model_dir_of("even-moe")), str(tmp_path), **QUICK)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    for kind, eight in zip(("adafactor", "muon"), lines, strict=True):
        one = make_trainer(model_dir_of("even-moe"), kind)
        expected = [one.update(batch_of(64, 0), losses.sft)["loss"] for _ in range(3)]
        assert eight["programs"] == 1
        assert eight["share"] < 0.4
        assert eight["loss"] == pytest.approx(expected, rel=1e-4)
        one.restore(tmp_path / kind)  # on one device what eight have saved
        assert one.version == 3
