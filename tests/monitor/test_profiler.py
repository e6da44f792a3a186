"""Profiles of steps, by the files that the frameworks' own profilers write in real runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, cast

import pytest

from areal_x.errors import ConfigError
from areal_x.monitor import profiler
from areal_x.monitor.profiler import Profiler
from areal_x.protocols.trainer import Trainer
from tests.cluster.test_gang_weights import Gang, ganged
from tests.experiments import tiny_experiment
from tests.thorough import thorough


def events(file: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]


@thorough
def test_torch_profiles_the_named_step_alone_with_generation_and_backward_pass(tiny_model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    told: list[str] = []
    experiment = tiny_experiment(tiny_model_dir, tmp_path, steps=2, backend="torch", profile_steps=(2,))
    for _ in experiment.turns(experiment.open(), message=told.append):
        pass
    own = tmp_path / "run" / "profile" / "step-2" / "rank-0"
    assert [p.name for p in (tmp_path / "run" / "profile").iterdir()] == ["step-2"]
    assert f"profile: {own.parent}" in told
    names = events(own / "trace.json.gz")
    assert any("Backward" in name for name in names)
    assert "aten::embedding" in names
    assert "aten::mm" in (own / "operators.txt").read_text()


def test_jax_profiles_the_named_step_alone(tiny_model_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    experiment = tiny_experiment(tiny_model_dir, tmp_path, steps=2, backend="jax", profile_steps=(2,))
    for _ in experiment.turns(experiment.open(), message=lambda _: None):
        pass
    own = tmp_path / "run" / "profile" / "step-2" / "rank-0"
    assert [p.name for p in (tmp_path / "run" / "profile").iterdir()] == ["step-2"]
    (trace,) = own.rglob("perfetto_trace.json.gz")
    assert any("dot" in name for name in events(trace))  # a product of XLA's
    assert list(own.rglob("*.xplane.pb"))
    assert (own / "memory.prof").stat().st_size


@pytest.mark.parametrize(
    "profiled, backend, why",
    [
        ((0,), "torch", r"train\.profile_steps = 0 cannot work: it must be between 1 and 5"),
        ((2, 6), "torch", r"train\.profile_steps = 6 cannot work: it must be between 1 and 5"),
        ((2, 2), "jax", "each step once"),
        ((2,), "theirs", r"\(\) with train\.backend = 'theirs': only 'jax' or 'torch' can be profiled"),
    ],
)
def test_what_cannot_be_profiled_is_refused(profiled: tuple[int, ...], backend: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        profiler.check_steps(profiled, steps=5, backend=backend)


def test_a_step_that_fails_ends_its_profile(tmp_path: Path) -> None:
    """The next one of the process, of another run in a notebook, is whole."""
    torch = pytest.importorskip("torch")
    trainer: Any = None
    for run, fails in (("first", True), ("second", False)):
        try:
            with Profiler(tmp_path / run, (1,), "torch", trainer, lambda _: None) as steps:
                steps.begin(1)
                torch.ones(4, 4) @ torch.ones(4, 4)
                if fails:
                    raise ValueError
                steps.end()
        except ValueError:
            assert fails
    assert "aten::mm" in events(tmp_path / "second" / "profile" / "step-1" / "rank-0" / "trace.json.gz")


def test_a_second_profile_of_a_process_is_reported_and_the_run_continues(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    trainer: Any = None
    told: list[str] = []
    with Profiler(tmp_path / "first", (1,), "torch", trainer, told.append) as first:
        first.begin(1)
        with Profiler(tmp_path / "second", (1,), "torch", trainer, told.append) as second:
            second.begin(1)
            second.end()
        first.end()
    assert told[0] == "step 1 is not profiled: RuntimeError: another profile of this process is under way"
    assert told[1:] == [f"profile: {tmp_path / 'first' / 'profile' / 'step-1'}"]


def test_every_process_of_a_gang_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stand_in(folder: Path) -> profiler.Finish:
        return (folder / "trace").touch

    monkeypatch.setitem(profiler.PROFILERS, "torch", stand_in)
    gang, nothing = Gang(3), cast("Trainer", None)
    for rank in gang.ranks:
        rank._trainers["policy"] = nothing
    with Profiler(tmp_path, (1,), "torch", ganged(gang), lambda _: None) as steps:
        steps.begin(1)
        steps.end()
    written = sorted(p.parent.name for p in tmp_path.rglob("trace"))
    assert written == [f"rank-{rank}" for rank in range(3)]
