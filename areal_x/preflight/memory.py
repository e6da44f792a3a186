"""Estimates the memory of trainer and engine by counting: a lower bound, of the parts that grow with
the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from areal_x.engines.fleet.addresses import server_urls
from areal_x.errors import ConfigError
from areal_x.preflight.deltas import delta_room
from areal_x.preflight.model import Model, find_model
from areal_x.preflight.storage import format_bytes, host_memory
from areal_x.protocols.backends import Devices
from areal_x.protocols.trainer_config import TrainerConfig, bytes_per_parameter
from areal_x.settings import Settings

# Bytes of fp32 moments per parameter: two moments, two factored ones, and one (of a matrix).
MOMENTS = {"adamw": 8, "adafactor": 0, "muon": 4}
# The argument that sets the share of a GPU that a server takes, and the share without it: vLLM 0.32's,
# and about what SGLang 0.5.23 chooses for a large GPU.
SHARES = {"vllm": ("--gpu-memory-utilization", 0.92), "sglang": ("--mem-fraction-static", 0.88)}


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device, or on the machine if it computes on CPUs."""

    state: float
    """Memory that is occupied between passes: weights, moments, gradients."""

    activations: float
    engine: float

    deltas: float = 0.0
    """What deltas take of the machine's memory, if it computes on CPUs (areal_x.preflight.deltas has
    the others)."""

    @property
    def total(self) -> float:
        return self.state + self.activations + self.engine + self.deltas


def check_memory(settings: Settings, model: Model, devices: Devices) -> str:
    """Raises: ConfigError if the run cannot fit, naming the setting to lower."""
    need = estimate(settings, model, devices)
    memory, where = (
        (devices.memory, "each device") if devices.memory else (host_memory(), "this machine")
    )
    trainer = settings.trainer
    rows = f"{trainer.micro_batch_rows} rows of {settings.row_length} tokens"
    sizes = (
        f"{model.parameters / 1e6:.4g} million parameters with their training state take"
        f" {format_bytes(need.state)}, the backward pass of {rows}"
        f" {format_bytes(need.activations)}, the engine {format_bytes(need.engine)},"
        f"{f' deltas {format_bytes(need.deltas)},' if need.deltas else ''} of the"
        f" {format_bytes(memory)} that {where} has (a lower bound, by counting)"
    )
    if need.total <= memory:
        return sizes
    if settings.fleet is not None and need.total - need.deltas <= memory:
        raise ConfigError(f"{settings.engine}.delta", settings.fleet.delta, f"0: {sizes}")
    if need.state <= memory and need.state + need.engine <= memory:
        raise ConfigError(
            "trainer.micro_batch_rows",
            trainer.micro_batch_rows,
            f"lower, or trainer.remat = 'layers': {sizes}",
        )
    if need.state <= memory and settings.engine == "embedded":
        raise ConfigError("embedded.slots", settings.embedded.slots, f"lower: {sizes}")
    if need.state <= memory:
        assert settings.fleet is not None
        wanted = (
            f"with {SHARES[settings.engine][0]!r} and a smaller share, or the servers on GPUs of"
            f" {settings.engine}.devices: {sizes}"
        )
        raise ConfigError(f"{settings.engine}.arguments", settings.fleet.arguments, wanted)
    raise ConfigError(
        "mesh.fsdp",
        trainer.mesh.fsdp,
        f"greater, on more devices, or lora.rank set to train adapters: {sizes}",
    )


def estimate(settings: Settings, model: Model, devices: Devices) -> Estimate:
    """Estimates the memory of a device. Sharded state is divided evenly; replicas of a model on the
    devices of one CPU machine are not counted.

    item, here and below: bytes per parameter in the compute precision.
    """
    trainer, on_cpu = settings.trainer, devices.kind == "cpu"
    item = bytes_per_parameter(trainer, on_cpu)
    shards = 1 if on_cpu else trainer.mesh.fsdp * trainer.mesh.tensor * trainer.mesh.stage
    trained = model.parameters * bytes_per_trained_parameter(trainer, item) / shards
    frozen = model.parameters * item / shards
    needs = settings.algorithm.needs
    others = 0.0
    # teachers are taken to be as large as the policy
    others += frozen * sum(
        not server_urls(binding, given) for binding, given in settings.scorers().items()
    )
    if "values" in needs:
        others += trained
    room = delta_room(settings, model, on_cpu)
    return Estimate(
        state=trained + others,
        activations=activation_bytes(settings, model.config, item),
        engine=engine_bytes(settings, model, devices, item),
        deltas=room.memory_here if on_cpu and room is not None else 0.0,
    )


