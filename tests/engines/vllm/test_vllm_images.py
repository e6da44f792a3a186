"""Images in requests to a real vLLM server of a vision-language model, compared with the trainer's own forward pass.

The server's vision models need torchvision, whose builds on PyPI are for CUDA: without one, the tests with a server are
skipped.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgpack")

from areal_x.batching.packing import pack
from areal_x.engines.vllm import features as served
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.features import NORMALISED, features_of
from areal_x.engines.vllm.server import Launch, command
from areal_x.errors import UserError
from areal_x.hf.image_format import ImageFormat, described_config, format_of
from areal_x.hf.image_reader import read_prompt_images
from areal_x.hf.model_dir import read_config
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import Completion, Request, SamplingParams
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.types import Trajectory
from areal_x.workflows.single_turn import encode
from examples.vision.task import pictures
from examples.vision.warm_start import write_model
from tests.models import IMAGE, SEEING, with_images
from tests.sent_images import arrays_of
from tests.servers import Run, Weights

LONGEST = 1024
(SHOWN,) = with_images((3, (1, 4, 6), 2, (2, 4, 4), 1))
PROMPT = SHOWN.tokens[~SHOWN.mask]
FORM = ImageFormat(IMAGE, 2, (3, 2, 4, 4))


def test_each_image_has_its_place_and_its_own_patches() -> None:
    features = features_of(PROMPT, SHOWN.images, FORM)
    (first, second), images = features["mm_placeholders"]["image"], SHOWN.images
    assert (first, second) == ({"offset": 4, "length": 6}, {"offset": 14, "length": 8})
    assert len(set(features["mm_hashes"]["image"])) == 2
    start = 0
    for grid, packed in zip(images.grids, features["kwargs_data"]["image"], strict=True):
        read = arrays_of(packed)
        np.testing.assert_array_equal(read["pixel_values"][0], images.patches[start : start + grid.prod()])
        assert read["image_grid_thw"][0].tolist() == grid.tolist()
        start += grid.prod()


@pytest.mark.parametrize("wrong", [PROMPT[PROMPT != IMAGE], PROMPT[:12], np.delete(PROMPT, 5)], ids=["none", "one", "short"])
def test_tokens_that_are_not_of_the_images_are_refused(wrong: np.ndarray) -> None:
    with pytest.raises(
        UserError, match=r"the prompt belongs to other images: a sequence has \d+ image tokens, but its 2 images need 14"
    ):
        features_of(wrong, SHOWN.images, FORM)


@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_a_qwen3_vl_whose_config_does_not_say_that_angles_are_interleaved_is_refused(field: str, tmp_path: Path) -> None:
    config = copy.deepcopy(SEEING["qwen3_vl"])
    text = config["text_config"]
    rotation = text.pop("rope_parameters")
    for said, refused in (({}, True), ({"mrope_interleaved": False}, True), ({"mrope_interleaved": True}, False)):
        (tmp_path / "config.json").write_text(json.dumps(config | {"text_config": text | {field: rotation | said}}))
        if refused:
            with pytest.raises(UserError, match="set mrope_interleaved = true in its text_config"):
                served.check_sent_images(tmp_path, VLLMConfig())
        else:
            served.check_sent_images(tmp_path, VLLMConfig())
    (tmp_path / "config.json").write_text(json.dumps(SEEING["qwen2_5_vl"]))
    served.check_sent_images(tmp_path, VLLMConfig())


def test_a_driver_without_vllm_sends_images_and_reads_the_models_form_once(
    model_dir_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers on the nodes of a cluster have a vLLM of their own."""

    def missing() -> bool:
        raise UserError("vLLM is not installed")

    read: list[Path] = []
    monkeypatch.setattr(served, "is_cpu_build", missing)
    monkeypatch.setattr(served, "read_config", lambda directory: read.append(directory) or read_config(directory))
    engine = VLLMEngine(VLLMConfig(), model_dir_of("qwen2_5_vl"), tmp_path)
    request = Request(PROMPT, SamplingParams(), images=SHOWN.images)
    (first, second), config = [engine.features(request) for _ in range(2)], read_config(model_dir_of("qwen2_5_vl"))
    assert first == second == features_of(PROMPT, SHOWN.images, format_of(described_config(config)))
    assert first["kwargs_data"]["image"] is second["kwargs_data"]["image"]  # packed once for the attempts of a group
    assert len(read) == 2  # to see whether its attention is causal, and its form


def test_a_server_of_a_model_that_sees_takes_patches_as_they_are(model_dir_of, tiny_model_dir: Path, tmp_path: Path) -> None:
    for model, told in ((model_dir_of("qwen2_5_vl"), True), (tiny_model_dir, False)):
        launch = Launch(model, tmp_path / "log", tmp_path, context=64, concurrency=2, seed=0)
        assert (NORMALISED in command(launch, 1, cpu=True)) == told


