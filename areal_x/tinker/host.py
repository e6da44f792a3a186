"""The trainer, and whose weights it has: one at a time, the others' are on disk.

Each model of a client is an adapter (or a whole model) with its optimizer's state in a directory of
its own, in the form of `Trainer.save`. Work for a model brings it into the trainer and first takes
out the one that is there, exactly: restore(save(x)) is x, so models that take turns compute what
each alone computes. Adapters of one shape swap in a built trainer; another shape builds another.

All of it runs on one thread, outside the event loop.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.algorithms import losses as of_algorithms
from areal_x.errors import ConfigError, UserError
from areal_x.hf import adapters, model_dir
from areal_x.protocols.backends import create_trainer, load_backend
from areal_x.protocols.sampler import Sampler
from areal_x.protocols.trainer import SetsOptimizer, Trainer
from areal_x.protocols.trainer_config import LoRAConfig, OptimizerConfig, TrainerConfig
from areal_x.tinker import losses
from areal_x.tinker.data import WIDEST, Datum, Layout, lay_out
from areal_x.tinker.losses import Config, Evaluated

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MOMENTS = ("exp_avg", "exp_avg_sq")
INITIAL = OptimizerConfig(clip_norm=0.0, weight_decay=0.0)


@dataclass(frozen=True)
class Shape:
    """What is trained of a model: adapters of a rank, or everything (rank 0)."""

    rank: int
    attention: bool = True
    mlp: bool = True

    def targets(self, of: LoRAConfig) -> tuple[str, ...]:
        """Returns the kernels with adapters, of those that the server's settings name."""
        return tuple(x for x in of.targets if (self.attention if x in ATTENTION else self.mlp))


@dataclass(eq=False)
class Model:
    """A client's model. directory: holds its state while another one is in the trainer."""

    id: str
    shape: Shape
    directory: Path
    seed: int = 0

    pending: list[tuple[list[Datum], list[np.ndarray]]] = field(default_factory=list)
    """Datums since the last optimizer step, with the coefficients of their targets."""

    steps: int = 0
    """Changes of its weights so far."""

    @property
    def state(self) -> Path:
        return self.directory / "state"


