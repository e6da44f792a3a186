"""How far the JAX decoder is from transformers, for every architecture it knows, as a markdown table.

    python -m benchmarks.jax_models

Claim: logits within 1e-4 and the gradients of one loss within 1e-3 of the largest of their tensor, in fp32, for random tiny
models that have every feature somewhere; of those that see, over packed rows of which some hold images.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.jax.conftest import MODELS, MORE, SEEING, write_random
from tests.jax.test_images import image_gradient_deviation, image_logit_deviation
from tests.jax.test_model import gradient_deviation, logit_deviation


def main() -> None:
    print(
        "| model | logits, largest difference | gradients, largest difference relative to the tensor's largest |\n|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as directory:
        for name in MODELS | MORE | SEEING:
            model = write_random(name, Path(directory) / name)
            logits, gradients = (
                (image_logit_deviation, image_gradient_deviation) if name in SEEING else (logit_deviation, gradient_deviation)
            )
            print(f"| {name} | {logits(model):.0e} | {gradients(model):.0e} |", flush=True)


if __name__ == "__main__":
    main()
