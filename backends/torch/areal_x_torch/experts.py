"""A mixture of experts in place of an MLP: each token goes through the few experts that a router
chooses.

    tokens ──router──▶ chosen experts, weights ──sort by expert──▶ grouped products ──weigh, add──▶ tokens

With the mesh axis "expert" each process holds some of the experts: tokens are sent to the processes
of theirs, and the outputs come back. With "tensor" the processes of a tensor group, which have the
same tokens, hold some of those each: each sends on what its own are chosen for, and the outputs are
added up.

    experts 0 … 7 of expert = 2, tensor = 2     tensor 0    tensor 1
                                    expert 0      0, 1        2, 3
                                    expert 1      4, 5        6, 7

transformers lets a model's config name the function of a mixture's experts, as for attention:
`mixture` is that function. Its routers are modules of the model. A hook on each replays recorded
experts and counts the choices of the running pass, as `routing_scope` sets them; recomputed blocks
run like their first pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from areal_x.errors import ConfigError
from areal_x.protocols.expert_load import bias_step
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x_torch.collectives import AllToAll, CopyToGroup, SumOverGroup
from areal_x_torch.dtensors import local, mesh_of
from areal_x_torch.dummy_model import randomised

EXPERTS = "areal_x_grouped"
UNKNOWN = "neither by a softmax nor by sigmoids of their logits"
IN_LAYER = re.compile(r"\.(\d+)\.")  # in names such as "model.layers.3.mlp.gate"
CORRECTION = "e_score_correction_bias"  # the bias that a router chooses experts by


# ---- products


@torch.compiler.disable  # the number of tokens of each expert differs in every pass
def mixture(
    module: nn.Module,
    hidden: Float[Tensor, "tokens features"],
    chosen: Int[Tensor, "tokens per_token"],
    weights: Float[Tensor, "tokens per_token"],
) -> Float[Tensor, "tokens features"]:
    """The function that transformers calls for the experts of each layer: the weighted sum of the chosen
    experts' outputs, or the sum of their outputs of weighted inputs.
    """
    kind = hidden.device.type
    # Autocast does not affect grouped products.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    mesh = mesh_of(module.down_proj)
    parts = None if mesh is None else Parts(mesh.get_group(), module.same_tokens)
    together = None if parts is None else parts.same_tokens
    of_all = chosen.reshape(-1)
    order = of_all.argsort(stable=True)
    sizes = torch.bincount(of_all, minlength=len(module.down_proj))
    if parts is not None and together is not None:
        # Each process of a tensor group computes a part of the outputs and of the gradients.
        hidden, weights = (CopyToGroup.apply(x, together) for x in (hidden, weights))
        own = parts.own(len(sizes), sizes.device)
        order, sizes = order[own[of_all[order]]], torch.where(own, sizes, 0)
    weighs_inputs = getattr(module, "weighs_inputs", False)  # areal_x_torch.weighed_inputs's
    x = hidden.to(dtype)[order // chosen.shape[1]]
    if weighs_inputs:
        x = x * weights.to(dtype).reshape(-1)[order, None]
    outputs = (
        local_experts(module, x, sizes)
        if parts is None
        else dispatched_experts(module, x, sizes, parts)
    )
    # In the order of tokens, so that the sum does not depend on the routing.
    ordered = outputs.new_zeros(of_all.shape[0], outputs.shape[1]).index_copy(0, order, outputs)
    ordered = ordered.view(*chosen.shape, -1)
    if weighs_inputs:
        found = ordered.sum(1).to(hidden.dtype)
    else:
        found = (weights.to(dtype).unsqueeze(1) @ ordered).squeeze(1).to(hidden.dtype)
    return found if together is None else SumOverGroup.apply(found, together)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, mixture)


@dataclass(frozen=True)
class Parts:
    """How the processes of `group` divide the experts of a mixture: the first ones to the first
    process, and so on. same_tokens: those of them that have this process's tokens, which are
    neighbours; None if it alone has them."""

    group: ProcessGroup
    same_tokens: ProcessGroup | None

    def own(self, count: int, device: torch.device) -> Bool[Tensor, " experts"]:
        """Returns which of all experts this process of several with the same tokens sends them to: of
        each neighbourhood those of one process, so that together they are all."""
        assert self.same_tokens is not None
        process = torch.arange(count, device=device) // (count // self.group.size())
        return process % self.same_tokens.size() == self.same_tokens.rank()

    @property
    def alone(self) -> bool:
        """True if all processes have the same tokens: none is sent."""
        return self.same_tokens is not None and self.same_tokens.size() == self.group.size()


def is_experts(module: nn.Module) -> bool:
    """True for a mixture's experts whose function transformers lets a config replace."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def local_experts(
    module: nn.Module, x: Float[Tensor, "n features"], sizes: Int[Tensor, " experts"]
) -> Float[Tensor, "n features"]:
    """Applies this process's experts to tokens in the experts' order, so many for each."""
    adapters = getattr(module, "adapters", {})  # areal_x_torch.lora's
    multiply = getattr(module, "multiply", grouped)  # areal_x_torch.fp8's

    def product(x: Tensor, name: str) -> Tensor:
        kernels = local(getattr(module, name)).to(x.dtype)
        y = multiply(x, kernels if module.is_transposed else kernels.mT, sizes)
        if name in adapters:
            y = y + adapters[name](x, sizes)
        if not module.has_bias:
            return y
        return y + local(getattr(module, f"{name}_bias")).to(x.dtype).repeat_interleave(sizes, 0)

    x = product(x, "gate_up_proj" if module.has_gate else "up_proj")
    x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    return product(x, "down_proj")


