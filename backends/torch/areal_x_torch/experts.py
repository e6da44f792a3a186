"""A mixture of experts in place of an MLP: each token is computed by the few that a router chooses
for it.

    tokens ──router──▶ chosen experts, weights ──sort by expert──▶ grouped products ──weigh, add──▶ tokens

With the mesh's axis "expert" each process holds some of the experts: tokens go to the processes of
theirs, and what these say comes back.

transformers lets the function of a mixture's experts be named in a model's config, as it does with
attention: `mixture` is that function. Its routers are modules of the model's own. A hook on each
replays recorded experts and counts what is chosen, as the pass through the model says that is
running; blocks that are computed again run as their pass did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Float32, Int
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from areal_x.errors import ConfigError
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x_torch.collectives import AllToAll
from areal_x_torch.dtensors import local, mesh_of
from areal_x_torch.dummy_model import randomised

EXPERTS = "areal_x_grouped"
IN_LAYER = re.compile(r"\.(\d+)\.")  # of a decoder, "model.layers.3.mlp.gate"


# ---- products


@torch.compiler.disable  # how many tokens each expert has differs with every pass
def mixture(
    module: nn.Module,
    hidden: Float[Tensor, "tokens features"],
    chosen: Int[Tensor, "tokens per_token"],
    weights: Float[Tensor, "tokens per_token"],
) -> Float[Tensor, "tokens features"]:
    """What transformers calls for the experts of each layer: what those chosen say of each token,
    weighed.

    Raises: NotImplementedError for experts with biases.
    """
    if module.has_bias:
        raise NotImplementedError(f"the experts of {type(module).__name__} have biases")
    kind = hidden.device.type
    # Autocast does not reach a product of groups.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    order = chosen.reshape(-1).argsort(stable=True)
    sizes = torch.bincount(chosen.reshape(-1), minlength=len(module.down_proj))
    x, mesh = hidden.to(dtype)[order // chosen.shape[1]], mesh_of(module.down_proj)
    said = (
        local_experts(module, x, sizes)
        if mesh is None
        else dispatched_experts(module, x, sizes, mesh["expert"].get_group())
    )
    # In the order of tokens, so that the sum does not depend on the routing.
    said = said[order.argsort()].view(*chosen.shape, -1)
    return (weights.to(dtype).unsqueeze(1) @ said).squeeze(1).to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, mixture)


def is_experts(module: nn.Module) -> bool:
    """Whether a module is a mixture's experts, whose function transformers lets others replace."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate")


def local_experts(
    module: nn.Module, x: Float[Tensor, "n features"], sizes: Int[Tensor, " experts"]
) -> Float[Tensor, "n features"]:
    """What this process's experts say of tokens that lie in their order, so many for each."""
    kernels = (
        local(k).to(x.dtype)
        for k in (module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj)
    )
    inner, outer = (kernel if module.is_transposed else kernel.mT for kernel in kernels)
    x = grouped(x, inner, sizes)
    return grouped(module._apply_gate(x) if module.has_gate else module.act_fn(x), outer, sizes)


def dispatched_experts(
    module: nn.Module,
    x: Float[Tensor, "n features"],
    sizes: Int[Tensor, " experts"],
    group: ProcessGroup,
) -> Float[Tensor, "n features"]:
    """The same where each process of a group has as many of the experts: tokens go to theirs, and
    what is said comes back."""
    wanted = sizes.view(group.size(), -1)  # of each process and each of its experts
    asked = torch.empty_like(wanted)  # by each process of each of this one's
    dist.all_to_all_single(asked, wanted, group=group)
    sent, received = wanted.sum(1).tolist(), asked.sum(1).tolist()
    by_asker = (
        torch.arange(asked.shape[1], device=x.device)
        .repeat(len(asked))
        .repeat_interleave(asked.view(-1))
    )
    order = by_asker.argsort(stable=True)
    said = local_experts(module, AllToAll.apply(x, sent, received, group)[order], asked.sum(0))
    back: Tensor = AllToAll.apply(said[order.argsort()], received, sent, group)
    return back


