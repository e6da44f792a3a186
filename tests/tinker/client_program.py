"""A program of the unmodified `tinker` client, run by its own Python: argv is the base model's name; prints JSON."""

import json
import sys

import numpy as np
import tinker
from tinker import types

base = sys.argv[1]
tokens = list(range(2, 12))


def datum(**inputs):
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def floats(x):
    return types.TensorData(data=np.asarray(x, np.float32), dtype="float32", shape=list(np.shape(x)))


target = types.TensorData(data=np.asarray(tokens[1:]), dtype="int64", shape=[9])
out = {}
service = tinker.ServiceClient()
out["models"] = [m.model_name for m in tinker.RestClient().get_server_capabilities().result().supported_models]
client = service.create_lora_training_client(base_model=base, rank=4, seed=1)
client = client.result() if hasattr(client, "result") else client
out["info"] = [client.get_info().is_lora, client.get_info().lora_rank]
data = [datum(target_tokens=target, weights=floats(np.ones(9)))] * 2
adam = types.AdamParams(learning_rate=1e-2)
out["losses"] = []
for _ in range(3):
    forward = client.forward_backward(data, "cross_entropy")
    step = client.optim_step(adam)
    out["losses"].append(forward.result().metrics["loss:sum"])
    out["step"] = step.result().metrics
first = client.forward(data, "cross_entropy").result()
logprobs = first.loss_fn_outputs[0]["logprobs"].data
samples = datum(target_tokens=target, logprobs=floats(logprobs), advantages=floats(np.linspace(-1, 1, 9)))
for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo"):
    result = client.forward([samples], loss).result()
    out[loss] = result.metrics["loss:sum"]
prompt, sampled = types.PromptProvenanceSpan, types.SampledProvenanceSpan
spanned = samples.with_provenance(
    model_input=[prompt(sequence_id="x", length=4), sampled(sequence_id="x", length=5)],
    loss_fn_inputs=[prompt(sequence_id="x", offset=1, length=3), sampled(sequence_id="x", length=6)],
)
out["stable_reinforce"] = client.forward([spanned], "stable_reinforce").result().metrics["loss:sum"]
out["by_hand"] = -float(np.dot(np.linspace(-1, 1, 9)[3:], np.asarray(logprobs)[3:]))


def custom(data, logprobs):
    import torch

    return -torch.stack([x.sum() for x in logprobs]).sum(), {"mine": 1.0}


result = client.forward_backward_custom(data, custom)
step = client.optim_step(adam)
out["custom"] = result.result().metrics
step.result()
saved = client.save_state("first").result().path
out["saved"] = saved
after = client.forward(data, "cross_entropy").result().metrics["loss:sum"]
again = service.create_training_client_from_state_with_optimizer(saved)
again = again.result() if hasattr(again, "result") else again
out["restored"] = [after, again.forward(data, "cross_entropy").result().metrics["loss:sum"]]

sampler = client.save_weights_and_get_sampling_client()
sampler = sampler.result() if hasattr(sampler, "result") else sampler
params = types.SamplingParams(max_tokens=8, seed=3, stop=[])
found = sampler.sample(types.ModelInput.from_ints(tokens), 2, params, include_prompt_logprobs=True).result()
out["samples"] = [list(x.tokens) for x in found.sequences]
out["sample_logprobs"] = [list(map(float, x.logprobs)) for x in found.sequences]
out["stop"] = [x.stop_reason for x in found.sequences]
out["prompt_logprobs"] = found.prompt_logprobs
out["forward_logprobs"] = client.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
named = types.TensorData(
    data=np.asarray([7, 9]), dtype="int64", shape=[9, 2], sparse_crow_indices=[0] * 8 + [1, 2], sparse_col_indices=[0, 1]
)
asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2}
found = sampler.sample(types.ModelInput.from_ints(tokens), 1, params, target_prompt_logprobs=named, **asked).result()
out["top"] = found.topk_prompt_logprobs
out["named_logprobs"] = found.target_prompt_logprobs.tolist()
out["top_of_samples"] = found.sequences[0].topk_logprobs
whole = types.ModelInput.from_ints(tokens + out["samples"][0])
out["scored"] = sampler.compute_logprobs(whole).result()
path = client.save_weights_for_sampler("kept").result().path
named = service.create_sampling_client(model_path=path)
named = named.result() if hasattr(named, "result") else named
out["named"] = [list(x.tokens) for x in named.sample(types.ModelInput.from_ints(tokens), 2, params).result().sequences]
plain = service.create_sampling_client(base_model=base)
plain = plain.result() if hasattr(plain, "result") else plain
out["plain"] = plain.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
rest = tinker.RestClient()
run = rest.list_training_runs().result().training_runs
out["runs"] = len(run)
own = rest.list_checkpoints(client.model_id).result().checkpoints
out["checkpoints"] = sorted(x.checkpoint_id for x in own)
copied = rest.copy_weights(path, "project").result()
rest.delete_checkpoint_from_tinker_path(path).result()
copy = service.create_sampling_client(model_path=copied)
copy = copy.result() if hasattr(copy, "result") else copy
out["copy"] = [list(x.tokens) for x in copy.sample(types.ModelInput.from_ints(tokens), 2, params).result().sequences]
out["left"] = sorted(x.checkpoint_id for x in rest.list_checkpoints(client.model_id).result().checkpoints)
try:
    client.forward([samples], "ppo", {"beta": 1.0}).result()
except Exception as error:
    out["refused"] = f"{type(error).__name__}: {error}"
print("RESULT " + json.dumps(out))
