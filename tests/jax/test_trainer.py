from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from areal_x.algorithms import losses
from areal_x.algorithms.weighting import sequence_mean
from areal_x.batching.packing import Packed, pack
from areal_x.errors import ConfigError, UserError
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.testing.models import write_model
from areal_x.types import Batch
from areal_x_jax.architecture import read_architecture
from areal_x_jax.trainer import Trainer
from tests.conftest import QUICK, python_with
from tests.models import LLAMA3, MODELS, log_softmax, reference_model, torch_logits, trajectories
from tests.optimizer_moments import write_adamw_state
from tests.thorough import thorough

MadeModel = Callable[[str], Path]
LENGTHS = (12, 7, 20, 15, 5, 18, 9, 20, 11, 16, 13, 6)
# The rate grows through all steps, so a step counted wrongly shows; eps is large enough to show where it stands, and to keep
# AdamW from blowing up the rounding of a key's bias, whose gradient is almost nothing.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, warmup_steps=4, clip_norm=0.5, eps=1e-4)
STILL = OptimizerConfig(learning_rate=1e-30)


def make_trainer(directory: Path, **changes: Any) -> Trainer:
    defaults: dict[str, Any] = {"optimizer": OPTIMIZER, "micro_batch_rows": 2, "head_chunk": 32}
    return Trainer(TrainerConfig(**{**defaults, "model": ModelConfig(path=str(directory)), **changes}))


def learnable(packed: Packed, weighting: Any = sequence_mean, seed: int = 0) -> Batch:
    """The packed batch with an advantage for each sequence and the weighting's weights."""
    advantages = packed.spread(np.random.default_rng(seed).normal(size=len(packed.lengths)))
    b = packed.batch
    weights = np.asarray(weighting(b.mask, b.segment_ids), np.float32)
    return b.replace(advantages=advantages, weights=weights, proximal_logp=b.behavior_logp)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return learnable(pack(trajectories(*LENGTHS), 32))


