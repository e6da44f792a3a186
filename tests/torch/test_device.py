"""The trainer's device is found through torch.accelerator and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import areal_x_torch
from areal_x_torch.device import compute_dtype, find_device

SOURCES = sorted(Path(areal_x_torch.__file__).parent.glob("*.py"))
# What works on one kind of device alone. Its name as a string may choose a kernel, which is guarded there.
OF_ONE_KIND = re.compile(r"\.cuda\(|\btorch\.(cuda|npu|xpu|mps|hpu)\b|\.npu\(|^import torch_npu", re.MULTILINE)


def test_no_module_speaks_of_one_kind_of_device() -> None:
    assert len(SOURCES) > 5
    assert OF_ONE_KIND.search("x = tensor.cuda()")
    assert OF_ONE_KIND.search("torch.cuda.synchronize()")
    found = {f"{source.name}: {match[0]}" for source in SOURCES for match in OF_ONE_KIND.finditer(source.read_text())}
    assert found == set()


def test_the_accelerator_that_torch_finds_is_taken_whatever_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cuda", "xpu"):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, kind=kind: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
        assert find_device() == torch.device(kind, 1)
        assert compute_dtype("auto", find_device()) == torch.bfloat16
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert find_device() == torch.device("cpu")
    assert compute_dtype("auto", find_device()) == torch.float32
