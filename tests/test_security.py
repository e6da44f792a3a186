"""Nothing that is received is run: no pickle, no eval, no shell, no socket on every interface, in all code of the project."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.imports import parsed

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("areal_x", "backends", "benchmarks", "docs", "examples")
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
RUNS = {"eval", "exec", "compile", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load"}
EVERYWHERE = {"0.0.0.0", "::"}
ALLOWED = {
    # What the ring sends to its own child through a socket pair; what comes back is JSON.
    "areal_x/rewards/pool.py": {"cloudpickle"},
    "areal_x/rewards/worker.py": {"cloudpickle"},
    # Code of a model, in the process that was made for it: what the sandbox is for.
    "areal_x/sandbox/program.py": {"compile", "exec"},
    "areal_x/rewards/code/inside.py": {"compile", "eval", "exec"},
    # That file's own code, compiled for programs of the sandbox, which read nothing else so.
    "areal_x/rewards/code/judge.py": {"compile", "marshal"},
}


def risky(source: str) -> Iterator[str]:
    """The places in a source file that could run or reveal what they should not."""
    for node in ast.walk(parsed(source)):
        match node:
            case ast.Import(names):
                yield from (name.name for name in names if name.name.split(".")[0] in PICKLES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLES:
                yield module
            case ast.Constant(value=str(text)) if text in EVERYWHERE:
                yield text
            case ast.Call(function, _, keywords):
                name = ast.unparse(function)
                if name in RUNS:
                    yield name
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
                if given.get("shell", "False") != "False":
                    yield "shell"
                if given.get("allow_pickle", "False") != "False":
                    yield "allow_pickle"
                if name.endswith((".from_pretrained", ".from_config")) and given.get("trust_remote_code") != "False":
                    yield "trust_remote_code"  # else a model may run its own Python files
                if name == "torch.load" and given.get("weights_only") != "True":
                    yield "torch.load"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_code_of_the_project_unpickles_evaluates_or_listens_everywhere(folder):
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if extra := set(risky(path.read_text())) - ALLOWED.get(name, set()):
            found[name] = extra
    assert not found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "pickle"),
        ("from cloudpickle import loads", "cloudpickle"),
        ("eval(x)", "eval"),
        ("exec(x)", "exec"),
        ("subprocess.run(x, shell=True)", "shell"),
        ("subprocess.run(x, shell=wanted)", "shell"),
        ("os.system(x)", "os.system"),
        ("np.load(x, allow_pickle=True)", "allow_pickle"),
        ("torch.load(x)", "torch.load"),
        ("serve(host='0.0.0.0')", "0.0.0.0"),
        ("AutoConfig.from_pretrained(x)", "trust_remote_code"),
        ("kind.from_config(x, trust_remote_code=True)", "trust_remote_code"),
    ],
)
def test_the_scan_sees_what_it_looks_for(source, found):
    assert list(risky(source)) == [found]


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "torch.compile(x)", "re.compile(x)", "np.load(x, allow_pickle=False)", "torch.load(x, weights_only=True)"],
)
def test_the_scan_leaves_alone_what_only_looks_alike(source):
    assert not list(risky(source))


def test_what_is_allowed_is_still_used():
    assert {name: set(risky((ROOT / name).read_text())) for name in ALLOWED} == ALLOWED
