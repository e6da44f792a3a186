"""Memory of a long sequence with torch when its tokens are split over processes: the activations that a step keeps for its
gradient.

    python -m benchmarks.torch_context --processes 2
    python -m benchmarks.torch_context --processes 2 --axis tensor --sequence

Claims: each of two processes keeps at most 0.55 of the memory of one, each of four 0.3. (0.5 and 0.25 would hold without the
loss's own activations and repeated keys.) Of a tensor group of two, each process keeps at most 0.75 with mesh.sequence of what
it keeps without, in bf16.

Method: updates of the benchmarks' model, or of a wider one for tensor groups, on one sequence. On the first process, every
storage that autograd keeps for the backward pass and that was computed with a gradient counts once. The time is the least of
three updates after the first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from areal_x.algorithms import losses
from areal_x.batching.packing import pack
from areal_x.testing.models import QWEN3
from areal_x.trainer import MeshConfig, ModelConfig, TrainerConfig
from areal_x.types import Trajectory
from areal_x_torch import processes
from areal_x_torch.trainer import Trainer
from benchmarks.model import VOCABULARY, write_model

# Of the proportions of Qwen3-0.6B to 8B, whose widths and words two processes divide.
WIDE = {**QWEN3, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 1024, "head_dim": 64}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 4}


def write_wide(directory: Path) -> Path:
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**WIDE), trust_remote_code=False).save_pretrained(directory)
    return directory


def kept_bytes(trainer: Trainer, tokens: int) -> tuple[int, float]:
    """Returns the bytes kept in an update, and the seconds of one."""
    text = np.random.default_rng(0).integers(0, VOCABULARY, tokens).astype(np.int32)
    zeros = np.zeros(tokens - 1, np.float32)
    batch = pack([Trajectory.from_completion(text[:1], text[1:], zeros, np.zeros(tokens - 1, np.int32))], tokens).batch
    batch = batch.replace(proximal_logp=batch.behavior_logp, advantages=np.ones(batch.shape, np.float32))
    batch = batch.replace(weights=batch.mask / np.float32(tokens))
    kept: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.grad_fn is not None:
            own = x._local_tensor if isinstance(x, DTensor) else x
            own = own.wait() if isinstance(own, AsyncCollectiveTensor) else own
            kept[own.untyped_storage().data_ptr()] = own  # kept alive until counted, so that its address is not reused
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        trainer.update(batch, losses.ppo_clip)
    bytes_kept = sum(x.untyped_storage().nbytes() for x in kept.values())
    kept.clear()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        trainer.update(batch, losses.ppo_clip)
        seconds.append(time.perf_counter() - start)
    return bytes_kept, min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--axis", choices=("context", "tensor"), default="context")
    parser.add_argument("--sequence", action="store_true", help="mesh.sequence")
    parser.add_argument("--remat", default="auto", help="trainer.remat")
    parser.add_argument("--precision", default="fp32", help="trainer.precision")
    args = parser.parse_args()
    mesh = MeshConfig(**{args.axis: args.processes}, processes=args.processes, sequence=args.sequence)
    with TemporaryDirectory() as folder:
        # Before processes join: of joined ones transformers has the first alone write.
        model = ModelConfig(str((write_wide if args.axis == "tensor" else write_model)(Path(folder))))
        if args.processes > 1:
            processes.join(args.processes)
        trainer = Trainer(TrainerConfig(model=model, mesh=mesh, remat=args.remat, precision=args.precision))
        found, seconds = kept_bytes(trainer, args.tokens)
    if args.processes == 1 or torch.distributed.get_rank() == 0:
        about = f"{args.processes} processes: {found / 1e6:.1f} MB of {args.tokens:,} tokens, {seconds:.2f} s an update"
        print(about, flush=True)
    if args.processes > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
