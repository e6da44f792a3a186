"""The optimizers: directions of a step, dtypes of their states, and how states are saved.

Each one is clipping by global norm (the trainer's), a direction, decay of matrices and the learning
rate; the directions are those of the JAX backend, formula by formula, so that one config has one
meaning. torch has two of them under the same names that compute something else: its Adafactor
scales a step by the size of the parameter, at most 1 / sqrt(step); its Muon works in bfloat16,
which moves a step by up to three percent. AdamW is torch's own.

Parameters, gradients and states may be DTensors: the operations on them are elementwise, a mean, or
a product of means; only Muon needs whole matrices, which each device gathers and computes the same
with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import Parameter
from torch.optim.adamw import adamw

from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import OptimizerConfig
from areal_x_torch import loading
from areal_x_torch.dtensors import Stored, mesh_of

# Muon's constants, as in its reference and torch.optim.Muon: the quintic's coefficients, its steps,
# the least norm, the momentum.
QUINTIC, STEPS, LEAST, MOMENTUM = (3.4445, -4.7750, 2.0315), 5, 1e-7, 0.95
TINY = 1e-30  # added to squares by Adafactor
# Names of repeated modules in transformers.
IN_A_LAYER = re.compile(r"\b(layers|layer|blocks|block|h)\.\d+\.")

State = dict[str, Tensor]


class Optimizer(torch.optim.Optimizer):
    """AdamW, Adafactor or Muon over named parameters, with states allocated from the start.

    Each state has a `step`, in fp32, and moments in `config.moments` between steps; updates are
    computed in fp32.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, Parameter]], config: OptimizerConfig
    ) -> None:
        groups: dict[tuple[Any, ...], dict[str, Any]] = {}
        for name, p in parameters:
            rule = config.name
            if rule == "muon" and not (
                IN_A_LAYER.search(name) and p.ndim >= 2 and min(p.shape[-2:]) > 1
            ):
                rule = "adamw"  # embeddings, heads, vectors and one-row matrices
            # Fused operations need tensors of one mesh.
            alike = rule, p.ndim >= 2, mesh_of(p)
            group = groups.setdefault(alike, {"params": [], "rule": rule})
            group["params"].append(p)
        super().__init__(list(groups.values()), {})
        self.set(config)
        kept = {"fp32": torch.float32, "bf16": torch.bfloat16}[config.moments]
        # One at a time, so that at most one parameter's moments are in fp32.
        self.at_once = None if config.moments == "fp32" else 1
        for group in self.param_groups:
            for p in group["params"]:
                moments = {
                    name: torch.zeros_like(x, dtype=kept)
                    for name, x in MOMENTS[group["rule"]](p.detach()).items()
                }
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    **moments,
                }

    def set(self, config: OptimizerConfig) -> None:
        """Sets the learning rate, decays and eps of the next steps; decay of matrices only."""
        for group in self.param_groups:
            group["lr"] = config.learning_rate
            group["betas"] = config.beta1, config.beta2
            group["eps"] = config.eps
            group["weight_decay"] = config.weight_decay if group["params"][0].ndim >= 2 else 0.0

    @torch.no_grad()
    def step(self) -> None:
        """Takes one step for each parameter that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            size = self.at_once or max(len(params), 1)
            for part in (params[start : start + size] for start in range(0, len(params), size)):
                kept = [self.state[p] for p in part]
                states = [{name: x.float() for name, x in state.items()} for state in kept]
                RULES[group["rule"]](part, states, group)
                for old, new in zip(kept, states, strict=True):
                    for name, x in new.items():
                        if x is not old[name]:
                            old[name].copy_(x)

    def set_steps(self, count: int) -> None:
        """Sets the count of steps; the moments are unchanged."""
        for state in self.state.values():
            state["step"].fill_(count)


# ---- moments of a parameter: tensors of its shape, or with axes of length 1


def _of_adamw(p: Tensor) -> State:
    return {"exp_avg": p, "exp_avg_sq": p}


def _of_adafactor(p: Tensor) -> State:
    x = _in_columns(p)
    return {"row": x.mean(-1, keepdim=True), "column": x.mean(-2, keepdim=True)}


def _of_muon(p: Tensor) -> State:
    return {"trace": p}


MOMENTS: Mapping[str, Callable[[Tensor], State]] = {
    "adamw": _of_adamw,
    "adafactor": _of_adafactor,
    "muon": _of_muon,
}


# ---- steps


def step_of_adamw(
    params: Sequence[Parameter], states: Sequence[State], group: Mapping[str, Any]
) -> None:
    """torch's own AdamW, fused."""
    moments = ([state[name] for state in states] for name in MOMENTS["adamw"](params[0]))
    adamw(
        list(params),
        [p.grad for p in params],
        *moments,
        [],
        [state["step"] for state in states],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def step_of_adafactor(
    params: Sequence[Parameter], states: Sequence[State], group: Mapping[str, Any]
) -> None:
    """Adafactor without momentum and without scaling by the parameter: gradient / sqrt(v), divided
    by its root mean square if that is above 1.

    v = row · column / mean(row), two moving averages with the decay 1 - t^-0.8. A vector is a
    matrix of one column, whose v is exact. Source: arXiv 1804.04235, algorithm 4, with the decay of
    section 7.2.
    """
    for p, state in zip(params, states, strict=True):
        state["step"] += 1
        gradient, fresh = _in_columns(p.grad), state["step"] ** -0.8
        squared = gradient.square() + TINY
        row, column = state["row"], state["column"]
        row += fresh * (squared.mean(-1, keepdim=True) - row)
        column += fresh * (squared.mean(-2, keepdim=True) - column)
        # Two roots in a row: the product of two small means would be 0 in fp32.
        x = gradient * (row / row.mean(-2, keepdim=True)).rsqrt() * column.rsqrt()
        x = x / x.square().mean((-2, -1), keepdim=True).sqrt().clamp(min=1)
        _move(p, x.reshape(p.shape) if p.ndim < 2 else x, group)


def step_of_muon(
    params: Sequence[Parameter], states: Sequence[State], group: Mapping[str, Any]
) -> None:
    """Nesterov momentum, orthogonalised, times 0.2 · sqrt(the longer side): the root mean square of
    AdamW's updates.

    Sources: kellerjordan.github.io/posts/muon; the size, arXiv 2502.16982, eq. 4.
    """
    for p, state in zip(params, states, strict=True):
        state["step"] += 1
        state["trace"].mul_(MOMENTUM).add_(p.grad)
        ahead = p.grad + MOMENTUM * state["trace"]
        if isinstance(ahead, DTensor):
            whole = orthogonal(ahead.full_tensor())
            direction = distribute_tensor(
                whole, ahead.device_mesh, ahead.placements, src_data_rank=None
            )
        else:
            direction = orthogonal(ahead)
        _move(p, direction * (0.2 * max(p.shape[-2:]) ** 0.5), group)


RULES = {"adamw": step_of_adamw, "adafactor": step_of_adafactor, "muon": step_of_muon}


def orthogonal(x: Float[Tensor, "*stack rows columns"]) -> Float[Tensor, "*stack rows columns"]:
    """Returns approximately the nearest matrix with equal singular values: five steps of a quintic
    bring them to 0.7 … 1.2."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonal(x.mT).mT
    a, b, c = QUINTIC
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=LEAST)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def _in_columns(x: Tensor) -> Tensor:
    return x if x.ndim >= 2 else x.unsqueeze(-1)


def _move(p: Parameter, direction: Tensor, group: Mapping[str, Any]) -> None:
    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])


# ---- files

# Renames tensors shaped like the parameters as in the files.
AsSaved = Callable[[Mapping[str, Tensor]], dict[str, Stored]]


def read_moments(
    directory: Path,
    optimizer: Optimizer,
    named: Mapping[str, Parameter],
    as_saved: AsSaved,
    *,
    version: int,
    own_form: bool,
    elsewhere: Callable[[Iterable[tuple[str, Stored]]], Container[str]],
) -> None:
    """Copies the moments of a checkpoint into the optimizer's state, which then is at `version`.
    own_form: the moments have this backend's own names. elsewhere: given this process's, returns the
    names of those that only others have.

    Raises: UserError for moments of another model.
    """
    if own_form:
        own: Mapping[str, Stored] = moments(optimizer, named)
    else:
        own = named_moments(optimizer, named, as_saved)
    source = str(directory / model_dir.MOMENTS)
    loading.copy_tensors(own, model_dir.read_moments(directory), source, elsewhere(own.items()))
    optimizer.set_steps(version)


def portable(config: OptimizerConfig, named: Mapping[str, Parameter], as_saved: AsSaved) -> bool:
    """True if a state can be saved as moments of single tensors of the files. AdamW's always can.
    Muon and Adafactor compute with matrices, which differ from the files' if transformers joins a
    mixture's experts; for more than two axes each backend makes its own matrices."""
    if config.name == "adamw":
        return True
    shapes = sorted(tuple(x.shape) for x in as_saved(dict(named)).values())
    return shapes == sorted(tuple(p.shape) for p in named.values()) and all(
        len(shape) <= 2 for shape in shapes
    )


def moments(optimizer: Optimizer, named: Mapping[str, Parameter]) -> State:
    """Returns each moment under its own name and its parameter's, "exp_avg.model.norm.weight"."""
    states = ((name, optimizer.state[p]) for name, p in named.items())
    return {
        f"{which}.{name}": x
        for name, state in states
        for which, x in state.items()
        if which != "step"
    }


def named_moments(
    optimizer: Optimizer, named: Mapping[str, Parameter], as_saved: AsSaved
) -> dict[str, Stored]:
    """Returns the same under the parameter's name in the files, where they are `portable`."""
    kinds = dict.fromkeys(
        which for p in named.values() for which in optimizer.state[p] if which != "step"
    )
    of_kinds = {
        which: {n: state[which] for n, p in named.items() if which in (state := optimizer.state[p])}
        for which in kinds
    }
    return {
        f"{which}.{name}": x for which, of in of_kinds.items() for name, x in as_saved(of).items()
    }
