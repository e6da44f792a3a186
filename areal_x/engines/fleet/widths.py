"""The parallel sizes of a server: how many accelerators it computes on, and what a model must be like
to be divided so. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_x.errors import ConfigError, positive

# Arguments of vLLM and SGLang that say the same as a setting. They were the only way before there were
# settings, and the files of old runs have them.
ARGUMENTS = {
    "tensor": ("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    "pipeline": ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
    "data": ("--data-parallel-size", "-dp", "--dp-size", "--dp"),
    "expert": ("--expert-parallel-size", "--ep-size", "--ep"),
}
EXPERT_FLAGS = ("--enable-expert-parallel", "-ep")  # vLLM's, without a number
# Names, in models' configs, of the number of experts of a layer.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
PADDED = 64  # vLLM's tables of tokens have rows up to a multiple of it


@dataclass(frozen=True)
class Widths:
    """Into how many parts a server divides a model. See areal_x.engines.fleet.config.FleetConfig."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    hosts: int = 1

    @property
    def accelerators(self) -> int:
        """Number of accelerators of the server. Experts are divided among the same ones."""
        return self.tensor * self.pipeline * self.data

    @property
    def on_each_host(self) -> int:
        return self.accelerators // self.hosts

    def __str__(self) -> str:
        sizes = (f"{name} {size}" for name, size in vars(self).items() if size > 1)
        return ", ".join(sizes) or "no division"


def widths_of(binding: str, value: Callable[[str], Any]) -> tuple[Widths, tuple[str, ...]]:
    """Returns a server's widths, and the arguments of its command line that say nothing of them.
    value: returns a setting of `binding` by its name. Sizes in `arguments` count where the setting is
    not given.

    Raises: ConfigError for a size below 1, or one that is given both ways.
    """
    arguments = tuple(value("arguments"))
    found, others = parsed(arguments)
    sizes = {name: value(name) for name in (*ARGUMENTS, "hosts")}
    for name, size in sizes.items():
        positive(f"{binding}.{name}", size)
    for name, (argument, size) in found.items():
        if sizes[name] != 1:
            wanted = f"without {argument}, which {binding}.{name} = {sizes[name]} gives"
            raise ConfigError(f"{binding}.arguments", arguments, wanted)
        positive(f"{binding}.arguments, {argument}", size)
        sizes[name] = size
    flags = [word for word in others if word in EXPERT_FLAGS]
    if flags and sizes["expert"] == 1:
        sizes["expert"] = sizes["tensor"] * sizes["data"]
    return Widths(**sizes), tuple(word for word in others if word not in flags)


def parsed(arguments: Sequence[str]) -> tuple[dict[str, tuple[str, int]], tuple[str, ...]]:
    """Returns the arguments that give a size, by the setting's name, with that size, and the other
    words. Of an argument that is given twice the last counts, as in the programs. One without a number
    is left to the program to refuse."""
    names = {argument: name for name, given in ARGUMENTS.items() for argument in given}
    found: dict[str, tuple[str, int]] = {}
    others: list[str] = []
    words = iter(range(len(arguments)))
    for index in words:
        argument, equals, size = arguments[index].partition("=")
        argument = argument.replace("_", "-")
        if not equals:
            size = arguments[index + 1] if index + 1 < len(arguments) else ""
        if argument not in names or not size.isdecimal():
            others.append(arguments[index])
            continue
        found[names[argument]] = (argument, int(size))
        if not equals:
            next(words)
    return found, tuple(others)


def check_hosts(binding: str, widths: Widths) -> None:
    """Raises: ConfigError unless each node of a server has an equal part of its accelerators."""
    if widths.accelerators % widths.hosts:
        wanted = (
            f"a divisor of {widths.accelerators}, the accelerators of a server ({binding}.tensor ×"
            " pipeline × data)"
        )
        raise ConfigError(f"{binding}.hosts", widths.hosts, wanted)


def check_model(kind: str, binding: str, widths: Widths, config: Mapping[str, Any]) -> None:
    """Raises: ConfigError if a program cannot divide the model so, naming the sizes below that it
    can. kind: the program. config: the language model's.

    The rules are those that the programs' own loaders assert for models of the common form; a model
    that has others, such as a vision tower, is refused by its server at the start.
    """
    for name, why in obstacles(kind, widths, config):
        size = getattr(widths, name)
        less = (replace(widths, **{name: n}) for n in range(1, size))
        possible = [
            str(getattr(other, name))
            for other in less
            if name not in {found for found, _ in obstacles(kind, other, config)}
        ]
        raise ConfigError(f"{binding}.{name}", size, f"{' or '.join(possible) or '1'}: {why}")


def experts_in(config: Mapping[str, Any]) -> int:
    """Returns the number of experts of a mixture's layers; 0 for a dense model."""
    return next((n for name in COUNTS if (n := config.get(name))), 0)


def obstacles(kind: str, widths: Widths, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields why a program cannot divide a model, each with the setting that asks for it. Sources:
    vLLM 0.32 (config/model.py, model_executor/models and layers), SGLang 0.5.23 (models, layers)."""
    tensor, vllm = widths.tensor, kind == "vLLM"
    heads = config.get("num_attention_heads") or 0
    key_heads = config.get("num_key_value_heads") or heads
    if heads % tensor:
        yield "tensor", f"the model's {heads} attention heads must be divisible by it"
    if key_heads and key_heads % tensor and tensor % key_heads:
        yield "tensor", f"the model's {key_heads} key heads must be divisible by it, or it by them"
    experts = experts_in(config)
    inner = config.get("intermediate_size") or 0
    of_expert = config.get("moe_intermediate_size") or inner
    # A mixture's other size is that of its dense layers, and many have none.
    if not experts and inner % tensor:
        yield "tensor", f"the model's intermediate_size {inner} must be divisible by it"
    vocabulary = config.get("vocab_size") or 0
    padded = -(-vocabulary // PADDED) * PADDED
    if vllm and padded % tensor:
        yield "tensor", f"the vocabulary, which vLLM pads to {padded}, must be divisible by it"
    layers = config.get("num_hidden_layers") or widths.pipeline
    if widths.pipeline > layers:
        yield "pipeline", f"the model has {layers} layers"
    if widths.expert > 1 and not experts:
        yield "expert", "the model has no experts"
    if not experts:
        return
    if vllm and tensor > experts:
        yield "tensor", f"it may not exceed the {experts} experts of a layer"
    if not vllm and experts % widths.expert:
        yield "expert", f"the {experts} experts of a layer must be divisible by it"
    # vLLM slices experts among the ranks of all data-parallel engines
    slices = 1 if widths.expert > 1 else tensor * widths.data
    if not vllm:
        slices = max(1, tensor // widths.expert)
    if of_expert % slices:
        why = (
            f"each expert's {of_expert} intermediate columns must be divisible into {slices} slices"
        )
        yield "tensor", why
