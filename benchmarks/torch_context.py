"""Memory of a long sequence with torch when its tokens are split over processes: the activations that a step keeps for its
gradient.

    python -m benchmarks.torch_context --processes 2

Claim: each of two processes keeps at most 0.55 of the memory of one, each of four 0.3. (0.5 and 0.25 would hold without the
loss's own activations and repeated keys.)

Method: one update of the benchmarks' model on one sequence. On the first process, every storage that autograd keeps for the
backward pass and that was computed with a gradient counts once.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from areal_x.algorithms import losses
from areal_x.batching.packing import pack
from areal_x.trainer import MeshConfig, ModelConfig, TrainerConfig
from areal_x.types import Trajectory
from areal_x_torch import processes
from areal_x_torch.trainer import Trainer
from benchmarks.model import VOCABULARY, write_model


def kept_bytes(trainer: Trainer, tokens: int) -> int:
    text = np.random.default_rng(0).integers(0, VOCABULARY, tokens).astype(np.int32)
    zeros = np.zeros(tokens - 1, np.float32)
    batch = pack([Trajectory.from_completion(text[:1], text[1:], zeros, np.zeros(tokens - 1, np.int32))], tokens).batch
    batch = batch.replace(proximal_logp=batch.behavior_logp, advantages=np.ones(batch.shape, np.float32))
    batch = batch.replace(weights=batch.mask / np.float32(tokens))
    kept: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.grad_fn is not None:
            kept[x.untyped_storage().data_ptr()] = x  # kept alive until counted, so that its address is not reused
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        trainer.update(batch, losses.ppo_clip)
    return sum(x.untyped_storage().nbytes() for x in kept.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    mesh = MeshConfig(context=args.processes, processes=args.processes)
    joined = processes.join(args.processes) if args.processes > 1 else None
    with TemporaryDirectory() as folder:
        trainer = Trainer(TrainerConfig(model=ModelConfig(str(write_model(Path(folder)))), mesh=mesh))
        found = kept_bytes(trainer, args.tokens)
    if joined is None or joined.rank == 0:
        print(f"{args.processes} processes: {found / 1e6:.1f} MB of {args.tokens:,} tokens")
    if joined is not None:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