def dispatched_experts(
    module: nn.Module,
    x: Float[Tensor, "n features"],
    sizes: Int[Tensor, " experts"],
    parts: Parts,
) -> Float[Tensor, "n features"]:
    """The same if each process of a group has equally many experts: tokens are sent to theirs, and
    the outputs come back."""
    group = parts.group
    wanted = sizes.view(group.size(), -1)  # for each process and each of its experts
    if parts.alone:
        return local_experts(module, x, wanted[group.rank()])
    asked = torch.empty_like(wanted)  # by each process, for each of this one's
    dist.all_to_all_single(asked, wanted, group=group)
    sent, received = wanted.sum(1).tolist(), asked.sum(1).tolist()
    by_asker = (
        torch.arange(asked.shape[1], device=x.device)
        .repeat(len(asked))
        .repeat_interleave(asked.view(-1))
    )
    order = by_asker.argsort(stable=True)
    outputs = local_experts(module, AllToAll.apply(x, sent, received, group)[order], asked.sum(0))
    back: Tensor = AllToAll.apply(outputs[order.argsort()], received, sent, group)
    return back


def grouped(
    x: Float[Tensor, "n features"],
    kernels: Float[Tensor, "experts features out"],
    sizes: Int[Tensor, " experts"],
) -> Float[Tensor, "n out"]:
    """Multiplies tokens with their expert's kernel: first those of the first expert, as many as
    `sizes` has, and so on."""
    if can_group(x, kernels):
        return functional.grouped_mm(x, kernels, offs=sizes.cumsum(0).int())
    parts = zip(x.split(sizes.tolist()), kernels.unbind(), strict=True)
    return torch.cat([part @ kernel for part, kernel in parts])


def can_group(x: Tensor, kernels: Tensor) -> bool:
    """True if torch multiplies groups at once on this device and in this dtype, which needs rows of
    whole 16 bytes."""
    aligned = all(width * x.element_size() % 16 == 0 for width in kernels.shape[1:])
    return aligned and has_grouped_mm(x.device, x.dtype)


