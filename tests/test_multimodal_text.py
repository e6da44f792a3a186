"""Multimodal checkpoints of which the language model is trained, on text: their other parts stay as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.algorithms.weighting import token_mean
from areal_x.batching.packing import pack
from areal_x.errors import UserError
from areal_x.hf import adapters, model_dir
from areal_x.hf.config_defaults import described_text, vocabulary_of
from areal_x.hf.image_reader import load_image_reader
from areal_x.protocols.backends import create_trainer, load_backend
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import LoRAConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch
from tests.model_families import CASES
from tests.models import log_softmax, torch_logits, trajectories, with_images, write_config

OTHER = {"jax": "torch", "torch": "jax"}
pytest.importorskip("torch")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 3 in bf16, as models are on the hub, with a tower of which the patches make no square of tokens: its language
    model alone is trained."""
    plain = write_config(CASES["gemma3-2"] | {"mm_tokens_per_image": 3}, tmp_path_factory.mktemp("plain"))
    directory = tmp_path_factory.mktemp("gemma3")
    read = model_dir.read_tensors(plain)
    model_dir.write_model(directory, plain, ((name, x.astype(ml_dtypes.bfloat16)) for name, x in read))
    return directory


def trainer_of(backend: str, directory: Path, rank: int = 0) -> Trainer:
    optimizer = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
    config = TrainerConfig(ModelConfig(str(directory)), optimizer=optimizer, precision="fp32", head_chunk=32)
    return create_trainer(backend, replace(config, lora=LoRAConfig(rank=rank)))


def learnable() -> Batch:
    packed = pack(trajectories(9, 14, 6, 12), 16)
    b = packed.batch
    advantages = packed.spread(np.array([1.0, -1.0, 0.5, 2.0], np.float32))
    weights = np.asarray(token_mean(b.mask, b.segment_ids), np.float32)
    return b.replace(proximal_logp=b.behavior_logp, advantages=advantages, weights=weights)


def of_text(name: str) -> bool:
    return name.startswith("language_model.")


@pytest.mark.thorough
def test_what_is_saved_has_the_tower_bit_for_bit_and_either_backend_goes_on_from_it(
    backend: str, source: Path, tmp_path: Path
) -> None:
    first, other = trainer_of(backend, source), trainer_of(OTHER[backend], source)
    first.update(learnable(), losses.ppo_clip)
    first.save(tmp_path)
    before, after = (dict(model_dir.read_tensors(directory)) for directory in (source, tmp_path))
    assert before.keys() == after.keys()
    assert {name for name in before if not np.array_equal(before[name], after[name])} == set(filter(of_text, before))
    other.restore(tmp_path)
    again = [trainer.update(learnable(), losses.ppo_clip)["loss"] for trainer in (first, other)]
    np.testing.assert_allclose(*again, rtol=1e-4)


def test_adapters_are_merged_into_the_tensors_of_their_modules(backend: str, source: Path) -> None:
    """They have the names of modules in memory, which differ from those in files."""
    random = np.random.default_rng(0)
    adapter = {name: random.normal(size=x.shape) for name, x in trainer_of(backend, source, rank=2).adapter()}
    assert all("model.language_model.layers." in name for name in adapter)
    before = dict(model_dir.read_tensors(source))
    merged = dict(adapters.merge(before.items(), adapter.items(), {"r": 2, "lora_alpha": 2}, "gemma3"))
    assert merged.keys() == before.keys()
    changed = {name for name in before if not np.array_equal(merged[name], before[name])}
    assert len(changed) == len(adapter) / 2
    assert all(of_text(name) for name in changed)


def test_images_are_refused_before_a_run_and_in_a_batch(backend: str, source: Path) -> None:
    config = TrainerConfig(ModelConfig(str(source)))
    assert not load_backend(backend).check(config).images
    with pytest.raises(UserError, match="do not become mm_tokens_per_image = 3 tokens"):
        load_image_reader(str(source))
    seen = pack(with_images((3, (1, 4, 4), 2)), 32).batch
    with pytest.raises(UserError, match="the batch has images"):
        trainer_of(backend, source).logprobs(seen)


def test_a_head_that_the_file_has_counts_whatever_the_config_ties(backend: str, tmp_path: Path) -> None:
    """As in transformers: Mistral Small 3.1's config leaves out that its head is not tied."""
    directory = write_config(CASES["mistral3-0"], tmp_path)
    config = json.loads((directory / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.pop("tie_word_embeddings")
    (directory / "config.json").write_text(json.dumps(config))
    load_backend(backend).check(TrainerConfig(ModelConfig(str(directory))))
    alone = [t.tokens for t in trajectories(9, 14)]
    packed = pack(trajectories(9, 14), 32)
    found = packed.gather(trainer_of(backend, directory).logprobs(packed.batch))
    for logits, tokens, ours in zip(torch_logits(directory, alone), alone, found, strict=True):
        logp = log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(ours[1:], logp, atol=1e-4)


def test_what_a_config_leaves_out_of_its_language_model_is_transformers_default(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vocabulary_of(tmp_path) == 262208
    assert described_text(tmp_path)["num_attention_heads"] == 8
