"""Adapters of a mixture's experts, on both backends, beside transformers with each expert's product added, and PEFT."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from areal_x import export
from areal_x.algorithms.losses import sft
from areal_x.algorithms.weighting import token_mean
from areal_x.batching.packing import pack
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.errors import ConfigError, UserError
from areal_x.hf import adapters, model_dir
from areal_x.protocols.trainer_config import LoRAConfig, OptimizerConfig
from tests.backend_moves import trainer
from tests.model_families import CASES
from tests.models import reference_model, trajectories, write_config
from tests.thorough import further, thorough

BACKENDS = ["jax", "torch"]
EXPERTS = ("experts.down_proj", "experts.gate_up_proj")
LORA = LoRAConfig(3, 6.0, ("q_proj", *EXPERTS))
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, clip_norm=0.0, eps=1e-6)
LENGTHS = 17, 9
CASE = "qwen3_moe-0"


def make(backend: str, directory: Path, **changes: Any) -> Any:
    if backend == "jax":
        pytest.importorskip("areal_x_jax")
    return trainer(backend, directory, **{"optimizer": OPTIMIZER, "lora": LORA, **changes})


def batch_of_all() -> Any:
    packed = pack(trajectories(*LENGTHS), 32)
    weights = np.asarray(token_mean(packed.batch.mask, packed.batch.segment_ids), np.float32)
    return packed, packed.batch.replace(weights=weights)


def taught(backend: str, directory: Path, **changes: Any) -> Any:
    """After two updates, so that no matrix is 0."""
    made = make(backend, directory, **changes)
    for _ in range(2):
        made.update(batch_of_all()[1], sft)
    return made


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(CASES[CASE], tmp_path_factory.mktemp("mixture"))


def matrices(adapter: dict[str, np.ndarray], requires_grad: bool = False) -> dict[str, Any]:
    return {name: torch.tensor(x, requires_grad=requires_grad) for name, x in adapter.items()}


def adapted_logprobs(directory: Path, adapter: dict[str, Any], targets: tuple[str, ...] = LORA.targets) -> list[Any]:
    """Log-probability of each token but the first under transformers' model with PEFT's formula of each kernel's product added:
    for stacked ones einsum("o r e, e r i -> e o i")."""
    model, changed = reference_model(directory), {}
    of_experts = [x for x in ("gate_up_proj", "down_proj") if f"experts.{x}" in targets]
    for name, kernel in model.named_parameters():
        module, _, last = name.rpartition(".")
        outer = of_experts and last == of_experts[-1]
        place = module if kernel.ndim < 3 or outer else f"{module}.base_layer"
        a, b = (adapter.get(f"base_model.model.{place}.lora_{x}.weight") for x in "AB")
        if a is None or last not in ("weight", *of_experts):
            continue
        if kernel.ndim < 3:
            added = b @ a
        else:
            experts = len(kernel)
            added = torch.einsum("ore,eri->eoi", b.reshape(len(b), -1, experts), a.reshape(experts, -1, a.shape[1]))
            added = added.mT if model.config.model_type == "gpt_oss" else added
        changed[name] = kernel.detach() + 2.0 * added
    found = []
    for one in trajectories(*LENGTHS):
        tokens = torch.from_numpy(one.tokens.astype(np.int64))
        logits = torch.func.functional_call(model, changed, (tokens[None],)).logits[0, :-1]
        found.append(logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0])
    return found


@pytest.mark.parametrize(
    "name, backend",
    [
        (CASE, "torch"),
        *further((CASE, "jax"), ("gpt_oss-0", "torch"), ("gpt_oss-0", "jax")),
        *further(*product(("mixtral-0", "deepseek_v3-0", "qwen3_next-0", "ernie4_5_moe-0", "gemma4_text-1"), BACKENDS)),
    ],
)
def test_the_adapted_model_is_transformers_with_each_experts_product_added(name: str, backend: str, tmp_path: Path) -> None:
    directory = write_config(CASES[name], tmp_path / "model")
    lora = replace(LORA, targets=EXPERTS)
    made = taught(backend, directory, lora=lora)
    adapter = dict(made.adapter())
    assert all(np.abs(x).max() > 1e-3 for x in adapter.values())
    packed, batch = batch_of_all()
    with torch.no_grad():
        expected = adapted_logprobs(directory, matrices(adapter), EXPERTS)
    plain = packed.gather(make(backend, directory, lora=LoRAConfig()).logprobs(batch))
    for ours, theirs, without in zip(packed.gather(made.logprobs(batch)), expected, plain, strict=True):
        np.testing.assert_allclose(ours[1:], theirs, atol=1e-4)
        assert np.abs(ours - without).max() > 0.01
    # What is published, exported and sampled with is the same model.
    made.save(tmp_path / "adapter")
    export.export(tmp_path / "adapter", tmp_path / "plain")
    exported, published = dict(model_dir.read_tensors(tmp_path / "plain")), dict(made.weights())
    assert exported.keys() == published.keys()
    for tensor, x in exported.items():
        np.testing.assert_allclose(x, published[tensor], rtol=0, atol=0 if backend == "jax" else 1e-6)
    for tensor, x in made.device_weights():  # as transports take them
        np.testing.assert_allclose(x.numpy(), published[tensor], rtol=0, atol=1e-6)
    merged = make(backend, tmp_path / "plain", lora=LoRAConfig())
    np.testing.assert_allclose(merged.logprobs(batch), made.logprobs(batch), atol=1e-4)
    sampled = made.snapshot()
    if backend == "torch":
        for tensor, x in sampled.items():
            np.testing.assert_array_equal(x.numpy(), published[tensor])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("targets", [LORA.targets, *further((("experts.down_proj",),), (("experts.gate_up_proj",),))])
def test_gradients_are_those_of_the_formula(backend: str, targets: tuple[str, ...], directory: Path, tmp_path: Path) -> None:
    made = taught(backend, directory, lora=replace(LORA, targets=targets))
    before = matrices(dict(made.adapter()), requires_grad=True)
    packed, batch = batch_of_all()
    total = torch.zeros(())
    for logp, weights, mask in zip(
        adapted_logprobs(directory, before, targets), packed.gather(batch.weights), packed.gather(batch.mask), strict=True
    ):
        total = total - (logp * torch.tensor(weights[1:] * mask[1:])).sum()
    total.backward()
    made.save(tmp_path / "before")
    old = dict(model_dir.read_moments(tmp_path / "before"))
    assert made.update(batch, sft)["loss"] == pytest.approx(float(total.detach()), rel=1e-5)
    made.save(tmp_path / "after")
    new, beta = dict(model_dir.read_moments(tmp_path / "after")), OPTIMIZER.beta1
    for name, x in before.items():
        gradient = (new[f"exp_avg.{name}"] - beta * old[f"exp_avg.{name}"]) / (1 - beta)
        np.testing.assert_allclose(gradient, x.grad, atol=1e-5, rtol=1e-3, err_msg=name)


@pytest.mark.parametrize("first, second", [("torch", "jax"), *further(("jax", "torch"))])
def test_a_run_moves_between_backends_and_goes_on_alike(first: str, second: str, directory: Path, tmp_path: Path) -> None:
    pytest.importorskip("areal_x_jax")
    one, other = taught(first, directory), make(second, directory)
    one.save(tmp_path / "one")
    other.restore(tmp_path / "one")
    other.save(tmp_path / "other")
    for read in (adapters.read, model_dir.read_moments):
        before, after = (dict(read(tmp_path / x)) for x in ("one", "other"))
        assert before.keys() == after.keys()
        for name, x in before.items():
            np.testing.assert_array_equal(after[name], x, err_msg=name)
    _, batch = batch_of_all()
    assert one.update(batch, sft)["loss"] == pytest.approx(other.update(batch, sft)["loss"], rel=1e-5)
    theirs = dict(other.adapter())
    for name, x in one.adapter():
        np.testing.assert_allclose(theirs[name], x, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("backend", ["torch", *further("jax")])
def test_muon_moves_each_experts_matrices_and_resume_to_the_bit(backend: str, directory: Path, tmp_path: Path) -> None:
    config = replace(OPTIMIZER, name="muon")
    made, again = taught(backend, directory, optimizer=config), make(backend, directory, optimizer=config)
    made.save(tmp_path)
    again.restore(tmp_path)
    for _ in range(2):
        made.update(batch_of_all()[1], sft)
        again.update(batch_of_all()[1], sft)
    theirs = dict(again.adapter())
    for name, x in made.adapter():
        np.testing.assert_array_equal(theirs[name], x)
    # One step of Muon moves each expert's B, which was 0, by matrices of equal singular values.
    fresh = make(backend, directory, optimizer=replace(config, weight_decay=0.0))
    fresh.update(batch_of_all()[1], sft)
    b = dict(fresh.adapter())["base_model.model.model.layers.0.mlp.experts.lora_B.weight"]
    moved = b.reshape(len(b), 3, -1).transpose(2, 0, 1)
    values = np.linalg.svd(moved, compute_uv=False) / (1e-2 * 0.2 * len(b) ** 0.5)
    assert values.min() > 0.3
    assert values.max() < 1.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_names_that_are_none_of_the_models_are_refused(backend: str, directory: Path, tiny_model_dir: Path) -> None:
    wrong = replace(LORA, targets=("experts.gate_proj",))
    with pytest.raises(
        ConfigError, match=r"are q_proj, .*experts\.gate_up_proj, experts\.down_proj \(the router of experts can have none"
    ):
        make(backend, directory, lora=wrong)
    with pytest.raises(ConfigError, match=r"without experts\.down_proj, as this model's kernels .* down_proj$"):
        make(backend, tiny_model_dir, lora=replace(LORA, targets=("experts.down_proj",)))


def test_servers_get_whole_weights_in_their_place(tiny_model_dir: Path, tmp_path: Path) -> None:
    engine = VLLMEngine(VLLMConfig(context=64), tiny_model_dir, tmp_path, lora=replace(LORA, rank=513))
    assert engine.lora is None  # its servers have no adapters, so that no rank is too large for them
    engine.check(trainer_here=False)
    assert (LORA.served_rank, replace(LORA, targets=("q_proj",)).served_rank, LoRAConfig().served_rank) == (0, 3, 0)


def test_a_square_stack_of_an_unknown_model_and_an_adapter_of_another_are_refused() -> None:
    settings = {"r": 1, "lora_alpha": 1.0, "target_parameters": ["experts.down_proj"]}
    matrix = {"A": np.ones((2, 4), np.float32), "B": np.ones((4, 2), np.float32)}
    adapter = [(f"base_model.model.mlp.experts.lora_{x}.weight", value) for x, value in matrix.items()]
    base = [("mlp.experts.down_proj", np.zeros((2, 4, 4), np.float32))]
    with pytest.raises(UserError, match="does not show whether its rows are inputs"):
        list(adapters.merge(base, adapter, settings, "other"))
    assert dict(adapters.merge(base, adapter, settings, "gpt_oss"))["mlp.experts.down_proj"].all()
    with pytest.raises(UserError, match=r"has matrices of mlp\.experts, which the base model lacks"):
        list(adapters.merge([("norm.weight", np.zeros(2))], adapter, settings, "gpt_oss"))


def test_ranks_and_scales_of_single_parameters_are_read_as_peft_writes_them() -> None:
    settings = {
        "r": 1,
        "lora_alpha": 4.0,
        "use_rslora": True,
        "target_parameters": ["gate_up_proj", "down_proj"],
        "rank_pattern": {r".*\.gate_up_proj": 2},
        "alpha_pattern": {r".*\.gate_up_proj": 8.0},
    }
    rng = np.random.default_rng(0)
    shapes = {"base_layer.lora_A": (4, 3), "base_layer.lora_B": (10, 4), "lora_A": (2, 5), "lora_B": (3, 2)}
    made = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    kernels = {"gate_proj": (5, 3), "up_proj": (5, 3), "down_proj": (3, 5)}
    base = [(f"mlp.experts.1.{name}.weight", np.zeros(shape, np.float32)) for name, shape in kernels.items()]
    adapter = [(f"base_model.model.mlp.experts.{name}.weight", x) for name, x in made.items()]
    merged = dict(adapters.merge(base, adapter, settings, "qwen3_moe"))
    a, b = made["base_layer.lora_A"][2:], made["base_layer.lora_B"][:, [1, 3]]
    both = np.concatenate([merged[f"mlp.experts.1.{x}_proj.weight"] for x in ("gate", "up")])
    np.testing.assert_allclose(both, 8 / 2**0.5 * b @ a, rtol=1e-5)
    np.testing.assert_allclose(
        merged["mlp.experts.1.down_proj.weight"], 4 * made["lora_B"][:, 1:] @ made["lora_A"][1:], rtol=1e-5
    )


def test_an_adapter_without_a_trainers_state_is_exported_and_what_is_no_plain_lora_is_refused(
    directory: Path, tmp_path: Path
) -> None:
    made = taught("torch", directory)
    adapters.write(tmp_path / "peft", made.adapter(), config=LORA, base=directory)  # as PEFT: neither config nor state
    export.export(export.find(tmp_path / "peft"), tmp_path / "plain")
    exported = dict(model_dir.read_tensors(tmp_path / "plain"))
    for name, x in made.weights():
        np.testing.assert_allclose(exported[name], x, rtol=0, atol=1e-6)
    assert model_dir.read_config(tmp_path / "plain") == model_dir.read_config(directory)
    adapter, settings = dict(made.adapter()), adapters.settings_of(LORA, directory)
    for more, changed in (({}, {"use_dora": True}), ({}, {"peft_type": "LOHA"}), ({"base_model.model.lm_head.weight": x}, {})):
        with pytest.raises(UserError, match="only plain LoRA can be merged here"):
            list(adapters.merge([], (adapter | more).items(), settings | changed, "qwen3_moe"))


@thorough
def test_vllm_reads_each_experts_matrices_from_the_file(directory: Path, tmp_path: Path) -> None:
    """vLLM's own functions for mixtures that it holds by expert; no CPU server has adapters of experts."""
    pytest.importorskip("vllm")
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper

    lora = replace(LORA, targets=EXPERTS)
    made = taught("torch", directory, lora=lora)
    made.save(tmp_path)
    helper = PEFTHelper.from_local_dir(str(tmp_path), 64)
    read = LoRAModel.from_local_checkpoint(str(tmp_path), {"experts"}, helper, lora_model_id=1, device="cpu")
    manager: Any = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"])))
    manager._get_lora_layer_weights = lambda model, name: model.get_lora(name)
    shape = SimpleNamespace(local_num_experts=4, global_num_experts=4, ep_rank=0)
    base = ((name, np.zeros_like(x)) for name, x in model_dir.read_tensors(directory))
    settings = adapters.settings_of(lora, directory)
    products = dict(adapters.merge(base, made.adapter(), settings, "qwen3_moe"))
    for layer in range(2):
        place = f"model.layers.{layer}.mlp.experts"
        LoRAModelManager._convert_3d_to_2d_moe_lora(manager, read, shape, place)
        found = read.get_lora(place)
        for a, b, kernel in zip(found.lora_a, found.lora_b, ("gate_proj", "down_proj", "up_proj"), strict=True):
            for expert, one in enumerate(lora.scale * (b @ a)):
                np.testing.assert_allclose(one, products[f"{place}.{expert}.{kernel}.weight"], atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_peft_loads_what_was_saved_and_what_it_saves_is_read(backend: str, directory: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    made = taught(backend, directory)
    made.save(tmp_path / "ours")
    model = peft.PeftModel.from_pretrained(reference_model(directory), tmp_path / "ours", is_trainable=True)
    packed, batch = batch_of_all()
    total = torch.zeros(())
    gathered = (packed.gather(x) for x in (made.logprobs(batch), batch.weights, batch.mask))
    for one, ours, weights, mask in zip(trajectories(*LENGTHS), *gathered, strict=True):
        tokens = torch.from_numpy(one.tokens.astype(np.int64))
        logp = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        np.testing.assert_allclose(ours[1:], logp.detach(), atol=1e-4)
        total = total - (logp * torch.tensor(weights[1:] * mask[1:])).sum()
    total.backward()
    gradients = {name.replace(".default", ""): p.grad for name, p in model.named_parameters() if p.requires_grad}
    old = dict(model_dir.read_moments(tmp_path / "ours"))
    made.update(batch, sft)
    made.save(tmp_path / "next")
    new, beta = dict(model_dir.read_moments(tmp_path / "next")), OPTIMIZER.beta1
    assert gradients.keys() == dict(made.adapter()).keys()
    for name, x in gradients.items():
        ours = (new[f"exp_avg.{name}"] - beta * old[f"exp_avg.{name}"]) / (1 - beta)
        np.testing.assert_allclose(ours, x, atol=1e-5, rtol=1e-3, err_msg=name)
    model.save_pretrained(tmp_path / "theirs")
    written, before = dict(adapters.read(tmp_path / "theirs")), dict(adapters.read(tmp_path / "ours"))
    assert written.keys() == before.keys()
    for name, x in before.items():
        np.testing.assert_array_equal(written[name], x)
    export.export(export.find(tmp_path / "theirs"), tmp_path / "merged")
    before = make(backend, directory)
    before.restore(tmp_path / "ours")
    plain = make(backend, tmp_path / "merged", lora=LoRAConfig())
    np.testing.assert_allclose(plain.logprobs(batch), before.logprobs(batch), atol=1e-4)
