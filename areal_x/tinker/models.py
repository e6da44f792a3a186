"""A client's models, what is sampled from, and their states on disk."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from areal_x.errors import ConfigError, UserError
from areal_x.hf import adapters, model_dir
from areal_x.protocols.adapter_bank import AdapterState
from areal_x.protocols.backends import load_backend
from areal_x.protocols.trainer_config import LoRAConfig, OptimizerConfig, TrainerConfig
from areal_x.tinker.data import Datum

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MOMENTS = ("exp_avg", "exp_avg_sq")
INITIAL = OptimizerConfig(clip_norm=0.0, weight_decay=0.0)
ABOUT = "checkpoint.json"  # beside a checkpoint's state
MOST_EPHEMERAL = 16  # unnamed sampler weights that are kept, those that were sampled from last
NOT_THERE = (
    f"the weights to sample from are gone: of unnamed ones the last {MOST_EPHEMERAL} that were sampled"
    " from are kept, and checkpoints until they expire, or are deleted or overwritten"
)

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """What is trained of a model: adapters of a rank, or everything (rank 0)."""

    rank: int
    attention: bool = True
    mlp: bool = True

    def targets(self, of: LoRAConfig) -> tuple[str, ...]:
        """Returns the kernels with adapters, of those that the server's settings name."""
        return tuple(x for x in of.targets if (self.attention if x in ATTENTION else self.mlp))

    def lora(self, of: LoRAConfig) -> LoRAConfig:
        """Returns the settings of adapters of this shape."""
        return replace(of, rank=self.rank, targets=self.targets(of))


@dataclass(eq=False)
class Model:
    """A client's model. directory: holds its state while it is not in memory."""

    id: str
    shape: Shape
    directory: Path
    seed: int = 0

    pending: list[tuple[list[Datum], list[np.ndarray]]] = field(default_factory=list)
    """Of a model that takes turns in the trainer: datums since the last optimizer step, with the
    coefficients of their targets."""

    has_gradient: bool = False
    """Of a model in a bank: whether there was a forward_backward since the last optimizer step."""

    steps: int = 0
    """Changes of its weights so far."""

    @property
    def state(self) -> Path:
        return self.directory / "state"


@dataclass(frozen=True)
class Source:
    """Weights to sample from, of one name each. directory: holds them in the form of
    `Trainer.save`, in a directory "state"."""

    name: str

    shape: Shape | None
    """None for the base model."""

    directory: Path
    model: Model | None = None
    steps: int = -1
    """The model whose weights these were, and its steps then."""

    created: float | None = None
    """When it was saved, if it is a checkpoint: another one may have taken its place since."""

    def is_there(self) -> bool:
        """True if the directory still holds these weights. The base's are elsewhere."""
        if self.shape is None:
            return True
        if not (self.directory / "state").is_dir():
            return False
        if self.created is None:
            return True
        try:
            about = json.loads((self.directory / ABOUT).read_text())
        except FileNotFoundError:
            return False
        lasts = about["expires"] is None or about["expires"] > time.time()
        return bool(lasts and about["created"] == self.created)


class Base:
    """The model of a server, and the states of its adapters on disk."""

    def __init__(self, backend: str, config: TrainerConfig) -> None:
        self.backend = load_backend(backend)
        self.backend_name = backend
        self.directory = model_dir.resolve(config.model.path)
        self.config = replace(
            config,
            model=replace(config.model, path=str(self.directory.absolute())),
            optimizer=INITIAL,
            share_prompts=True,
        )
        self.shares = True
        text = model_dir.text_config(model_dir.read_config(self.directory))
        self.vocabulary = int(text["vocab_size"])
        self.context = min(
            config.row_length, int(text.get("max_position_embeddings") or config.row_length)
        )

    def sharing_prompts(self, create: Callable[[TrainerConfig], T]) -> T:
        """Returns what `create` makes of the server's config, without shared prompts for families
        that compute no branches. Raises: as `create`."""
        try:
            return create(self.config)
        except ConfigError:
            if not self.shares:
                raise
            # Or what is wrong is something else.
            config = replace(self.config, share_prompts=False)
            made = create(config)
            self.shares, self.config = False, config
            return made

    def check_tokens(self, datums: Sequence[Datum]) -> None:
        """Raises: UserError for tokens outside the vocabulary."""
        for index, datum in enumerate(datums):
            most = max(int(datum.tokens.max()), int(datum.targets.max()))
            if most >= self.vocabulary:
                raise UserError(
                    f"datum {index} has the token {most}, and the model's vocabulary has"
                    f" {self.vocabulary}"
                )

    @cached_property
    def fingerprint(self) -> str:
        return adapters.fingerprint(self.directory)

    def write(self, directory: Path, shape: Shape, state: AdapterState) -> None:
        """Writes an adapter's state in the form of `Trainer.save`."""
        model_dir.copy_other_files(directory, self.directory)
        lora = shape.lora(self.config.lora)
        adapters.write(directory, state.tensors.items(), config=lora, base=self.directory)
        moments = state.moments or {
            f"{moment}.{name}": np.zeros(x.shape, np.float32)
            for moment in MOMENTS
            for name, x in state.tensors.items()
        }
        about = {"version": state.steps, "optimizer": "adamw", "base": self.fingerprint}
        model_dir.write_optimizer_state(directory, iter(moments.items()), about)

    def read(self, directory: Path, shape: Shape, optimizer: bool = True) -> AdapterState:
        """Returns an adapter's state. optimizer: with its moments and steps, which else begin anew.

        Raises: UserError for that of another model.
        """
        adapters.check_saved(directory, shape.lora(self.config.lora), self.directory)
        tensors = dict(adapters.read(directory))
        if not optimizer:
            return AdapterState(tensors)
        steps = int(model_dir.read_trainer_state(directory)["version"])
        return AdapterState(tensors, dict(model_dir.read_moments(directory)), steps)


def fresh_adapter(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Returns an adapter without effect: B is 0 and A uniform within ±1 / sqrt(its columns), as in
    PEFT; from the seed alone, the same with every backend."""
    random = np.random.default_rng(seed)

    def fresh(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if not name.endswith(adapters.MATRICES[0]):
            return np.zeros(shape, np.float32)
        uniform: np.ndarray = random.uniform(-1, 1, shape) * shape[1] ** -0.5
        return uniform.astype(np.float32)

    return {name: fresh(name, shape) for name, shape in sorted(shapes.items())}


def write_whole(directory: Path, write: Callable[[Path], object]) -> None:
    """Writes a directory beside its place and moves it there."""
    beside = directory.with_name(f".{directory.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    write(beside)
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.is_dir():
        directory.rename(old)
    beside.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


def copied(source: Path, directory: Path, optimizer: bool) -> None:
    """Copies a state; without the optimizer, its moments become 0 and its steps none."""
    shutil.copytree(source, directory, dirs_exist_ok=True)
    if optimizer:
        return
    zeros = ((name, np.zeros_like(x)) for name, x in model_dir.read_moments(source))
    for file in directory.glob(f"{Path(model_dir.MOMENTS).stem}*"):
        file.unlink()
    state = {**model_dir.read_trainer_state(source), "version": 0}
    model_dir.write_optimizer_state(directory, zeros, state)
