"""The table of real clients in docs/agents.md, from runs of tests/agents/gateway/clients.

    AREAL_X_CLIENTS=.clients python benchmarks/clients.py     (make clients installs them first)

Each cell is a test with the client that is installed: yes if it passed, no if it failed, – if the client
has nothing that the test needs. Exits with 1 if a test failed; with --dry the page stays as it is. Reports that pytest wrote
of parts of these tests (--junitxml, -o junit_family=xunit1) can be given in place of a run.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.agents.gateway.clients.catalogue import CLIENTS, Client  # noqa: E402

PAGE = ROOT / "docs" / "agents.md"
TESTS = "tests/agents/gateway/clients/test_clients.py"
COLUMNS = {
    "answers": "test_an_answer_in_words_is_what_the_client_prints",
    "parallel tools": "test_tools_that_are_called_in_parallel_are_run_and_the_conversation_is_one_trajectory",
    "interrupted": "test_a_client_that_is_interrupted_frees_the_engine",
    "reads an image": "test_an_image_that_a_tool_read_ends_no_conversation",
}
APIS = {"chat": "chat completions", "responses": "responses", "messages": "messages"}
HEAD = "| client | version | API |"


@dataclass
class Row:
    results: dict[str, str] = field(default_factory=dict)
    properties: dict[str, str] = field(default_factory=dict)


def rows_in(reports: Sequence[Path]) -> dict[str, Row]:
    """Returns the results of each client, by its id."""
    rows: dict[str, Row] = defaultdict(Row)
    for case in (case for report in reports for case in ElementTree.parse(report).iter("testcase")):
        found = re.fullmatch(r"(\w+)\[(.+)\]", case.attrib["name"])
        if found is None:
            continue
        name, client = found.groups()
        kinds = {part.tag for part in case}
        failed = kinds & {"failure", "error"}
        rows[client].results[name] = "no" if failed else "skipped" if "skipped" in kinds else "yes"
        for each in case.iter("property"):
            rows[client].properties[each.attrib["name"]] = each.attrib["value"]
    return rows


def line(client: Client, row: Row) -> str:
    cells = []
    for name in COLUMNS.values():
        cell = row.results.get(name, "–")
        if cell == "yes" and "parallel" in name and client.rewrites:
            cell = "yes, rewritten"
        cells.append(cell)
    ignored = row.properties.get("ignored", "")
    names = ", ".join(f"`{name}`" for name in ignored.split(", ") if name) or "–"
    prompt = int(row.properties.get("prompt", 0))
    return " | ".join([f"| `{client.package}`", client.version(), APIS[client.api], *cells, f"{prompt:,}", f"{names} |"])


def table(rows: dict[str, Row]) -> Iterator[str]:
    yield f"{HEAD} {' | '.join(COLUMNS)} | characters of its prompt | sent, and ignored |"
    yield "|---" * (len(COLUMNS) + 5) + "|"
    for client in CLIENTS:
        row = rows.get(client.id)
        if row is not None and "skipped" not in row.results.values():
            yield line(client, row)


def run(report: Path) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "clients", TESTS, f"--junitxml={report}"]
    return subprocess.run([*command, "-o", "junit_family=xunit1"], cwd=ROOT, check=False).returncode


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        given = [Path(word) for word in sys.argv[1:] if word != "--dry"]
        reports = given or [Path(folder, "report.xml")]
        status = 0 if given else run(reports[0])
        lines = list(table(rows_in(reports)))
    print("\n".join(lines))
    if "--dry" not in sys.argv:
        written = re.sub(rf"^{re.escape(HEAD)}(?:.*\n)+?(?=\n)", "\n".join(lines) + "\n", PAGE.read_text(), flags=re.M)
        PAGE.write_text(written)
    return status


if __name__ == "__main__":
    sys.exit(main())
