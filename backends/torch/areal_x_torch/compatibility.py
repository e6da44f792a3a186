"""Checks on a dummy model, before any weight is read, that this backend computes what transformers
computes.

A trainer packs sequences side by side and replaces the layers' attention, so a setting of a config
has an effect only if that attention gets it. No model is known by name: the dummy's outputs for
packed sequences, longer than any window and with neighbours before and behind them, are compared
with transformers' own attention on each sequence alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from areal_x.errors import UserError
from areal_x.hf.model_parts import with_parts
from areal_x_torch import delta_rule, weighed_inputs
from areal_x_torch.attention import ATTENTION, sdpa
from areal_x_torch.dtensors import ShardedView, local
from areal_x_torch.dummy_model import make_dummy
from areal_x_torch.experts import EXPERTS, is_experts
from areal_x_torch.model import (
    PackedRow,
    decoder,
    has_vision,
    head,
    head_input,
    hidden_states,
    is_classifier,
    named_tensors,
)
from areal_x_torch.segments import Segments

# Names, in configs and modules, of numbers of tokens that some layer sees or selects; not of which
# layers.
SPAN = re.compile(
    r"window|attention_chunk|local_attention|index_topk|index_block|index_local|compress|floor_scale"
)
NOT_A_SPAN = re.compile(r"pattern|layer|use_|vision")
SHORTEST = 4  # tokens of the smallest span; the others get a few more each
LENGTHS = 3, 15, 2, 9  # of neighbours; those in COMPARED exceed the spans of most models
COMPARED = 1, 3
CLOSE = {"rtol": 1e-3, "atol": 1e-3}

# Models that have passed in this process.
_passed: set[tuple[type, str]] = set()


def prepare(model: PreTrainedModel, directory: Path) -> None:
    """Installs this backend's attention, experts and delta rule in a model on the meta device.

    Raises: UserError for a model that trainer and sampler would compute differently from
    transformers.
    """
    kind = f"{directory} is a {type(model).__name__}{with_parts(model.config.to_dict())}"
    has_delta_rule = delta_rule.install(model)
    # transformers marks none of the models with such layers, whose other layers let attention be
    # replaced all the same: the dummy shows it.
    if not (model._supports_attention_backend or has_delta_rule):
        raise UserError(
            f"{kind}, whose attention transformers does not let others replace: use a Qwen, Llama"
            " or Mistral model"
        )
    attend_by(model, ATTENTION)
    if any(is_experts(module) for module in model.modules()):
        # `set_experts_implementation` of transformers 5.5 takes none but its own.
        model.config._experts_implementation = EXPERTS
    which = type(model), sha256(model.config.to_json_string().encode()).hexdigest()
    if which not in _passed:
        try:
            reason = difference(make_dummy(model))
        except NotImplementedError as error:
            reason = str(error)
        except Exception as error:  # transformers' own code, given what it does not expect
            reason = (
                f"with this backend's attention it raises {type(error).__name__}"
                f" ({(str(error).splitlines() or [''])[0]})"
            )
        if reason is not None:
            raise UserError(
                f"{kind}, which the torch backend does not train: {reason}. Use a Qwen, Llama or"
                " Mistral model"
            )
        _passed.add(which)
    weighed_inputs.install(model)


def attend_by(model: PreTrainedModel, name: str) -> None:
    model.set_attn_implementation({"text_config": name} if has_vision(model) else name)


@torch.inference_mode()
def difference(model: PreTrainedModel) -> str | None:
    """Returns how a model on the CPU differs from transformers' own when its sequences are packed;
    None if it does not. The model's spans stay shortened."""
    held = {x.untyped_storage().data_ptr() for x in model.state_dict().values()}
    named = (local(x) for x in named_tensors(model).values() if not isinstance(x, ShardedView))
    if any(x.untyped_storage().data_ptr() not in held for x in named):
        return "its files hold other tensors than parts of the model's"
    beyond = max(shorten(model), default=0) + 3
    lengths = tuple(max(n, beyond) if i in COMPARED else n for i, n in enumerate(LENGTHS))
    each = (torch.arange(sum(lengths)) % (len(model.get_input_embeddings().weight) - 1) + 1).split(
        lengths
    )
    packed = _packed(model, *each)
    for i in COMPARED:
        if not torch.allclose(packed[i], alone := _alone(model, each[i]), **CLOSE):
            if torch.allclose(_packed(model, each[i])[0], alone, **CLOSE):
                return "its layers mix the sequences of a packed row"
            return (
                "what its tokens see follows rules beyond a window, which this backend's attention"
                " is not told of"
            )
    if is_classifier(model):  # its score is this backend's own
        return None
    ours, theirs = head(model).logits(packed[i]), _as_transformers(model, each[i])
    return None if torch.allclose(theirs, ours, **CLOSE) else "it scales its logits after the head"


def shorten(model: PreTrainedModel) -> list[int]:
    """Shortens the settings that limit how many tokens a layer sees, so that the sequences here are
    longer. Returns the new numbers; unequal ones stay unequal and in order."""
    parts = list(model.modules())
    owners = {
        id(x): x
        for part in parts
        for x in (part, *vars(part).values())
        if isinstance(x, nn.Module | PreTrainedConfig)
    }
    named = [
        (owner, name, number)
        for owner in owners.values()
        for name, number in vars(owner).items()
        if type(number) is int
        and number > SHORTEST
        and SPAN.search(name)
        and not NOT_A_SPAN.search(name)
    ]
    short = {
        number: SHORTEST + 3 * i
        for i, number in enumerate(sorted({number for *_, number in named}))
    }
    for owner, name, number in named:
        setattr(owner, name, short[number])
    return list(short.values())


def _packed(model: PreTrainedModel, *sequences: Tensor) -> tuple[Tensor, ...]:
    """Returns the last hidden states of sequences in one flat row."""
    lengths = tuple(map(len, sequences))
    positions = torch.cat([torch.arange(n) for n in lengths])
    row = PackedRow(torch.cat(sequences), positions, Segments.of(lengths, sdpa, positions.device))
    return hidden_states(model, row).split(lengths)


def _alone(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    """Returns those of one sequence, with transformers' own attention, scaled alike."""
    with _eager(model):
        states: Tensor = decoder(model)(
            input_ids=sequence[None], use_cache=False
        ).last_hidden_state[0]
    return head_input(model, states)


def _as_transformers(model: PreTrainedModel, sequence: Tensor) -> Tensor:
    with _eager(model):
        logits: Tensor = model(sequence[None], use_cache=False).logits[0]
    return logits


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    """Uses transformers' eager attention: its faster ones ignore soft caps."""
    attend_by(model, "eager")
    with delta_rule.without_kernels(model):
        yield
    attend_by(model, ATTENTION)
