"""TRL's GRPOTrainer on the work of benchmarks/step.py, which runs this file with the python of an environment that has TRL.

    python trl_grpo.py MODEL_DIRECTORY PROMPTS.json

Settings: fp32, Hugging Face generate, no reference model (beta 0), no gradient checkpointing, one micro-batch per step, ratios
from the step's own forward pass (TRL's behaviour if a batch is used once), no logging, no saving.
"""

from wire import Channel, Steps

channel = Channel()

import json  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset, disable_progress_bars  # noqa: E402


class OnCommand(transformers.TrainerCallback):
    """Trains only while the benchmark requests steps."""

    def __init__(self) -> None:
        self.steps = Steps(channel, details=lambda: {"versions": VERSIONS})

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if not self.steps.begin():
            raise SystemExit


def digits(completions: list[str], **kwargs) -> list[float]:
    """The benchmark's reward: the share of digits."""
    return [sum(c.isdigit() for c in text) / 64 for text in completions]


VERSIONS = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}


def main(directory: str, prompts: str) -> None:
    disable_progress_bars()
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as output:
        config = trl.GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=1,
            num_generations=8,
            max_completion_length=64,
            temperature=1.0,
            beta=0.0,
            use_vllm=False,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            max_steps=1_000_000,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            model_init_kwargs={"dtype": "float32"},
        )
        trainer = trl.GRPOTrainer(
            model=directory,
            args=config,
            reward_funcs=digits,
            train_dataset=Dataset.from_list([{"prompt": text} for text in json.loads(Path(prompts).read_text())]),
            processing_class=transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False),
            callbacks=[OnCommand()],
        )
        trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
