"""torch-npu beside the torch that it was made for, or none where no NPU is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

pytest.importorskip("areal_x_torch")

import areal_x_torch
from areal_x.errors import UserError
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x_torch import npu_releases


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Says what is installed, and whether the machine has an NPU."""

    def has(npu, **versions):
        def version(name):
            if name not in versions:
                raise PackageNotFoundError(name)
            return versions[name]

        device = tmp_path / "davinci0"
        device.touch() if npu else device.unlink(missing_ok=True)
        monkeypatch.setattr(npu_releases, "NPU", device)
        monkeypatch.setattr(npu_releases, "version", version)
        monkeypatch.delenv(npu_releases.VISIBLE, raising=False)

    return has


@pytest.mark.parametrize("torch", ["2.10.0", "2.10.1+cpu"])
def test_releases_of_one_number_belong_together(machine, torch):
    machine(True, **{"torch": torch, "torch-npu": "2.10.0.post4"})
    npu_releases.check_releases()


@pytest.mark.parametrize("call", [areal_x_torch.check, areal_x_torch.create_trainer])
def test_another_torch_is_refused_before_it_is_imported(machine, call):
    machine(True, **{"torch": "2.13.0+cpu", "torch-npu": "2.10.0.post4"})
    with pytest.raises(UserError, match=r"torch-npu 2\.10 and torch 2\.13 are installed, .*docs/ascend\.md"):
        call(TrainerConfig())


def test_npus_that_torch_would_not_find_are_named_unless_they_are_hidden(machine, monkeypatch):
    machine(False, torch="2.13.0")
    npu_releases.check_releases()
    machine(True, torch="2.13.0")
    with pytest.raises(UserError, match=r"has NPUs, and torch-npu, .* pip install 'areal-x\[ascend\]', or set ASCEND_RT"):
        npu_releases.check_releases()
    monkeypatch.setenv(npu_releases.VISIBLE, "")
    npu_releases.check_releases()
