"""What an Ascend NPU gains, as ratios: the fused attention against torch's own, a training step with each and with state on the
host, and weights from device to device against files.

    python benchmarks/npu.py                           # on a machine with two NPUs or more
    python benchmarks/npu.py --device cpu --model tiny --tokens 512 --row-length 128 --megabytes 8    # anywhere

It has not run on an NPU: no number in this repository is of one. `--device cpu` shows that the script runs, on one kernel.

Attention: one flat row of `--tokens` tokens in sequences of 100 to 1,000 tokens, 16 heads of 128 that share 4 key-value heads
(2 heads of 32 for the tiny model), forward and backward, with and without a window of 256.
A step: a clipped policy update on packed rows with AdamW, on a random model of this shape; with `model.attention` "npu" and
"sdpa", and with `trainer.offload`.
The transfer: `--megabytes` of tensors, by a broadcast of torch.distributed between two processes (HCCL between two NPUs, gloo
on a CPU), and through a file in shared memory: copied to the host, written, read, and copied to the device.

Each time is the least of `--rounds`, measured alternately after a round that warms up. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from areal_x.algorithms import losses
from areal_x.algorithms.weighting import token_mean
from areal_x.batching.packing import pack
from areal_x.trainer import ModelConfig, TrainerConfig, create_trainer
from areal_x.types import Batch, Trajectory
from areal_x_torch import attention, processes
from areal_x_torch.device import compute_dtype, find_device
from areal_x_torch.segments import Segments

SHARED_MEMORY = Path("/dev/shm")
COMMON = {"model_type": "qwen3", "num_key_value_heads": 4, "tie_word_embeddings": True, "max_position_embeddings": 32768}
MODELS: dict[str, dict[str, Any]] = {
    "0.6B": COMMON
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128}
    | {"num_key_value_heads": 8, "vocab_size": 151936},
    "tiny": COMMON
    | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
    | {"vocab_size": 512},
}
WINDOW = 256
CHUNK_MEGABYTES = 256  # of one broadcast
Measured = dict[str, float]


def settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def least_seconds(works: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> Measured:
    seconds = dict.fromkeys(works, np.inf)
    for turn in range(rounds + 1):
        for name, work in works.items():
            settle(device)
            begun = time.perf_counter()
            work()
            settle(device)
            if turn:
                seconds[name] = min(seconds[name], time.perf_counter() - begun)
    return seconds


def kernels(device: torch.device) -> list[str]:
    return ["npu", "sdpa"] if device.type == "npu" else ["sdpa"]


def lengths_of(tokens: int) -> tuple[int, ...]:
    """Lengths of sequences that fill a row."""
    drawn = np.random.default_rng(0).integers(100, 1001, tokens // 100 + 1)
    ends = np.minimum(np.cumsum(drawn), tokens)
    return tuple(int(x) for x in np.diff(ends, prepend=0) if x)


def of_attention(tokens: int, tiny: bool, rounds: int, device: torch.device) -> Measured:
    """Seconds of each kernel, forward and backward."""
    heads, kv_heads, width = (2, 1, 32) if tiny else (16, 4, 128)
    dtype, lengths = compute_dtype("auto", device), lengths_of(tokens)
    random = torch.Generator().manual_seed(0)
    shapes = [(1, n, tokens, width) for n in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, generator=random).to(device, dtype).requires_grad_() for shape in shapes]

    def work(kernel: str, window: int | None) -> None:
        segments = Segments.of(lengths, attention.choose(kernel, device, dtype), device)
        attended, _ = attention.attend(None, *inputs, None, segments=segments, sliding_window=window)
        torch.autograd.grad(attended.float().sum(), inputs)

    ways = [(kernel, window) for window in (None, WINDOW) for kernel in kernels(device)]
    works = {f"attention{f' in a window of {window}' if window else ''}, {kernel}": (kernel, window) for kernel, window in ways}
    return least_seconds({name: partial(work, *of) for name, of in works.items()}, rounds, device)


def batch_of(tokens: int, row_length: int, vocabulary: int) -> Batch:
    rng, made = np.random.default_rng(1), []
    for length in lengths_of(tokens):
        length = min(length, row_length)
        tokens_of, split = rng.integers(0, vocabulary, length).astype(np.int32), max(1, length // 4)
        logprobs, versions = -rng.exponential(2.0, length - split), np.zeros(length - split)
        made.append(Trajectory.from_completion(tokens_of[:split], tokens_of[split:], logprobs, versions, 1.0))
    batch = pack(made, row_length).batch
    return batch.replace(
        weights=np.asarray(token_mean(batch.mask, batch.segment_ids), np.float32),
        advantages=rng.normal(size=batch.mask.shape).astype(np.float32),
        proximal_logp=batch.behavior_logp,
    )


def of_steps(name: str, tokens: int, row_length: int, rounds: int, device: torch.device, directory: Path) -> Measured:
    """Seconds of a training step. One trainer at a time is in memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    shape = AutoConfig.for_model(**MODELS[name])
    AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16, trust_remote_code=False).save_pretrained(directory)
    batch, seconds = batch_of(tokens, row_length, MODELS[name]["vocab_size"]), {}
    ways = [(kernel, False) for kernel in kernels(device)]
    if device.type != "cpu":  # where everything is on the host
        ways.append(("npu", True))
    for kernel, offload in ways:
        config = TrainerConfig(ModelConfig(str(directory), attention=kernel), row_length=row_length, offload=offload)
        trainer = create_trainer("torch", config)
        name_of = f"a step, {kernel}{' with state on the host' if offload else ''}"
        seconds |= least_seconds({name_of: partial(trainer.update, batch, losses.ppo_clip)}, rounds, device)
        del trainer
    return seconds


