"""The text of a gin file in sections, and what could not be said in it."""

from __future__ import annotations

from typing import Any


class Raw(str):
    """A value that stands in the gin file as it is, such as @name()."""


class GinText:
    """Collects bindings, comments, and notes on fields that gin cannot express."""

    def __init__(self) -> None:
        self._lines: list[tuple[str | None, str]] = []  # name of the binding, and text
        self.notes: list[tuple[str, str]] = []

    def section(self, title: str) -> None:
        self._lines += [(None, ""), (None, f"# {title}")]

    def comment(self, text: str) -> None:
        self.line(f"# {text}")

    def line(self, text: str) -> None:
        self._lines.append((None, text))

    def bind(self, name: str, value: Any, remark: str = "") -> None:
        shown = value if isinstance(value, Raw) else repr(value)
        self._lines.append((name, f"{name} = {shown}" + (f"  # {remark}" if remark else "")))

    def replace(self, name: str, value: Any) -> None:
        """Binds a name in place of its earlier binding, if any; a value of 1 or None removes it."""
        self._lines = [(bound, text) for bound, text in self._lines if bound != name]
        if value not in (1, None):
            self.bind(name, value)

    def note(self, field: str, why: str) -> None:
        """Records that a field was read, but not carried over or not as it was."""
        self.notes.append((field, why))

    def text(self) -> str:
        return "\n".join(text for _, text in self._lines) + "\n"
