"""The tools `search` and `visit`: a collection of documents on this machine, searched by BM25.

    tool_use.tools = [@document_search()]
    document_search.path = "data/wiki.jsonl"

`search` shows the best documents with an excerpt each, `visit` the text of one, page by page. Texts
stay in their file; the index is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gin

from areal_x.agents.tools.bm25 import BM25, WORD, words_of
from areal_x.agents.tools.toolbox import Schema, Tool, ToolError, tool_schema
from areal_x.errors import UserError, at_least, nearest
from areal_x.runtime.thread import in_thread
from areal_x.tasks.records import SUFFIXES, Records, each, open_records

# the names that collections use: ours, BEIR's, Search-R1's
IDS, TEXTS = ("id", "_id", "docid", "url"), ("text", "contents", "content")
BEFORE = 40  # characters of an excerpt before the first word that was searched for


@dataclass(frozen=True)
class Document:
    """id: what `visit` takes. title: "" if it has none."""

    id: str
    title: str
    text: str


class Collection:
    """The documents of a file: .jsonl, .parquet, .arrow or .feather, each with a text (`text`,
    `contents` or `content`), and optionally a `title` and an id (`id`, `_id`, `docid` or `url`; else its number).

    Raises: UserError for a file that cannot be read or has no documents, a document without a text,
    and two of one id.
    """

    def __init__(self, path: str | Path) -> None:
        file = Path(path).expanduser()
        if not file.is_file() or file.suffix not in SUFFIXES:
            raise UserError(
                f"document_search.path = {str(path)!r} is not a file that ends with"
                f" {', '.join(SUFFIXES)}"
            )
        self._records: Records = open_records(file)
        self._numbers: dict[str, int] = {}
        self._index = BM25(self._texts())
        if not self._numbers:
            raise UserError(f"document_search.path: {file} has no documents")

    def find(self, query: str, most: int) -> list[Document]:
        """Returns the best matches, best first."""
        return [self._at(number) for number, _ in self._index.find(query, most)]

    def get(self, id: str) -> Document:
        """Raises: KeyError for an unknown id, with a sentence about it."""
        if id not in self._numbers:
            raise KeyError(f"There is no document {id!r}{nearest(id, list(self._numbers)[:1000])}.")
        return self._at(self._numbers[id])

    def _at(self, number: int) -> Document:
        place, record = self._records.at(number)
        return document_of(record, number, place)

    def _texts(self) -> Iterator[str]:
        for number, (place, record) in enumerate(each(self._records)):
            document = document_of(record, number, place)
            if self._numbers.setdefault(document.id, number) != number:
                raise UserError(f"{place} has the id {document.id!r} of an earlier document")
            yield f"{document.title}\n{document.text}"


def document_of(record: Any, number: int, place: str) -> Document:
    """Returns the document of a record. Raises: UserError for one without a text."""
    if not isinstance(record, Mapping):
        raise UserError(f"{place} is not a JSON object but {type(record).__name__}")
    text = next((record[name] for name in TEXTS if isinstance(record.get(name), str)), None)
    if text is None:
        raise UserError(f"{place} has no text: give it one as {' or '.join(map(repr, TEXTS))}")
    id = next((record[name] for name in IDS if record.get(name) is not None), number)
    return Document(str(id), str(record.get("title") or ""), text)


@gin.configurable("document_search")
@dataclass(frozen=True)
class DocumentSearch:
    """The tools `search` and `visit` on a collection of documents (docs/tools.md)."""

    path: str
    """A .jsonl, .parquet, .arrow or .feather file with a document a record: `text` or `contents`, and
    optionally `title` and `id`."""
    results: int = 5
    """Most documents that a search shows."""
    excerpt_characters: int = 200
    """Characters of each document that a search shows."""
    page_characters: int = 4000
    """Characters of a page of `visit`."""
    collection: list[Collection] = field(
        default_factory=list, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        at_least("document_search.results", self.results, 1)
        at_least("document_search.excerpt_characters", self.excerpt_characters, 0)
        at_least("document_search.page_characters", self.page_characters, 100)

    async def setup(self) -> Sequence[Tool]:
        """Reads and indexes the file, once."""
        if not self.collection:
            self.collection.append(await in_thread(Collection, self.path))
        return [
            SearchTool(self.collection[0], self.results, self.excerpt_characters),
            VisitTool(self.collection[0], self.page_characters),
        ]

    async def close(self) -> None:
        """Frees the index."""
        self.collection.clear()


@dataclass(frozen=True)
class SearchTool:
    """Finds documents by their words."""

    collection: Collection
    results: int
    excerpt_characters: int
    name: str = "search"

    @property
    def schema(self) -> Schema:
        query = {"type": "string", "description": "Words that the documents should have."}
        return tool_schema(
            self.name,
            "Searches a collection of documents by words. Returns the best matches, best first: id,"
            " title and an excerpt of each. `visit` shows the whole text.",
            {"type": "object", "properties": {"query": query}, "required": ["query"]},
        )

    async def call(self, arguments: dict[str, Any]) -> str:
        return await in_thread(self._found, arguments["query"])

    def _found(self, query: str) -> str:
        found = self.collection.find(query, self.results)
        lines = (
            f"[{document.id}] {document.title}".rstrip()
            + f"\n{excerpt(document.text, query, self.excerpt_characters)}".rstrip()
            for document in found
        )
        return "\n\n".join(lines) or "No document has any of these words."


@dataclass(frozen=True)
class VisitTool:
    """Shows the text of a document, page by page."""

    collection: Collection
    page_characters: int
    name: str = "visit"

    @property
    def schema(self) -> Schema:
        properties = {
            "id": {"type": "string", "description": "The document's id, as the search showed it."},
            "page": {"type": "integer", "description": "The page of a long text, from 1."},
        }
        return tool_schema(
            self.name,
            "Shows the text of a document.",
            {"type": "object", "properties": properties, "required": ["id"]},
        )

    async def call(self, arguments: dict[str, Any]) -> str:
        return await in_thread(self._page, arguments["id"], int(arguments.get("page", 1)))

    def _page(self, id: str, page: int) -> str:
        try:
            document = self.collection.get(id.strip().removeprefix("[").removesuffix("]"))
        except KeyError as error:
            raise ToolError(str(error.args[0])) from None
        pages = max(1, -(-len(document.text) // self.page_characters))
        if not 1 <= page <= pages:
            raise ToolError(f"The document {document.id!r} has the pages 1 to {pages}.")
        start = (page - 1) * self.page_characters
        head = f"{document.title} (page {page} of {pages})" if pages > 1 else document.title
        return f"{head}\n{document.text[start : start + self.page_characters]}".strip("\n")


def excerpt(text: str, query: str, most: int) -> str:
    """Returns at most about `most` characters of a text, from its first word of the query on, on one
    line."""
    wanted = set(words_of(query))
    hits = (m.start() for m in WORD.finditer(text) if m[0].casefold() in wanted)
    start = max(0, next(hits, 0) - BEFORE)
    shown = " ".join(text[start : start + most].split())
    before, after = "…" * (start > 0), "…" * (start + most < len(text))
    return f"{before}{shown}{after}" if shown else ""
