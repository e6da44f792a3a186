"""Tunix's sampler on the requests of benchmarks/sampler.py, run with the python of an environment that has Tunix.

    python tunix_sampler.py MODEL_DIRECTORY REQUESTS.json

A batch runs to the longest of its sequences, because the sampler has one length for all; only the requested tokens are counted.
`batches` in a command divides the requests, sorted by length, into that many batches; each shape compiles once. The cache is
exactly as long as a batch needs, top-p is off, no log-probabilities are requested.
"""

from wire import Channel

channel = Channel()

import json  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import transformers  # noqa: E402
from tunix.generate.sampler import CacheConfig, Sampler  # noqa: E402
from tunix_model import VERSIONS, load  # noqa: E402


def main(directory: str, requests_file: str) -> None:
    cases = json.loads(Path(requests_file).read_text())
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        model = load(directory, mesh)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    shape = model.config
    samplers: dict[int, Sampler] = {}  # by cache length: a sampler compiles for one

    def sampler(length: int) -> Sampler:
        if length not in samplers:
            samplers[length] = Sampler(
                model, tokenizer, CacheConfig(length, shape.num_layers, shape.num_kv_heads, shape.head_dim)
            )
        return samplers[length]

    channel.send(versions=VERSIONS)
    for seed, command in enumerate(channel.commands()):
        case = cases[command["case"]]
        prompts, wanted = case["prompts"], np.asarray(case["new_tokens"])
        longest_prompt = max(map(len, prompts))
        began = time.perf_counter()
        for indices in np.array_split(np.argsort(wanted), command.get("batches", 1)):
            longest = int(wanted[indices].max())
            output = sampler(longest_prompt + longest)(
                [prompts[i] for i in indices],
                max_generation_steps=longest,
                max_prompt_length=longest_prompt,
                temperature=1.0,
                top_p=1.0,
                seed=seed,
            )
            assert all(len(tokens) == longest for tokens in output.tokens)
        channel.send(seconds=time.perf_counter() - began, tokens=int(wanted.sum()))


if __name__ == "__main__":
    main(*sys.argv[1:])
