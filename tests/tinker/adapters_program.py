"""A program of the unmodified `tinker` client with several adapters, at once and each alone, run by its own Python: argv is the
base model's name; prints JSON."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tinker
from tinker import types

base = sys.argv[1]
service = tinker.ServiceClient()
RANKS = (2, 4, 8, 16)


def train(rank):
    tokens = np.random.default_rng(rank).integers(2, 40, 10).tolist()

    def tensor(x, dtype="float32"):
        return types.TensorData(data=np.asarray(x), dtype=dtype, shape=[9])

    def datum(**inputs):
        of_loss = {"target_tokens": tensor(tokens[1:], "int64"), **{name: tensor(np.float32(x)) for name, x in inputs.items()}}
        return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=of_loss)

    client = service.create_lora_training_client(base_model=base, rank=rank, seed=rank)
    client = client.result() if hasattr(client, "result") else client
    losses = []
    for _ in range(3):
        forward = client.forward_backward([datum(weights=np.ones(9))], "cross_entropy")
        more = client.forward_backward([datum(logprobs=-np.ones(9) * 4, advantages=np.linspace(-1, 1, 9))], "ppo")
        step = client.optim_step(types.AdamParams(learning_rate=0.01 / rank))
        losses += [x.result().metrics["loss:sum"] for x in (forward, more)]
        step.result()
    sampler = client.save_weights_and_get_sampling_client()
    sampler = sampler.result() if hasattr(sampler, "result") else sampler
    params = types.SamplingParams(max_tokens=8, seed=3, stop=[])
    found = sampler.sample(types.ModelInput.from_ints(tokens), 1, params).result().sequences[0]
    return {"losses": losses, "tokens": list(found.tokens), "logprobs": list(map(float, found.logprobs))}


with ThreadPoolExecutor(len(RANKS)) as pool:
    at_once = list(pool.map(train, RANKS))
print("RESULT " + json.dumps({"at_once": at_once, "alone": [train(rank) for rank in RANKS]}))
