"""Low-rank adapters beside a frozen model: each adapted layer adds scale · B (A x) to its output.

The added parameters have PEFT's names, so that the files of areal_x.hf.adapters need no others and
either backend can continue from them. Source: arXiv 2106.09685.

A mixture's experts each have an adapter of their own, stacked like their kernels; PEFT's files join
the stack (`as_saved`). With the mesh axes "expert" and "tensor" a process has those of its experts.

If a layer is sharded over processes, either A is replicated and B has a part of the rows, or A has
a part of the columns and B is replicated. Either way each process's own parts give what it adds to
its part of the layer's product, without further communication. The replicated matrix has on each
process the gradient of that part only, and the sum of these once per step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from areal_x.errors import ConfigError
from areal_x.hf.adapters import EXPERT_KERNELS, PEFT_PREFIX, expert_module
from areal_x.protocols.trainer_config import EXPERTS, LoRAConfig
from areal_x_torch import fp8
from areal_x_torch.dtensors import Joined, Stored, gather, local, split
from areal_x_torch.dummy_model import inner_decoder
from areal_x_torch.experts import grouped, is_experts
from areal_x_torch.loading import quiet
from areal_x_torch.model import ADAPTER, is_classifier, named_tensors
from areal_x_torch.model import as_saved as model_as_saved
from areal_x_torch.split_linear import SplitLinear

IN_EXPERTS = re.compile(
    r"\.adapters\.(\w+)(?=\.lora_)"
)  # in names such as "experts.adapters.down_proj.lora_A"


class LoRALinear(SplitLinear):
    """A linear layer with an adapter, in fp32, beside its own parameters."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        super().__init__(layer)
        self.scale = scale
        # On the CPU, because the layer is still on the meta device when they are initialised.
        made = {"bias": False, "device": "cpu", "dtype": torch.float32}
        self.lora_A = nn.Linear(self.in_features, rank, **made)
        self.lora_B = nn.Linear(rank, self.out_features, **made)
        self.fp8 = isinstance(layer, fp8.Fp8Linear)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight, a, b = (self.own(f"{name}weight") for name in ("", "lora_A.", "lora_B."))
        plain = fp8.product if self.fp8 else linear
        return plain(x, weight, bias) + linear(linear(x, a), b) * self.scale

    def split(self, mesh: DeviceMesh, by_rows: bool, fused: Sequence[int] = ()) -> None:
        super().split(mesh, by_rows, fused)
        layer = self.lora_B if by_rows else self.lora_A
        layer.weight = split(layer.weight, mesh, 0 if by_rows else 1)

    @property
    def whole(self) -> Parameter:
        """The replicated matrix of a sharded layer."""
        return self.lora_A.weight if self.by_rows else self.lora_B.weight

    def merged(self) -> Float[Tensor, "out features"]:
        """Returns the weight with the adapter added, computed in fp32, in the weight's dtype;
        gathered if it is sharded."""
        weight, a, b = (gather(layer.weight.detach()) for layer in (self, self.lora_A, self.lora_B))
        return (weight + self.scale * (b @ a)).to(weight.dtype)


