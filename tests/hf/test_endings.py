"""The end of a model's turn, for chat templates like those of the model families, and its use everywhere."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.agents.chat.dialogue import ChatEngine, Dialogue
from areal_x.agents.chat.rendering import TemplateRenderer
from areal_x.agents.multi_turn import MultiTurn
from areal_x.agents.online import Online
from areal_x.errors import UserError
from areal_x.hf.endings import Ending, stop_tokens, turn_ending
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.preflight import tokens
from areal_x.preflight.model import Model
from areal_x.protocols.engine import Completion, SamplingParams
from areal_x.testing.models import CHARACTERS
from areal_x.types import Task
from areal_x.workflows.single_turn import SingleTurn, text_of
from areal_x.workflows.supervised import Demonstrations, PreferencePairs

# Each writes the turns of "messages" as its family does, with names of roles as they are.
BEGUN = "{% if add_generation_prompt %}"


@dataclass(frozen=True)
class Family:
    """marks: its special tokens, the tokenizer's eos_token first. template: of its chats. listed: what generation_config.json
    names, or config.json where `in_config`. turn: how its turn ends. plain: marks that the tokenizer does not call special."""

    marks: tuple[str, ...]
    template: str
    listed: tuple[str, ...]
    turn: str
    in_config: bool = False
    plain: tuple[str, ...] = ()


FAMILIES = {
    "gemma": Family(
        ("<eos>", "<start_of_turn>", "<end_of_turn>"),
        "{% for m in messages %}<start_of_turn>{{ m.role if m.role != 'assistant' else 'model' }}.{{ m.content }}<end_of_turn>."
        "{% endfor %}" + BEGUN + "<start_of_turn>model.{% endif %}",
        ("<eos>", "<end_of_turn>"),
        "<end_of_turn>",
    ),
    "phi": Family(
        ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "{% for m in messages %}<|{{ m.role }}|>.{{ m.content }}<|end|>.{% endfor %}"
        + BEGUN
        + "<|assistant|>.{% else %}<|endoftext|>{% endif %}",
        ("<|endoftext|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
    ),
    "glm": Family(
        ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "{% for m in messages %}<|{{ m.role }}|>.{{ m.content }}{% endfor %}" + BEGUN + "<|assistant|>.{% endif %}",
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
        "<|user|>",
    ),
    "qwen": Family(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "{% for m in messages %}<|im_start|>{{ m.role }}.{{ m.content }}<|im_end|>.{% endfor %}"
        + BEGUN
        + "<|im_start|>assistant.{% endif %}",
        (),  # as its base models, whose files do not name it
        "<|im_end|>",
    ),
    "llama3": Family(
        ("<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>..{{ m.content | trim }}<|eot_id|>{% endfor %}"
        + BEGUN
        + "<|start_header_id|>assistant<|end_header_id|>..{% endif %}",
        ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        in_config=True,
    ),
    "harmony": Family(
        ("<|return|>", "<|start|>", "<|message|>", "<|end|>", "<|call|>"),
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
        + BEGUN
        + "<|start|>assistant{% endif %}",
        ("<|return|>", "<|call|>"),
        "<|return|>",
    ),
    "unmarked": Family(
        ("</s>", "<|im_start|>", "<|im_end|>"),
        "{% for m in messages %}<|im_start|>{{ m.role }}.{{ m.content }}<|im_end|>.{% endfor %}"
        + BEGUN
        + "<|im_start|>assistant.{% endif %}",
        ("</s>",),
        "<|im_end|>",
        plain=("<|im_end|>",),
    ),
}


def write(directory: Path, family: Family) -> None:
    """Writes tokenizer and configs of a family, over characters; ids below 2 + the number of characters are text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, **{c: i + 1 for i, c in enumerate(CHARACTERS)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in family.marks if mark not in family.plain]
    )
    made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in family.plain])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=family.marks[0])
    tokenizer.chat_template = family.template
    tokenizer.save_pretrained(directory)
    ids = [tokenizer.convert_tokens_to_ids(mark) for mark in family.listed]
    text = tokenizer.convert_tokens_to_ids("1")  # what stands in a config that was not made for its tokenizer
    configs: dict[str, dict[str, Any]] = {"config.json": {"text_config": {"vocab_size": 80, "eos_token_id": text}}}
    if family.in_config:
        configs["config.json"]["eos_token_id"] = ids
    elif ids:
        configs["generation_config.json"] = {"eos_token_id": ids}
    for name, config in configs.items():
        (directory / name).write_text(json.dumps(config))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def tokenizer(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("model")
    write(directory, family)
    return load_tokenizer(directory)


def test_every_end_that_the_files_and_the_template_name_stops_a_completion(family: Family, tokenizer: Any) -> None:
    names = tokenizer.convert_ids_to_tokens(list(stop_tokens(tokenizer)))
    assert names[0] == family.marks[0]
    assert set(names) == {family.marks[0], *family.listed, family.turn}
    assert turn_ending(tokenizer) == Ending("", tokenizer.convert_tokens_to_ids(family.turn))


def reward(task: Task, text: str) -> float:
    return 0.0


def test_every_workflow_asks_for_all_of_them(family: Family, tokenizer: Any) -> None:
    sampling = SamplingParams(stop_token_ids=(5,))
    for workflow in (SingleTurn(reward, sampling), MultiTurn(reward, sampling), Online(sampling=sampling)):
        ready = workflow.setup(tokenizer)
        assert ready.sampling.stop_token_ids == (5, *stop_tokens(tokenizer))


def run(workflow: Any, task: Task) -> Any:
    return asyncio.run(workflow.run(task, None))


def test_written_answers_end_as_the_template_ends_a_turn(family: Family, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "1+2="}]
    opened = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    pair = {"chosen": "3", "rejected": "4"}
    for workflow, answer in ((Demonstrations(), "3"), (PreferencePairs(), pair), (PreferencePairs(last_token=True), pair)):
        ready = workflow.setup(tokenizer)
        first = run(ready, Task("t", chat, answer)).trajectories[0]
        assert tokenizer.decode(first.tokens) == f"{opened}3{family.turn}"
        assert first.mask[-1]
        first = run(ready, Task("t", "1+2=", answer)).trajectories[0]
        assert tokenizer.decode(first.tokens) == f"1+2=3{family.marks[0]}"


