"""Weights to vllm-ascend's own receiving code, in vLLM 0.23 for CPU: `make ascend` runs this, in an environment of its own.

HCCL's library alone is replaced, by gloo (tests.engines.vllm.hccl_on_cpu), in the processes that train and that receive.
Nothing here shows that HCCL takes these calls on an NPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_x.engines.vllm import group_sender, hccl_sender
from areal_x.engines.vllm.broadcast import Broadcast, BroadcastFailed, Member
from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.dialects import OLDEST, Dialect
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.gpu_transfer import TrainerWeights
from areal_x.engines.vllm.hccl_sender import SIDE
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import EngineError, Request, SamplingParams
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from tests.engines.conformance import expected_logprobs
from tests.engines.vllm import hccl_on_cpu
from tests.engines.vllm.receivers import digest
from tests.servers import Run

pytestmark = pytest.mark.ascend

ROOT = Path(__file__).parents[3]
WORKERS = (2, 1, 1)
# Mixtures first: vLLM makes a process's groups once, and those of experts only for a mixture.
FAMILIES = (
    "qwen3-moe",
    "qwen2-moe-tied",
    "mixtral",
    "olmoe",
    "qwen3",
    "qwen3-tied",
    "llama-tied",
    "gemma3-tied",
)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """vllm-ascend in this process and in those that it starts, without NPUs."""
    import torch

    plugin = hccl_on_cpu.write_plugin(tmp_path_factory.mktemp("plugin"))
    paths = [str(plugin), str(ROOT), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", hccl_on_cpu.PLUGINS)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        hccl_on_cpu.install()
        patch.setattr(hccl_sender, "accelerator", lambda: "npu")
        patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
        patch.setattr(torch.accelerator, "device_index", lambda index: hccl_on_cpu.nullcontext())
        patch.setattr(torch.accelerator, "synchronize", lambda: None)
        yield patch


@pytest.fixture(autouse=True)
def no_sender(on_cpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_sender, "_senders", {})


class Receiver:
    """The process of tests.engines.vllm.hccl_families."""

    def __init__(self, *names: str) -> None:
        words = [sys.executable, "-m", "tests.engines.vllm.hccl_families", *names]
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("it ended")

    def ask(self, *request: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def answer(self, *request: Any) -> Any:
        self.ask(*request)
        return self.read()["answer"]


def test_every_familys_tensors_arrive_as_they_are_in_vllms_own_parameters(on_cpu: pytest.MonkeyPatch) -> None:
    receiver = Receiver(*FAMILIES)
    with receiver.process:
        try:
            for name in FAMILIES:
                directory = receiver.read()["directory"]
                group_sender._senders.clear()
                trainer = create_trainer("torch", TrainerConfig(ModelConfig(directory)))
                assert receiver.answer("differences"), name
                invitation = SIDE.invite(trainer, 0, [1], True)
                (info,) = SIDE.joining(invitation, [1])
                receiver.ask("init_weight_transfer_engine", info)
                SIDE.connect(trainer, 0, invitation)
                receiver.read()
                for _ in range(2):  # the second takes the same group
                    receiver.answer("start_weight_update")
                    receiver.ask("update_weights", SIDE.describe(trainer, 0))
                    SIDE.send(trainer, 0)
                    receiver.read()
                    receiver.answer("finish_weight_update")
                expected = {tensor: digest(x) for tensor, x in trainer.device_weights()}
                assert receiver.answer("loaded") == expected, name
                assert ("lm_head.weight" in expected) == ("tied" not in name)
                assert receiver.answer("differences") == [], name
                assert receiver.answer("distance") < 1e-4, name
                SIDE.leave(trainer, 0)
                receiver.ask()
        finally:
            receiver.process.kill()


class Servers:
    """Three in processes of their own, of two workers and of one."""

    def __init__(self) -> None:
        words = [sys.executable, "-m", "tests.engines.vllm.hccl_receivers"]
        self.processes = [
            subprocess.Popen([*words, str(n)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for n in WORKERS
        ]
        self.urls = [f"http://127.0.0.1:{self.port(process)}" for process in self.processes]

    @staticmethod
    def port(process: subprocess.Popen[str]) -> int:
        assert process.stdout is not None
        return next(int(line) for line in process.stdout if line.strip().isdigit())

    def members(self) -> list[Member]:
        """Those that run. Made in the event loop."""
        running = [i for i, process in enumerate(self.processes) if process.poll() is None]
        return [self.member(f"server {i}", self.urls[i], WORKERS[i]) for i in running]

    def member(self, name: str, url: str, workers: int) -> Member:
        client = VLLMClient(url, "the key", "hccl")
        client.dialect = Dialect(OLDEST)
        replica: Any = SimpleNamespace(
            name=name, client=client, start_update=client.start_update, explained=lambda error: error
        )
        return Member(replica, workers)

    def loaded(self, i: int) -> list[Any]:
        with urllib.request.urlopen(urllib.request.Request(self.urls[i] + "/asked", b"null")) as answer:
            found: list[Any] = json.load(answer)["loaded"]
        return found

    def kill(self, i: int) -> None:
        self.processes[i].kill()
        self.processes[i].wait()


@dataclass
class Tensors:
    """The part of a trainer that is sent: more than a buffer, of types that a buffer has to align, and one number alone."""

    seed: int

    def device_weights(self) -> Iterator[tuple[str, Any]]:
        import torch

        random = torch.Generator().manual_seed(self.seed)
        yield "flag", torch.rand(3, generator=random) > 0.5
        yield "half", torch.randn(301, 7, generator=random).bfloat16()
        yield "number", torch.randn((), generator=random)
        yield "none", torch.empty(0, 4)
        for i in range(6):
            yield f"layer.{i}", torch.randn(64, 33, generator=random)


def test_a_server_lost_in_a_broadcast_is_named_and_the_group_made_anew_without_it(
    on_cpu: pytest.MonkeyPatch, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_ascend.distributed.weight_transfer import hccl_engine

    for kind in (hccl_engine.HCCLTrainerSendWeightsArgs, hccl_engine.HCCLWeightTransferUpdateInfo):
        small = partial(kind, packed_buffer_size_bytes=20_000)  # several buffers, as both sides are told
        monkeypatch.setattr(hccl_engine, kind.__name__, small)
    servers, broadcast = Servers(), Broadcast(SIDE)

    async def publish(version: int) -> None:
        members = servers.members()
        staged = TrainerWeights(trainer=Tensors(version), version=version, device=0)
        try:
            await broadcast.connect(staged, members)
            await broadcast.send(staged, members)
        finally:
            for member in members:
                await member.client.close()

    def arrived(version: int, *which: int) -> None:
        expected = {name: digest(x if x.ndim else x[None]) for name, x in Tensors(version).device_weights()}
        for i in which:
            assert servers.loaded(i) == [expected] * WORKERS[i]

    try:
        run(publish(1))
        arrived(1, 0, 1, 2)
        send, sent, failed = hccl_sender.Group.broadcast, [], threading.Event()
        update = VLLMClient.update_weights

        async def noting(client: VLLMClient, info: Any) -> None:
            try:
                await update(client, info)
            except EngineError:
                failed.set()
                raise

        def killing(self: Any, tensor: Any, src: int) -> None:
            if len(sent) == 1:
                servers.kill(1)
                assert failed.wait(60)  # long before HCCL's own time limit
            sent.append(len(tensor))
            send(self, tensor, src)

        with monkeypatch.context() as patch:
            patch.setattr(hccl_sender.Group, "broadcast", killing)
            patch.setattr(VLLMClient, "update_weights", noting)
            with pytest.raises(BroadcastFailed, match="all servers of the broadcast may have parts of two policies") as raised:
                run(publish(2))
        assert len(sent) >= 2
        assert raised.value.torn
        assert "server 1" in raised.value.lost
        run(publish(3))
        arrived(3, 0, 2)
        assert group_sender._senders["hccl"].model_update_group.communicator.world_size == 4
    finally:
        for process in servers.processes:
            process.kill()
            process.wait()


REQUEST = Request(np.arange(2, 14, dtype=np.int32), SamplingParams(max_tokens=12))


@pytest.fixture(scope="module")
def engine(
    on_cpu: pytest.MonkeyPatch, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, run: Run
) -> Iterator[VLLMEngine]:
    """A real server, started by the run."""
    on_cpu.setattr("areal_x.engines.vllm.engine.check_machine", lambda *_: None)
    config = VLLMConfig(transport="hccl", servers=1, devices=("1",), context=128, concurrency=8, threads=1)
    engine = VLLMEngine(config, tiny_model_dir, tmp_path_factory.mktemp("logs"))
    run(engine.start())
    yield engine
    run(engine.close())


def published(run: Run, engine: VLLMEngine, directory: Path) -> None:
    """Publishes the weights of a directory, and compares what the server then samples with them."""
    trainer = create_trainer("torch", TrainerConfig(ModelConfig(str(directory))))
    version = engine.version + 1
    run(engine.swap(engine.stage(trainer, version)))
    assert engine.version == version
    for client in engine._clients:
        completion = run(client.generate(REQUEST.tokens, REQUEST.sampling))
        np.testing.assert_allclose(completion.logprobs, expected_logprobs(directory, REQUEST, completion), atol=1e-4)
        assert (completion.versions == version).all()


def test_a_real_server_samples_from_what_was_sent(
    engine: VLLMEngine, other_model_dir: Path, tiny_model_dir: Path, run: Run
) -> None:
    published(run, engine, other_model_dir)
    first = group_sender._senders["hccl"].model_update_group
    published(run, engine, tiny_model_dir)
    assert group_sender._senders["hccl"].model_update_group is first
