"""The public surface: `areal_x` and the namespaces of its extras."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs_pages import ROOT, blocks, pages
from tests.imports import parsed

PACKAGES = ("areal_x", "areal_x.agents", "areal_x.sandbox")
# What documentation and examples may import from: these, and the namespace of the simulation.
PUBLIC = {*PACKAGES, "areal_x.simulation"}


def names_of(package: str) -> dict[str, str]:
    """The module of each name."""
    table = importlib.import_module(package)._NAMES
    return {name: module for module, names in table.items() for name in names.split()}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_package_is_the_object_of_its_module(package: str) -> None:
    offering = importlib.import_module(package)
    for name, module in names_of(package).items():
        assert getattr(offering, name) is getattr(importlib.import_module(module), name), name
        assert name in dir(offering)


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_same_names(package: str) -> None:
    offering = importlib.import_module(package)
    (block,) = [
        node
        for node in parsed(Path(str(offering.__file__)).read_text()).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    assert {a.asname: n.module for n in block.body if isinstance(n, ast.ImportFrom) for a in n.names} == names_of(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_name_hides_a_module(package: str) -> None:
    (folder,) = importlib.import_module(package).__path__
    assert not {path.stem for path in Path(folder).iterdir()} & names_of(package).keys()


def test_a_name_that_is_not_offered_is_no_attribute() -> None:
    import areal_x

    with pytest.raises(AttributeError, match=r"module 'areal_x' has no attribute 'Taks'"):
        areal_x.Taks  # noqa: B018
    from areal_x import trainer  # a module and not a name of the table

    assert trainer.__name__ == "areal_x.trainer"


def test_importing_the_package_loads_python_alone_and_leaves_the_environment() -> None:
    code = (
        "import json, os, sys\n"
        "before, environment = set(sys.modules), dict(os.environ)\n"
        "import areal_x, areal_x.agents, areal_x.sandbox\n"
        "print(json.dumps([sorted(set(sys.modules) - before), dict(os.environ) == environment]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, same_environment = json.loads(done.stdout)
    assert [name for name in loaded if name.split(".")[0] not in {*sys.stdlib_module_names, "areal_x"}] == []
    own = {name for name in loaded if name.startswith("areal_x")}
    assert own == {*PACKAGES, "areal_x.runtime", "areal_x.runtime.lazy"}
    assert same_environment


def imported(source: str) -> set[str]:
    """The modules of areal_x that a program imports from."""
    found: set[str] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] == "areal_x"}


def programs() -> dict[str, str]:
    """Every Python program that a reader of the documentation sees."""
    found = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "examples").rglob("*.py")}
    for page in pages("python"):
        found[page.name] = "\n".join(text for _, text in blocks(page, "python"))
    for file in (ROOT / "colab").glob("*.ipynb"):
        cells = [cell for cell in json.loads(file.read_text())["cells"] if cell["cell_type"] == "code"]
        found[file.name] = re.sub(r"^[%!].*$", "", "\n".join("".join(cell["source"]) for cell in cells), flags=re.MULTILINE)
    return found


def test_documentation_and_examples_use_the_public_names_alone() -> None:
    used = {place: imported(source) - PUBLIC for place, source in programs().items()}
    assert {place: modules for place, modules in used.items() if modules} == {}
