"""The rules of speculative decoding, for the embedded samplers of every backend: what is guessed from
a sequence's own tokens, and how many guessed tokens are taken.

A pass of the model over the newest token and `tokens` guessed ones gives the distributions of all
positions after them. Each position is sampled with the random number that it would have without
speculation, and positions count as long as the token before them was guessed right: only then was
the model fed the tokens that were sampled. So a sequence with a seed has the same tokens with
speculation as without, up to the rounding of logits that are computed together.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Int

from areal_x.protocols.speculation import Speculation


def continuations(
    xp: Any,
    history: Int[Any, "rows columns"],
    lengths: Int[Any, " rows"],
    speculation: Speculation,
) -> Int[Any, "rows tokens"]:
    """Returns what followed the last tokens of each sequence where they stood before (prompt lookup);
    -1 if they stood nowhere.

    Of the places where the most of the last tokens stand again, up to `longest` and no fewer than
    `shortest`, the newest counts. If less than `tokens` tokens followed it, the sequence repeats
    itself, and the guess is that it goes on doing so.

    xp: numpy, or jax.numpy on a device. history: the tokens of each sequence, of which the first
    `lengths`, at least one, count. Source: Saxena, Prompt Lookup Decoding, 2023.
    """
    columns = xp.arange(history.shape[1])
    newest = lengths[:, None] - 1
    alike = columns < newest  # so far, the tokens that end here are those at the sequence's end
    count = xp.zeros(history.shape, dtype="int32")
    for back in range(speculation.longest):
        tail = xp.take_along_axis(history, xp.maximum(newest - back, 0), axis=1)
        alike = alike & (xp.roll(history, back, axis=1) == tail) & (columns >= back)
        count = count + alike
    places = xp.where(count >= speculation.shortest, count * history.shape[1] + columns, -1)
    end = xp.argmax(places, axis=1)[:, None]
    ahead = xp.arange(speculation.tokens) % xp.maximum(newest - end, 1)
    guessed = xp.take_along_axis(history, end + 1 + ahead, axis=1)
    return xp.where(places.max(axis=1)[:, None] >= 0, guessed, -1)


def taken(
    xp: Any,
    sampled: Int[Any, "rows width"],
    guessed: Int[Any, "rows width-1"],
    stops: Int[Any, "rows stops"],
    left: Int[Any, " rows"],
) -> tuple[Bool[Any, "rows width"], Bool[Any, " rows"]]:
    """Returns which positions of a pass count, the first ones of each row; and the rows that end with
    a stop token.

    sampled: a token for each position. guessed: what the positions after the first were fed; -1 is
    never right. stops: the rows' stop tokens, -1 for none. left: most tokens to take; rows with 0
    take none.
    """
    ends = (sampled[:, :, None] == stops[:, None, :]).any(-1)
    goes_on = (sampled[:, :-1] == guessed) & ~ends[:, :-1]
    first = xp.ones((len(sampled), 1), dtype=bool)
    reached = xp.cumprod(xp.concatenate([first, goes_on], axis=1), axis=1) > 0
    counts = reached & (xp.arange(sampled.shape[1]) < left[:, None])
    return counts, (counts & ends).any(-1)
