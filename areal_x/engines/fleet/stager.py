"""The stager copies the trainer's weights and writes them to files for servers, while training and
generation go on.

The trainer stands still for the copy alone. There is one copy, whose memory is used again: it is
written before the next one is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32

from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.delta.history import History
from areal_x.engines.fleet.folders import default_parent
from areal_x.engines.fleet.probe import trainer_logp
from areal_x.engines.fleet.proof.claims import Claiming
from areal_x.engines.fleet.staging import (
    CopiedWeights,
    NoRoom,
    StagedFiles,
    Staging,
    Write,
)
from areal_x.hf import adapters as adapter_files
from areal_x.hf import fp8_weights
from areal_x.hf.weight_copy import Tensors, WeightCopy, write_shards
from areal_x.protocols.engine import EngineError
from areal_x.protocols.trainer import CopiesWeights, Scorer
from areal_x.protocols.trainer_config import LoRAConfig
from areal_x.runtime import background
from areal_x.runtime.loop import result
from areal_x.runtime.waits import waiting, whose

SERVED = "served"  # in the staging folder
FULL_SECONDS = 1.0  # between two attempts to stage on a full file system


class Stager:
    """Stages the weights of a trainer.

    model: the served model's directory. lora: the trainer's adapters, which are staged instead of
    whole weights; None if it has none. scorer: computes the reference log-probabilities of the probe
    prompt; None for none. prove_every: publications from one claim of whole tensors to the next; 0 claims
    nothing.
    """

    def __init__(
        self,
        config: FleetConfig,
        model: Path,
        *,
        lora: LoRAConfig | None,
        scorer: Scorer | None,
        probe_prompt: Callable[[], Int32[np.ndarray, " T"]],
        report: Callable[[str], None],
        prove_every: int,
    ) -> None:
        self.staging: Staging | None = None
        self.current: StagedFiles | None = None  # what a server that returns must load
        self._config = config
        self._model = model
        self._lora = lora
        self._scorer = scorer
        self._probe_prompt = probe_prompt
        self._report = report
        self.dtypes: dict[str, str] = {}  # see Claiming
        # Servers that compute in fp8 hold its numbers in forms of their own.
        self._prove_every = 0 if config.quantization else prove_every
        self._claimed = 0
        self._copy = WeightCopy()
        self._history = History(config.delta, self._until_closed) if config.delta else None
        self._whole: StagedFiles | None = None
        self._writing_whole = asyncio.Lock()
        self._writing: Future[StagedFiles] | None = None
        self._closing = False

    def open(self) -> None:
        """Creates the staging folder."""
        self._closing = False
        parent = Path(self._config.staging).resolve() if self._config.staging else default_parent()
        self.staging = Staging(parent, f"{self._config.binding}.staging")

    async def close(self) -> None:
        """Ends the writing; staged files stay until `remove_files`."""
        self._closing = True
        if self._writing is not None:
            writing = asyncio.wrap_future(self._writing)
            with waiting(whose(), "the writing of weights to end"):
                await asyncio.wait([writing])
            writing.exception()  # `written` raises it

    def keep(self, staged: StagedFiles) -> None:
        """Removes the versions older than this one."""
        assert self.staging is not None
        self.staging.keep(staged)

    def adopt(self, staged: StagedFiles) -> StagedFiles:
        """Returns what another process has staged, in this one's folder. May wait. Raises: UserError
        if this machine does not see it."""
        assert self.staging is not None
        return self.staging.adopt(staged)

    @property
    def root(self) -> Path:
        """The folder that every server must see."""
        assert self.staging is not None, "an engine that was started has it"
        return self.staging.root

    @property
    def served_model(self) -> Path:
        """The directory of the model that servers start with."""
        return self.root / SERVED if self._config.quantization else self._model

    def write_served(self) -> None:
        """Writes the model that servers start with, if it is another than the trainer's."""
        if self._config.quantization:
            fp8_weights.write_model(self.served_model, self._model)

    def remove_files(self) -> None:
        if self.staging is not None:
            self.staging.close()
            self.staging = None

    # ---- on the trainer's thread

    def stage(self, trainer: Any, version: int) -> CopiedWeights:
        """Copies the weights and begins to write them."""
        assert self.staging is not None, "stage() needs an engine that was started"
        if self._writing is not None:  # of a publication that was interrupted
            with (
                waiting("the trainer", "the version before to be written"),
                contextlib.suppress(Exception),
            ):
                result(self._writing)
        full = self._full()
        scale = None if self._lora is None else self._lora.scale

        def claiming() -> Claiming | None:
            return None if full is None else Claiming(version, full, self.dtypes, scale)

        size, staged = self._copied(trainer, version, claiming)
        self._writing = background.future(lambda: self.with_room(staged), name="weights")
        logp = None if self._scorer is None else trainer_logp(self._scorer, self._probe_prompt())
        return CopiedWeights(version=version, bytes=size, files=self._writing, probe_logp=logp)

    def _copied(
        self, trainer: Any, version: int, claiming: Callable[[], Claiming | None]
    ) -> tuple[int, Callable[[Staging], StagedFiles]]:
        """Copies a trainer's weights or adapters. Returns their bytes, and what stages them."""
        if (history := self._history) is not None:
            base = self.current
            size = history.take(version, trainer.weights(), base)
            return size, lambda staging: history.stage(staging, version, base, claiming)
        size, write = self._copied_once(trainer)
        return size, lambda staging: staging.stage(
            self._until_closed(self._copy), version, write, claiming()
        )

    def _copied_once(self, trainer: Any) -> tuple[int, Write | None]:
        """Copies the weights or adapters over the copy before. Returns their bytes, and what writes
        them, None for the staging's own way."""
        if self._lora is not None:
            write = partial(adapter_files.write, config=self._lora, base=self._model)
            return self._copy.take(trainer.adapter()), write
        if self._config.quantization:
            return self._copy.take(trainer.weights()), _write_quantised
        if isinstance(trainer, CopiesWeights):
            assert self.staging is not None
            if (size := trainer.copy_weights(self.staging.root)) is not None:
                return size, lambda folder, _: trainer.write_weights(folder)
        return self._copy.take(trainer.weights()), None

    def _full(self) -> bool | None:
        """True if whole tensors are claimed of the next publication, False if a sample; None for
        nothing."""
        every = self._prove_every
        if not every:
            return None
        claimed, self._claimed = self._claimed, self._claimed + 1
        return claimed % every == 0

    def _until_closed(self, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
        """Yields copied tensors. Raises: EngineError once the stager is being closed."""
        for item in tensors:
            if self._closing:
                raise EngineError("the engine was closed while weights were written")
            yield item

    def with_room(self, stage: Callable[[Staging], StagedFiles]) -> StagedFiles:
        """Stages weights; if the file system is full although an earlier version had room, retries,
        first without the version that is kept for servers that return (these then wait for the next
        one)."""
        began = time.monotonic()
        for attempt in itertools.count():
            assert self.staging is not None
            try:
                return stage(self.staging)
            except NoRoom as error:
                waited = time.monotonic() - began
                if self.current is None or waited > self._config.wait_seconds or self._closing:
                    raise
                if attempt == 0 and self._lora is None:
                    self.staging.keep(None)
                    continue
                if attempt <= 1:
                    self._report(
                        f"{error}; staging is tried again for {self._config.wait_seconds:g} s"
                    )
                with waiting("the publication", "room to stage weights", f"{error}"):
                    time.sleep(FULL_SECONDS)
        raise AssertionError("unreachable")

    # ---- on the event loop

    async def written(self, copied: CopiedWeights) -> StagedFiles:
        """Returns the files of copied weights, once all are written. Raises: what the writing
        did."""
        with waiting("the publication", f"version {copied.version} to be written"):
            files = await asyncio.wrap_future(copied.files)
        return replace(files, probe_logp=copied.probe_logp)

    async def whole(self, staged: StagedFiles) -> StagedFiles:
        """Returns the whole files of a version, which are written now if only a delta was.

        Raises: EngineError if the version is no longer held, as there is a newer one.
        """
        if not staged.base:
            return staged
        assert self._history is not None
        write = partial(self._history.stage_whole, staged=staged)
        with waiting("the publication", f"version {staged.version} to be written whole"):
            async with self._writing_whole:
                whole = self._whole
                if whole is None or whole.digest != staged.digest or not whole.folder.exists():
                    whole = await asyncio.to_thread(self.with_room, write)
                self._whole = whole
        return whole

    @property
    def metrics(self) -> dict[str, float]:
        """Returns what the newest publication wrote, if deltas are published."""
        return {} if self._history is None else self._history.metrics


def _write_quantised(folder: Path, tensors: Tensors) -> dict[str, int]:
    return write_shards(folder, fp8_weights.quantised(tensors))
