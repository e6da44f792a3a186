"""Runs one request of areal_x.agents.package_programs in the Python of a benchmark's package.

    python package_main.py PROGRAM

PROGRAM is a file with two functions: listed(request) returns the ids of its tasks, and play(request)
plays one of them and returns an object. Standard input is the request, a JSON object; the result is
what stands after the last MARK in standard output. Nothing of this project is imported.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

MARK = "areal_x result: "


def main(program: str) -> None:
    here = Path(__file__).resolve().parent
    # whose modules have names, such as `client` and `tools`, that the package's own may have too
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != here]
    request = json.load(sys.stdin)
    functions = runpy.run_path(program)
    result = played(functions, request) if "id" in request else functions["listed"](request)
    print(f"\n{MARK}{json.dumps(result)}")


def played(functions: dict[str, Any], request: dict[str, Any]) -> Any:
    """Returns the program's result, or {"error": why there is none}."""
    try:
        return functions["play"](request)
    except Exception as error:  # the package's, whatever it is
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}


if __name__ == "__main__":
    main(sys.argv[1])
