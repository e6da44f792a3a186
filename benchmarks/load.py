"""Memory that a process needs to read a model, beyond its own part of it, in units of the model's largest tensor.

    python -m benchmarks.load jax
    python -m benchmarks.load torch
    python -m benchmarks.load torch --processes 2

Claim: at most three times the largest tensor beyond the parameters' own memory, because a checkpoint is read one tensor at a
time to its destination. A Qwen3 of random weights is written once; other processes read it and record their peak memory.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from areal_x.hf import model_dir
from areal_x.testing.models import write_model
from areal_x.trainer import MeshConfig

SIZES = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 24, "head_dim": 64, "vocab_size": 48_000}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "tie_word_embeddings": True}


class Peak(threading.Thread):
    """Peak bytes of this process while it read, minus those before: private memory, without the pages of mapped files, which
    the system reclaims when it needs them. On Linux.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.before = self.most = self.now()

    @staticmethod
    def now() -> int:
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    def run(self) -> None:
        while not self.done.wait(0.0005):
            self.most = max(self.most, self.now())

    def stop(self) -> int:
        self.done.set()
        self.join()
        return max(self.most, self.now()) - self.before


def read_with_jax(directory: Path, processes: int) -> tuple[int, int]:
    """Peak bytes of the process while it read the model, minus those before; and the bytes of its parameters."""
    import jax

    from areal_x_jax.architecture import read_architecture
    from areal_x_jax.sharding import make_partitioner
    from areal_x_jax.weights import from_tensors

    shape, layout = read_architecture(model_dir.read_config(directory)), make_partitioner(MeshConfig())
    jax.block_until_ready(jax.numpy.ones((64, 64)) @ jax.numpy.ones((64, 64)))
    peak = Peak()
    peak.start()
    params = jax.block_until_ready(from_tensors(shape, model_dir.read_tensors(directory), str(directory), layout))
    return peak.stop(), sum(x.nbytes for x in jax.tree.leaves(params))


def read_with_torch(directory: Path, processes: int) -> tuple[int, int]:
    """The same for this one of several processes that share the model."""
    import torch

    from areal_x_torch import loading
    from areal_x_torch.dtensors import local
    from areal_x_torch.processes import join
    from areal_x_torch.sharding import make_mesh, shard_model

    joined = join(processes) if processes > 1 else None
    device = torch.device("cpu")
    mesh = make_mesh(MeshConfig(fsdp=processes, processes=processes), device)
    torch.ones(64, 64) @ torch.ones(64, 64)
    peak = Peak()
    peak.start()
    built = loading.build(directory, "policy")
    shard_model(built, mesh, torch.float32, device)
    loading.fill(built, directory)
    most = peak.stop()
    if joined is not None:
        joined.broadcast(b"read")  # the first ends the others with it
    return most, sum(local(x).nbytes for x in built.parameters())


READ = {"jax": read_with_jax, "torch": read_with_torch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=READ)
    parser.add_argument("--processes", type=int, default=1, help="with torch")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)  # for the reading processes
    args = parser.parse_args()
    if args.directory:
        print(json.dumps(READ[args.backend](args.directory, args.processes)))
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = write_model(Path(folder) / "model", **SIZES, **HEADS)
        largest = max(x.nbytes for _, x in model_dir.read_tensors(directory))
        command = [sys.executable, "-m", "benchmarks.load", args.backend, "--processes", str(args.processes)]
        said = subprocess.run([*command, "--directory", str(directory)], check=True, capture_output=True, text=True).stdout
    print(
        "| parameters of a process | largest tensor | beyond them while they are read | in largest tensors |\n|---|---|---|---|"
    )
    for peak, own in (json.loads(line) for line in said.splitlines() if line.startswith("[")):
        mega = " | ".join(f"{x / 1e6:,.0f} MB" for x in (own, largest, peak - own))
        print(f"| {mega} | {(peak - own) / largest:.2f} |")


if __name__ == "__main__":
    main()
