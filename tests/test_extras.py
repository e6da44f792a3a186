"""Dependencies: the core's, the extras', and what a run without extras imports."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import environment_with
from tests.imports import parsed
from tests.thorough import thorough

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
PAGE = (ROOT / "docs" / "installation.md").read_text()
ACCELERATORS = ("vllm", "cuda", "flash", "ascend")
# Modules whose distribution has another name.
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "gin": "gin-config",
    "PIL": "pillow",
    "reasoning_gym": "reasoning-gym",
    "torch_npu": "torch-npu",
}
# Packages that come with another one, or with a backend; the core imports them lazily.
BROUGHT = {
    "tokenizers": "transformers",
    "IPython": "jupyterlab",
    "httpx2": "mcp",
    "mcp_types": "mcp",
    "referencing": "jsonschema",
    "huggingface_hub": "transformers",
    "ml_dtypes": "each backend",
    "jax": "areal-x-jax",
    "torch": "areal-x-torch",
    "openai": "verifiers",
    "verifiers": "its own command, in docs/tools.md",
    "inspect_ai": "its own environment, in docs/tools.md",
    "minisweagent": "its own environment, in docs/agents.md",
    "openenv": "its own command, in docs/tools.md",
    "httpx": "its own command, in docs/tools.md",
    "tau2": "its own command, in docs/tools.md",
    "litellm": "tau2",
    "loguru": "tau2",
    "daytona": "its own command, in docs/sandbox.md",
    "e2b": "its own command, in docs/sandbox.md",
    "cryptography": "its own command, in docs/tinker.md",
    "vllm_ascend": "the release of vLLM that it is made for, in docs/ascend.md",
    "sglang": "its own environment, in docs/sglang.md",
}
ROOMS_OF_EXTRAS = ("agents", "lab", "testing", "tinker")
LEFT_OUT = ("starlette", "uvicorn", "pydantic", "jsonschema")


def distributions(requirements: list[str]) -> set[str]:
    """Names of distributions, those of the extras that are named among them included."""
    found = set()
    for requirement in map(Requirement, requirements):
        of_extras = [
            name for extra in requirement.extras if requirement.name == "areal-x" for name in distributions(EXTRAS[extra])
        ]
        found |= {*of_extras} or {requirement.name}
    return found


CORE = distributions(PROJECT["dependencies"])


def third_party(file: Path) -> dict[str, bool]:
    """The packages that a module imports, and True for those that importing it imports."""
    found: dict[str, bool] = {}

    def visit(node: ast.AST, at_import: bool) -> None:
        for child in ast.iter_child_nodes(node):
            names = []
            if isinstance(child, ast.Import):
                names = [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
                names = [child.module]
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names:
                if not top.startswith("areal_x"):
                    found[top] = found.get(top, False) or at_import
            is_typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            visit(child, at_import and not is_typing and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(parsed(file.read_text()), True)
    return found


def distribution_of(module: str) -> str:
    return DISTRIBUTIONS.get(module, module).replace("_", "-")


def test_the_core_imports_only_its_own_dependencies_and_every_other_package_is_an_extras() -> None:
    of_extras = distributions([name for names in EXTRAS.values() for name in names])
    problems = []
    for file in sorted((ROOT / "areal_x").rglob("*.py")):
        room = file.relative_to(ROOT / "areal_x").parts[0]
        for module, at_import in third_party(file).items():
            distribution = distribution_of(module)
            if distribution in CORE:
                continue
            if at_import and room not in ROOMS_OF_EXTRAS:
                problems.append(f"{file.relative_to(ROOT)} needs {module} to be imported")
            elif distribution not in of_extras and module not in BROUGHT:
                problems.append(f"{file.relative_to(ROOT)} imports {module}, which no extra brings")
    assert problems == []


def test_the_core_does_not_depend_on_what_serves_agents() -> None:
    assert set(EXTRAS["agents"]) == {"jsonschema", "pydantic>=2", "starlette", "uvicorn"}
    assert CORE.isdisjoint(LEFT_OUT)


def test_each_extra_is_documented_with_its_command() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| `(pip install [^`]+)` \|$", PAGE, re.MULTILINE))
    assert rows.keys() == EXTRAS.keys()
    for name, command in rows.items():
        assert f"[{name}]'" in command, name


def test_all_is_every_extra_for_users_but_the_accelerators() -> None:
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.extras == EXTRAS.keys() - {"all", "docs", "test", *ACCELERATORS}


def resolve(folder: Path, *requirements: str) -> str | None:
    """pip's objection to installing them without their dependencies, which names one; None if it would."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--no-deps",
        "--ignore-installed",
        "--quiet",
        "--retries",
        "0",
    ]
    # flash-attn has no wheels: its metadata is built, with the torch that is installed, and nothing of CUDA
    command += ["--no-build-isolation", "--report", str(folder / "report.json"), *requirements]
    environment = {**os.environ, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE", "PIP_CONSTRAINT": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return None if done.returncode == 0 else done.stderr


@thorough
def test_the_packages_of_accelerators_are_on_the_index(tmp_path: Path) -> None:
    requirements = [name for extra in ACCELERATORS for name in EXTRAS[extra]]
    if find_spec("torch") is None:
        requirements = [name for name in requirements if "flash" not in name]
    objection = resolve(tmp_path, *requirements)
    if objection is not None and resolve(tmp_path, "gin-config") is not None:
        pytest.skip("pip reaches no package index here")
    assert objection is None


def test_a_run_without_extras_imports_none_of_their_packages(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The demo's run, shortened, in a process of its own, that lists its modules at the end."""
    pytest.importorskip("jax")
    bindings = {
        "model.path": str(tiny_model_dir),
        "train.steps": 1,
        "train.groups_per_step": 2,
        "train.group_size": 2,
        "train.held_out": (),
        "train.runs": str(tmp_path),
        "embedded.slots": 4,
    }
    arguments = [part for name, value in bindings.items() for part in ("-b", f"{name} = {value!r}")]
    code = (
        "import sys; from areal_x.__main__ import run\n"
        "status = run(['train', 'examples/arithmetic/grpo.gin', *sys.argv[1:]])\n"
        "print(status, sorted(sys.modules))"
    )
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment_with(1), capture_output=True, text=True, check=False)
    status, modules = done.stdout.splitlines()[-1].split(" ", 1)
    assert status == "0", done.stderr
    imported = ast.literal_eval(modules)
    assert {name.partition(".")[0] for name in imported}.isdisjoint(LEFT_OUT)
    assert "areal_x.engines.embedded" in imported
    assert "areal_x.engines.vllm.client" not in imported
