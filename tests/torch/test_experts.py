"""A mixture of experts against a loop over tokens, transformers' routers and the JAX backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import transformers.models.gpt_oss.modeling_gpt_oss as gpt_oss
import transformers.models.qwen3_moe.modeling_qwen3_moe as qwen3_moe
from transformers import AutoConfig, AutoModelForCausalLM

from areal_x.algorithms import losses
from areal_x.algorithms.weighting import sequence_mean
from areal_x.batching.packing import pack
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer_config import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.types import Batch
from areal_x_torch import experts
from areal_x_torch.sharding import check_model
from areal_x_torch.trainer import Trainer
from tests.experts import REFUSED, SIGMOIDS, assert_replays, batch_of_others, recorded, sigmoid_imbalance
from tests.models import SIZES, trajectories, write_config

TOKENS, COUNT, PER_TOKEN = 11, 5, 2


def layer_of(width: int = 16, inner: int = 8) -> Any:
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=width,
        moe_intermediate_size=inner,
        num_experts=COUNT,
        num_experts_per_tok=PER_TOKEN,
        hidden_act="gelu",
    )
    layer = qwen3_moe.Qwen3MoeExperts(config)
    random = torch.Generator().manual_seed(0)
    for p in layer.parameters():
        torch.nn.init.normal_(p, generator=random)
    return layer


def drawn(width: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Tokens, the experts chosen for each, of which the third has none and the first most, and their weights."""
    random = torch.Generator().manual_seed(seed)
    chosen = torch.tensor([[0, 1], [0, 3], [4, 0]]).repeat(4, 1)[:TOKENS]
    return torch.randn(TOKENS, width, generator=random), chosen, torch.rand(TOKENS, PER_TOKEN, generator=random)


def by_hand(layer: Any, x: Any, chosen: Any, weights: Any) -> Any:
    out = []
    for token, of_token, says in zip(x, chosen, weights, strict=True):
        parts = []
        for expert, weight in zip(of_token, says, strict=True):
            gate, up = (layer.gate_up_proj[expert] @ token).chunk(2)
            parts.append(weight * (layer.down_proj[expert] @ (torch.nn.functional.gelu(gate) * up)))
        out.append(sum(parts))
    return torch.stack(out)


