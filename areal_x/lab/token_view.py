"""The lab's view of one trajectory, token by token, in a notebook.

    from areal_x import token_view
    view = token_view("runs/NAME")  # at the end of a cell: shows it
    view.colour = "gap"             # as its buttons do

The widget gets plain data from the run's journal and its script from this package: it needs no
server and no network, and works on a copied run.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from areal_x.errors import UserError, one_of
from areal_x.lab.answers import MOST_TOKENS, tokens_view, without_surrogates
from areal_x.lab.reading import connection_to
from areal_x.lab.runs import Run
from areal_x.lab.vocabulary import tokenizer_file

STATIC = Path(__file__).parent / "static"
MODULES = ("dom.js", "token_view.js", "widget.js")  # each after those that it imports
# as in token_view.js
COLOURS = (
    "logprob",
    "advantage",
    "gap",
    "entropy",
    "version",
    "mask",
    "credit",
    "token_rewards",
    "kept",
)
IMPORT = re.compile(r"^import .* from \"\./.*\";\n", re.MULTILINE)
EXPORT = re.compile(r"^export (?!default)", re.MULTILINE)


def token_view(
    run: Path | str,
    ticket: int | None = None,
    number: int = 0,
    *,
    colour: str = "logprob",
    tokenizer: Path | str | None = None,
) -> Any:
    """Returns a widget that shows one trajectory of a run as the lab's page does, each token coloured
    by a number of its own. Needs the package anywidget.

    Args:
        run: The run's directory; the run may go on.
        ticket: The group. By default the newest one of which the journal has what training made of
            each token (`journal.token_share`), or else the newest one that a step consumed.
        number: The trajectory, counted through the group's episodes.
        colour: The first colour, one of `COLOURS`; the log-probability if the journal lacks it.
        tokenizer: A tokenizer.json or its folder, in place of the run's own.

    Raises: UserError for a group or a trajectory that the journal does not have, and if anywidget is
    not installed.
    """
    one_of("colour", colour, COLOURS)
    trajectory = trajectory_data(Path(run), ticket, number, tokenizer)
    try:
        from areal_x.lab.widget import TokenView
    except ModuleNotFoundError as error:
        raise UserError(
            f"the token view needs the package {error.name}: pip install 'areal-x[notebook]'"
        ) from None
    return TokenView(trajectory=trajectory, colour=colour)


def trajectory_data(
    run: Path, ticket: int | None = None, number: int = 0, tokenizer: Path | str | None = None
) -> dict[str, Any]:
    """Returns what `areal_x.lab.answers.tokens_view` does, of all tokens of a trajectory and as JSON
    has it: numbers that are not finite are None.

    Raises: UserError as `token_view`.
    """
    given = tokenizer_file(None if tokenizer is None else Path(tokenizer))
    vocabulary, reason = Run(run).vocabulary(given)
    ticket = newest_group(run) if ticket is None else ticket
    found = tokens_view(run, ticket, number, vocabulary, 0, MOST_TOKENS)
    while found["end"] < found["length"]:
        part = tokens_view(run, ticket, number, vocabulary, found["end"], MOST_TOKENS)
        for name, x in part.items():
            if isinstance(x, list):
                found[name] += x
        found["end"] = part["end"]
    # a character may have its bytes in two parts
    pieces = None if vocabulary is None else vocabulary.pieces(found["ids"])
    found |= {"pieces": pieces, "no_text": reason}
    content = msgspec.json.encode(without_surrogates(found))
    plain: dict[str, Any] = msgspec.json.decode(content)
    return plain


def newest_group(run: Path) -> int:
    """Returns the ticket of the newest consumed group, of those that the journal has token records of
    if there are any. Raises: UserError if no step has consumed a group."""
    with connection_to(run) as connection:
        for table in ("trained", "consumed"):
            is_there = "SELECT 1 FROM sqlite_master WHERE name = ?"
            if connection.execute(is_there, (table,)).fetchone() is None:
                continue  # in a journal of an earlier version
            row = connection.execute(
                f"SELECT groups.ticket FROM {table} JOIN groups ON groups.ticket = {table}.ticket"
                f" WHERE groups.content IS NOT NULL ORDER BY {table}.step DESC, {table}.ticket LIMIT 1"
            ).fetchone()
            if row is not None:
                return int(row[0])
    raise UserError(f"no step of {run} has consumed a group yet: give the ticket of one")


@cache
def script() -> str:
    """Returns the widget's module: the lab's own files, joined, with their style sheet as a
    constant."""
    style = (STATIC / "tokens.css").read_text(encoding="utf-8")
    sources = [(STATIC / name).read_text(encoding="utf-8") for name in MODULES]
    joined = [EXPORT.sub("", IMPORT.sub("", source)) for source in sources]
    return "\n".join([f"const STYLE = {json.dumps(style)};", *joined])
