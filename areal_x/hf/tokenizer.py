"""The tokenizer of a model directory, as transformers loads it, and checks that two models share
their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from filecmp import cmp
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.errors import ConfigError, UserError
from areal_x.hf.config_defaults import described_text

# Files with a vocabulary, in any of the forms that tokenizers have on the hub.
FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")


def load_tokenizer(directory: Path | str) -> Any:
    """Returns the tokenizer of a model's directory, as transformers loads it.

    Raises: UserError if the directory has no tokenizer that transformers can load.
    """
    from transformers import AutoTokenizer

    directory = Path(directory)
    wanted = (
        "copy tokenizer.json and tokenizer_config.json there from the model that it was made of"
    )
    # Without files, transformers would make an empty tokenizer of the model's kind.
    if not has_tokenizer(directory):
        raise UserError(f"{directory} has no tokenizer: {wanted}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # each kind of tokenizer raises errors of its own
        reason = (str(error).strip() or type(error).__name__).split("\n")[0][:200]
        raise UserError(f"{directory} has no tokenizer that loads ({reason}): {wanted}") from error
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):
        raise UserError(f"the tokenizer of {directory} has no tokens but special ones: {wanted}")
    return tokenizer


def has_tokenizer(directory: Path) -> bool:
    return any(True for pattern in FILES for _ in directory.glob(pattern))


def check_vocabulary(binding: str, other: Path, directory: Path) -> None:
    """Checks that each id means the same token to the model of `other` as to that of `directory`,
    which is trained.

    The tokenizers are compared, not the sizes of the embeddings, which are padded and may differ
    between models with the same tokens. Without two tokenizers, only the sizes can be compared.

    Raises: ConfigError if they differ.
    """
    if other.resolve() == directory.resolve():
        return
    theirs, ours = (int(described_text(path).get("vocab_size") or 0) for path in (other, directory))
    if not has_tokenizer(other) or not has_tokenizer(directory):
        if theirs != ours:
            sizes = f"it has {theirs}, and there are no two tokenizers to compare"
            raise ConfigError(
                binding, str(other), f"a model with the same {ours} tokens as {directory} ({sizes})"
            )
        return
    if not _same_files(other, directory):
        check_tokens(binding, other, tokens_of(directory), str(directory))
    if max(tokens_of(other).values()) >= theirs:
        raise ConfigError(
            binding,
            str(other),
            f"a model that has all of its tokenizer's tokens: its vocab_size is {theirs}",
        )


def check_tokens(binding: str, other: Path, ours: Mapping[str, int], whose: str) -> None:
    """Raises: ConfigError if the tokenizer of `other` does not have exactly these tokens."""
    theirs = tokens_of(other)
    if theirs == ours:
        return
    differing = {
        token: (theirs.get(token), ours.get(token)) for token, _ in theirs.items() ^ ours.items()
    }
    token, (there, here) = min(
        differing.items(), key=lambda item: min(i for i in item[1] if i is not None)
    )
    numbers = ["none" if number is None else str(number) for number in (here, there)]
    wanted = (
        f"a model with the tokens of {whose}: {len(differing)} differ, such as {token!r}, which is"
        f" {numbers[0]} there and {numbers[1]} in the other's tokenizer"
    )
    raise ConfigError(binding, str(other), wanted)


def check_known(tokens: Any, vocabulary: int, directory: Path) -> None:
    """Raises: UserError for a token outside the `vocabulary` (a size) of the model of
    `directory`."""
    largest = int(np.max(tokens, initial=0))
    if largest >= vocabulary:
        raise UserError(
            f"token {largest} is outside the vocabulary of {vocabulary} of the model in"
            f" {directory}: its tokenizer must be the one that the model was made for"
        )


def tokens_of(directory: Path) -> Mapping[str, int]:
    """The id of each token, special ones included."""
    changed = tuple(
        sorted((str(f), f.stat().st_mtime_ns) for pattern in FILES for f in directory.glob(pattern))
    )
    return _tokens_of(directory, changed)


@lru_cache(8)
def _tokens_of(directory: Path, changed: tuple[tuple[str, int], ...]) -> Mapping[str, int]:
    tokens: Mapping[str, int] = load_tokenizer(directory).get_vocab()
    return tokens


def _same_files(one: Path, other: Path) -> bool:
    """True if both directories have the same tokenizer files, which then need not be loaded."""
    names = {
        f.name for directory in (one, other) for pattern in FILES for f in directory.glob(pattern)
    }
    both = [(one / name, other / name) for name in names]
    return all(a.is_file() and b.is_file() and cmp(a, b, shallow=False) for a, b in both)