def in_chunks(megabytes: int, device: torch.device) -> list[torch.Tensor]:
    sizes = [CHUNK_MEGABYTES] * (megabytes // CHUNK_MEGABYTES) + [megabytes % CHUNK_MEGABYTES]
    return [torch.ones(size * 2**20, dtype=torch.uint8, device=device) for size in sizes if size]


def broadcast(megabytes: int, rounds: int) -> None:
    """One of two processes: prints the seconds of its broadcasts."""
    processes.join(2)
    device = find_device()
    chunks = in_chunks(megabytes, device)

    def work() -> None:
        for chunk in chunks:
            dist.broadcast(chunk, 0)

    print(json.dumps(least_seconds({"transfer, a broadcast": work}, rounds, device)), flush=True)
    dist.destroy_process_group()


def of_transfer(megabytes: int, rounds: int, device: torch.device) -> Measured:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    words = [sys.executable, __file__, "--broadcast", str(megabytes), "--rounds", str(rounds)]
    pair = [
        subprocess.Popen(words, env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank}, stdout=subprocess.PIPE, text=True)
        for rank in ("0", "1")
    ]
    outputs = [each.communicate()[0] for each in pair]
    if any(each.returncode for each in pair):
        raise SystemExit("the two processes of the transfer failed")
    chunks = in_chunks(megabytes, device)

    def through_a_file() -> None:
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
            for i, chunk in enumerate(chunks):
                chunk.cpu().numpy().tofile(Path(folder) / str(i))
            for i in range(len(chunks)):
                torch.from_numpy(np.fromfile(Path(folder) / str(i), np.uint8)).to(device)

    return {**json.loads(outputs[0].splitlines()[-1]), **least_seconds({"transfer, a file": through_a_file}, rounds, device)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="npu", help="what torch must find: npu, or cpu to try the script")
    parser.add_argument("--model", default="0.6B", choices=MODELS)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--row-length", type=int, default=2048)
    parser.add_argument("--megabytes", type=int, default=1200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--broadcast", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.broadcast is not None:
        broadcast(args.broadcast, args.rounds)
        return
    device = find_device()
    if device.type != args.device:
        raise SystemExit(f"torch finds {device.type}, not {args.device}: install torch-npu (docs/ascend.md), or set --device")
    with tempfile.TemporaryDirectory() as directory:
        seconds = of_attention(args.tokens, args.model == "tiny", args.rounds, device)
        seconds |= of_steps(args.model, args.tokens, args.row_length, args.rounds, device, Path(directory))
    seconds |= of_transfer(args.megabytes, args.rounds, device)
    print(f"{device.type}, torch {torch.__version__}, {args.model}, {args.tokens:,} tokens, {args.megabytes:,} MiB\n")
    print("| | s | of the first of its kind |\n|---|---|---|")
    for name, found in seconds.items():
        first = next(x for other, x in seconds.items() if other.partition(",")[0] == name.partition(",")[0])
        print(f"| {name} | {found:.4g} | {found / first:.2f} |")
    print(json.dumps({"device": device.type, **seconds}))


if __name__ == "__main__":
    main()
