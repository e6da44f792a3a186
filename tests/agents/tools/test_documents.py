"""A collection is searched as by another implementation of BM25, and every call gives a text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_x.agents.tools.bm25 import BM25, words_of
from areal_x.agents.tools.documents import DocumentSearch, excerpt
from areal_x.agents.tools.toolbox import Toolbox
from areal_x.errors import ConfigError, UserError

DOCUMENTS: list[dict[str, Any]] = [
    {"id": "oslo", "title": "Oslo", "text": "Oslo is the capital of Norway. " + "It lies on a fjord. " * 20},
    {"id": "bergen", "title": "Bergen", "text": "Bergen is a town of Norway, and rains."},
    {"_id": 7, "title": "", "contents": "Straße und Fjord: ein Gedicht."},
]


def written(folder: Path, documents: list[dict[str, Any]]) -> str:
    file = folder / "documents.jsonl"
    file.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return str(file)


def answers(path: str, *calls: tuple[str, dict[str, Any]], **settings: Any) -> list[str]:
    async def call() -> list[str]:
        toolbox = Toolbox([DocumentSearch(path, **settings)])
        await toolbox.setup()
        try:
            return [await toolbox.call(name, json.dumps(arguments)) for name, arguments in calls]
        finally:
            await toolbox.close()

    return asyncio.run(call())


def test_scores_are_those_of_bm25s() -> None:
    bm25s = pytest.importorskip("bm25s")
    rng = np.random.default_rng(0)
    vocabulary = [f"w{n}" for n in range(60)]
    texts = [" ".join(rng.choice(vocabulary, rng.integers(1, 40))) for _ in range(200)]
    other = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    other.index([words_of(text) for text in texts], show_progress=False)
    ours = BM25(texts)
    for _ in range(20):
        query = rng.choice(vocabulary, 3, replace=False).tolist()
        expected = other.get_scores(query)
        found = dict(ours.find(" ".join(query), len(texts)))
        assert found.keys() == set(np.flatnonzero(expected).tolist())
        np.testing.assert_allclose([found[n] for n in found], expected[list(found)], rtol=1e-5)
        assert list(found.values()) == sorted(found.values(), reverse=True)


def test_search_shows_the_best_documents_and_visit_their_texts(tmp_path: Path) -> None:
    found, none, visited, number = answers(
        written(tmp_path, DOCUMENTS),
        ("search", {"query": "a town in NORWAY"}),
        ("search", {"query": "zebra ?"}),
        ("visit", {"id": "[bergen]"}),
        ("visit", {"id": "7"}),
    )
    assert found.startswith("[bergen] Bergen\nBergen is a town of Norway, and rains.\n\n[oslo] Oslo\nOslo is the capital")
    assert none == "No document has any of these words."
    assert visited == "Bergen\nBergen is a town of Norway, and rains."
    assert number == "Straße und Fjord: ein Gedicht."


def test_words_are_found_whatever_their_case(tmp_path: Path) -> None:
    (found,) = answers(written(tmp_path, DOCUMENTS), ("search", {"query": "STRASSE"}))
    assert found.startswith("[7]")


def test_long_texts_have_pages(tmp_path: Path) -> None:
    path = written(tmp_path, [{"id": "long", "title": "Long", "text": "a" * 100 + "b" * 50}])
    first, second, third, unknown = answers(
        path,
        ("visit", {"id": "long"}),
        ("visit", {"id": "long", "page": 2}),
        ("visit", {"id": "long", "page": 3}),
        ("visit", {"id": "lomg"}),
        page_characters=100,
    )
    assert first == "Long (page 1 of 2)\n" + "a" * 100
    assert second == "Long (page 2 of 2)\n" + "b" * 50
    assert third == "The document 'long' has the pages 1 to 2."
    assert unknown == "There is no document 'lomg'; did you mean 'long'?."


def test_an_excerpt_begins_near_the_first_word_that_was_searched_for() -> None:
    text = "x " * 100 + "the fjord\nis deep" + " y" * 100
    assert "the fjord is deep" in excerpt(text, "Fjord", 80)
    assert excerpt(text, "Fjord", 80).startswith("…")
    assert excerpt("short", "none", 80) == "short"
    assert excerpt("text", "text", 0) == ""


@pytest.mark.parametrize(
    ("documents", "reason"),
    [
        ([], "no documents"),
        ([{"id": "a"}], r"jsonl:1 has no text: give it one as 'text'"),
        ([{"id": "a", "text": "b"}, {"id": "a", "text": "c"}], r"jsonl:2 has the id 'a' of an earlier"),
        ([["a"]], "not a JSON object but list"),
    ],
)
def test_a_collection_that_cannot_work_is_refused(documents: list[Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason):
        answers(written(tmp_path, documents))


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"document_search\.path = .*is not a file"):
        answers(str(tmp_path / "none.jsonl"))
    for name in ("results", "page_characters", "excerpt_characters"):
        with pytest.raises(ConfigError, match=name):
            DocumentSearch("a.jsonl", **{name: -1})
