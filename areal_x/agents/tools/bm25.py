"""BM25: ranks texts by the words that they share with a query."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float32, Int64

WORD = re.compile(r"\w+")


def words_of(text: str) -> list[str]:
    """Returns the words of a text, in order, without regard to case."""
    return WORD.findall(text.casefold())


class BM25:
    """An inverted index of texts, which are not kept: about 8 bytes for each different word of each
    text.

    Scores are Lucene's: the sum over the query's words of

        ln(1 + (N - n + ½) / (n + ½)) · f / (f + k1 · (1 - b + b · L / mean L))

    N texts, of which n have the word; f: times that the text has it; L: words of the text. Source:
    Kamphuis et al. 2020, "Which BM25 do you mean?".
    """

    def __init__(self, texts: Iterable[str], k1: float = 1.5, b: float = 0.75) -> None:
        self._ids: dict[str, int] = {}
        words, places, counts, lengths = (array("q") for _ in range(4))
        for place, text in enumerate(texts):
            found = words_of(text)
            lengths.append(len(found))
            for word, count in Counter(found).items():
                words.append(self._ids.setdefault(word, len(self._ids)))
                places.append(place)
                counts.append(count)
        ids: Int64[np.ndarray, " pairs"] = np.array(words, np.int64)
        order = np.argsort(ids, kind="stable")
        # the pairs of word w are those from _starts[w] to _starts[w + 1]
        self._starts = np.searchsorted(ids[order], np.arange(len(self._ids) + 1))
        self._places = np.array(places, np.int64)[order].astype(np.int32)
        self._size = len(lengths)
        length = np.array(lengths, np.float64)
        relative = length / max(length.mean(), 1.0) if self._size else length
        often = np.array(counts, np.float64)[order]
        having = np.diff(self._starts)
        rarity = np.log1p((self._size - having + 0.5) / (having + 0.5))
        saturated = often / (often + k1 * (1 - b + b * relative[self._places]))
        self._scores: Float32[np.ndarray, " pairs"] = (
            np.repeat(rarity, having) * saturated
        ).astype(np.float32)

    def __len__(self) -> int:
        return self._size

    def find(self, query: str, most: int) -> Sequence[tuple[int, float]]:
        """Returns the numbers of the best texts with at least one of the query's words, and their
        scores; the best first, and of equal ones the first."""
        total = np.zeros(self._size, np.float32)
        for word, times in Counter(words_of(query)).items():
            if (id := self._ids.get(word)) is not None:
                pairs = slice(self._starts[id], self._starts[id + 1])
                total[self._places[pairs]] += times * self._scores[pairs]  # a place occurs once
        found = np.flatnonzero(total)
        best = found[np.argsort(-total[found], kind="stable")[:most]]
        return [(int(place), float(total[place])) for place in best]
