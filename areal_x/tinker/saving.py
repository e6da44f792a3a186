"""What the requests that save and load do: save_weights, save_weights_for_sampler,
save_weights_external, load_weights."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

from areal_x.errors import UserError
from areal_x.tinker import exports, requests, results
from areal_x.tinker.account import Account, Job, Sampler, Trained
from areal_x.tinker.checkpoints import About, Ref, expiry
from areal_x.tinker.journal import Sent
from areal_x.tinker.models import Model, Shape, Source

INFLIGHT = "inflight"
KINDS = ("snapshot", INFLIGHT)
WriteState = Callable[[Model, Path], None]


def save_weights(account: Account, body: requests.SaveWeights, sent: Sent) -> Job:
    """Raises: UserError; Unknown."""
    ref = Ref(body.model_id, "weights", body.path or f"{body.seq_id:06d}")
    return _save(account, body, ref, sent, account.server.host.save)


def _save(
    account: Account, body: requests.SaveWeights, ref: Ref, sent: Sent, write_state: WriteState
) -> Job:
    trained = account.trained(body.model_id)
    shape, expires = trained.model.shape, expiry(body.ttl_seconds)

    def save(model: Model) -> None:
        about = About(
            rank=shape.rank,
            attention=shape.attention,
            mlp=shape.mlp,
            created=time.time(),
            expires=expires,
            user_metadata=body.user_metadata,
            request=f"{body.model_id}:{body.seq_id}",
        )
        account.checkpoints.save(ref, about, partial(write_state, model), body.overwrite)

    async def work() -> results.Result:
        await account.run(trained, save)
        return results.plain({"type": sent.kind, "path": str(ref)})

    return Job(trained, body.seq_id, sent, work)


def save_for_sampler(account: Account, body: requests.SaveWeights, sent: Sent) -> Job:
    """Saves weights to sample from: a checkpoint, or without a name a sampler.

    Raises: UserError; Unknown.
    """
    if body.path is not None:
        ref = Ref(body.model_id, "sampler_weights", body.path)
        return _save(account, body, ref, sent, account.server.host.save)
    number = body.sampling_session_seq_id
    if number is None:
        raise UserError("the request has neither a path nor a sampling_session_seq_id")
    if body.kind not in KINDS:
        raise UserError(f"a sampler's kind is one of {', '.join(KINDS)}, not {body.kind!r}")
    trained = account.trained(body.model_id)
    session = account.session(body.model_id.partition(":")[0])
    name = f"{session.id}:sample:{number}"

    def save(model: Model) -> Source:
        directory = account.directory / f"sampler-{uuid.uuid4().hex}"
        account.server.host.save(model, directory / "state")
        return Source(directory.name, model.shape, directory, model, model.steps)

    async def work() -> results.Result:
        follows = trained.model.id if body.kind == INFLIGHT else None
        sampler = Sampler(await account.run(trained, save), None, follows=follows)
        account.new_sampler(session, name, sampler)
        return results.plain({"type": sent.kind, "sampling_session_id": name})

    return Job(trained, body.seq_id, sent, work)


def save_external(account: Account, body: requests.SaveExternal, sent: Sent) -> Job:
    """Saves a Hugging Face or PEFT directory to download. Raises: UserError; Unknown."""
    ref = Ref(body.model_id, "external_weights", body.path)
    number = account.trained(body.model_id).line.next if body.seq_id is None else body.seq_id
    recipients = exports.recipients_of(body.age_encryption_recipients or [])

    def write(model: Model, directory: Path) -> None:
        account.server.host.save(model, directory)
        exports.publish(directory, account.server.base_model)
        if recipients:
            exports.encrypt_files(directory, recipients)

    plain = requests.SaveWeights(
        model_id=body.model_id, seq_id=number, path=body.path, ttl_seconds=body.ttl_seconds
    )
    return _save(account, plain, ref, sent, write)


def load_weights(account: Account, body: requests.LoadWeights, sent: Sent) -> Job:
    """Loads a checkpoint into a model: a new one, if the request names a session.

    Raises: UserError; Unknown.
    """
    ref = Ref.parse(body.path)
    own, about = account.readable(ref)
    if ref.kind != "weights":
        raise UserError(f"{ref} is for sampling: training continues from {ref.run}/weights")
    shape = Shape(about.rank, about.attention, about.mlp)
    if body.base_model is not None:
        account.check_base(body.base_model)
    if body.session_id is not None:
        trained = account.begin_model(body.session_id, body.model_seq_id or 0, shape, 0)
        number = 0
    else:
        trained = account.trained(body.model_id or "")
        number = trained.line.next if body.seq_id is None else body.seq_id
    model = trained.model
    if model.shape != shape:
        raise UserError(
            f"{ref} has adapters of rank {shape.rank}, and the model {model.shape.rank}: create a"
            " model from the checkpoint instead"
        )

    def load(model: Model) -> None:
        own.get(ref)
        account.server.host.load(model, own.place(ref) / "state", body.optimizer)

    async def work() -> results.Result:
        await account.run(trained, load)
        if number == 0:
            account.begin_run(model, body.user_metadata)
        # The checkpoint may be deleted as soon as the client has this result.
        await account.snapshot(trained, number)
        return loaded(trained, ref)

    return Job(trained, number, sent, work)


def loaded(trained: Trained, ref: Ref) -> results.Result:
    content = {"type": "load_weights", "path": str(ref), "model_id": trained.model.id}
    return results.plain(content)
