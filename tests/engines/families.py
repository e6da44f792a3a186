"""Swaps the weights of every model family through our weight transfer, in vLLM's own engine, one after the other.

    python -m tests.engines.families [NAME...]   # prints a line of JSON for each

A server over HTTP does the same in 20 s per family.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
if __name__ == "__main__":
    os.environ.update(SETTINGS)

import numpy as np

from areal_x.engines.fleet.manifest import MANIFEST
from areal_x.engines.fleet.proof.claims import Claiming, Claims
from areal_x.engines.fleet.proof.judge import Verdict, judge, parsed
from areal_x.engines.fleet.proof.prover import question
from areal_x.engines.vllm.plugin import BACKEND
from areal_x.engines.vllm.proof.worker import PROVE
from areal_x.hf.model_dir import read_tensors
from tests.model_families import FAMILY_MODELS, ROTATIONS
from tests.models import (
    MODELS,
    MORE,
    SEEING,
    SIZES,
    log_softmax,
    reference_model,
    sequences,
    write_config,
)

# vLLM's attention on a CPU takes heads of whole 32 numbers.
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
ALL: dict[str, Any] = MODELS | MORE | SEEING
MIXTRAL = {**SIZES, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
OLMOE = {**SIZES, "model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2}
LATER = ("granite", "phi3", "glm4", "glm", "olmo2", "olmo3", "smollm3", "dots1", "solar_open", "gemma4_text")
FAMILIES: dict[str, Any] = {
    **{
        name: ALL[name]
        for name in ("qwen2", "qwen3", "qwen3-tied", "llama", "llama3", "llama-tied", "mistral", "mistral-window")
    },
    "qwen2-tied": ALL["qwen2-tied-yarn"],
    "mistral-tied": ALL["mistral"] | TIED,
    **{name: ALL[name] for name in ("qwen2-moe", "qwen3-moe", "qwen3-moe-tied")},
    "qwen2-moe-tied": ALL["qwen2-moe"] | TIED,
    "mixtral": MIXTRAL,
    "mixtral-tied": MIXTRAL | TIED,
    "olmoe": OLMOE,
    "gemma3-tied": ALL["gemma3"] | TIED,
    "gemma3": ALL["gemma3"] | UNTIED,
    **{f"{name}{head}": FAMILY_MODELS[name][0] | own for name in LATER for head, own in (("", UNTIED), ("-tied", TIED))},
    # Rotations that vLLM reads: it leaves out the factor of a proportional one, which is refused.
    "gemma4_text-turned": FAMILY_MODELS["gemma4_text"][2]
    | {"rope_parameters": ROTATIONS | {"full_attention": ROTATIONS["full_attention"] | {"factor": 1.0}}},
    "glm4_moe": FAMILY_MODELS["glm4_moe"][0] | UNTIED,
    **{name: ALL[name] for name in ("qwen2_5_vl", "qwen2_5_vl-tied", "qwen3_vl", "qwen3_vl-tied")},
}


def widened(config: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    text = config.get("text_config", config)
    text.update(WIDE)
    if "global_head_dim" in text:
        text["global_head_dim"] = 2 * WIDE["head_dim"]
    if "mrope_section" in text.get("rope_parameters", {}):
        text["rope_parameters"]["mrope_section"] = [8, 4, 4]
    if "vision_config" in config:
        config["vision_config"]["out_hidden_size"] = WIDE["hidden_size"]
    return config


class Served:
    """vLLM's engine over a model, in this process."""

    def __init__(self, model: Path, backend: str = BACKEND, **settings: Any) -> None:
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        sees = (model / "preprocessor_config.json").exists()
        self.llm: Any = LLM(
            model=str(model),
            enforce_eager=True,
            max_model_len=64,
            max_num_seqs=2,
            num_gpu_blocks_override=8,
            skip_tokenizer_init=not sees,
            limit_mm_per_prompt={"image": 1, "video": 0} if sees else None,
            weight_transfer_config=WeightTransferConfig(backend=backend),
            disable_log_stats=True,
            **{"dtype": "float32", **settings},
        )

    def call(self, method: str, *arguments: Any) -> Any:
        return self.llm.llm_engine.collective_rpc(method, args=arguments)

    def swap(self, folder: Path) -> None:
        self.call("start_weight_update")
        self.call("update_weights", {"folder": str(folder)})
        self.call("finish_weight_update")
        self.llm.reset_prefix_cache()

    def proof(self, directory: Path, full: bool, version: int = 3) -> dict[str, Any]:
        """How what the worker has differs from the model of a directory, and what it cannot prove."""
        claiming = Claiming(version, full)
        for name, tensor in read_tensors(directory):
            claiming.add(name, tensor)
        verdict = self.verdict(claiming.done())
        return {"differences": list(verdict.differences), "unproved": dict(verdict.unproved), "dtypes": dict(verdict.dtypes)}

    def differences(self, claiming: Claiming, tensors: Iterable[tuple[str, Any]]) -> list[str]:
        """What the workers' answers show beside these tensors, of which each must be proved."""
        for name, tensor in tensors:
            claiming.add(name, tensor)
        verdict = self.verdict(claiming.done())
        assert not verdict.unproved, verdict.unproved
        return list(verdict.differences)

    def verdict(self, claims: Claims) -> Verdict:
        """What the workers' answers show, after the way that they take to the trainer."""
        return judge(claims, [parsed(json.loads(json.dumps(answer))) for answer in self.call(PROVE, question(claims))])

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Log-probabilities of a prompt's tokens except the first."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (said,) = self.llm.generate([{"prompt_token_ids": tokens.tolist()}], sampling, use_tqdm=False)
        return np.array([entry[int(t)].logprob for entry, t in zip(said.prompt_logprobs[1:], tokens[1:], strict=True)])

    def seen(self) -> np.ndarray:
        """The vision tower's features of an image."""
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        patches = torch.randn(4 * 6, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        with set_current_vllm_config(worker.vllm_config), set_forward_context(None, worker.vllm_config):
            (found,) = worker.get_model().embed_multimodal(pixel_values=patches, image_grid_thw=torch.tensor([[1, 4, 6]]))
        return np.asarray(found.detach())


@contextmanager
def staged(root: Path, tensors: dict[str, Any]) -> Iterator[Path]:
    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory(dir=root) as folder:
        save_file(tensors, Path(folder) / "00000.safetensors")
        list_files(Path(folder))
        yield Path(folder)


def list_files(folder: Path) -> None:
    """Writes the manifest that makes weights staged ones."""
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}
    (folder / MANIFEST).write_text(json.dumps(sizes))


