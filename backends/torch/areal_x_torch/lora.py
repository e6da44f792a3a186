"""Low-rank adapters beside a frozen model: each adapted layer adds scale · B (A x) to its output.

The added parameters have PEFT's names, so that the files of areal_x.hf.adapters need no others and
either backend can continue from them. Source: arXiv 2106.09685.

If a layer is sharded over processes, either A is replicated and B has a part of the rows, or A has
a part of the columns and B is replicated. Either way each process's own parts give what it adds to
its part of the layer's product, without further communication. The replicated matrix has on each
process the gradient of that part only, and the sum of these once per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from areal_x.errors import ConfigError
from areal_x.hf.adapters import PEFT_PREFIX
from areal_x.protocols.trainer_config import LoRAConfig
from areal_x_torch.collectives import CopyToGroup, SumOverGroup
from areal_x_torch.dtensors import ShardedView, gather, local, split
from areal_x_torch.dummy_model import inner_decoder
from areal_x_torch.loading import quiet
from areal_x_torch.model import ADAPTER, is_classifier, named_tensors


class LoRALinear(nn.Linear):
    """A linear layer with an adapter, in fp32, beside its own parameters. others: the processes
    that have the other parts of a sharded layer, by rows or by columns."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)  # no parameters of its own: they are those of `layer`
        self.in_features, self.out_features, self.scale = (
            layer.in_features,
            layer.out_features,
            scale,
        )
        self.weight, self.bias = layer.weight, layer.bias
        # On the CPU, because the layer is still on the meta device when they are initialised.
        made = {"bias": False, "device": "cpu", "dtype": torch.float32}
        self.lora_A = nn.Linear(self.in_features, rank, **made)
        self.lora_B = nn.Linear(rank, self.out_features, **made)
        self.others: ProcessGroup | None = None
        self.by_rows = True

    def forward(self, x: Float[Tensor, "*_ features"]) -> Float[Tensor, "*_ out"]:
        bias = None if self.bias is None else local(self.bias)
        if self.others is None or self.by_rows:
            return self._product(
                x if self.others is None else CopyToGroup.apply(x, self.others), bias
            )
        summed: Tensor = SumOverGroup.apply(self._product(x, None), self.others)
        return summed if bias is None else summed + bias

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight, a, b = (local(layer.weight) for layer in (self, self.lora_A, self.lora_B))
        return linear(x, weight, bias) + linear(linear(x, a), b) * self.scale

    def split(self, mesh: DeviceMesh, by_rows: bool) -> None:
        """Leaves on each process its part of the rows of the weight, or of the columns."""
        self.others, self.by_rows = mesh.get_group(), by_rows
        for layer in (self, self.lora_B if by_rows else self.lora_A):
            layer.weight = split(layer.weight, mesh, 0 if by_rows else 1)
        if by_rows and self.bias is not None:
            self.bias = split(self.bias, mesh, 0)

    @property
    def whole(self) -> Parameter:
        """The replicated matrix of a sharded layer."""
        return self.lora_A.weight if self.by_rows else self.lora_B.weight

    def merged(self) -> Float[Tensor, "out features"]:
        """Returns the weight with the adapter added, computed in fp32, in the weight's dtype;
        gathered if it is sharded."""
        weight, a, b = (gather(layer.weight.detach()) for layer in (self, self.lora_A, self.lora_B))
        return (weight + self.scale * (b @ a)).to(weight.dtype)


def check_targets(directory: Path, config: LoRAConfig) -> None:
    """Raises: ConfigError for targets that the model of a directory lacks, before any of it is
    read."""
    with quiet(), torch.device("meta"):
        try:
            described = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
            model = AutoModelForCausalLM.from_config(described, trust_remote_code=False)
        except Exception:
            return  # loading it reports what is wrong
    there = list(dict.fromkeys(name.rpartition(".")[2] for name in adaptable(model)))
    unknown = [target for target in config.targets if target not in there]
    if unknown:
        mixture = any(name.endswith(".experts") for name, _ in model.named_modules())
        experts = " (experts and their router can have no adapters)" if mixture else ""
        wanted = (
            f"without {', '.join(unknown)}, as this model's kernels that can have adapters are"
            f" {', '.join(there)}{experts}"
        )
        raise ConfigError("lora.targets", config.targets, wanted)


def adaptable(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Returns the layers that can have adapters: linear layers of the decoder except experts;
    neither the head nor the vision tower."""
    decoder = inner_decoder(model)
    place = next(name for name, module in model.named_modules() if module is decoder)
    inner = ((f"{place}.{name}", module) for name, module in decoder.named_modules())
    return {
        name: module
        for name, module in inner
        if isinstance(module, nn.Linear) and returns_products(module) and "expert" not in name
    }


def returns_products(layer: nn.Linear) -> bool:
    """False for a layer with a function of its own: Llama 4's routers."""
    return isinstance(layer, LoRALinear) or type(layer).forward is nn.Linear.forward


def add_adapters(model: PreTrainedModel, config: LoRAConfig, seed: int) -> None:
    """Puts adapters beside the targets of a frozen model; a classifier's score is trained in full.

    They have no effect yet: B is 0 and A uniform within ±1 / sqrt(its columns), as in PEFT.
    """
    random = torch.Generator().manual_seed(seed)
    for name, plain in adaptable(model).items():
        if name.rpartition(".")[2] in config.targets:
            layer = LoRALinear(plain, config.rank, config.scale)
            uniform = torch.rand(layer.lora_A.weight.shape, generator=random) * 2 - 1
            with torch.no_grad():
                layer.lora_A.weight.copy_(uniform * layer.in_features**-0.5)
                layer.lora_B.weight.zero_()
            model.set_submodule(name, layer)
    if is_classifier(model):
        model.score.requires_grad_(True)


def trained_parameters(model: PreTrainedModel, config: LoRAConfig) -> dict[str, Parameter]:
    """Returns what is trained, under its names in files: PEFT's for adapters and a score beside
    them."""
    wrapped = PEFT_PREFIX if config.rank else ""
    return {wrapped + name: p for name, p in model.named_parameters() if p.requires_grad}


def merged(model: PreTrainedModel) -> Iterator[tuple[str, Tensor | ShardedView]]:
    """Yields the tensors of the plain model, one at a time, with adapters merged into them."""
    adapted = {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, LoRALinear)
    }
    for name, x in named_tensors(model).items():
        if not name.endswith(ADAPTER):
            yield name, adapted[name].merged() if name in adapted else x


def remove_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the same model with plain layers in place of adapted ones."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            plain = nn.Linear(module.in_features, module.out_features, device="meta")
            plain.weight, plain.bias = module.weight, module.bias
            model.set_submodule(name, plain)
    return model
