"""Llama 4's mixtures, by `experts.mixture`: transformers has each expert compute every token, with inputs
of 0 where it was not chosen.

A token's weight multiplies what goes into an expert, where other mixtures weigh what comes out. The
router returns the weights of all experts, 0 for those not chosen, in place of indices, so that
experts cannot be replayed nor balanced.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from areal_x_torch.dummy_model import inner_decoder
from areal_x_torch.experts import mixture

LAYER = "Llama4TextMoe"


def install(model: PreTrainedModel) -> None:
    """Has the mixtures of a Llama 4 compute each token with the experts that it chose."""
    for layer in inner_decoder(model).modules():
        if type(layer).__name__ == LAYER:
            experts: Any = layer.experts
            # What transformers says of the experts of other mixtures.
            experts.is_transposed, experts.has_gate, experts.has_bias = True, True, False
            experts._apply_gate = partial(_gated, experts.act_fn)
            experts.weighs_inputs = True
            experts.forward = partial(mixture, experts)
            layer.forward = partial(_forward, layer)


def _gated(activation: nn.Module, x: Float[Tensor, "n both"]) -> Float[Tensor, "n width"]:
    gate, up = x.chunk(2, dim=-1)
    gated: Tensor = up * activation(gate)
    return gated


def _forward(layer: Any, hidden: Float[Tensor, "*_ features"]) -> tuple[Tensor, Tensor]:
    """Returns the layer's outputs and its router's logits."""
    tokens = hidden.reshape(-1, hidden.shape[-1])
    of_all, logits = layer.router(tokens)
    weights, chosen = of_all.topk(layer.top_k, dim=-1)
    return layer.shared_expert(tokens) + layer.experts(tokens, chosen, weights), logits
