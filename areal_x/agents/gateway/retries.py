"""Requests that clients send again, as the answer to them was lost on the way: they get that
answer, not another one.

A second completion would leave the first as a call that nobody ever saw, and that is trained on.
Official clients number the attempts at a request (`x-stainless-retry-count`); any client may name a
request (`idempotency-key`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from areal_x.agents.gateway.exchange import CallAnswer

KEPT = 64  # answers of a session, the latest: a retry comes within seconds
Client = tuple[str, int]  # its address


@dataclass(frozen=True)
class Attempt:
    """One request. digest: the same for what is asked again. name: the client's, or nothing.
    number: of the attempt."""

    digest: bytes
    name: str
    number: int


@dataclass(frozen=True)
class SentAnswer:
    """An answer that was made. client: where it was sent to."""

    attempt: Attempt
    answers: Sequence[CallAnswer]
    client: Client | None


def attempt_at(path: str, headers: Mapping[str, str], body: bytes) -> Attempt:
    name = headers.get("idempotency-key", "")
    number = headers.get("x-stainless-retry-count", "")
    digest = blake2b(f"{path}\0{name}\0".encode(errors="replace") + blake2b(body).digest()).digest()
    return Attempt(digest, name, int(number) if number.isdecimal() and len(number) < 4 else 0)


@dataclass
class SentAnswers:
    """The latest answers of one session."""

    # by the ids of their calls
    _given: OrderedDict[tuple[str, ...], SentAnswer] = field(default_factory=OrderedDict)
    _asked: Counter[bytes] = field(default_factory=Counter)  # first attempts that were begun

    def begin(self, attempt: Attempt) -> None:
        """It will be answered anew."""
        self._asked[attempt.digest] += attempt.number == 0

    def keep(self, given: SentAnswer) -> None:
        ids = tuple(one.id for one in given.answers)
        self._given[ids] = given
        self._given.move_to_end(ids)
        if len(self._given) > KEPT:
            self._given.popitem(last=False)

    def find_lost(
        self, attempt: Attempt, client: Client | None, is_open: Callable[[Client | None], bool]
    ) -> SentAnswer | None:
        """The answer that this attempt asks for again, which is from now on sent to this client;
        None where there is none.

        An agent may ask the same thing several times on purpose. So the answer of a numbered
        attempt is one whose connection is gone, and only where every first attempt was answered;
        that of a named one is the one of this name.
        """
        if not attempt.name and not attempt.number:
            return None
        same = [given for given in self._given.values() if given.attempt.digest == attempt.digest]
        if not attempt.name:
            same = (
                []
                if len(same) < self._asked[attempt.digest]
                else [x for x in same if not is_open(x.client)]
            )
        if not same:
            return None
        found = replace(same[0], client=client)
        self.keep(found)
        return found
