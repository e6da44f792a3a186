"""Adapters beside a frozen decoder, against transformers, torch's AdamW and PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from areal_x import export
from areal_x.algorithms import losses
from areal_x.batching.packing import pack
from areal_x.errors import ConfigError
from areal_x.hf import adapters, model_dir
from areal_x.protocols.trainer_config import LoRAConfig, ModelConfig, TrainerConfig
from areal_x.types import Batch, Policy
from areal_x_jax.shares import divide
from areal_x_jax.trainer import Trainer
from areal_x_jax.update import update_step
from tests.models import log_softmax, reference_model, torch_logits, trajectories
from tests.thorough import further, thorough

from .meshes import learn, learn_on
from .test_trainer import LENGTHS, OPTIMIZER, learnable, make_trainer

MadeModel = Callable[[str], Path]
LORA = LoRAConfig(rank=3, alpha=6.0)
SEQUENCES = [t.tokens for t in trajectories(*LENGTHS)]


@pytest.fixture(scope="module")
def batch() -> Batch:
    return learnable(pack(trajectories(*LENGTHS), 32))


def logprobs(trainer: Trainer) -> list[np.ndarray]:
    packed = pack(trajectories(*LENGTHS), 32)
    return packed.gather(trainer.logprobs(packed.batch))


def expected_logprobs(logits: list[np.ndarray]) -> list[np.ndarray]:
    """The log-softmax of each token given those before it."""
    both = zip(SEQUENCES, logits, strict=True)
    return [np.append(0, log_softmax(x[:-1])[np.arange(len(tokens) - 1), tokens[1:]]) for tokens, x in both]


def assert_near(ours: list[np.ndarray], theirs: list[np.ndarray], atol: float = 1e-4) -> None:
    for left, right in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(left, right, atol=atol)


def randomised(trainer: Trainer, seed: int = 0) -> Trainer:
    """The trainer with both of an adapter's matrices random, so that all of them count."""
    rng = np.random.default_rng(seed)
    trainer.params = jax.tree.map(lambda x: jax.numpy.array(rng.normal(0, 0.3, x.shape), x.dtype), trainer.params)
    return trainer


def with_products(directory: Path, adapter: dict[str, np.ndarray]) -> tuple[Any, list[np.ndarray]]:
    """Returns transformers' model with the product of LORA's matrices added to each kernel, and its logits of SEQUENCES."""
    import torch

    model = reference_model(directory)
    with torch.no_grad():
        for kernel, parameter in model.named_parameters():
            a, b = (adapter.get(f"base_model.model.{kernel.removesuffix('.weight')}.lora_{x}.weight") for x in "AB")
            if a is not None:
                parameter += torch.tensor(b @ a) * (LORA.alpha / LORA.rank)
        return model, [model(torch.tensor(s[None]).long()).logits[0].numpy() for s in SEQUENCES]


def saved(trainer: Trainer, directory: Path) -> Path:
    trainer.save(directory)
    return directory


@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe", *further("qwen3", "qwen2-tied-yarn", "llama3")])
def test_an_adapters_model_is_transformers_with_the_product_added_to_each_kernel(
    name: str, model_dir_of: MadeModel, tmp_path: Path
) -> None:
    targets = ("q_proj", "o_proj") if name == "qwen3-moe" else LORA.targets
    trainer = randomised(make_trainer(model_dir_of(name), lora=LoRAConfig(3, 6.0, targets)))
    adapter = dict(trainer.adapter())
    assert len(adapter) == 2 * len(targets) * trainer.arch.layers
    model, logits = with_products(model_dir_of(name), adapter)
    assert_near(logprobs(trainer), expected_logprobs(logits))
    for tensor, value in trainer.weights():
        if ".experts." not in tensor:  # which transformers keeps in one array
            np.testing.assert_allclose(value, model.get_parameter(tensor).detach().numpy(), atol=1e-5)


