"""One HTML file about a run, to send to somebody: `areal-x report`.

It has no script, and a Content-Security-Policy that forbids requests: whoever opens it sees the file
alone. Most of its texts were written by a model: all are escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from areal_x.errors import UserError, printable
from areal_x.lab import answers
from areal_x.lab.filters import Filter
from areal_x.lab.index import Index
from areal_x.lab.runs import Run
from areal_x.monitor.display import clock
from areal_x.runtime import timeline

BEGINNING = "<!doctype html>\n<!-- a report of AReaL-X -->\n"
STATIC = Path(__file__).parent / "static"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
body { display: block; } main { margin: 0 auto; } h1 { font-size: 22px; } .tile b { font-size: 18px; }
.card h2 { font-size: 16px; margin-bottom: 10px; } h3 { margin-top: 18px; }
td { max-width: 700px; overflow-wrap: anywhere; } summary { cursor: pointer; } .charts { margin-bottom: 16px; }
"""
CURVES = (
    "reward",
    "accuracy",
    "held_out/loss",
    "loss",
    "response_length",
    "staleness_mean",
    "entropy_estimate",
    "mismatch/kl_lag0",
    "grad_norm",
)
POINTS = 300
SHOWN = 5  # trajectories of each kind
FAILURES = 10
WIDTH, HEIGHT, LEFT, MARGIN = 460, 170, 58, 16


def write_report(run: Run, file: Path, tokenizer: Path | None = None) -> Path:
    """Writes a run's report and returns its path. tokenizer: in place of the run's own.

    Raises: UserError for a file that is no report, or cannot be written.
    """
    try:
        if file.exists() and not file.read_text("utf-8", "replace").startswith(BEGINNING):
            raise UserError(f"{file} exists and is not a report: choose another name")
        file.write_text(report(run, tokenizer), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror})") from error
    return file


def report(run: Run, tokenizer: Path | None = None) -> str:
    """Returns the page."""
    found = run.overview()
    sections = [overview(found), stall(found), times(found), curves(run)]
    if found["has_journal"]:
        index = Index(run.path)
        index.refresh()
        sections += [failures(index), trajectories(run, index, tokenizer)]
    sections.append(settings(run))
    sheets = [(STATIC / name).read_text(encoding="utf-8") for name in ("tokens.css", "style.css")]
    style = "".join([*sheets, STYLE])
    head = (
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="content-security-policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(run.name)} · AReaL-X</title><style>{style}</style></head>"
    )
    body = f"<body><main><h1>{text(run.name)}</h1>{''.join(sections)}</main></body></html>\n"
    return BEGINNING + head + body


# ---- sections


def overview(found: Mapping[str, Any]) -> str:
    last, steps = found["all"], found["steps"]
    numbers = [
        (found["step"] or 0, f"of {steps} steps" if steps else "steps"),
        (last.get("reward"), "reward"),
        (last.get("accuracy"), "held-out accuracy"),
        (last.get("generation_tokens_per_second"), "generated tokens/s"),
        (last.get("training_tokens_per_second"), "trained tokens/s"),
        (last.get("staleness_mean"), "versions stale, mean"),
    ]
    tiles = "".join(
        f'<div class="tile"><b>{number(x)}</b><span>{what}</span></div>'
        for x, what in numbers
        if x is not None
    )
    about = " · ".join(text(str(found[x])) for x in ("state", "model", "algorithm") if found[x])
    return f'<p class="quiet">{about}</p><div class="tiles">{tiles}</div>'


def stall(found: Mapping[str, Any]) -> str:
    if not (stalled := found["stall"]):
        return ""
    sentences = "".join(f"<li>{text(x)}</li>" for x in stalled["sentences"])
    stacks = "".join(folded(x["name"], x["stack"]) for x in stalled["threads"])
    head = f"Nothing has moved for {clock(stalled['silent_seconds'])}"
    return card(head, f"<ul>{sentences}</ul>{stacks}")


