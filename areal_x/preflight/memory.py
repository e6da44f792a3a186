"""How much memory trainer and engine will take, by counting: an estimate from below, of what grows
with the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_x.errors import ConfigError
from areal_x.experiment import Experiment
from areal_x.preflight.model import Model
from areal_x.preflight.places import gb
from areal_x.protocols.backends import Devices
from areal_x.protocols.trainer_config import TrainerConfig, bytes_per_parameter

# bytes of a parameter in fp32: of both, factored, of one of a matrix
MOMENTS = {"adamw": 8, "adafactor": 0, "muon": 4}
UTILIZATION = 0.92  # of a GPU: what vLLM 0.32 takes where its arguments do not say


@dataclass(frozen=True)
class Need:
    """Bytes of one device, or of the machine where that computes on CPUs. state: of all that is
    held between passes."""

    state: float
    activations: float
    engine: float

    @property
    def total(self) -> float:
        return self.state + self.activations + self.engine


def enough(experiment: Experiment, model: Model, devices: Devices) -> str:
    """Raises: ConfigError naming what to lower where it cannot fit."""
    need = estimate(experiment, model, devices)
    memory, where = (
        (devices.memory, "each device") if devices.memory else (host_memory(), "this machine")
    )
    trainer = experiment.trainer
    rows = f"{trainer.micro_batch_rows} rows of {experiment.row_length} tokens"
    said = (
        f"{model.parameters / 1e6:.4g} million parameters with what trains them take"
        f" {gb(need.state)}, the backward pass of {rows} {gb(need.activations)}, the engine"
        f" {gb(need.engine)}, of the {gb(memory)} that {where} has (by counting, from below)"
    )
    if need.total <= memory:
        return said
    if need.state <= memory and need.state + need.engine <= memory:
        raise ConfigError(
            "trainer.micro_batch_rows",
            trainer.micro_batch_rows,
            f"lower, or trainer.remat = 'layers': {said}",
        )
    if need.state <= memory and experiment.engine == "embedded":
        raise ConfigError("embedded.slots", experiment.embedded.slots, f"lower: {said}")
    if need.state <= memory:
        wanted = (
            "with '--gpu-memory-utilization' and a smaller share, or the servers on GPUs of"
            f" vllm.devices: {said}"
        )
        raise ConfigError("vllm.arguments", experiment.vllm.arguments, wanted)
    raise ConfigError(
        "mesh.fsdp",
        trainer.mesh.fsdp,
        f"greater, on more devices, or lora.rank set to train adapters: {said}",
    )


def estimate(experiment: Experiment, model: Model, devices: Devices) -> Need:
    """What is split is divided evenly; copies of a model on the devices of one CPU machine are not
    counted."""
    trainer, on_cpu = experiment.trainer, devices.kind == "cpu"
    item = bytes_per_parameter(trainer, on_cpu)
    split = 1 if on_cpu else trainer.mesh.fsdp * trainer.mesh.tensor
    learns = model.parameters * bytes_learnt(trainer, item) / split
    asked = model.parameters * item / split
    needs = experiment.algorithm.needs
    others = 0.0
    if needs & {"reference", "teacher"} and not experiment.scoring_urls():
        others += asked
    if "values" in needs:
        others += learns
    engine = engine_bytes(experiment, model, devices, item)
    return Need(learns + others, activations(experiment, model.config, item), engine)


def bytes_learnt(trainer: TrainerConfig, item: int) -> float:
    """Of a parameter: fp32 weight, gradient and moments, and what is computed with where that is
    shorter; with adapters, which are few, only what is read."""
    if trainer.lora.rank:
        return item
    moments = MOMENTS[trainer.optimizer.name] / (2 if trainer.optimizer.moments == "bf16" else 1)
    return 8 + moments + (item if item < 4 else 0)


def activations(experiment: Experiment, config: Mapping[str, Any], item: int) -> float:
    """What the backward pass keeps of the tokens that are computed at once: each layer's input and
    products with kernels, or with remat = "layers" the inputs and one layer's products."""
    trainer = experiment.trainer
    tokens = trainer.micro_batch_rows * experiment.row_length / trainer.mesh.context
    hidden, layers, inner = (
        config["hidden_size"],
        config["num_hidden_layers"],
        config.get("intermediate_size", 0),
    )
    heads = config["num_attention_heads"]
    head, kv = config.get("head_dim") or hidden // heads, config.get("num_key_value_heads") or heads
    of_layer = 2 * hidden + (heads + 2 * kv) * head + 2 * inner
    kept = hidden * layers + of_layer if trainer.remat == "layers" else layers * (hidden + of_layer)
    return float(tokens * kept * item)


def engine_bytes(experiment: Experiment, model: Model, devices: Devices, item: int) -> float:
    """Of the embedded engine its copy of the weights and all caches full; of servers on this
    trainer's GPU the share that they take, and on a CPU their weights and the gigabyte of cache
    that each has."""
    if experiment.engine == "embedded":
        return model.parameters * item + cache_bytes(experiment, model.config, item)
    config = experiment.vllm
    if experiment.engine == "none" or config.urls or config.devices:
        return 0.0
    if devices.memory is None:
        return config.servers * (model.parameters * item + 1e9)
    return share(config.arguments) * devices.memory


def cache_bytes(experiment: Experiment, config: Mapping[str, Any], item: int) -> float:
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    of_token = layers * 2 * (config.get("num_key_value_heads") or heads) * head * item
    return float(
        experiment.embedded.slots
        * (experiment.embedded.context or experiment.row_length)
        * of_token
    )


def share(arguments: tuple[str, ...]) -> float:
    """Of a GPU, that a vLLM server takes."""
    for i, word in enumerate(arguments):
        name, _, value = word.partition("=")
        if name == "--gpu-memory-utilization":
            return float(value or arguments[i + 1])
    return UTILIZATION


def host_memory() -> int:
    """Bytes of this machine's memory that can be had now, with the caches that the system would
    give up."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024
