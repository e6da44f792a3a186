"""A chat in the terminal with a model that learns from your thumbs. Any number of people may have
one at once.

    python -m areal_x.train examples/assistant/tiny.gin        # serves and learns, and writes gateway.json
    python examples/assistant/chat.py                          # beside it, in another terminal

What you type is said. `+` and `-` judge the last answer, `+2` and `-2` the second one, now or
later. `/new` begins another conversation. Those in which anything was judged become training steps
as they end: an answer learns from its own thumb and from those that the rest of its conversation
was given. The others are counted, and teach nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from openai import APIConnectionError, APIStatusError, BadRequestError, OpenAI

from areal_x.agents import Session, SessionError, session

THUMB = re.compile(r"([+-])(\d*)")
WORTH = {"+": 1.0, "-": -1.0}
NEW = "/new"


def converse(episode: Session, lines: Iterable[str], say: Callable[[str], object]) -> bool:
    """One conversation. Whether another is wanted: the lines may be at their end."""
    messages: list[dict[str, str]] = []
    calls: list[str] = []
    with OpenAI(base_url=episode.base_url, api_key=episode.key) as client:
        for line in lines:
            if line == NEW:
                return True
            if thumb := THUMB.fullmatch(line):
                say(judged(episode, calls, thumb[1], int(thumb[2] or len(calls))))
                continue
            asked = [*messages, {"role": "user", "content": line}]
            try:
                answer = client.chat.completions.create(model="assistant", messages=asked)
            except BadRequestError as error:  # as where the conversation is too long
                say(f"({error.message})")
                continue
            except APIStatusError as error:  # it is over
                say(f"({error.message}; this is a new conversation)")
                return True
            said = answer.choices[0].message.content or ""
            messages = [*asked, {"role": "assistant", "content": said}]
            calls.append(answer.id)
            say(f"{len(calls)}: {said}")
    return False


def judged(episode: Session, calls: list[str], thumb: str, number: int) -> str:
    """What is said of it."""
    if not 1 <= number <= len(calls):
        return f"(there is no answer {number})"
    try:
        episode.reward(WORTH[thumb], calls[number - 1])
    except SessionError as error:
        return f"({error})"
    return "(thank you)"


def conversations(
    lines: Iterator[str], say: Callable[[str], object], address: str | None = None
) -> None:
    """One after the other, until no line is left. address: the file that the run wrote,
    gateway.json by default.

    Raises: OSError or APIConnectionError where there is no run, or no more.
    """
    more = True
    while more:
        episode = session(address)
        more = converse(episode, lines, say)
        with suppress(SessionError):  # it was over before
            episode.end()


def typed() -> Iterator[str]:
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("> ").strip()


if __name__ == "__main__":
    try:
        conversations(typed(), print)
    except (OSError, APIConnectionError) as error:
        sys.exit(f"no run answers: {error}")
