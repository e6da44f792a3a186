"""The routes of the API, and who may use them.

Every route needs a key, in the header X-API-Key, but for downloads, whose addresses are signed
(areal_x/tinker/exports.py). A key's account is all that its requests see: ids of another key are
unknown ones. Bodies are bounded, and read as data alone.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from areal_x.errors import UserError
from areal_x.runtime.thread import inline_or_in_pool
from areal_x.tinker import datums, requests, saving, stored, training
from areal_x.tinker.account import Account, Job, Server
from areal_x.tinker.futures import Full, Gone, Unknown
from areal_x.tinker.host import TrainerHost
from areal_x.tinker.journal import Sent
from areal_x.tinker.reading import (
    BODY_MEGABYTES,
    DATA_MEGABYTES,
    HEADERS,
    WIRE,
    Handler,
    body_of,
    bytes_of,
    durable,
    json_response,
    refusal,
    sent_of,
)
from areal_x.tinker.results import Failure

LOG = logging.getLogger(__name__)

KEY = "x-api-key"
POLL_SECONDS = 20.0  # clients give up an answer after 45
WARNING = (
    "this server trains no adapter of the unembedding (train_unembed), prompt_alt_tokens_k is not"
    " supported yet, and the loss stable_reinforce is the one of docs/tinker.md"
)


def application(server: Server, keys: Sequence[str]) -> Starlette:
    """Returns the application for clients with these keys."""
    accounts = {key: Account(server, key) for key in keys}
    owners = {x.owner: x for x in accounts.values()}

    def account_of(request: Request) -> Account:
        """Raises: HTTPException for a key that is not ours."""
        given = request.headers.get(KEY, "").encode()
        found = [x for key, x in accounts.items() if hmac.compare_digest(given, key.encode())]
        if not found:
            raise HTTPException(401, "the header X-API-Key has no key of this server")
        return found[0]

    def signed_for(request: Request) -> Account:
        """Returns the account of an address that its handler checks. Raises: Unknown."""
        owner = request.path_params["owner"]
        if owner not in owners:
            raise Unknown
        return owners[owner]

    def route(path: str, handler: Handler, method: str = "POST") -> Route:
        whose = signed_for if handler is stored.download else account_of

        async def answer(request: Request) -> Response:
            try:
                found = await handler(whose(request), request)
            except Unknown:
                return refusal(404, "there is nothing of this id")
            except Gone:
                return refusal(410, "the result made room for newer ones: send the request again")
            except Full:
                return refusal(429, "too many requests are under way", {"retry-after": "1"})
            except HTTPException as error:
                return refusal(error.status_code, error.detail)
            except UserError as error:
                return refusal(400, str(error))
            except ClientDisconnect:
                return refusal(400, "the body ended early")
            except Exception:
                LOG.exception("a request to %s failed", path)
                return refusal(500, "the server failed: its log has the traceback")
            return found if isinstance(found, Response) else json_response(found)

        return Route(f"/api/v1/{path}", answer, methods=[method])

    made = Starlette(routes=[route(*x) for x in ROUTES])
    made.state.accounts = list(accounts.values())
    return made


# ---- the service


async def health(_: Account, __: Request) -> Any:
    return {"status": "ok"}


async def capabilities(account: Account, _: Request) -> Any:
    server = account.server

    def model(name: str, host: TrainerHost, trainable: bool) -> dict[str, Any]:
        length = {"model_name": name, "max_context_length": host.context}
        return {**length, "trainable": trainable, "sampleable": True}

    teachers = [model(name, x.host, trainable=False) for name, x in server.teachers.items()]
    return {"supported_models": [model(server.base_model, server.host, trainable=True), *teachers]}


async def client_config(_: Account, __: Request) -> Any:
    return {
        "pjwt_auth_enabled": False,
        "use_pyqwest_transport": False,
        "proto_compress_fwdbwd": False,
        "parallel_fwdbwd_chunks": True,
        "custom_loss_server_side": False,
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": True,
    }


async def dynamic_config(_: Account, __: Request) -> Any:
    return {"sample_cancel_enabled": True}


async def telemetry(_: Account, request: Request) -> Any:
    await bytes_of(request, BODY_MEGABYTES)  # it is kept nowhere
    return {"status": "accepted"}


async def whoami(account: Account, _: Request) -> Any:
    return {"user_urn": f"urn:areal-x:{account.owner}", "org_urn": "urn:areal-x:local"}


# ---- sessions


@durable
async def create_session(account: Account, request: Request) -> Any:
    session = account.create_session(await body_of(request, requests.CreateSession))
    return {"type": "create_session", "session_id": session.id, "info_message": WARNING}


async def heartbeat(account: Account, request: Request) -> Any:
    account.beat((await body_of(request, requests.InSession)).session_id)
    return {"type": "session_heartbeat"}


@durable
async def finish(account: Account, request: Request) -> Any:
    await bytes_of(request, BODY_MEGABYTES)
    account.finish(request.path_params["session"])
    return {}


async def list_sessions(account: Account, _: Request) -> Any:
    return {"sessions": list(account.sessions)[: stored.MOST_LISTED]}


async def get_session(account: Account, request: Request) -> Any:
    session = account.session(request.path_params["session"])
    metadata = {name: str(x) for name, x in (session.user_metadata or {}).items()}
    return {
        "training_run_ids": session.models,
        "sampler_ids": session.samplers,
        "user_metadata": metadata,
        "display_name": session.display_name,
    }


# ---- models


def of_model(kind: type[requests.B], name: str, make: Callable[..., Job]) -> Handler:
    """Returns the handler of requests that wait in a model's line."""

    @durable
    async def handle(account: Account, request: Request) -> Any:
        job = make(account, *await sent_of(request, kind, name))
        return {"request_id": account.put(job), "model_id": job.trained.model.id}

    return handle


