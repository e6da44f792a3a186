"""Weights that no file carries: the bytes that vLLM's own engines send and receive, without NCCL and CUDA."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
import pickle
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_x.engines.fleet import fleet
from areal_x.engines.vllm import group_sender, nccl_sender
from areal_x.engines.vllm.broadcast import Broadcast
from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.gpu_transfer import GPUSender, WeightSyncClient
from areal_x.engines.vllm.server import UNPICKLE
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import EngineError
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from tests.rollout.fakes import until
from tests.servers import Run

pytestmark = [pytest.mark.xdist_group("vllm-direct"), pytest.mark.slow]  # one other process for all

HANDLES = VLLMConfig(transport="handles", allow_unpickling=True)
ROOT = Path(__file__).parents[3]


# ---- vLLM's own engines on both sides


@dataclasses.dataclass
class Torch:
    """The part of a torch trainer that a transport needs."""

    tensors: dict[str, Any]
    version: int = 0

    def device_weights(self) -> Iterator[tuple[str, Any]]:
        yield from self.tensors.items()


class Receivers:
    """Two servers in another process, of two workers and of one."""

    def __init__(self) -> None:
        words = [sys.executable, "-m", "tests.engines.vllm.receivers", "2", "1"]
        self.process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.urls: tuple[str, ...] = ()

    def wait(self) -> None:
        assert self.process.stdout is not None
        self.urls = tuple(f"http://127.0.0.1:{port}" for port in self.process.stdout.readline().split())

    def ask(self, index: int, path: str = "/asked", body: Any = None) -> Any:
        request = urllib.request.Request(self.urls[index] + path, json.dumps(body).encode())
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def torch() -> Any:
    pytest.importorskip("vllm")
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def receivers(torch: Any) -> Iterator[Receivers]:
    receivers = Receivers()
    with receivers.process:
        try:
            import vllm.distributed.weight_transfer.nccl_engine  # noqa: F401 - for seconds, while the other process does

            receivers.wait()
            yield receivers
        finally:
            receivers.process.kill()


@pytest.fixture(scope="module")
def module_patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def engine(
    receivers: Receivers, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory, run: Run, module_patch: Any
) -> Iterator[VLLMEngine]:
    """An engine over both servers, before its first weights."""
    from vllm.distributed.device_communicators import pynccl_wrapper

    from tests.engines.vllm.receivers import without_gpu

    class Library:
        """Stands in for NCCL's library, with a unique id that is the meeting place."""

        def ncclGetUniqueId(self) -> Any:
            with socket.create_server(("127.0.0.1", 0)) as free:
                where = f"127.0.0.1:{free.getsockname()[1]}".encode()
            unique_id = pynccl_wrapper.ncclUniqueId()
            unique_id.internal[: len(where)] = where
            return unique_id

    without_gpu(module_patch.setattr)
    module_patch.setattr(pynccl_wrapper, "NCCLLibrary", Library)
    module_patch.setattr("areal_x.engines.vllm.engine.check_machine", lambda *_: None)
    module_patch.setattr(fleet, "FIRST_RETRY_SECONDS", 0.01)
    module_patch.setattr(group_sender, "_senders", {})
    module_patch.setenv("VLLM_API_KEY", "the key")
    module_patch.setenv("NCCL_SOCKET_IFNAME", "lo")
    config = VLLMConfig(urls=receivers.urls, transport="nccl")
    engine = VLLMEngine(config, tiny_model_dir, tmp_path_factory.mktemp("logs"))
    run(engine.start())

    async def score(replica: Any) -> np.ndarray:
        return np.zeros(4, np.float32)

    engine.supervisor._score = score  # these servers generate nothing
    yield engine
    run(engine.close())


def drawn(torch: Any) -> dict[str, Any]:
    """Other weights of the same model."""
    return {m.name: torch.randn(m.shape).to(m.dtype) for m in group_sender._senders["nccl"].source.metadata()}


@dataclasses.dataclass
class FirstSwap:
    engine: VLLMEngine
    trainer: Any
    events: list[str]
    asked: list[Any]
    seconds: float


