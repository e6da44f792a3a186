"""Every model family that the backends support goes through a swap in vLLM, with an untied and a tied head."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from areal_x.hf.model_dir import read_tensors
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from tests.engines.families import FAMILIES
from tests.engines.half_families import HALF_FAMILIES
from tests.models import MODELS, MORE, SEEING, write_random
from tests.thorough import further, run_values

ROOT = Path(__file__).parents[3]
STAND_IN = ROOT / "tests" / "engines" / "vllm" / "torchvision_stand_in"


# A head of its own and a tied one, a mixture, and images.
FIRST = ("qwen3", "qwen3-tied", "qwen3-moe")


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    yield from reports_of("tests.engines.families", request, tmp_path_factory)


def reports_of(
    module: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Any]]:
    """Reports by family, from one process, which continues with the next family while a test compares."""
    asked = run_values(request, "name")
    yield from printed([module, *(name for name in FAMILIES if name in asked)], tmp_path_factory)


def printed(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Reports by name, that a module prints in lines."""
    pytest.importorskip("vllm")
    pytest.importorskip("torch")
    path = [str(STAND_IN)] if find_spec("torchvision") is None else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
    log = tmp_path_factory.mktemp("families") / "log"
    with (
        log.open("wb") as file,
        subprocess.Popen(
            [sys.executable, "-m", *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=file, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield Reports(process, log)
        finally:
            process.kill()


class Reports(dict[str, Any]):
    """Reads lines until one belongs to the requested family."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        super().__init__()
        self.process, self.log = process, log

    def __missing__(self, name: str) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # vLLM writes here too
                report = json.loads(line)
                self[report["name"]] = report
                if report["name"] == name:
                    return report
        raise AssertionError(f"the process ended before {name}: {self.log.read_text()[-2000:]}")


@pytest.mark.server
@pytest.mark.xdist_group("vllm-families")
@pytest.mark.parametrize("name", [*FIRST, *further(*(name for name in FAMILIES if name not in FIRST))])
def test_after_a_swap_a_family_says_and_proves_what_the_new_weights_are_and_no_part_of_them_can_be_left_out(
    name: str, reports: dict[str, Any]
) -> None:
    report = reports[name]
    assert report.get("error") is None
    assert report["before"] < 1e-4
    assert report["after"] < 1e-4
    assert report["unnoticed"] == []
    assert report["again"] < 1e-4
    assert report["proof"] == [{"differences": [], "unproved": {}, "dtypes": {}}] * 2
    assert report["stale"] == []
    assert report.get("image", 0.0) < 1e-4


# Families that JAX trains and this vLLM does not serve on a CPU as transformers computes them: it has no kernel for gpt-oss's
# experts, ties every Cohere head, computes Cohere 2 otherwise, leaves out the correction of ERNIE's routers, has no kernel for
# the widths of Youtu's heads, and no class for the text of Gemma 4's 12B alone. Its loader orders Llama 4's queries and keys
# anew, so that they are not proved.
NOT_SERVED = {"GptOss", "Cohere", "Cohere2", "Ernie4_5_Moe", "Youtu", "Llama4", "Gemma4Unified"}
# vLLM makes these only with a processor of images: those that it serves are in test_vllm_image_families.
WITH_A_PROCESSOR = {"Gemma3", "Gemma4", "Gemma4Unified", "Mistral3", "Llama4", "Qwen3_5", "Qwen3_5Moe"}
# vLLM does not tie their heads.
UNTIED_ALONE = {f"{name}ForCausalLM" for name in ("Qwen3Next", "DeepseekV2", "DeepseekV3", "Glm4Moe", "Glm4MoeLite")}


def test_every_family_of_the_table_is_swapped_with_a_head_of_its_own_and_a_tied_one() -> None:
    pytest.importorskip("transformers")
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    families = FAMILIES | HALF_FAMILIES
    swapped = {(classes[config["model_type"]], "tied" in name) for name, config in families.items()}
    promised = set(re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", (ROOT / "docs" / "jax.md").read_text()))
    assert len(promised) >= 9
    promised -= {f"{name}ForCausalLM" for name in NOT_SERVED}
    promised -= {f"{name}ForConditionalGeneration" for name in WITH_A_PROCESSOR}
    wanted = {(name, False) for name in promised} | {(name, True) for name in promised - UNTIED_ALONE}
    assert wanted <= swapped


NAMES = [name for name in MODELS | MORE | SEEING if not name.endswith(("-window", "-yarn", "-biased", "-wide", "-deep"))]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_what_a_trainer_publishes_has_the_names_and_shapes_of_the_models_files(backend: str, tmp_path: Path) -> None:
    """A head is among the tensors exactly if the model has an untied one."""
    pytest.importorskip(f"areal_x_{backend}")
    pytest.importorskip("torch")
    heads = set()
    for name in [*NAMES, "qwen2-tied-yarn"]:
        directory = write_random(name, tmp_path / name)
        given = {tensor: x.shape for tensor, x in read_tensors(directory)}
        trainer = create_trainer(backend, TrainerConfig(ModelConfig(str(directory))))
        assert {tensor: x.shape for tensor, x in trainer.weights()} == given, name
        heads.add(("tied" in name or name == "gemma3", "lm_head.weight" in given))
    assert heads == {(True, False), (False, True)}