def bytes_per_trained_parameter(trainer: TrainerConfig, item: int) -> float:
    """Bytes of fp32 weight, gradient and moments, plus the weight in the compute precision if that
    is lower. With adapters, which are small, only the frozen weight counts."""
    if trainer.lora.rank:
        return item
    moments = MOMENTS[trainer.optimizer.name] / (2 if trainer.optimizer.moments == "bf16" else 1)
    return 8 + moments + (item if item < 4 else 0)


def activation_bytes(settings: Settings, config: Mapping[str, Any], item: int) -> float:
    """Activations of one micro-batch that are kept for the backward pass: each layer's input and
    the outputs of its kernels; with remat = "layers" all inputs and one layer's outputs, and with
    "attention" also what every layer's attention reads and gives."""
    trainer = settings.trainer
    tokens = trainer.micro_batch_rows * settings.row_length / trainer.mesh.context
    hidden, inner = config["hidden_size"], config.get("intermediate_size", 0)
    heads = config["num_attention_heads"]
    kept = largest = 0
    for layer in layers_of(config):
        query = heads * (sum(latent_widths(layer)) or layer.get("head_dim") or hidden // heads)
        outputs = 2 * hidden + query + cached_features(layer) + 2 * inner
        of_each = {"layers": hidden, "attention": hidden + 2 * query + cached_features(layer)}
        kept += of_each.get(trainer.remat, hidden + outputs)
        # With "products" as with "auto" no layer's are left out.
        largest = max(largest, outputs if trainer.remat in of_each else 0)
    return float(tokens * (kept + largest) * item)


def engine_bytes(settings: Settings, model: Model, devices: Devices, item: int) -> float:
    """Memory of the engine. Embedded: its copy of the weights and all caches when full. Servers on
    this trainer's GPU: the share that they take; on a CPU: the weights and 1 GB of cache each. On a
    cluster they have devices of their own, and with train.colocate they release theirs. A smaller model
    that guesses counts, too."""
    models = [model]
    if settings.speculation.method == "draft":
        models.append(find_model(settings.speculation.draft))
    parameters = sum(each.parameters for each in models)
    if settings.engine == "embedded":
        caches = (cache_bytes(settings, each.config, item) for each in models)
        return parameters * item + sum(caches)
    config = settings.fleet
    elsewhere = config is None or config.urls or config.devices or settings.places_servers
    if config is None or elsewhere or settings.colocate:
        return 0.0
    if devices.memory is None:
        copies = config.servers * config.data
        return copies * parameters * item + config.workers * 1e9
    return gpu_share(config.arguments, config.binding) * devices.memory


def layers_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the config of each layer, as those of some models have heads of other sizes."""
    own = {int(layer): fields for layer, fields in (config.get("per_layer_config") or {}).items()}
    return [{**config, **own.get(layer, {})} for layer in range(config["num_hidden_layers"])]


def cached_features(config: Mapping[str, Any]) -> int:
    """Features of a layer's keys and values. Those of latent attention are cached as all heads have
    them."""
    heads = int(config["num_attention_heads"])
    if widths := latent_widths(config):
        return heads * (sum(widths) + int(config["v_head_dim"]))
    head = config.get("head_dim") or config["hidden_size"] // heads
    return int(2 * (config.get("num_key_value_heads") or heads) * head)


def latent_widths(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the features of a head's queries and keys with latent attention, plain and rotated; ()
    with other attention."""
    if not config.get("kv_lora_rank"):
        return ()
    return int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])


def cache_bytes(settings: Settings, config: Mapping[str, Any], item: int) -> float:
    """Keys and values of all slots, but for layers that share those of others, and the states in fp32
    of gated delta rule layers, which have none."""
    layers = layers_of(config)[: -(config.get("num_kv_shared_layers") or 0) or None]
    kinds = dict(enumerate(config.get("layer_types") or ()))
    attending = [x for i, x in enumerate(layers) if kinds.get(i) != "linear_attention"]
    widths = ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    recurrent = len(layers) - len(attending)
    of_states = 4 * recurrent * prod(config.get(width, 0) for width in widths)
    context = settings.embedded.context or settings.row_length
    of_tokens = context * sum(map(cached_features, attending)) * item
    return float(settings.embedded.slots * (of_tokens + of_states))


def gpu_share(arguments: tuple[str, ...], engine: str) -> float:
    """Share of a GPU's memory that a server takes."""
    argument, share = SHARES[engine]
    for i, word in enumerate(arguments):
        name, _, value = word.partition("=")
        if name == argument:
            return float(value or arguments[i + 1])
    return share
