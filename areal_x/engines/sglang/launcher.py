"""Starts an SGLang server with the interpreter that has SGLang, which need not have AReaL-X: it runs
this file by its path, so only the standard library, SGLang and what it needs are imported.

    AREAL_X_SGLANG_KEY=… PYTHON launcher.py --model-path …       # as `sglang serve`, without keys

The server's keys come from the environment, as every user of the machine can read a command line.
Both are given always: without an admin key the endpoints that replace weights accept the other, and
without any they are open.

The server's own processes import this file again, each at its start, which is how what is changed in
SGLang reaches them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

KEY = "AREAL_X_SGLANG_KEY"
PACKAGE = Path(__file__).parents[2]


class Secret(str):
    """A key. SGLang logs its settings, which have it, at every start."""

    def __repr__(self) -> str:
        return "'(secret)'"


class AfterImport:
    """Calls a function with a module as soon as the process has imported it (a finder): most of the
    server's processes never import most of SGLang."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self._name, self._function = name, function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_call(module: ModuleType) -> None:
            run(module)
            self._function(module)

        spec.loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec


def own_package() -> None:
    """Makes `areal_x` importable, and nothing else: the packages beside it are another environment's."""
    spec = spec_from_file_location(
        PACKAGE.name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = sys.modules[PACKAGE.name] = module_from_spec(spec)
    spec.loader.exec_module(package)


def change_sglang() -> None:
    """Changes what SGLang does in this process, before it is imported."""
    own_package()
    from areal_x.engines.sglang import cpu_sleep, proof, truncation

    updater = "sglang.srt.managers.scheduler_components.weight_updater"
    sys.meta_path[:0] = [
        AfterImport(updater, cpu_sleep.install),
        AfterImport("sglang.srt.layers.sampler", truncation.install),
        AfterImport("sglang.srt.utils.weight_checker", proof.install),
    ]


def main() -> None:
    key = Secret(os.environ.pop(KEY))
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    settings = prepare_server_args(sys.argv[1:])
    settings.api_key = settings.admin_api_key = key
    run_server(settings)


if __name__ in ("__main__", "__mp_main__"):
    change_sglang()
if __name__ == "__main__":
    main()