def parameters(trainer: Trainer) -> dict[str, np.ndarray]:
    return dict(trainer.weights())


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen2", "llama"])
def test_logprobs_are_the_log_softmax_of_transformers_logits(name: str, model_dir_of: MadeModel) -> None:
    packed = pack(trajectories(*LENGTHS), 32)
    trainer = make_trainer(model_dir_of(name), temperature=0.8)
    ours = packed.gather(trainer.logprobs(packed.batch))
    sequences = [t.tokens for t in trajectories(*LENGTHS)]
    for logp, tokens, logits in zip(ours, sequences, torch_logits(model_dir_of(name), sequences), strict=True):
        expected = log_softmax(logits[:-1] / 0.8)[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(logp[1:], expected, atol=1e-4)
        assert logp[0] == 0


class TorchSteps:
    """The same training in torch: SFT of sequences one by one, clipping, AdamW with decay on matrices."""

    def __init__(self, directory: Path) -> None:
        import torch

        self.model = reference_model(directory)
        named = list(self.model.named_parameters())
        decayed = [p for _, p in named if p.ndim >= 2], [p for _, p in named if p.ndim < 2]
        groups = [{"params": p, "weight_decay": decay} for p, decay in zip(decayed, (0.1, 0.0), strict=True)]
        self.optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps)
        self.version = 0

    def step(self) -> tuple[float, float]:
        """The loss and the gradient's norm before clipping."""
        import torch

        made = trajectories(*LENGTHS)
        total = torch.zeros(())
        for t in made:
            tokens = torch.tensor(t.tokens).long()
            logp = torch.log_softmax(self.model(tokens[None]).logits[0, :-1], -1)
            own = torch.tensor(t.mask[1:])
            total = total - logp[torch.arange(len(tokens) - 1), tokens[1:]][own].mean() / len(made)
        self.optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), OPTIMIZER.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * (self.version + 1) / 4
        self.optimizer.step()
        self.version += 1
        return float(total.detach()), float(norm)

    def save(self, directory: Path, source: Path) -> None:
        named = [(name, p.detach().numpy(), self.optimizer.state[p]) for name, p in self.model.named_parameters()]
        model_dir.write_model(directory, source, ((name, p) for name, p, _ in named))
        moments = ((name, s["exp_avg"].numpy(), s["exp_avg_sq"].numpy()) for name, _, s in named)
        write_adamw_state(directory, moments, {"version": self.version})


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2"])
def test_updates_are_those_of_torch_also_from_a_state_that_torch_left(
    name: str, batch: Batch, model_dir_of: MadeModel, tmp_path: Path
) -> None:
    """Three steps beside torch's AdamW; then a fourth of a trainer that restored torch's third."""
    trainer, theirs = make_trainer(model_dir_of(name)), TorchSteps(model_dir_of(name))
    for step in range(4):
        if step == 3:
            theirs.save(tmp_path, model_dir_of(name))
            trainer.restore(tmp_path)
        learned, (loss, norm) = trainer.update(batch, losses.sft), theirs.step()
        assert learned["loss"] == pytest.approx(loss, rel=1e-5)
        assert learned["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert learned["learning_rate"] == pytest.approx(1e-2 * (step + 1) / 4)
        ours = parameters(trainer)
        for tensor, parameter in theirs.model.named_parameters():
            np.testing.assert_allclose(ours[tensor], parameter.detach().numpy(), atol=2e-5, err_msg=f"{tensor}, step {step}")
    assert trainer.version == 4


@pytest.fixture(scope="module")
def still(model_dir_of: MadeModel) -> Trainer:
    """A trainer whose steps move nothing, so that one can be asked again and again."""
    return make_trainer(model_dir_of("qwen3"), optimizer=STILL, micro_batch_rows=8)


def test_the_step_compiles_once_for_batches_of_up_to_a_power_of_two_of_micro_batches(
    batch: Batch, model_dir_of: MadeModel
) -> None:
    trainer = make_trainer(model_dir_of("qwen3"), optimizer=STILL, micro_batch_rows=1)
    eight = batch.map(lambda x: np.concatenate([x, x])[:8])  # a capacity of eight, which five rows take too
    for rows in (5, 5, 8, 6):
        trainer.update(eight.map(lambda x, rows=rows: x[:rows]), losses.ppo_clip)
    assert trainer.programs == 1
    trainer.update(batch.map(lambda x: x[:2]), losses.ppo_clip)
    assert trainer.programs == 2


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2"])
def test_what_was_saved_loads_in_transformers_with_the_same_logits(
    name: str, batch: Batch, model_dir_of: MadeModel, tmp_path: Path
) -> None:
    packed = pack(trajectories(*LENGTHS), 32)
    trainer = make_trainer(model_dir_of(name))
    trainer.update(batch, losses.sft)
    trainer.save(tmp_path)
    sequences = [t.tokens for t in trajectories(*LENGTHS)]
    ours = packed.gather(trainer.logprobs(packed.batch))
    for logp, tokens, logits in zip(ours, sequences, torch_logits(tmp_path, sequences), strict=True):
        expected = log_softmax(logits[:-1])[np.arange(len(tokens) - 1), tokens[1:]]
        np.testing.assert_allclose(logp[1:], expected, atol=1e-4)
    for tensor, value in model_dir.read_tensors(tmp_path):
        np.testing.assert_array_equal(value, parameters(trainer)[tensor])


def test_in_bf16_the_compute_is_bf16_and_the_master_weights_are_not(
    batch: Batch, still: Trainer, model_dir_of: MadeModel
) -> None:
    tiny_steps = OptimizerConfig(learning_rate=1e-6, weight_decay=0.0)
    low = make_trainer(model_dir_of("qwen3"), precision="bf16", optimizer=tiny_steps)
    assert jax.tree.leaves(low.snapshot())[0].dtype == np.dtype("bfloat16")
    assert {x.dtype for x in parameters(low).values()} == {np.dtype("bfloat16")}
    gap = np.abs(low.logprobs(batch) - still.logprobs(batch)).max()
    assert 1e-3 < gap < 0.3  # bf16 has three digits
    before = np.asarray(low.params["embed"])
    assert low.update(batch, losses.sft)["loss"] == pytest.approx(still.update(batch, losses.sft)["loss"], rel=0.02)
    moved = np.abs(np.asarray(low.params["embed"]) - before)
    assert 0 < moved.max() < 3e-6  # a bf16 weight of 0.1 could not move by less than 2e-4


ON_DEVICES = """
import json, sys, numpy as np
from areal_x.algorithms import losses
from areal_x.trainer import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch
from areal_x_jax.trainer import Trainer

directory, arrays = sys.argv[1:]
batch = Batch(**np.load(arrays))
optimizer = OptimizerConfig(learning_rate=1e-3, warmup_steps=4)
trainer = Trainer(TrainerConfig(ModelConfig(path=directory), optimizer, micro_batch_rows=1, head_chunk=16))
learned = [trainer.update(batch, losses.ppo_clip) for _ in range(2)]
logp = trainer.logprobs(batch)
print(json.dumps({"devices": trainer.mesh.size, "programs": trainer.programs, "learned": learned, "logp": logp.tolist()}))
"""


@thorough
def test_four_devices_give_what_one_gives(batch: Batch, model_dir_of: MadeModel, tmp_path: Path) -> None:
    present = {name: x for name in Batch.__dataclass_fields__ if (x := getattr(batch, name)) is not None}
    np.savez(tmp_path / "batch.npz", **present)
    said = python_with(4, "-c", ON_DEVICES, str(model_dir_of("qwen3")), str(tmp_path / "batch.npz"), **QUICK)
    four = json.loads(said.splitlines()[-1])
    assert (four["devices"], four["programs"]) == (4, 1)
    one = make_trainer(model_dir_of("qwen3"), optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=4))
    for learned in four["learned"]:
        expected = one.update(batch, losses.ppo_clip)
        # Sums of fp32 in another order: with the instructions of some processors 1.1e-6 apart.
        assert learned["loss"] == pytest.approx(expected["loss"], rel=3e-6)
        assert learned["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    np.testing.assert_allclose(four["logp"], one.logprobs(batch), atol=1e-4)


def test_what_stays_on_the_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.offload = True .*mesh\.fsdp"):
        Trainer(TrainerConfig(offload=True))


def test_a_mesh_that_the_devices_cannot_make_is_refused_naming_what_would_work(model_dir_of: MadeModel) -> None:
    here = jax.local_device_count()
    with pytest.raises(ConfigError, match=rf"mesh\.data = {here + 1} .* the {here} devices .*mesh\.data = -1"):
        make_trainer(model_dir_of("qwen3"), mesh=MeshConfig(data=here + 1))


def test_a_sequence_longer_than_the_model_was_made_for_is_refused_and_a_row_of_several_is_not(tmp_path: Path) -> None:
    trainer = make_trainer(write_model(tmp_path, max_position_embeddings=16))
    trainer.logprobs(pack(trajectories(16, 16, vocab=40), 32).batch)
    with pytest.raises(UserError, match=r"17 tokens is longer than the 16 .* train\.row_length"):
        trainer.logprobs(pack(trajectories(17, vocab=40), 32).batch)


@pytest.mark.parametrize(
    "scaling, context",
    [
        (None, 256),
        ({"rope_type": "linear", "factor": 2.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({**LLAMA3, "original_max_position_embeddings": 16}, 256),
    ],
)
def test_positions_that_are_stretched_make_room_for_longer_sequences(scaling: dict[str, Any] | None, context: int) -> None:
    config = {**MODELS["llama"], "architectures": ["LlamaForCausalLM"], "rope_scaling": scaling}
    assert read_architecture(config).context == context
