"""transformers on the work of benchmarks/update.py: one sequence after the other, gradients accumulated.

    python hf_sft.py MODEL_DIRECTORY SEQUENCES.json

The model's own attention (SDPA), no recomputation in the backward pass, torch's fastest AdamW here (fused).
"""

from wire import Channel, Steps

channel = Channel()

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402


def main(directory: str, sequences: str) -> None:
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    batch = [torch.tensor([tokens]) for tokens in json.loads(Path(sequences).read_text())]
    count = sum(tokens.shape[1] - 1 for tokens in batch)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    loss = torch.zeros(())
    steps = Steps(channel, details=lambda: {"loss": loss.item(), "versions": versions})
    while steps.begin():
        loss = torch.zeros(())
        for tokens in batch:
            logits = model(tokens, use_cache=False).logits[0, :-1]
            part = torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="sum") / count
            part.backward()
            loss += part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
