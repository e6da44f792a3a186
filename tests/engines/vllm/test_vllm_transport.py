"""The transports of weights to servers: which settings are refused, and how servers are started for each."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_x.engines.vllm import transports
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.server import UNPICKLE, Launch, command, environment
from areal_x.engines.vllm.transports import check_machine, check_run, trainer_device
from areal_x.errors import ConfigError
from areal_x.experiment import Experiment
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.types import Task
from areal_x.workflows.single_turn import SingleTurn

LAUNCH = Launch(Path("model"), Path("log"), Path("staging"), context=128, concurrency=8, seed=3)
NCCL = VLLMConfig(transport="nccl", devices=("1",))
HANDLES = VLLMConfig(transport="handles", allow_unpickling=True)
RDT = VLLMConfig(transport="rdt")


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"transport": "ncl"}, r"vllm\.transport = 'ncl' .* did you mean 'nccl'"),
        ({"transport": "handles"}, r"vllm\.allow_unpickling = False .* True .* a pickle can run any code"),
        ({"allow_unpickling": True}, r"vllm\.allow_unpickling = True .* False unless vllm\.transport = 'handles'"),
        ({"transport": "nccl", "devices": ("1",), "allow_unpickling": True}, r"vllm\.allow_unpickling = True"),
        ({"transport": "handles", "allow_unpickling": True, "urls": ("http://localhost:1",)}, r"vllm\.urls .* by the run"),
        ({"transport": "handles", "allow_unpickling": True, "servers": 2}, r"vllm\.servers = 2 .* the trainer's own GPU"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        VLLMConfig(**settings)


def test_a_server_elsewhere_needs_no_shared_folder_for_a_broadcast() -> None:
    assert VLLMConfig(transport="nccl", urls=("http://far.example:8000",)).staging == ""


def test_a_run_whose_trainer_is_not_of_torch_is_refused_when_it_is_written_down(tiny_model_dir: Path) -> None:
    pytest.importorskip("areal_x_jax")
    dataset, workflow = [Task("0", "1+1=")], SingleTurn(reward=lambda task, text: 0.0)
    trainer = TrainerConfig(ModelConfig(str(tiny_model_dir)))
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'handles' .* 'files' with .* = 'jax'.* torch backend"):
        Experiment(dataset=dataset, workflow=workflow, trainer=trainer, backend="jax", engine="vllm", vllm=HANDLES)
    Experiment(dataset=dataset, workflow=workflow, trainer=trainer, backend="jax", engine="vllm", vllm=NCCL)


def test_adapters_and_handles_beside_a_cluster_are_refused() -> None:
    pytest.importorskip("areal_x_torch")
    check_run(NCCL, "torch", here=True, lora_rank=0)
    check_run(HANDLES, "torch", here=True, lora_rank=0)
    with pytest.raises(ConfigError, match=r"vllm\.devices = \(\) .* each server's devices, none of them the trainer's"):
        check_run(VLLMConfig(transport="nccl"), "torch", here=True, lora_rank=0)
    check_run(VLLMConfig(transport="nccl"), "torch", here=False, lora_rank=0)  # Ray gives each server its GPUs
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'nccl' .* 'files' with adapters"):
        check_run(NCCL, "torch", here=True, lora_rank=8)
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'handles' .* 'files' with train\.cluster = 'ray'"):
        check_run(HANDLES, "torch", here=False, lora_rank=0)


def test_pulls_need_torch_a_gang_on_ray_and_whole_weights() -> None:
    pytest.importorskip("areal_x_torch")
    pytest.importorskip("areal_x_jax")
    check_run(RDT, "torch", here=False, lora_rank=0)
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'rdt' .* 'files' with train\.backend = 'jax'"):
        check_run(RDT, "jax", here=False, lora_rank=0)
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'rdt' .* 'files' or 'nccl' with train\.cluster = 'here'"):
        check_run(RDT, "torch", here=True, lora_rank=0)
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'rdt' .* 'files' with adapters"):
        check_run(RDT, "torch", here=False, lora_rank=8)


@pytest.mark.parametrize("missing", ["ray", "nixl", "vllm"])
def test_pulls_are_refused_where_a_package_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "find_spec", lambda name: None if name.startswith(missing) else object())
    words = rf"vllm\.transport = 'rdt' .* 'files' unless all nodes have {missing} \(`pip install {missing}`\)"
    with pytest.raises(ConfigError, match=words):
        check_machine(RDT, here=False)
    check_machine(NCCL, here=False)


def test_pulls_are_refused_with_the_build_of_vllm_for_cpus_unless_servers_are_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transports, "find_spec", lambda name: object())
    monkeypatch.setattr(transports, "is_cpu_build", lambda: True)
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'rdt' .* the CPU build of vLLM"):
        check_machine(RDT, here=False)
    check_machine(replace(RDT, urls=("http://host-2:8000",)), here=False)
    monkeypatch.setattr(transports, "is_cpu_build", lambda: False)
    check_machine(RDT, here=False)


def test_a_trainer_without_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="'files' unless vLLM is installed beside the trainer"):
        check_machine(NCCL)
    check_machine(NCCL, here=False)


def test_a_machine_without_cuda_is_refused_before_a_model_is_loaded(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("areal_x_torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(transports, "find_spec", lambda name: object())
    trainer = TrainerConfig(ModelConfig(str(tiny_model_dir)))
    dataset, workflow = [Task("0", "1+1=")], SingleTurn(reward=lambda task, text: 0.0)
    run = Experiment(
        dataset=dataset, workflow=workflow, trainer=trainer, backend="torch", engine="vllm", vllm=NCCL, runs=str(tmp_path)
    )
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'nccl' .* 'files' where torch finds no CUDA device"):
        run.run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (NCCL, None),
        (replace(NCCL, devices=("2,4",), tensor=2), r"vllm\.devices = \('2,4',\) .* other devices than 4, the trainer's"),
        (HANDLES, None),
        (replace(HANDLES, devices=("4",)), None),
        (replace(HANDLES, devices=("0",)), r"vllm\.devices = \('0',\) .* \('4',\), the trainer's own GPU"),
    ],
)
def test_a_broadcast_takes_each_gpu_once_and_handles_are_of_one(
    config: VLLMConfig, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setattr(transports, "find_spec", lambda name: object())
    monkeypatch.setattr(transports, "is_cpu_build", lambda: False)
    if words is None:
        check_machine(config)
    else:
        with pytest.raises(ConfigError, match=words):
            check_machine(config)
    monkeypatch.setattr(transports, "is_cpu_build", lambda: True)
    with pytest.raises(ConfigError, match="'files' with the CPU build of vLLM"):
        check_machine(config)


def test_without_a_list_of_visible_gpus_their_names_are_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert trainer_device(3, "CUDA_VISIBLE_DEVICES") == "3"


# ---- how servers are started


def test_a_server_is_started_for_its_transport() -> None:
    for transfer in ("areal_x", "nccl", "ipc", "areal_x_rdt"):
        words = command(replace(LAUNCH, transfer=transfer), 1, cpu=False)
        assert json.loads(words[words.index("--weight-transfer-config") + 1]) == {"backend": transfer}


def test_no_server_unpickles_but_one_for_handles_not_even_where_a_shell_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for left in ("0", "1"):
        monkeypatch.setenv(UNPICKLE, left)
        for transfer in ("areal_x", "nccl", "areal_x_rdt"):
            assert UNPICKLE not in environment(replace(LAUNCH, transfer=transfer), "", cpu=False)
        assert environment(replace(LAUNCH, transfer="ipc"), "", cpu=False)[UNPICKLE] == "1"
    assert os.environ[UNPICKLE] == "1"


def test_nccl_listens_on_the_loopback_interface_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = replace(LAUNCH, transfer="nccl")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert environment(launch, "", cpu=False)["NCCL_SOCKET_IFNAME"] == "lo"
    assert "NCCL_SOCKET_IFNAME" not in environment(LAUNCH, "", cpu=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth1")
    assert environment(launch, "", cpu=False)["NCCL_SOCKET_IFNAME"] == "eth1"
