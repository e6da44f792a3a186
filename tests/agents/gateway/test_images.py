"""Pictures through all three APIs, sent by the official clients: the model is asked with the patches of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import numpy as np
import openai
import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")

from areal_x.agents.chat.rendering import PlainRenderer, TemplateRenderer
from areal_x.hf.image_reader import read_images
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.engine import SamplingParams
from tests.agents.chat.seeing import part, picture, text, write_seeing
from tests.agents.chat.speaking import Says
from tests.agents.gateway.scripted import Talk

FIRST, SECOND = picture(1), picture(2, 48)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("seeing"))


class Sees(Says):
    def __init__(self, *replies: list[int]) -> None:
        super().__init__(*replies)
        self.images: list[Any] = []

    async def generate(self, request: Any) -> Any:
        self.images.append(request.images)
        return await super().generate(request)


@pytest.fixture
def seeing(gateway: Any, run: Any, model: Path) -> Any:
    tokenizer = load_tokenizer(model)
    sampling = SamplingParams(max_tokens=9, stop_token_ids=(tokenizer.eos_token_id,))

    async def open_one() -> Talk:
        engine = Sees(*(tokenizer.encode(said, add_special_tokens=False) for said in ("7<end>", "8<end>")))
        return Talk(gateway.open(engine, TemplateRenderer(tokenizer), sampling), engine, run)

    one = run(open_one())
    yield one
    one.close()


def source(url: str) -> dict[str, Any]:
    kind, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def by_chat_completions(one: Talk) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[Any] = [{"role": "user", "content": [part(1), text("1")]}]
    messages[0]["content"][0]["image_url"]["detail"] = "high"
    said = one.openai.chat.completions.create(model="m", messages=messages).choices[0].message
    assert said.content == "7"
    messages += [{"role": "assistant", "content": "7", "tool_calls": None}]
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": [text("2"), part(2, 48)]}]
    one.openai.chat.completions.create(model="m", messages=messages)
    assert not one.session.ignored


def by_responses(one: Talk) -> None:
    shown = [{"type": "input_image", "image_url": FIRST, "detail": "auto"}, {"type": "input_text", "text": "1"}]
    first = one.openai.responses.create(model="m", input=[{"role": "user", "content": shown}])
    assert first.output_text == "7"
    seen = [{"type": "input_text", "text": "2"}, {"type": "input_image", "image_url": SECOND, "detail": "auto"}]
    output = {"type": "function_call_output", "call_id": "c", "output": seen}
    one.openai.responses.create(model="m", previous_response_id=first.id, input=[output])


def by_messages(one: Talk) -> None:
    messages: list[Any] = [{"role": "user", "content": [source(FIRST), {"type": "text", "text": "1"}]}]
    said = one.anthropic.messages.create(model="m", max_tokens=9, messages=messages)
    assert said.content[0].text == "7"
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "2"}, source(SECOND)]}
    messages += [{"role": "assistant", "content": "7"}, {"role": "user", "content": [result]}]
    one.anthropic.messages.create(model="m", max_tokens=9, messages=messages)


@pytest.mark.parametrize("talk_by", [by_chat_completions, by_responses, by_messages])
def test_every_api_shows_the_model_the_pictures_of_users_and_of_tools(talk_by: Any, seeing: Talk, model: Path) -> None:
    talk_by(seeing)
    first, second = seeing.engine.images
    np.testing.assert_array_equal(first.patches, read_images(str(model), (FIRST,)).patches)
    np.testing.assert_array_equal(second.patches, read_images(str(model), (FIRST, SECOND)).patches)
    one, two = seeing.calls()
    assert two.prompt[: len(one.prompt) + 2].tolist() == [*one.prompt, *one.completion.tokens]
    assert [len(call.images.grids) for call in (one, two)] == [1, 2]
    tokenizer = load_tokenizer(model)
    rest = tokenizer.decode(two.prompt[len(one.prompt) + 2 :].tolist()).replace(" ", "")
    assert rest == f"<user>2<vision_start>{'<image>' * 36}<vision_end><end><assistant>"


def test_what_cannot_be_seen_is_refused_in_the_apis_own_words(seeing: Talk) -> None:
    far = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    with pytest.raises(openai.BadRequestError, match="nothing is downloaded"):
        seeing.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": [far]}])
    url = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="nothing is downloaded"):
        seeing.anthropic.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": [url]}])
    assert seeing.engine.images == []


def test_a_notice_replaces_an_image_that_is_not_in_the_request(seeing: Talk) -> None:
    by_file = {"type": "input_image", "file_id": "f", "detail": "auto"}
    seeing.openai.responses.create(model="m", input=[{"role": "user", "content": [by_file]}])
    assert seeing.engine.images == [None]
    assert seeing.session.ignored == {"messages: input_image without image_url": 1}


def test_a_model_that_reads_text_only_is_shown_a_notice(talk: Any, tiny_model_dir: Path) -> None:
    one = talk(renderer=PlainRenderer(load_tokenizer(tiny_model_dir)))
    one.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": [part(1)]}])
    assert one.session.ignored == {"messages: image_url": 1}
