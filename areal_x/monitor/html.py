"""Tokens coloured by a number, to show trajectories in a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

# Blue below zero, orange above: readers with red-green colour blindness can distinguish them.
BELOW, ABOVE = (33, 102, 172), (230, 120, 20)


def coloured_tokens(
    tokens: Sequence[str],
    values: Sequence[float] | np.ndarray,
    caption: str = "",
    limit: float | None = None,
) -> str:
    """HTML with each token's value as its background colour, white at 0 and full colour at ±limit;
    hovering shows the number.

    A token whose value is NaN, such as a prompt's, is grey. limit: by default the largest absolute
    value.

    Raises: ValueError if tokens and values differ in number.
    """
    numbers = np.asarray(values, np.float64)
    if len(tokens) != len(numbers):
        raise ValueError(f"{len(tokens)} tokens cannot be coloured by {len(numbers)} values")
    known = np.abs(numbers[np.isfinite(numbers)])
    limit = limit or float(known.max(initial=0.0)) or 1.0
    spans = "".join(
        _span(token, value, limit) for token, value in zip(tokens, numbers, strict=True)
    )
    below, above = (f"<span style='{_style(sign)}'>&nbsp;&nbsp;</span>" for sign in (-1.0, 1.0))
    scale = f"−{limit:.3g} {below} 0 {above} {limit:.3g}"
    return (
        f"<div style='margin:4px 0'><small>{html.escape(caption)} &emsp; {scale}</small><br>"
        f"<code style='font-size:1.2em;line-height:1.8;white-space:pre-wrap'>{spans}</code></div>"
    )


def _span(token: str, value: float, limit: float) -> str:
    text = html.escape(token).replace("\n", "↵\n") or "&nbsp;"
    if not np.isfinite(value):
        return f"<span style='color:#888'>{text}</span>"
    return f"<span title='{value:+.4g}' style='{_style(value / limit)}'>{text}</span>"


def _style(share: float) -> str:
    red, green, blue = ABOVE if share > 0 else BELOW
    return (
        f"color:#111;background:rgba({red},{green},{blue},{min(abs(share), 1.0):.2f});padding:1px"
        " 2px;border-radius:3px"
    )
