"""The house: which room may know which. A new room or a new arrow needs a line here.

A room is a package of `areal_x` or a file at its top. It may import the rooms that its line names, and what those may
import. So no arrow runs upwards and no cycle can form.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module

import pytest

from areal_x.config.reader import registered, short_name
from tests.imports import arrows, entry_points, imports_of, modules, parsed

GROUND = ("types", "errors", "runtime")

# Lines from the ground upwards. Of each room: those right below it that it may know, besides the ground, which all may.
ROOMS: dict[str, tuple[str, ...]] = {
    "types": (),
    "errors": (),
    "runtime": (),
    "config": (),
    "run": (),
    "tasks": (),
    "protocols": (),
    "algorithms": (),
    "sandbox": (),
    "rewards": ("tasks", "sandbox"),
    "hf": ("protocols",),
    "batching": ("algorithms", "protocols"),
    "rollout": ("protocols", "run", "tasks"),
    "engines": ("protocols", "hf", "batching"),
    "workflows": ("protocols", "hf", "rewards", "batching", "rollout"),
    "cluster": ("protocols", "hf"),
    "jobs": ("cluster",),
    "shards": ("rollout", "engines", "cluster"),
    "monitor": ("algorithms", "batching", "rollout", "run"),
    "evaluation": ("monitor",),
    "settings": ("config", "engines", "workflows", "evaluation", "cluster"),
    "models": ("settings",),
    "build": ("models", "shards"),
    "experiment": ("build",),
    "agents": ("workflows", "rewards", "rollout", "engines", "sandbox"),
    "simulation": ("rollout", "batching", "monitor"),
    "lab": ("config", "rollout", "batching", "monitor"),
    "top": ("lab",),
    "report": ("lab",),
    "testing": ("simulation", "hf"),
    "preflight": ("settings", "workflows"),
    "train": ("config", "run", "cluster"),
    "check": ("train", "preflight"),
    "replay": ("train", "experiment"),
    "evaluate": ("train", "experiment"),
    "rollout_command": ("evaluate",),
    "synthesize": ("train", "experiment", "agents"),
    "export": ("hf", "run"),
    "push": ("export",),
    "plan": ("train", "simulation", "engines"),
    "launch": ("train", "jobs", "engines"),
    "serve": ("train", "experiment", "agents"),
    "tinker": ("train", "experiment"),
    "agents_command": ("agents",),
    "example": (),
    "convert": (),
    "__main__": (
        *("train", "check", "replay", "export", "plan", "launch", "serve", "tinker", "lab", "top", "report"),
        *("example", "convert", "push", "evaluate", "rollout_command", "agents_command", "synthesize"),
    ),
    "areal_x_jax": ("protocols", "hf"),
    "areal_x_torch": ("protocols", "hf"),
}

# Helpers of other rooms that were written for the backends.
FOR_BACKENDS = {"areal_x.engines.kept_bits", "areal_x.engines.lanes", "areal_x.engines.speculation"}

# Modules that offer names of other rooms under one address, and import them when a name is used.
SURFACES = {"areal_x", "areal_x.trainer", "areal_x.rewards.shaping"}


def room_of(module: str) -> str:
    package, _, rest = module.partition(".")
    return rest.partition(".")[0] if package == "areal_x" else package


@cache
def allowed(room: str) -> frozenset[str]:
    """The rooms that a room may import: itself, the ground, those of its line and what they may import."""
    return frozenset({room, *GROUND}.union(*(allowed(below) for below in ROOMS[room])))


def test_every_module_lies_in_a_room():
    assert {room_of(m) for m in modules() if m not in SURFACES} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_knows_only_those_that_its_line_names(room):
    own = [(a, b) for a, b in arrows() if a not in SURFACES and room_of(a) == room and b not in SURFACES]
    wrong = sorted((a, b) for a, b in own if room_of(b) not in allowed(room))
    if room.startswith("areal_x_"):
        wrong = [(a, b) for a, b in wrong if b not in FOR_BACKENDS]
    assert wrong == []


def test_nothing_inside_imports_through_a_surface():
    assert sorted((a, b) for a, b in arrows() if b in SURFACES and a not in {*SURFACES, "areal_x.__main__"}) == []


def test_a_line_names_only_rooms_above_it():
    lines = list(ROOMS)
    assert all(lines.index(below) < lines.index(room) for room, names in ROOMS.items() for below in names)


@pytest.mark.parametrize("name, module", sorted(entry_points("areal_x.configurables").items()))
def test_a_configurable_is_registered_by_the_module_that_its_entry_point_names(name, module):
    import_module(module)
    found = [c for s, c in registered().items() if short_name(s) == name]
    assert [c.wrapped.__module__ for c in found] == [module]


def test_every_configurable_of_the_package_has_an_entry_point():
    for module in modules():
        if module.startswith("areal_x.") and "gin.configurable" in modules()[module].read_text(encoding="utf-8"):
            import_module(module)
    ours = {short_name(s) for s, c in registered().items() if c.wrapped.__module__.startswith("areal_x.")}
    assert ours == set(entry_points("areal_x.configurables"))


def test_a_source_is_parsed_though_a_collection_meanwhile_would_parse_too():
    class Garbage:
        def __init__(self):
            self.itself = self

        def __del__(self):
            ast.parse("x = 1")

    for path in modules().values():
        garbage = [Garbage() for _ in range(20)]
        garbage.clear()
        assert parsed(path.read_text(encoding="utf-8")).body is not None


def test_imports_are_found_wherever_they_stand(tmp_path):
    file = tmp_path / "written.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "from areal_x import train\n"
        "if TYPE_CHECKING:\n    from areal_x.rollout import queue\n"
        "def f():\n    import areal_x.types\n"
        "MODULE = 'areal_x.export:main'\nWORDS = 'see areal_x.serve'\n"
    )
    found = set(imports_of("areal_x.written", file))
    assert found == {"areal_x.train", "areal_x.rollout.queue", "areal_x.types", "areal_x.export"}
