"""What one key owns: sessions, models under training, samplers and results. Another key has an
account of its own, in which none of these ids exists.

Everything here is in the journal too, from which a restarted server rebuilds it
(areal_x/tinker/recovery.py).
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from areal_x.errors import UserError
from areal_x.runtime.thread import OneThread
from areal_x.tinker import requests, results
from areal_x.tinker.checkpoints import About, Checkpoints, Ref
from areal_x.tinker.futures import Futures, Line, Outcome, Unknown
from areal_x.tinker.gathering import Gathering
from areal_x.tinker.host import TrainerHost
from areal_x.tinker.journal import Journal, Sent
from areal_x.tinker.models import MOST_EPHEMERAL, NOT_THERE, Model, Shape, Source
from areal_x.tinker.sampling import Samplers
from areal_x.tinker.snapshots import Snapshots

LOG = logging.getLogger(__name__)

MOST_SESSIONS, MOST_MODELS, MOST_SAMPLERS = 1024, 64, 4096
SILENT_SECONDS = 600.0  # clients send a sign of life every 10
LASTING = ("forward_backward", "optim_step", "load_weights", "create_model")  # change a model

T = TypeVar("T")


@dataclass(frozen=True)
class Server:
    """What all accounts share."""

    host: TrainerHost
    thread: OneThread
    samplers: Samplers
    base_model: str
    checkpoints: Path
    working: Path
    journal: Journal

    teachers: Mapping[str, Samplers] = field(default_factory=dict)
    """Further models by their names for clients, which sample from them and train none of them."""

    @cached_property
    def gathering(self) -> Gathering:
        """The requests that train at once."""
        return Gathering(self.host, self.thread)


@dataclass(eq=False)
class Session:
    """A client's process."""

    id: str
    user_metadata: Mapping[str, Any] | None
    display_name: str | None
    seen: float = field(default_factory=time.monotonic)
    """When it was last heard of, in seconds of time.monotonic."""

    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Trained:
    """A model under training."""

    model: Model
    line: Line
    snapshots: Snapshots


@dataclass(frozen=True)
class Job:
    """Work for a model. sent: the request that it does."""

    trained: Trained
    number: int
    sent: Sent
    work: Callable[[], Awaitable[results.Result]]


@dataclass(frozen=True)
class Sampler:
    """Weights that a client samples from. model_path: of a checkpoint. base: the name of a teacher,
    whose weights they are. follows: the model whose last saved weights they are, instead of fixed
    ones (the API's "inflight")."""

    source: Source
    model_path: str | None
    base: str = ""
    follows: str | None = None


