"""What one key owns, and what its requests do. Another key has an account of its own, in which none
of these ids exists.
"""

from __future__ import annotations

import hashlib
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.errors import UserError
from areal_x.protocols.trainer_config import OptimizerConfig
from areal_x.runtime.thread import OneThread, inline_or_in_pool
from areal_x.tinker import requests, results
from areal_x.tinker.checkpoints import About, Checkpoints, Ref, expiry
from areal_x.tinker.futures import Futures, Line, Unknown
from areal_x.tinker.gathering import Gathering
from areal_x.tinker.host import TrainerHost, Work
from areal_x.tinker.losses import Evaluated
from areal_x.tinker.models import Model, Shape, Source
from areal_x.tinker.requests import ForwardBackward
from areal_x.tinker.sampling import Samplers

MOST_SESSIONS, MOST_MODELS, MOST_SAMPLERS = 1024, 64, 4096
MOST_EPHEMERAL = 16  # unnamed sampler weights that are kept, the newest ones
MOST_RANK = 512
SILENT_SECONDS = 600.0  # clients send a sign of life every 10
LEAST_RATE = 1e-300  # stands for 0, and is 0 in fp32
NO_METRICS: Mapping[str, float] = {}


@dataclass(frozen=True)
class Server:
    """What all accounts share."""

    host: TrainerHost
    thread: OneThread
    samplers: Samplers
    base_model: str
    checkpoints: Path
    working: Path

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
    """A model under training. model: None until it is loaded."""

    model: Model
    line: Line


@dataclass(frozen=True)
class Sampler:
    """Weights that a client samples from. source: None once its unnamed weights were deleted."""

    source: Source
    model_path: str | None