class Says:
    """Completes each prompt with the next reply."""

    context, version = 1000, 0

    def __init__(self, tokenizer: Any, *replies: str) -> None:
        self.replies, self.tokenizer, self.prompts = list(replies), tokenizer, []

    async def generate(self, request: Any) -> Completion:
        self.prompts.append(self.tokenizer.decode(request.tokens))
        tokens = np.asarray(self.tokenizer.encode(self.replies.pop(0)), np.int32)
        assert tokens[-1] in request.sampling.stop_token_ids
        return Completion(tokens, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32), "stop")


def test_a_conversation_goes_on_behind_the_turns_end_and_the_end_is_no_text(family: Family, tokenizer: Any) -> None:
    engine = Says(tokenizer, f"3{family.turn}", f"7{family.marks[0]}")
    sampling = SingleTurn(reward).setup(tokenizer).sampling

    async def talk() -> list[str | None]:
        dialogue = Dialogue(ChatEngine(TemplateRenderer(tokenizer), engine), sampling)
        said = [(await dialogue.say({"role": "user", "content": text})).content for text in ("1+2=", "3+4=")]
        assert dialogue.text == "7"
        return said

    assert asyncio.run(talk()) == ["3", "7"]
    first, second = engine.prompts
    if family.turn != "<|return|>":  # which stands behind the last reply alone: earlier ones are written anew
        assert second.startswith(f"{first}3{family.turn}")
    turns = zip(("user", "assistant", "user"), ("1+2=", "3", "3+4="), strict=True)
    messages = [{"role": role, "content": content} for role, content in turns]
    assert second == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_judged_text_is_without_the_end(family: Family, tokenizer: Any) -> None:
    for end in (family.turn, family.marks[0]):
        assert text_of(tokenizer, np.asarray(tokenizer.encode(f"1+2=3{end}"), np.int32)) == "1+2=3"


def test_check_names_the_ends_and_a_turns_end_that_no_file_names(family: Family, tokenizer: Any) -> None:
    said = tokens.check_end_tokens(tokenizer, Model(Path(tokenizer.name_or_path), {}))
    assert all(repr(mark) in said for mark in (family.marks[0], *family.listed, family.turn))
    unnamed = f"with {family.turn!r} the chat template ends a turn, which neither the tokenizer's eos_token nor"
    assert (unnamed in said) == (family.turn not in (family.marks[0], *family.listed))


def test_an_end_outside_the_models_vocabulary_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 30}')
    with pytest.raises(UserError, match="outside the vocabulary of 30"):
        tokens.check_end_tokens(tokenizer, Model(tmp_path, {}))