@pytest.fixture(scope="module")
def first(engine: VLLMEngine, receivers: Receivers, tiny_model_dir: Path, run: Run, torch: Any) -> FirstSwap:
    """Runs after the servers received version 7 of a torch trainer: the engine, and the requests made until then."""
    from tests.engines.vllm.receivers import Communicator

    pytest.importorskip("areal_x_torch")
    trainer = create_trainer("torch", TrainerConfig(ModelConfig(str(tiny_model_dir)), precision="bf16"))
    events: list[str] = []
    send = Communicator.broadcast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "synchronize", lambda: events.append("the optimizer's step is done"))
        patch.setattr(Communicator, "broadcast", lambda *of, **more: (events.append("broadcast"), send(*of, **more)))
        seconds = run(engine.swap(engine.stage(trainer, 7)))
    assert engine.version == 7
    return FirstSwap(engine, trainer, events, [receivers.ask(0), receivers.ask(1)], seconds)


def test_what_the_trainer_sends_arrives_at_every_worker_in_the_order_of_a_swap(first: FirstSwap, torch: Any) -> None:
    from tests.engines.vllm.receivers import digest

    assert first.seconds > 0
    assert first.events[0] == "the optimizer's step is done"
    assert "broadcast" in first.events
    trainer = first.trainer
    expected = {name: digest(torch.from_numpy(x.astype(np.float32)).bfloat16()) for name, x in trainer.weights()}
    for index, workers in enumerate((2, 1)):
        asked = first.asked[index]
        assert asked["loaded"] == [expected] * workers
        paths = [path for path, _ in asked["calls"]]
        assert paths == [
            "/version",
            "/v1/models",
            "/is_paused",
            "/shutdown_weight_transfer_engine",
            "/get_world_size",
            "/update_weight_version",
            "/init_weight_transfer_engine",
            "/pause?mode=keep&clear_cache=true",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/resume",
        ]
        calls = dict(asked["calls"])
        assert calls["/update_weight_version"] == {"new_version": "0"}
        assert calls["/finish_weight_update"] == {"weight_version": "7"}
        init = calls["/init_weight_transfer_engine"]["init_info"]
        assert (init["rank_offset"], init["world_size"], init["packed"]) == ((1, 3)[index], 4, True)
        assert "master_address" not in init


def test_later_weights_take_the_same_connection(first: FirstSwap, receivers: Receivers, run: Run, torch: Any) -> None:
    from tests.engines.vllm.receivers import digest

    engine = first.engine
    tensors = drawn(torch)
    run(engine.swap(engine.stage(Torch(tensors), 8)))
    for index, workers in enumerate((2, 1)):
        asked = receivers.ask(index)
        assert asked["loaded"] == [{name: digest(x) for name, x in tensors.items()}] * workers
        paths = [path for path, _ in asked["calls"]]
        assert paths.count("/init_weight_transfer_engine") == 1
        assert paths[-5:-3] == ["/pause?mode=keep&clear_cache=true", "/start_weight_update"]
        assert asked["calls"][-2] == ["/finish_weight_update", {"weight_version": "8"}]


def has(receivers: Receivers, index: int, tensors: dict[str, Any]) -> bool:
    from tests.engines.vllm.receivers import digest

    return all(loaded == {name: digest(x) for name, x in tensors.items()} for loaded in receivers.ask(index)["loaded"])


async def all_back(engine: VLLMEngine) -> None:
    """Returns when every server serves, or waits for weights."""
    broadcaster, members = engine.publisher.sender, engine.fleet.members
    await until(lambda: all(member.serves or name in broadcaster._joining for name, member in members.items()))


