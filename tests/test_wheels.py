"""The three wheels, in an environment of their own outside the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution, distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECTS = {"areal_x": ".", "areal_x_jax": "backends/jax", "areal_x_torch": "backends/torch"}
VARIABLES = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AREAL", "VIRTUAL_ENV"))}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, env=VARIABLES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Built as `make wheels` does, from a copy of the tracked files, so that nothing that an earlier build left is in them.

    Without `build`, pip builds them. Neither downloads: both use the setuptools of this environment.
    """
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    by_build = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", dist]
    by_pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", dist]
    for project in PROJECTS.values():
        run(*(by_build if find_spec("build") else by_pip), source / project, cwd=source)
    found = {file.name.split("-")[0]: file for file in dist.glob("*.whl")}
    assert found.keys() == PROJECTS.keys()
    return found


def needed(installed: Iterable[Distribution]) -> dict[str, Distribution]:
    """The distributions of this environment that the given ones need, directly or not, by name."""
    found: dict[str, Distribution] = {}
    todo = [(d, "") for d in installed]
    while todo:
        parent, extra = todo.pop()
        for requirement in map(Requirement, parent.requires or ()):
            name = requirement.name.lower().replace("_", "-")
            if name.startswith("areal-x") or not (requirement.marker is None or requirement.marker.evaluate({"extra": extra})):
                continue
            if name not in found:
                found[name] = distribution(name)
                todo += [(found[name], of) for of in ("", *requirement.extras)]
    return found


@pytest.fixture(scope="module")
def environment(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with the core's wheel, the JAX backend's, and what their metadata asks for, and nothing else.

    Their dependencies are links to the packages of this environment, in place of a download of half a gigabyte.
    """
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, wheels["areal_x"], wheels["areal_x_jax"], cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    for dependency in needed(distributions(path=[str(packages)])).values():
        for top in {file.parts[0] for file in dependency.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(dependency.locate_file(top))))
    return folder


def test_a_wheel_holds_its_package_and_no_other(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        files = zipfile.ZipFile(wheel).namelist()
        assert {file.split("/")[0].removesuffix("-0.1.0.dist-info") for file in files} == {name}
        sources = ROOT / PROJECTS[name] / name
        packaged = {file for file in files if file.endswith(".py") and "/_examples/" not in file}
        assert packaged == {str(file.relative_to(sources.parent)) for file in sources.rglob("*.py")}
    assert "areal_x/py.typed" in zipfile.ZipFile(wheels["areal_x"]).namelist()


def test_the_core_has_the_files_of_its_page(wheels: dict[str, Path]) -> None:
    static = {f"areal_x/lab/static/{file.name}" for file in (ROOT / "areal_x" / "lab" / "static").iterdir()}
    assert static - set(zipfile.ZipFile(wheels["areal_x"]).namelist()) == set()


def test_the_core_s_wheel_holds_the_examples(wheels: dict[str, Path]) -> None:
    names = zipfile.ZipFile(wheels["areal_x"]).namelist()
    packaged = {name.removeprefix("areal_x/_examples/") for name in names if "/_examples/" in name}
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "examples", cwd=ROOT).splitlines()
    assert packaged == {name.removeprefix("examples/") for name in tracked if (ROOT / name).is_file()}


def test_an_example_trains_where_only_wheels_are_installed(environment: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    pytest.importorskip("jax")
    console, python = environment / "bin" / "areal-x", environment / "bin" / "python"
    where = run(python, "-c", "import areal_x, areal_x_jax; print(areal_x.__file__, areal_x_jax.__file__)", cwd=tmp_path)
    assert all(Path(file).is_relative_to(environment) for file in where.split())
    assert run(console, "--version", cwd=tmp_path).strip() == "0.1.0"

    told = run(console, "example", "arithmetic", cwd=tmp_path)
    assert "next: areal-x train examples/arithmetic/FILE.gin" in told
    file = "examples/arithmetic/grpo.gin"
    model = ["-b", f"model.path = '{tiny_model_dir}'"]
    assert "train.steps = 50" in run(console, "train", file, "--dry-run", *model, cwd=tmp_path)
    assert run(python, "-m", "areal_x", "train", "--help", cwd=tmp_path).startswith("usage: python -m areal_x train ")

    small = {"train.steps": 2, "train.groups_per_step": 2, "train.group_size": 2, "train.held_out": (), "embedded.slots": 4}
    bindings = [part for name, value in small.items() for part in ("-b", f"{name} = {value!r}")]
    assert "step 2/2" in run(console, "train", file, *model, *bindings, cwd=tmp_path)
    assert (tmp_path / "runs" / "arithmetic-grpo-1" / "checkpoints" / "2").is_dir()
