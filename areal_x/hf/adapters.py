"""LoRA adapters in PEFT's files. An adapted tensor is the base's plus the product of two low-rank
matrices.

A trainer with adapters saves adapter_config.json and adapter_model.safetensors instead of the
model's weights, beside the base's config.json and tokenizer. PEFT and vLLM load them as they are.
Source: arXiv 2106.09685.

A mixture's experts are stacked in one parameter of three axes, and so are their adapters, in two
matrices (PEFT's `target_parameters`, peft.tuners.lora.layer.ParamWrapper):

    lora_A [experts · rank, in]     row e · rank + i: row i of expert e's A
    lora_B [out, rank · experts]    column i · experts + e: column i of expert e's B

PEFT wraps a module once for each adapted parameter: the last one's matrices are the module's,
"experts.lora_A", and the first one's those of what it wraps, "experts.base_layer.lora_A".
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from areal_x.errors import UserError
from areal_x.hf import model_dir
from areal_x.protocols.trainer_config import EXPERTS, LoRAConfig

CONFIG, WEIGHTS = model_dir.ADAPTER_CONFIG, "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."  # PEFT's prefix to the names of a model's modules
MATRICES = (".lora_A.weight", ".lora_B.weight")
# Stacked parameters of a mixture's experts, in the order in which transformers makes them.
EXPERT_KERNELS = ("gate_up_proj", "up_proj", "down_proj")
# Files' names of an expert's own kernel, and which half of the stacked gate_up_proj it is.
HALVES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
DOWN = {"down_proj", "w2"}
# Whether a model's files have stacked kernels [experts, in, out], rather than [experts, out, in].
INPUTS_FIRST = dict.fromkeys(("gpt_oss", "llama4", "llama4_text"), True)
INPUTS_FIRST |= dict.fromkeys(("gemma4", "gemma4_text"), False)
OF_EXPERTS = re.compile(
    r"^(?P<module>.+\.experts)\.(?:(?P<expert>\d+)\.)?(?P<kernel>\w+?)(?:\.weight)?$"
)
BLOCKS = 64  # blocks that the fingerprint reads of a file of weights
BLOCK_BYTES = 2**16

Tensors = Iterable[tuple[str, np.ndarray]]


def settings_of(config: LoRAConfig, base: Path, head: str = "policy") -> dict[str, Any]:
    """Returns the content of adapter_config.json."""
    modules, parameters = split_targets(config.targets)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "policy" else "SEQ_CLS",
        "base_model_name_or_path": str(base.absolute()),
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "modules_to_save": None if head == "policy" else ["score"],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def split_targets(targets: Collection[str]) -> tuple[list[str], list[str]]:
    """Returns the targets that are modules, and those that are parameters of experts, sorted."""
    of_experts = {target for target in targets if target.startswith(EXPERTS)}
    return sorted({*targets} - of_experts), sorted(of_experts)


def expert_module(kernel: str, targets: Iterable[str]) -> str:
    """Returns the module, below "experts", whose matrices in PEFT's files are those of this stacked
    kernel, one of the targets: "" or ".base_layer" (see above)."""
    own = [x for x in EXPERT_KERNELS if f"{EXPERTS}{x}" in set(targets)]
    return ".base_layer" * (len(own) - 1 - own.index(kernel))


def write(
    directory: Path, tensors: Tensors, *, config: LoRAConfig, base: Path, head: str = "policy"
) -> None:
    """Writes an adapter in PEFT's form. tensors: under PEFT's names; a `score` among them is
    trained in full."""
    settings = settings_of(config, base, head)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(settings, indent=2))
    model_dir.write_tensors(directory / WEIGHTS, tensors)


def read(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the adapter's tensors under PEFT's names."""
    return model_dir.read_file(directory / WEIGHTS)