def tried(name: str, scratch: Path) -> dict[str, Any]:
    """Runs one family on a server and returns the measurements.

    before, after: largest difference from transformers in a prompt's log-probabilities, with the first weights, after a swap.
    unnoticed: tensors without which weights are taken for whole. again: the difference after all those refusals.
    proof: what its worker proves of the weights, of whole tensors and of a sample. stale: the tensors in which a sample finds
    no difference from the first weights. image: how far the tower's features, with the first weights swapped in again, are from
    those at first; as a part of what the other weights change.
    """
    from safetensors.torch import load_file

    old, new, tokens = prepare(name, scratch)
    sees = name in SEEING

    def difference(directory: Path) -> float:
        return distance_from(served, directory, tokens)

    served = Served(old)
    served.call("init_weight_transfer_engine", {"staging_root": str(scratch)})
    report = {"name": name, "before": difference(old)}
    first = served.seen() if sees else np.zeros(1)
    tensors = load_file(new / "model.safetensors")
    for directory in (old, new):
        list_files(directory)
    assert ("lm_head.weight" in tensors) == ("tied" not in name)
    served.swap(new)
    report["after"] = difference(new)
    report["proof"] = [served.proof(new, full) for full in (True, False)]
    report["stale"] = sorted(tensors.keys() - {words.split()[0] for words in served.proof(old, False)["differences"]})
    left_outs = last_of_each_kind(tensors) if "tied" in name or name + "-tied" not in FAMILIES else ["lm_head.weight"]
    report["unnoticed"] = [left_out for left_out in left_outs if not is_noticed(served, scratch, tensors, left_out)]
    served.swap(new)
    report["again"] = difference(new)
    if sees:
        changed = np.abs(served.seen() - first).max()
        served.swap(old)
        report["image"] = float(np.abs(served.seen() - first).max() / changed)
    return report


