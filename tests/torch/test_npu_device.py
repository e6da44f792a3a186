"""Device, precision, attention and collectives where torch has a device kind named "npu", as torch_npu makes one."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
registration = pytest.importorskip("torch.utils.backend_registration")
if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
    pytest.skip("this torch registers no device kinds from Python", allow_module_level=True)

from tests.conftest import python_with


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    # renaming a device kind lasts as long as the process
    output = python_with(1, "-m", "tests.torch.npu_stand_in", LOCAL_RANK="0", RANK="0", WORLD_SIZE="1")
    return json.loads(output.splitlines()[-1])


def test_the_npu_is_the_trainers_device_and_computes_in_half_precision(found) -> None:
    assert found["device"] == "npu:0"
    assert found["precisions"] == ["torch.bfloat16", "torch.float32"]
    assert found["autocast"] == "torch.bfloat16"
    assert found["memory"] == [None, None]  # the stand-in has no allocator to ask


def test_attention_is_the_kernel_of_torch_npu_unless_another_is_named(found) -> None:
    assert found["attention"] == ["npu", "npu", "sdpa"]


def test_collectives_of_the_device_go_through_hccl_and_those_of_the_host_through_gloo(found) -> None:
    assert found["backends"] == found["config"] == "cpu:gloo,npu:hccl"
    assert found["groups"] == ["hccl"]
    assert found["summed"] == [1.0, 1.0]


def test_its_random_numbers_are_seeded_and_its_kernels_restricted(found) -> None:
    assert found["seeds"] == [7]
    assert found["deterministic"]


def test_a_model_on_the_host_is_pinned_there_with_its_moments_and_each_block_computes_on_the_npu(found) -> None:
    """Copies of a block there and back need memory, which the stand-in has not: the trainer's own test makes them on a CPU."""
    assert found["offloaded"] == {
        "mesh": "npu",
        "asked": [["npu:0", "cpu"]],
        "units": ["CPUOffloadPolicy(pin_memory=True) npu:0"],
        "count": 4,  # two blocks, the head, and the rest
        "kept": ["cpu"],
        "moments": ["cpu"],
        "pinned": True,
        "moved": True,
    }