def times(found: Mapping[str, Any]) -> str:
    parts = found["parts"]
    shown = [
        (number, label, parts["shares"][part])
        for number, (part, label) in enumerate(parts["labels"].items())
        if parts["shares"].get(part, 0.0) > 0.0005
    ]
    if not shown:
        return ""
    bar = "".join(f'<span class="fill{i}" style="--share: {x:.4f}"></span>' for i, _, x in shown)
    legend = "".join(
        f'<li><i class="fill{i}"></i>{text(what)} {x:.1%}</li>' for i, what, x in shown
    )
    cause = text(found["cause"]["sentence"]) if found["cause"] else ""
    return card(
        "Where a step’s time goes",
        f'<p class="cause">{cause}</p><div class="bar" aria-hidden="true">{bar}</div>'
        f'<ul class="legend">{legend}</ul><p class="quiet small">Of the {clock(parts["seconds"])}'
        f" of {parts['steps']} steps.</p>",
    )


def curves(run: Run) -> str:
    found = run.metrics.curves(CURVES, POINTS)
    drawn = [chart(key, found[key]) for key in CURVES if found.get(key, {}).get("step")]
    return f'<div class="charts">{"".join(drawn)}</div>'


def failures(index: Index) -> str:
    found = answers.failures(index)
    counts = answers.outcome_counts(index)
    head = f"{counts['failed']:,} of {sum(counts.values()):,} episodes failed, {counts['timed_out']:,} timed out."
    listed = "".join(
        f"<p><b>{x['count']:,}×</b> {text(x['error'])} (first in group {x['first_ticket']})</p>"
        + (folded("traceback", x["traceback"]) if x["traceback"] else "")
        for x in found[:FAILURES]
    )
    return card("Failures", f"<p>{head}</p>{listed}")


def trajectories(run: Run, index: Index, tokenizer: Path | None) -> str:
    """The slowest (or, without a timeline, the longest), the best and the worst."""
    vocabulary, why = run.vocabulary(tokenizer)
    slowest = slowest_episodes(run.path)
    kinds: list[tuple[str, list[dict[str, Any]]]] = []
    if slowest:
        kinds.append(("Slowest", [found for x in slowest if (found := row_of(index, *x))][:SHOWN]))
    else:
        kinds.append(("Longest", rows(index, "-length")))
    kinds += [("Best", rows(index, "-reward")), ("Worst", rows(index, "reward"))]
    shown = []
    for title, of_kind in kinds:
        lines = []
        for row in of_kind:
            texts = of_trajectory(run.path, row, vocabulary)
            seconds = f", {row['seconds']:.1f} s" if "seconds" in row else ""
            about = (
                f"group {row['ticket']}, task {text(row['task'][:100])}: reward"
                f" {number(row['reward'])}, {row['length']:,} tokens, {text(row['outcome'])}{seconds}"
            )
            lines.append(f"<p>{about}</p>{texts}")
        if lines:
            shown.append(f"<h3>{title}</h3>{''.join(lines)}")
    note = f'<p class="quiet">Token ids are shown: {text(why)}.</p>' if why else ""
    return card("Trajectories", note + "".join(shown)) if shown else ""


def settings(run: Run) -> str:
    found, why = run.settings()
    rows_of = "".join(
        f'<tr><td class="mono">{text(x["name"])}</td><td class="mono">{text(x["a"] or "")}</td></tr>'
        for x in answers.compared(found, None)
    )
    error = f'<p class="error">{text(why)}</p>' if why else ""
    return card("Settings", f"{error}<table><tbody>{rows_of}</tbody></table>")


# ---- trajectories


