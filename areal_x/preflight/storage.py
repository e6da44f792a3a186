"""Checks that the directories that a run writes to are writable and have enough space."""

from __future__ import annotations

import shutil
from pathlib import Path

from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.folders import default_parent
from areal_x.errors import ConfigError
from areal_x.preflight.model import Model
from areal_x.protocols.trainer_config import bytes_per_parameter
from areal_x.run.run_dir import check_writable, nearest_existing
from areal_x.settings import Settings

JOURNAL_BYTES = 6  # per token (see JournalConfig)
SAVED_MOMENTS = {"adamw": 8, "adafactor": 1, "muon": 8}  # bytes per parameter in fp32, at most


def check_run_directory(settings: Settings) -> str:
    """Raises: ConfigError for a directory that cannot be written, and for a run that already
    exists."""
    runs = Path(settings.runs)
    check_writable("train.runs", runs)
    run = runs / settings.name if settings.name else None
    if run is not None and run.is_dir() and any(run.iterdir()):
        raise ConfigError(
            "train.name",
            settings.name,
            f"another, as {run} exists and is not overwritten (or use --resume)",
        )
    return f"{run or runs} can be written"


def check_disk(settings: Settings, model: Model) -> str:
    """Raises: ConfigError if checkpoints, exports and journal do not fit on the disk."""
    runs = Path(settings.runs)
    checkpoint = checkpoint_bytes(settings, model)
    count = settings.keep_checkpoints + 1  # the oldest is deleted once the newest is complete
    journal = journal_bytes(settings)
    every = settings.export_every
    exports = -(-settings.steps // every) if every else 0
    exported = exports * staged_bytes(settings, model, on_cpu=False)
    free = shutil.disk_usage(nearest_existing(runs)).free
    of_exports = f", {exports} exports of {format_bytes(exported)} together" if every else ""
    sizes = (
        f"{count} times a checkpoint of {format_bytes(checkpoint)}{of_exports} and a journal of at most"
        f" {format_bytes(journal)}; {format_bytes(free)} are free in {runs}"
    )
    if checkpoint * count + exported + journal > free:
        wanted = f"smaller, or train.runs on a larger disk: the run writes {sizes}"
        if exported > checkpoint * count:
            raise ConfigError("train.export_every", every, wanted.replace("smaller", "larger"))
        raise ConfigError("train.keep_checkpoints", settings.keep_checkpoints, wanted)
    return sizes


def check_staging(settings: Settings, config: FleetConfig, model: Model, on_cpu: bool) -> str:
    """Checks the directory to which weights are staged. Raises: ConfigError if it cannot be written
    or is too small."""
    binding, staging = f"{config.binding}.staging", config.staging
    parent = Path(staging) if staging else default_parent()
    check_writable(binding, parent)
    free = shutil.disk_usage(nearest_existing(parent)).free
    if settings.trainer.lora.served_rank:
        return f"{parent} can be written; {format_bytes(free)} are free"
    needed = staged_bytes(settings, model, on_cpu)
    if needed > free:
        wanted = (
            f"a directory with {format_bytes(needed)}, the size of the weights: {parent} has"
            f" {format_bytes(free)}"
        )
        raise ConfigError(binding, staging, wanted)
    return f"{parent} takes the weights, {format_bytes(needed)}; {format_bytes(free)} are free"


def staged_bytes(settings: Settings, model: Model, on_cpu: bool) -> float:
    """Bytes of a published version, whole."""
    return model.parameters * bytes_per_parameter(settings.trainer, on_cpu)


def checkpoint_bytes(settings: Settings, model: Model) -> int:
    """Bytes of fp32 weights and optimizer moments, of the policy and a critic. Adapters count as
    0."""
    if settings.trainer.lora.rank:
        return 0
    trained = 2 if "values" in settings.algorithm.needs else 1
    moments = SAVED_MOMENTS[settings.trainer.optimizer.name] // (
        2 if settings.trainer.optimizer.moments == "bf16" else 1
    )
    return trained * model.parameters * (4 + moments)


def journal_bytes(settings: Settings) -> int:
    """An upper bound on the journal's size: every sequence as long as a row."""
    steps = min(settings.steps, settings.journal.keep_steps or settings.steps)
    return (
        steps * settings.groups_per_step * settings.group_size * settings.row_length * JOURNAL_BYTES
    )


def format_bytes(size: float) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"


def host_memory() -> int:
    """Bytes of memory available on this machine, including caches that the system can drop."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
