"""A calculator for models: parses arithmetic into a tree of numbers and operators, and bounds its
size."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gin

from areal_x.agents.tools.toolbox import Schema, ToolError, tool_schema
from areal_x.errors import nearest, within

Number = int | float

CHARACTERS = 2000  # of an expression
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
SIGNS: Mapping[type[ast.unaryop], Callable[[Any], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
# beyond this, rounding changes nothing, or leaves nothing, of any number within the bounds
PLACES = 5000


def rounded(value: Number, *places: int) -> Number:
    """Like `round`, which otherwise computes the power of ten that it is given, however large."""
    return round(value, *(max(-PLACES, min(PLACES, n)) for n in places))


FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    **{function.__name__: function for function in (abs, min, max)},
    "round": rounded,
    **{
        name: getattr(math, name)
        for name in (
            "ceil",
            "exp",
            "floor",
            "gcd",
            "hypot",
            "isqrt",
            "log",
            "log10",
            "log2",
            "sqrt",
        )
    },
    **{
        name: getattr(math, name)
        for name in ("acos", "asin", "atan", "atan2", "cos", "degrees", "radians", "sin", "tan")
    },
}
CONSTANTS = {"pi": math.pi, "e": math.e}


@gin.configurable("calculator")
@dataclass(frozen=True)
class Calculator:
    """The tool `calculator`: + - * / // % **, brackets, the usual functions, pi and e; exact on
    whole numbers."""

    digits: int = 1000
    """Most decimal digits of a whole number in an intermediate result."""
    name = "calculator"

    def __post_init__(self) -> None:
        # Python prints at most 4300 digits
        within("calculator.digits", self.digits, 20, 4000)

    @property
    def schema(self) -> Schema:
        description = (
            "Computes an arithmetic expression. Operators: + - * / // % **. Functions:"
            f" {', '.join(sorted(FUNCTIONS))}."
        )
        expression = {
            "type": "string",
            "description": "The expression, for example (3 + 4) * sqrt(2).",
        }
        parameters = {
            "type": "object",
            "properties": {"expression": expression},
            "required": ["expression"],
        }
        return tool_schema(self.name, description, parameters)

    async def call(self, arguments: dict[str, Any]) -> str:
        return compute(arguments["expression"], self.digits)


def compute(expression: str, digits: int = 1000) -> str:
    """Returns the value of an arithmetic expression: whole numbers with all their digits, others
    with 12.

    Raises: ToolError, a sentence for the model, for anything that is not arithmetic, has no value,
    or is too large.
    """
    if len(expression) > CHARACTERS:
        raise ToolError(
            f"The expression has {len(expression)} characters, more than {CHARACTERS}: compute it"
            " in parts."
        )
    try:
        value = _Reader(digits, 10**digits).value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ToolError("The expression divides by zero.") from None
    except OverflowError:
        raise ToolError("A number in the expression is too large.") from None
    except (RecursionError, MemoryError):
        raise ToolError("The expression is nested too deeply: compute it in parts.") from None
    except SyntaxError as error:
        raise ToolError(
            f"The expression cannot be read ({error.msg}): write arithmetic such as (3 + 4) * 2."
        ) from None
    except (ValueError, TypeError) as error:
        raise ToolError(f"The expression has no value: {error}.") from None
    return f"{value:d}" if isinstance(value, int) else f"{value:.12g}"


@dataclass(frozen=True)
class _Reader:
    """limit: the smallest number with more than `digits` digits."""

    digits: int
    limit: int

    def value(self, node: ast.expr) -> Number:
        match node:
            case ast.Constant(int() | float() as value) if not isinstance(value, bool):
                return self._small(value)
            case ast.BinOp(left, kind, right) if type(kind) in OPERATORS:
                return self._small(self._operate(type(kind), self.value(left), self.value(right)))
            case ast.UnaryOp(kind, operand) if type(kind) in SIGNS:
                return SIGNS[type(kind)](self.value(operand))
            case ast.Name(name) if name in CONSTANTS:
                return CONSTANTS[name]
            case ast.Call(ast.Name(name), arguments, []) if name in FUNCTIONS:
                return self._small(
                    FUNCTIONS[name](*(self.value(argument) for argument in arguments))
                )
            case ast.Name(name) | ast.Call(ast.Name(name)):
                names = [*CONSTANTS, *FUNCTIONS]
                raise ToolError(
                    f"The calculator does not know {name!r}; it knows"
                    f" {', '.join(names)}{nearest(name, names)}."
                )
            case ast.BinOp(_, ast.BitXor(), _):
                raise ToolError("The calculator has no operator ^: write ** for a power.")
        raise ToolError(
            f"The calculator cannot compute {ast.unparse(node)[:100]!r}: it knows arithmetic only."
        )

    def _operate(self, kind: type[ast.operator], left: Number, right: Number) -> Number:
        # Checked before computing: a power of small numbers can be too large for memory.
        if kind is ast.Pow and isinstance(left, int) and isinstance(right, int) and abs(left) > 1:
            self._within(right * math.log10(abs(left)) < self.digits + 1)
        return OPERATORS[kind](left, right)

    def _small(self, value: Number) -> Number:
        if isinstance(value, complex):
            raise ToolError("The value is not a real number.")
        if isinstance(value, float):
            if not math.isfinite(value):
                raise OverflowError
        else:
            self._within(abs(value) < self.limit)
        return value

    def _within(self, small: bool) -> None:
        if not small:
            raise ToolError(f"A whole number in the expression has more than {self.digits} digits.")