async def get_info(account: Account, request: Request) -> Any:
    id = (await body_of(request, requests.OfModel)).model_id
    rank, server = account.trained(id).model.shape.rank, account.server
    return {
        "type": "get_info",
        "model_id": id,
        "model_name": server.base_model,
        "is_lora": rank > 0,
        "lora_rank": rank or None,
        "model_data": {
            "model_name": server.base_model,
            "tokenizer_id": str(server.host.base.absolute()),
        },
    }


@durable
async def unload_model(account: Account, request: Request) -> Any:
    id = (await body_of(request, requests.OfModel)).model_id
    account.trained(id)
    account.unload(id)
    return {"type": "unload_model", "model_id": id}


def forwards(forward_only: bool) -> Handler:
    """Returns the handler of datums. forward_only: for JSON, which does not say."""

    @durable
    async def handle(account: Account, request: Request) -> Any:
        data = await bytes_of(request, DATA_MEGABYTES)
        wire = request.headers.get("content-type", "").startswith(WIRE)
        read = datums.read_forward_backward
        body = await inline_or_in_pool(len(data), read, wire, data, forward_only)
        sent = Sent("forward" if body.forward_only else "forward_backward", data, wire)
        id = account.put(training.forward_backward(account, body, sent))
        return {"request_id": id, "model_id": body.model_id}

    return handle


# ---- futures


async def retrieve(account: Account, request: Request) -> Response:
    id = (await body_of(request, requests.Retrieve)).request_id
    found = await account.futures.result(id, POLL_SECONDS)
    if found is None:
        again = {"type": "try_again", "request_id": id, "queue_state": "active"}
        return json_response(again, 408)
    accepts = WIRE in request.headers.get("accept", "")
    if isinstance(found, Failure) or found.wire is None or not accepts:
        body = await inline_or_in_pool(found.size, lambda: msgspec.json.encode(found.json()))
        return Response(body, 200, HEADERS, "application/json")
    return Response(found.wire, 200, HEADERS, WIRE)


