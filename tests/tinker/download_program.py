"""A program of the unmodified client and cookbook that trains, downloads what it trained and computes with it by
transformers and PEFT: argv is the base's directory, which is its name too, and a directory; prints JSON."""

import json
import sys
from pathlib import Path

import numpy as np
import tinker
import torch
from peft import PeftModel
from tinker import types
from tinker_cookbook import weights
from transformers import AutoModelForCausalLM

base, place = sys.argv[1], Path(sys.argv[2])
tokens = list(range(2, 12))
out = {}
service = tinker.ServiceClient()
client = service.create_lora_training_client(base_model=base, rank=4, seed=1)
client = client.result() if hasattr(client, "result") else client
target = types.TensorData.from_numpy(np.asarray(tokens[1:]))
ones = types.TensorData.from_numpy(np.ones(9, np.float32))
datum = types.Datum(
    model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": target, "weights": ones}
)


def logprobs(model):
    with torch.no_grad():
        found = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return found[range(9), tokens[1:]].tolist()


for _ in range(3):
    client.forward_backward([datum], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=3e-2)).result()
out["served"] = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
paths = {
    "external": client.save_weights_external("one", ttl_seconds=7200).result().path,
    "training": client.save_state("two").result().path,
    "sampler": client.save_weights_for_sampler("three").result().path,
}
for kind in ("external", "training"):  # the second is encrypted on its way
    weights.download(tinker_path=paths[kind], output_dir=str(place / kind))
    out[f"files of {kind}"] = sorted(x.name for x in (place / kind).iterdir())
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(place / kind))
    out[kind] = logprobs(model)
out["base"] = logprobs(AutoModelForCausalLM.from_pretrained(base))
weights.build_hf_model(base_model=base, adapter_path=str(place / "external"), output_path=str(place / "merged"))
out["merged"] = logprobs(AutoModelForCausalLM.from_pretrained(str(place / "merged")))
rest = tinker.RestClient()
out["config"] = json.loads((place / "external" / "adapter_config.json").read_text())["base_model_name_or_path"]
listed = {x.checkpoint_type: x for x in rest.list_checkpoints(client.model_id).result().checkpoints}
out["types"] = sorted(listed)
out["expiry"] = (listed["external"].expires_at - listed["external"].time).total_seconds()
rest.publish_checkpoint_from_tinker_path(paths["sampler"]).result()
out["public"] = [x.public for x in rest.list_checkpoints(client.model_id).result().checkpoints if x.public]
rest.unpublish_checkpoint_from_tinker_path(paths["sampler"]).result()
rest.set_checkpoint_ttl_from_tinker_path(paths["sampler"], 3600).result()
try:
    rest.get_external_weights_urls("tinker://" + "0" * 32 + ":train:0/external_weights/x").result()
except Exception as error:
    out["unknown"] = type(error).__name__
try:
    client.save_weights_external("bad", age_encryption_recipients=["age1nonsense"]).result()
except Exception as error:
    out["recipient"] = f"{type(error).__name__}: {error}"
print("RESULT " + json.dumps(out))
