"""The trainer, and whose weights it has: one at a time, the others' are on disk.

Each model of a client is an adapter (or a whole model) with its optimizer's state in a directory of
its own, in the form of `Trainer.save`. Work for a model brings it into the trainer and first takes
out the one that is there, exactly: restore(save(x)) is x, so models that take turns compute what
each alone computes. Adapters of one shape swap in a built trainer; another shape builds another.

All of it runs on one thread, outside the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.algorithms import losses as of_algorithms
from areal_x.errors import UserError
from areal_x.protocols.adapter_bank import AdapterState
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.sampler import Sampler
from areal_x.protocols.trainer import SetsOptimizer, Trainer
from areal_x.protocols.trainer_config import OptimizerConfig, TrainerConfig
from areal_x.tinker import losses
from areal_x.tinker.data import Datum, Layout, lay_out, weighted
from areal_x.tinker.losses import Config, Evaluated
from areal_x.tinker.models import Base, Model, Shape, Source, copied, fresh_adapter, write_whole


class Turns:
    """The trainer of a server, and the models that take turns in it: whole models, and adapters of
    backends and models without a bank."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self._trainer: Trainer | None = None
        self._shape: Shape | None = None
        self._resident: Model | None = None
        self._changed = False  # whether the resident differs from its directory

    # ---- who is in the trainer

    def _build(self, shape: Shape, seed: int) -> Trainer:
        """Builds a trainer with fresh weights of a shape in place of the one before."""
        self._trainer = self._shape = None  # its memory is free before the next one takes some

        def create(config: TrainerConfig) -> Trainer:
            lora = shape.lora(config.lora)
            return create_trainer(self.base.backend_name, replace(config, lora=lora, seed=seed))

        trainer = self.base.sharing_prompts(create)
        if not isinstance(trainer, SetsOptimizer):
            raise UserError(
                f"areal-x tinker needs a trainer whose clients set its optimizer, and the backend"
                f" {self.base.backend_name!r} lacks areal_x.protocols.trainer.SetsOptimizer: use"
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
        """Writes an adapter without effect."""
        made = fresh_adapter({name: x.shape for name, x in trainer.adapter()}, model.seed)
        self.base.write(directory, model.shape, AdapterState(made))

    # ---- work

    def create(self, model: Model) -> None:
        """Makes a new model's weights."""
        self._enter(model)

    def forget(self, model: Model) -> None:
        """Forgets a model, whose directory is going to be deleted."""
        if self._resident is model:
            self._resident = None

    def forward(
        self, model: Model, datums: list[Datum], name: str, config: Config, backward: bool
    ) -> tuple[list[np.ndarray], Evaluated]:
        """Returns the log-probabilities of all targets and the loss; with backward, keeps what the
        next optimizer step needs of its gradient.

        Raises: UserError.
        """
        loss = losses.find(name, config)
        self.base.check_tokens(datums)
        trainer = self._enter(model)
        layout = lay_out(datums, self.base.context, self.base.shares)
        logp = trainer.logprobs(layout.batch)
        found = losses.evaluate(self.base.backend, loss, layout, datums, logp)
        losses.check_finite(name, found)
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
        coefficients = [x for _, some in pending for x in some]
        datums = [datum for some, _ in pending for datum in some]
        datums = [weighted(x, own) for x, own in zip(datums, coefficients, strict=True)]
        layout: Layout = lay_out(datums, self.base.context, self.base.shares)
        weights = layout.spread(coefficients)
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

    def scorer(self, source: Source) -> Callable[[Layout], np.ndarray]:
        """Returns what computes the log-probabilities of a source's weights."""
        trainer = self._holding(source)
        return lambda layout: trainer.logprobs(layout.batch)

    def snapshot(self, source: Source) -> Any:
        """Returns a copy of a source's weights for the sampler."""
        return self._holding(source).snapshot()

    def sampler(self, slots: int) -> Sampler:
        """Returns a sampler, whatever weights it is to have."""
        trainer = self._trainer or self._build(self._any_adapter(), 0)
        return trainer.sampler(slots, self.base.context)

    def _any_adapter(self) -> Shape:
        """Returns the shape of an adapter that can stand beside the base without effect: that of the
        trainer if it has one."""
        own = self._shape
        return own if own is not None and own.rank else Shape(self.base.config.lora.rank or 8)

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
                map(str, (shape.rank, *shape.targets(self.base.config.lora)))
            )
        return self._enter(Model("", shape, directory))