class Account:
    """The sessions, models, samplers, checkpoints and requests of one key."""

    def __init__(self, server: Server, key: str) -> None:
        self.owner = owner_of(key)
        self.server = server
        self.futures = Futures()
        self.checkpoints = Checkpoints(server.checkpoints / self.owner, server.base_model)
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Trained] = {}
        self.samplers: dict[str, Sampler] = {}
        self._joined: dict[str, int] = {}
        self._ephemeral: list[Path] = []

    # ---- sessions

    def create_session(self, body: requests.CreateSession) -> Session:
        if len(self.sessions) >= MOST_SESSIONS:
            self.finish_silent()
        if len(self.sessions) >= MOST_SESSIONS:
            self.finish(min(self.sessions.values(), key=lambda x: x.seen).id)
        session = Session(uuid.uuid4().hex, body.user_metadata, body.display_name)
        self.sessions[session.id] = session
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
            self.samplers.pop(sampler, None)
        del self.sessions[id]

    def unload(self, id: str) -> None:
        """Deletes a model's state; what was sent for it and has not begun fails."""
        if (trained := self.models.pop(id, None)) is not None:
            trained.line.close()
            self.server.thread.run_unobserved(partial(self.server.host.forget, trained.model))

    # ---- models

    def trained(self, id: str) -> Trained:
        """Raises: Unknown."""
        if id not in self.models:
            raise Unknown
        return self.models[id]

    def _begin(self, session_id: str, number: int, shape: Shape, seed: int) -> Trained:
        """Registers a new model, unless this is the request of before. Raises: UserError; Unknown."""
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
        directory = self.server.working / self.owner / id
        trained = Trained(Model(id, shape, directory, seed), Line(self.futures))
        self.models[id] = trained
        session.models.append(id)
        return trained

    def create_model(self, body: requests.CreateModel) -> tuple[str, str]:
        """Returns the ids of a new model and of the request. Raises: UserError; Unknown."""
        self.check_base(body.base_model)
        check_optimizer(body.optimizer_config.type)
        shape = shape_of(body.lora_config)
        seed = 0 if body.lora_config is None else body.lora_config.seed or 0
        if not 0 <= seed < 2**63:
            raise UserError(f"the seed {seed} is out of range")
        trained = self._begin(body.session_id, body.model_seq_id, shape, seed)
        id = trained.model.id

        async def work() -> results.Result:
            await self.server.thread.run(self.server.host.create, trained.model)
            self._begin_run(trained.model, body.user_metadata)
            return results.plain({"type": "create_model", "model_id": id})

        trained.line.put(f"{id}:0", 0, "create_model", work)
        return id, f"{id}:0"

    def _begin_run(self, model: Model, user_metadata: Mapping[str, Any] | None) -> None:
        texts = None
        if user_metadata is not None:
            texts = {name: str(x) for name, x in user_metadata.items()}
        self.checkpoints.begin_run(model.id, rank=model.shape.rank, user_metadata=texts)

    def check_base(self, name: str) -> None:
        if name != self.server.base_model:
            raise UserError(
                f"this server has the model {self.server.base_model!r}, not {name!r}: name that, or"
                " start another server"
            )

    def _put(
        self,
        model_id: str,
        number: int,
        kind: str,
        function: Callable[..., Any],
        *arguments: Any,
        result: Callable[[Any], results.Result],
    ) -> str:
        """Puts work for a model into its line and returns the request's id. function: of the host,
        called with the model. Raises: Unknown; as `Line.put`."""
        trained = self.trained(model_id)
        id = f"{model_id}:{number}"

        async def work() -> results.Result:
            return result(await self.server.thread.run(function, trained.model, *arguments))

        trained.line.put(id, number, kind, work)
        return id

    def forward_backward(self, body: ForwardBackward) -> str:
        """Returns the request's id. Raises: Unknown; as `Line.put`."""
        trained = self.trained(body.model_id)
        id, backward = f"{body.model_id}:{body.seq_id}", not body.forward_only

        async def work() -> results.Result:
            own = Work(trained.model, body.datums, body.loss, body.config, backward)
            found = await self.server.gathering.forward(self.owner, own)
            size = sum(x.targets.size for x in body.datums)
            return await inline_or_in_pool(size, outputs_of, body, *found)

        trained.line.put(id, body.seq_id, "forward_backward" if backward else "forward", work)
        return id

    def optim_step(self, body: requests.OptimStep) -> str:
        """Returns the request's id. Raises: UserError; Unknown; as `Line.put`."""
        if body.optimizer_params is not None:
            check_optimizer(body.optimizer_params.type)
        given = body.adam_params or requests.Adam()
        check_optimizer(given.type)
        if not given.learning_rate >= 0:
            raise UserError(f"learning_rate = {given.learning_rate} is not at least 0")
        if not (given.eps > 0 and given.weight_decay >= 0):
            raise UserError("eps must be above 0, and weight_decay at least 0")
        optimizer = OptimizerConfig(
            learning_rate=max(given.learning_rate, LEAST_RATE),
            beta1=given.beta1,
            beta2=given.beta2,
            eps=given.eps,
            weight_decay=given.weight_decay,
            clip_norm=max(given.grad_clip_norm, 0.0),
        )
        return self._put(
            body.model_id,
            body.seq_id,
            "optim_step",
            self.server.host.step,
            optimizer,
            result=lambda metrics: results.plain({"metrics": dict(metrics)}),
        )

    # ---- checkpoints

    def save(self, body: requests.SaveWeights) -> str:
        """Returns the id of the request to save a checkpoint. Raises: as `optim_step`."""
        ref = Ref(body.model_id, "weights", body.path or f"{body.seq_id:06d}")
        return self._save(body, ref, "save_weights")

    def _save(self, body: requests.SaveWeights, ref: Ref, kind: str) -> str:
        shape = self.trained(body.model_id).model.shape
        about = partial(
            About,
            shape.rank,
            shape.attention,
            shape.mlp,
            expires=expiry(body.ttl_seconds),
            user_metadata=body.user_metadata,
        )

        def work(model: Model) -> None:
            def write(directory: Path) -> None:
                self.server.host.save(model, directory)

            self.checkpoints.save(ref, about(created=time.time()), write, body.overwrite)

        return self._put(
            body.model_id,
            body.seq_id,
            kind,
            work,
            result=lambda _: results.plain({"type": kind, "path": str(ref)}),
        )

    def save_for_sampler(self, body: requests.SaveWeights) -> str:
        """Returns the id of the request to save weights to sample from: a checkpoint, or without a
        name a sampler. Raises: as `optim_step`."""
        if body.path is not None:
            ref = Ref(body.model_id, "sampler_weights", body.path)
            return self._save(body, ref, "save_weights_for_sampler")
        number = body.sampling_session_seq_id
        if number is None:
            raise UserError("the request has neither a path nor a sampling_session_seq_id")
        if body.kind != "snapshot":
            raise UserError(
                f"this server's samplers have fixed weights (kind 'snapshot'), not {body.kind!r}"
            )
        session = self.session(body.model_id.partition(":")[0])
        name = f"{session.id}:sample:{number}"

        def work(model: Model) -> Source:
            directory = self.server.working / self.owner / f"sampler-{uuid.uuid4().hex}"
            self.server.host.save(model, directory / "state")
            return Source(directory.name, model.shape, directory, model, model.steps)

        def answer(source: Source) -> results.Result:
            self._add_sampler(session, name, Sampler(source, None))
            self._ephemeral.append(source.directory)
            while len(self._ephemeral) > MOST_EPHEMERAL:
                shutil.rmtree(self._ephemeral.pop(0), ignore_errors=True)
            return results.plain({"type": "save_weights_for_sampler", "sampling_session_id": name})

        return self._put(
            body.model_id, body.seq_id, "save_weights_for_sampler", work, result=answer
        )

    def load(self, body: requests.LoadWeights) -> tuple[str, str]:
        """Returns the ids of the model and of the request to load a checkpoint into it: a new model,
        if the request names a session. Raises: as `optim_step`."""
        ref = Ref.parse(body.path)
        about = self.checkpoints.get(ref)
        if ref.kind != "weights":
            raise UserError(f"{ref} is for sampling: training continues from {ref.run}/weights")
        shape = Shape(about.rank, about.attention, about.mlp)
        if body.base_model is not None:
            self.check_base(body.base_model)
        if body.session_id is not None:
            trained = self._begin(body.session_id, body.model_seq_id or 0, shape, 0)
            number = 0
        else:
            trained = self.trained(body.model_id or "")
            number = body.seq_id if body.seq_id is not None else -1
        model = trained.model
        if model.shape != shape:
            raise UserError(
                f"{ref} has adapters of rank {shape.rank}, and the model {model.shape.rank}: create a"
                " model from the checkpoint instead"
            )

        def work(model: Model) -> None:
            self.checkpoints.get(ref)
            self.server.host.load(model, self.checkpoints.place(ref) / "state", body.optimizer)

        def answer(_: None) -> results.Result:
            if number == 0:
                self._begin_run(model, body.user_metadata)
            return results.plain({"type": "load_weights", "path": str(ref), "model_id": model.id})

        return model.id, self._put(model.id, number, "load_weights", work, result=answer)

    # ---- sampling

    def create_sampler(self, body: requests.CreateSamplingSession) -> str:
        """Returns the sampler's id. Raises: UserError; Unknown."""
        session = self.session(body.session_id)
        if body.model_path is None:
            self.check_base(body.base_model or "")
            source = Source("base", None, self.server.working / "base")
        else:
            ref = Ref.parse(body.model_path)
            about = self.checkpoints.get(ref)
            shape = Shape(about.rank, about.attention, about.mlp)
            name = f"{self.owner}/{ref}@{about.created}"
            source = Source(name, shape, self.checkpoints.place(ref))
        id = f"{session.id}:sample:{body.sampling_session_seq_id}"
        self._add_sampler(session, id, Sampler(source, body.model_path))
        return id

    def _add_sampler(self, session: Session, id: str, sampler: Sampler) -> None:
        if id not in self.samplers:
            session.samplers.append(id)
        self.samplers[id] = sampler
        while len(self.samplers) > MOST_SAMPLERS:
            self.samplers.pop(next(iter(self.samplers)))

    def sampler(self, id: str) -> Sampler:
        """Raises: Unknown."""
        if id not in self.samplers:
            raise Unknown
        return self.samplers[id]

    def join(self, id: str) -> int:
        """Returns a number for one more client of a sampler. Raises: Unknown."""
        self.sampler(id)
        self._joined[id] = self._joined.get(id, 0) + 1
        return self._joined[id]

    def sample(self, body: requests.Sample) -> str:
        """Returns the request's id. Raises: Unknown; as `Futures.start`."""
        sampler = self.sampler(body.sampling_session_id)
        id = f"{body.sampling_session_id}:{body.seq_id}"
        self.futures.start(id, "sample", lambda: self._sample(sampler.source, body))
        return id

    async def _sample(self, source: Source, body: requests.Sample) -> results.Result:
        if source.shape is not None and not (source.directory / "state").is_dir():
            raise UserError(
                f"the weights to sample from are gone: of unnamed ones the newest {MOST_EPHEMERAL}"
                " are kept, and checkpoints until they expire or are deleted"
            )
        return await self.server.samplers.sample(source, body)


