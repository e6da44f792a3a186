"""Memory of the torch trainer's head over a large vocabulary, forward and backward, besides its inputs and gradients.

    python benchmarks/torch_memory.py

Claim: for 8,192 tokens of Qwen2.5-0.5B (896 features) over a vocabulary of 152,000, log-probabilities and their gradients take
at most 400 MB, with or without entropies; all logits at once take 15 GB.

Method: a process of its own computes them once and reports its peak resident memory (on an accelerator: torch's peak
allocation) minus that before and the bytes of both gradients. It takes minutes on two cores.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

import torch

from areal_x_torch import head
from areal_x_torch.device import find_device
from areal_x_torch.model import Head

FEATURES = 896


def peak_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.accelerator.max_memory_allocated())


def megabytes(tokens: int, vocabulary: int, entropy: bool) -> float:
    device = find_device()
    hidden = torch.randn(tokens, FEATURES, device=device, requires_grad=True)
    weight = torch.randn(vocabulary, FEATURES, device=device, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,), device=device)
    head.logprobs(hidden[:8], Head(weight[:800], None), targets[:8] % 800, 1.0)  # the libraries' own memory
    before = peak_bytes(device)
    logp, of_all, _ = head.logprobs(hidden, Head(weight, None), targets, 1.0, entropy=entropy)
    (logp if of_all is None else logp + of_all).sum().backward()
    gradients = 4 * (hidden.numel() + weight.numel())
    return (peak_bytes(device) - before - gradients) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--in-process", choices=("logp", "entropy"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.in_process:
        print(megabytes(args.tokens, args.vocabulary, args.in_process == "entropy"))
        return
    print(f"| MB of the head, {args.tokens:,} × {args.vocabulary:,} × {FEATURES} | logp | logp and entropy |\n|---|---|---|")
    sizes = ["--tokens", str(args.tokens), "--vocabulary", str(args.vocabulary)]
    found = [
        float(subprocess.check_output([sys.executable, __file__, *sizes, "--in-process", what], text=True))
        for what in ("logp", "entropy")
    ]
    print("| fp32 | " + " | ".join(f"{x:,.0f}" for x in found) + " |")


if __name__ == "__main__":
    main()
