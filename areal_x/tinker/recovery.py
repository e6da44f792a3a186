"""Rebuilds an account from the journal, after a server was stopped or killed at any moment.

A model begins from its newest snapshot, or anew from its seed, and its requests since then run again
in the order of their numbers: those without a result for their result, and those with one only if
they change the model. What clients were told stays: results come from the journal. A trainer
computes the same from the same, so the model ends with the weights that it would have had.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from areal_x.errors import UserError
from areal_x.runtime.thread import inline_or_in_pool
from areal_x.tinker import datums, requests, results, saving, training
from areal_x.tinker.account import LASTING, Account, Job, Sampler, Server, Session, Trained
from areal_x.tinker.checkpoints import Ref, heal
from areal_x.tinker.futures import Unknown
from areal_x.tinker.journal import GONE, Row, Sent
from areal_x.tinker.models import Model, Shape, Source

BODIES: dict[str, tuple[type[requests.Body], Callable[[Account, Any, Sent], Job]]] = {
    "create_model": (requests.CreateModel, training.create_model),
    "optim_step": (requests.OptimStep, training.optim_step),
    "save_weights": (requests.SaveWeights, saving.save_weights),
    "save_weights_for_sampler": (requests.SaveWeights, saving.save_for_sampler),
    "save_weights_external": (requests.SaveExternal, saving.save_external),
    "load_weights": (requests.LoadWeights, saving.load_weights),
}


async def job_of(account: Account, sent: Sent, again: bool = False) -> Job:
    """Reads a request for a model. again: that the server computes again. Raises: UserError;
    Unknown."""
    if sent.kind in ("forward", "forward_backward"):
        only, read = sent.kind == "forward", datums.read_forward_backward
        body = await inline_or_in_pool(len(sent.body), read, sent.wire, sent.body, only)
        return training.forward_backward(account, body, sent, apart=again)
    kind, make = BODIES[sent.kind]
    return make(account, requests.read(kind, sent.body), sent)


def check_base(server: Server) -> None:
    """Raises: UserError if the journal's models are of another base than the server's."""
    lora = server.host.config.lora
    server.journal.check(
        {
            "base": server.host.model.fingerprint,
            "lora.alpha": lora.alpha,
            "lora.targets": list(lora.targets),
        }
    )


def recover(account: Account) -> None:
    """Fills a new account, on the running event loop, which then does the work that is left."""
    journal, owner = account.server.journal, account.owner
    for id, _, content in journal.rows("sessions", owner):
        account.sessions[id] = Session(id, **json.loads(content))
    for id, _, session, content, snapshot in journal.rows("models", owner):
        about = json.loads(content)
        seed = about.pop("seed")
        trained = account.add_model(account.sessions[session], id, Shape(**about), seed)
        trained.snapshots.number = snapshot
    for id, _, session, content, joined in journal.rows("samplers", owner):
        about = json.loads(content)
        shape = None if about["shape"] is None else Shape(**about["shape"])
        place, created = Path(about["directory"]), about.get("created")
        source = Source(about["name"], shape, place, created=created)
        sampler = Sampler(source, about["model_path"], about.get("base", ""), about.get("follows"))
        account.add_sampler(account.sessions[session], id, sampler)
        account.joins[id] = joined
    clear(account)
    account.futures.limited = False
    rows: dict[str, list[Row]] = {}
    for row in journal.requests(owner):
        rows.setdefault(row.whose, []).append(row)
        if row.outcome is not None:
            outcome = None if row.outcome == GONE else results.restored(row.outcome)
            account.futures.restore(row.id, row.sent.kind, outcome)
    for trained in account.models.values():
        continue_model(account, trained, rows.pop(trained.model.id, []))
    for row in (x for of_sampler in rows.values() for x in of_sampler):
        if row.outcome is None:
            sample_again(account, row)
    account.futures.limited = True


def clear(account: Account) -> None:
    """Deletes what is in an account's directory and no longer of use, and checkpoints that were
    being written or deleted."""
    for unfinished in account.checkpoints.directory.glob("*/*/.*"):
        if unfinished.suffix in (".part", ".gone"):
            shutil.rmtree(unfinished, ignore_errors=True)
    directory = account.directory.absolute()
    shutil.rmtree(account.server.working / "base", ignore_errors=True)
    samplers = {x.source.directory.absolute() for x in account.samplers.values()}
    kept = {
        x.model.directory.absolute(): x.snapshots.place(x.snapshots.number).absolute()
        for x in account.models.values()
    }
    for place in directory.glob("*"):
        snapshot = kept.get(place)
        if snapshot is None and place not in samplers:
            shutil.rmtree(place, ignore_errors=True)
        elif snapshot is not None:
            heal(snapshot)
            for inner in place.iterdir():
                if inner != snapshot:
                    shutil.rmtree(inner, ignore_errors=True)


def continue_model(account: Account, trained: Trained, rows: list[Row]) -> None:
    """Puts into a model's line what is to be done again, and what had not begun."""
    line, last = trained.line, trained.snapshots.number
    if last >= 0:
        line.next = last

        async def restore() -> results.Result:
            def load(model: Model) -> None:
                account.server.host.load(model, trained.snapshots.place(last), True)

            await account.run(trained, load)
            return results.plain({})

        line.repeat(last, restore)
    missing = {row.number for row in rows if row.number > last and row.outcome is not None}
    missing = set(range(last + 1, max(missing, default=last))) - {row.number for row in rows}
    for number in missing:  # without effect, or their results would be there
        line.repeat(number, None)
    for row in rows:
        work = partial(do_again, account, row)
        if row.outcome is None and row.number > last:
            account.put(Job(trained, row.number, row.sent, work))
        elif row.outcome is None:
            account.futures.start(row.id, row.sent.kind, partial(answer_again, account, row))
        elif row.number > last:
            line.repeat(row.number, work if has_effect(row) else None)


def has_effect(row: Row) -> bool:
    """True if a request with a result changed its model."""
    if row.sent.kind not in LASTING or not row.has_body:
        return False
    assert row.outcome is not None
    failed = row.outcome != GONE and isinstance(results.restored(row.outcome), results.Failure)
    return not failed


async def do_again(account: Account, row: Row) -> results.Result:
    sent = row.sent._replace(body=account.server.journal.body_of(row.id))
    return await (await job_of(account, sent, again=True)).work()


async def answer_again(account: Account, row: Row) -> results.Result:
    """Answers a request whose effect is in the snapshot, but whose result was lost: only loading a
    checkpoint takes its snapshot before its result."""
    body = requests.read(requests.LoadWeights, account.server.journal.body_of(row.id))
    return saving.loaded(account.trained(row.whose), Ref.parse(body.path))


def sample_again(account: Account, row: Row) -> None:
    sent = row.sent._replace(body=account.server.journal.body_of(row.id))
    try:
        account.sample(requests.read(requests.Sample, sent.body), sent)
    except (UserError, Unknown):  # its sampler is gone
        lost = results.Failure("the sampler is gone", "user")
        account.futures.restore(row.id, sent.kind, lost)
