"""Plain models made of checkpoints, without any framework."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

from areal_x import export
from areal_x.errors import UserError
from areal_x.hf import adapters, model_dir
from areal_x.protocols.trainer_config import LoRAConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.run import checkpoint
from tests.experiments import tiny_experiment
from tests.optimizer_moments import write_adamw_state
from tests.thorough import further

CONFIG = LoRAConfig(rank=2, alpha=6.0, targets=("q_proj",))
KERNEL = "model.layers.0.self_attn.q_proj"
PEFT_PREFIX = f"base_model.model.{KERNEL}"


def write_adapter(directory: Path, base: Path) -> dict[str, np.ndarray]:
    """A trainer's checkpoint of one kernel's adapter."""
    rng = np.random.default_rng(0)
    rows, columns = dict(model_dir.read_tensors(base))[f"{KERNEL}.weight"].shape
    shapes = {"A": (2, columns), "B": (rows, 2)}
    tensors = {f"{PEFT_PREFIX}.lora_{x}.weight": rng.normal(size=shape).astype(np.float32) for x, shape in shapes.items()}
    model_dir.copy_other_files(directory, base)
    adapters.write(directory, tensors.items(), config=CONFIG, base=base)
    (directory / model_dir.MOMENTS).touch()
    (directory / model_dir.STATE).write_text(json.dumps({"version": 3, "base": adapters.fingerprint(base)}))
    return tensors


def test_a_merged_kernel_is_the_base_plus_the_scaled_product_and_all_else_is_the_base(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "trainer", tiny_model_dir)
    export.export(tmp_path / "trainer", tmp_path / "plain")
    base, plain = (dict(model_dir.read_tensors(path)) for path in (tiny_model_dir, tmp_path / "plain"))
    a, b = (adapter[f"{PEFT_PREFIX}.lora_{x}.weight"].astype(np.float64) for x in "AB")
    assert plain.keys() == base.keys()
    for name, value in base.items():
        expected = value + 3 * b @ a if name == f"{KERNEL}.weight" else value
        np.testing.assert_allclose(plain[name], expected, atol=1e-5)
        assert plain[name].dtype == value.dtype
    assert model_dir.resolve(str(tmp_path / "plain")) == tmp_path / "plain"


@pytest.mark.parametrize("model_type, turned", [("gemma4_text", False), ("llama4", True), ("some_other", None)])
def test_experts_kernels_that_are_square_are_merged_where_the_family_says_which_axis_is_which(
    model_type: str, turned: bool | None
) -> None:
    kernel, rng = "model.layers.0.experts.down_proj", np.random.default_rng(0)
    base = {kernel: rng.normal(size=(2, 3, 3)).astype(np.float32)}
    a, b = rng.normal(size=(2, 3)).astype(np.float32), rng.normal(size=(3, 2)).astype(np.float32)
    adapter = {f"base_model.model.model.layers.0.experts.lora_{x}.weight": value for x, value in zip("AB", (a, b), strict=True)}
    settings = {"r": 1, "lora_alpha": 1.0, "target_parameters": ["experts.down_proj"]}
    merged = adapters.merge(base.items(), adapter.items(), settings, model_type)
    if turned is None:
        with pytest.raises(UserError, match="is square"):
            dict(merged)
        return
    products = np.stack([np.outer(b[:, expert], a[expert]) for expert in range(2)])  # [experts, out, in]
    expected = base[kernel] + (products.transpose(0, 2, 1) if turned else products)
    np.testing.assert_allclose(dict(merged)[kernel], expected, rtol=1e-6)


def test_a_base_in_bf16_stays_in_bf16_and_is_rounded_once() -> None:
    base = {f"{KERNEL}.weight": np.full((1, 1), 1.0, bfloat16)}
    factors = {"A": np.float32([[1.0], [1.0]]), "B": np.float32([[0.003, 0.003]])}  # each alone would be rounded away
    adapter = {f"{PEFT_PREFIX}.lora_{x}.weight": value for x, value in factors.items()}
    ((_, merged),) = adapters.merge(base.items(), adapter.items(), {"r": 2, "lora_alpha": 2.0}, "llama")
    assert merged.dtype == bfloat16
    assert merged == bfloat16(1.006)
    assert merged != 1


def test_the_newest_checkpoint_of_a_run_is_taken_without_the_optimizers_state(tiny_model_dir: Path, tmp_path: Path) -> None:
    tensors = dict(model_dir.read_tensors(tiny_model_dir))

    def write(path: Path, factor: float) -> None:
        changed = {name: x * np.float32(factor) for name, x in tensors.items()}
        model_dir.write_model(path / "trainer", tiny_model_dir, changed.items())
        moments = ((name, x, x) for name, x in tensors.items())
        write_adamw_state(path / "trainer", moments, {"version": 1})

    for step in (1, 2):
        checkpoint.save(tmp_path / "run", step, lambda path, step=step: write(path, step), {})
    command = [sys.executable, "-X", "importtime", "-m", "areal_x.export", str(tmp_path / "run"), str(tmp_path / "plain")]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    assert answer.stdout == f"model: {tmp_path / 'plain'}\n"
    loaded = {line.rpartition("|")[2].strip() for line in answer.stderr.splitlines()}
    assert not loaded & {"jax", "torch", "vllm"}
    for name, value in model_dir.read_tensors(tmp_path / "plain"):
        np.testing.assert_array_equal(value, 2 * tensors[name])
    names = {file.name for file in (tmp_path / "plain").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert not names & {"optimizer.safetensors", "trainer.json"}
    export.export(tmp_path / "run" / "checkpoints" / "1", tmp_path / "first")
    np.testing.assert_array_equal(dict(model_dir.read_tensors(tmp_path / "first"))["lm_head.weight"], tensors["lm_head.weight"])


def test_what_cannot_be_exported_is_one_sentence(
    tiny_model_dir: Path, tied_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_adapter(tmp_path / "trainer", tiny_model_dir)
    assert export.main([str(tmp_path / "trainer"), str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path} exists and is not overwritten: choose another directory\n"
    with pytest.raises(UserError, match="is neither a run nor a checkpoint: name runs/NAME"):
        export.export(tiny_model_dir, tmp_path / "plain")
    settings = adapters.read_config(tmp_path / "trainer") | {"base_model_name_or_path": str(tied_model_dir)}
    (tmp_path / "trainer" / adapters.CONFIG).write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"is not the base model with which the adapters of .* were trained"):
        export.export(tmp_path / "trainer", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("lora", [2, *further(0)])
def test_a_run_exports_its_model_at_steps_of_its_own(lora: int, tiny_model_dir: Path, tmp_path: Path) -> None:
    """The last export is the model of the last checkpoint, with adapters merged."""
    trainer = TrainerConfig(ModelConfig(str(tiny_model_dir)), OptimizerConfig(learning_rate=1e-2), lora=LoRAConfig(rank=lora))
    experiment = tiny_experiment(tiny_model_dir, tmp_path, steps=3, export_every=2, trainer=trainer)
    for _ in experiment.turns(experiment.open(), message=lambda _: None):
        pass
    exports = tmp_path / "run" / "exports"
    assert sorted(p.name for p in exports.iterdir()) == ["2", "3"]
    export.export(tmp_path / "run", tmp_path / "plain")
    last, plain = (dict(model_dir.read_tensors(place)) for place in (exports / "3", tmp_path / "plain"))
    assert {p.name for p in (exports / "3").iterdir()} == {p.name for p in (tmp_path / "plain").iterdir()}
    assert last.keys() == plain.keys()
    for name, value in plain.items():
        np.testing.assert_allclose(last[name], value, rtol=1e-5, atol=1e-7)
    two = dict(model_dir.read_tensors(exports / "2"))
    assert any((two[name] != x).any() for name, x in last.items())
