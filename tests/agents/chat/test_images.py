"""Conversations with pictures: tokens, patches and log-probabilities are those that the trainer sees."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("areal_x_torch")
pytest.importorskip("PIL")

from areal_x.agents.chat.calls import Call
from areal_x.agents.chat.dialogue import ChatEngine, ChatRequest, Dialogue
from areal_x.agents.chat.merging import merge_calls
from areal_x.agents.chat.prompts import keys
from areal_x.agents.chat.rendering import PlainRenderer, TemplateRenderer, Unrenderable
from areal_x.batching.packing import pack
from areal_x.engines.embedded import EmbeddedEngine
from areal_x.hf.image_reader import load_image_reader, read_images
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.types import Images, Message
from tests.agents.chat.seeing import part, picture, text, write_seeing
from tests.agents.chat.speaking import Says


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("seeing"))


def user(*parts: Any) -> Message:
    return {"role": "user", "content": list(parts)}


def test_a_conversation_that_grows_by_pictures_is_trained_on_as_it_was_sampled(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    trainer = create_trainer("torch", TrainerConfig(model=ModelConfig(str(model)), row_length=256))

    async def talk() -> tuple[Call, ...]:
        engine = EmbeddedEngine(trainer.sampler(2, 256))
        await engine.start()
        await engine.swap(engine.stage(trainer))
        sampling = SamplingParams(max_tokens=5, stop_token_ids=(tokenizer.eos_token_id,))
        dialogue = Dialogue(ChatEngine(TemplateRenderer(tokenizer), engine), sampling)
        try:
            await dialogue.say(user(part(1), text("1")))
            await dialogue.say({"role": "tool", "content": [text("2"), part(2, 48)], "tool_call_id": "c"})
            await dialogue.say({"role": "user", "content": "3"})
        finally:
            await engine.close()
        return dialogue.calls

    calls = asyncio.run(talk())
    assert [len(call.images.grids) for call in calls if call.images is not None] == [1, 2, 2]
    merged = merge_calls(calls)
    assert merged.counts == {"first": 1, "continued": 2, "rewritten": 0, "forked": 0}
    (trajectory,) = [one.trajectory for one in merged.trajectories]
    assert trajectory.images is not None
    whole = read_images(str(model), (picture(1), picture(2, 48)))
    np.testing.assert_array_equal(trajectory.images.patches, whole.patches)
    np.testing.assert_array_equal(trajectory.images.grids, whole.grids)
    packed = pack([trajectory], 256)
    (logp,) = packed.gather(trainer.logprobs(packed.batch))
    np.testing.assert_allclose(logp[trajectory.mask], trajectory.logprobs[trajectory.mask], atol=1e-4)


def prompt_of(model: Path, messages: list[Message], *said: str) -> tuple[ChatEngine, list[int], Images | None]:
    tokenizer = load_tokenizer(model)
    engine = ChatEngine(TemplateRenderer(tokenizer), Says(*(tokenizer.encode(x, add_special_tokens=False) for x in said)))
    answer = asyncio.run(engine.answer(ChatRequest(tuple(messages))))
    return engine, answer.prompt.tolist(), answer.images


def test_a_picture_stands_where_its_part_stands(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    _, tokens, images = prompt_of(model, [user(text("1"), part(1), text("2"), part(2, 48))], "3<end>")
    shown = tokenizer.decode(tokens)
    first, second = ("<image>" * n for n in (4 * 4, 6 * 6))
    frame = "<vision_start>{}<vision_end>"
    assert shown.replace(" ", "") == f"<user>1{frame.format(first)}2{frame.format(second)}<end><assistant>"
    assert images is not None
    assert images.grids.tolist() == [[1, 8, 8], [1, 12, 12]]


def test_another_picture_of_the_same_size_is_another_conversation(model: Path) -> None:
    engine, *_ = prompt_of(model, [user(part(1), text("1"))], "2<end>", "3<end>")
    messages = [user(part(2), text("1")), {"role": "assistant", "content": "2"}, user(text("4"))]
    asyncio.run(engine.answer(ChatRequest(tuple(messages))))
    first, second = engine.calls
    assert second.prompt[: len(first.prompt)].tolist() == first.prompt.tolist()
    assert merge_calls(engine.calls).counts["continued"] == 0
    same = replace(second, images=first.images)
    assert merge_calls([first, same]).counts["continued"] == 1


def test_a_model_that_writes_an_images_token_is_read_again_as_text(model: Path) -> None:
    engine, *_ = prompt_of(model, [user(part(1), text("1"))], "2<image>3<end>", "4<end>")
    messages = [user(part(1), text("1")), {"role": "assistant", "content": "23"}, user(part(3), text("5"))]
    assert list(asyncio.run(engine._memory.reasonings(keys(messages)))) == [1]
    answer = asyncio.run(engine.answer(ChatRequest(tuple(messages))))
    reader = load_image_reader(str(model))
    assert reader.stand_for(answer.images, answer.prompt)
    assert merge_calls(engine.calls).counts["continued"] == 0


def test_what_no_model_can_see_is_refused(model: Path, tiny_model_dir: Path) -> None:
    far = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(Unrenderable, match="nothing is downloaded"):
        prompt_of(model, [user(far)], "1")
    engine = ChatEngine(TemplateRenderer(blind(tiny_model_dir)), Says([5]))
    with pytest.raises(Unrenderable, match=r"has images and .* reads text only"):
        asyncio.run(engine.answer(ChatRequest((user(part(1)),))))
    engine = ChatEngine(PlainRenderer(load_tokenizer(tiny_model_dir)), Says([5]))
    with pytest.raises(Unrenderable, match="images need a model with a chat template"):
        asyncio.run(engine.answer(ChatRequest((user(part(1)),))))
    with pytest.raises(Unrenderable, match="writes 2 image tokens for 1 images"):
        prompt_of(model, [user(part(1), text("<image>"))], "1")


def blind(directory: Path) -> Any:
    tokenizer = load_tokenizer(directory)
    tokenizer.chat_template = "{{ messages[0].content }}"
    return tokenizer
