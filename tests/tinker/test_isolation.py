"""Every route of the server, tried with the key of another client on what a client has: the routes come from the
application itself, so one that is added needs a case here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytest.importorskip("starlette")
pytest.importorskip("areal_x_torch")

from starlette.testclient import TestClient

from areal_x.tinker.account import Server, owner_of
from tests.tinker import test_server
from tests.tinker.test_server import BASE, OTHERS, OURS, TOKENS, Trained, post, result

server, client, trained = test_server.server, test_server.client, test_server.trained
NOBODY = "tml-a-key-of-nobody-at-all"
PREFIX = "/api/v1/"


class Owned(NamedTuple):
    """What a client has."""

    session: str
    model: str
    number: int
    sampler: str
    request: str
    sampled: str
    link: str


class Case(NamedTuple):
    """A try on somebody's property. path: of the route, with the ids. statuses: of which the answer has one."""

    path: Callable[[Owned], str]
    body: Callable[[Owned], dict[str, Any]] = lambda _: {}
    statuses: tuple[int, ...] = (404,)


FORWARD = {"forward_backward_input": {"data": [test_server.datum()], "loss_fn": "cross_entropy"}}
PROMPT = {"prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {"max_tokens": 2}, "seq_id": 9}
OPEN = (200,)  # the same for every key: without ids


def of_model(o: Owned) -> dict[str, Any]:
    return {"model_id": o.model, "seq_id": o.number + 1}


def saved(o: Owned, kind: str = "weights") -> str:
    return f"tinker://{o.model}/{kind}/secret"


def checkpoint(tail: str = "", kind: str = "weights") -> Callable[[Owned], str]:
    return lambda o: f"training_runs/{o.model}/checkpoints/{kind}/secret{tail}"


def at(path: str) -> Callable[[Owned], str]:
    return lambda _: path


C = "training_runs/{run}/checkpoints/{kind}/{name}"
CASES: dict[tuple[str, str], Case] = {
    ("GET", "healthz"): Case(at("healthz"), statuses=OPEN),
    ("GET", "get_server_capabilities"): Case(at("get_server_capabilities"), statuses=OPEN),
    ("GET", "auth/apikey/me"): Case(at("auth/apikey/me"), statuses=OPEN),
    ("POST", "client/config"): Case(at("client/config"), statuses=OPEN),
    ("POST", "client/dynamic_config"): Case(at("client/dynamic_config"), statuses=OPEN),
    ("POST", "telemetry"): Case(at("telemetry"), statuses=OPEN),
    ("POST", "create_session"): Case(at("create_session"), statuses=OPEN),
    ("POST", "session_heartbeat"): Case(at("session_heartbeat"), lambda o: {"session_id": o.session}),
    ("GET", "sessions"): Case(at("sessions"), statuses=OPEN),
    ("GET", "sessions/{session}"): Case(lambda o: f"sessions/{o.session}"),
    ("POST", "sessions/{session}/finish"): Case(lambda o: f"sessions/{o.session}/finish"),
    ("POST", "create_model"): Case(
        at("create_model"), lambda o: {"session_id": o.session, "model_seq_id": 1, "base_model": BASE}
    ),
    ("POST", "get_info"): Case(at("get_info"), of_model),
    ("POST", "unload_model"): Case(at("unload_model"), of_model),
    ("POST", "forward"): Case(at("forward"), lambda o: {**of_model(o), **FORWARD}),
    ("POST", "forward_backward"): Case(at("forward_backward"), lambda o: {**of_model(o), **FORWARD}),
    ("POST", "optim_step"): Case(at("optim_step"), of_model),
    ("POST", "retrieve_future"): Case(at("retrieve_future"), lambda o: {"request_id": o.request}),
    ("POST", "cancel_future"): Case(at("cancel_future"), lambda o: {"request_id": o.sampled}, OPEN),
    ("POST", "create_sampling_session"): Case(
        at("create_sampling_session"),
        lambda o: {"session_id": o.session, "sampling_session_seq_id": 5, "model_path": saved(o)},
    ),
    ("POST", "join_sampling_session"): Case(at("join_sampling_session"), lambda o: {"sampling_session_id": o.sampler}),
    ("GET", "samplers/{sampler}"): Case(lambda o: f"samplers/{o.sampler}"),
    ("POST", "asample"): Case(at("asample"), lambda o: {"sampling_session_id": o.sampler, **PROMPT}),
    ("POST", "save_weights"): Case(at("save_weights"), lambda o: {**of_model(o), "path": "x"}),
    ("POST", "save_weights_for_sampler"): Case(at("save_weights_for_sampler"), lambda o: {**of_model(o), "path": "x"}),
    ("POST", "save_weights_external"): Case(at("save_weights_external"), lambda o: {**of_model(o), "path": "x"}),
    ("POST", "load_weights"): Case(
        at("load_weights"), lambda o: {"path": saved(o), "optimizer": True, "session_id": o.session, "model_seq_id": 0}, (400,)
    ),
    ("POST", "weights_info"): Case(at("weights_info"), lambda o: {"tinker_path": saved(o)}),
    ("POST", "copy_weights"): Case(at("copy_weights"), lambda o: {"source_path": saved(o), "destination_project_id": "p"}),
    ("GET", "training_runs"): Case(at("training_runs"), statuses=OPEN),
    ("GET", "training_runs/{run}"): Case(lambda o: f"training_runs/{o.model}"),
    ("GET", "training_runs/{run}/checkpoints"): Case(lambda o: f"training_runs/{o.model}/checkpoints"),
    ("DELETE", C): Case(checkpoint()),
    ("PUT", f"{C}/ttl"): Case(checkpoint("/ttl"), lambda _: {"ttl_seconds": 3600}),
    ("POST", f"{C}/publish"): Case(checkpoint("/publish")),
    ("DELETE", f"{C}/publish"): Case(checkpoint("/publish")),
    ("GET", f"{C}/external_weights_urls"): Case(checkpoint("/external_weights_urls", "external_weights")),
    ("GET", f"{C}/archive"): Case(checkpoint("/archive", "sampler_weights")),
    ("GET", "files/{owner}/{run}/{kind}/{name}/{file:path}"): Case(
        lambda o: f"files/{owner_of(OURS)}/{o.model}/external_weights/secret/adapter_model.safetensors"
    ),
    ("GET", "checkpoints"): Case(at("checkpoints"), statuses=OPEN),
}


@pytest.fixture(scope="module")
def owned(client: TestClient, trained: Trained) -> Owned:
    sampler = trained.do("save_weights_for_sampler", sampling_session_seq_id=0)["sampling_session_id"]
    for route in ("save_weights", "save_weights_external", "save_weights_for_sampler"):
        trained.do(route, path="secret")
    request = trained.send("forward", **trained.forward_backward())["request_id"]
    sampled = post(client, "asample", sampling_session_id=sampler, **PROMPT)["request_id"]
    urls = client.get(f"{PREFIX}{checkpoint('/external_weights_urls', 'external_weights')(ids(trained, sampler))}").json()
    link = urls["urls"]["adapter_model.safetensors"].removeprefix("http://testserver")
    return ids(trained, sampler)._replace(request=request, sampled=sampled, link=link)


def ids(trained: Trained, sampler: str) -> Owned:
    return Owned(trained.session, trained.id, trained.number, sampler, "", "", "")


def routes(client: TestClient) -> set[tuple[str, str]]:
    made: Any = client.app
    return {(method, x.path.removeprefix(PREFIX)) for x in made.routes for method in x.methods - {"HEAD"}}


def test_every_route_of_the_application_has_a_case(client: TestClient) -> None:
    assert routes(client) == set(CASES)


@pytest.mark.parametrize("method, path", CASES, ids=lambda x: x)
def test_another_key_gets_nothing_of_a_client(client: TestClient, owned: Owned, method: str, path: str) -> None:
    case = CASES[method, path]
    secrets = (owned.session, owned.model, owned.sampler, owned.request)
    for key, statuses in ((OTHERS, case.statuses), (NOBODY, (401,)), ("", (401,))):
        if path.startswith("files/"):  # which a signature opens and not a key
            statuses = (404,)
        asked = {"json": case.body(owned)} if method != "GET" else {}
        answer = client.request(method, PREFIX + case.path(owned), headers={"x-api-key": key}, follow_redirects=False, **asked)
        assert answer.status_code in statuses, answer.text
        given = str(case.path(owned)) + str(case.body(owned))
        assert not any(x in answer.text and x not in given for x in secrets)
        assert "error" in answer.json() or answer.status_code == 200


def test_with_its_own_session_another_key_loads_and_samples_nothing(client: TestClient, owned: Owned) -> None:
    session = post(client, "create_session", OTHERS, tags=[], sdk_version="0")["session_id"]
    load = {"optimizer": True, "session_id": session, "model_seq_id": 0}
    for kind in ("weights", "sampler_weights", "external_weights"):
        post(client, "load_weights", OTHERS, 400, path=saved(owned, kind), **load)
        for model_path in (saved(owned, kind), saved(owned, kind).replace("secret", "../weights/secret")):
            body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": model_path}
            post(client, "create_sampling_session", OTHERS, 400, **body)
    # an id of another session under one's own, and the other way round
    mixed = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 2}}
    own = result_of(client, post(client, "create_model", OTHERS, **mixed))["model_id"]
    post(client, "save_weights", OURS, 404, model_id=own, seq_id=1, path="x")
    for name in ("sessions", "training_runs", "checkpoints"):
        text = client.get(PREFIX + name, headers={"x-api-key": OTHERS}).text
        assert not any(x in text for x in (owned.session, owned.model))


