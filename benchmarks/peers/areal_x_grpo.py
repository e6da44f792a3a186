"""AReaL-X on the work of benchmarks/step.py: the Experiment that a user runs, with all its usual output.

python areal_x_grpo.py MODEL_DIRECTORY PROMPTS.json BACKEND MAX_STALENESS
"""

from wire import Channel, Steps

channel = Channel()

import importlib.metadata  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

from areal_x.engines.embedded import EmbeddedConfig  # noqa: E402
from areal_x.experiment import Experiment  # noqa: E402
from areal_x.protocols.engine import SamplingParams  # noqa: E402
from areal_x.trainer import ModelConfig, OptimizerConfig, TrainerConfig  # noqa: E402
from areal_x.types import Task  # noqa: E402
from areal_x.workflows.single_turn import SingleTurn  # noqa: E402

GROUPS, GROUP_SIZE, NEW_TOKENS = 8, 8, 64
LONGEST_PROMPT = 20
PHASES = ("wait_seconds", "logprob_seconds", "update_seconds", "publish_seconds")
FOREVER = 1e9  # seconds: this process is stopped while others work, and clocks run on
PACKAGES = {"jax": ("areal-x", "jax"), "torch": ("areal-x", "torch", "transformers")}


def digits(task: Task, text: str) -> float:
    """The benchmark's reward: the share of digits."""
    return sum(c.isdigit() for c in text) / NEW_TOKENS


def main(directory: str, prompts: str, backend: str, max_staleness: str) -> None:
    tasks = [Task(str(i), text) for i, text in enumerate(json.loads(Path(prompts).read_text()))]
    versions = {name: importlib.metadata.version(name) for name in PACKAGES[backend]}
    rows: list[dict[str, float]] = []

    def details() -> dict[str, object]:
        phases = {phase: [row[phase] for row in rows] for phase in PHASES}
        rows.clear()
        return {"phases": phases, "versions": versions}

    with tempfile.TemporaryDirectory() as runs:
        experiment = Experiment(
            dataset=tasks,
            workflow=SingleTurn(
                digits, SamplingParams(max_tokens=NEW_TOKENS), reward_workers=1, reward_timeout_seconds=FOREVER
            ),
            trainer=TrainerConfig(
                model=ModelConfig(directory),
                optimizer=OptimizerConfig(learning_rate=1e-5, weight_decay=0.0),
                precision="fp32",
                # One micro-batch a step, like the peers. XLA is faster with a few rows at once on a CPU.
                micro_batch_rows=GROUPS * GROUP_SIZE if backend == "torch" else 8,
            ),
            embedded=EmbeddedConfig(slots=GROUPS * GROUP_SIZE, context=LONGEST_PROMPT + NEW_TOKENS),
            backend=backend,
            steps=1_000_000_000,
            groups_per_step=GROUPS,
            group_size=GROUP_SIZE,
            max_staleness=int(max_staleness),
            row_length=LONGEST_PROMPT + NEW_TOKENS,
            episode_seconds=FOREVER,
            runs=runs,
        )
        turns = experiment.turns(experiment.open(), message=lambda text: print(text))
        next(turns)  # the initial model's turn: no step
        steps = Steps(channel, details=details)
        while steps.begin():
            rows.append(next(turns).metrics)
        turns.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
