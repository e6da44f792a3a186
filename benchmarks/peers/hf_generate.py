"""Hugging Face generate on the requests of benchmarks/sampler.py.

    python hf_generate.py MODEL_DIRECTORY REQUESTS.json

A batch runs to the longest of its sequences, because generate has one length for all; only the requested tokens are counted.
`batches` in a command divides the requests, sorted by length, into that many batches. Padded left, sampled at temperature 1
with no other option enabled, without log-probabilities.
"""

from wire import Channel

channel = Channel()

import json  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402


def main(directory: str, requests_file: str) -> None:
    cases = json.loads(Path(requests_file).read_text())
    transformers.utils.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, padding_side="left", trust_remote_code=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False).eval()
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": tokenizer.pad_token_id}
    channel.send(versions={"transformers": transformers.__version__, "torch": torch.__version__})
    for command in channel.commands():
        case = cases[command["case"]]
        prompts, wanted = case["prompts"], np.asarray(case["new_tokens"])
        began = time.perf_counter()
        for indices in np.array_split(np.argsort(wanted), command.get("batches", 1)):
            batch = tokenizer([prompts[i] for i in indices], padding=True, return_tensors="pt", return_token_type_ids=False)
            longest = int(wanted[indices].max())
            with torch.inference_mode():
                output = model.generate(**batch, max_new_tokens=longest, **sampling)
            assert output.shape == (len(indices), batch["input_ids"].shape[1] + longest)
        channel.send(seconds=time.perf_counter() - began, tokens=int(wanted.sum()))


if __name__ == "__main__":
    main(*sys.argv[1:])
