"""Which tokens end a completion: those that the model's files name, and the one that its chat
template ends a turn with.

A model that was trained to talk ends its turn with a token of its own (Gemma's <end_of_turn>, Phi's
<|end|>, GLM's <|user|>), often another than the tokenizer's eos_token. generation_config.json lists
it then, as a rule.
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
CACHED = 16  # tokenizers: what follows from one is asked for in every episode
REPLY = "placeholder0"  # an assistant's words, to find what a template writes behind them
USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": REPLY}


@dataclass(frozen=True)
class Ending:
    """How a written answer ends: a text, which is empty for almost every model, and a token."""

    text: str
    token: int


def stop_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends what a model says, the tokenizer's own first. Raises UserError where
    there is none."""
    if found := ends(tokenizer):
        return found
    raise UserError(
        f"the tokenizer of {getattr(tokenizer, 'name_or_path', '') or 'the model'} has no end"
        " token, so no completion could end: set eos_token in its tokenizer_config.json"
    )


def ends(tokenizer: Any) -> tuple[int, ...]:
    """As `stop_tokens`, and none where there is none."""
    return _ends(tokenizer, template_of(tokenizer))


@lru_cache(maxsize=CACHED)
def _ends(tokenizer: Any, template: str) -> tuple[int, ...]:
    turn = turn_end(tokenizer)
    return tuple(dict.fromkeys((*named_ends(tokenizer), *(() if turn is None else (turn.token,)))))


def named_ends(tokenizer: Any) -> tuple[int, ...]:
    """The tokenizer's eos_token, and the eos_token_id, one or several, of generation_config.json
    and config.json beside it.

    A token that is text ends nothing there: in a config that nobody made for its tokenizer stands a
    default (Llama's is 2).
    """
    own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    configs = [json.loads(file.read_text()) for file in files_of(tokenizer)]
    found = [
        token
        for config in configs
        for part in (config, config.get("text_config") or {})
        for token in ids_in(part)
    ]
    there = marks(tokenizer) if found else {}
    return tuple(dict.fromkeys((*own, *(token for token in found if token in there))))


def turn_end(tokenizer: Any) -> Ending | None:
    """What the chat template writes behind an assistant's last reply, up to the first token that is
    no text; where nothing stands there, behind a reply that a user answers. None without a template
    or such a token."""
    return _turn_end(tokenizer, template_of(tokenizer))


@lru_cache(maxsize=CACHED)
def _turn_end(tokenizer: Any, template: str) -> Ending | None:
    names = marks(tokenizer) if template else {}
    for messages in ([USER, ASSISTANT], [USER, ASSISTANT, USER]) if names else ():
        try:
            shown = str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # a template may raise anything
            continue
        behind = shown.rpartition(REPLY)[2] if REPLY in shown else ""
        places = [
            (behind.index(name), -len(name), token)
            for token, name in names.items()
            if name in behind
        ]
        if places:
            place, _, token = min(places)
            return Ending(behind[:place], token)
    return None


def turn_ending(tokenizer: Any) -> Ending:
    """How an assistant's turn ends that is written by the chat template; where that ends none, as a
    text does."""
    return turn_end(tokenizer) or text_ending(tokenizer)


def text_ending(tokenizer: Any) -> Ending:
    """How a text ends that no template wrote. Raises UserError where nothing ends it."""
    return Ending("", stop_tokens(tokenizer)[0])


def marks(tokenizer: Any) -> dict[int, str]:
    """The tokens that are no text but stand for themselves, as they are written."""
    special = [int(token) for token in tokenizer.all_special_ids]
    found = {
        int(token): str(about.content) for token, about in tokenizer.added_tokens_decoder.items()
    }
    found |= dict(zip(special, map(str, tokenizer.convert_ids_to_tokens(special)), strict=True))
    return {token: name for token, name in found.items() if name.strip()}  # some add runs of blanks


def template_of(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "chat_template", None) or "")


def files_of(tokenizer: Any) -> list[Path]:
    """Those of the model that the tokenizer lies beside."""
    directory = getattr(tokenizer, "name_or_path", None)
    return [file for name in FILES if directory and (file := Path(directory) / name).is_file()]


def ids_in(config: Mapping[str, Any]) -> list[int]:
    named = config.get("eos_token_id")
    return [
        token for token in (named if isinstance(named, list) else [named]) if type(token) is int
    ]
