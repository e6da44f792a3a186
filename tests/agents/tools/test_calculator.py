"""Arithmetic, exactly; everything else is a sentence."""

from __future__ import annotations

import asyncio
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_x.agents.tools.calculator import FUNCTIONS, Calculator, compute
from areal_x.agents.tools.toolbox import Toolbox, ToolError
from areal_x.errors import ConfigError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("(1 + 2) * 3", "9"),
        ("-2 ** 2", "-4"),
        ("2 ** 0.5", "1.41421356237"),
        ("7 // 2 + 7 % 4", "6"),
        ("6 / 3", "2"),
        ("0.1 + 0.2", "0.3"),
        ("12345678901234567890 * 98765432109876543210", "1219326311370217952237463801111263526900"),
        ("sqrt(16) + abs(-3)", "7"),
        ("max(1, 2, 3) - min(4, 5)", "-1"),
        ("round(2.345, 2)", "2.35"),
        ("round(1234, -2)", "1200"),
        ("round(1, -1000000000)", "0"),  # without the power of ten that Python would compute
        ("round(1.5, 1000000000)", "1.5"),
        ("2 * pi", "6.28318530718"),
        ("gcd(12, 18)", "6"),
        ("1e300", "1e+300"),
        ("  1_000 + 1  ", "1001"),
        ("0 ** 0", "1"),
        ("(-1) ** 1000000", "1"),
        ("2 ** -1", "0.5"),
    ],
)
def test_arithmetic_has_its_value(expression, value):
    assert compute(expression) == value


def answer(expression):
    """Returns the number as the model sees it."""
    try:
        return compute(expression)
    except ToolError as error:
        return str(error)


def is_number(text):
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


numbers = st.recursive(
    st.integers(0, 10**6).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=20,
)


@given(numbers)
def test_any_expression_has_the_value_that_fractions_give_it(expression):
    exact, found = _fraction(expression), answer(expression)
    if exact is None:
        assert found == "The expression divides by zero."
    else:
        assert math.isclose(float(found), float(exact), rel_tol=1e-6, abs_tol=1e-6)


def _fraction(expression):
    """Evaluates by a bracket parser that does not use Python's; None if something is divided by zero."""
    if not expression.startswith("("):
        return Fraction(expression)
    depth, words = 0, []
    for word in expression[1:-1].replace("(", "( ").replace(")", " )").split():
        depth += (word == "(") - (word == ")")
        if words and (depth - (word == "(") > 0 or word == ")"):
            words[-1] += " " + word
        else:
            words.append(word)
    left, sign, right = (word.replace("( ", "(").replace(" )", ")") for word in words)
    x, y = _fraction(left), _fraction(right)
    if x is None or y is None or (sign == "/" and y == 0):
        return None
    return {"+": x + y, "-": x - y, "*": x * y}[sign] if sign != "/" else x / y


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("1 / 0", "divides by zero"),
        ("1 % 0", "divides by zero"),
        ("2 ^ 3", "write \\*\\* for a power"),
        ("x + 1", "does not know 'x'"),
        ("squrt(2)", "did you mean 'sqrt'"),
        ("1 +", "cannot be read"),
        ("", "cannot be read"),
        ("1; 2", "cannot be read"),
        ("__import__('os')", "does not know '__import__'"),
        ("(1).real", "arithmetic only"),
        ("[1, 2]", "arithmetic only"),
        ("'a' * 3", "arithmetic only"),
        ("True + 1", "arithmetic only"),
        ("1j", "arithmetic only"),
        ("1 if 2 else 3", "arithmetic only"),
        ("lambda: 1", "arithmetic only"),
        ("round(1, ndigits=1)", "does not know|arithmetic only"),
        ("sqrt(-1)", "has no value"),
        ("sqrt(1, 2)", "has no value"),
        ("(-8) ** 0.5", "not a real number"),
        ("9 ** 9 ** 9", "more than 1000 digits"),
        ("2 ** 4000", "more than 1000 digits"),
        ("10 ** 500 * 10 ** 600", "more than 1000 digits"),
        ("1e308 * 10", "too large"),
        ("exp(1000)", "too large"),
        ("10 ** 400 / 3", "too large"),
        ("(" * 500 + "1" + ")" * 500, "too deeply|cannot be read"),
        ("-" * 1900 + "1", "too deeply|cannot be read"),
        ("1" * 3000, "more than 2000"),
        ("\0", "cannot be read|no value"),
    ],
)
def test_what_has_no_value_is_a_sentence(expression, words):
    with pytest.raises(ToolError, match=words):
        compute(expression)


def test_as_many_digits_as_are_allowed_are_computed():
    assert compute("10 ** 999") == str(10**999)
    with pytest.raises(ToolError, match="more than 30 digits"):
        compute("10 ** 40", 30)


@given(st.text(max_size=60))
def test_no_text_is_more_than_a_sentence(text):
    found = answer(text)
    assert found == compute(text) if is_number(found) else found.endswith((".", "?"))


def test_it_is_a_tool():
    async def call():
        toolbox = Toolbox([Calculator()])
        return await toolbox.call("calculator", '{"expression": "6 * 7"}'), await toolbox.call(
            "calculator", '{"expression": 7}'
        )

    assert asyncio.run(call())[0] == "42"
    assert asyncio.run(call())[1] == "The arguments of calculator do not fit: expression: 7 is not of type 'string'."
    assert all(name in Calculator().schema["function"]["description"] for name in FUNCTIONS)
    with pytest.raises(ConfigError, match=r"calculator\.digits"):
        Calculator(digits=1)
