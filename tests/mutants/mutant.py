"""A planted bug."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """bug: what is wrong, in words. file: below the root. old: stands there exactly once, however the formatter has broken its
    lines, and new takes its place. tests: what pytest is given."""

    bug: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The file's text with the bug. Raises ValueError where `old` does not stand there exactly once."""
        places = list(re.finditer(pattern(self.old), text))
        if len(places) != 1:
            raise ValueError(f"{self.bug}: {self.file} has {len(places)} places like {self.old!r}, not 1")
        begin, end = places[0].span()
        return text[:begin] + self.new + text[end:]


def pattern(code: str) -> str:
    """Matches the code with other line breaks: any white space where it has some, and around brackets."""
    spaced = r"\s+".join(re.escape(word) for word in code.split())
    leading = re.escape(code[: len(code) - len(code.lstrip(" "))])
    opened = re.sub(r"(\\[(\[{])", r"\1\\s*", spaced)
    closed = re.sub(r"(\\[)\]}])", r",?\\s*\1", opened)
    return leading + closed + (r"\n" if code.endswith("\n") else "")


def planted(file: str, tests: tuple[str, ...], *bugs: tuple[str, str, str]) -> list[Mutant]:
    """Mutants of one file that the same tests must see: (bug, old, new) each."""
    return [Mutant(bug, file, old, new, tests) for bug, old, new in bugs]