def test_servers_scale_the_queries_of_llama_4_as_its_config_says(model_dir_of, tiny_model_dir: Path, tmp_path: Path) -> None:
    def overrides(model: Path) -> list[str]:
        words = command(Launch(model, tmp_path / "log", tmp_path, context=64, concurrency=2, seed=0), 1, cpu=True)
        return [value for flag, value in pairwise(words) if flag == "--override-generation-config"]

    seen, text = read_config(model_dir_of("llama4_vl")), tmp_path / "text"
    text.mkdir()
    assert overrides(model_dir_of("llama4_vl")) == ['{"attn_temperature_tuning": true}']
    (text / "config.json").write_text(json.dumps(seen["text_config"] | {"attn_temperature_tuning": False}))
    assert overrides(text) == ['{"attn_temperature_tuning": false}']
    assert overrides(tiny_model_dir) == []


# A real server.


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> list[Trainer]:
    """Trainers of two models."""
    made = []
    for seed in (0, 1):
        directory = tmp_path_factory.mktemp("seeing")
        write_model(directory, seed)
        config = read_config(directory)
        config["text_config"]["max_position_embeddings"] = LONGEST
        (directory / "config.json").write_text(json.dumps(config))
        made.append(create_trainer("torch", TrainerConfig(model=ModelConfig(str(directory)))))
    return made


@pytest.fixture(scope="module")
def engine(trainers: list[Trainer], tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[VLLMEngine]:
    if not find_spec("torchvision"):
        pytest.skip("vLLM's models that see need torchvision")
    config = VLLMConfig(context=LONGEST, concurrency=8)
    engine = VLLMEngine(config, trainers[0].directory, tmp_path_factory.mktemp("vllm"))
    run(engine.start())
    run(engine.swap(engine.stage(Weights(trainers[0].directory, 0))))
    yield engine
    run(engine.close())


def asked(trainer: Trainer, most: int) -> list[Request]:
    """Four pictures, each in two requests, and two requests of plain text."""
    tokenizer, how, made = load_tokenizer(trainer.directory), SamplingParams(max_tokens=most), []
    for task in pictures(4) * 2:
        images = read_prompt_images(tokenizer, task.prompt)
        made.append(Request(encode(tokenizer, task.prompt, images), how, images=images))
    return [*made, *[Request(np.arange(2, 12, dtype=np.int32), how)] * 2]


def difference(trainer: Trainer, requests: list[Request], said: list[Completion], version: int) -> float:
    """The largest difference between recorded log-probabilities of this version's tokens and the trainer's."""
    made = [
        Trajectory.from_completion(r.tokens, c.tokens, c.logprobs, c.versions, images=r.images)
        for r, c in zip(requests, said, strict=True)
    ]
    packed = pack(made, LONGEST)
    found = packed.gather(trainer.logprobs(packed.batch))
    parts = [np.abs(t.logprobs - x)[t.mask & (t.versions == version)] for t, x in zip(made, found, strict=True)]
    return float(np.concatenate(parts).max())


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
def test_a_server_says_of_images_what_the_trainer_says_also_after_new_weights(engine, trainers, run: Run) -> None:
    """The features that its vision tower computed under old weights are recomputed."""

    async def all_of(requests: list[Request]) -> list[Completion]:
        return list(await asyncio.gather(*map(engine.generate, requests)))

    requests = asked(trainers[0], most=12)
    for version, trainer in enumerate([*trainers, trainers[0]], engine.version + 1):
        run(engine.swap(engine.stage(Weights(trainer.directory, version))))
        assert difference(trainer, requests, run(all_of(requests)), version) < 1e-4


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
def test_weights_swapped_under_requests_with_images_lose_none_and_each_token_is_of_its_version(
    engine, trainers, run: Run
) -> None:
    requests = asked(trainers[0], most=900)
    old, new = engine.version + 1, engine.version + 2

    async def through_a_swap() -> list[Completion]:
        await engine.swap(engine.stage(Weights(trainers[0].directory, old)))
        staged = engine.stage(Weights(trainers[1].directory, new))
        running = [asyncio.create_task(engine.generate(request)) for request in requests[:8]]
        await engine.generate(Request(np.arange(2, 9, dtype=np.int32), SamplingParams(max_tokens=2)))  # so decoding goes on
        await engine.swap(staged)
        return list(await asyncio.gather(*running))

    said = run(through_a_swap())
    assert [len(completion.tokens) for completion in said] == [900] * 8
    assert {int(v) for completion in said for v in completion.versions} == {old, new}
    for version, trainer in ((old, trainers[0]), (new, trainers[1])):
        assert difference(trainer, requests[:8], said, version) < 1e-4


@pytest.mark.server
@pytest.mark.xdist_group("vllm")
def test_images_for_a_server_of_text_are_refused(vllm_engine: VLLMEngine, trainers, run: Run) -> None:
    with pytest.raises(UserError, match="is a text-only model: train a vision-language model"):
        run(vllm_engine.generate(asked(trainers[0], most=2)[0]))