def slowest_episodes(run: Path) -> list[tuple[int, int, float]]:
    """Returns ticket, index and seconds of the episodes that took longest, of those in the timeline;
    none without one."""
    try:
        lanes = timeline.read(run)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    found = [
        (i.end - i.start, i.arguments["ticket"], i.arguments["index"])
        for lane in lanes.values()
        for i in lane
        if i.name == "episode" and {"ticket", "index"} <= i.arguments.keys()
    ]
    # some may be in flight, and in no index
    return [(ticket, index, x) for x, ticket, index in sorted(found, reverse=True)[: 8 * SHOWN]]


def rows(index: Index, order: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = answers.rows_page(index, Filter(order=order), 0, SHOWN)["rows"]
    return found


def row_of(index: Index, ticket: int, episode: int, seconds: float) -> dict[str, Any] | None:
    found = answers.rows_page(index, Filter(ticket=ticket), 0, answers.MOST_ROWS)["rows"]
    row = next((x for x in found if x["episode"] == episode), None)
    return None if row is None else row | {"seconds": seconds}


def of_trajectory(run: Path, row: Mapping[str, Any], vocabulary: Any) -> str:
    if row["trajectory"] < 0:
        return f'<pre class="card">{text(row["error"])}</pre>' if row["error"] else ""
    try:
        group = answers.group_view(run, row["ticket"], vocabulary)
    except UserError as error:
        return f'<p class="error">{text(str(error))}</p>'
    own = [x for e in group["episodes"] for x in e["trajectories"]][row["trajectory"]]
    cut = {
        name: own[name]["text"] + ("" if own[name]["whole"] else " …")
        for name in ("prompt", "answer")
    }
    return folded("prompt", cut["prompt"]) + f'<pre class="card">{text(cut["answer"])}</pre>'


# ---- HTML


def text(x: str) -> str:
    """Escapes a text; control characters are replaced, and those that change its direction shown."""
    visible = "".join(y if y.isascii() or y.isprintable() else f"⟨U+{ord(y):04X}⟩" for y in x)
    return escape(printable(visible))


def number(x: float | None) -> str:
    if x is None or not math.isfinite(x):
        return "–"
    return f"{x:,}" if isinstance(x, int) else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def card(title: str, content: str) -> str:
    return f'<section class="card"><h2>{title}</h2>{content}</section>'


def folded(title: str, content: str) -> str:
    return f"<details><summary>{text(title)}</summary><pre>{text(content)}</pre></details>"


def chart(name: str, curve: Mapping[str, Sequence[float]]) -> str:
    """Returns a line over steps, with the band from the lowest to the highest of each point."""
    steps = curve["step"]
    low, high = min(curve["low"]), max(curve["high"])
    across, up = (steps[-1] - steps[0]) or 1, (high - low) or 1

    def path(values: Sequence[float], order: int = 1) -> str:
        return " ".join(
            f"{LEFT + (x - steps[0]) / across * (WIDTH - LEFT - MARGIN):.1f},"
            f"{HEIGHT - MARGIN - (y - low) / up * (HEIGHT - 2 * MARGIN):.1f}"
            for x, y in [*zip(steps, values, strict=True)][::order]
        )

    label = f"{name}: {number(curve['value'][0])} to {number(curve['value'][-1])}"
    ticks = "".join(
        f'<text class="tick" x="{LEFT - 6}" y="{y}" text-anchor="end">{number(x)}</text>'
        for x, y in ((high, MARGIN + 4), (low, HEIGHT - MARGIN))
    )
    ticks += "".join(
        f'<text class="tick" x="{x}" y="{HEIGHT - 1}" text-anchor="{anchor}">{number(step)}</text>'
        for step, x, anchor in ((steps[0], LEFT, "start"), (steps[-1], WIDTH - MARGIN, "end"))
    )
    return (
        f'<figure class="chart"><figcaption><span>{text(name)}</span>'
        f"<span>{number(curve['value'][-1])}</span></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{text(label)}">{ticks}'
        f'<polygon class="band k0" points="{path(curve["high"])} {path(curve["low"], -1)}"/>'
        f'<polyline class="line k0" points="{path(curve["value"])}"/></svg></figure>'
    )
