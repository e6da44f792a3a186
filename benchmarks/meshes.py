"""Deviation of ten updates on a mesh of eight devices from those on one, as a markdown table.

    python -m benchmarks.meshes

Claim: losses within 1e-5, relative, for every mesh, in fp32, on JAX's host devices; the step is compiled once.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from tests.jax.meshes import learn, learn_on
from tests.jax.test_sharding import MESHES
from tests.models import write_random


def main() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    print("| model | mesh | loss | gradient norm | log-probabilities | parameters on a device |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for name, meshes in MESHES.items():
            model = write_random(name, Path(directory) / name)
            alone = learn(model, {})
            for mesh, found in zip(meshes, learn_on(model, meshes), strict=True):
                loss, norm = (np.abs(np.array(found[x]) / np.array(alone[x]) - 1).max() for x in ("loss", "grad_norm"))
                logp = np.abs(np.array(found["logp"]) - np.array(alone["logp"])).max()
                assert found["programs"] == 1
                axes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
                print(f"| {name} | {axes} | {loss:.0e} | {norm:.0e} | {logp:.0e} | {found['share']:.0%} |", flush=True)


if __name__ == "__main__":
    main()
