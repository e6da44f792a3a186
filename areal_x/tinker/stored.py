"""The routes of what is on disk: training runs and their checkpoints, listed, published, downloaded,
deleted. Handlers are called with the key's account, but for `download`."""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from areal_x.errors import UserError
from areal_x.runtime.thread import POOL, in_pool
from areal_x.tinker import exports, requests
from areal_x.tinker.account import Account
from areal_x.tinker.checkpoints import About, Ref, at, expiry
from areal_x.tinker.futures import Unknown
from areal_x.tinker.reading import HEADERS, body_of, found

MOST_LISTED = 1000


async def weights_info(account: Account, request: Request) -> Any:
    ref = Ref.parse((await body_of(request, requests.OfPath)).tinker_path)
    _, about = found(lambda: account.readable(ref))
    return {
        "base_model": account.server.base_model,
        "is_lora": about.rank > 0,
        "lora_rank": about.rank or None,
        "train_unembed": False,
        "train_mlp": about.mlp,
        "train_attn": about.attention,
    }


async def copy_weights(account: Account, request: Request) -> Any:
    """Makes a checkpoint of another one, which may be another key's that is public. A request that is
    sent again has the key of the first one and makes no second copy."""
    body = await body_of(request, requests.CopyWeights)
    source = Ref.parse(body.source_path)
    once = request.headers.get("x-idempotency-key") or uuid.uuid4().hex
    if body.session_id is not None:
        run = f"{account.session(body.session_id).id}:train:{body.model_seq_id or 0}"
    else:
        new = hashlib.sha256(f"{account.owner} {source} {once}".encode()).hexdigest()
        run = f"{new[:32]}:train:0"
    copy = Ref(run, source.kind, source.name)
    expires = expiry(body.ttl_seconds)

    def make() -> Any:
        own, about = found(lambda: account.readable(source))
        now = About(
            rank=about.rank,
            attention=about.attention,
            mlp=about.mlp,
            created=time.time(),
            expires=expires,
            user_metadata=about.user_metadata,
            request=f"copy {source} {once}",
        )
        write = partial(linked, own.place(source) / "state")
        account.checkpoints.begin_run(run, rank=about.rank, user_metadata=None)
        account.checkpoints.save(copy, now, write, overwrite=False)
        return {"tinker_path": str(copy)}

    return await in_pool(POOL, make)


def linked(source: Path, directory: Path) -> None:
    """Copies a checkpoint's files, whose content never changes, without their bytes."""
    shutil.copytree(source, directory, copy_function=os.link)


# Lists are read from files, as many as a client has: on a thread.
async def list_runs(account: Account, request: Request) -> Any:
    offset, limit = page(request)

    def read() -> Any:
        runs = account.checkpoints.runs()
        return {
            "training_runs": [account.checkpoints.listed_run(x) for x in runs[offset:][:limit]],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(runs)},
        }

    return await in_pool(POOL, read)


async def get_run(account: Account, request: Request) -> Any:
    run = request.path_params["run"]
    return await in_pool(POOL, found, lambda: account.checkpoints.listed_run(run))


async def list_checkpoints(account: Account, request: Request) -> Any:
    own, run = account.checkpoints, request.path_params["run"]

    def read() -> Any:
        return {"checkpoints": [own.listed(*pair) for pair in own.of_run(run)]}

    return await in_pool(POOL, found, read)


async def all_checkpoints(account: Account, request: Request) -> Any:
    (offset, limit), own = page(request), account.checkpoints

    def read() -> Any:
        pairs = [pair for run in own.runs() for pair in own.of_run(run)]
        pairs.sort(key=lambda x: -x[1].created)
        return {
            "checkpoints": [own.listed(*pair) for pair in pairs[offset:][:limit]],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(pairs)},
        }

    return await in_pool(POOL, read)


