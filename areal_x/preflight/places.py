"""Whether the folders that a run writes to can be written, and have room for it."""

from __future__ import annotations

import shutil
from pathlib import Path

from areal_x.engines.vllm.staging import default_parent
from areal_x.errors import ConfigError
from areal_x.experiment import Experiment
from areal_x.preflight.model import Model
from areal_x.protocols.trainer_config import bytes_per_parameter
from areal_x.run.run_dir import existing, writable

JOURNAL_BYTES = 6  # of a token, as JournalConfig says
SAVED_MOMENTS = {"adamw": 8, "adafactor": 1, "muon": 8}  # bytes of a parameter, in fp32, at most


def run_directory(experiment: Experiment) -> str:
    """Raises: ConfigError for a place that cannot be written, and for a run that is there
    already."""
    runs = Path(experiment.runs)
    writable("train.runs", runs)
    run = runs / experiment.name if experiment.name else None
    if run is not None and run.is_dir() and any(run.iterdir()):
        raise ConfigError(
            "train.name",
            experiment.name,
            f"another, as {run} exists and is not overwritten (or use --resume)",
        )
    return f"{run or runs} can be written"


def room(experiment: Experiment, model: Model) -> str:
    """Raises: ConfigError where checkpoints and journal will not fit on the disk."""
    runs = Path(experiment.runs)
    needed, how = (
        checkpoint_bytes(experiment, model),
        f"a checkpoint of {gb(checkpoint_bytes(experiment, model))}",
    )
    count = experiment.keep_checkpoints + 1  # the oldest goes when the newest is whole
    journal = journal_bytes(experiment)
    free = shutil.disk_usage(existing(runs)).free
    said = (
        f"{count} times {how} and a journal of at most {gb(journal)}; {gb(free)} are free in {runs}"
    )
    if needed * count + journal > free:
        wanted = f"smaller, or train.runs on a larger disk: the run writes {said}"
        raise ConfigError("train.keep_checkpoints", experiment.keep_checkpoints, wanted)
    return said


def staging(experiment: Experiment, model: Model, on_cpu: bool) -> str:
    """The folder that weights pass through. Raises: ConfigError where it cannot be written or has
    no room for them."""
    parent = Path(experiment.vllm.staging) if experiment.vllm.staging else default_parent()
    writable("vllm.staging", parent)
    free = shutil.disk_usage(existing(parent)).free
    if experiment.trainer.lora.rank:
        return f"{parent} can be written; {gb(free)} are free"
    needed = model.parameters * bytes_per_parameter(experiment.trainer, on_cpu)
    if needed > free:
        wanted = f"a folder with {gb(needed)}, the size of the weights: {parent} has {gb(free)}"
        raise ConfigError("vllm.staging", experiment.vllm.staging, wanted)
    return f"{parent} takes the weights, {gb(needed)}; {gb(free)} are free"


def checkpoint_bytes(experiment: Experiment, model: Model) -> int:
    """fp32 weights and the optimizer's moments, of the policy and of a critic; of adapters almost
    nothing."""
    if experiment.trainer.lora.rank:
        return 0
    trained = 2 if "values" in experiment.algorithm.needs else 1
    moments = SAVED_MOMENTS[experiment.trainer.optimizer.name] // (
        2 if experiment.trainer.optimizer.moments == "bf16" else 1
    )
    return trained * model.parameters * (4 + moments)


def journal_bytes(experiment: Experiment) -> int:
    """At most: each answer as long as a row."""
    steps = min(experiment.steps, experiment.journal.keep_steps or experiment.steps)
    return (
        steps
        * experiment.groups_per_step
        * experiment.group_size
        * experiment.row_length
        * JOURNAL_BYTES
    )


def gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