@cache
def has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Tries the operation, because the supported devices and dtypes differ between torch
    releases."""
    x = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        functional.grouped_mm(x, x[None], offs=torch.tensor([16], dtype=torch.int32, device=device))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


# ---- routers


class Weighing(NamedTuple):
    """How a router weighs the experts that it has chosen, whatever it chooses them by: by their scores,
    functions of its logits. score: a name in SCORES. normalised: over the chosen experts. scale:
    what the weights are multiplied by."""

    score: str
    normalised: bool
    scale: float

    def scores(self, logits: Float[Tensor, "tokens experts"]) -> Float32[Tensor, "tokens experts"]:
        return SCORES[self.score](logits.float())

    def probabilities(
        self, scores: Float32[Tensor, "tokens experts"]
    ) -> Float32[Tensor, "tokens experts"]:
        """Returns the scores as shares of a token's. Source for sigmoids: DeepSeek-V3, arXiv 2412.19437,
        eq. 19."""
        return scores if self.score == "softmax" else scores / scores.sum(-1, keepdim=True)

    def weights(
        self, scores: Float32[Tensor, "tokens experts"], chosen: Tensor
    ) -> Float32[Tensor, "tokens per_token"]:
        weights = scores.gather(-1, chosen)
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights if self.scale == 1 else weights * self.scale


SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
}


class Routers(NamedTuple):
    """The routers of a model that weigh experts by a softmax or by sigmoids. layers: of the decoder,
    with or without a router. count: experts of a layer. routing_scope: the layers with a router."""

    layers: int
    per_token: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    routing_scope: tuple[int, ...]

    def within(self, layers: range) -> Routers:
        """Returns those of some layers."""
        return self._replace(routing_scope=tuple(n for n in self.routing_scope if n in layers))


@dataclass(frozen=True)
class Tally:
    """Counts of the experts chosen in each routed layer and sums of their probabilities, over a
    micro-batch's tokens. load: counts over the trained ones, of all micro-batches of a step."""

    hits: dict[int, Float32[Tensor, " experts"]]
    probabilities: dict[int, Float32[Tensor, " experts"]]
    load: dict[int, Float32[Tensor, " experts"]]

    @staticmethod
    def of(routers: Routers, load: dict[int, Tensor], device: torch.device) -> Tally:
        none = torch.zeros(routers.count, device=device)
        hits, probabilities = (dict.fromkeys(routers.routing_scope, none) for _ in range(2))
        return Tally(hits, probabilities, load)

    def add(
        self,
        layer: int,
        chosen: Int[Tensor, "tokens per_token"],
        probabilities: Float[Tensor, "tokens experts"],
        trained: Bool[Tensor, " tokens"],
    ) -> None:
        count = probabilities.shape[1]
        hits = torch.bincount(chosen.reshape(-1), minlength=count)
        self.hits[layer] = self.hits[layer] + hits
        self.probabilities[layer] = self.probabilities[layer] + probabilities.sum(0)
        # Not by weights, which CUDA would add in any order.
        counted = torch.where(trained[:, None], chosen, count).reshape(-1)
        load = torch.bincount(counted, minlength=count + 1)[:count]
        self.load[layer] = self.load.get(layer, 0) + load.float()

    def imbalance(self, tokens: int, over_all: Callable[[Tensor], Tensor]) -> Float32[Tensor, ""]:
        """Returns experts · Σ f · p, where f is the share of tokens routed to an expert and p its
        mean probability, averaged over layers: 1 per chosen expert if all are used alike. Source:
        Switch Transformer, arXiv 2101.03961, eq. 4.

        tokens: of all processes. over_all: sums over them; the result is this process's part of the
        sum.
        """
        share = over_all(torch.stack(list(self.hits.values()))) / tokens
        mean = torch.stack(list(self.probabilities.values())) / tokens
        return share.shape[1] * (share * mean).sum(1).mean()


@dataclass(frozen=True)
class Routing:
    """What routers do in one pass through a model. recorded: the experts that an engine chose for
    each token, -1 if it recorded none; None lets them choose. tally: counts the first tokens, those
    that are not padding. trained: of these, the ones that the loss is of."""

    recorded: Int[Tensor, "tokens layers per_token"] | None
    tally: Tally | None
    trained: Bool[Tensor, " real_tokens"]


_running: ContextVar[Routing | None] = ContextVar("routing", default=None)


