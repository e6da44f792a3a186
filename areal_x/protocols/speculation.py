"""Speculative decoding: which tokens are guessed ahead, so that one pass of the model can take
several. What is sampled stays the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gin

from areal_x.errors import ConfigError, at_least, one_of, positive

METHODS = ("none", "ngram", "draft")
MOST_TOKENS = 32  # a longer draft is hardly ever accepted, and each of its tokens costs a position


@gin.configurable("speculation")
@dataclass(frozen=True)
class Speculation:
    """Speculative decoding by any engine: a cheap guess of the next tokens, which the model then
    checks together in one pass. No token is sampled from another distribution; how it is done is in
    docs/rollout.md."""

    method: str = "none"
    """Where guesses come from. "none": nothing is guessed. "ngram": what followed the last tokens
    where they stood earlier in the same sequence, prompt included (prompt lookup). "draft": a smaller
    model, `draft`."""
    tokens: int = 4
    """Most tokens that are guessed ahead in one pass."""
    longest: int = 4
    """With "ngram": the number of last tokens to look for; if they are nowhere, one less, and so
    on."""
    shortest: int = 2
    """With "ngram": the least number of last tokens that must be found again for a guess."""
    draft: str = ""
    """With "draft": the directory of a smaller model with the policy's tokenizer. It is never
    trained, so its guesses get worse as the policy leaves it."""

    def __post_init__(self) -> None:
        one_of("speculation.method", self.method, METHODS)
        positive("speculation.tokens", self.tokens)
        if self.tokens > MOST_TOKENS:
            raise ConfigError("speculation.tokens", self.tokens, f"at most {MOST_TOKENS}")
        positive("speculation.shortest", self.shortest)
        at_least("speculation.longest", self.longest, self.shortest)
        if self.method == "draft" and not self.draft:
            wanted = "the directory of a smaller model with speculation.method = 'draft'"
            raise ConfigError("speculation.draft", self.draft, wanted)
        if self.method != "draft" and self.draft:
            wanted = f"left out with speculation.method = {self.method!r}, or set 'draft'"
            raise ConfigError("speculation.draft", self.draft, wanted)
        if self.draft:  # whole: processes elsewhere have other working directories
            whole = str(Path(self.draft).expanduser().absolute())
            object.__setattr__(self, "draft", whole)

    @property
    def active(self) -> bool:
        return self.method != "none"


NOTHING = Speculation()


@dataclass(frozen=True)
class Guesses:
    """Counts of what was guessed, over sequences: a pass of the model over three of them counts as
    three passes."""

    passes: int = 0
    drafted: int = 0
    """Tokens that were guessed."""
    accepted: int = 0
    """Guessed tokens that were sampled, too, and each saved a pass."""

    def __add__(self, more: Guesses) -> Guesses:
        return Guesses(
            self.passes + more.passes, self.drafted + more.drafted, self.accepted + more.accepted
        )

    @property
    def metrics(self) -> dict[str, float]:
        """Accepted tokens per pass and sequence, and the accepted share of the guessed; none without
        a pass."""
        if not self.passes:
            return {}
        share = {"speculation/accepted_share": self.accepted / self.drafted} if self.drafted else {}
        return {"speculation/accepted_per_pass": self.accepted / self.passes, **share}
