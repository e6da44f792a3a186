"""Check that conversations become exactly the generated tokens, over many of them and three families' chat templates.

    python benchmarks/token_truth.py                       # 10,000 conversations
    python benchmarks/token_truth.py --conversations 300 --spoken 100

Claim: no prompt differs from its family's format, and every generated token is trained on once, with its own log-probability
and version.

The work: random agents talk with a policy whose tokens are not those that a tokenizer would choose for the same text, and
sometimes are arbitrary. They continue, backtrack and retry, call tools, and return earlier messages in the spellings of
different clients. A prompt after a reply must begin with the recorded tokens and continue as the format requires; if the format
renders earlier turns differently (Qwen3 omits reasoning), it must be the format's text of the whole. The formats are defined
independently in tests/agents/chat/conversations.py, which does not use our rendering. The last column shows the reason: the
number of calls whose prompt text would give other tokens if it were tokenized again.

`--spoken` conversations of each family are then held with a real model of random weights, through the embedded engine, and a
trainer recomputes every log-probability: the largest difference is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.agents.chat.conversations import FAMILIES
from tests.agents.chat.talking import talked
from tests.agents.chat.truth import truth_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--conversations", type=int, default=10_000, help="of all families together")
    parser.add_argument("--spoken", type=int, default=1000, help="with a model, of each family")
    parser.add_argument("--backend", default="torch", help="of the model: torch or jax")
    parser.add_argument("--turns", type=int, default=8, help="completions in each")
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{'family':10}{'conversations':>15}{'calls':>9}{'tokens':>10}{'held':>9}{'rewritten':>11}{'wrong':>7}{'anew':>9}")
    wrong, began = 0, time.perf_counter()
    for number, family in enumerate(FAMILIES):
        seeds = range(options.first_seed + number, options.first_seed + options.conversations, len(FAMILIES))
        found = [asyncio.run(truth_of(family, seed, options.turns)) for seed in seeds]
        complaints = [complaint for truth in found for complaint in truth.complaints]
        wrong += len(complaints)
        sums = [sum(getattr(truth, name) for truth in found) for name in ("calls", "tokens", "kept", "rewritten")]
        anew = sum(truth.different for truth in found)
        print(
            f"{family:10}{len(found):15,}{sums[0]:9,}{sums[1]:10,}{sums[2]:9,}{sums[3]:11,}{len(complaints):7,}{anew:9,}",
            flush=True,
        )
        for complaint in complaints[:3]:
            print(f"  {complaint}")
    print(f"{time.perf_counter() - began:.0f} s\n")
    print(f"{'family':10}{'spoken':>15}{'lines':>9}{'tokens':>10}{'mean gap':>12}{'largest':>12}")
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as made:
            lines, recorded, computed = talked(family, options.backend, Path(made), range(options.spoken))
        gaps = np.abs(recorded - computed)
        wrong += int((gaps > 1e-4).sum())
        numbers = f"{options.spoken:15,}{len(lines):9,}{len(gaps):10,}{gaps.mean():12.1e}{gaps.max():12.1e}"
        print(f"{family:10}{numbers}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
