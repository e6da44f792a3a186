"""What a backend declares, and what it refuses before and while it builds a trainer."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.errors import ConfigError, UserError
from areal_x.hf import model_dir as files
from areal_x.protocols.backends import DECLARED, Backend, load_backend
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import LoRAConfig, MeshConfig, ModelConfig, TrainerConfig
from areal_x.testing.conformance.helpers import make_trainer, packed_batch, policy_gradient
from areal_x.types import Policy

METHODS = [
    name
    for name in (*vars(Trainer), "logprobs")
    if not name.startswith("_") and callable(getattr(Trainer, name, None))
]


def test_everything_in_the_contract_is_there(backend: str, still: Trainer) -> None:
    module = load_backend(backend)
    assert [name for name in DECLARED if not hasattr(module, name)] == []
    assert "files" in module.TRANSPORTS
    assert module.DEVICES_EACH is None or module.DEVICES_EACH > 0
    assert len(METHODS) > 10
    assert [name for name in METHODS if not callable(getattr(still, name, None))] == []
    assert still.version >= 0


def test_threads_can_be_read_and_set_if_the_trainer_controls_them(still: Trainer) -> None:
    before = still.threads
    if before is None:
        return
    still.threads = 1
    assert still.threads == 1
    still.threads = before


def test_devices_are_found(backend: str, model_dir: Path) -> None:
    config = TrainerConfig(model=ModelConfig(str(model_dir)))
    found = load_backend(backend).check(config)
    assert found.count >= 1
    assert found.kind
    assert found.memory is None or found.memory > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": MeshConfig(data=64)}, r"mesh\.data = 64"),
        (
            {"lora": LoRAConfig(rank=2, targets=("q_proj", "qkv_proj"))},
            r"lora\.targets .*without qkv_proj",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_named_by_check_and_by_construction(
    changes: dict[str, Any], message: str, backend: str, model_dir: Path
) -> None:
    config = TrainerConfig(model=ModelConfig(str(model_dir)), **changes)
    for build in (load_backend(backend).check, load_backend(backend).create_trainer):
        with pytest.raises(ConfigError, match=message):
            build(config)


def test_an_unknown_implementation_of_attention_is_named(backend: str, model_dir: Path) -> None:
    """At the latest when a batch is computed, as the choice may depend on its length."""
    model = ModelConfig(str(model_dir), attention="no-such-attention")
    with pytest.raises(ConfigError, match=r"model\.attention = 'no-such-attention'"):
        make_trainer(backend, model_dir, model=model).logprobs(packed_batch()[0])


def changed_tensors(source: Path, directory: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    tensors = dict(files.read_tensors(source))
    change(tensors)
    files.write_model(directory, source, tensors.items())
    return directory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing:? model\.norm\.weight"),
        (
            lambda t: t.update({"extra.weight": np.zeros(3, np.float32)}),
            r"left over:? extra\.weight",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.ones(5, np.float32)}),
            r"model\.norm\.weight|shape",
        ),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_refused_by_check_and_by_construction(
    change: Any, message: str, backend: str, model_dir: Path, tmp_path: Path
) -> None:
    directory = changed_tensors(model_dir, tmp_path / "changed", change)
    config = TrainerConfig(model=ModelConfig(str(directory)))
    for build in (load_backend(backend).check, load_backend(backend).create_trainer):
        with pytest.raises(UserError, match=message):
            build(config)


def test_an_architecture_that_nobody_knows_is_refused(
    backend: str, model_dir: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "unknown"
    shutil.copytree(model_dir, directory)
    config = json.loads((directory / "config.json").read_text())
    unknown = {**config, "model_type": "no_such_model", "architectures": ["NoSuchForCausalLM"]}
    (directory / "config.json").write_text(json.dumps(unknown))
    for build in (load_backend(backend).check, load_backend(backend).create_trainer):
        with pytest.raises(UserError):
            build(TrainerConfig(model=ModelConfig(str(directory))))


def test_recorded_experts_need_a_model_with_experts(backend: str, model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.replay_experts = True"):
        make_trainer(backend, model_dir, replay_experts=True)


def test_a_classifier_is_no_policy(backend: str, scorer_dir: Path) -> None:
    with pytest.raises(UserError, match="a policy needs a causal language model"):
        make_trainer(backend, scorer_dir)


def test_differentiate_returns_terms_and_the_gradient_of_their_weighted_sum(backend: str) -> None:
    module: Backend = load_backend(backend)
    batch, _ = packed_batch()
    logp = np.where(batch.mask, batch.behavior_logp, 0).astype(np.float32)
    terms, gradient = module.differentiate(policy_gradient, Policy(logp=logp), batch)
    expected = np.where(batch.mask, -batch.advantages * logp, 0)
    np.testing.assert_allclose(terms, expected, rtol=1e-6)
    slope = np.where(batch.mask, -batch.advantages * batch.weights, 0)
    np.testing.assert_allclose(gradient.logp, slope, rtol=1e-6)
    absent = [f.name for f in dataclasses.fields(Policy) if f.name != "logp"]
    assert all(getattr(gradient, name) is None for name in absent)