def test_adapters_begin_as_peft_draws_them_and_change_nothing(model_dir_of: MadeModel) -> None:
    plain, trainer = make_trainer(model_dir_of("qwen3")), make_trainer(model_dir_of("qwen3"), lora=LORA)
    assert_near(logprobs(trainer), logprobs(plain), atol=0)
    layers = trainer.params["layers"]
    assert not any(np.any(x) for name, x in layers.items() if name.endswith("_lora_b"))
    a = np.asarray(layers["q_lora_a"]) * np.sqrt(trainer.arch.hidden)  # kaiming_uniform with a = sqrt(5)
    assert 0.8 < np.abs(a).max() <= 1
    assert abs(a.mean()) < 0.2
    assert not np.array_equal(a[0], a[1])
    other = make_trainer(model_dir_of("qwen3"), lora=LORA, seed=1)
    assert not np.array_equal(layers["q_lora_a"], other.params["layers"]["q_lora_a"])


class TorchSteps:
    """The same training in torch: low-rank products added by hooks, clipping, AdamW on them alone."""

    def __init__(self, directory: Path, adapter: dict[str, np.ndarray], scale: float) -> None:
        import torch

        self.model = reference_model(directory).requires_grad_(False)
        self.adapter = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in adapter.items()}
        for name in adapter:
            if name.endswith("lora_A.weight"):
                a, b = self.adapter[name], self.adapter[name.replace("lora_A", "lora_B")]
                module = self.model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                module.register_forward_hook(lambda _, x, y, a=a, b=b: y + (x[0] @ a.T) @ b.T * scale)
        settings = {"betas": (OPTIMIZER.beta1, OPTIMIZER.beta2), "eps": OPTIMIZER.eps, "weight_decay": 0.1}
        self.optimizer = torch.optim.AdamW(self.adapter.values(), lr=1.0, **settings)

    def step(self, version: int) -> tuple[float, float]:
        """The loss and the gradient's norm before clipping, of SFT."""
        import torch

        made, total = trajectories(*LENGTHS), torch.zeros(())
        for t in made:
            tokens = torch.tensor(t.tokens).long()
            logp = torch.log_softmax(self.model(tokens[None]).logits[0, :-1], -1)
            total = total - logp[torch.arange(len(tokens) - 1), tokens[1:]][torch.tensor(t.mask[1:])].mean() / len(made)
        self.optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.adapter.values(), OPTIMIZER.clip_norm)
        self.optimizer.param_groups[0]["lr"] = 1e-2 * (version + 1) / 4
        self.optimizer.step()
        return float(total.detach()), float(norm)


@pytest.mark.parametrize("name", ["qwen3", *further("qwen2")])
def test_updates_are_those_of_torch_on_the_adapters_and_leave_the_base_as_it_was(
    name: str, batch: Batch, model_dir_of: MadeModel
) -> None:
    trainer = make_trainer(model_dir_of(name), lora=LORA)
    before = jax.device_get(trainer.base)
    theirs = TorchSteps(model_dir_of(name), dict(trainer.adapter()), LORA.scale)
    for version in range(3):
        learned, (loss, norm) = trainer.update(batch, losses.sft), theirs.step(version)
        assert learned["loss"] == pytest.approx(loss, rel=1e-5)
        assert learned["grad_norm"] == pytest.approx(norm, rel=1e-4)
        for tensor, value in trainer.adapter():
            np.testing.assert_allclose(value, theirs.adapter[tensor].detach().numpy(), atol=2e-5, err_msg=tensor)
    jax.tree.map(np.testing.assert_array_equal, trainer.base, before)


def test_only_adapters_have_gradients_and_moments(batch: Batch, model_dir_of: MadeModel) -> None:
    trainer = make_trainer(model_dir_of("qwen3"), lora=LORA)
    adapters = sum(x.size for x in jax.tree.leaves(trainer.params))
    assert adapters == 2 * 3 * (4 * 32 + 64 + 32 + 32 + 64 + 3 * (32 + 48))  # layers · rank · each kernel's rows and columns
    assert sum(x.size for x in jax.tree.leaves(trainer.moments) if x.ndim) == 2 * adapters


def work(trainer: Trainer, batch: Batch) -> dict[str, float]:
    """Returns the FLOPs of the compiled step, and its bytes in addition to weights and state."""
    micro, count = trainer._to_device(batch, divide(trainer.config, batch, trainer.shares.count, "update").whole)
    step = jax.jit(partial(update_step, trainer.forward, trainer.optimizer, losses.sft), donate_argnums=(0, 1))
    given = trainer.params, trainer.moments, trainer.base, None, micro, count, np.float32(1)
    compiled = step.lower(*given).compile()
    return {"flops": compiled.cost_analysis()["flops"], "bytes": compiled.memory_analysis().temp_size_in_bytes}


