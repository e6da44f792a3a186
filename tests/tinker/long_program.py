"""A program of the unmodified `tinker` client that trains, samples and saves for as many steps as argv says, the same
each time: argv is the base model's name and the steps; prints a line a step, and at last JSON."""

import json
import sys

import numpy as np
import tinker
from tinker import types

base, steps = sys.argv[1], int(sys.argv[2])
prompt = list(range(2, 8))
adam = types.AdamParams(learning_rate=1e-3)
service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model=base, rank=4, seed=1)
client = client.result() if hasattr(client, "result") else client


def datum(tokens, **inputs):
    arrays = {name: types.TensorData.from_numpy(np.asarray(x, np.float32)) for name, x in inputs.items()}
    arrays["target_tokens"] = types.TensorData.from_numpy(np.asarray(tokens[1:], np.int64))
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=arrays)


def train(data, loss):
    gradient = client.forward_backward(data, loss)
    step = client.optim_step(adam)
    return gradient.result().metrics["loss:sum"], step.result().metrics["grad_norm"]


seen = []
for step in range(steps):
    random = np.random.default_rng(step)
    data = [datum(random.integers(2, 40, 12).tolist(), weights=np.ones(11)) for _ in range(2)]
    seen.append(train(data, "cross_entropy"))
    if step % 4 == 3:
        sampler = client.save_weights_and_get_sampling_client()
        sampler = sampler.result() if hasattr(sampler, "result") else sampler
        params = types.SamplingParams(max_tokens=6, seed=step, stop=[])
        data = []
        # At once, so that a kill leaves some of them answered, and others to be sampled in other company.
        asked = [sampler.sample(types.ModelInput.from_ints(prompt[:n]), 1, params) for n in (6, 3, 5)]
        for n, answer in zip((6, 3, 5), asked, strict=True):
            (one,) = answer.result().sequences
            tokens, before = list(one.tokens), [0.0] * (n - 1)
            rewards = before + [float(x % 2) - 0.5 for x in tokens]
            data.append(datum(prompt[:n] + tokens, advantages=rewards, logprobs=before + list(one.logprobs)))
            seen.append([tokens, list(one.logprobs)])
        seen.append(train(data, "importance_sampling"))
    if step % 10 == 9:
        client.save_state("now", overwrite=True).result()
    print(f"STEP {step}", flush=True)
print("RESULT " + json.dumps({"seen": seen, "path": client.save_state("end").result().path}))