@pytest.mark.loses(r"is lost \(.* with 500: it was told to refuse")
@pytest.mark.parametrize("path", ["/pause", "/start_weight_update"])
def test_a_server_that_fails_before_the_broadcast_is_left_out_until_it_is_back(
    path: str, first: FirstSwap, receivers: Receivers, run: Run, torch: Any
) -> None:
    engine, (lost, stays) = first.engine, [f"the vLLM server at {url}" for url in receivers.urls]
    version = engine.version + 1
    receivers.ask(0, "/refuse", path)
    tensors = drawn(torch)
    run(engine.swap(engine.stage(Torch(tensors), version)))
    assert engine.version == version
    assert has(receivers, 1, tensors)
    assert not has(receivers, 0, tensors)
    assert engine.fleet.serving() == [stays]
    calls = receivers.ask(1)["calls"]
    inits = [body["init_info"] for name, body in calls if name == "/init_weight_transfer_engine"]
    assert (inits[-1]["rank_offset"], inits[-1]["world_size"]) == (1, 2)
    assert len({info["nccl_unique_id_b64"] for info in inits}) == len(inits)
    assert calls[-2] == ["/finish_weight_update", {"weight_version": str(version)}]
    assert calls[-1][0] == "/resume"

    receivers.ask(0, "/refuse", "")
    run(all_back(engine))
    later = drawn(torch)
    run(engine.swap(engine.stage(Torch(later), version + 1)))
    assert has(receivers, 0, later)
    assert has(receivers, 1, later)
    infos = [dict(receivers.ask(index)["calls"])["/init_weight_transfer_engine"]["init_info"] for index in (0, 1)]
    assert [(info["rank_offset"], info["world_size"]) for info in infos] == [(1, 4), (3, 4)]
    run(until(lambda: set(engine.fleet.serving()) == {lost, stays}))
    assert engine.fleet.members[lost].version == version + 1