def test_a_step_of_adapters_computes_no_gradient_of_the_base(batch: Batch, model_dir_of: MadeModel) -> None:
    configs = LoRAConfig(), LoRAConfig(rank=1)
    whole, adapters = (work(make_trainer(model_dir_of("qwen3"), lora=config), batch) for config in configs)
    assert adapters["flops"] < 0.85 * whole["flops"]  # of large models two thirds: forward, and the gradient of what goes in
    assert adapters["bytes"] < 0.8 * whole["bytes"]


@pytest.fixture(scope="module")
def checkpoint(model_dir_of: MadeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(randomised(make_trainer(model_dir_of("qwen3"), lora=LORA)), tmp_path_factory.mktemp("adapter"))


@pytest.mark.parametrize(
    "name, targets, says",
    [
        ("qwen3", ("q_proj", "qkv_proj"), "without qkv_proj, as this model's kernels .* are q_proj, .*, down_proj"),
        (
            "qwen3-moe",
            LORA.targets,
            r"without gate_proj, up_proj, down_proj, .* experts.down_proj \(the router of experts can have none",
        ),
    ],
)
def test_targets_that_the_model_has_not_are_refused_before_it_is_read(
    name: str, targets: tuple[str, ...], says: str, model_dir_of: MadeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "_read_params", lambda *_: pytest.fail("the model was read"))
    with pytest.raises(ConfigError, match=says):
        make_trainer(model_dir_of(name), lora=LoRAConfig(3, 6.0, targets))


def test_a_frozen_model_has_no_adapters(model_dir_of: MadeModel) -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank = 3 cannot work: it must be 0 for a frozen model"):
        TrainerConfig(model=ModelConfig(str(model_dir_of("qwen3"))), lora=LORA, frozen=True)


def test_the_merged_export_is_the_adapters_model(checkpoint: Path, model_dir_of: MadeModel, tmp_path: Path) -> None:
    trainer = make_trainer(model_dir_of("qwen3"), lora=LORA)
    trainer.restore(checkpoint)
    run = tmp_path / "run"
    shutil.copytree(checkpoint, run / "trainer")
    assert export.main([str(run), str(tmp_path / "plain")]) == 0
    assert {file.name for file in (tmp_path / "plain").iterdir()} & {"adapter_config.json", "trainer.json"} == set()
    assert_near(expected_logprobs(torch_logits(tmp_path / "plain", SEQUENCES)), logprobs(trainer))
    exported = dict(model_dir.read_tensors(tmp_path / "plain"))
    for tensor, value in trainer.weights():
        np.testing.assert_array_equal(value, exported[tensor])
    # It can be trained further as a whole, and its log-probabilities are the adapters'.
    assert_near(logprobs(make_trainer(tmp_path / "plain")), logprobs(trainer))


def test_a_snapshot_is_the_merged_model(model_dir_of: MadeModel, batch: Batch) -> None:
    trainer = randomised(make_trainer(model_dir_of("qwen3"), lora=LORA))
    plain = make_trainer(model_dir_of("qwen3"))
    plain.params = trainer.snapshot()
    assert_near(logprobs(plain), logprobs(trainer))
    kept = np.asarray(plain.params["layers"]["q"])
    trainer.update(batch, losses.sft)
    np.testing.assert_array_equal(plain.params["layers"]["q"], kept)


@thorough
def test_in_bf16_the_base_is_bf16_and_the_adapters_are_not(batch: Batch, model_dir_of: MadeModel) -> None:
    trainer = randomised(make_trainer(model_dir_of("qwen3"), lora=LORA, precision="bf16"))
    assert {str(x.dtype) for x in jax.tree.leaves(trainer.base)} == {"bfloat16"}
    assert {str(x.dtype) for x in jax.tree.leaves((trainer.params, trainer.snapshot()))} == {"float32", "bfloat16"}
    assert {str(x.dtype) for _, x in trainer.weights()} == {"bfloat16"}
    exact = randomised(make_trainer(model_dir_of("qwen3"), lora=LORA))
    assert_near(logprobs(trainer), logprobs(exact), atol=0.5)
    assert trainer.update(batch, losses.sft)["loss"] == pytest.approx(exact.update(batch, losses.sft)["loss"], rel=0.05)


def assert_same_bits(left: Trainer, right: Trainer) -> None:
    assert left.version == right.version
    jax.tree.map(np.testing.assert_array_equal, (left.params, left.moments), (right.params, right.moments))


def squared_error(policy: Policy, batch: Batch) -> losses.LossTerms:
    return jax.numpy.where(batch.mask, (policy.values - batch.returns) ** 2, 0), {}


@thorough
def test_a_critics_score_is_trained_in_full_beside_its_adapters(batch: Batch, model_dir_of: MadeModel, tmp_path: Path) -> None:
    critic = make_trainer(model_dir_of("qwen3"), lora=LORA, head="value")
    taught = batch.replace(returns=np.where(batch.mask, 1.0, 0.0).astype(np.float32))
    assert not critic.values(batch).any()
    first = critic.update(taught, squared_error)["loss"]
    for _ in range(10):
        last = critic.update(taught, squared_error)["loss"]
    assert last < 0.9 * first
    critic.save(tmp_path / "critic")
    restored = make_trainer(model_dir_of("qwen3"), lora=LORA, head="value")
    restored.restore(tmp_path / "critic")
    assert_same_bits(critic, restored)
    export.export(tmp_path / "critic", tmp_path / "plain")
    plain = make_trainer(tmp_path / "plain", head="value")
    np.testing.assert_allclose(plain.values(batch), critic.values(batch), atol=1e-4)


OF_EXPERTS = LoRAConfig(3, 6.0, ("q_proj", "experts.gate_up_proj", "experts.down_proj"))


@thorough
@pytest.mark.parametrize(
    "name, lora, mesh",
    [
        ("even", LORA, {"fsdp": 2, "tensor": 2, "data": 2}),
        ("even-moe", OF_EXPERTS, {"fsdp": 2, "expert": 2, "tensor": 2}),
        ("even-moe", OF_EXPERTS, {"stage": 2, "expert": 2, "data": 2}),
        ("even-moe-deep", OF_EXPERTS, {"stage": 2, "stage_chunks": 2, "expert": 2, "data": 2}),
    ],
)
def test_ten_updates_of_adapters_are_the_same_on_a_mesh(
    name: str, lora: LoRAConfig, mesh: dict[str, int], model_dir_of: MadeModel
) -> None:
    alone = learn(model_dir_of(name), {}, lora)
    (found,) = learn_on(model_dir_of(name), [mesh], lora, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    np.testing.assert_allclose(found["loss"], alone["loss"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["grad_norm"], alone["grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(found["logp"], alone["logp"], atol=1e-4)
    assert (found["programs"], alone["programs"]) == (1, 1)
    assert found["share"] < 0.7  # of the adapters: each has one axis that is split


def test_peft_loads_what_was_saved_with_the_same_logits(checkpoint: Path, model_dir_of: MadeModel, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch

    trainer = make_trainer(model_dir_of("qwen3"), lora=LORA)
    trainer.restore(checkpoint)
    model = peft.PeftModel.from_pretrained(reference_model(model_dir_of("qwen3")), checkpoint)
    with torch.no_grad():
        logits = [model(torch.tensor(s[None]).long()).logits[0].numpy() for s in SEQUENCES]
    assert_near(logprobs(trainer), expected_logprobs(logits))
    # And the other way: what PEFT saves has the same names and shapes.
    model.save_pretrained(tmp_path)
    theirs, ours = dict(model_dir.read_file(tmp_path / adapters.WEIGHTS)), dict(adapters.read(checkpoint))
    assert theirs.keys() == ours.keys()
    for tensor, value in ours.items():
        np.testing.assert_array_equal(value, theirs[tensor])
    settings = json.loads((tmp_path / adapters.CONFIG).read_text())
    for name, value in adapters.read_config(checkpoint).items():
        if name not in ("base_model_name_or_path", "target_modules"):
            assert settings[name] == value
