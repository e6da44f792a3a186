"""Colours that represent a number, and escaping of the text."""

from __future__ import annotations

import re

import pytest

from areal_x.monitor.html import coloured_tokens


def strengths(page: str) -> list[float]:
    return [float(alpha) for alpha in re.findall(r"title='[^']*' style='[^']*,([\d.]+)\)", page)]


def test_the_largest_value_has_full_colour_and_the_others_their_share():
    assert strengths(coloured_tokens(["a", "b", "c"], [-2.0, 1.0, 0.0])) == [1.0, 0.5, 0.0]


def test_below_and_above_zero_differ_in_hue():
    below, above = re.findall(r"title='[^']*' style='[^']*rgba\((\d+,\d+,\d+)", coloured_tokens(["a", "b"], [-1.0, 1.0]))
    assert below != above


def test_a_token_without_a_value_is_grey_and_markup_is_text():
    page = coloured_tokens(["<b>", "x"], [float("nan"), 1.0], caption="<i>")
    assert "<b>" not in page
    assert "<i>" not in page
    assert "color:#888'>&lt;b&gt;" in page


def test_tokens_and_values_of_different_length_are_refused():
    with pytest.raises(ValueError, match="2 tokens cannot be coloured by 1"):
        coloured_tokens(["a", "b"], [1.0])
