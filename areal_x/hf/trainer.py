"""What the trainers of every backend share: which calls a head allows, and files in Hugging Face's
forms.

A backend's trainer says how its parameters and moments become named arrays and how named arrays
become its state. Which files there are, what they say of the state and which of them a trainer can
continue from is decided here, so that every backend continues what any other has saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from areal_x.errors import UserError
from areal_x.hf import adapters as adapter_files
from areal_x.hf import model_dir
from areal_x.hf.tokenizer import check_known
from areal_x.protocols.recorded_experts import recorded_experts
from areal_x.protocols.trainer import Wait
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.types import Batch

Tensors = Iterable[tuple[str, np.ndarray]]


class HuggingFaceTrainer(ABC):
    """A base for trainers (areal_x.protocols.trainer.Trainer) that read and write Hugging Face
    model directories."""

    backend: ClassVar[str]
    """Name of the backend, which stands in the state of a form that it alone reads."""

    config: TrainerConfig
    directory: Path
    """The model's own directory."""

    version: int = 0

    # ---- what a backend implements

    @property
    @abstractmethod
    def writes(self) -> bool:
        """True in the one process that writes files; the others help it to gather tensors."""

    @property
    @abstractmethod
    def experts_per_token(self) -> tuple[int, int, int] | None:
        """Layers of the decoder, experts per token, and experts of a layer; None for a model
        without experts."""

    @abstractmethod
    def adapter(self) -> Iterator[tuple[str, np.ndarray]]: ...

    @abstractmethod
    def own_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the model's fp32 tensors under their Hugging Face names, one at a time."""

    @abstractmethod
    def moments_are_portable(self) -> bool:
        """True if each moment belongs to one tensor of the files, so that any backend can continue
        from it."""

    @abstractmethod
    def own_moments(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the optimizer's moments, one at a time, under "moment.tensor" if they are portable,
        else under the backend's own names."""

    @abstractmethod
    def load_state(
        self, directory: Path, tensors: Tensors, *, version: int, own_form: bool
    ) -> None:
        """Replaces parameters by `tensors` (an adapter's with `lora.rank` above 0), and the
        optimizer's state by that of `directory` at `version`.

        own_form: the moments have the backend's own names. Raises: UserError for those of another
        model.
        """

    @abstractmethod
    def save_sharded(self, directory: Path) -> Wait:
        """Starts to write this process's part of parameters and moments."""

    @abstractmethod
    def load_sharded(self, directory: Path, version: int) -> None:
        """Reads what `save_sharded` wrote."""

    # ---- what follows from it

    def save(self, directory: Path | None) -> None:
        self.need_optimizer("state to save")
        state: dict[str, Any] = {"version": self.version, "optimizer": self.config.optimizer.name}
        head = self.config.head
        if not self.config.lora.rank:
            model_dir.write_model(directory, self.directory, self.own_tensors(), head=head)
        elif directory is None:
            model_dir.exhaust(self.adapter())
        else:
            model_dir.copy_other_files(directory, self.directory, head)
            adapter_files.write(
                directory,
                self.adapter(),
                config=self.config.lora,
                base=self.directory,
                head=head,
            )
            state["base"] = adapter_files.fingerprint(self.directory)
        if not self.moments_are_portable():
            state["backend"] = self.backend
        model_dir.write_optimizer_state(directory, self.own_moments(), state)

    def save_in_background(self, directory: Path) -> Wait | None:
        if self.config.checkpoint == "portable":
            self.save(directory if self.writes else None)
            return None
        self.need_optimizer("state to save")
        if self.writes:
            model_dir.copy_other_files(directory, self.directory, self.config.head)
            state = {
                "version": self.version,
                "optimizer": self.config.optimizer.name,
                "backend": self.backend,
            }
            model_dir.write_trainer_state(directory, state)
        return self.save_sharded(directory)

    def restore(self, directory: Path) -> None:
        if (directory / model_dir.SHARDS.get(self.backend, self.backend)).is_dir():
            state = model_dir.read_trainer_state(directory)
            self.config.optimizer.check_state(directory, state, self.backend)
            self.load_sharded(directory, int(state["version"]))
            self.version = int(state["version"])
            return
        model_dir.check_portable(directory)
        adapter_files.check_saved(directory, self.config.lora, self.directory)
        state = model_dir.read_trainer_state(directory)
        self.config.optimizer.check_state(directory, state, self.backend)
        own_form = "backend" in state  # also a form that an earlier release wrote
        if not own_form and not self.moments_are_portable():
            raise UserError(
                f"{directory} holds the state of {self.config.optimizer.name} for each tensor, and"
                f" {self.backend} keeps another one with this model: continue with the backend"
                " that wrote it, or start a new run from its weights with model.path ="
                f" {str(directory)!r}"
            )
        read = adapter_files.read if self.config.lora.rank else model_dir.read_tensors
        version = int(state["version"])
        self.load_state(directory, read(directory), version=version, own_form=own_form)
        self.version = version

    def recorded_experts(self, batch: Batch) -> np.ndarray | None:
        """Returns the experts that the engine recorded; None unless trainer.replay_experts."""
        if not self.config.replay_experts:
            return None
        assert self.experts_per_token is not None
        layers, per_token, count = self.experts_per_token
        return recorded_experts(batch, self.directory, layers, per_token, count)

    def check_tokens(self, batch: Batch, vocabulary: int) -> None:
        """Raises: UserError for tokens, or kept ones, outside the model's vocabulary (a size)."""
        check_known(batch.tokens, vocabulary, self.directory)
        if batch.kept is not None:
            check_known(np.asarray(batch.kept)[..., 1], vocabulary, self.directory)

    def need_head(self, what: str, *heads: str) -> None:
        """Raises: ValueError if the trainer has none of these heads."""
        if self.config.head not in heads:
            raise ValueError(
                f"{what} needs a trainer with the head {' or '.join(map(repr, heads))}, not"
                f" {self.config.head!r}"
            )

    def need_optimizer(self, what: str) -> None:
        """Raises: ValueError for a frozen model."""
        if self.config.frozen:
            raise ValueError(f"a frozen model has no {what}: it is for inference only")

    def need_weights(self, batch: Batch) -> None:
        """Raises: ValueError for a batch that cannot be trained on."""
        if batch.weights is None:
            raise ValueError("the batch has no weights: an algorithm's weighting gives them")
        self.need_optimizer("update")
