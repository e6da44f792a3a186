"""Finds, in the source, the places where the code of a run may block."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import areal_x
from tests.imports import parsed

ROOT = Path(areal_x.__file__).parent
# Programs of other processes, and the client that users' programs call: the run waits for them elsewhere.
ELSEWHERE = (
    "agents/client.py",
    "agents/worker.py",
    "runtime/guard.py",
    "agents/program_launcher.py",
    "agents/tools/mcp_worker.py",
    "agents/json_checks/schema_worker.py",
    "engines/fleet/watchdog.py",
    "sandbox/supervisor.py",
    "sandbox/shell.py",
)
METHODS = {"wait", "wait_for", "result", "acquire", "recv", "recv_bytes", "accept", "communicate", "flock", "select", "barrier"}
METHODS |= {"sleep", "urlopen"}
NO_WAIT = ("asyncio.timeout(", "asyncio.timeout_at(")  # limits


@dataclass(frozen=True)
class Place:
    """A call that may block. file: below areal_x. function: with the enclosing classes and functions."""

    file: str
    function: str
    expression: str

    def __str__(self) -> str:
        return f"{self.file} {self.function}: {self.expression}"


@cache
def sources() -> dict[str, ast.Module]:
    files = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob("*.py"))}
    return {
        name: parsed(path.read_text(encoding="utf-8"))
        for name, path in files.items()
        if name not in ELSEWHERE and not name.startswith("simulation/")
    }


def unnamed() -> set[Place]:
    """Everything that may block outside the body of a `with waiting(…)`."""
    trees = sources()
    coroutines = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}
    return {place for name, tree in trees.items() for place in _in(tree, name, "", coroutines)}


def names() -> dict[str, list[str]]:
    """The names of all waits, with {} for their variable parts, and the files that use each."""
    found: dict[str, list[str]] = {}
    for file, tree in sources().items():
        for node in ast.walk(tree):
            if file != "waits.py" and isinstance(node, ast.Call) and called(node.func) == "waiting":
                found.setdefault(template(node.args[1]), []).append(file)
    return found


def template(what: ast.expr) -> str:
    if isinstance(what, ast.Constant) and isinstance(what.value, str):
        return what.value
    assert isinstance(what, ast.JoinedStr), f"a wait must be named by a literal: {ast.unparse(what)}"
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in what.values)


def called(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def plain(function: ast.expr) -> str:
    """The called expression without the arguments of inner calls."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call):
        return f"{plain(function.value.func)}().{function.attr}"
    return ast.unparse(function)


def _in(node: ast.AST, file: str, function: str, coroutines: set[str]) -> Iterator[Place]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}" if function else node.name
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.With | ast.AsyncWith):
        waits = [item.context_expr for item in node.items]
        if any(isinstance(wait, ast.Call) and called(wait.func) == "waiting" for wait in waits):
            children = [inner for child in node.body for inner in _functions_in(child)]  # called later
        elif isinstance(node, ast.AsyncWith):
            for wait in map(ast.unparse, waits):
                if not wait.startswith(NO_WAIT):
                    yield Place(file, function, f"async with {wait.partition('(')[0]}")
    elif isinstance(node, ast.AsyncFor):
        yield Place(file, function, f"async for {ast.unparse(node.iter)}")
    elif isinstance(node, ast.Await):
        ours = isinstance(node.value, ast.Call) and called(node.value.func) in coroutines
        if not ours or ast.unparse(node.value).startswith("asyncio."):
            what = node.value.func if isinstance(node.value, ast.Call) else node.value
            yield Place(file, function, f"await {plain(what)}")
        children = list(ast.iter_child_nodes(node.value))  # the call itself was reported
    elif isinstance(node, ast.Call) and _blocks(node):
        yield Place(file, function, f"{plain(node.func)}()")
    for child in children:
        yield from _in(child, file, function, coroutines)


def _blocks(call: ast.Call) -> bool:
    name, text = called(call.func), ast.unparse(call.func)
    if not isinstance(call.func, ast.Attribute):
        return name in ("urlopen", "select", "sleep", "wait")
    if name == "get" or name == "join":  # of a queue, of a thread or process: a mapping's or a text's takes an argument
        return not call.args and text != "self.join"
    return name in METHODS or (text.startswith("subprocess.") and name in ("run", "call", "check_call", "check_output"))


def _functions_in(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node]
    return [inner for child in ast.iter_child_nodes(node) for inner in _functions_in(child)]