@contextmanager
def routing_scope(routing: Routing | None) -> Iterator[None]:
    """Sets the routing of the routers that this thread runs."""
    before = _running.set(routing)
    try:
        yield
    finally:
        _running.reset(before)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of a block's first computation and of its recomputation, for
    torch.utils.checkpoint. The second does not count again."""
    routing = _running.get()
    return nullcontext(), routing_scope(routing and replace(routing, tally=None))


def hook_routers(model: PreTrainedModel, config: TrainerConfig, directory: Path) -> Routers | None:
    """Hooks the routers of a model so that they follow `routing_scope`; None for a model without
    routers, or with routers that weigh in a way that is not known.

    Raises: ConfigError for settings of routers that the model cannot follow.
    """
    routers = (
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Router")
    )
    found = {
        int(number[1]): router for name, router in routers if (number := IN_LAYER.search(name))
    }
    weighing = {n: weighing_of(randomised(deepcopy(router))) for n, router in found.items()}
    if not found or None in weighing.values():
        mixed = bool(found) or any(is_experts(module) for module in model.modules())
        lacks = f"whose routers weigh experts {UNKNOWN}" if mixed else "which has no experts"
        if config.replay_experts:
            raise ConfigError("trainer.replay_experts", True, f"False with {directory}, {lacks}")
        if config.balance_rate:
            raise ConfigError(
                "trainer.balance_rate", config.balance_rate, f"0 with {directory}, {lacks}"
            )
        if config.balance and mixed:
            raise ConfigError("trainer.balance", config.balance, f"0 with {directory}, {lacks}")
        return None
    if config.balance_rate and not corrections(model):
        lacks = "whose routers have no bias to choose experts by: use trainer.balance"
        raise ConfigError(
            "trainer.balance_rate", config.balance_rate, f"0 with {directory}, {lacks}"
        )
    for n, router in found.items():
        router.register_forward_hook(partial(_route, n, weighing[n]))
    with torch.no_grad():
        tried = randomised(deepcopy(next(iter(found.values()))))
        logits, _, chosen = tried(_tokens_for(tried))
    return Routers(
        model.config.get_text_config().num_hidden_layers,
        chosen.shape[1],
        logits.shape[1],
        tuple(found),
    )


def corrections(model: nn.Module) -> dict[int, Tensor]:
    """Returns the biases that routers choose experts by, by the numbers of their layers."""
    return {
        int(number[1]): bias
        for name, bias in model.named_buffers()
        if name.endswith(CORRECTION) and (number := IN_LAYER.search(name))
    }


@torch.no_grad()
def move_corrections(
    model: nn.Module, load: Mapping[int, Float32[Tensor, " experts"]], rate: float
) -> None:
    """Moves these biases by one step, see `bias_step`. load: of a step, over all processes; empty
    for a step without rows."""
    biases = corrections(model)
    for layer in biases.keys() & load.keys():
        biases[layer] += bias_step(load[layer][None], rate).view_as(biases[layer])


def weighing_of(router: nn.Module) -> Weighing | None:
    """Returns how a router weighs; None if in a way that is not known. Configs express this in many
    ways, so it is tried."""
    x = _tokens_for(router)
    with torch.no_grad():
        try:
            # Logits of about 1: with large ones the first choice would have all the probability,
            # normalised or not.
            logits, weights, chosen = router(
                x / router(x)[0].float().std().clamp(min=1e-6).to(x.dtype)
            )
            for score, normalised in product(SCORES, (True, False)):
                alike = Weighing(score, normalised, 1.0)
                expected = alike.weights(alike.scores(logits), chosen)
                scale = (weights.float() / expected).median()
                if torch.allclose(weights.float(), expected * scale, rtol=1e-2, atol=0):
                    return alike._replace(scale=float(f"{scale:.6g}"))
        except (
            TypeError,
            ValueError,
            RuntimeError,
        ):  # it takes or returns something else
            pass
    return None


def _tokens_for(router: nn.Module) -> Float[Tensor, "64 features"]:
    kernel = next(router.parameters())
    randomised = torch.randn(64, kernel.shape[-1], generator=torch.Generator().manual_seed(0))
    return randomised.to(kernel.device, kernel.dtype)


@torch.compiler.disable  # it depends on a context variable
def _route(
    layer: int, weighing: Weighing, _: nn.Module, __: Any, outputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...] | None:
    """Runs after a router's own forward. Source of the replay: arXiv 2510.11370."""
    routing = _running.get()
    if routing is None:
        return None
    logits, weights, chosen = outputs
    scores = weighing.scores(logits)
    if routing.recorded is not None:
        recorded = routing.recorded[:, layer]
        chosen = torch.where(recorded >= 0, recorded, chosen)
        weights = weighing.weights(scores, chosen).to(weights.dtype)
    if routing.tally is not None:
        real = slice(len(routing.trained))
        probabilities = weighing.probabilities(scores[real])
        routing.tally.add(layer, chosen[real], probabilities, routing.trained)
    return logits, weights, chosen