@pytest.mark.loses(
    "is lost .*it was told to refuse; all servers of the broadcast may have parts of two policies",
    r"does not come back \(.*is paused: .* parts of two policies; restart it",
)
def test_a_broadcast_that_breaks_off_is_repeated_once_the_servers_are_restarted_and_none_goes_on_before(
    first: FirstSwap, receivers: Receivers, run: Run, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.engines.vllm.receivers import Communicator

    engine, broadcaster = first.engine, first.engine.publisher.sender
    version, tensors = engine.version + 1, drawn(torch)
    with monkeypatch.context() as patch:
        # The sending side would wait forever, and the other server gets no request, which would do so too.
        patch.setattr(Communicator, "broadcast", lambda *of, **more: threading.Event().wait())
        patch.setattr(VLLMClient, "update_weights", refused_by_one(VLLMClient.update_weights, receivers.urls[0]))
        patch.setattr(broadcaster, "_config", dataclasses.replace(broadcaster._config, wait_seconds=0.5))
        receivers.ask(0, "/refuse", "/update_weights")
        with pytest.raises(EngineError, match=r"no vLLM server has come back within 0\.5 s .*restart it"):
            run(engine.swap(engine.stage(Torch(tensors), version)))
    assert (engine.version, engine.fleet.serving()) == (version - 1, [])
    for index in (0, 1):
        asked = receivers.ask(index)["calls"]
        assert ["/finish_weight_update", {"weight_version": str(version)}] not in asked
        assert "/resume" not in [
            name for name, _ in asked[len(asked) - 1 - asked[::-1].index(["/start_weight_update", None]) :]
        ]

    async def publish() -> None:
        swap = asyncio.create_task(engine.swap(engine.stage(Torch(tensors), version)))
        await until(lambda: not engine.fleet.serving())
        for index in (0, 1):
            await asyncio.to_thread(receivers.ask, index, "/restart")
        await swap
        await until(lambda: broadcaster._joining or engine.fleet.serving())

    run(publish())
    assert engine.version == version
    assert has(receivers, 0, tensors) or has(receivers, 1, tensors)
    run(all_back(engine))
    run(engine.swap(engine.stage(Torch(later := drawn(torch)), version + 1)))
    assert has(receivers, 0, later)
    assert has(receivers, 1, later)
    run(until(lambda: len(engine.fleet.serving()) == 2))


def test_a_sending_side_that_fails_ends_the_publication_and_no_server_goes_on(
    first: FirstSwap, receivers: Receivers, run: Run, torch: Any
) -> None:
    engine = first.engine
    others = {name: x.float() for name, x in drawn(torch).items()}  # not what the servers were told
    with pytest.raises(EngineError, match=r"could not be sent: .* all servers of the broadcast may have parts of two policies"):
        run(engine.swap(engine.stage(Torch(others), engine.version + 1)))
    for index in (0, 1):
        calls = [name for name, _ in receivers.ask(index)["calls"]]
        assert calls.index("/start_weight_update") > 0
        assert "/resume" not in calls[len(calls) - calls[::-1].index("/start_weight_update") :]
        receivers.ask(index, "/restart")


def test_a_jax_trainer_sends_its_arrays(
    first: FirstSwap, receivers: Receivers, run: Run, torch: Any, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.engines.vllm.receivers import digest

    monkeypatch.setattr(group_sender, "_senders", {})  # of another trainer
    monkeypatch.setattr(first.engine.publisher.sender._broadcast, "_connected", [])

    pytest.importorskip("areal_x_jax")
    trainer = create_trainer("jax", TrainerConfig(ModelConfig(str(tiny_model_dir)), precision="bf16"))
    version = first.engine.version + 1
    run(first.engine.swap(first.engine.stage(trainer, version)))
    expected = {name: digest(torch.from_numpy(x.astype(np.float32)).bfloat16()) for name, x in trainer.weights()}
    assert [receivers.ask(index)["loaded"] for index in (0, 1)] == [[expected] * 2, [expected]]


class InAGang:
    """A trainer in a process of its own, as the driver sees it."""

    def __init__(self, trainer: Torch) -> None:
        self.trainer, self.called = trainer, []

    def apply(self, function: Any, *arguments: Any, beside: bool = False) -> Any:
        self.called.append((function.__name__, beside))
        found = pickle.loads(pickle.dumps((function, arguments)))  # it travels
        return found[0](self.trainer, 0, *found[1])


def test_the_first_process_of_a_gang_sends_and_the_driver_asks_the_servers(
    first: FirstSwap, receivers: Receivers, run: Run, torch: Any
) -> None:
    engine, tensors = first.engine, drawn(torch)
    trainer = InAGang(Torch(tensors))
    staged = engine.stage(trainer, version := engine.version + 1)
    assert (staged.device, staged.reads_trainer) == (None, True)
    engine.publisher.sender._broadcast._connected = []
    run(engine.swap(staged))
    assert trainer.called == [("invite", False), ("connect", False), ("describe", False), ("send", False)]
    assert engine.version == version
    assert has(receivers, 0, tensors)
    assert has(receivers, 1, tensors)


def test_the_other_processes_of_a_gang_only_gather(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engines.vllm.receivers import without_gpu

    without_gpu(monkeypatch.setattr)
    monkeypatch.setattr(group_sender, "_senders", {})
    gathered = []

    class Gathering(Torch):
        def device_weights(self) -> Iterator[tuple[str, Any]]:
            for name, x in super().device_weights():
                gathered.append(name)
                yield name, x

    trainer = Gathering({"a": torch.zeros(2), "b": torch.zeros(3)})
    assert nccl_sender.SIDE.invite(trainer, 1, [2], True) == {}
    nccl_sender.SIDE.connect(trainer, 1, {})
    assert nccl_sender.SIDE.describe(trainer, 1)["shapes"] == [[2], [3]]
    gathered.clear()
    nccl_sender.SIDE.send(trainer, 1)
    assert gathered == ["a", "b"]


def test_a_process_without_a_gpu_says_so(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_sender, "_senders", {})

    def none() -> int:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "current_device", none)
    with pytest.raises(UserError, match=r"'nccl' needs a CUDA device in every process that trains .*: use 'files'"):
        nccl_sender.SIDE.invite(Torch({}), 0, [1], True)


def test_a_server_that_an_update_left_paused_is_not_taken_as_it_is(
    first: FirstSwap, receivers: Receivers, tiny_model_dir: Path, tmp_path: Path, run: Run
) -> None:
    run(first.engine._clients[0].pause())
    other = VLLMEngine(VLLMConfig(urls=receivers.urls[:1], transport="nccl"), tiny_model_dir, tmp_path)
    with pytest.raises(UserError, match=r"is paused: .* parts of two policies; restart it"):
        run(other.start())
    run(first.engine._clients[0].resume())


def refused_by_one(update_weights: Any, url: str) -> Any:
    """The other server, which would wait for the broadcast forever, gets no request."""

    async def ask(client: VLLMClient, info: Any) -> None:
        if client.url == url:
            await update_weights(client, info)

    return ask


# ---- handles


def test_handles_go_to_the_server_as_what_vllm_unpickles_only_where_it_may(
    torch: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import ipc_engine
    from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk

    from tests.engines.vllm.receivers import Server, without_gpu

    without_gpu(monkeypatch.setattr)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="the GPU"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    handle = {"the GPU": ("a handle", 3)}

    def chunks(iterator: Iterator[tuple[str, Any]], gpu_uuid: str, post_iter_func: Any, buffer_size_bytes: int) -> Any:
        """One tensor per chunk; sharing its memory needs a GPU."""
        for name, x in iterator:
            yield PackedIpcChunk([name], [list(x.shape)], ["float32"], [x.nbytes], {gpu_uuid: handle["the GPU"]})

    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", chunks)
    server = Server(1)

    async def send() -> None:
        client = VLLMClient(f"http://127.0.0.1:{await server.start()}", "the key")
        sender = GPUSender(HANDLES, [client], [1], lambda index, call: call)
        staged = sender.stage(Torch({"a": torch.zeros(2), "b": torch.zeros(3)}), 4)
        await sender.connect(staged)
        await sender.send(staged)
        await client.close()
        sender.close()
        await server.runner.cleanup()

    run(send())
    paths = [path for path, _ in server.calls]
    assert paths == [
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/update_weights",
        "/finish_weight_update",
    ]
    assert ipc_engine.IPCWeightTransferInitInfo(**server.calls[0][1]["init_info"]).packed
    sent = server.calls[3][1]["update_info"]
    monkeypatch.delenv(UNPICKLE, raising=False)
    with pytest.raises(ValueError, match=UNPICKLE):
        ipc_engine.IPCWeightTransferUpdateInfo(**sent)
    monkeypatch.setenv(UNPICKLE, "1")
    received = ipc_engine.IPCWeightTransferUpdateInfo(**sent)
    assert (received.names, received.shapes, received.tensor_sizes, received.ipc_handles) == (["b"], [[3]], [12], handle)
    assert server.calls[-1][1] == {"weight_version": "4"}


def test_handles_to_a_server_of_several_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"vllm\.arguments .* without parallelism .* has 2 workers"):
        GPUSender(HANDLES, [], [2], lambda index, call: call)


@pytest.mark.parametrize(
    "sender", [lambda: GPUSender(HANDLES, [], [1], lambda index, call: call), lambda: Broadcast(nccl_sender.SIDE)]
)
def test_the_trainer_waits_until_its_memory_has_been_read(
    sender: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, torch: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    assert sender().stage(SimpleNamespace(device_weights=list), 1).reads_trainer


# ---- what vLLM has that the stand-ins replace


def test_what_stands_in_for_vllms_parts_takes_what_they_take(torch: Any) -> None:
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary, ncclUniqueId
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

    from tests.engines.vllm.receivers import Communicator

    for name in ("from_unique_id_bytes", "broadcast", "destroy"):
        theirs, ours = (set(inspect.signature(getattr(of, name)).parameters) for of in (PyNcclCommunicator, Communicator))
        assert ours <= theirs, name
    assert list(inspect.signature(NCCLLibrary.ncclGetUniqueId).parameters) == ["self"]
    assert len(bytes(ncclUniqueId().internal)) == 128
    inspect.signature(packed_ipc_producer).bind([], gpu_uuid="", post_iter_func=None, buffer_size_bytes=1)
    assert issubclass(WeightSyncClient, VLLMWeightSyncClient)
    assert issubclass(nccl_sender.EngineCalls, VLLMWeightSyncClient)
