"""The program in a model's text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

THINKS, THOUGHT = "<think>", "</think>"  # a program between them does not count
FENCE = re.compile(r"([ \t]*)(`{3,}|~{3,})(.*)", re.DOTALL)
PYTHON = ("python", "python3", "py")


@dataclass
class _Block:
    """indent, fence: of its first line. language: the first word behind the fence."""

    indent: str
    fence: str
    language: str
    lines: list[str] = field(default_factory=list)

    def closed_by(self, line: str) -> bool:
        mark = line.strip()
        return len(mark) >= len(self.fence) and set(mark) == {self.fence[0]}

    @property
    def text(self) -> str:
        return "".join(f"{line.removeprefix(self.indent)}\n" for line in self.lines)


def extract_program(text: str) -> str:
    """Returns the last fenced block that is Python: of those marked as Python if there are any,
    otherwise of those without a language. Without any fence, returns the whole text; if all blocks
    are of other languages, "".

    A block that is still open at the end counts: stop texts and the limit of tokens cut the last
    fence off. Only what follows the last "</think>" counts, and nothing that follows a "<think>".
    """
    said = text.rpartition(THOUGHT)[2].partition(THINKS)[0]
    lines = said.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    blocks: list[_Block] = []
    open_block: _Block | None = None
    for line in lines:
        if open_block is not None:
            if open_block.closed_by(line):
                open_block = None
            else:
                open_block.lines.append(line)
        elif (found := FENCE.fullmatch(line)) and "`" not in found[3]:  # else it is inline code
            open_block = _Block(found[1], found[2], "".join(found[3].lower().split()[:1]))
            blocks.append(open_block)
    if not blocks:
        return "\n".join(lines)
    marked = [block for block in blocks if block.language in PYTHON]
    unmarked = [block for block in blocks if not block.language]
    chosen = marked or unmarked
    return chosen[-1].text if chosen else ""