def outputs_of(
    body: ForwardBackward, logprobs: list[np.ndarray], evaluated: Evaluated
) -> results.Result:
    outputs = []
    for datum, logp, terms in zip(body.datums, logprobs, evaluated.terms, strict=True):
        named = {"logprobs": logp, "elementwise_loss": terms}
        flat = datum.targets.shape[0] if datum.flat else datum.targets.shape
        outputs.append({name: x.reshape(flat) for name, x in named.items()})
    total = float(sum(np.sum(x, dtype=np.float64) for x in evaluated.terms))
    return results.forward_backward(outputs, {"loss:sum": total})


def owner_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def shape_of(lora: requests.Lora | None) -> Shape:
    """Raises: UserError."""
    if lora is None:
        return Shape(0)
    if not 1 <= lora.rank <= MOST_RANK:
        raise UserError(f"a LoRA rank is from 1 to {MOST_RANK}, not {lora.rank}")
    if not (lora.train_attn or lora.train_mlp):
        raise UserError(
            "adapters of the unembedding alone are not supported: train_attn or train_mlp"
        )
    return Shape(lora.rank, lora.train_attn, lora.train_mlp)


def check_optimizer(name: str) -> None:
    """Raises: UserError."""
    if name != "adamw":
        raise UserError(f"this server's optimizer is adamw, not {name!r}")
