"""A program for the sandbox, sent there as source text with a request: runs a model's program, or
checks the values that one returned.

    run_script   the model's program, as the interpreter would run it; its standard output is the result
    run_calls    its functions, called; their values are written as JSON where its output was
    run_check    an assertion about such values, in another process than the model's program

Nothing here is a secret, or keeps the model's program from writing whatever it likes as its result:
it does not know what is expected. Values are compared elsewhere, and are plain data there.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

FILE = "solution.py"  # in tracebacks
LARGE = 1 << 63  # larger integers are written in hexadecimal, as decimals take quadratic time
MODULES = "bisect collections copy functools heapq itertools math operator random re string"
# what the authors of functions for LeetCode may use without importing it
PRELUDE = "\n".join(
    [
        *(f"import {name}" for name in MODULES.split()),
        "from bisect import *",
        "from collections import *",
        "from functools import *",
        "from heapq import *",
        "from itertools import *",
        "from math import inf, gcd, sqrt, ceil, floor, comb, log2",
        "from typing import *",
    ]
)


def run_script(source: str) -> None:
    """Runs a program whose errors, but not its standard error, are reported."""
    _silence(2)
    # Written in blocks, as by an interpreter whose output is no terminal.
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    _execute(source, _module("__main__"))


def run_calls(source: str, setup: str, calls: list[str]) -> None:
    """Writes the values of expressions that call functions of a program."""
    reply = _reply()
    names = _module("solution")
    _execute(f"{PRELUDE}\n", names)
    _execute(source, names)
    _execute(setup, names)
    _write(reply, [encoded(eval(_compiled(call, "eval"), names)) for call in calls])


def run_function(source: str, function: str, arguments: list[Any]) -> None:
    """Writes the value of one function of a program, or of a method of its class Solution."""
    reply = _reply()
    names = _module("solution")
    _execute(f"{PRELUDE}\n", names)
    _execute(source, names)
    made = names["Solution"]() if "Solution" in names else None
    called = getattr(made, function) if hasattr(made, function) else names[function]
    _write(reply, [encoded(called(*arguments))])


def run_check(values: list[Any], setup: str, check: str) -> None:
    """Writes "held" if an assertion about values holds."""
    reply = _reply()
    names = _module("check")
    for statement in _statements(setup):
        with suppress(NameError):  # it makes an argument by the program's own functions
            exec(statement, names)
    names.update({f"__value_{n}": decoded(value) for n, value in enumerate(values)})
    exec(_compiled(check, "exec"), names)
    _write(reply, "held")


def _silence(fd: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)


def _reply() -> int:
    """Silences all output, and returns a descriptor for the reply."""
    reply = os.dup(1)
    _silence(1)
    _silence(2)
    return reply


def _write(reply: int, content: Any) -> None:
    data = json.dumps(content).encode()
    while data:
        data = data[os.write(reply, data) :]


def _module(name: str) -> dict[str, Any]:
    """Returns the names of a new module, which decorators as `dataclass` look up."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    # of `site`, which the sandbox does not import
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    return module.__dict__


def _compiled(source: str, mode: str) -> types.CodeType:
    """Without this file's own `from __future__`, and with assertions."""
    code: types.CodeType = compile(source, FILE, mode, dont_inherit=True, optimize=0)
    return code


def _execute(source: str, names: dict[str, Any]) -> None:
    exec(_compiled(source, "exec"), names)


def _statements(source: str) -> Iterator[types.CodeType]:
    import ast

    for statement in ast.parse(source).body:
        yield _compiled(ast.unparse(statement), "exec")


def encoded(value: Any) -> Any:
    """Returns plain data as JSON can hold it; of a subclass of a plain type only the plain part, and
    of an iterator its items. Raises: TypeError for other values."""
    if type(value).__module__ == "numpy" and not getattr(value, "shape", None):
        value = value.item()
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, int):
        return {"int": hex(value)} if abs(value) >= LARGE else int(value)
    if isinstance(value, list):
        return list(map(encoded, value))
    if isinstance(value, dict):
        return {"dict": [[encoded(key), encoded(item)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: list(map(encoded, value))}
    if hasattr(value, "__iter__") and hasattr(value, "__next__"):
        return {"iterator": list(map(encoded, value))}
    raise TypeError(f"a test cannot compare a value of the type {type(value).__name__}")


_MADE: dict[str, Callable[[list[Any]], Any]] = {
    "dict": lambda items: {decoded(key): decoded(item) for key, item in items},
    "complex": lambda parts: complex(*parts),
    "range": lambda ends: range(*ends),
    "tuple": lambda items: tuple(map(decoded, items)),
    "set": lambda items: set(map(decoded, items)),
    "frozenset": lambda items: frozenset(map(decoded, items)),
    "iterator": lambda items: iter(list(map(decoded, items))),
}


def decoded(value: Any) -> Any:
    """Returns the value that was encoded. Raises: any error for something that `encoded` does not
    return."""
    if isinstance(value, list):
        return list(map(decoded, value))
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "int":
        return int(content, 16)
    if kind == "bytes":
        return bytes.fromhex(content)
    return _MADE[kind](content)
