"""The assistant's turns of a whole conversation, as its chat template writes them: which texts are trained
on, and which are their context.

Where the model's turns begin and end is what the chat template says: by its `{% generation %}` tags,
or else by rendering the conversation up to each turn, with the turn opened as for generation. The context
is then exactly the prompt that an engine would get, and the turn what it would be asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from areal_x.hf.chat_form import REASONING, THINK, THOUGHT, WORD, chat_form, with_values
from areal_x.hf.endings import ends, special_tokens, turn_ending
from areal_x.types import Message

ASSISTANT = "assistant"
TAG = re.compile(r"{%-?\s*generation\s*-?%}")
USER = {"role": "user", "content": "a"}
Piece = tuple[str, bool]  # a text, and whether it is trained on
Render = Callable[..., str]


def pieces_of(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[list[Piece]]:
    """Returns the sequences of a conversation, each as texts of which some are trained on: several where
    the template rewrites earlier turns.

    variables: more of the chat template's. A message with `"weight": 0` is context. Raises: ValueError if
    the template does not render a turn after what precedes it, or leaves out a message.
    """
    form = chat_form(tokenizer)
    ready = [form.message(with_values(message)) for message in messages]
    weights = [m.get("weight", 1) != 0 for m in messages]

    def render(part: Sequence[Message], opened: bool = False) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    list(part),
                    tools=tools,
                    tokenize=False,
                    add_generation_prompt=opened,
                    **(variables or {}),
                )
            )
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"the chat template cannot render the messages: {reason}") from error

    if (role := form.unshown_role(ready, partial(render, opened=True))) is not None:
        raise ValueError(f"the chat template leaves out messages of the role {role!r}")
    if TAG.search(str(tokenizer.chat_template)):
        return [_tagged(tokenizer, ready, tools, weights, variables or {})]
    sequences: list[list[Piece]] = []
    for index, message in enumerate(ready):
        if message.get("role") != ASSISTANT:
            continue
        context, turn = _turn(tokenizer, render, ready[:index], message)
        turn = _ended(tokenizer, render, turn, message, ready[index + 1 :])
        so_far = "".join(text for text, _ in sequences[-1]) if sequences else None
        if so_far is not None and context.startswith(so_far):
            sequences[-1] += [(context[len(so_far) :], False), (turn, weights[index])]
        else:
            sequences.append([(context, False), (turn, weights[index])])
    return sequences


def only_last(pieces: Sequence[Piece]) -> list[Piece]:
    """Returns the pieces with the last one that is trained on as the only one."""
    last = max((i for i, (_, trained) in enumerate(pieces) if trained), default=-1)
    return [(text, i == last) for i, (text, _) in enumerate(pieces)]


def _turn(
    tokenizer: Any, render: Render, before: Sequence[Message], message: Message
) -> tuple[str, str]:
    """Returns the context of an assistant's message, which is the prompt that a policy would get, and its
    own text, as rendered at the end of a conversation."""
    whole = render([*before, message])
    opened = render(before, opened=True) if before else ""
    if before and whole.startswith(opened):
        return opened, whole[len(opened) :]
    # Templates that write earlier messages otherwise once they are answered (Mistral's system prompt),
    # or open a turn with a thought that they do not show (DeepSeek); or nothing stands before.
    lead = _lead(render, before, message)
    header = _tail(tokenizer, opened) if before else _header(render)
    start = _behind(lead, header)
    if start is not None:
        return opened or whole[:start], whole[start:]
    if THINK in header:
        shown = opened[: opened.rindex(THINK)] if before else header[: header.rindex(THINK)]
        start = _behind(lead, _tail(tokenizer, shown))
        if start is not None:
            return _thinking(opened or whole[:start], whole[start:], message)
    raise ValueError(
        "the chat template does not write the assistant's turn after the messages before it:"
        " mark it with {% generation %} … {% endgeneration %}"
    )


def _thinking(opened: str, turn: str, message: Message) -> tuple[str, str]:
    """Returns context and text of a turn that the template opens with a thought and shows without: with
    the thought, if the message has one, otherwise as the template shows it."""
    content = message.get("content") or ""
    if THOUGHT not in content or THINK not in opened:
        return opened[: opened.rindex(THINK)] if THINK in opened else opened, turn
    said = content.rpartition(THOUGHT)[2].strip()
    begun = opened[opened.rindex(THINK) + len(THINK) :]
    own = content.removeprefix(THINK).removeprefix(begun)
    return opened, own.rstrip() + turn[turn.rindex(said) + len(said) :]


def _lead(render: Render, before: Sequence[Message], message: Message) -> str:
    """Returns what the template writes before the first words of a message."""
    marked = {**message, "content": WORD, **{key: WORD for key in REASONING if key in message}}
    if calls := message.get("tool_calls"):
        function = {**calls[0]["function"], "name": WORD}
        marked = {**marked, "tool_calls": [{**calls[0], "function": function}, *calls[1:]]}
        marked["content"] = WORD if message.get("content") else message.get("content")
    shown = render([*before, marked])
    return shown[: shown.index(WORD)] if WORD in shown else ""


def _tail(tokenizer: Any, prompt: str) -> str:
    """Returns the end of a prompt, from its last special token on."""
    names = special_tokens(tokenizer).values()
    return prompt[max(0, *(prompt.rfind(name) for name in names)) :]


def _header(render: Render) -> str:
    """Returns what opens a turn behind a user's message."""
    return render([USER], opened=True).removeprefix(render([USER]))