@pytest.mark.parametrize(("width", "inner"), [(16, 8), (7, 5)], ids=["grouped", "looped"])
def test_each_token_is_computed_by_the_experts_that_are_chosen_and_so_is_its_gradient(width: int, inner: int) -> None:
    layer, (x, chosen, weights) = layer_of(width, inner), drawn(width)
    assert experts.can_group(x, layer.down_proj) == (width == 16)
    x.requires_grad_(), weights.requires_grad_()
    slope = torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(1))
    found, expected = experts.mixture(layer, x, chosen, weights), by_hand(layer, x, chosen, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    read = x, weights, *layer.parameters()
    for mine, theirs in zip(*(torch.autograd.grad(said, read, slope) for said in (found, expected)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_under_autocast_products_are_in_its_type_and_gradients_in_that_of_the_masters(monkeypatch) -> None:
    layer, (x, chosen, weights), types = layer_of(), drawn(16), []
    plain = experts.grouped
    monkeypatch.setattr(experts, "grouped", lambda *of: types.append({y.dtype for y in of[:2]}) or plain(*of))
    with torch.autocast("cpu", torch.bfloat16):
        said = experts.mixture(layer, x, chosen, weights)
    assert types == [{torch.bfloat16}] * 2
    assert said.dtype == torch.float32
    said.sum().backward()
    assert layer.down_proj.grad.dtype == torch.float32
    torch.testing.assert_close(said, by_hand(layer, x, chosen, weights), rtol=0.05, atol=0.5)


def test_nothing_has_tokens_times_experts_times_features() -> None:
    layer, (x, chosen, weights), kept = layer_of(), drawn(16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y.numel()) or y, lambda y: y):
        experts.mixture(layer, x.requires_grad_(), chosen, weights)
    assert max(kept) <= max(TOKENS * PER_TOKEN * 16, layer.gate_up_proj.numel())


def test_experts_with_biases_give_what_transformers_own_loop_gives() -> None:
    config = AutoConfig.for_model(
        "gpt_oss", hidden_size=16, intermediate_size=8, num_local_experts=COUNT, num_experts_per_tok=PER_TOKEN
    )
    layer = gpt_oss.GptOssExperts(config)
    for p in layer.parameters():
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    x, chosen, weights = drawn(16)
    slope = torch.randn(TOKENS, 16, generator=torch.Generator().manual_seed(1))
    read = x.requires_grad_(), weights.requires_grad_(), *layer.parameters()
    of_each = experts.mixture(layer, x, chosen, weights), type(layer).forward.__wrapped__(layer, x, chosen, weights)
    torch.testing.assert_close(*of_each, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(*(torch.autograd.grad(said, read, slope) for said in of_each), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def make_trainer(directory: Path, **changes: Any) -> Trainer:
    optimizer = changes.pop("optimizer", OptimizerConfig())
    return Trainer(TrainerConfig(ModelConfig(str(directory)), optimizer, **({"micro_batch_rows": 1} | changes)))


def expert_weights(batch: Batch) -> Batch:
    return batch.replace(weights=np.asarray(sequence_mean(batch.mask, batch.segment_ids), np.float32))


STILL = OptimizerConfig(learning_rate=1e-30)


def test_imbalance_is_that_of_transformers_over_the_tokens_of_each_micro_batch(model_dir_of: Callable[[str], Path]) -> None:
    directory = model_dir_of("qwen3-moe")
    made = trajectories(12, 7, 9, 5)
    packed = pack(made, 20)
    batch = expert_weights(packed.batch)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected = 0.0
    for of_row, mask in zip(batch.segment_ids, batch.mask, strict=True):
        row = np.flatnonzero((batch.segment_ids == of_row).all(1))[0]
        logits = [
            theirs(torch.tensor(batch.tokens[row][of_row == segment])[None].long(), output_router_logits=True).router_logits
            for segment in range(1, of_row.max() + 1)
        ]
        # transformers joins the layers before it multiplies: given one at a time, they are apart.
        of_layers = [qwen3_moe.load_balancing_loss_func((torch.cat(of_layer),), 4, 2) for of_layer in zip(*logits, strict=True)]
        expected += float(sum(of_layers).detach()) / 2 * mask.sum() / batch.mask.sum()
    found = make_trainer(directory, optimizer=STILL).update(batch, losses.sft)
    assert found["expert_imbalance"] == pytest.approx(expected, rel=1e-5)
    pushed = make_trainer(directory, optimizer=STILL, balance=0.5).update(batch, losses.sft)
    assert pushed["expert_imbalance"] == found["expert_imbalance"]
    assert pushed["loss"] == pytest.approx(found["loss"] + 0.5 * found["expert_imbalance"], rel=1e-5)


def test_a_balance_has_experts_chosen_more_alike(model_dir_of: Callable[[str], Path]) -> None:
    batch = expert_weights(pack(trajectories(12, 7, 9, 5), 40).batch)
    trainer = make_trainer(model_dir_of("qwen3-moe"), balance=10.0, optimizer=OptimizerConfig(learning_rate=1e-3))
    first, *_, last = (trainer.update(batch, losses.sft)["expert_imbalance"] for _ in range(8))
    assert last < first - 0.05


def replayable() -> tuple[list[Any], Any]:
    made = [replace(t, experts=recorded(len(t), i)) for i, t in enumerate(trajectories(12, 7, 20, 9))]
    made[1] = replace(made[1], experts=None)  # an engine's that recorded none: the router chooses
    return made, pack(made, 32)


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe"])
def test_a_trainer_replays_the_experts_that_the_engine_recorded(family: str, model_dir_of: Callable[[str], Path]) -> None:
    directory, (made, packed) = model_dir_of(family), replayable()
    trainer = make_trainer(directory, replay_experts=True)
    assert_replays(trainer, make_trainer(directory), directory, made, packed)
    batch = expert_weights(packed.batch)
    expected = -float((batch.weights * trainer.logprobs(batch)).sum())
    assert trainer.update(batch, losses.sft)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe"])
def test_both_backends_push_and_replay_alike(family: str, model_dir_of: Callable[[str], Path]) -> None:
    pytest.importorskip("jax")
    batch = expert_weights(replayable()[1].batch)
    optimizer = OptimizerConfig(learning_rate=1e-2, eps=1e-2, clip_norm=0.0)
    config = TrainerConfig(ModelConfig(str(model_dir_of(family))), optimizer, micro_batch_rows=1)
    config = replace(config, balance=0.3, replay_experts=True)
    one, other = create_trainer("jax", config), create_trainer("torch", config)
    for _ in range(3):
        assert other.update(batch, losses.sft) == pytest.approx(one.update(batch, losses.sft), rel=1e-4)
    theirs = dict(one.weights())
    for name, x in other.weights():
        np.testing.assert_allclose(x, theirs[name], atol=1e-4, err_msg=name)


def test_blocks_that_are_computed_again_choose_and_count_as_before(model_dir_of: Callable[[str], Path]) -> None:
    batch = expert_weights(replayable()[1].batch)
    found = {}
    for remat in ("auto", "layers"):
        trainer = make_trainer(model_dir_of("qwen3-moe"), remat=remat, balance=0.5, replay_experts=True)
        found[remat] = trainer.update(batch, losses.sft), {name: x.copy() for name, x in trainer.weights()}
    assert found["layers"][0] == found["auto"][0]
    for name, x in found["auto"][1].items():
        np.testing.assert_array_equal(found["layers"][1][name], x, err_msg=name)


@pytest.mark.parametrize(("shape", "largest", "says"), REFUSED)
def test_experts_of_another_model_are_refused(
    shape: tuple[int, int] | None, largest: int, says: str, model_dir_of: Callable[[str], Path]
) -> None:
    with pytest.raises(UserError, match=says):
        make_trainer(model_dir_of("qwen3-moe"), replay_experts=True).logprobs(batch_of_others(shape, largest))


def test_a_model_without_experts_cannot_replay_any(model_dir_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.replay_experts = True .*no experts"):
        make_trainer(model_dir_of("qwen3"), replay_experts=True)


@pytest.mark.parametrize(
    ("family", "mesh", "says"),
    [
        ("qwen3", {"expert": 2}, r"mesh\.expert = 2 .* 1 for a model without experts: use mesh\.fsdp"),
        ("qwen3-moe", {"expert": 3}, r"mesh\.expert = 3 .* a divisor of the model's 4 experts"),
        ("qwen3-moe", {"tensor": 3}, r"mesh\.tensor = 3 .* mesh\.expert · mesh\.tensor divides the model's 4 experts"),
        ("qwen3-moe", {"expert": 2, "tensor": 3}, r"mesh\.tensor = 3 .* divides the model's 4 experts"),
    ],
)
def test_meshes_that_cannot_split_a_mixture_are_refused(family, mesh, says, model_dir_of: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=says):
        check_model(model_dir_of(family), MeshConfig(**mesh, processes=6), None, learns=True)


def test_a_sampler_takes_a_mixture_from_its_trainer(model_dir_of: Callable[[str], Path]) -> None:
    trainer = make_trainer(model_dir_of("qwen3-moe"), optimizer=OptimizerConfig(learning_rate=0.1))
    sampler = trainer.sampler(2, 32)
    trainer.update(expert_weights(pack(trajectories(12, 7), 32).batch), losses.sft)
    sampler.load(trainer.snapshot())
    drawn_with = sampler.lanes[0].model.state_dict()
    for name, x in trainer.model.state_dict().items():
        torch.testing.assert_close(drawn_with[name], x, rtol=0, atol=0)


@pytest.mark.parametrize("normalised", [True, False])
def test_routers_with_sigmoids_are_pushed_and_replayed(normalised: bool, tmp_path: Path) -> None:
    directory, (made, packed) = write_config(SIGMOIDS | {"norm_topk_prob": normalised}, tmp_path), replayable()
    trainer = make_trainer(directory, replay_experts=True)
    assert_replays(trainer, make_trainer(directory), directory, made, packed)

    batch = expert_weights(pack(made, 64).batch)  # one micro-batch
    pushed = make_trainer(directory, optimizer=STILL, balance=0.5).update(batch, losses.sft)
    assert pushed["expert_imbalance"] == pytest.approx(sigmoid_imbalance(directory, made), rel=1e-5)


GROUPS = {"n_routed_experts": 8, "first_k_dense_replace": 0, "n_group": 2, "topk_group": 1, "topk_method": "greedy"}
GRANITE = {**SIZES, "model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2}


def test_routers_of_another_kind_are_neither_pushed_nor_replayed_but_trained(tmp_path: Path) -> None:
    directory = write_config(GRANITE, tmp_path)
    for change in ({"balance": 0.1}, {"replay_experts": True}):
        with pytest.raises(ConfigError, match="whose routers weigh experts neither by a softmax nor by sigmoids"):
            make_trainer(directory, **change)
    said = make_trainer(directory).update(expert_weights(pack(trajectories(8, 5), 16).batch), losses.sft)
    assert "expert_imbalance" not in said


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ({"model_type": "qwen3_moe", "norm_topk_prob": True}, ("softmax", True, 1.0)),
        ({"model_type": "qwen3_moe", "norm_topk_prob": False}, ("softmax", False, 1.0)),
        ({"model_type": "mixtral"}, ("softmax", True, 1.0)),
        ({"model_type": "granitemoe"}, None),  # it says the same in another order
        ({"model_type": "olmoe"}, ("softmax", False, 1.0)),
        (
            {"model_type": "deepseek_v2", **GROUPS, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
            ("softmax", False, 1.5),
        ),
        ({"model_type": "deepseek_v3", **GROUPS}, ("sigmoid", True, 2.5)),
        ({"model_type": "deepseek_v3", **GROUPS, "routed_scaling_factor": 2.446}, ("sigmoid", True, 2.446)),
        ({"model_type": "glm4_moe", **GROUPS, "norm_topk_prob": False}, ("sigmoid", False, 1.0)),
    ],
)
def test_how_a_router_weighs_is_found_by_trying_it(family: dict[str, Any], expected: tuple[str, bool, float] | None) -> None:
    torch.manual_seed(0)
    count = dict.fromkeys(("num_experts", "num_local_experts"), 8)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **count, "num_experts_per_tok": 3, **family}))
    routers = [m for m in model.modules() if type(m).__name__.endswith("Router")]
    for router in routers:
        torch.nn.init.normal_(next(router.parameters()))
    assert [experts.weighing_of(router) for router in routers] == [expected] * 2


def test_a_frozen_mixture_says_to_the_last_bit_what_it_says_in_training(model_dir_of: Callable[[str], Path]) -> None:
    batch, make = pack(trajectories(12, 7), 32).batch, partial(make_trainer, model_dir_of("qwen2-moe"), precision="bf16")
    np.testing.assert_array_equal(make(frozen=True).logprobs(batch), make().logprobs(batch))
    assert make(frozen=True).model.model.layers[0].mlp.experts.down_proj.dtype == torch.bfloat16
