"""A run's metrics in metrics.jsonl, TensorBoard's files and the configured trackers."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_x.errors import UserError
from areal_x.monitor import metrics
from areal_x.monitor.metrics import MetricsWriter


def test_each_row_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    rows = [{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5, "accuracy": 0.9}]
    with MetricsWriter(tmp_path) as writer:
        for n, row in enumerate(rows, 1):
            writer.write(row)
            assert metrics.read(tmp_path) == rows[:n]


def test_what_json_has_no_number_for_is_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write({"step": 1, "loss": math.nan, "ratio": math.inf, "reward": 1.0})

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=refuse) == {"step": 1, "loss": None, "ratio": None, "reward": 1.0}


def test_no_step_is_there_twice_after_a_resume(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for step in range(6):
            writer.write({"step": step, "try": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "tr')  # the process was killed here
    with MetricsWriter(tmp_path, resumed_at=3) as writer:
        for step in range(4, 7):
            writer.write({"step": step, "try": 2})
    assert [(row["step"], row["try"]) for row in metrics.read(tmp_path)] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
        (5, 2),
        (6, 2),
    ]


def test_a_run_without_metrics_has_no_rows(tmp_path: Path) -> None:
    assert metrics.read(tmp_path) == []
    metrics.remove_after(tmp_path, 3)
    assert metrics.read(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"the disk of .*metrics\.jsonl is full: make room and continue with --resume"):  # noqa: SIM117
        with MetricsWriter(tmp_path) as writer:
            writer.write({"step": 1, "reward": 0.5})


def read_events(run: Path) -> list[Any]:
    """The events of every file as tensorboardX's own protocol buffers read them, with its checksums verified."""
    crc32c = pytest.importorskip("tensorboardX.crc32c")
    from tensorboardX.proto.event_pb2 import Event

    def mask(data: bytes) -> int:
        crc = crc32c.crc32c(data)
        return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF

    events = []
    for file in sorted((run / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:
            (length,), (check,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
            body, (check_body,) = data[12 : 12 + length], struct.unpack("<I", data[12 + length : 16 + length])
            assert (check, check_body) == (mask(data[:8]), mask(body))
            events.append(Event.FromString(body))
            data = data[16 + length :]
    return events


def test_tensorboard_files_hold_every_number_at_its_step(tmp_path: Path) -> None:
    rows = [{"step": 1, "reward": 0.25, "loss": -3.5}, {"step": 300, "reward": 1e6, "loss": math.nan}]
    with MetricsWriter(tmp_path) as writer:
        for row in rows:
            writer.write(row)
    first, *events = read_events(tmp_path)
    assert first.file_version == "brain.Event:2"
    found = [{"step": e.step, **{v.tag: v.simple_value for v in e.summary.value}} for e in events]
    assert str(found) == str(rows)


def test_tensorboard_forgets_the_steps_that_are_taken_again(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import SessionLog

    MetricsWriter(tmp_path).close()
    MetricsWriter(tmp_path, resumed_at=3).close()
    restart = read_events(tmp_path)[-1]
    assert (restart.step, restart.session_log.status) == (4, SessionLog.START)


def test_metrics_do_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from areal_x.monitor.metrics import MetricsWriter\n"
        "MetricsWriter(Path(sys.argv[1])).close(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
