"""Prints constraints.txt for the environment that runs this: `make lock`.

Every version that is installed, and, for JAX, the one that newer Pythons take: Python 3.11 ends at
JAX 0.10.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = (
    "# Every version that `make demo`, `make test` and `make docs` install; written by `make lock`."
    " Python 3.11 ends at JAX 0.10; later Pythons take 0.11."
)
NEWER = "3.12"
DIFFERENT = ("jax", "jaxlib")  # packages whose newest version needs NEWER
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


def newer_versions() -> dict[str, str]:
    """The versions of DIFFERENT that pip resolves for Python NEWER."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        resolve = ("install", "--dry-run", "--ignore-installed", "--only-binary=:all:")
        target = ("--target", folder, "--python-version", NEWER, "--report", str(report))
        subprocess.run([*PIP, *resolve, *target, "jax>=0.10,<0.12"], check=True)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {item["name"]: item["version"] for item in found if item["name"] in DIFFERENT}


def main() -> None:
    freeze = subprocess.run(
        [*PIP, "freeze", "--exclude-editable"], check=True, stdout=subprocess.PIPE, text=True
    )
    newer = newer_versions()
    print(HEADER)
    for line in sorted(freeze.stdout.splitlines(), key=str.lower):
        name, _, version = line.partition("==")
        version = version.partition("+")[0]  # the index that is used decides the build, as +cpu
        if newer.get(name, version) == version:
            print(f"{name}=={version}")
        else:
            print(f'{name}=={version}; python_version < "{NEWER}"')
            print(f'{name}=={newer[name]}; python_version >= "{NEWER}"')


if __name__ == "__main__":
    main()
