"""The routes of the API, and who may use them.

Every route needs a key, in the header X-API-Key. A key's account is all that its requests see: ids of
another key are unknown ones. Bodies are bounded, and read as data alone.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from areal_x.errors import UserError
from areal_x.runtime.thread import POOL, in_pool, inline_or_in_pool
from areal_x.tinker import requests
from areal_x.tinker.account import Account, Server
from areal_x.tinker.checkpoints import Ref
from areal_x.tinker.futures import Full, Gone, Unknown
from areal_x.tinker.requests import ForwardBackward
from areal_x.tinker.results import Failure

LOG = logging.getLogger(__name__)

KEY = "x-api-key"
WIRE = "application/x-protobuf"
POLL_SECONDS = 20.0  # clients give up an answer after 45
MEGABYTE = 1 << 20
DATA_MEGABYTES = 64  # of datums
BODY_MEGABYTES = 8
MOST_LISTED = 1000
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
WARNING = (
    "this server trains no adapter of the unembedding (train_unembed), and samplers of"
    " kind='inflight' and prompt_alt_tokens_k are not supported yet"
)

Handler = Callable[[Account, Request], Awaitable[Any]]


def application(server: Server, keys: Sequence[str]) -> Starlette:
    """Returns the application for clients with these keys."""
    accounts = {key: Account(server, key) for key in keys}

    def account_of(request: Request) -> Account:
        """Raises: HTTPException for a key that is not ours."""
        given = request.headers.get(KEY, "").encode()
        found = [x for key, x in accounts.items() if hmac.compare_digest(given, key.encode())]
        if not found:
            raise HTTPException(401, "the header X-API-Key has no key of this server")
        return found[0]

    def route(path: str, handler: Handler, method: str = "POST") -> Route:
        async def answer(request: Request) -> Response:
            try:
                found = await handler(account_of(request), request)
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

    return Starlette(routes=[route(*x) for x in ROUTES])


def json_response(found: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(found), status, HEADERS, "application/json")


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    body = msgspec.json.encode({"error": message, "detail": message})
    return Response(body, status, {**HEADERS, **(headers or {})}, "application/json")


async def bytes_of(request: Request, megabytes: int) -> bytes:
    """Raises: HTTPException for a body that is longer, or compressed."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise HTTPException(415, "bodies are not compressed here")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > megabytes * MEGABYTE:
            raise HTTPException(413, f"the body is longer than {megabytes} MiB")
        parts.append(part)
    return b"".join(parts)


async def body_of(request: Request, kind: type[requests.B]) -> requests.B:
    """Raises: HTTPException; UserError."""
    body = await bytes_of(request, BODY_MEGABYTES)
    return await inline_or_in_pool(len(body), requests.read, kind, body)


# ---- the service


async def health(_: Account, __: Request) -> Any:
    return {"status": "ok"}


async def capabilities(account: Account, _: Request) -> Any:
    server = account.server
    model = {
        "model_name": server.base_model,
        "max_context_length": server.host.context,
        "trainable": True,
        "sampleable": True,
    }
    return {"supported_models": [model]}


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


async def create_session(account: Account, request: Request) -> Any:
    session = account.create_session(await body_of(request, requests.CreateSession))
    return {"type": "create_session", "session_id": session.id, "info_message": WARNING}


async def heartbeat(account: Account, request: Request) -> Any:
    account.beat((await body_of(request, requests.InSession)).session_id)
    return {"type": "session_heartbeat"}


async def finish(account: Account, request: Request) -> Any:
    await bytes_of(request, BODY_MEGABYTES)
    account.finish(request.path_params["session"])
    return {}


async def list_sessions(account: Account, _: Request) -> Any:
    return {"sessions": list(account.sessions)[:MOST_LISTED]}


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


async def create_model(account: Account, request: Request) -> Any:
    model, id = account.create_model(await body_of(request, requests.CreateModel))
    return {"request_id": id, "model_id": model}


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


async def unload_model(account: Account, request: Request) -> Any:
    id = (await body_of(request, requests.OfModel)).model_id
    account.trained(id)
    account.unload(id)
    return {"type": "unload_model", "model_id": id}


async def forward_backward(account: Account, request: Request) -> Any:
    return await _forward_backward(account, request, False)


async def forward(account: Account, request: Request) -> Any:
    return await _forward_backward(account, request, True)


