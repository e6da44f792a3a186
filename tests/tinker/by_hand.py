"""The losses of the API and a training step, by hand: transformers, autograd and torch's own AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from areal_x.hf.adapters import PEFT_PREFIX
from areal_x.protocols.trainer_config import OptimizerConfig
from areal_x.tinker.data import Datum
from areal_x.tinker.losses import LOSSES as NAMED

Tensors = dict[str, Tensor]

# As the API's documentation writes them: of log-probabilities, those of sampling, and advantages (or weights).
LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": lambda logp, weights: -(logp * weights).sum(),
    "importance_sampling": lambda logp, sampled, a: -((logp - sampled).exp() * a).sum(),
    "ppo": lambda logp, sampled, a: (
        -torch.minimum((logp - sampled).exp() * a, (logp - sampled).exp().clamp(0.8, 1.2) * a).sum()
    ),
    "cispo": lambda logp, sampled, a: -((logp - sampled).exp().clamp(0.8, 1.2).detach() * logp * a).sum(),
    "gspo": lambda logp, sampled, a, counted: (
        -torch.minimum(
            sequence_ratio(logp, sampled, counted) * a, sequence_ratio(logp, sampled, counted).clamp(0.9997, 1.0004) * a
        )[counted > 0].sum()
    ),
    # Ours: the API's documentation has no formula.
    "stable_reinforce": lambda logp, sampled, a, counted: (
        (0.01 * ((sampled - logp).exp() - (sampled - logp) - 1) - (logp - sampled).exp().clamp(max=2).detach() * logp * a)
        * counted
    ).sum(),
    "dro": lambda logp, sampled, a: -(logp * a - 0.5 * 0.05 * (logp - sampled) ** 2).sum(),
}


def sequence_ratio(logp: Tensor, sampled: Tensor, counted: Tensor) -> Tensor:
    """Of a sequence, over the counted tokens, with a gradient for each of them."""
    ratio = ((logp - sampled) * counted).sum() / counted.sum()
    return ratio.exp().detach() * (logp - logp.detach()).exp()


class ByHand:
    """A model with adapters (or none: all of it is trained), from the tensors of an adapter's files."""

    def __init__(self, base: Path, adapter: dict[str, np.ndarray], scale: float) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.scale = scale
        self.fixed = dict(self.model.named_parameters())
        self.trained = {n: torch.tensor(x).requires_grad_() for n, x in adapter.items()} or self.fixed
        self.optimizer: torch.optim.AdamW | None = None

    def weights(self) -> Tensors:
        found = {**self.fixed}
        for name in self.trained:
            if name.endswith(".lora_A.weight"):
                own = name.removesuffix(".lora_A.weight")
                a, b = self.trained[name], self.trained[f"{own}.lora_B.weight"]
                place = own.removeprefix(PEFT_PREFIX) + ".weight"
                found[place] = self.fixed[place].detach() + self.scale * (b @ a)
        return found

    def logprobs(self, datum: Datum) -> Tensor:
        """Of each target given the tokens up to its place."""
        tokens = torch.tensor(datum.tokens.astype(np.int64))[None]
        out = torch.func.functional_call(self.model, self.weights(), (tokens,))
        return out.logits[0].log_softmax(-1).gather(-1, torch.tensor(datum.targets.astype(np.int64)))

    def step(self, datums: Sequence[Datum], loss: str, settings: OptimizerConfig) -> float:
        """Takes a step on the sum over datums and returns the loss before it."""
        total = torch.zeros(())
        for datum in datums:
            total = total + LOSSES[loss](self.logprobs(datum), *(torch.tensor(datum.inputs[n]) for n in NAMED[loss].inputs))
        params = list(self.trained.values())
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(params)
        for group in self.optimizer.param_groups:
            group |= {"lr": settings.learning_rate, "betas": (settings.beta1, settings.beta2)}
            group |= {"eps": settings.eps, "weight_decay": settings.weight_decay}
        self.optimizer.zero_grad()
        total.backward()
        if settings.clip_norm:
            torch.nn.utils.clip_grad_norm_(params, settings.clip_norm)
        self.optimizer.step()
        return float(total.detach())
