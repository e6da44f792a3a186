"""How much more memory than the model itself reading and writing it takes with JAX, in units of its largest tensor.

    python -m benchmarks.jax_load

Claim: at most three times the largest tensor beyond what the parameters take, as a checkpoint is read one tensor at a time to
where it lies. A Qwen3 of random weights is written once; another process reads it and notes the most that it ever had.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import write_model

SIZES = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 24, "head_dim": 64, "vocab_size": 48_000}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": True}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read(directory: Path) -> dict[str, int]:
    """Bytes before, and at most while, the model is read and written again; and of its parameters and its largest tensor."""
    import jax

    from areal_x import model_dir
    from areal_x.trainer import MeshConfig
    from areal_x_jax.layout import make_layout
    from areal_x_jax.shape import shape_of
    from areal_x_jax.weights import from_tensors, to_tensors

    shape, layout = shape_of(model_dir.read_config(directory)), make_layout(MeshConfig())
    jax.block_until_ready(jax.numpy.ones((64, 64)) @ jax.numpy.ones((64, 64)))
    before = peak_bytes()
    params = jax.block_until_ready(from_tensors(shape, model_dir.read_tensors(directory), str(directory), layout))
    loaded = peak_bytes()
    largest = max(tensor.nbytes for _, tensor in to_tensors(shape, params))
    return {
        "beyond": loaded - before - sum(x.nbytes for x in jax.tree.leaves(params)),
        "largest": largest,
        "model": sum(x.nbytes for x in jax.tree.leaves(params)),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model", **SIZES, **HEADS)
        command = [sys.executable, "-m", "benchmarks.jax_load", str(model)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    print("| model | largest tensor | beyond the model while it is read | in largest tensors |\n|---|---|---|---|")
    mega = {name: f"{x / 1e6:,.0f} MB" for name, x in found.items()}
    print(f"| {mega['model']} | {mega['largest']} | {mega['beyond']} | {found['beyond'] / found['largest']:.2f} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(read(Path(sys.argv[1]))))
    else:
        main()
