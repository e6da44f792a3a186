"""What a loss is to a trainer: `(policy, batch) → (terms, metrics)`, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable

from areal_x.errors import UserError
from areal_x.types import Array, Batch, Policy

LossTerms = tuple[Array, dict[str, Array]]
Loss = Callable[[Policy, Batch], LossTerms]


def evaluate(loss: Loss, policy: Policy, batch: Batch) -> LossTerms:
    """Terms and metrics of a loss that anybody may have written.

    Raises: UserError for anything else than a term for each token, `[rows, length]`, and a dict of
    arrays."""
    given, name, wanted = loss(policy, batch), name_of(loss), f"an array {list(batch.mask.shape)}"
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], dict)):
        raise UserError(
            f"the loss {name} gave {in_brief(given)}: it must return (terms, metrics), of which"
            " metrics is a dict"
        )
    terms, metrics = given
    if (found := in_brief(terms)) != wanted:
        raise UserError(
            f"the loss {name} gave {found} as its terms: they must be one a token, {wanted}"
        )
    for key, x in metrics.items():
        if (found := in_brief(x)) not in (wanted, "an array []"):
            raise UserError(
                f"the loss {name} gave {found} as its metric {key!r}: it must be one a token,"
                f" {wanted}"
            )
    return terms, metrics


def in_brief(value: object) -> str:
    """What a part of an algorithm returned: an array by its shape, anything else by its kind."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {list(value.shape)}"
    if isinstance(value, tuple):
        return f"({', '.join(map(in_brief, value))})"
    return "nothing" if value is None else f"a {type(value).__name__}"


def name_of(function: object) -> str:
    inner = getattr(function, "func", function)  # of functools.partial
    return str(getattr(inner, "__name__", type(inner).__name__))
