"""The models of a server: adapters in a bank, in which several train at once, or one at a time.

    requests of several adapters ──▶ `advance`: packed rows, one pass ──▶ each adapter's own gradient
    whole models, backends without a bank ──▶ Turns: one at a time in a trainer

Adapters stay in memory, the least recently used ones in their directories once they are more than
`resident_bytes`. All of it runs on one thread, outside the event loop.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, Int64

from areal_x.errors import UserError
from areal_x.protocols.adapter_bank import (
    NO_ADAPTER,
    AdapterBank,
    AdapterState,
    TrainsManyAdapters,
)
from areal_x.protocols.sampler import Sampler
from areal_x.protocols.trainer_config import OptimizerConfig, TrainerConfig
from areal_x.tinker import losses
from areal_x.tinker.data import WIDEST, Datum, Layout, check_sizes, lay_out
from areal_x.tinker.losses import Config, Evaluated
from areal_x.tinker.models import NOT_THERE, Base, Model, Shape, Source, fresh_adapter, write_whole
from areal_x.tinker.turns import Turns

RESIDENT_BYTES = 8 << 30
EXACT = ("nothing", "samples", "everything")
PASS_TOKENS = 8192  # of all requests: more are hardly faster, and others wait for them


@dataclass(eq=False)
class Work:
    """A forward or forward_backward of a model, of which some datums may be done."""

    model: Model
    datums: list[Datum]
    loss: str
    config: Config
    backward: bool
    logprobs: list[np.ndarray] = field(default_factory=list)
    found: Evaluated = field(default_factory=lambda: Evaluated([], []))
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.logprobs) == len(self.datums)

    @property
    def tokens_left(self) -> int:
        return int(self.sizes[len(self.logprobs) :].sum())

    @cached_property
    def sizes(self) -> Int64[np.ndarray, " datums"]:
        """The most nodes of each datum in a row."""
        return np.array([x.targets.size for x in self.datums], np.int64)

    def take(self, tokens: int) -> list[Datum]:
        """Returns the next datums that have about so many tokens, at least one."""
        first = len(self.logprobs)
        ends = np.cumsum(self.sizes[first:])
        return self.datums[first : first + max(int(np.searchsorted(ends, tokens, "right")), 1)]


class TrainerHost:
    """The models of a server."""

    def __init__(
        self,
        backend: str,
        config: TrainerConfig,
        resident_bytes: int = RESIDENT_BYTES,
        exact: str = "samples",
    ) -> None:
        """exact: of EXACT, what does not depend on the requests of others, bit for bit: samples, or
        everything, and then each request has passes of its own."""
        self.model = Base(backend, config)
        self.base = self.model.directory
        self.context, self.vocabulary = self.model.context, self.model.vocabulary
        self.pass_tokens = min(PASS_TOKENS, config.micro_batch_rows * config.row_length)
        self.resident_bytes = resident_bytes
        self.exact = exact
        self._turns = Turns(self.model)
        self._bank: AdapterBank | None = None
        self._has_bank = isinstance(self.model.backend, TrainsManyAdapters)
        # Of the adapters in the bank by their names there, the least recently used first; None for
        # what is sampled from.
        self._resident: dict[str, Model | None] = {}
        self._pinned: set[str] = set()  # whose requests are under way

    @property
    def config(self) -> TrainerConfig:
        return self.model.config

    def trains_at_once(self, model: Model) -> bool:
        """True if the model is an adapter that trains together with others."""
        return bool(model.shape.rank) and self._find_bank() is not None

    def is_at_once(self, model: Model) -> bool | None:
        """Returns the same without building anything, None if it is not known yet. From any thread."""
        if not model.shape.rank or not self._has_bank:
            return False
        return None if self._bank is None else True

    def _find_bank(self) -> AdapterBank | None:
        if self._bank is None and self._has_bank:
            backend = self.model.backend
            assert isinstance(backend, TrainsManyAdapters)
            try:
                self._bank = self.model.sharing_prompts(backend.create_bank)
            except NotImplementedError:
                self._has_bank = False
        return self._bank

    # ---- which adapters are in the bank

    def _enter(self, bank: AdapterBank, model: Model) -> str:
        """Returns the name of the model's adapter in the bank."""
        name = str(model.directory)
        if name not in self._resident:
            if model.state.is_dir():
                self._put(bank, name, model.shape, self.model.read(model.state, model.shape))
            else:
                shapes = bank.shapes(model.shape.lora(self.model.config.lora))
                self._put(bank, name, model.shape, AdapterState(fresh_adapter(shapes, model.seed)))
        self._resident.pop(name, None)
        self._resident[name] = model
        return name

    def _put(self, bank: AdapterBank, name: str, shape: Shape, state: AdapterState) -> None:
        bank.put(name, shape.lora(self.model.config.lora), state)
        self._resident.pop(name, None)
        for old, model in list(self._resident.items()):
            if bank.nbytes() <= self.resident_bytes:
                break
            if old in self._pinned or (model is not None and model.has_gradient):
                continue
            if model is not None:
                self.save(model, model.state)
            self._remove(bank, old)
        self._resident[name] = None

    def _remove(self, bank: AdapterBank, name: str) -> None:
        bank.remove(name)
        self._resident.pop(name, None)
        self._pinned.discard(name)

    # ---- work

    def create(self, model: Model) -> None:
        """Makes a new model's weights."""
        if self.trains_at_once(model):
            assert self._bank is not None
            self._enter(self._bank, model)
        else:
            self._turns.create(model)

    def forget(self, model: Model) -> None:
        """Deletes a model."""
        if self._bank is not None:
            self._remove(self._bank, str(model.directory))
        self._turns.forget(model)
        shutil.rmtree(model.directory, ignore_errors=True)

    def forward(
        self, model: Model, datums: list[Datum], name: str, config: Config, backward: bool
    ) -> tuple[list[np.ndarray], Evaluated]:
        """Returns the log-probabilities of all targets and the loss; with backward, keeps what the
        next optimizer step needs of its gradient.

        Raises: UserError.
        """
        if not self.trains_at_once(model):
            return self._turns.forward(model, datums, name, config, backward)
        work = Work(model, datums, name, config, backward)
        while not work.done:
            self.advance([(work, self.pass_tokens)])
        if work.error is not None:
            raise work.error
        return work.logprobs, work.found

    def advance(self, portions: Sequence[tuple[Work, int]]) -> None:
        """Computes the next datums of several models' requests together, about so many tokens of
        each: a forward pass, and with backward a backward pass. Each model has one request.

        What is wrong with one of them is its error; the others are computed.
        """
        for backward in (True, False):
            if own := [x for x in portions if x[0].backward == backward]:
                try:
                    self._advance(own, backward)
                except Exception as error:
                    for work, _ in own:
                        work.error = error
                for work, _ in own:
                    if work.done:
                        self._settle(work)

    def _settle(self, work: Work) -> None:
        """Ends a request: its gradient counts if all of it was computed."""
        name, keep = str(work.model.directory), work.error is None
        self._pinned.discard(name)
        if self._bank is not None and name in self._resident and work.backward:
            self._bank.settle(name, keep)
            work.model.has_gradient |= keep

    def _advance(self, portions: Sequence[tuple[Work, int]], backward: bool) -> None:
        bank = self._find_bank()
        assert bank is not None
        taken = [(work, work.take(tokens)) for work, tokens in portions]
        for work, _ in taken:
            if not work.logprobs:
                self._check(work)
        taken = [(work, datums) for work, datums in taken if work.error is None]
        if not taken:
            return
        names = []
        for work, _ in taken:
            names.append(self._enter(bank, work.model))
            self._pinned.add(names[-1])
        every = [datum for _, datums in taken for datum in datums]
        owners = [index for index, (_, datums) in enumerate(taken) for _ in datums]
        layout = lay_out(every, self.context, groups=owners)

        def evaluate(
            logprobs: Float32[np.ndarray, "rows length"],
        ) -> Float32[np.ndarray, "rows length"]:
            return self._evaluate(taken, owners, layout, every, logprobs)

        if backward:
            logprobs = bank.add_gradients(layout.batch, layout.groups, names, evaluate)
        else:
            logprobs = bank.logprobs(layout.batch, layout.groups, names)
            evaluate(logprobs)
        for index, x in zip(owners, layout.gather(logprobs), strict=True):
            taken[index][0].logprobs.append(x)

    def _check(self, work: Work) -> None:
        """Looks for what is wrong with a request before any of it is computed."""
        try:
            losses.find(work.loss, work.config)
            self.model.check_tokens(work.datums)
            check_sizes(work.datums, self.context)
        except UserError as error:
            work.error = error

    def _evaluate(
        self,
        taken: Sequence[tuple[Work, list[Datum]]],
        owners: Sequence[int],
        layout: Layout,
        every: list[Datum],
        logprobs: Float32[np.ndarray, "rows length"],
    ) -> Float32[np.ndarray, "rows length"]:
        """Returns the factors of all datums' gradients, 0 for what only goes forward or is not
        finite; adds to each request what is found of its loss."""
        factors = np.zeros(logprobs.size, np.float32)
        alike: dict[Any, list[int]] = {}
        for datum, index in enumerate(owners):
            work = taken[index][0]
            alike.setdefault(losses.find(work.loss, work.config), []).append(datum)
        for loss, chosen in alike.items():
            part = layout.of(chosen)
            some = [every[datum] for datum in chosen]
            found = losses.evaluate(self.model.backend, loss, part, some, logprobs)
            for datum, at, terms, own in zip(chosen, part.at, *found, strict=True):
                work = taken[owners[datum]][0]
                work.found.terms.append(terms)
                work.found.coefficients.append(own)
                factors[at.ravel()] = own.ravel()
        for index, (work, _) in enumerate(taken):
            try:
                losses.check_finite(work.loss, work.found)
            except UserError as error:
                work.error = error
            if work.error is not None or not work.backward:
                for at, owner in zip(layout.at, owners, strict=True):
                    if owner == index:
                        factors[at.ravel()] = 0
        shaped: np.ndarray = factors.reshape(logprobs.shape)
        return shaped

    def step(self, model: Model, optimizer: OptimizerConfig) -> dict[str, float]:
        """Takes one optimizer step on the sum of the pending gradients.

        Raises: UserError if there are none.
        """
        if not self.trains_at_once(model):
            return self._turns.step(model, optimizer)
        if not model.has_gradient:
            raise UserError("optim_step needs a forward_backward before it: there is no gradient")
        assert self._bank is not None
        model.has_gradient = False
        model.steps += 1
        return self._bank.step(self._enter(self._bank, model), optimizer)

    def save(self, model: Model, directory: Path) -> None:
        """Writes a model's state, whole or not at all."""
        if not self.trains_at_once(model):
            self._turns.save(model, directory)
            return
        assert self._bank is not None
        state = self._bank.get(self._enter(self._bank, model))
        write_whole(directory, lambda at: self.model.write(at, model.shape, state))

    def load(self, model: Model, directory: Path, optimizer: bool) -> None:
        """Replaces a model's weights by those of a directory; with optimizer, its moments and steps
        too, which else begin anew."""
        if not self.trains_at_once(model):
            self._turns.load(model, directory, optimizer)
            return
        assert self._bank is not None
        state = self.model.read(directory, model.shape, optimizer)
        model.has_gradient = False
        self._put(self._bank, str(model.directory), model.shape, state)
        self._enter(self._bank, model)
        model.steps += 1

    # ---- sampling

    def logprobs(
        self, source: Source, tokens: Int32[np.ndarray, " n"], targets: Int32[np.ndarray, "n-1 k"]
    ) -> Float32[np.ndarray, "n-1 k"]:
        """Returns the log-probability of targets in the places of all tokens but the first, given
        those before; 0 for a target of -1.

        Raises: UserError for tokens outside the vocabulary, or too many of them.
        """
        asked = np.where(targets < 0, tokens[1:, None], targets).astype(np.int32)
        found = np.zeros(targets.shape, np.float32)
        score = self._scorer(source)
        shares = self.model.shares or self._bank_of(source) is not None
        width = max(1, WIDEST * self.context // len(tokens) - 1)
        for start in range(0, targets.shape[1], width):
            part = slice(start, start + width)
            datum = Datum(tokens[:-1], asked[:, part])
            self.model.check_tokens([datum])
            layout = lay_out([datum], self.context, shares)
            found[:, part] = layout.gather(score(layout))[0]
        return np.where(targets < 0, np.float32(0), found)

    def _scorer(self, source: Source) -> Callable[[Layout], np.ndarray]:
        bank = self._bank_of(source)
        if bank is None:
            return self._turns.scorer(source)
        name = self._name_of(bank, source)

        def score(layout: Layout) -> np.ndarray:
            rows = np.full(len(layout.groups), NO_ADAPTER if name is None else 0, np.int32)
            scored: np.ndarray = bank.logprobs(layout.batch, rows, [name or ""])
            return scored

        return score

    def samples_at_once(self, source: Source) -> bool:
        """True if a source is an adapter beside the base, or the base: sequences of several of them are
        sampled together."""
        return self._bank_of(source) is not None

    def snapshot(self, source: Source) -> Any:
        """Returns a copy of a source's weights for the sampler; of those that are sampled at once, the
        base's."""
        bank = self._bank_of(source)
        return self._turns.snapshot(source) if bank is None else bank.snapshot()

    def adapter(self, source: Source) -> Any:
        """Returns a copy of an adapter for the sampler, None for the base."""
        bank = self._bank_of(source)
        assert bank is not None
        name = self._name_of(bank, source)
        return None if name is None else bank.adapter(name)

    def sampler(self, slots: int) -> Sampler:
        """Returns a sampler, whatever weights it is to have."""
        bank = self._find_bank()
        if bank is None:
            return self._turns.sampler(slots)
        return bank.sampler(slots, self.context, exact=self.exact != "nothing")

    def _bank_of(self, source: Source) -> AdapterBank | None:
        """Returns the bank if it has a source's weights."""
        whole = source.shape is not None and not source.shape.rank
        return None if whole else self._find_bank()

    def _name_of(self, bank: AdapterBank, source: Source) -> str | None:
        """Returns the name in the bank of an adapter to sample from, None for the base."""
        if source.shape is None:
            return None
        model = source.model
        if model is not None and model.steps == source.steps:
            own = str(model.directory)
            if self._resident.get(own) is model:
                return own  # they have not changed since
        name = f"{source.name} in {source.directory}"
        if name not in self._resident:
            if not source.is_there():  # checkpoints are replaced on this thread
                raise UserError(NOT_THERE)
            state = self.model.read(source.directory / "state", source.shape, optimizer=False)
            self._put(bank, name, source.shape, state)
        self._resident[name] = self._resident.pop(name)
        return name
