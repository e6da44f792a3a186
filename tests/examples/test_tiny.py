"""Tiny models are ordinary Hugging Face directories, and their demonstrations are what the chat template writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_x.hf.tokenizer import load_tokenizer
from examples.tiny import cached
from examples.tiny.cached import cache, made_once
from examples.tiny.chat import CHAT_TEMPLATE, FRAME, Turn, calling, demonstration, opening
from examples.tiny.model import END, PAD, config_of, encode, tensor_shapes, write_model
from examples.tiny.supervised import ROWS, batches_of, installed, supervise, supervised_trajectory

OPENING = '{"name": "double", "arguments": {"of": "'
PIECES = (*"0123456789 ab", "ab", "aba", *FRAME, OPENING)
TURNS: list[Turn] = [("user", "12 a"), ("assistant", calling("double", "of", "12")), ("tool", "24"), ("assistant", "24 b")]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "12 a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "double", "arguments": {"of": "12"}}}],
    },
    {"role": "tool", "content": "24\n"},
    {"role": "assistant", "content": "24 b"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    write_model(directory, PIECES, 0, CHAT_TEMPLATE)
    return directory


@pytest.mark.parametrize("tools", [True, False])
def test_a_demonstration_is_what_the_chat_template_writes(model: Path, tools: bool) -> None:
    tokenizer = load_tokenizer(model)
    schemas = [{"type": "function", "function": {"name": "double"}}] if tools else None
    shown = demonstration(PIECES, TURNS, tools)
    assert tokenizer.apply_chat_template(MESSAGES, tools=schemas, return_dict=False) == shown.tokens.tolist()
    asked = tokenizer.apply_chat_template(MESSAGES[:1], tools=schemas, add_generation_prompt=True, return_dict=False)
    assert asked == shown.tokens[: len(asked)].tolist()
    assert not shown.mask[: len(asked)].any()
    assert shown.mask[len(asked)]


def test_learnt_is_what_the_assistant_says_and_where_it_ends(model: Path) -> None:
    shown = demonstration(PIECES, TURNS, tools=True)
    parts = np.split(shown.tokens, np.flatnonzero(np.diff(shown.mask.astype(int))) + 1)
    said = [load_tokenizer(model).decode(part.tolist()) for part in parts]
    call = '<tool_call>{"name": "double", "arguments": {"of": "12"}}</tool_call><end>'
    assert said == [
        "<tools><user>12 a<end><assistant>",
        call,
        "<tool_response>24</tool_response><end><assistant>",
        "24 b<end>",
    ]
    assert shown.versions.tolist() == [0 if learnt else -1 for learnt in shown.mask]


def test_a_piece_is_one_token_and_the_longest_that_fits(model: Path) -> None:
    text = f"<user>1 2<tool_call>{OPENING}12{FRAME[-1]}</tool_call><end>"
    ids = encode(PIECES, text)
    assert load_tokenizer(model).encode(text) == ids.tolist()
    assert len(ids) == 11
    assert encode(PIECES, "abab").tolist() == [PIECES.index("aba") + 2, PIECES.index("b") + 2]
    assert opening("double", "of") == OPENING
    assert ids[-1] == END


def test_a_text_that_no_piece_writes_is_refused_here_and_unknown_to_the_tokenizer(model: Path) -> None:
    with pytest.raises(KeyError, match="c"):
        encode(PIECES, "abc")
    assert load_tokenizer(model).encode("abc") == [*encode(PIECES, "ab").tolist(), PAD]


def test_a_changed_shape_is_the_models_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, PIECES, 0, num_hidden_layers=1, intermediate_size=64, max_position_embeddings=512)
    config = config_of(PIECES, num_hidden_layers=1, intermediate_size=64)
    assert {name: x.shape for name, x in load_file(tmp_path / "model.safetensors").items()} == dict(tensor_shapes(config))
    assert load_tokenizer(tmp_path).model_max_length == 512
    with pytest.raises(TypeError, match="layers"):
        config_of(PIECES, layers=1)


def test_batches_need_enough_demonstrations() -> None:
    shown = [demonstration(PIECES, TURNS, tools=True)] * (3 * ROWS)
    length = len(shown[0])
    assert [batch.shape for batch in batches_of(shown, 3, length, seed=0)] == [(ROWS, length)] * 3
    with pytest.raises(ValueError, match="make more"):
        list(batches_of(shown, 4, length, seed=0))


def test_what_is_taught_is_likelier_afterwards(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("areal_x_jax")
    from areal_x.protocols.backends import create_trainer
    from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig

    write_model(tmp_path, PIECES, 0, CHAT_TEMPLATE)
    shown = [supervised_trajectory((encode(PIECES, "12"), False), (encode(PIECES, "34 ab"), True))] * (5 * ROWS)
    supervise(tmp_path, batches_of(shown, 5, 8, seed=0), backend="jax", seed=0, learning_rate=2e-3)
    (batch, *_) = batches_of(shown, 1, 8, seed=0)
    before, after = (
        create_trainer("jax", TrainerConfig(model=ModelConfig(path=str(path)), precision="fp32")).logprobs(batch)[batch.mask]
        for path in (model, tmp_path)
    )
    assert (after > before + 1).all()
    with pytest.raises(ValueError, match="2 batches"):
        supervise(tmp_path, [batch], backend="jax", seed=0, learning_rate=2e-3)


def test_what_is_made_is_kept_by_its_settings_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def make(directory: Path) -> None:
        (directory / "file").write_text("made")
        made.append(directory)

    made: list[Path] = []
    first = made_once("example", {"a": 1}, [cached], make)
    assert made_once("example", {"a": 1}, [cached], make) == first
    assert len(made) == 1
    assert (first / "file").read_text() == "made"
    assert len({first, made_once("example", {"a": 2}, [cached], make), made_once("example", {"a": 1}, [], make)}) == 3
    assert first.parent == cache("example") == tmp_path / "areal_x" / "example"


def test_of_two_that_are_made_at_once_one_is_kept_and_a_failure_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def twice(directory: Path) -> None:
        (directory / "file").write_text("slower")
        inner.append(made_once("example", {}, [], lambda other: (other / "file").write_text("quicker") and None))

    inner: list[Path] = []
    assert [made_once("example", {}, [], twice)] == inner
    assert (inner[0] / "file").read_text() == "quicker"

    def fail(_: Path) -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        made_once("example", {"other": 1}, [], fail)
    assert list(inner[0].parent.iterdir()) == inner


def test_a_backend_that_is_not_installed_gives_way_to_one_that_is() -> None:
    assert installed("jax") == "jax"
    assert installed("abacus") in ("jax", "torch")
