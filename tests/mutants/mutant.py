"""What a planted bug is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """bug: what is wrong, in words. file: below the root. old: stands there exactly once, and new takes its place. tests: what
    pytest is given."""

    bug: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The file's text with the bug. Raises ValueError where `old` does not stand there exactly once."""
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.bug}: {self.file} has {found} places like {self.old!r}, not 1")
        return text.replace(self.old, self.new)


def planted(file: str, tests: tuple[str, ...], *bugs: tuple[str, str, str]) -> list[Mutant]:
    """Mutants of one file that the same tests must see: (bug, old, new) each."""
    return [Mutant(bug, file, old, new, tests) for bug, old, new in bugs]
