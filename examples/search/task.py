"""Questions about an unknown library: its people and towns are invented, determined by the seed.

    Where was Kemo born?                            search("Kemo") → 17 Kemo,  open("17") → Kemo was born in Badu.
    Who is the mayor of the town where Kemo was born?   and then search("Badu"), open("230") → The mayor of Badu is Rila.

`search` ranks documents by BM25, `open` returns the text of one. The reward is 1 if the last answer
is exactly the name, or with `exact = False` contains it in <answer> </answer>.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import gin
import numpy as np

from areal_x import Task, one_of, within
from areal_x.agents import BM25

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
HELD_OUT = 200  # people who do not occur in the training questions
SHOWN = 3  # maximum number of documents in a search result
INSTRUCTION = (
    "Answer with the name alone, in <answer> </answer>. You know nothing of these people and towns:"
    " search for a name, open the documents that you find, and search again where their text names"
    " somebody else."
)


@dataclass(frozen=True)
class Library:
    """Invented people and towns, and the documents about them."""

    home: dict[str, str]
    """Town of each person."""
    mayor: dict[str, str]
    """Mayor of each town."""
    documents: dict[str, tuple[str, str]]
    """Title and text by id."""
    ids: dict[str, str]
    """Id by title."""


@cache
def library(people: int, towns: int, seed: int) -> Library:
    """Creates a library. All names, those of mayors included, are different and have two syllables,
    so a search for a name matches one document title."""
    rng = np.random.default_rng([5, seed])
    syllables = ["".join(pair) for pair in product(CONSONANTS, VOWELS)]
    names = [f"{a}{b}".capitalize() for a, b in product(syllables, syllables)]
    drawn = iter(rng.permutation(names)[: people + 2 * towns].tolist())
    persons = [next(drawn) for _ in range(people)]
    places = [next(drawn) for _ in range(towns)]
    mayor = {place: next(drawn) for place in places}
    home = {
        person: places[i]
        for person, i in zip(persons, rng.integers(towns, size=people).tolist(), strict=True)
    }
    texts = [(person, f"{person} was born in {town}.") for person, town in home.items()]
    texts += [(place, f"The mayor of {place} is {name}.") for place, name in mayor.items()]
    documents = {
        str(id): text for id, text in zip(rng.permutation(len(texts)).tolist(), texts, strict=True)
    }
    return Library(home, mayor, documents, {title: id for id, (title, _) in documents.items()})


@gin.configurable(module="search")
def questions(
    split: str = "train",
    hops: int = 1,
    people: int = 800,
    towns: int = 100,
    instructed: bool = False,
    seed: int = 0,
) -> list[Task]:
    """Returns one question about each person; the last 200 people are in the split "test" only.

    Args:
        split: "train" or "test".
        hops: 1 asks for the town of birth, 2 for its mayor.
        people: Number of people in the library.
        towns: Number of towns in the library.
        instructed: Adds an instruction on how to answer, for models not trained on the task.
        seed: Seed of the library, the same as in `search.tools`.
    """
    one_of("search.questions.split", split, ("train", "test"))
    within("search.questions.hops", hops, 1, 2)
    within("search.questions.people", people, HELD_OUT + 1, 4000)
    within("search.questions.towns", towns, 1, 400)
    shelves = library(people, towns, seed)
    persons = list(shelves.home)
    return [
        Task(
            person,
            [{"role": "user", "content": _question(person, hops, instructed)}],
            _answer(shelves, person, hops),
        )
        for person in (persons[-HELD_OUT:] if split == "test" else persons[:-HELD_OUT])
    ]


@gin.configurable(module="search")
def verify(task: Task, text: str, exact: bool = True) -> float:
    """Returns 1.0 if the answer is the name, otherwise 0.0.

    Args:
        task: The question.
        text: The model's last reply.
        exact: Compares the whole text; False compares the content of the last <answer> </answer>.
    """
    if not exact:
        before, _, _ = text.rpartition("</answer>")
        _, opened, found = before.rpartition("<answer>")
        text = found.strip() if opened else ""
    return float(text == task.answer)


@gin.configurable(module="search")
def tools(people: int = 800, towns: int = 100, seed: int = 0) -> list[Callable[..., str]]:
    """Returns the tools `search` and `open` on a library.

    Args:
        people: Number of people in the library.
        towns: Number of towns in the library.
        seed: Seed of the library.
    """
    documents = library(people, towns, seed).documents
    find = index({id: f"{title} {text}" for id, (title, text) in documents.items()})

    def search(query: str) -> str:
        """Finds documents in the library.

        Args:
            query: Words that the documents should have.
        """
        return "\n".join(f"{id} {documents[id][0]}" for id in find(query)) or "Nothing was found."

    def open(id: str) -> str:
        """Shows the text of a document.

        Args:
            id: As the search gave it.
        """
        return documents[id][1] if id in documents else f"There is no document {id!r}."

    return [search, open]


def index(texts: dict[str, str]) -> Callable[[str], Sequence[str]]:
    """Returns a function that finds the ids of the best matches for a query by BM25: at most 3, best
    first."""
    ids = list(texts)
    ranking = BM25(texts.values())
    return lambda query: [ids[place] for place, _ in ranking.find(query, SHOWN)]


def _question(person: str, hops: int, instructed: bool) -> str:
    asked = (
        f"Where was {person} born?"
        if hops == 1
        else f"Who is the mayor of the town where {person} was born?"
    )
    return f"{asked}\n{INSTRUCTION}" if instructed else asked


def _answer(shelves: Library, person: str, hops: int) -> str:
    town = shelves.home[person]
    return town if hops == 1 else shelves.mayor[town]
