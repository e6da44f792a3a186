"""Weights that workers pull: vLLM's own sharded-RDT classes on both sides in one process, without Ray, NIXL and CUDA."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from areal_x.engines.vllm import rdt_receiver, rdt_sender, transports
from areal_x.errors import UserError

pytestmark = [pytest.mark.xdist_group("vllm-direct"), pytest.mark.slow]

ROWS, COLUMNS, LAYERS = 8, 6, 3


@pytest.fixture(scope="module")
def torch() -> Any:
    pytest.importorskip("vllm")
    return pytest.importorskip("torch")


@pytest.fixture
def ray(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("ray")
    from tests.engines.fleet.local_ray import replace_ray

    monkeypatch.setattr(rdt_sender, "_sender", None)
    monkeypatch.setattr(rdt_sender, "missing_packages", lambda: "")
    yield replace_ray(monkeypatch.setattr)
    rdt_sender.shut_down()


class Trainer:
    """The part of a trainer that sends. gathered: the names that a process has gathered."""

    def __init__(self, tensors: dict[str, Any]) -> None:
        self.tensors, self.gathered = tensors, list[str]()

    def device_weights(self) -> Iterator[tuple[str, Any]]:
        for name, x in self.tensors.items():
            self.gathered.append(name)
            yield name, x


def drawn(torch: Any, seed: int) -> dict[str, Any]:
    """Random weights, in the order of a model with a vision tower: some outside of layers come in the middle."""
    random = torch.Generator().manual_seed(seed)
    shapes = {
        "visual.blocks.0.weight": (ROWS, COLUMNS),
        "embed.weight": (10, COLUMNS),
        **{f"layers.{i}.{name}.weight": (ROWS, COLUMNS) for i in range(LAYERS) for name in ("gate", "up")},
        "head.weight": (10, COLUMNS),
    }
    return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}


class Worker:
    """One worker of a server: it holds its part of the rows of every kernel. index: among the width of its server."""

    def __init__(self, torch: Any, index: int, width: int, left_out: str = "") -> None:
        from vllm.config.weight_transfer import WeightTransferConfig
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        nn = torch.nn

        def kernel(rows: int, *fused: str) -> Any:
            """Rows of one tensor, or of several one after the other, of each the worker's part."""
            own, module = rows // width, nn.Module()
            module.weight = nn.Parameter(torch.zeros(max(1, len(fused)) * own, COLUMNS), requires_grad=False)

            def load(param: Any, loaded: Any, part: str = "") -> None:
                at = fused.index(part) * own if part else 0
                param.data.narrow(0, at, own).copy_(loaded.narrow(0, index * own, own))

            module.weight.weight_loader = load
            return module

        class Model(nn.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.visual, self.layers = nn.Module(), nn.ModuleList()
                self.visual.blocks = nn.ModuleList([kernel(ROWS)])
                for _ in range(LAYERS):
                    self.layers.append(nn.Module())
                    self.layers[-1].mlp = kernel(ROWS, "gate", "up")
                self.embed, self.head = kernel(10), kernel(10)

            def load_weights(self, weights: Any) -> None:
                own = dict(self.named_parameters())
                for name, x in weights:
                    if name == left_out:
                        continue
                    *path, part, leaf = name.split(".")
                    if part in ("gate", "up"):
                        param = own[".".join([*path, "mlp", leaf])]
                        param.weight_loader(param, x, part)
                    else:
                        own[name].weight_loader(own[name], x)

        self.torch, self.index, self.width = torch, index, width
        with torch.device("cpu"):
            self.model = Model()
            record_metadata_for_reloading(self.model)
        parallel = SimpleNamespace(
            distributed_executor_backend="mp", data_parallel_index=0, world_size=width, rank=index, enable_eplb=False
        )
        config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.float32))
        transfer = WeightTransferConfig(backend="areal_x_rdt")
        self.engine = rdt_receiver.receiver()(transfer, config, torch.device("cpu"), self.model)

    def join(self, info: dict[str, Any]) -> None:
        self.engine.init_transfer_engine(self.engine.parse_init_info(info))

    def receive(self) -> None:
        self.engine.start_weight_update()
        self.engine.update_weights({})
        self.engine.finish_weight_update()

    def holds(self, tensors: dict[str, Any]) -> bool:
        """True if every parameter is this worker's part of the trainer's, to the bit."""
        own = dict(self.model.named_parameters())

        def part(name: str) -> Any:
            return tensors[name].chunk(self.width, 0)[self.index]

        expected = {name: part(name) for name in ("visual.blocks.0.weight", "embed.weight", "head.weight")}
        for i in range(LAYERS):
            both = [part(f"layers.{i}.{name}.weight") for name in ("gate", "up")]
            expected[f"layers.{i}.mlp.weight"] = self.torch.cat(both)
        assert expected.keys() == own.keys()
        return all(self.torch.equal(own[name], x) for name, x in expected.items())