def grouped(
    x: Float[Tensor, "n features"],
    kernels: Float[Tensor, "experts features out"],
    sizes: Int[Tensor, " experts"],
) -> Float[Tensor, "n out"]:
    """Tokens times the kernel of their expert: first those of the first expert, as many as `sizes`
    says, and so on."""
    if can_group(x, kernels):
        return functional.grouped_mm(x, kernels, offs=sizes.cumsum(0).int())
    parts = zip(x.split(sizes.tolist()), kernels.unbind(), strict=True)
    return torch.cat([part @ kernel for part, kernel in parts])


def can_group(x: Tensor, kernels: Tensor) -> bool:
    """Whether torch multiplies groups at once on this device and in this type, which wants rows of
    whole 16 bytes."""
    aligned = all(width * x.element_size() % 16 == 0 for width in kernels.shape[1:])
    return aligned and has_grouped_mm(x.device, x.dtype)


@cache
def has_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Which devices and types it takes differs with torch's version: here it is tried."""
    x = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        functional.grouped_mm(x, x[None], offs=torch.tensor([16], dtype=torch.int32, device=device))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return True


# ---- routers


class Routers(NamedTuple):
    """Of a model whose routers weigh by softmax. layers: of the decoder, each with a router or
    without. count: of a layer's experts. routed: the layers that have a router."""

    layers: int
    per_token: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which nobody calls
    routing_scope: tuple[int, ...]


@dataclass(frozen=True)
class Tally:
    """How experts were chosen in each routed layer, summed over tokens. hits: how often each was.
    probabilities: of each."""

    hits: dict[int, Float32[Tensor, " experts"]]
    probabilities: dict[int, Float32[Tensor, " experts"]]

    @staticmethod
    def of(routers: Routers, device: torch.device) -> Tally:
        none = torch.zeros(routers.count, device=device)
        return Tally(
            dict.fromkeys(routers.routing_scope, none), dict.fromkeys(routers.routing_scope, none)
        )

    def add(
        self,
        layer: int,
        chosen: Int[Tensor, "tokens per_token"],
        probabilities: Float[Tensor, "tokens experts"],
    ) -> None:
        hits = torch.bincount(chosen.reshape(-1), minlength=probabilities.shape[1])
        self.hits[layer] = self.hits[layer] + hits
        self.probabilities[layer] = self.probabilities[layer] + probabilities.sum(0)

    def imbalance(self, tokens: int, over_all: Callable[[Tensor], Tensor]) -> Float32[Tensor, ""]:
        """experts · Σ f · p, f being the share of the tokens that an expert is chosen for and p its
        mean probability, the mean over layers: 1 per chosen expert where all are used alike.
        Source: Switch Transformer, arXiv 2101.03961, eq. 4.

        tokens: of all processes. over_all: sums over them; what is returned is this process's part
        of the sum.
        """
        share = over_all(torch.stack(list(self.hits.values()))) / tokens
        mean = torch.stack(list(self.probabilities.values())) / tokens
        return share.shape[1] * (share * mean).sum(1).mean()


@dataclass(frozen=True)
class Routing:
    """What routers are to do in one pass through a model. recorded: the experts that an engine sent
    each token through, -1 where it recorded none; without it they choose. tally: where that is
    counted, of the first `real_tokens` tokens."""

    recorded: Int[Tensor, "tokens layers per_token"] | None
    tally: Tally | None
    real_tokens: int


_running: ContextVar[Routing | None] = ContextVar("routing", default=None)


@contextmanager
def routing_scope(routing: Routing | None) -> Iterator[None]:
    """Has the routers that a thread runs do so."""
    before = _running.set(routing)
    try:
        yield
    finally:
        _running.reset(before)


