"""Images in requests to real vLLM servers, of each family that is trained with images and that vLLM computes on a CPU as its
trainer does.

Tokens and patches are the trainer's. The server's own image processor sees a blank image before it serves, no other: what
stands in for torchvision is enough.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")
pytest.importorskip("msgpack")

from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.hf.model_dir import read_tensors
from areal_x.hf.model_dir import write_model as write_tensors
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import Completion, Request, SamplingParams
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.testing.models import write_tokenizer
from examples.vision.warm_start import PROCESSOR
from tests import placed_images, row_images, tiled_images
from tests.engines.families import widened
from tests.models import SEEING, SEEING_PLACED, SEEING_ROWS, SEEING_TILES, shown_to, write_config
from tests.servers import Run, Weights
from tests.thorough import thorough

from .test_vllm_families import STAND_IN
from .test_vllm_images import difference

CONTEXT = 256
PIECES = 128  # of the tokenizers
CHUNK = 128  # vLLM's blocks on a CPU divide it
TOWER = ("vision", "visual", "multi_modal_projector")  # in the names of a tower's tensors


def write_qwen(directory: Path, config: dict[str, Any]) -> None:
    write_tokenizer(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


# Configs, and what writes the files that prompts are read with.
ROWS = [(name, row_images.write_prompt_files) for name in ("mistral3_vl", "mistral3_vl-tied")]
PLACES = [(name, placed_images.write_prompt_files) for name in ("gemma4_vl", "gemma4_unified_vl-causal")]
TILES = [(name, tiled_images.write_prompt_files) for name in ("llama4_vl", "llama4_vl-threes")]
WRITERS: dict[str, Callable[[Path, dict[str, Any]], None]] = dict([*ROWS, *PLACES, *TILES])
WRITERS |= {"qwen2_5_vl": write_qwen, "qwen3_vl": write_qwen}


def served_config(name: str) -> dict[str, Any]:
    config = widened((SEEING | SEEING_ROWS | SEEING_PLACED | SEEING_TILES)[name])
    text, tower = config["text_config"], config["vision_config"]
    if WRITERS[name] is not write_qwen:
        del tower["out_hidden_size"]
    text |= {"vocab_size": PIECES, "max_position_embeddings": CONTEXT}
    if "vocab_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = PIECES
    if config["model_type"].startswith("gemma4"):  # which vLLM reads, as on the hub
        tower["num_soft_tokens" if "unified" in name else "default_output_length"] = placed_images.MOST
    if config["model_type"] == "qwen3_vl":  # vLLM reads it, transformers does not
        text["rope_parameters"]["mrope_interleaved"] = True
    if config["model_type"] == "llama4":
        text["attention_chunk_size"] = CHUNK
    return config


def write_models(name: str, root: Path) -> list[Path]:
    """Two models, and the language model of the second with the first one's tower."""
    config, write_prompt_files = served_config(name), WRITERS[name]
    made = []
    for seed in (1, 2):
        made.append(write_config(copy.deepcopy(config), root / f"{seed}", sees=True, seed=seed))
        write_prompt_files(made[-1], config)
    first, second = (dict(read_tensors(directory)) for directory in made)
    towers = {x: first[x] for x in first if any(part in x for part in TOWER)}
    assert 0 < len(towers) < len(first)
    write_tensors(root / "3", made[1], (second | towers).items())
    return [*made, root / "3"]


@pytest.mark.server
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("vllm")
@thorough
@pytest.mark.parametrize("name", list(WRITERS))
def test_a_server_says_of_images_what_the_trainer_does_before_and_after_swaps_of_its_tower_too(
    name: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("torchvision") is None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
    trainers = [create_trainer("torch", TrainerConfig(ModelConfig(str(x)))) for x in write_models(name, tmp_path)]
    first, how, reported = trainers[0].directory, SamplingParams(max_tokens=8), list[str]()
    shown = shown_to(first, ends=(CHUNK,))  # longer than a chunk
    shown = [x for x in shown if x.images is None or (x.images.grids[:, 0] == 1).all()]  # vLLM's images have one frame
    requests = [Request(x.tokens[~x.mask], how, images=x.images) for x in shown]
    assert len({x.images is None for x in shown}) == 2
    engine = VLLMEngine(VLLMConfig(context=CONTEXT, concurrency=8), first, tmp_path / "vllm", reported.append)

    async def all_of(trainer: Trainer, version: int) -> list[Completion]:
        await engine.swap(engine.stage(Weights(trainer.directory, version)))
        return list(await asyncio.gather(*map(engine.generate, requests)))

    try:
        run(engine.start())
        for version, trainer in enumerate([*trainers, trainers[1]], 1):
            said = run(all_of(trainer, version))
            assert difference(trainer, requests, said, version) < 1e-4
            others = [difference(x, requests, said, version) for x in trainers if x is not trainer]
            assert min(others) > 0.01  # the tower's alone too
    finally:
        run(engine.close())
    # vLLM's loader orders Llama 4's queries and keys anew, so that they are not proved.
    assert bool([x for x in reported if "prove" in x]) == name.startswith("llama4")