class ExpertAdapters(nn.Module):
    """Adapters, in fp32, of one stacked kernel of a mixture: lora_A [experts, rank, in] and lora_B
    [experts, out, rank]."""

    def __init__(self, experts: int, rank: int, into: int, out: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.lora_A, self.lora_B = nn.Module(), nn.Module()
        # On the CPU, like those of linear layers.
        made = {"device": "cpu", "dtype": torch.float32}
        self.lora_A.weight = Parameter(torch.empty(experts, rank, into, **made))
        self.lora_B.weight = Parameter(torch.zeros(experts, out, rank, **made))

    def forward(
        self, x: Float[Tensor, "n features"], sizes: Int[Tensor, " experts"]
    ) -> Float[Tensor, "n out"]:
        """Returns what they add to the product with the kernels, for so many tokens of each of this
        process's experts."""
        a, b = (local(of.weight).to(x.dtype).mT for of in (self.lora_A, self.lora_B))
        return grouped(grouped(x, a, sizes), b, sizes) * self.scale

    def merged(
        self, kernels: Parameter, inputs_first: bool
    ) -> Float[Tensor, "experts rows columns"]:
        """Returns the kernels with the adapters added, like `LoRALinear.merged`. inputs_first: their
        rows are inputs, not outputs."""
        own = (kernels.detach(), self.lora_A.weight.detach(), self.lora_B.weight.detach())
        whole, a, b = (gather(x) for x in own)
        product = b @ a
        return (whole + self.scale * (product.mT if inputs_first else product)).to(whole.dtype)


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
    there += dict.fromkeys(EXPERTS + kernel for _, kernel in adaptable_experts(model))
    unknown = [target for target in config.targets if target not in there]
    if unknown:
        mixture = any(name.endswith(".experts") for name, _ in model.named_modules())
        experts = " (the router of experts can have none)" if mixture else ""
        wanted = (
            f"without {', '.join(unknown)}, as this model's kernels that can have adapters are"
            f" {', '.join(there)}{experts}"
        )
        raise ConfigError("lora.targets", config.targets, wanted)


def adaptable(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Returns the linear layers that can have adapters: of the decoder, but for what belongs to
    experts; neither the head nor the vision tower."""
    return {
        name: module
        for name, module in _of_decoder(model)
        if isinstance(module, nn.Linear) and returns_products(module) and "expert" not in name
    }


def adaptable_experts(model: PreTrainedModel) -> Iterator[tuple[nn.Module, str]]:
    """Yields the modules of mixtures' experts with the names of their stacked kernels."""
    for name, module in _of_decoder(model):
        mixed = is_experts(module) and not hasattr(module, "weighs_inputs")  # Llama 4's have none
        if mixed and name.endswith("." + EXPERTS.removesuffix(".")):
            for kernel in EXPERT_KERNELS:
                if isinstance(getattr(module, kernel, None), Parameter):
                    yield module, kernel


def _of_decoder(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    decoder = inner_decoder(model)
    place = next(name for name, module in model.named_modules() if module is decoder)
    return ((f"{place}.{name}", module) for name, module in decoder.named_modules())


def returns_products(layer: nn.Linear) -> bool:
    """False for a layer with a function of its own: Llama 4's routers."""
    return isinstance(layer, SplitLinear) or type(layer).forward is nn.Linear.forward


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
    for module, kernel in list(adaptable_experts(model)):
        if EXPERTS + kernel in config.targets:
            experts, *sides = getattr(module, kernel).shape
            into, out = sides if module.is_transposed else sides[::-1]
            made = ExpertAdapters(experts, config.rank, into, out, config.scale)
            uniform = torch.rand(made.lora_A.weight.shape, generator=random) * 2 - 1
            made.lora_A.weight.data.copy_(uniform * into**-0.5)
            if not hasattr(module, "adapters"):
                module.adapters = nn.ModuleDict()
            module.adapters[kernel] = made
    if is_classifier(model):
        model.score.requires_grad_(True)


def trained_parameters(model: PreTrainedModel, config: LoRAConfig) -> dict[str, Parameter]:
    """Returns what is trained, under its names in files: PEFT's for adapters and a score beside
    them."""
    wrapped = PEFT_PREFIX if config.rank else ""

    def named(own: str) -> str:
        if (found := IN_EXPERTS.search(own)) is None:
            return wrapped + own
        return wrapped + IN_EXPERTS.sub(expert_module(found[1], config.targets), own)

    return {named(name): p for name, p in model.named_parameters() if p.requires_grad}


def as_saved(tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    """Returns what is trained, or its moments, as it stands in PEFT's files (areal_x.hf.adapters)."""

    def stored(name: str, x: Tensor) -> Stored:
        if x.ndim < 3:
            return x
        experts, rows, columns = x.shape
        if name.endswith(ADAPTER[0]):
            return Joined(x, (0, 1, 2), torch.Size((experts * rows, columns)))
        return Joined(x, (1, 2, 0), torch.Size((rows, columns * experts)))

    return {name: stored(name, x.detach()) for name, x in tensors.items()}


def merged(model: PreTrainedModel) -> Iterator[tuple[str, Stored]]:
    """Yields the tensors of the plain model, one at a time, with adapters merged into them; those of
    a layer's experts together."""
    adapted: dict[str, LoRALinear] = {}
    mixtures: dict[str, tuple[str, nn.Module]] = {}
    for place, module in model.named_modules():
        if isinstance(module, LoRALinear):
            adapted[f"{place}.weight"] = module
        elif is_experts(module) and hasattr(module, "adapters"):
            kernels = {f"{place}.{kernel}": getattr(module, kernel) for kernel in module.adapters}
            mixtures |= dict.fromkeys(model_as_saved(model, kernels), (place, module))
    done: set[str] = set()
    for name, x in named_tensors(model).items():
        if name.endswith(ADAPTER):
            continue
        if name not in mixtures:
            yield name, adapted[name].merged() if name in adapted else x
            continue
        place, module = mixtures[name]
        if place not in done:
            done.add(place)
            kernels = {
                f"{place}.{kernel}": adapter.merged(getattr(module, kernel), module.is_transposed)
                for kernel, adapter in module.adapters.items()
            }
            yield from model_as_saved(model, kernels).items()


def remove_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the same model with plain layers in place of adapted ones."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoRALinear):
            plain = nn.Linear(module.in_features, module.out_features, device="meta")
            plain.weight, plain.bias = module.weight, module.bias
            model.set_submodule(name, fp8.Fp8Linear(plain) if module.fp8 else plain)
        elif is_experts(module) and hasattr(module, "adapters"):
            del module.adapters
    return model
