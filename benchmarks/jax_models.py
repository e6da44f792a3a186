"""How far the JAX decoder is from transformers, for every architecture it knows, as a markdown table.

    python -m benchmarks.jax_models

Claim: logits within 1e-4 and the gradients of one loss within 1e-3 of the largest of their tensor, in fp32, for random tiny
models that have every feature somewhere.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.jax.conftest import MODELS, MORE, write_random
from tests.jax.test_model import gradient_deviation, logit_deviation


def main() -> None:
    print(
        "| model | logits, largest difference | gradients, largest difference relative to the tensor's largest |\n|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as directory:
        for name in MODELS | MORE:
            model = write_random(name, Path(directory) / name)
            print(f"| {name} | {logit_deviation(model):.0e} | {gradient_deviation(model):.0e} |", flush=True)


if __name__ == "__main__":
    main()
