"""A chat in the terminal with a model that is trained on your ratings. Any number of people may chat
at once.

    python -m areal_x.train examples/assistant/tiny.gin        # serves and trains, and writes gateway.json
    python examples/assistant/chat.py                          # at the same time, in another terminal

Type a message to send it. `+` and `-` rate the last answer, `+2` and `-2` the second one, now or
later. `/new` starts another conversation. Conversations with a rating are trained on when they end:
an answer is credited with its own rating and with those of the rest of its conversation. The others
are counted but not trained on.
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
    """Holds one conversation. Returns True if another one should follow, False at the end of the
    input."""
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
            except BadRequestError as error:  # for example, the conversation is too long
                say(f"({error.message})")
                continue
            except APIStatusError as error:  # the session is over
                say(f"({error.message}; this is a new conversation)")
                return True
            said = answer.choices[0].message.content or ""
            messages = [*asked, {"role": "assistant", "content": said}]
            calls.append(answer.id)
            say(f"{len(calls)}: {said}")
    return False


def judged(episode: Session, calls: list[str], thumb: str, number: int) -> str:
    """Sends the rating of an answer and returns the reply to show."""
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
    """Holds conversations until the input ends.

    Args:
        lines: The user's input.
        say: Prints a reply.
        address: The file that the run wrote, gateway.json by default.

    Raises: OSError or APIConnectionError if the run does not exist or has ended.
    """
    more = True
    while more:
        episode = session(address)
        more = converse(episode, lines, say)
        with suppress(SessionError):  # it had already ended
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
