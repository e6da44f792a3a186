"""Splits an assertion about a program into calls of its functions, which run where the program does,
and a check of their values, which runs where the program is not.

    assert math.isclose(area(2), 12.56)  →  calls ("area(2)",)  check "assert math.isclose(__value_0, 12.56)"

So a program never sees the value that it should return.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator
from dataclasses import dataclass

VALUE = "__value_{}"  # the name of a call's value in the check
BUILTINS = frozenset(dir(builtins))
SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)


@dataclass(frozen=True)
class Assertion:
    """calls: expressions that call the program's functions. check: an assert statement about their
    values."""

    calls: tuple[str, ...]
    check: str


def split_assertion(
    source: str, known: frozenset[str] = frozenset(), functions: frozenset[str] = frozenset()
) -> tuple[Assertion, ...]:
    """Splits each statement of a text of assert statements.

    known: names that the setup defines. functions: the program's functions; needed for those that
    are named like a built-in, because every other unknown name that is called is the program's.

    Raises: ValueError for other statements, an assertion that calls no function of the program, one
    that uses a variable of a comprehension in such a call, and an unknown name that is not called.
    """
    try:
        statements = ast.parse(source.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{source.strip()!r} is not Python ({error})") from None
    if not statements:
        raise ValueError("the assertion is empty")
    return tuple(_split(statement, known, functions) for statement in statements)


def defined_names(source: str) -> frozenset[str]:
    """Returns the names that the statements of a setup define. Raises: ValueError for a text that is
    not Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the setup is not Python ({error})") from None
    return frozenset(name for node in ast.walk(tree) for name in _defined(node))


def _defined(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in names)


def _split(statement: ast.stmt, known: frozenset[str], functions: frozenset[str]) -> Assertion:
    written = ast.unparse(statement)
    if not isinstance(statement, ast.Assert):
        raise ValueError(f"{written!r} is not an assert statement: put others into the setup")
    splitter = _Splitter((BUILTINS | known) - functions)
    tested = splitter.visit(statement.test)
    assert isinstance(tested, ast.expr)
    check = ast.Assert(tested, None)
    if not splitter.calls:
        raise ValueError(f"{written!r} calls no function of the program")
    return Assertion(tuple(splitter.calls), ast.unparse(check))


class _Splitter(ast.NodeTransformer):
    """Replaces the outermost calls of the program's functions by names."""

    def __init__(self, known: frozenset[str]) -> None:
        self._known = known
        self._local: list[str] = []
        self.calls: list[str] = []

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Call) and self._is_programs(node.func):
            return self._replaced(node)
        if isinstance(node, SCOPES):
            return self._in_scope(node)
        if isinstance(node, ast.Name) and node.id not in {*self._known, *self._local}:
            raise ValueError(f"{node.id!r} is neither defined by the setup nor called")
        return self.generic_visit(node)

    def _is_programs(self, function: ast.expr) -> bool:
        """True for f and Solution().f, not for f(x).count: that is a method of the value."""
        match function:
            case ast.Name(id=name):
                return name not in self._known and name not in self._local
            case ast.Attribute(value=ast.Call(func=ast.Name(id=name) as made)):
                return name[:1].isupper() and self._is_programs(made)
        return False

    def _replaced(self, call: ast.Call) -> ast.Name:
        written = ast.unparse(call)
        for node in ast.walk(call):
            if isinstance(node, ast.Name) and node.id in self._local:
                raise ValueError(
                    f"{written!r} depends on {node.id!r}, a variable of a comprehension: write one"
                    " assertion for each value"
                )
        self.calls.append(written)
        return ast.Name(VALUE.format(len(self.calls) - 1), ast.Load())

    def _in_scope(self, node: ast.AST) -> ast.AST:
        before = len(self._local)
        self._local += _variables(node)
        try:
            return self.generic_visit(node)
        finally:
            del self._local[before:]


def _variables(scope: ast.AST) -> Iterator[str]:
    """Yields the variables of a comprehension or lambda."""
    if isinstance(scope, ast.Lambda):
        yield from (
            argument.arg for argument in ast.walk(scope.args) if isinstance(argument, ast.arg)
        )
        return
    for part in ast.iter_child_nodes(scope):
        if isinstance(part, ast.comprehension):
            names = (node for node in ast.walk(part.target) if isinstance(node, ast.Name))
            yield from (name.id for name in names)
