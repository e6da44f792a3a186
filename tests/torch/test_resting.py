"""What rests on the host: every tensor of the state, each once."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from areal_x.errors import UserError
from areal_x.protocols.trainer_config import ModelConfig, OptimizerConfig, TrainerConfig
from areal_x_torch import optimizers, resting, trainer


class Tied(torch.nn.Module):
    """Two names of one parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Module(), torch.nn.Module()
        self.head.weight = self.embed.weight = torch.nn.Parameter(torch.randn(50, 32))
        self.register_buffer("frequencies", torch.ones(16))


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_each_tensor_of_the_state_moves_once_and_stays_what_the_optimizer_knows(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, teacher = Tied(), Tied()
    taken = optimizers.Optimizer(model.named_parameters(), OptimizerConfig(name=optimizer))
    model.embed.weight.grad = torch.ones(50, 32)
    modules = [model, teacher]

    def places() -> list[int]:
        return [x.data_ptr() for x in resting.state_of(modules, taken)]

    before = places()
    resting.move(modules, taken, resting.HOST)
    assert places() == before  # everything is there: nothing is copied
    moved: list[torch.Tensor] = []

    def copied(x: torch.Tensor, to: torch.device) -> torch.Tensor:
        moved.append(x)  # kept, so that no copy gets its memory
        return x.clone()

    monkeypatch.setattr(resting, "moved", copied)
    numbers = [x.clone() for x in resting.state_of(modules, taken)]
    resting.move(modules, taken, resting.HOST)
    assert not set(places()) & set(before)
    assert sorted(x.data_ptr() for x in moved) == sorted(set(before))
    assert all(map(torch.equal, resting.state_of(modules, taken), numbers))
    assert model.head.weight is model.embed.weight
    assert set(taken.state) == {model.embed.weight}


def test_the_state_on_devices_is_counted_once_and_that_on_the_host_not_at_all() -> None:
    with torch.device("meta"):
        model = Tied()
        taken = optimizers.Optimizer(model.named_parameters(), OptimizerConfig())
        model.embed.weight.grad = torch.zeros(50, 32)
    assert resting.device_bytes([model, Tied()], taken) == 4 * (50 * 32 * 4 + 16 + 1)


def test_a_trainer_over_several_processes_does_not_rest(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "make_mesh", lambda *_: object())
    monkeypatch.setattr(trainer, "row_rank", lambda _: (0, 1))
    with pytest.raises(UserError, match=r"train\.colocate = True needs a torch trainer in one process"):
        trainer.Trainer(TrainerConfig(ModelConfig(str(tiny_model_dir)), rests=True))
