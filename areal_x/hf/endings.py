"""The tokens that end a completion: those that the model's files name, and the one with which its
chat template ends a turn.

A chat model ends its turn with a token of its own (Gemma's <end_of_turn>, Phi's <|end|>, GLM's
<|user|>), often not the tokenizer's eos_token. generation_config.json usually lists it then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from areal_x.errors import UserError

FILES = ("generation_config.json", "config.json")
CACHED = 16  # tokenizers whose ends are cached, as every episode needs them
REPLY = "placeholder0"  # an assistant's reply, to find the text that a template writes after it
USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": REPLY}


@dataclass(frozen=True)
class Ending:
    """The end of a written answer: a text, which is empty for almost every model, and a token."""

    text: str
    token: int


def stop_tokens(tokenizer: Any) -> tuple[int, ...]:
    """All tokens that end a completion, the tokenizer's own first. Raises: UserError if there are
    none."""
    if found := ends(tokenizer):
        return found
    raise UserError(
        f"the tokenizer of {getattr(tokenizer, 'name_or_path', '') or 'the model'} has no end"
        " token, so no completion could end: set eos_token in its tokenizer_config.json"
    )


def ends(tokenizer: Any) -> tuple[int, ...]:
    """The tokens of `stop_tokens`, or an empty tuple if there are none."""
    return _ends(tokenizer, template_of(tokenizer))


@lru_cache(maxsize=CACHED)
def _ends(tokenizer: Any, template: str) -> tuple[int, ...]:
    turn = turn_end(tokenizer)
    return tuple(dict.fromkeys((*named_ends(tokenizer), *(() if turn is None else (turn.token,)))))


def named_ends(tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's eos_token, and the eos_token_id (one or several) of generation_config.json
    and config.json beside it.

    An id there that is an ordinary text token is ignored: a config that was not adapted to its
    tokenizer has a default (Llama's is 2).
    """
    own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    configs = [json.loads(file.read_text()) for file in files_of(tokenizer)]
    found = [
        token
        for config in configs
        for part in (config, config.get("text_config") or {})
        for token in ids_in(part)
    ]
    special = special_tokens(tokenizer) if found else {}
    return tuple(dict.fromkeys((*own, *(token for token in found if token in special))))


def structural_ends(tokenizer: Any) -> frozenset[int]:
    """The end tokens that the chat template writes by name, or with which it ends the last turn: the
    place of each has a meaning."""
    template, last = template_of(tokenizer), turn_end(tokenizer)
    names = {token: str(tokenizer.convert_ids_to_tokens(token)) for token in ends(tokenizer)}
    written = {token for token, name in names.items() if name in template}
    return frozenset(written if last is None else {*written, last.token})


def turn_end(tokenizer: Any) -> Ending | None:
    """The text that the chat template writes after an assistant's last reply, up to the first
    special token, and that token. If the template writes nothing there, after a reply that a user
    message follows. None without a template or such a token."""
    return _turn_end(tokenizer, template_of(tokenizer))


@lru_cache(maxsize=CACHED)
def _turn_end(tokenizer: Any, template: str) -> Ending | None:
    names = special_tokens(tokenizer) if template else {}
    for messages in ([USER, ASSISTANT], [USER, ASSISTANT, USER]) if names else ():
        try:
            shown = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # a template may raise anything
            continue
        after = shown.rpartition(REPLY)[2] if REPLY in shown else ""
        places = [
            (after.index(name), -len(name), token) for token, name in names.items() if name in after
        ]
        if places:
            place, _, token = min(places)
            return Ending(after[:place], token)
    return None


def turn_ending(tokenizer: Any) -> Ending:
    """The end of an assistant's turn in the chat template, or that of a plain text if the template
    has none."""
    return turn_end(tokenizer) or text_ending(tokenizer)


def text_ending(tokenizer: Any) -> Ending:
    """The end of a plain text, without a template. Raises: UserError if the tokenizer has no end
    token."""
    return Ending("", stop_tokens(tokenizer)[0])


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The special and added tokens, which never result from ordinary text, as they are written."""
    special = [int(token) for token in tokenizer.all_special_ids]
    found = {
        int(token): str(about.content) for token, about in tokenizer.added_tokens_decoder.items()
    }
    found |= dict(zip(special, map(str, tokenizer.convert_ids_to_tokens(special)), strict=True))
    return {token: name for token, name in found.items() if name.strip()}  # some add runs of spaces


def template_of(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "chat_template", None) or "")


def files_of(tokenizer: Any) -> list[Path]:
    """The model's config files in the tokenizer's directory."""
    directory = getattr(tokenizer, "name_or_path", None)
    return [file for name in FILES if directory and (file := Path(directory) / name).is_file()]


def ids_in(config: Mapping[str, Any]) -> list[int]:
    named = config.get("eos_token_id")
    return [
        token for token in (named if isinstance(named, list) else [named]) if type(token) is int
    ]
