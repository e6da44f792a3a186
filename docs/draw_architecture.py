"""Draws docs/architecture.svg: the rooms of areal_x, floor by floor, and which may import which.

    python docs/draw_architecture.py           # writes it
    python docs/draw_architecture.py --check   # fails where it is not what tests/test_layout.py allows

The data are the rooms of tests/test_layout.py, which that test holds the code to.
"""

from __future__ import annotations

import sys
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.test_layout import GROUND, ROOMS, allowed

PICTURE = Path(__file__).with_name("architecture.svg")
WIDTH, ROW, BOX_HEIGHT, MARGIN = 1180, 92, 40, 24
EXTRAS = {"agents", "lab", "sandbox", "simulation", "tinker"}
COMMANDS = {"train", "check", "replay", "export", "plan", "serve", "example", "evaluate", "rollout_command", "synthesize"}
SHOWN = [room for room in ROOMS if room != "__main__"]  # which only calls the commands
FILLS = {"ground": "#e8e2d4", "room": "#dbe7f3", "extra": "#e3f0dc", "command": "#f3e3db", "backend": "#ece0f2"}


def floor(room: str) -> int:
    """The ground is floor 0; any other room is one above the highest room that it may import."""
    if room in GROUND:
        return 0
    return 1 + max((floor(below) for below in ROOMS[room]), default=0)


def direct(room: str) -> list[str]:
    """The rooms of its line that none of the others there may import too: their arrows say the rest."""
    names = ROOMS[room]
    return [name for name in names if not any(name in allowed(other) for other in names if other != name)]


def kind(room: str) -> str:
    if room in GROUND:
        return "ground"
    if room in EXTRAS:
        return "extra"
    if room in COMMANDS:
        return "command"
    return "backend" if room.startswith("areal_x_") else "room"


def arranged() -> list[list[str]]:
    """The rooms of each floor, ordered so that arrows cross little: by the mean place of what they import."""
    floors: list[list[str]] = [[] for _ in range(1 + max(map(floor, SHOWN)))]
    for room in SHOWN:
        floors[floor(room)].append(room)
    for _ in range(8):
        place = {room: (i + 0.5) / len(row) for row in floors for i, room in enumerate(row)}
        users = {room: [user for user in SHOWN if room in direct(user)] for room in SHOWN}
        for row in floors:
            around = {room: [place[other] for other in (*direct(room), *users[room])] for room in row}
            row.sort(key=lambda room: sum(around[room]) / len(around[room]) if around[room] else place[room])
    return floors


def picture() -> str:
    floors = arranged()
    height = 2 * MARGIN + ROW * len(floors) - (ROW - BOX_HEIGHT) + 26
    boxes: dict[str, tuple[float, float, float]] = {}
    for number, row in enumerate(floors):
        y = height - 26 - MARGIN - BOX_HEIGHT - number * ROW
        widths = [max(76.0, 9.0 * len(room) + 26) for room in row]
        gap = (WIDTH - 2 * MARGIN - sum(widths)) / len(row)
        x = MARGIN + gap / 2
        for room, width in zip(row, widths, strict=True):
            boxes[room] = (x, y, width)
            x += width + gap
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif">',
        "<title>The rooms of areal_x and the imports between them</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#8a93a0"/></marker></defs>',
    ]
    for room in SHOWN:
        x, y, width = boxes[room]
        for below in direct(room):
            bx, by, bwidth = boxes[below]
            x1, y1, x2, y2 = x + width / 2, y + BOX_HEIGHT, bx + bwidth / 2, by
            bend = (y2 - y1) * 0.5
            curve = f"M{x1:.0f} {y1:.0f} C{x1:.0f} {y1 + bend:.0f} {x2:.0f} {y2 - bend:.0f} {x2:.0f} {y2:.0f}"
            parts.append(f'<path d="{curve}" fill="none" stroke="#8a93a0" stroke-width="1.2" marker-end="url(#end)"/>')
    for room, (x, y, width) in boxes.items():
        box = f'x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX_HEIGHT}" rx="6"'
        parts.append(f'<rect {box} fill="{FILLS[kind(room)]}" stroke="#5b6470"/>')
        middle = f'x="{x + width / 2:.0f}" y="{y + 25:.0f}" font-size="15" text-anchor="middle"'
        parts.append(f'<text {middle} fill="#1d232b">{escape(room)}</text>')
    note = "An arrow: may import, with all that its end may import. Every room may import the ground (bottom row)."
    parts.append(f'<text x="{MARGIN}" y="{height - 14}" font-size="13" fill="#5b6470">{note}</text>')
    x = WIDTH - MARGIN - 335
    for name in ("room", "extra", "command", "backend"):
        parts.append(f'<rect x="{x}" y="{height - 25}" width="14" height="14" fill="{FILLS[name]}" stroke="#5b6470"/>')
        parts.append(f'<text x="{x + 20}" y="{height - 13}" font-size="13" fill="#5b6470">{name}</text>')
        x += 86
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    drawn = picture()
    if "--check" not in sys.argv:
        PICTURE.write_text(drawn, encoding="utf-8")
    elif not PICTURE.is_file() or PICTURE.read_text(encoding="utf-8") != drawn:
        sys.exit(f"{PICTURE.name} is not what tests/test_layout.py allows: run python docs/draw_architecture.py")