def recompute_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For torch.utils.checkpoint: how a block is computed first, and again. It is not counted
    twice."""
    routing = _running.get()
    return nullcontext(), routing_scope(routing and replace(routing, tally=None))


def hook_routers(model: PreTrainedModel, config: TrainerConfig, directory: Path) -> Routers | None:
    """Has the routers of a model do what `routing_scope` says; None for a model that has none, or others
    than of softmax.

    Raises: ConfigError for what a config asks of routers that the model does not have.
    """
    routers = (
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Router")
    )
    found = {
        int(number[1]): router for name, router in routers if (number := IN_LAYER.search(name))
    }
    normalised = {n: normalises(randomised(deepcopy(router))) for n, router in found.items()}
    if not found or None in normalised.values():
        mixed = bool(found) or any(is_experts(module) for module in model.modules())
        if config.replay_experts:
            lacks = (
                "whose routers do not weigh experts by a softmax"
                if mixed
                else "which has no experts"
            )
            raise ConfigError("trainer.replay_experts", True, f"False with {directory}, {lacks}")
        if config.balance and mixed:
            wanted = f"0 with {directory}, whose routers do not weigh experts by a softmax"
            raise ConfigError("trainer.balance", config.balance, wanted)
        return None
    for n, router in found.items():
        router.register_forward_hook(partial(_route, n, normalised[n]))
    with torch.no_grad():
        tried = randomised(deepcopy(next(iter(found.values()))))
        logits, _, chosen = tried(_tokens_for(tried))
    return Routers(
        model.config.get_text_config().num_hidden_layers,
        chosen.shape[1],
        logits.shape[1],
        tuple(found),
    )


def normalises(router: nn.Module) -> bool | None:
    """Whether a router's weights of the chosen experts are probabilities that are made to sum to 1;
    None where they are neither these nor the probabilities themselves. Configs of families say this
    in many ways: here it is tried."""
    x = _tokens_for(router)
    with torch.no_grad():
        try:
            # Logits of about 1: of large ones the first choice has all the probability, whatever is
            # normalised.
            logits, weights, chosen = router(
                x / router(x)[0].float().std().clamp(min=1e-6).to(x.dtype)
            )
            both = {n: expert_weights(logits.float().softmax(-1), chosen, n) for n in (True, False)}
        except (
            TypeError,
            ValueError,
            RuntimeError,
        ):  # it wants, or says, other things in another order
            return None
    alike = (
        n
        for n, x in both.items()
        if x.shape == weights.shape and torch.allclose(weights.float(), x, rtol=1e-2, atol=0)
    )
    return next(alike, None)


def expert_weights(
    probabilities: Float[Tensor, "tokens experts"], chosen: Tensor, normalised: bool
) -> Tensor:
    """The weights of chosen experts."""
    weights = probabilities.gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) if normalised else weights


def _tokens_for(router: nn.Module) -> Float[Tensor, "64 features"]:
    kernel = next(router.parameters())
    randomised = torch.randn(64, kernel.shape[-1], generator=torch.Generator().manual_seed(0))
    return randomised.to(kernel.device, kernel.dtype)


@torch.compiler.disable  # what it does is said outside
def _route(
    layer: int, normalised: bool, _: nn.Module, __: Any, said: tuple[Tensor, ...]
) -> tuple[Tensor, ...] | None:
    """After a router's own forward. Source of the replay: arXiv 2510.11370."""
    routing = _running.get()
    if routing is None:
        return None
    logits, weights, chosen = said
    probabilities = logits.float().softmax(-1)
    if routing.recorded is not None:
        recorded = routing.recorded[:, layer]
        chosen = torch.where(recorded >= 0, recorded, chosen)
        weights = expert_weights(probabilities, chosen, normalised).to(weights.dtype)
    if routing.tally is not None:
        routing.tally.add(
            layer, chosen[: routing.real_tokens], probabilities[: routing.real_tokens]
        )
    return logits, weights, chosen