def _behind(lead: str, tail: str) -> int | None:
    """Returns the end of the last `tail` in a text, or None if there is none."""
    start = lead.rfind(tail)
    return start + len(tail) if start >= 0 else None


def _ended(
    tokenizer: Any, render: Render, turn: str, message: Message, later: Sequence[Message]
) -> str:
    """Returns a turn up to its end token. A template that ends a turn with the beginning of the next
    message (GLM's <|user|> and <|observation|>) does not write it behind the last one."""
    names = special_tokens(tokenizer)
    end = names.get(turn_ending(tokenizer).token, "")
    if not end:
        return turn
    if end in turn:
        return turn[: turn.rindex(end) + len(end)]
    all_ends = [names[token] for token in ends(tokenizer) if token in names]
    if turn.endswith(tuple(all_ends)):
        return turn
    calls = message.get("tool_calls")
    is_answered = not later or later[0].get("role") != "user"
    if calls and is_answered:
        answer = {"role": "tool", "content": WORD, "tool_call_id": calls[-1].get("id")}
        with suppress(ValueError):
            shown = render([USER, message, answer])
            before = shown[: shown.index(WORD)]
            found = [(before.rfind(name), name) for name in all_ends if name in before]
            end = max(found)[1] if found else end
    return turn + end


def _tagged(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    weights: Sequence[bool],
    variables: Mapping[str, Any],
) -> list[Piece]:
    """Returns the texts inside and outside of the template's generation tags."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        [list(messages)],
        tools=tools,
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **variables},
    )
    trained = [
        weight
        for message, weight in zip(messages, weights, strict=True)
        if message.get("role") == ASSISTANT
    ]
    # Phi-3's has a further span for the end of a conversation, a special token
    names = set(special_tokens(tokenizer).values())
    further = [texts[0][first:end] in names for first, end in spans[0][len(trained) :]]
    if len(spans[0]) < len(trained) or not all(further):
        raise ValueError(
            f"the chat template has {len(spans[0])} generation spans for {len(trained)} messages of"
            " the assistant"
        )
    trained += trained[-1:] * len(further)
    pieces, at = [], 0
    for (first, end), is_trained in zip(spans[0], trained, strict=True):
        pieces += [(texts[0][at:first], False), (texts[0][first:end], is_trained)]
        at = end
    return pieces
