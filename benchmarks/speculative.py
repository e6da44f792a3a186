"""Speculative decoding by the embedded samplers, compared with none on the same requests.

    python benchmarks/speculative.py --backend jax
    python benchmarks/speculative.py --backend torch

Claim: the tokens are the same as without guesses, which is asserted; what they cost or save on a CPU is in the table.

The policy is a Qwen3 of 11M random parameters in fp32, of which the next token depends mostly on the newest one: at temperature
0.2 its answers go round, as a text that copies does, which prompt lookup finds; at temperature 1 little repeats. Its last six
layers change little, so its first two are a draft model that is mostly right; how a trained draft does is not measured here.
The requests are 8 prompts of 24 tokens with long-tailed lengths, 24 to 192 new tokens (`long tail`), and the two longest of
them alone (`last two`), as the end of every batch is.

Method: one process; all samplers compiled and warmed up, then alternating, `--rounds` times each. The table shows the median,
minimum and maximum over rounds of the tokens per second over those without guesses in the same round, the same of CPU time,
accepted tokens per pass and sequence, and the accepted share of the guessed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.sampler import Sampler, SlotRequest
from areal_x.protocols.speculation import NOTHING, Guesses, Speculation
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.testing.models import write_model

SLOTS, CONTEXT, PROMPT, LONGEST = 8, 224, 24, 192
LAYERS, OF_DRAFT = 8, 2
ADDED = (0.3, 0.05)  # how much layers add, of a random model's: those that the draft has, and the others
SHAPE = {"hidden_size": 384, "intermediate_size": 768, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64}


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as made:
        policy, draft = write_models(Path(made), args.scale)
        trainer = create_trainer(args.backend, TrainerConfig(model=ModelConfig(path=str(policy)), frozen=True))
        kinds = {
            "none": NOTHING,
            "ngram": Speculation(method="ngram", tokens=args.tokens),
            "draft": Speculation(method="draft", tokens=args.tokens, draft=str(draft)),
        }
        samplers = {}
        for name, speculation in kinds.items():
            samplers[name] = trainer.sampler(SLOTS, CONTEXT, speculation)
            samplers[name].load(trainer.snapshot())
        results = []
        for temperature in (0.2, 1.0):
            cases = {"long tail": requests(temperature), "last two": requests(temperature)[-2:]}
            for case, asked in cases.items():
                results += measure(samplers, asked, case, temperature, args.rounds)
    show(results)
    print(json.dumps({"benchmark": "speculative", "backend": args.backend, "rounds": args.rounds, "results": results}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="jax", choices=("jax", "torch"))
    parser.add_argument("--tokens", type=int, default=4, help="speculation.tokens")
    parser.add_argument("--scale", type=int, default=1, help="of the width and the number of heads; 4: 166M")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def write_models(directory: Path, scale: int) -> tuple[Path, Path]:
    """Returns the directories of the policy and of its first layers."""
    shape = {name: size if name == "head_dim" else size * scale for name, size in SHAPE.items()}
    policy = write_model(directory / "policy", num_hidden_layers=LAYERS, **shape)
    draft = write_model(directory / "draft", num_hidden_layers=OF_DRAFT, **shape)
    tensors = load_file(policy / "model.safetensors")
    for name, x in tensors.items():
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        if layer >= 0 and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] = x * np.float32(ADDED[layer >= OF_DRAFT])
    save_file(tensors, policy / "model.safetensors", {"format": "pt"})
    first = {name: tensors[name] for name in load_file(draft / "model.safetensors")}
    save_file(first, draft / "model.safetensors", {"format": "pt"})
    return policy, draft


def requests(temperature: float) -> list[SlotRequest]:
    rng = np.random.default_rng(0)
    lengths = np.sort(np.minimum(24 + rng.pareto(1.2, SLOTS) * 32, LONGEST).astype(int))
    lengths[-2:] = LONGEST
    prompts = rng.integers(2, 40, (SLOTS, PROMPT)).astype(np.int32)
    return [
        SlotRequest(slot, prompts[slot], 0, SamplingParams(max_tokens=int(n), temperature=temperature), slot)
        for slot, n in enumerate(lengths)
    ]


def sample(sampler: Sampler, asked: list[SlotRequest]) -> tuple[float, float, dict[int, list[int]], Guesses]:
    """Returns seconds, seconds of CPU, the tokens of each slot, and what was guessed."""
    found: dict[int, list[int]] = {r.slot: [] for r in asked}
    guesses, wall, cpu = Guesses(), time.perf_counter(), time.process_time()
    sampler.fill(asked)
    while (decoded := sampler.decode(64, SLOTS)).counts.any():
        guesses += decoded.guesses
        for slot, tokens in found.items():
            tokens += decoded.tokens[slot, : decoded.counts[slot]].tolist()
    return time.perf_counter() - wall, time.process_time() - cpu, found, guesses


def measure(
    samplers: dict[str, Sampler], asked: list[SlotRequest], case: str, temperature: float, rounds: int
) -> list[dict[str, Any]]:
    expected = sample(samplers["none"], asked)[2]
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in samplers}
    counted, rate = {}, []
    for number in range(rounds + 1):  # the first one warms up
        plain = (0.0, 0.0)
        for name, sampler in samplers.items():
            wall, cpu, tokens, counted[name] = sample(sampler, asked)
            same = np.mean([tokens[slot] == expected[slot] for slot in tokens])
            assert same == 1, f"{name} sampled other tokens in {1 - same:.0%} of the sequences"
            if name == "none":
                plain = wall, cpu
                rate += [sum(map(len, tokens.values())) / wall] * (number > 0)
            elif number:
                ratios[name].append((plain[0] / wall, plain[1] / cpu))
    return [
        {
            "case": case,
            "temperature": temperature,
            "name": name,
            "speed": statistics.median(r for r, _ in both),
            "min": min(r for r, _ in both),
            "max": max(r for r, _ in both),
            "cpu": statistics.median(r for _, r in both),
            "plain_tokens_per_second": statistics.median(rate),
            **counted[name].metrics,
        }
        for name, both in ratios.items()
        if both
    ]


def show(results: list[dict[str, Any]]) -> None:
    print("| requests | temperature | guesses | speed | CPU time | accepted per pass | accepted share |")
    print("|---|---|---|---|---|---|---|")
    for r in results:
        per_pass, share = (r.get(f"speculation/accepted_{x}", 0.0) for x in ("per_pass", "share"))
        speed = f"{r['speed']:.2f} ({r['min']:.2f} to {r['max']:.2f})"
        print(f"| {r['case']} | {r['temperature']} | {r['name']} | {speed} | {r['cpu']:.2f} | {per_pass:.2f} | {share:.2f} |")


if __name__ == "__main__":
    main()
