"""Dependence of a step on the packing of its batch, for every loss, as a markdown table.

    python -m benchmarks.invariance [--backend jax|torch]       # both, where both are installed

Claim: at most 1e-6 relative in the loss and 1e-5 in the gradient norm, in float32, through the whole trainer.

Method: one batch of 64 sequences of a random model with 0.1M parameters, in 1, 2, 4 and 8 micro-batches, each time with another
order of sequences and rows and the third time in rows of twice the length; on one device and, with JAX, on four. A deviation is
the largest from the result of one micro-batch on one device, relative to it.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path

from tests.packing_invariance import ALL, deviations, measure, measure_on_four_devices, model_directories


def columns(backend: str, directories: tuple[Path, Path, Path]) -> dict[str, dict[str, tuple[float, float]]]:
    """Deviations of loss and gradient norm for each loss, by configuration."""
    alone = measure(backend, directories)
    tried = {backend: alone}
    if backend == "jax":
        tried["jax, 4 devices"] = measure_on_four_devices(directories)
    return {what: {name: deviations(found[name], alone[name][0]) for name in ALL} for what, found in tried.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["jax", "torch"])
    chosen = parser.parse_args().backend
    backends = [chosen] if chosen else [b for b in ("jax", "torch") if importlib.util.find_spec(f"areal_x_{b}")]
    with tempfile.TemporaryDirectory() as directory:
        directories = model_directories(Path(directory))
        table = {what: column for backend in backends for what, column in columns(backend, directories).items()}
    print("| function |" + "".join(f" {what}: loss | gradient norm |" for what in table))
    print("|---" * (1 + 2 * len(table)) + "|")
    for name in ALL:
        cells = [f"{x:.0e}" if x else "0" for column in table.values() for x in column[name]]
        print(f"| `{name}` | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
