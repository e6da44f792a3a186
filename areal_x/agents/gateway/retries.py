"""Retried requests, whose response was lost in transit: they get that response, not another one.

A second completion would leave the first as a call that no agent ever saw but that is trained on.
Official clients number their attempts at a request (`x-stainless-retry-count`); any client may name
a request (`idempotency-key`).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from areal_x.agents.gateway.exchange import CallAnswer

MOST_KEPT = 64  # latest responses of a session: a retry comes within seconds
Client = tuple[str, int]  # its address


@dataclass(frozen=True)
class Attempt:
    """One request. digest: equal for equal requests. name: the client's, or empty. number: of the
    attempt."""

    digest: bytes
    name: str
    number: int


@dataclass(frozen=True)
class SentAnswer:
    """A response that was computed. client: where it was sent."""

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
    """The latest responses of one session."""

    # by the ids of their calls
    _given: OrderedDict[tuple[str, ...], SentAnswer] = field(default_factory=OrderedDict)
    _asked: Counter[bytes] = field(default_factory=Counter)  # first attempts that were started

    def begin(self, attempt: Attempt) -> None:
        """Records that this attempt will get a new response."""
        self._asked[attempt.digest] += attempt.number == 0

    def keep(self, given: SentAnswer) -> None:
        ids = tuple(one.id for one in given.answers)
        self._given[ids] = given
        self._given.move_to_end(ids)
        if len(self._given) > MOST_KEPT:
            self._given.popitem(last=False)

    def find_lost(
        self, attempt: Attempt, client: Client | None, is_open: Callable[[Client | None], bool]
    ) -> SentAnswer | None:
        """Returns the response that this attempt requests again, and reassigns it to this client;
        None if there is none.

        An agent may send the same request several times on purpose. So the response to a numbered
        attempt is one whose connection is closed, and only if every first attempt was answered; the
        response to a named one is that of the same name.
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