def prepare(name: str, scratch: Path) -> tuple[Path, Path, np.ndarray]:
    """Writes two models of a family, and returns their directories and a prompt."""
    config, sees = widened(FAMILIES[name]), name in SEEING
    old, new = scratch / "old", scratch / "new"
    for seed, directory in enumerate((old, new), 1):
        write_config(config, directory, sees, seed)
    (tokens,) = sequences(20, seed=3)
    if sees:
        from areal_x.testing.models import write_tokenizer
        from examples.vision.warm_start import PROCESSOR

        write_tokenizer(old)
        (old / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
        tokens = np.where(tokens < 9, 20, tokens).astype(np.int32)
    return old, new, tokens


def distance_from(served: Served, directory: Path, tokens: np.ndarray) -> float:
    """Returns the largest difference from transformers' model of a directory in a prompt's log-probabilities."""
    return float(np.abs(served.score(tokens) - log_probs(directory, tokens)).max())


def log_probs(directory: Path, tokens: np.ndarray, half: bool = False) -> np.ndarray:
    """transformers' log-probabilities of a prompt's tokens except the first. half: computed in bfloat16."""
    import torch

    model = reference_model(directory)
    with torch.no_grad():
        logits = (model.bfloat16() if half else model)(torch.tensor(tokens[None]).long()).logits[0].float().numpy()
    return np.take_along_axis(log_softmax(logits)[:-1], tokens[1:, None], 1)[:, 0]


def last_of_each_kind(tensors: dict[str, Any]) -> list[str]:
    """One name from each set that differs in numbers alone."""
    return list({"".join(c for c in name if not c.isdigit()): name for name in sorted(tensors)}.values())


def is_noticed(served: Served, scratch: Path, tensors: dict[str, Any], left_out: str) -> bool:
    rest = {name: x for name, x in tensors.items() if name != left_out}
    with staged(scratch, rest) as folder:
        try:
            served.swap(folder)
        except ValueError as error:
            return "the staged weights lack" in str(error)
    return False


def only_once() -> None:
    """Leaves out what vLLM does again for each engine and need not in one process, a minute in all.

    It inspects each architecture in a process of its own, and goes through all modules for its kernels and eight times through
    all objects for garbage. What it serves by transformers' own layers it compiles, and changes their classes for that, which
    then make no model outside of vLLM: here nothing is compiled.
    """
    from vllm.model_executor.models import registry
    from vllm.model_executor.models.transformers.base import Base
    from vllm.platforms.cpu import CpuPlatform

    Lazy, Info = registry._LazyRegisteredModel, registry._ModelInfo
    Lazy.inspect_model_cls = lambda self: Info.from_model_cls(self.load_model_cls())
    register = CpuPlatform.register_triton_kernel_overrides
    CpuPlatform.register_triton_kernel_overrides = classmethod(cache(lambda cls: register()))
    Base._decorate_for_torch_compile = lambda self: None
    gc.collect = lambda generation=2: 0


def report_each(names: list[str], tries: Callable[[str, Path], dict[str, Any]]) -> None:
    """Prints the report of each family, by default of all, in a line. tries: makes it, in an empty folder."""
    collect = gc.collect
    only_once()
    for name in names or FAMILIES:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                report = tries(name, Path(scratch))
            except Exception as error:
                report = {"name": name, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(report), flush=True)
        collect()


if __name__ == "__main__":
    report_each(sys.argv[1:], tried)
