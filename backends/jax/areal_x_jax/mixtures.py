"""Mixtures of experts as configs describe them. (areal_x_jax.experts computes them.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from areal_x.errors import UserError
from areal_x_jax.families import ParsedConfig, refuse_features
from areal_x_jax.routers import Router, dense_layers, router_of


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of each MLP."""

    count: int

    per_token: int
    """Experts chosen for a token."""

    intermediate: int

    normalised: bool
    """True if the weights of a token's experts sum to 1."""

    shared: int = 0
    """Width of the expert that every token goes through; 0 for none."""

    dense: tuple[int, ...] = ()
    """Layers that keep a plain MLP."""

    clamp: tuple[float, float] | None = None
    """Slope and limit of a clamped activation, α and l in `experts.clamped`, for experts and a
    router with biases; None for a gated MLP without."""

    router: Router = field(default_factory=Router)
    """How experts are chosen and weighed."""

    shared_gate: bool = True
    """True if the shared expert's output is multiplied by a gate of its own."""

    joined: bool = False
    """True if all experts' gates and ups are one parameter, all gates before all ups."""

    weighs_inputs: bool = False
    """True if the weights multiply what experts read and not what they return."""

    beside: bool = False
    """True if each layer has a plain MLP too. The router then reads what both outputs are added to,
    divided by its RMS and scaled, experts read it with a norm of their own, and each expert's weight
    has a factor; kernels of all experts are saved as one tensor, outputs first."""


def experts_of(described: ParsedConfig, written: Mapping[str, Any]) -> Experts | None:
    """Returns None if no layer has experts. written: config.json."""
    family, text = described.family, described.text
    if family.router:
        return routed_experts(described, written)
    if family.varied:
        return experts_beside(text)
    if not family.sparse:
        return None
    # Mixtures without these fields have experts in every layer, and their weights sum to 1.
    layers, plain = range(text.num_hidden_layers), set(getattr(text, "mlp_only_layers", ()))
    step = getattr(text, "decoder_sparse_step", 1)
    sparse = [i for i in layers if i not in plain and (i + 1) % step == 0]
    if not sparse or not text.num_experts:
        return None
    if text.num_experts_per_tok > text.num_experts:
        raise UserError(
            f"config.json: num_experts_per_tok = {text.num_experts_per_tok} are more than its"
            f" num_experts = {text.num_experts}"
        )
    shared = text.shared_expert_intermediate_size if family.shared else 0
    refuse_features({"a shared expert without features": family.shared and not shared})
    return Experts(
        count=text.num_experts,
        per_token=text.num_experts_per_tok,
        intermediate=getattr(text, "moe_intermediate_size", None) or text.intermediate_size,
        normalised=bool(getattr(text, "norm_topk_prob", True)),
        shared=shared,
        dense=tuple(i for i in layers if i not in sparse),
        clamp=(float(text.swiglu_alpha), float(text.swiglu_limit)) if family.clamped else None,
    )


def experts_beside(text: Any) -> Experts | None:
    """The same for families with experts beside each MLP. text: transformers' config."""
    if not getattr(text, "enable_moe_block", False):
        return None
    count, per_token, width = text.num_experts, text.top_k_experts, text.moe_intermediate_size
    if not count or not width or not 0 < (per_token or 0) <= count:
        raise UserError(
            f"config.json: enable_moe_block needs num_experts, moe_intermediate_size and as many"
            f" top_k_experts at most, but they are {count}, {width} and {per_token}"
        )
    return Experts(count, per_token, width, normalised=True, joined=True, beside=True)


def routed_experts(described: ParsedConfig, written: Mapping[str, Any]) -> Experts | None:
    """The same for families with a rule of their own (areal_x_jax.routers). written: config.json."""
    text, ernie = described.text, described.family.router == "statics"
    inputs = described.family.router == "inputs"
    if inputs:
        count, shared, width = text.num_local_experts, 1, text.intermediate_size
    else:
        count = text.moe_num_experts if ernie else text.n_routed_experts
        shared = text.moe_num_shared_experts if ernie else text.n_shared_experts
        width = text.moe_intermediate_size
    per_token, dense = text.num_experts_per_tok, dense_layers(described, written)
    if len(dense) == text.num_hidden_layers:
        return None
    if not count or not per_token or per_token > count:
        raise UserError(
            f"config.json: num_experts_per_tok = {per_token} is not between 1 and the number of"
            f" experts, {count}"
        )
    refuse_features({"a shared expert without features": not shared and not ernie})
    return Experts(
        count=count,
        per_token=per_token,
        intermediate=width,
        normalised=ernie or (not inputs and bool(text.norm_topk_prob)),
        shared=shared * width,
        dense=dense,
        router=router_of(described, written, count),
        shared_gate=False,
        joined=inputs,
        weighs_inputs=inputs,
    )