def merge(
    base: Tensors, adapter: Tensors, settings: Mapping[str, Any], model_type: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of the merged model, one at a time: base + scale · B @ A, computed in fp32
    and converted to the base's type.

    settings: of adapter_config.json. model_type: the base's. A `score` of the adapter replaces the base's, or its
    language-model head. Raises: UserError for adapters of tensors that the base lacks.
    """
    matrices = {
        _within(name.removeprefix(PEFT_PREFIX)): x.astype(np.float32) for name, x in adapter
    }
    score = matrices.pop("score.weight", None)
    unknown = [name for name in matrices if not name.endswith(MATRICES)]
    unknown += [name for name in ("use_dora", "fan_in_fan_out") if settings.get(name)]
    if unknown or settings.get("peft_type", "LORA") != "LORA":
        raise UserError(
            f"the adapter has {unknown[0] if unknown else settings['peft_type']}, and only plain LoRA can be"
            " merged here: merge it with PEFT"
        )
    parts, used = _Parts(matrices, settings), set()
    for name, tensor in base:
        within = _within(name)
        if score is not None and within.removesuffix(".weight") in ("score", "lm_head"):
            continue
        if (found := parts.of(within)) is not None:
            used.add(found.module)
            merged = tensor.astype(np.float32) + found.product(
                name, tensor.shape, INPUTS_FIRST.get(model_type)
            )
            tensor = merged.astype(tensor.dtype)
        yield name, tensor
    if score is not None:
        yield "score.weight", score
    if missing := parts.modules - used:
        raise UserError(
            f"the adapter has matrices of {min(missing)}, which the base model lacks: merge it into"
            " the model that it was trained on"
        )


class _Part(NamedTuple):
    """Matrices of a tensor of the base. experts: joined in them. kernel: a mixture's, of one expert
    or, if it is stacked, of all."""

    module: str
    a: np.ndarray
    b: np.ndarray
    scale: np.float32
    experts: int
    kernel: str | None = None
    expert: int | None = None

    def product(self, name: str, shape: tuple[int, ...], inputs_first: bool | None) -> np.ndarray:
        """Returns what is added to the tensor. inputs_first: whether stacked kernels are [experts, in,
        out]; None where their shapes must show it. Raises: UserError if it has another shape."""
        product: np.ndarray
        if self.kernel is None:
            product = self.b @ self.a
            return product * self.scale
        # [experts, rank, in] and [experts, out, rank]
        a = self.a.reshape(self.experts, -1, self.a.shape[1])
        b = self.b.reshape(len(self.b), -1, self.experts).transpose(2, 0, 1)
        if self.expert is not None:
            product = b[self.expert] @ a[self.expert]
            if self.kernel in HALVES and product.shape[0] == 2 * shape[0]:
                product = np.split(product, 2)[HALVES[self.kernel]]
        else:
            product = b @ a
            if shape[1] == shape[2] and inputs_first is None:
                raise UserError(
                    f"{name} is square, so that its file does not show whether its rows are inputs or"
                    " outputs: merge the adapter with PEFT"
                )
            if inputs_first or (inputs_first is None and product.shape != shape):
                product = product.transpose(0, 2, 1)
        if product.shape != shape:
            raise UserError(f"the adapter of {name} is for the shape {product.shape}, not {shape}")
        return product * self.scale


class _Parts:
    """The matrices of an adapter by the base's tensors that they are added to."""

    def __init__(self, matrices: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> None:
        self._matrices, self._settings = matrices, settings
        self.modules = {name.rpartition(".lora_")[0] for name in matrices}

    def of(self, name: str) -> _Part | None:
        module = name.removesuffix(".weight")
        if module in self.modules:
            return self._part(module, module)
        if (found := OF_EXPERTS.match(name)) is None:
            return None
        kernel, expert = found["kernel"], found["expert"]
        stacked = "down_proj" if kernel in DOWN else "gate_up_proj" if kernel in HALVES else kernel
        targets = self._settings.get("target_parameters") or ()
        # PEFT's are transformers' modules; Mixtral's files have another name.
        for place in (found["module"], found["module"].replace("block_sparse_moe", "mlp")):
            own = [x for x in EXPERT_KERNELS if _is_target(f"{place}.{x}", targets)]
            if stacked not in own and kernel in own:  # experts without a gate
                stacked = kernel
            if stacked in own:
                module = place + expert_module(stacked, [f"{EXPERTS}{x}" for x in own])
                if module in self.modules:
                    part = self._part(module, f"{place}.{stacked}")
                    number = None if expert is None else int(expert)
                    return part._replace(kernel=kernel, expert=number)
        return None

    def _part(self, module: str, target: str) -> _Part:
        a, b = (self._matrices[f"{module}.lora_{x}.weight"] for x in "AB")
        rank = self._setting(target, "rank_pattern", "r")
        alpha = self._setting(target, "alpha_pattern", "lora_alpha")
        divisor = rank**0.5 if self._settings.get("use_rslora") else rank
        return _Part(module, a, b, np.float32(alpha / divisor), len(a) // rank)

    def _setting(self, target: str, patterns: str, default: str) -> Any:
        """Returns a setting of a module or parameter, which PEFT looks up by patterns of names."""
        of = self._settings.get(patterns) or {}
        names = [f"{prefix}{target}" for prefix in ("", "model.", "model.language_model.")]
        found = (of[x] for x in of for name in names if re.match(rf"(.*\.)?({x})$", name))
        return next(found, self._settings[default])


def _is_target(name: str, targets: Sequence[str]) -> bool:
    return any(name == (x := _within(target)) or name.endswith(f".{x}") for target in targets)


def _within(name: str) -> str:
    """Returns a tensor's name in the language model: those of multimodal models have other prefixes
    in files ("language_model.model.") than in memory, which PEFT's names follow."""
    return re.sub(r"^(?:model\.|language_model\.)+", "", name)


def check_saved(directory: Path, config: LoRAConfig, base: Path) -> None:
    """Raises: UserError for a checkpoint that a trainer of this config and base cannot resume."""
    saved = model_dir.is_adapter(directory)
    if not saved and not config.rank:
        return
    if not saved or not config.rank:
        content = "adapters" if saved else "no adapters"
        raise UserError(
            f"{directory} contains {content} and cannot be resumed with lora.rank = {config.rank}:"
            " resume with the settings that it was saved with"
        )
    found = read_config(directory)
    ours = {"rank": config.rank, "alpha": config.alpha, "targets": tuple(sorted(config.targets))}
    theirs = {
        "rank": found["r"],
        "alpha": found["lora_alpha"],
        "targets": tuple(
            sorted([*(found["target_modules"] or ()), *(found.get("target_parameters") or ())])
        ),
    }
    for name, value in theirs.items():
        if value != ours[name]:
            raise UserError(
                f"{directory} contains adapters of lora.{name} = {value!r} and cannot be resumed"
                f" with lora.{name} = {ours[name]!r}: set lora.{name} = {value!r}"
            )
    if model_dir.read_trainer_state(directory)["base"] != fingerprint(base):
        raise UserError(
            f"{directory} contains adapters of another model than {base}: set model.path to the one"
            f" that they were trained on, which was {found['base_model_name_or_path']}"
        )


def fingerprint(directory: Path) -> str:
    """A digest of evenly spaced blocks of each file of weights, which identifies a model. Reading
    all of a large model would take minutes."""
    digest = hashlib.sha256()
    for file in model_dir.tensor_files(directory):
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as opened:
            for start in np.linspace(0, max(size - BLOCK_BYTES, 0), BLOCKS, dtype=np.int64):
                opened.seek(int(start))
                digest.update(opened.read(BLOCK_BYTES))
    return digest.hexdigest()


def read_config(directory: Path) -> dict[str, Any]:
    """Reads adapter_config.json. Raises: UserError if it lacks the base, the rank or alpha."""
    found = model_dir.read_object(directory / CONFIG)
    if missing := [
        name for name in ("base_model_name_or_path", "r", "lora_alpha") if name not in found
    ]:
        raise UserError(f"{directory / CONFIG} has no {missing[0]}: copy it again")
    return found