@durable
async def cancel(account: Account, request: Request) -> Any:
    account.futures.cancel((await body_of(request, requests.Retrieve)).request_id)
    return {}


# ---- sampling


@durable
async def create_sampler(account: Account, request: Request) -> Any:
    id = account.create_sampler(await body_of(request, requests.CreateSamplingSession))
    return {"type": "create_sampling_session", "sampling_session_id": id}


@durable
async def join_sampler(account: Account, request: Request) -> Any:
    body = await body_of(request, requests.OfSampler)
    number = account.join(body.sampling_session_id)
    return {"type": "join_sampling_session", "client_counter": number}


async def get_sampler(account: Account, request: Request) -> Any:
    id = request.path_params["sampler"]
    sampler = account.sampler(id)
    return {
        "sampler_id": id,
        "base_model": sampler.base or account.server.base_model,
        "model_path": sampler.model_path,
    }


@durable
async def sample(account: Account, request: Request) -> Any:
    body, sent = await sent_of(request, requests.Sample, "sample")
    id = account.sample(body, sent)
    ids = [f"{id}:{index}" for index in range(body.num_samples)]
    return {"request_id": id, "sample_sequence_ids": ids}


CHECKPOINT = "training_runs/{run}/checkpoints/{kind}/{name}"
ROUTES: list[tuple[str, Handler] | tuple[str, Handler, str]] = [
    ("healthz", health, "GET"),
    ("get_server_capabilities", capabilities, "GET"),
    ("auth/apikey/me", whoami, "GET"),
    ("client/config", client_config),
    ("client/dynamic_config", dynamic_config),
    ("telemetry", telemetry),
    ("create_session", create_session),
    ("session_heartbeat", heartbeat),
    ("sessions", list_sessions, "GET"),
    ("sessions/{session}", get_session, "GET"),
    ("sessions/{session}/finish", finish),
    ("create_model", of_model(requests.CreateModel, "create_model", training.create_model)),
    ("get_info", get_info),
    ("unload_model", unload_model),
    ("forward", forwards(forward_only=True)),
    ("forward_backward", forwards(forward_only=False)),
    ("optim_step", of_model(requests.OptimStep, "optim_step", training.optim_step)),
    ("retrieve_future", retrieve),
    ("cancel_future", cancel),
    ("create_sampling_session", create_sampler),
    ("join_sampling_session", join_sampler),
    ("samplers/{sampler}", get_sampler, "GET"),
    ("asample", sample),
    ("save_weights", of_model(requests.SaveWeights, "save_weights", saving.save_weights)),
    (
        "save_weights_for_sampler",
        of_model(requests.SaveWeights, "save_weights_for_sampler", saving.save_for_sampler),
    ),
    (
        "save_weights_external",
        of_model(requests.SaveExternal, "save_weights_external", saving.save_external),
    ),
    ("load_weights", of_model(requests.LoadWeights, "load_weights", saving.load_weights)),
    ("weights_info", stored.weights_info),
    ("copy_weights", stored.copy_weights),
    ("training_runs", stored.list_runs, "GET"),
    ("training_runs/{run}", stored.get_run, "GET"),
    ("training_runs/{run}/checkpoints", stored.list_checkpoints, "GET"),
    (CHECKPOINT, stored.delete_checkpoint, "DELETE"),
    (f"{CHECKPOINT}/ttl", stored.set_ttl, "PUT"),
    (f"{CHECKPOINT}/publish", stored.publish),
    (f"{CHECKPOINT}/publish", stored.unpublish, "DELETE"),
    (f"{CHECKPOINT}/external_weights_urls", stored.external_urls, "GET"),
    (f"{CHECKPOINT}/archive", stored.archive_url, "GET"),
    ("files/{owner}/{run}/{kind}/{name}/{file:path}", stored.download, "GET"),
    ("checkpoints", stored.all_checkpoints, "GET"),
]