async def _forward_backward(account: Account, request: Request, forward_only: bool) -> Any:
    data = await bytes_of(request, DATA_MEGABYTES)
    body: ForwardBackward
    if request.headers.get("content-type", "").startswith(WIRE):
        body = await inline_or_in_pool(len(data), requests.forward_backward_of_wire, data)
    else:
        read = requests.forward_backward_of_json
        body = await inline_or_in_pool(len(data), read, data, forward_only)
    return {"request_id": account.forward_backward(body), "model_id": body.model_id}


async def optim_step(account: Account, request: Request) -> Any:
    body = await body_of(request, requests.OptimStep)
    return {"request_id": account.optim_step(body), "model_id": body.model_id}


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


async def cancel(account: Account, request: Request) -> Any:
    account.futures.cancel((await body_of(request, requests.Retrieve)).request_id)
    return {}


# ---- sampling


async def create_sampler(account: Account, request: Request) -> Any:
    id = account.create_sampler(await body_of(request, requests.CreateSamplingSession))
    return {"type": "create_sampling_session", "sampling_session_id": id}


async def join_sampler(account: Account, request: Request) -> Any:
    body = await body_of(request, requests.OfSampler)
    number = account.join(body.sampling_session_id)
    return {"type": "join_sampling_session", "client_counter": number}


async def get_sampler(account: Account, request: Request) -> Any:
    id = request.path_params["sampler"]
    return {
        "sampler_id": id,
        "base_model": account.server.base_model,
        "model_path": account.sampler(id).model_path,
    }


async def sample(account: Account, request: Request) -> Any:
    body = await body_of(request, requests.Sample)
    id = account.sample(body)
    ids = [f"{id}:{index}" for index in range(body.num_samples)]
    return {"request_id": id, "sample_sequence_ids": ids}


# ---- checkpoints


async def save_weights(account: Account, request: Request) -> Any:
    body = await body_of(request, requests.SaveWeights)
    return {"request_id": account.save(body), "model_id": body.model_id}


async def save_for_sampler(account: Account, request: Request) -> Any:
    body = await body_of(request, requests.SaveWeights)
    return {"request_id": account.save_for_sampler(body), "model_id": body.model_id}


async def load_weights(account: Account, request: Request) -> Any:
    model, id = account.load(await body_of(request, requests.LoadWeights))
    return {"request_id": id, "model_id": model}


async def weights_info(account: Account, request: Request) -> Any:
    ref = Ref.parse((await body_of(request, requests.OfPath)).tinker_path)
    about = found(lambda: account.checkpoints.get(ref))
    return {
        "base_model": account.server.base_model,
        "is_lora": about.rank > 0,
        "lora_rank": about.rank or None,
        "train_unembed": False,
        "train_mlp": about.mlp,
        "train_attn": about.attention,
    }


def found(look: Callable[[], Any]) -> Any:
    """Returns what is there. Raises: Unknown in place of a UserError."""
    try:
        return look()
    except UserError as error:
        raise Unknown from error


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
    kind, _, name = request.path_params["checkpoint"].partition("/")
    ref: Ref = found(lambda: Ref(request.path_params["run"], kind, name))
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


CHECKPOINT = "training_runs/{run}/checkpoints/{checkpoint:path}"
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
    ("create_model", create_model),
    ("get_info", get_info),
    ("unload_model", unload_model),
    ("forward", forward),
    ("forward_backward", forward_backward),
    ("optim_step", optim_step),
    ("retrieve_future", retrieve),
    ("cancel_future", cancel),
    ("create_sampling_session", create_sampler),
    ("join_sampling_session", join_sampler),
    ("samplers/{sampler}", get_sampler, "GET"),
    ("asample", sample),
    ("save_weights", save_weights),
    ("save_weights_for_sampler", save_for_sampler),
    ("load_weights", load_weights),
    ("weights_info", weights_info),
    ("training_runs", list_runs, "GET"),
    ("training_runs/{run}", get_run, "GET"),
    ("training_runs/{run}/checkpoints", list_checkpoints, "GET"),
    (f"{CHECKPOINT}/ttl", set_ttl, "PUT"),
    (CHECKPOINT, delete_checkpoint, "DELETE"),
    ("checkpoints", all_checkpoints, "GET"),
]
