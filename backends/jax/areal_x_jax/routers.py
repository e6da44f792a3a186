"""How the router of a mixture chooses and weighs experts: by a softmax or by sigmoids of its logits,
from all experts or from the best groups of them, with or without a bias that only chooses.

    logits ──score──▶ scores ──+ bias, best groups──▶ chosen experts
                         └──────── of the chosen ───────▶ weights

Sources: DeepSeek-V2, arXiv 2405.04434, section 2.2; DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from areal_x.errors import UserError
from areal_x_jax.families import ParsedConfig, refuse_features

SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
    "sigmoid": jax.nn.sigmoid,
}


@dataclass(frozen=True)
class Router:
    """The rule of a router; without fields, that of a softmax over all experts."""

    score: str = "softmax"
    """A name in SCORES."""

    corrected: bool = False
    """True if experts are chosen by score + a bias, which no gradient trains and no weight counts."""

    groups: int = 1
    """Groups of consecutive experts."""

    best_groups: int = 1
    """Groups whose experts can be chosen."""

    of_group: int = 1
    """Scores of a group, the largest first, whose sum ranks it."""

    scale: float = 1.0
    """Factor of the weights."""

    least: float = 1e-20
    """What the sum of a token's weights is taken for, if it is smaller and divides them."""

    exact: bool = False
    """True if logits are computed in fp32, whatever the compute precision."""


def logits_of(
    router: Router,
    kernel: Float[Array, "hidden experts"],
    x: Float[Array, "... hidden"],
    bias: Float[Array, " experts"] | None,
) -> Float[Array, "... experts"]:
    dtype = jnp.float32 if router.exact else x.dtype
    precision = "highest" if router.exact else None
    logits = jnp.matmul(x.astype(dtype), kernel.astype(dtype), precision=precision)
    return logits if bias is None else logits + bias.astype(dtype)


def choose(
    router: Router,
    logits: Float[Array, "... experts"],
    scores: Float[Array, "... experts"],
    correction: Float[Array, "*_ experts"] | None,
    per_token: int,
) -> tuple[Float[Array, "... per_token"], Int[Array, "... per_token"]]:
    """Returns the scores of the experts that each token goes through, and these experts. correction:
    see `Router.corrected`."""
    if correction is None and router.groups == 1 and router.score == "softmax":
        return jax.lax.top_k(scores, per_token)
    plain = logits if router.score == "sigmoid" else scores  # a sigmoid rounds large logits to 1
    ranked = plain if correction is None else scores + correction.reshape(-1)
    # Only the choice follows from these: no gradient passes through them.
    ranked = jax.lax.stop_gradient(ranked)
    if router.groups > 1:
        grouped = ranked.reshape(*ranked.shape[:-1], router.groups, -1)
        of_groups = jax.lax.top_k(grouped, router.of_group)[0].sum(-1)
        best = jax.lax.top_k(of_groups, router.best_groups)[1]
        within = jax.nn.one_hot(best, router.groups, dtype=bool).any(-2)
        ranked = jnp.where(within[..., None], grouped, -jnp.inf).reshape(ranked.shape)
    chosen = jax.lax.top_k(ranked, per_token)[1]
    return jnp.take_along_axis(scores, chosen, axis=-1), chosen


def weights_of(
    router: Router, scores: Float[Array, "... per_token"], normalised: bool
) -> Float[Array, "... per_token"]:
    """Returns the weights of the chosen experts' outputs, given their scores."""
    if normalised:
        scores = scores / jnp.maximum(scores.sum(-1, keepdims=True), router.least)
    return scores if router.scale == 1 else scores * router.scale


def probabilities_of(
    router: Router, scores: Float[Array, "... experts"]
) -> Float[Array, "... experts"]:
    """Returns the scores as shares of a token's. Source for sigmoids: DeepSeek-V3, eq. 19."""
    if router.score == "softmax":
        return scores
    return scores / jnp.maximum(scores.sum(-1, keepdims=True), router.least)


# ---- configs

# Fields of the checkpoints' own code that transformers' models leave out, with the values that these
# compute.
FIXED_RULES: dict[str, Mapping[str, tuple[Any, ...]]] = {
    "greedy": {"scoring_func": ("softmax",), "norm_topk_prob": (False,), "moe_layer_freq": (1,)},
    "noaux_tc": {
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
    },
    "statics": {"use_bias": (False,)},
}


def router_of(described: ParsedConfig, written: Mapping[str, Any], count: int) -> Router:
    """Returns the rule of a family's routers. written: its config.json. count: experts of a layer.

    Raises: UserError for rules that transformers' model of the family does not compute, and for groups
    that do not divide the experts.
    """
    text, kind = described.text, described.family.router
    if not kind:
        return Router()
    if kind == "inputs":
        return Router("sigmoid")
    refuse_features(
        {
            f"{name} = {value!r}, which transformers leaves out in this family": (
                value is not None and value not in fixed
            )
            for name, fixed in FIXED_RULES[kind].items()
            for value in (written.get(name),)
        },
        "correct its config.json",
    )
    if kind == "statics":
        return Router(corrected=True, least=float(text.moe_norm_min), exact=True)
    scale = float(text.routed_scaling_factor)
    if kind == "noaux_tc":
        groups = groups_of(text, count, of_group=2)
        return Router("sigmoid", True, *groups, 2, scale, exact=True)
    method = text.topk_method
    known = ("greedy", "group_limited_greedy")
    refuse_features({f"topk_method = {method!r}": method not in known})
    groups = (1, 1) if method == "greedy" else groups_of(text, count, of_group=1)
    return Router("softmax", False, *groups, scale=scale, exact=True)


def groups_of(text: Any, count: int, of_group: int) -> tuple[int, int]:
    """Returns the number of groups and of those of which experts are chosen.

    Raises: UserError for groups from which a token's experts cannot be chosen.
    """
    groups, best = text.n_group or 1, text.topk_group or 1
    if count % groups or count // groups < of_group:
        raise UserError(
            f"config.json: n_group = {groups} does not divide the {count} experts into groups of at"
            f" least {of_group}"
        )
    if not 0 < best <= groups or text.num_experts_per_tok > best * (count // groups):
        raise UserError(
            f"config.json: num_experts_per_tok = {text.num_experts_per_tok} cannot be chosen from"
            f" topk_group = {best} of {groups} groups of {count // groups} experts"
        )
    return groups, best


def dense_layers(described: ParsedConfig, written: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the layers that keep a plain MLP.

    Raises: UserError for a number of leading dense layers that transformers leaves out.
    """
    text = described.text
    every = range(text.num_hidden_layers)
    if described.family.router == "inputs":
        return tuple(i for i in every if i not in text.moe_layers)
    if described.family.router == "statics":
        first, last, step = (
            getattr(text, f"moe_layer_{name}") for name in ("start_index", "end_index", "interval")
        )
        return tuple(i for i in every if (i + 1) % step or not first <= i <= last)
    kinds = getattr(text, "mlp_layer_types", None)
    if kinds is None:
        return tuple(range(min(getattr(text, "first_k_dense_replace", 0), len(every))))
    unknown = ", ".join(sorted(set(kinds) - {"dense", "sparse"}))
    dense = tuple(i for i in every if kinds[i] == "dense")
    leading = written.get("first_k_dense_replace")
    refuse_features(
        {
            f"MLPs of the kind {unknown}": bool(unknown),
            f"first_k_dense_replace = {leading}, which transformers leaves out beside mlp_layer_types": (
                leading is not None and dense != tuple(range(leading))
            ),
        },
        "correct its config.json",
    )
    return dense