def page(request: Request) -> tuple[int, int]:
    """Raises: UserError."""
    try:
        offset = int(request.query_params.get("offset", 0))
        limit = int(request.query_params.get("limit", 100))
    except ValueError as error:
        raise UserError("offset and limit are integers") from error
    return max(offset, 0), min(max(limit, 0), MOST_LISTED)


def ref_of(account: Account, request: Request) -> Ref:
    """Returns the checkpoint of a path. Raises: Unknown."""
    parameters = request.path_params
    ref: Ref = found(lambda: Ref(parameters["run"], parameters["kind"], parameters["name"]))
    found(lambda: account.checkpoints.get(ref))
    return ref


async def delete_checkpoint(account: Account, request: Request) -> Any:
    await in_pool(POOL, account.checkpoints.delete, ref_of(account, request))
    return {}


async def set_ttl(account: Account, request: Request) -> Any:
    ref = ref_of(account, request)
    body = await body_of(request, requests.Ttl)
    account.checkpoints.set_ttl(ref, body.ttl_seconds)
    return {}


async def publish(account: Account, request: Request) -> Any:
    """Other keys of this server may read the checkpoint from now on."""
    account.checkpoints.set_public(ref_of(account, request), True)
    return {}


async def unpublish(account: Account, request: Request) -> Any:
    account.checkpoints.set_public(ref_of(account, request), False)
    return {}


# ---- downloads


def link(account: Account, request: Request, ref: Ref, name: str, expires: int) -> str:
    """Returns the address of a checkpoint's file."""
    signed = exports.signature(account.key, ref, name, expires)
    path = f"{account.owner}/{ref.run}/{ref.id}/{quote(name)}"
    return f"{request.base_url}api/v1/files/{path}?expires={expires}&signature={signed}"


async def external_urls(account: Account, request: Request) -> Any:
    ref = ref_of(account, request)
    if ref.kind != "external_weights":
        raise UserError(
            f"{ref} is not external: save_weights_external saves what can be downloaded"
        )
    expires = int(time.time()) + exports.LINK_SECONDS
    directory = account.checkpoints.place(ref) / "state"
    names = [x.relative_to(directory).as_posix() for x in exports.files_of(directory)]
    urls = {name: link(account, request, ref, name, expires) for name in names}
    return {"urls": urls, "expires": at(expires)}


async def archive_url(account: Account, request: Request) -> Response:
    """Redirects to a tar file of a checkpoint, as earlier clients ask for one."""
    ref = ref_of(account, request)
    expires = int(time.time()) + exports.LINK_SECONDS
    url = link(account, request, ref, exports.ARCHIVE, expires)
    return Response(status_code=302, headers={**HEADERS, "location": url, "expires": at(expires)})


async def download(account: Account, request: Request) -> Response:
    """Answers a signed address. account: that of the address. Raises: Unknown; UserError."""
    parameters, given = request.path_params, request.query_params
    ref: Ref = found(lambda: Ref(parameters["run"], parameters["kind"], parameters["name"]))
    name, expires = parameters["file"], given.get("expires", "")
    if not (expires.isascii() and expires.isdigit() and len(expires) < 16):
        raise Unknown
    signed = exports.signature(account.key, ref, name, int(expires))
    if not hmac.compare_digest(signed.encode(), given.get("signature", "").encode()):
        raise Unknown
    if time.time() > int(expires):
        raise UserError("the address has expired: ask for a new one")
    found(lambda: account.checkpoints.get(ref))
    directory = account.checkpoints.place(ref) / "state"
    if name == exports.ARCHIVE:
        return StreamingResponse(exports.archive(directory), 200, HEADERS, "application/x-tar")
    files = {x.relative_to(directory).as_posix(): x for x in exports.files_of(directory)}
    if name not in files or exports.is_private(files[name].name):
        raise Unknown
    length = {"content-length": str(files[name].stat().st_size)}
    content = exports.pieces(files[name])
    return StreamingResponse(content, 200, HEADERS | length, "application/octet-stream")
