"""Two models share their tokens if their tokenizers do, whatever the sizes of their embeddings."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from areal_x.errors import ConfigError, UserError
from areal_x.hf.tokenizer import check_vocabulary, load_tokenizer, tokens_of
from areal_x.testing.models import CHARACTERS, write_model, write_tokenizer

check = partial(check_vocabulary, "train.teacher")


def without_tokenizer(directory: Path) -> Path:
    for file in directory.glob("tokenizer*"):
        file.unlink()
    return directory


def test_an_embedding_that_is_padded_further_has_the_same_tokens(tmp_path: Path, tiny_model_dir: Path) -> None:
    check(write_model(tmp_path, vocab_size=64), tiny_model_dir)
    check(tiny_model_dir, tmp_path)


def test_the_same_tokens_in_other_files_are_the_same(tmp_path: Path, tiny_model_dir: Path) -> None:
    other = write_model(tmp_path)
    (other / "tokenizer_config.json").write_text((other / "tokenizer_config.json").read_text() + "\n")
    check(other, tiny_model_dir)


def test_two_characters_that_change_places_are_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    other = write_model(tmp_path)
    write_tokenizer(other, CHARACTERS.replace("23", "32"))
    with pytest.raises(
        ConfigError,
        match=rf"train\.teacher = .* tokens of {tiny_model_dir}: 2 differ, such as '[23]', which is [45] there and [45]",
    ):
        check(other, tiny_model_dir)


def test_a_special_token_more_is_named(tmp_path: Path, tiny_model_dir: Path) -> None:
    other = write_model(tmp_path, vocab_size=64)
    tokenizer = load_tokenizer(other)
    tokenizer.add_tokens(["<think>"], special_tokens=True)
    tokenizer.save_pretrained(other)
    assert tokens_of(other)["<think>"] == 44  # though it was read before
    with pytest.raises(ConfigError, match="1 differ, such as '<think>', which is none there and 44"):
        check(other, tiny_model_dir)


def test_a_tokenizer_with_more_tokens_than_its_model_is_refused(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="a model that has all of its tokenizer's tokens: its vocab_size is 40"):
        check(write_model(tmp_path, vocab_size=40), tiny_model_dir)


def test_without_a_tokenizer_there_is_only_the_size(tmp_path: Path, tiny_model_dir: Path) -> None:
    check(without_tokenizer(write_model(tmp_path / "same")), tiny_model_dir)
    with pytest.raises(ConfigError, match=r"same 44 tokens .* \(it has 50, and there are no two tokenizers"):
        check(without_tokenizer(write_model(tmp_path / "other", vocab_size=50)), tiny_model_dir)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "mistral", "gemma3_text", "phi3"])
def test_a_directory_without_a_tokenizer_is_told_so_and_no_empty_one_is_made(kind: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    (tmp_path / "config.json").write_text(CONFIG_MAPPING[kind]().to_json_string())
    (tmp_path / "generation_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"has no tokenizer: copy tokenizer\.json and tokenizer_config\.json there"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "files, says",
    [
        ({"tokenizer_config.json": '{"tokenizer_class": "Qwen2Tokenizer"}'}, "no tokens but special ones"),
        ({"tokenizer.json": "{}"}, "no tokenizer that loads"),
        ({"tokenizer.json": '{"version": "1.0", "mod'}, "no tokenizer that loads"),
        ({"tokenizer.json": "", "tokenizer_config.json": "[]"}, "no tokenizer that loads"),
    ],
)
def test_a_damaged_tokenizer_is_one_sentence(files: dict[str, str], says: str, tmp_path: Path) -> None:
    without_tokenizer(write_model(tmp_path))
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=says):
        load_tokenizer(tmp_path)