def result_of(client: TestClient, sent: dict[str, Any]) -> Any:
    return post(client, "retrieve_future", OTHERS, request_id=sent["request_id"])


def test_what_was_tried_changed_nothing(client: TestClient, owned: Owned) -> None:
    assert "metrics" in result(client, {"request_id": owned.request})
    assert len(result(client, {"request_id": owned.sampled})["sequences"]) == 1
    found = client.get(f"{PREFIX}training_runs/{owned.model}/checkpoints").json()["checkpoints"]
    assert sorted(x["checkpoint_type"] for x in found) == ["external", "sampler", "training"]
    assert not any(x["public"] or x["expires_at"] for x in found)
    assert client.get(f"{PREFIX}sessions/{owned.session}").json()["training_run_ids"] == [owned.model]


def test_a_signature_opens_one_file_for_a_time(client: TestClient, owned: Owned, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = TestClient(client.app)
    assert bare.get(owned.link).status_code == 200
    path, _, query = owned.link.partition("?")
    fields = dict(x.split("=") for x in query.split("&"))
    later = owned.link.replace(fields["expires"], str(int(fields["expires"]) + 1))
    for changed in (
        later,
        path,
        owned.link[:-1] + ("0" if owned.link[-1] != "0" else "1"),
        owned.link.replace("adapter_model.safetensors", "adapter_config.json"),
        owned.link.replace("external_weights", "weights"),
        owned.link.replace(owner_of(OURS), owner_of(OTHERS)),
        path.replace("adapter_model.safetensors", "../checkpoint.json") + f"?{query}",
    ):
        assert bare.get(changed).status_code in (404, 405), changed
    monkeypatch.setattr("areal_x.tinker.stored.time.time", lambda: float(fields["expires"]) + 1)
    assert bare.get(owned.link).status_code == 400


def test_a_published_checkpoint_is_read_by_others_until_it_is_withdrawn(
    client: TestClient, owned: Owned, server: Server
) -> None:
    session = post(client, "create_session", OTHERS, tags=[], sdk_version="0")["session_id"]
    place = PREFIX + checkpoint("/publish")(owned)
    assert client.post(place).status_code == 200
    sampler = {"session_id": session, "sampling_session_seq_id": 7, "model_path": saved(owned)}
    name = post(client, "create_sampling_session", OTHERS, **sampler)["sampling_session_id"]
    sent = post(client, "asample", OTHERS, sampling_session_id=name, **PROMPT)
    assert len(result_of(client, sent)["sequences"]) == 1
    assert post(client, "weights_info", OTHERS, tinker_path=saved(owned))["lora_rank"] == 4
    assert client.delete(PREFIX + checkpoint()(owned), headers={"x-api-key": OTHERS}).status_code == 404
    assert client.delete(place).status_code == 200
    post(client, "weights_info", OTHERS, 404, tinker_path=saved(owned))
    post(client, "create_sampling_session", OTHERS, 400, **{**sampler, "sampling_session_seq_id": 8})
