"""The pages in a real browser: make browser (docs/lab.md).

They need Chromium and an environment of its own with playwright and axe, whose interpreter BROWSER_PYTHON names.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from areal_x.run.journal import Journal
from areal_x.run.token_record import TokenRecord
from tests.conftest import environment_with
from tests.lab.journals import (
    FAILED,
    HOSTILE,
    LATE,
    group,
    scored,
    write_journal,
    write_metrics,
    write_timeline,
    write_tokenizer,
)

WHY = "BROWSER_PYTHON names no interpreter with playwright: make browser"
pytestmark = [pytest.mark.browser, pytest.mark.skipif("BROWSER_PYTHON" not in os.environ, reason=WHY)]
BROWSER = Path(__file__).with_name("browser.py")
PAINT_MS, ANSWER_MS = 1000, 300


def write_runs(place: Path) -> None:
    """Two runs whose every text is hostile."""
    random = np.random.default_rng(0)
    for name in ("run", "other"):
        groups = []
        for ticket in range(40):
            attempts = [scored(f"1 {HOSTILE} {'x' * 5000 if ticket == 3 else i}", i / 4, version=ticket) for i in range(4)]
            groups.append(group(ticket, [*attempts, FAILED, LATE], task=f"{ticket} {HOSTILE}"))
        write_journal(place / name, groups, [[2 * i, 2 * i + 1] for i in range(10)])
        lengths = [int(t.mask.sum()) for e in groups[3].episodes for t in e.trajectories]
        numbers = random.normal(size=sum(lengths)).astype(np.float32)
        with Journal(place / name) as journal:
            journal.trained(2, {3: TokenRecord(logprobs=numbers, advantages=numbers, entropies=abs(numbers))})
        write_tokenizer(place / name / "checkpoints" / "10" / "trainer")
        (place / name / "config.gin").write_text(f"train.steps = 10\ntrain.name = {name + HOSTILE!r}\n")
        shares = {"seconds": 2.0, "wait_seconds": 0.4, "update_seconds": 1.2, "publish_seconds": 0.1}
        rows = []
        for step, noise in enumerate(random.normal(size=300)):
            row = {"step": step, **shares, "reward": step / 300 + noise / 10, "loss": noise, "staleness_mean": 1.0}
            rows.append(row | ({} if step % 50 else {"accuracy": step / 300}))
        write_metrics(place / name, [*rows, {"step": 300, f"reward/{HOSTILE}": 1.0}])
        write_timeline(place / name)
        about = {"who": f"group 3, episode 0 (task {HOSTILE})", "about": f"31 s for its reward ({HOSTILE})"}
        stall = {"time": 0.0, "silent_seconds": 31.0, "sentences": [f"{about['who']} has waited {about['about']}"]}
        stall |= {"waits": [about | {"idle": False}, {"who": "the rollout", "about": "31 s for room", "idle": True}]}
        (place / name / "logs").mkdir()
        text = json.dumps(stall | {"threads": [{"name": HOSTILE, "stack": f"  File {HOSTILE}"}]})
        (place / name / "logs" / "waits.json").write_text(text)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    write_runs(tmp_path)
    command = [sys.executable, "-u", "-m", "areal_x.lab", str(tmp_path)]
    with subprocess.Popen(command, env=environment_with(1), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0


def test_every_page_is_right_accessible_and_quick(address):
    command = [os.environ["BROWSER_PYTHON"], str(BROWSER), address, "--other", "other", "--group", "3", "--search", "evil"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert found["times"]["first_paint_ms"] <= PAINT_MS
    filters = {name: ms for name, ms in found["times"].items() if name.startswith("filter")}
    assert len(filters) == 4
    assert max(filters.values()) <= ANSWER_MS, filters
