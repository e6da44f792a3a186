"""The text of tokens, and the search for a text among trajectories.

The journal has the ids of tokens. Their text needs the tokenizer of the run's model, of which only
tokenizer.json is read: neither transformers nor a model is loaded.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from areal_x.errors import UserError
from areal_x.run import checkpoint

FILE = "tokenizer.json"
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """The bytes of each token."""

    def __init__(self, file: Path) -> None:
        """Raises: ValueError or OSError for a file that is not a tokenizer's."""
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"{file} cannot be read ({error})") from error
        self.file = file
        described = json.loads(file.read_text(encoding="utf-8"))
        added = {x["id"]: x["content"] for x in described.get("added_tokens", ())}
        bytes_of = _reader(described.get("decoder"))
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._bytes: list[bytes] = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, id in vocabulary.items():
            self._bytes[id] = (
                added[id].encode("utf-8", "replace") if id in added else bytes_of(token)
            )

    def __len__(self) -> int:
        return len(self._bytes)

    def bytes_of(self, tokens: Sequence[int]) -> bytes:
        """Returns the bytes of all tokens together."""
        table = self._bytes
        try:
            return b"".join([table[token] for token in tokens])
        except IndexError:  # a padded vocabulary has ids that no token has
            return b"".join([table[x] if 0 <= x < len(table) else b"" for x in tokens])

    def text(self, tokens: Sequence[int]) -> str:
        return self.bytes_of(tokens).decode("utf-8", "replace")

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Returns a text for each token. A character whose bytes are in several tokens is the text
        of the last of them; the others are ""."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        table = self._bytes
        return [
            decoder.decode(table[x]) if 0 <= x < len(table) else decoder.decode(b"", True) + UNKNOWN
            for x in tokens
        ]


def tokenizer_file(given: Path | None) -> Path | None:
    """Returns the tokenizer.json that a command line names, by its folder or itself.

    Raises: UserError if it is not there.
    """
    if given is None:
        return None
    file = given / FILE if given.is_dir() else given
    if not file.is_file():
        raise UserError(f"there is no {file}")
    return file


def find_tokenizer(run: Path, settings: Mapping[str, Any]) -> Path | None:
    """Returns the tokenizer.json of a run: of its newest checkpoint, of the model's directory, or of
    the hub's cache on this machine; None if it is in none of them."""
    for step in reversed(checkpoint.steps(run)):
        if (file := run / "checkpoints" / str(step) / "trainer" / FILE).is_file():
            return file
    path = settings.get("model.path")
    if not isinstance(path, str) or path.startswith("@"):
        return None
    if (file := Path(path) / FILE).is_file():
        return file
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(path, FILE)
    except ValueError:  # not the name of a repository
        return None
    return Path(found) if isinstance(found, str) else None


def _reader(decoder: Any) -> Any:
    """Returns the function from a token's name in the vocabulary to its bytes, by the tokenizer's
    decoder."""
    kinds = {x["type"] for x in (decoder or {}).get("decoders", [decoder or {}]) if "type" in x}
    if "ByteLevel" in kinds:
        letters = byte_letters()
        return lambda token: bytes(letters[x] for x in token if x in letters)
    if "WordPiece" in kinds:
        return lambda token: (
            token.removeprefix("##") if token.startswith("##") else f" {token}"
        ).encode("utf-8", "replace")
    return _sentencepiece


def _sentencepiece(token: str) -> bytes:
    if found := BYTE.fullmatch(token):
        return bytes([int(found[1], 16)])
    return token.replace("\u2581", " ").encode("utf-8", "replace")


@cache
def byte_letters() -> dict[str, int]:
    """Returns the byte that each letter of a byte-level vocabulary stands for (GPT-2's table): bytes
    that are printable in Latin-1 stand for themselves, the others for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [x for x in range(256) if x not in printable]
    return {chr(x): x for x in printable} | {chr(256 + i): x for i, x in enumerate(others)}