class TrainerHost:
    """The trainer of a server, and the models that take turns in it."""

    def __init__(self, backend: str, config: TrainerConfig) -> None:
        self.backend = load_backend(backend)
        self.backend_name = backend
        self.base = model_dir.resolve(config.model.path)
        self.config = replace(
            config,
            model=replace(config.model, path=str(self.base.absolute())),
            optimizer=INITIAL,
            share_prompts=True,
        )
        self.shares = True
        text = model_dir.text_config(model_dir.read_config(self.base))
        self.vocabulary = int(text["vocab_size"])
        self.context = min(
            config.row_length, int(text.get("max_position_embeddings") or config.row_length)
        )
        self._trainer: Trainer | None = None
        self._shape: Shape | None = None
        self._resident: Model | None = None
        self._changed = False  # whether the resident differs from its directory

    # ---- who is in the trainer

    def _build(self, shape: Shape, seed: int) -> Trainer:
        """Builds a trainer with fresh weights of a shape in place of the one before."""
        self._trainer = self._shape = None  # its memory is free before the next one takes some
        lora = replace(self.config.lora, rank=shape.rank, targets=shape.targets(self.config.lora))
        config = replace(self.config, lora=lora, seed=seed)
        try:
            trainer = create_trainer(self.backend_name, config)
        except ConfigError:
            if not self.shares:
                raise
            # Families that compute no branches, or what is wrong is something else.
            trainer = create_trainer(self.backend_name, replace(config, share_prompts=False))
            self.shares, self.config = False, replace(self.config, share_prompts=False)
        if not isinstance(trainer, SetsOptimizer):
            raise UserError(
                f"areal-x tinker needs a trainer whose clients set its optimizer, and the backend"
                f" {self.backend_name!r} lacks areal_x.protocols.trainer.SetsOptimizer: use"
                " train.backend = 'jax' or 'torch', in one process"
            )
        self._trainer, self._shape = trainer, shape
        return trainer

    def _shaped(self, shape: Shape) -> Trainer:
        """Returns a trainer of this shape, in which nobody is."""
        self._leave()
        if self._trainer is None or self._shape != shape:
            return self._build(shape, 0)
        return self._trainer

    def _leave(self) -> None:
        """Writes the resident's state to its directory."""
        model = self._resident
        if model is not None and self._trainer is not None and self._changed:
            write_whole(model.state, self._trainer.save)  # it stays if that fails
        self._resident, self._changed = None, False

    def _enter(self, model: Model) -> Trainer:
        """Returns the trainer with the model in it."""
        if self._resident is model and self._trainer is not None:
            return self._trainer
        trainer = self._shaped(model.shape)
        if not model.state.is_dir() and not model.shape.rank:
            trainer = self._build(model.shape, model.seed)  # whole models begin as the base
            self._changed = True
        else:
            if not model.state.is_dir():
                write_whole(model.state, lambda at: self._begin_adapter(trainer, model, at))
            trainer.restore(model.state)
            self._changed = False
        self._resident = model
        return trainer

    def _begin_adapter(self, trainer: Trainer, model: Model, directory: Path) -> None:
        """Writes an adapter without effect: B is 0 and A uniform within ±1 / sqrt(its columns), as
        in PEFT; from the seed alone, the same with every backend."""
        random = np.random.default_rng(model.seed)

        def fresh(name: str, x: np.ndarray) -> np.ndarray:
            if not name.endswith(adapters.MATRICES[0]):
                return np.zeros(x.shape, np.float32)
            uniform: np.ndarray = random.uniform(-1, 1, x.shape) * x.shape[1] ** -0.5
            return uniform.astype(np.float32)

        made = {name: fresh(name, x) for name, x in sorted(trainer.adapter(), key=lambda x: x[0])}
        lora = replace(
            self.config.lora, rank=model.shape.rank, targets=model.shape.targets(self.config.lora)
        )
        model_dir.copy_other_files(directory, self.base)
        adapters.write(directory, made.items(), config=lora, base=self.base)
        moments = (
            (f"{moment}.{name}", np.zeros(x.shape, np.float32))
            for moment in MOMENTS
            for name, x in made.items()
        )
        state = {"version": 0, "optimizer": "adamw", "base": adapters.fingerprint(self.base)}
        model_dir.write_optimizer_state(directory, moments, state)

    # ---- work

    def create(self, model: Model) -> None:
        """Makes a new model's weights."""
        self._enter(model)

    def forget(self, model: Model) -> None:
        """Deletes a model."""
        if self._resident is model:
            self._resident = None
        shutil.rmtree(model.directory, ignore_errors=True)

    def check_tokens(self, datums: Sequence[Datum]) -> None:
        """Raises: UserError for tokens outside the vocabulary."""
        for index, datum in enumerate(datums):
            most = max(int(datum.tokens.max()), int(datum.targets.max()))
            if most >= self.vocabulary:
                raise UserError(
                    f"datum {index} has the token {most}, and the model's vocabulary has"
                    f" {self.vocabulary}"
                )

    def forward(
        self, model: Model, datums: list[Datum], name: str, config: Config, backward: bool
    ) -> tuple[list[np.ndarray], Evaluated]:
        """Returns the log-probabilities of all targets and the loss; with backward, keeps what the
        next optimizer step needs of its gradient.

        Raises: UserError.
        """
        loss = losses.find(name, config)
        self.check_tokens(datums)
        trainer = self._enter(model)
        layout = lay_out(datums, self.context, self.shares)
        logp = trainer.logprobs(layout.batch)
        found = losses.evaluate(self.backend, loss, layout, datums, logp)
        if not all(np.isfinite(x).all() for x in found.coefficients):
            raise UserError(
                f"the gradient of the loss {name} is not finite: the step would be lost"
            )
        if backward:
            bare = [Datum(x.tokens, x.targets) for x in datums]
            model.pending.append((bare, found.coefficients))
        return layout.gather(logp), found

    def step(self, model: Model, optimizer: OptimizerConfig) -> dict[str, float]:
        """Takes one optimizer step on the sum of the pending gradients.

        Raises: UserError if there are none.
        """
        if not model.pending:
            raise UserError("optim_step needs a forward_backward before it: there is no gradient")
        trainer = self._enter(model)
        pending, model.pending = model.pending, []
        datums = [datum for some, _ in pending for datum in some]
        layout: Layout = lay_out(datums, self.context, self.shares)
        weights = layout.spread([x for _, some in pending for x in some])
        assert isinstance(trainer, SetsOptimizer)
        trainer.set_optimizer(optimizer)
        self._changed = True
        model.steps += 1
        metrics = trainer.update(layout.batch.replace(weights=weights), of_algorithms.sft)
        return {name: metrics[name] for name in ("grad_norm", "learning_rate", "skipped")}

    def save(self, model: Model, directory: Path) -> None:
        """Writes a model's state, whole or not at all."""
        write_whole(directory, self._enter(model).save)

    def load(self, model: Model, directory: Path, optimizer: bool) -> None:
        """Replaces a model's weights by those of a directory; with optimizer, its moments and steps
        too, which else begin anew."""
        if self._resident is model:
            self._resident = None
        write_whole(model.state, lambda at: copied(directory, at, optimizer))
        model.pending = []
        model.steps += 1
        self._enter(model)

    def logprobs(
        self, source: Source, tokens: Int32[np.ndarray, " n"], targets: Int32[np.ndarray, "n-1 k"]
    ) -> Float32[np.ndarray, "n-1 k"]:
        """Returns the log-probability of targets in the places of all tokens but the first, given
        those before; 0 for a target of -1.

        Raises: UserError for tokens outside the vocabulary, or too many of them.
        """
        asked = np.where(targets < 0, tokens[1:, None], targets).astype(np.int32)
        found = np.zeros(targets.shape, np.float32)
        trainer = self._holding(source)
        width = max(1, WIDEST * self.context // len(tokens) - 1)
        for start in range(0, targets.shape[1], width):
            part = slice(start, start + width)
            datum = Datum(tokens[:-1], asked[:, part])
            self.check_tokens([datum])
            layout = lay_out([datum], self.context, self.shares)
            found[:, part] = layout.gather(trainer.logprobs(layout.batch))[0]
        return np.where(targets < 0, np.float32(0), found)

    def snapshot(self, source: Source) -> Any:
        """Returns a copy of a source's weights for the sampler."""
        return self._holding(source).snapshot()

    def sampler(self, slots: int) -> Sampler:
        """Returns a sampler, whatever weights it is to have."""
        trainer = self._trainer or self._build(self._any_adapter(), 0)
        return trainer.sampler(slots, self.context)

    def _any_adapter(self) -> Shape:
        """Returns the shape of an adapter that can stand beside the base without effect: that of the
        trainer if it has one."""
        own = self._shape
        return own if own is not None and own.rank else Shape(self.config.lora.rank or 8)

    def _holding(self, source: Source) -> Trainer:
        """Returns the trainer with a source's weights in it."""
        model = source.model
        if model is not None and self._resident is model and model.steps == source.steps:
            assert self._trainer is not None
            return self._trainer  # they have not changed since
        shape, directory = source.shape, source.directory
        if shape is None:
            shape = self._any_adapter()
            directory = directory / "-".join(
                map(str, (shape.rank, *shape.targets(self.config.lora)))
            )
        return self._enter(Model("", shape, directory))


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


def write_whole(directory: Path, write: Any) -> None:
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