class Account:
    """The sessions, models, samplers, checkpoints and requests of one key."""

    def __init__(self, server: Server, key: str) -> None:
        self.key = key
        self.owner = owner_of(key)
        self.server = server
        self.futures = Futures(self)
        self.checkpoints = Checkpoints(server.checkpoints / self.owner, server.base_model)
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Trained] = {}
        self.samplers: dict[str, Sampler] = {}
        self.joins: dict[str, int] = {}
        self._ephemeral: dict[Path, None] = {}  # the one sampled from longest ago first

    @property
    def directory(self) -> Path:
        """Holds the models under training and the unnamed weights to sample from."""
        return (self.server.working / self.owner).absolute()

    # ---- sessions

    def create_session(self, body: requests.CreateSession) -> Session:
        if len(self.sessions) >= MOST_SESSIONS:
            self.finish_silent()
        if len(self.sessions) >= MOST_SESSIONS:
            self.finish(min(self.sessions.values(), key=lambda x: x.seen).id)
        session = Session(uuid.uuid4().hex, body.user_metadata, body.display_name)
        self.sessions[session.id] = session
        about = {"user_metadata": body.user_metadata, "display_name": body.display_name}
        self.server.journal.session(self.owner, session.id, about)
        return session

    def session(self, id: str) -> Session:
        """Raises: Unknown."""
        if id not in self.sessions:
            raise Unknown
        return self.sessions[id]

    def beat(self, id: str) -> None:
        """Records that a session's client is there. Raises: Unknown."""
        self.session(id).seen = time.monotonic()

    def finish_silent(self) -> None:
        """Ends the sessions whose clients are gone."""
        latest = time.monotonic() - SILENT_SECONDS
        for session in [x for x in self.sessions.values() if x.seen < latest]:
            self.finish(session.id)

    def finish(self, id: str) -> None:
        """Ends a session: its models are deleted, its checkpoints stay. Raises: Unknown."""
        session = self.session(id)
        for model in session.models:
            self.unload(model)
        for sampler in session.samplers:
            self._drop_sampler(sampler)
        del self.sessions[id]
        self.server.journal.delete_session(id)

    def unload(self, id: str) -> None:
        """Deletes a model's state; what was sent for it and has not begun fails."""
        if (trained := self.models.pop(id, None)) is not None:
            trained.line.close()
            self.server.journal.delete_model(id)
            self.server.thread.run_unobserved(partial(self.server.host.forget, trained.model))

    # ---- models

    def trained(self, id: str) -> Trained:
        """Raises: Unknown."""
        if id not in self.models:
            raise Unknown
        return self.models[id]

    def begin_model(self, session_id: str, number: int, shape: Shape, seed: int) -> Trained:
        """Registers a new model, unless this is the request of before. Raises: UserError; Unknown."""
        self.server.samplers.weights.check(shape)
        session = self.session(session_id)
        id = f"{session.id}:train:{number}"
        if id in self.models:
            return self.models[id]
        if not 0 <= number < 10**9:
            raise UserError(f"model_seq_id = {number} is out of range")
        if len(self.models) >= MOST_MODELS:
            self.finish_silent()
        if len(self.models) >= MOST_MODELS:
            raise UserError(
                f"there are {len(self.models)} models of this key: finish the sessions of those that"
                " are no longer trained"
            )
        self.server.journal.model(self.owner, id, session.id, {**asdict(shape), "seed": seed})
        return self.add_model(session, id, shape, seed)

    def add_model(self, session: Session, id: str, shape: Shape, seed: int) -> Trained:
        model = Model(id, shape, self.directory / id, seed)
        snapshots = Snapshots(model)

        async def after(number: int) -> None:
            if snapshots.is_due() and id in self.models:
                try:
                    await self.snapshot(trained, number)
                except OSError:  # the requests since the last one are in the journal
                    LOG.exception("a snapshot of %s failed", id)
                    snapshots.seconds = snapshots.bytes = 0

        trained = Trained(model, Line(self.futures, after=after), snapshots)
        self.models[id] = trained
        session.models.append(id)
        return trained

    async def snapshot(self, trained: Trained, number: int) -> None:
        """Takes a snapshot of a model after the request of a number."""
        server = self.server
        await trained.snapshots.take(server.host, server.thread, server.journal, number)

    def begin_run(self, model: Model, user_metadata: Mapping[str, Any] | None) -> None:
        texts = None
        if user_metadata is not None:
            texts = {name: str(x) for name, x in user_metadata.items()}
        self.checkpoints.begin_run(model.id, rank=model.shape.rank, user_metadata=texts)

    def check_base(self, name: str) -> None:
        if name != self.server.base_model:
            raise UserError(
                f"this server trains the model {self.server.base_model!r}, not {name!r}: name that, or"
                " start another server"
            )

    async def run(self, trained: Trained, function: Callable[..., T], *arguments: Any) -> T:
        """Runs a function of the host with a model, on the trainer's thread."""

        def timed() -> T:
            start = time.perf_counter()
            try:
                return function(trained.model, *arguments)
            finally:
                trained.snapshots.seconds += time.perf_counter() - start

        return await self.server.thread.run(timed)

    def put(self, job: Job) -> str:
        """Puts work for a model into its line and returns the request's id. Raises: as `Line.put`."""
        model, sent = job.trained.model, job.sent
        id = f"{model.id}:{job.number}"
        if job.trained.line.put(id, job.number, sent.kind, job.work):
            self.server.journal.request(self.owner, id, model.id, job.number, sent)
            job.trained.snapshots.bytes += len(sent.body)
        return id

    # ---- checkpoints

    def readable(self, ref: Ref) -> tuple[Checkpoints, About]:
        """Returns a checkpoint and whose it is: this key's, or another's that is public.

        Raises: UserError.
        """
        about = self.checkpoints.find(ref)
        if about is not None:
            return self.checkpoints, about
        for place in self.server.checkpoints.glob(f"*/{ref.run}"):
            other = Checkpoints(place.parent, self.server.base_model)
            about = other.find(ref)
            if about is not None and about.public:
                return other, about
        raise UserError(f"there is no checkpoint {ref}")

    # ---- results, as the futures' observer

    def settled(self, id: str, kind: str, outcome: Outcome) -> None:
        self.server.journal.outcome(id, results.stored(outcome), kind in LASTING)

    def dropped(self, id: str) -> None:
        self.server.journal.dropped(id)

    def forgotten(self, id: str) -> None:
        self.server.journal.forgotten(id)

    # ---- sampling

    def create_sampler(self, body: requests.CreateSamplingSession) -> str:
        """Returns the sampler's id. Raises: UserError; Unknown."""
        session = self.session(body.session_id)
        base = ""
        if body.model_path is None:
            if body.base_model in self.server.teachers:
                base = body.base_model or ""
            else:
                self.check_base(body.base_model or "")
            source = Source("base", None, self.server.working / "base")
        else:
            ref = Ref.parse(body.model_path)
            own, about = self.readable(ref)
            shape = Shape(about.rank, about.attention, about.mlp)
            name = f"{own.directory.name}/{ref}@{about.created}"
            source = Source(name, shape, own.place(ref), created=about.created)
        id = f"{session.id}:sample:{body.sampling_session_seq_id}"
        self.new_sampler(session, id, Sampler(source, body.model_path, base))
        return id

    def new_sampler(self, session: Session, id: str, sampler: Sampler) -> None:
        """Adds a sampler, unless this is the request of before."""
        if id in self.samplers:
            return
        self.server.journal.sampler(self.owner, id, session.id, described(sampler))
        self.add_sampler(session, id, sampler)
        if sampler.follows is None:
            return
        for other, found in list(self.samplers.items()):
            if found.follows == sampler.follows and other != id:
                self.samplers[other] = replace(found, source=sampler.source)
                self.server.journal.sampler_moved(other, described(self.samplers[other]))

    def add_sampler(self, session: Session, id: str, sampler: Sampler) -> None:
        session.samplers.append(id)
        self.samplers[id] = sampler
        while len(self.samplers) > MOST_SAMPLERS:
            self._drop_sampler(next(iter(self.samplers)))
        if sampler.source.directory.parent == self.directory:
            self._use(sampler.source.directory)

    def _use(self, directory: Path) -> None:
        """Keeps unnamed weights longer than all others, and deletes those beyond the limit."""
        self._ephemeral.pop(directory, None)
        self._ephemeral[directory] = None
        while len(self._ephemeral) > MOST_EPHEMERAL:
            oldest = next(iter(self._ephemeral))
            del self._ephemeral[oldest]
            shutil.rmtree(oldest, ignore_errors=True)

    def _drop_sampler(self, id: str) -> None:
        if self.samplers.pop(id, None) is not None:
            self.joins.pop(id, None)
            self.server.journal.delete_sampler(id)

    def sampler(self, id: str) -> Sampler:
        """Raises: Unknown."""
        if id not in self.samplers:
            raise Unknown
        return self.samplers[id]

    def join(self, id: str) -> int:
        """Returns a number for one more client of a sampler, whose requests' numbers begin there: no
        two have one, before and after a restart. Raises: Unknown."""
        self.sampler(id)
        self.joins[id] = self.joins.get(id, 0) + 1
        self.server.journal.joined(id, self.joins[id])
        return self.joins[id]

    def sample(self, body: requests.Sample, sent: Sent) -> str:
        """Returns the request's id. Raises: Unknown; as `Futures.start`."""
        sampler = self.sampler(body.sampling_session_id)
        id = f"{body.sampling_session_id}:{body.seq_id}"
        if self.futures.start(id, sent.kind, lambda: self._sample(sampler, body, id)):
            whose = body.sampling_session_id
            self.server.journal.request(self.owner, id, whose, body.seq_id, sent)
        return id

    async def _sample(self, sampler: Sampler, body: requests.Sample, id: str) -> results.Result:
        source, samplers = sampler.source, self.server.samplers
        if sampler.base:
            if sampler.base not in self.server.teachers:  # any more, after a restart
                raise UserError(
                    f"this server has no model {sampler.base!r}: start it with --teacher"
                )
            samplers = self.server.teachers[sampler.base]
        if not source.is_there():
            raise UserError(NOT_THERE)
        if source.directory in self._ephemeral:
            self._use(source.directory)
        # A request without a seed has the same one after a restart.
        chance = int.from_bytes(hashlib.sha256(id.encode()).digest()[:4], "little")
        return await samplers.sample(source, body, chance)


def described(sampler: Sampler) -> dict[str, Any]:
    """Returns a sampler as the journal keeps it."""
    source = sampler.source
    return {
        "model_path": sampler.model_path,
        "name": source.name,
        "shape": None if source.shape is None else asdict(source.shape),
        "directory": str(source.directory.absolute()),
        "created": source.created,
        "base": sampler.base,
        "follows": sampler.follows,
    }


def owner_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:24]