def servers_of(torch: Any, *widths: int) -> list[list[Worker]]:
    return [[Worker(torch, index, width) for index in range(width)] for width in widths]


def join(trainer: Trainer, servers: Sequence[Sequence[Worker]]) -> None:
    sizes = [len(workers) for workers in servers]
    invitation = rdt_sender.invite(trainer, 0, sizes, True)
    together(
        [
            lambda worker=worker, info=info: worker.join(info)  # type: ignore[misc]
            for workers, info in zip(servers, rdt_sender.joining(invitation, sizes), strict=True)
            for worker in workers
        ]
    )


def together(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def publish(trainer: Trainer, servers: Sequence[Sequence[Worker]]) -> str | None:
    receive = [worker.receive for workers in servers for worker in workers]
    found: str | None = together([lambda: rdt_sender.send(trainer, 0), *receive])[0]
    return found


@pytest.mark.parametrize("widths", [(1,), (2,), (2, 2)])
def test_every_worker_pulls_its_part_of_each_version(widths: tuple[int, ...], ray: Any, torch: Any) -> None:
    trainer, servers = Trainer(drawn(torch, 0)), servers_of(torch, *widths)
    join(trainer, servers)
    trainer.gathered.clear()
    for seed in (1, 2, 3):
        trainer.tensors = drawn(torch, seed)
        assert publish(trainer, servers) is None
        assert all(worker.holds(trainer.tensors) for workers in servers for worker in workers)
    assert trainer.gathered == 3 * list(trainer.tensors), "each version is gathered once"
    whole = sum(x.nbytes for x in trainer.tensors.values())
    assert sum(ray.pulled) >= 3 * whole * len(widths)
    assert sum(ray.pulled) <= 3 * (whole + 16 * 64) * len(widths), "no worker pulls what it does not need"


def test_servers_that_join_and_leave_make_a_new_fleet(ray: Any, torch: Any) -> None:
    trainer, (one, other) = Trainer(drawn(torch, 0)), servers_of(torch, 1, 1)
    for seed, fleet in enumerate(([one], [one, other], [other]), 1):
        trainer.tensors = drawn(torch, seed)
        join(trainer, fleet)
        buffers = [id(slot) for (worker,) in fleet for slot in worker.engine._dest_buffers]
        assert publish(trainer, fleet) is None
        assert all(worker.holds(trainer.tensors) for (worker,) in fleet)
        join(trainer, fleet)
        found = [id(slot) for (worker,) in fleet for slot in worker.engine._dest_buffers]
        assert found == buffers, "NIXL registers their memory for good"
    assert one[0].holds(drawn(torch, 2))


def test_a_worker_that_is_gone_ends_the_sending_after_all_processes_have_gathered_the_rest(
    ray: Any, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import sharded_rdt_trainer

    monkeypatch.setattr(rdt_sender, "STALL_SECONDS", 0.2)
    monkeypatch.setattr(sharded_rdt_trainer, "_STALL_POLL_S", 0.05)
    trainer, servers = Trainer(drawn(torch, 0)), servers_of(torch, 1, 1)
    join(trainer, servers)
    trainer.gathered.clear()
    stays, _ = servers
    with pytest.raises(RuntimeError, match="RDT stall"):
        publish(trainer, [stays])
    assert trainer.gathered == list(trainer.tensors)
    trainer.tensors = drawn(torch, 1)
    fleet = servers_of(torch, 1)  # the other one was restarted
    join(trainer, fleet)
    assert publish(trainer, fleet) is None
    assert fleet[0][0].holds(trainer.tensors)


def test_sending_that_is_given_up_returns_why(ray: Any, torch: Any) -> None:
    trainer, servers = Trainer(drawn(torch, 0)), servers_of(torch, 1)
    join(trainer, servers)
    trainer.gathered.clear()
    begun = ThreadPoolExecutor(1).submit(rdt_sender.send, trainer, 0)
    while not begun.done():  # what is said before it begins is forgotten
        rdt_sender.leave(trainer, 0)
    assert "the publication was given up" in begun.result()
    assert trainer.gathered == list(trainer.tensors)


def test_an_error_of_the_trainer_is_raised(ray: Any, torch: Any) -> None:
    class Failing(Trainer):
        def device_weights(self) -> Iterator[tuple[str, Any]]:
            yield next(super().device_weights())
            raise ArithmeticError("out of memory")

    trainer, servers = Trainer(drawn(torch, 0)), servers_of(torch, 1)
    join(trainer, servers)
    with pytest.raises(ArithmeticError, match="out of memory"):
        rdt_sender.send(Failing(trainer.tensors), 0)


def test_weights_that_lack_a_parameter_are_refused_before_any_is_pulled(ray: Any, torch: Any) -> None:
    trainer, worker = Trainer(drawn(torch, 0)), Worker(torch, 0, 1, left_out="layers.1.up.weight")
    invitation = rdt_sender.invite(trainer, 0, [1], True)
    (info,) = rdt_sender.joining(invitation, [1])
    with pytest.raises((RuntimeError, ValueError), match=r"layers\.1"):
        worker.join(info)
    del trainer.tensors["head.weight"]
    invitation = rdt_sender.invite(trainer, 0, [1], True)
    worker = Worker(torch, 0, 1)
    with pytest.raises(ValueError, match=r"the weights to pull lack head\.weight"):
        worker.join(rdt_sender.joining(invitation, [1])[0])


def test_servers_of_different_sizes_are_refused(ray: Any, torch: Any) -> None:
    with pytest.raises(UserError, match=r"the same number of workers, and these have 2, 1: start all"):
        rdt_sender.invite(Trainer(drawn(torch, 0)), 0, [2, 1], True)


def test_a_process_that_cannot_send_says_so(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "find_spec", lambda name: None if "nixl" in name else importlib.util.find_spec("os"))
    with pytest.raises(UserError, match=r"'rdt' needs nixl on every node that trains or serves: pip install nixl"):
        rdt_sender.invite(Trainer({}), 0, [1], True)

    def none() -> int:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "current_device", none)
    monkeypatch.setattr(rdt_sender, "missing_packages", lambda: "")
    with pytest.raises(UserError, match=r"'rdt' needs a CUDA device in every process that trains .*: use 'files'"):
        rdt_sender.invite(Trainer({}), 0, [1], True)


def test_a_server_joins_the_cluster_of_its_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    joined: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: joined.append(options))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ValueError, match="without RAY_ADDRESS"):
        rdt_receiver.join_cluster()
    assert not joined
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    rdt_receiver.join_cluster()
    assert [(options["address"], options["namespace"]) for options in joined] == [("10.0.0.1:6379", rdt_sender.NAMESPACE)]


def test_vllm_finds_the_receiver_under_its_name() -> None:
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from areal_x.engines.vllm import plugin

    if plugin.RDT not in WeightTransferEngineFactory._registry:
        plugin.register()
    assert WeightTransferEngineFactory._registry[plugin.RDT]().__name__ == rdt_receiver.NAME
