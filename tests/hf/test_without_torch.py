"""What transformers reads without torch, in processes of their own: it decides once whether torch is there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.preflight.test_check import command
from tests.thorough import thorough

ENDS = "import json, sys; from areal_x.hf.without_torch import import_transformers_without_torch\n"


def output(code: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True).stdout


def test_the_command_check_imports_no_torch_with_jax(tiny_model_dir: Path, tmp_path: Path) -> None:
    code = (
        "import os, runpy, sys\n"
        "try: runpy.run_module('areal_x.check', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'TRANSFORMERS_NO_ADVISORY_WARNINGS' in os.environ)"
    )
    lines = output(code, *command("train.backend = 'jax'", model=tiny_model_dir, tmp_path=tmp_path)).splitlines()
    assert any(line.startswith("ok       lengths") for line in lines)
    assert lines[-2:] == ["no problem", "0 False False"]


def test_what_is_imported_already_is_left_alone() -> None:
    code = "import transformers; import_transformers_without_torch(); print(transformers.is_torch_available())"
    assert output(ENDS + code) == "True\n"


@thorough
def test_every_config_of_transformers_has_the_same_defaults_without_torch() -> None:
    code = (
        "from transformers import CONFIG_MAPPING; from areal_x.hf.config_defaults import with_defaults\n"
        "read = {kind: with_defaults({'model_type': kind}) for kind in CONFIG_MAPPING}\n"
        "print('torch' in sys.modules); print(json.dumps(read, default=str, sort_keys=True))"
    )
    imported, with_torch = output("import torch, json, sys\n" + code).splitlines()
    missing, without = output(f"{ENDS}import_transformers_without_torch()\n{code}").splitlines()
    assert (imported, missing) == ("True", "False")
    assert len(without) > 100_000
    assert without == with_torch
