"""JSON measured before it is parsed."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.agents.json_checks.json_bounds import DEPTH, VALUES, TooMuch, check, loads

texts = st.text(alphabet='[]{},:"\\\n é', max_size=8)
values = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=30,
)


def measured(value):
    """Returns the depth, and the number of brackets and commas."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        return 0, 0
    below = [measured(x) for x in inner]
    return 1 + max((depth for depth, _ in below), default=0), sum(count for _, count in below) + max(1, len(inner))


@given(values, st.booleans())
def test_what_is_counted_is_what_the_parsed_value_has(value, ascii):
    text = json.dumps(value, ensure_ascii=ascii)
    depth, count = measured(value)
    for form in (text, text.encode()):
        assert loads(form, depth, count) == value
        for less in [(depth - 1, count), (depth, count - 1)] if depth else []:
            with pytest.raises(TooMuch):
                check(form, *less)


@given(st.text(alphabet='[]{},:"\\1a', max_size=60))
def test_a_text_that_is_no_json_is_a_value_error(text):
    try:
        assert json.loads(text) == loads(text)
    except ValueError:
        with pytest.raises(ValueError):
            loads(text)


@pytest.mark.parametrize(
    "text", ["[" * 10**6, '{"a":' * 10**6, "[" + "1," * 10**6, "[[]," * 10**6, '["",' * 10**6, "[]" * 10**6, "NaN", "9" * 10**6]
)
def test_what_would_cost_much_to_parse_is_refused_for_little(text):
    begun = time.thread_time()
    with pytest.raises(ValueError):
        loads(text)
    assert time.thread_time() - begun < 0.2


def test_a_long_string_is_no_number_of_values():
    text = json.dumps({"a": '[{,"\\' * 10**5})
    assert len(loads(text)["a"]) == 5 * 10**5
    assert (DEPTH, VALUES) == (64, 10_000)
