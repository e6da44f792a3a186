"""What the server of the Tinker API answers, and to whom, by plain HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("areal_x_torch")

from starlette.testclient import TestClient

from areal_x.errors import UserError
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.runtime.thread import OneThread
from areal_x.testing.models import CHARACTERS, write_model
from areal_x.tinker import app, datums, futures, reading, wire
from areal_x.tinker.account import Server, owner_of
from areal_x.tinker.app import ROUTES, application
from areal_x.tinker.embedded_weights import EmbeddedWeights
from areal_x.tinker.host import TrainerHost
from areal_x.tinker.journal import Journal
from areal_x.tinker.listening import APIServer
from areal_x.tinker.sampling import Samplers

OURS, OTHERS = "tml-the-key-of-one-client", "tml-the-key-of-another"
BASE = "the/model"
TOKENS = list(range(2, 12))
FLOATS = {"dtype": "float32", "shape": [9]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("tinker")
    model = write_model(root / "m", num_hidden_layers=1)
    host = TrainerHost("torch", TrainerConfig(model=ModelConfig(path=str(model)), row_length=64))
    thread = OneThread("tinker")
    samplers = Samplers(host, thread, load_tokenizer(model), EmbeddedWeights(host, thread, 4))
    yield Server(host, thread, samplers, BASE, root / "checkpoints", root / "working", Journal(root))
    thread.close()


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[TestClient]:
    with TestClient(application(server, [OURS, OTHERS])) as opened:
        opened.headers["x-api-key"] = OURS
        yield opened
        opened.portal.call(server.samplers.close)
        opened.portal.call(server.journal.close)


def post(client: TestClient, route: str, key: str = OURS, status: int = 200, /, **body: Any) -> Any:
    answer = client.post(f"/api/v1/{route}", json=body, headers={"x-api-key": key})
    assert answer.status_code == status, answer.text
    return answer.json()


def result(client: TestClient, sent: dict[str, Any]) -> Any:
    return post(client, "retrieve_future", request_id=sent["request_id"])


def datum(targets: list[int] | None = None, weights: Any = None) -> dict[str, Any]:
    targets = TOKENS[1:] if targets is None else targets
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": TOKENS[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": targets, "dtype": "int64", "shape": [len(targets)]},
            "weights": {**FLOATS, "data": [1.0] * 9 if weights is None else weights},
        },
    }


class Trained:
    """A client's model, by HTTP."""

    def __init__(self, client: TestClient, rank: int = 4) -> None:
        self.client = client
        self.session = post(client, "create_session", tags=[], sdk_version="0")["session_id"]
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": rank}}
        sent = post(client, "create_model", **body)
        self.id = sent["model_id"]
        assert result(client, sent) == {"type": "create_model", "model_id": self.id}
        assert post(client, "create_model", **body) == sent  # sent again
        self.number = 0

    def send(self, route: str, /, **body: Any) -> Any:
        self.number += 1
        return post(self.client, route, OURS, 200, model_id=self.id, seq_id=self.number, **body)

    def do(self, route: str, /, **body: Any) -> Any:
        return result(self.client, self.send(route, **body))

    def forward_backward(self, *data: Any, loss: str = "cross_entropy") -> Any:
        return {"forward_backward_input": {"data": list(data or [datum()]), "loss_fn": loss}}

    def loss(self) -> float:
        found: float = self.do("forward", **self.forward_backward())["metrics"]["loss:sum"]
        return found

    def step(self, rate: float = 0.01) -> Any:
        self.do("forward_backward", **self.forward_backward())
        return self.do("optim_step", adam_params={"learning_rate": rate})


@pytest.fixture(scope="module")
def trained(client: TestClient) -> Trained:
    return Trained(client)


@pytest.mark.parametrize(
    "path, method", [(x[0], x[2] if len(x) > 2 else "POST") for x in ROUTES if not x[0].startswith("files/")]
)
def test_every_route_needs_a_key(client: TestClient, path: str, method: str) -> None:
    for key in ("", "tml-", OURS[:-1], f"{OURS}x", "tml-ключ"):
        answer = client.request(method, f"/api/v1/{path}", headers={"x-api-key": key.encode()})
        assert (answer.status_code, "error" in answer.json()) == (401, True)


def test_steps_lower_the_loss_and_a_checkpoint_brings_it_back(trained: Trained) -> None:
    before = trained.loss()
    metrics = trained.step()["metrics"]
    assert metrics["skipped"] == 0
    assert metrics["grad_norm"] > 0
    after = trained.loss()
    assert after < before - 1
    saved = trained.do("save_weights", path="here")["path"]
    assert saved == f"tinker://{trained.id}/weights/here"
    trained.step()
    assert trained.loss() < after
    trained.do("load_weights", path=saved, optimizer=True)
    assert trained.loss() == after
    sent = post(trained.client, "load_weights", path=saved, optimizer=False, session_id=trained.session, model_seq_id=7)
    assert result(trained.client, sent)["model_id"] == f"{trained.session}:train:7"
    again = trained.do("save_weights", path="here")
    assert again["category"] == "user"
    assert "overwrite" in again["error"]
    assert trained.do("save_weights", path="here", overwrite=True)["path"] == saved


def test_requests_run_once_and_in_the_order_of_their_numbers(client: TestClient) -> None:
    model = Trained(client)
    before = model.loss()
    base = {"model_id": model.id}
    step = {**base, "seq_id": 4, "adam_params": {"learning_rate": 0.01}}
    late = [post(client, "optim_step", **step) for _ in range(2)]
    assert late[0] == late[1]
    second = post(client, "forward_backward", **base, seq_id=3, **model.forward_backward())
    first = [post(client, "forward_backward", **base, seq_id=2, **model.forward_backward()) for _ in range(3)]
    assert first[0] == first[1] == first[2]
    sums = [result(client, x)["metrics"]["loss:sum"] for x in (first[0], second)]
    assert sums == [before, before]
    assert result(client, late[0])["metrics"]["skipped"] == 0
    assert post(client, "optim_step", **step) == late[0]  # after its end too
    model.number = 4
    assert model.loss() < before
    assert "there is no gradient" in model.do("optim_step", adam_params={})["error"]
    error = post(client, "forward", OURS, 400, **base, seq_id=4, **model.forward_backward())["error"]
    assert "was that of a optim_step" in error
    post(client, "optim_step", OURS, 400, **{**step, "seq_id": 10**6})


def test_a_request_that_waits_is_to_be_asked_for_again(
    client: TestClient, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "POLL_SECONDS", 0.05)
    number = trained.number + 2
    sent = post(client, "forward", model_id=trained.id, seq_id=number, **trained.forward_backward())
    again = post(client, "retrieve_future", OURS, 408, request_id=sent["request_id"])
    assert again == {"type": "try_again", "request_id": sent["request_id"], "queue_state": "active"}
    monkeypatch.undo()
    trained.loss()
    trained.number = number
    assert "metrics" in result(client, sent)


def test_samples_are_of_the_weights_that_were_saved_and_end_with_a_text(client: TestClient, trained: Trained) -> None:
    sampler = trained.do("save_weights_for_sampler", sampling_session_seq_id=3)["sampling_session_id"]

    def sample(number: int, **sampling: Any) -> Any:
        body = {"prompt": {"chunks": [{"tokens": TOKENS}]}, "num_samples": 2, "prompt_logprobs": True}
        params = {"max_tokens": 6, "seed": 1, "stop": [], **sampling}
        sent = post(client, "asample", sampling_session_id=sampler, seq_id=number, sampling_params=params, **body)
        assert len(set(sent["sample_sequence_ids"])) == 2
        return result(client, sent)

    first = sample(0)
    assert [len(x["tokens"]) for x in first["sequences"]] == [6, 6]
    assert first["sequences"][0] != first["sequences"][1]
    trained.step(0.05)
    again = sample(1)
    assert again["sequences"] == first["sequences"]
    now = trained.do("forward", **trained.forward_backward())["loss_fn_outputs"][0]["logprobs"]["data"]
    assert again["prompt_logprobs"][1:] == pytest.approx(first["prompt_logprobs"][1:])
    assert not np.allclose(now, first["prompt_logprobs"][1:], atol=1e-2)
    tokens = first["sequences"][0]["tokens"]
    text = sample(2, stop="".join(chars(tokens[2:4])))["sequences"][0]
    assert (text["tokens"], text["stop_reason"]) == (tokens[:4], "stop")
    assert sample(3, stop=[tokens[1]])["sequences"][0]["tokens"] == tokens[:2]


def test_an_inflight_sampler_has_the_newest_weights_that_were_saved_for_one(client: TestClient) -> None:
    model = Trained(client)

    def sampler(number: int, kind: str) -> str:
        saved: str = model.do("save_weights_for_sampler", sampling_session_seq_id=number, kind=kind)["sampling_session_id"]
        return saved

    def scores(of: str, number: int) -> Any:
        prompt = {"prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {"max_tokens": 1}, "prompt_logprobs": True}
        sent = post(client, "asample", sampling_session_id=of, seq_id=number, **prompt)
        return pytest.approx(result(client, sent)["prompt_logprobs"][1:], abs=1e-5)

    moving, fixed = sampler(0, "inflight"), sampler(1, "snapshot")
    before = scores(moving, 0)
    assert scores(fixed, 0).expected == before
    model.step(0.05)
    assert scores(moving, 1).expected == before  # nothing was saved since
    after = scores(sampler(2, "inflight"), 0)
    assert after.expected != before
    assert (scores(moving, 2).expected, scores(fixed, 1).expected) == (after, before)
    wrong = {"model_id": model.id, "seq_id": 9, "sampling_session_seq_id": 9, "kind": "moving"}
    assert "one of snapshot, inflight" in post(client, "save_weights_for_sampler", OURS, 400, **wrong)["error"]


def test_a_sampler_of_a_checkpoint_that_was_overwritten_answers_for_no_other(client: TestClient) -> None:
    model = Trained(client)

    def saved(**body: Any) -> str:
        path: str = model.do("save_weights_for_sampler", path="same", **body)["path"]
        return path

    def sample(number: int, sampler: int) -> Any:
        made = {"session_id": model.session, "sampling_session_seq_id": sampler, "model_path": path}
        id = post(client, "create_sampling_session", **made)["sampling_session_id"]
        params = {"max_tokens": 4, "seed": 1, "stop": []}
        body = {"prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": params}
        return result(client, post(client, "asample", sampling_session_id=id, seq_id=number, **body))

    path = saved()
    first = sample(0, 0)["sequences"]
    assert sample(1, 0)["sequences"] == first
    model.step(0.05)
    assert saved(overwrite=True) == path
    refused = sample(2, 0)
    assert (refused["category"], "are gone" in refused["error"]) == ("user", True)
    assert sample(0, 1)["sequences"] != first


def test_the_most_likely_and_the_named_tokens_of_a_prompt_have_log_probabilities(client: TestClient, trained: Trained) -> None:
    sampler = trained.do("save_weights_for_sampler", sampling_session_seq_id=4)["sampling_session_id"]
    everything = [*range(44)] * 9
    named = {"data": [-1, *everything[1:]], "dtype": "int64", "shape": [9, 44]}
    sparse = {"data": [5, 7], "dtype": "int64", "shape": [9, 3]}
    sparse |= {"sparse_crow_indices": [0, 0, 1, 1, 1, 1, 1, 1, 1, 2], "sparse_col_indices": [2, 0]}

    def sample(number: int, **body: Any) -> Any:
        params = {"max_tokens": 3, "seed": 1, "stop": []}
        of_prompt = {"prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": params, "prompt_logprobs": True}
        sent = post(client, "asample", **of_prompt, sampling_session_id=sampler, seq_id=number, **body)
        return result(client, sent)

    found = sample(0, topk_prompt_logprobs=3, topk_sample_logprobs=2, target_prompt_logprobs=named)
    table = np.array(found["target_prompt_logprobs"]["data"]).reshape(9, 44)
    assert table[0, 0] == 0
    np.testing.assert_allclose(np.exp(table[1:]).sum(axis=1), 1, atol=1e-5)
    np.testing.assert_allclose(table[range(9), TOKENS[1:]], found["prompt_logprobs"][1:], atol=1e-5)
    table[0, 0] = -np.inf
    order = np.argsort(-table, axis=1)[:, :3]
    top = found["topk_prompt_logprobs"]
    assert top[0] is None
    assert [[token for token, _ in row] for row in top[1:]] == order.tolist()
    np.testing.assert_allclose([[x for _, x in row] for row in top[1:]], np.take_along_axis(table, order, 1), atol=1e-5)
    sequence = found["sequences"][0]
    for token, logprob, row in zip(sequence["tokens"], sequence["logprobs"], sequence["topk_logprobs"], strict=True):
        assert len(row) == 2
        assert row[0][1] >= row[1][1]
        assert logprob <= row[0][1] + 1e-5
        assert dict(map(tuple, row)).get(token, logprob) == pytest.approx(logprob, abs=1e-5)
    few = sample(1, topk_prompt_logprobs=2, prompt_logprobs_last_n=2, target_prompt_logprobs=sparse)
    assert [x is None for x in few["topk_prompt_logprobs"]] == [True] * 8 + [False] * 2
    assert [x is None for x in few["prompt_logprobs"]] == [True] * 8 + [False] * 2
    cells = np.array(few["target_prompt_logprobs"]["data"]).reshape(9, 3)
    assert [cells[1, 2], cells[8, 0]] == pytest.approx([table[1, 5], table[8, 7]], abs=1e-5)
    assert np.count_nonzero(cells) == 2
    body = {"prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {}, "sampling_session_id": sampler}
    for wrong in ({"topk_prompt_logprobs": 65}, {"target_prompt_logprobs": {**named, "shape": [44, 9]}}):
        assert result(client, post(client, "asample", **body, seq_id=10 + len(str(wrong)), **wrong))["category"] == "user"


def chars(tokens: list[int]) -> list[str]:
    return [("<pad>", "<end>", *CHARACTERS)[token] for token in tokens]


def written(loss: str = "cross_entropy", forward_only: bool = True, spans: bytes = b"", **of: Any) -> bytes:
    def array(x: Any, dtype: int, kind: str) -> bytes:
        values = np.array(x)
        return wire.block(1, values.astype(kind).tobytes()) + wire.integer(3, dtype) + wire.integer(4, len(values))

    inputs = wire.entry(2, "target_tokens", wire.block(2, array(TOKENS[1:], 2, "<i8")))
    names = ("weights",) if loss == "cross_entropy" else ("logprobs", "advantages")
    for name in names:
        inputs += wire.entry(2, name, wire.block(2, array([1.0] * 9, 1, "<f4")))
    chunk = wire.block(1, wire.block(1, np.array(TOKENS[:-1], "<i4").tobytes()))
    ids = wire.block(1, of["model_id"]) + wire.integer(2, of["seq_id"])
    return ids + wire.block(3, wire.block(1, chunk) + inputs + spans) + wire.block(4, loss) + wire.integer(6, forward_only)


def test_protocol_buffers_and_json_say_the_same(client: TestClient, trained: Trained) -> None:
    expected = trained.do("forward", **trained.forward_backward())
    trained.number += 1
    body = written(model_id=trained.id, seq_id=trained.number)
    headers = {"content-type": reading.WIRE, "accept": reading.WIRE}
    sent = client.post("/api/v1/forward_backward", content=body, headers=headers).json()
    answer = client.post("/api/v1/retrieve_future", json={"request_id": sent["request_id"]}, headers=headers)
    assert answer.headers["content-type"] == reading.WIRE
    found = wire.read(answer.content)
    metrics = {name: wire.doubles(pair, 2)[0] for name, pair in wire.entries(found, 3).items()}
    assert metrics == expected["metrics"]
    fields = wire.entries(wire.read(wire.message(found, 2)), 2)
    tensor = wire.read(wire.message(fields["logprobs"], 2))
    logprobs = np.frombuffer(wire.message(tensor, 1), "<f4")
    np.testing.assert_array_equal(logprobs, np.float32(expected["loss_fn_outputs"][0]["logprobs"]["data"]))


def span(field: int, length: int) -> bytes:
    """Of a datum's targets: a run of tokens of a prompt (1), or of sampled ones (2)."""
    return wire.block(4, wire.block(field, wire.block(1, "x") + wire.integer(3, length)))


def test_a_loss_of_samples_counts_the_targets_that_provenance_names_as_sampled() -> None:
    def read(loss: str, spans: bytes) -> Any:
        return datums.read_forward_backward(True, written(loss, spans=spans, model_id="m", seq_id=1), False).datums[0].inputs

    spans = span(1, 3) + span(2, 4) + span(1, 1) + span(2, 1)
    found = read("stable_reinforce", spans)
    assert found["sequence_ratio_mask"][:, 0].tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 1]
    assert set(read("ppo", spans)) == {"logprobs", "advantages"}
    for wrong, why in ((b"", "has no provenance"), (span(2, 8), "the shape [8]"), (span(1, 2**40), "more than")):
        with pytest.raises(UserError, match=re.escape(why)):
            read("stable_reinforce", wrong)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "loss": ({"data": [datum()], "loss_fn": "cross_entrop"}, "did you mean 'cross_entropy'"),
    "config": ({"data": [datum()], "loss_fn": "cross_entropy", "loss_fn_config": {"beta": 1}}, "no setting 'beta'"),
    "inputs": ({"data": [datum()], "loss_fn": "ppo"}, "lacks logprobs"),
    "no data": ({"data": [], "loss_fn": "ppo"}, "no data"),
    "sampled": ({"data": [datum()], "loss_fn": "stable_reinforce"}, "lacks logprobs"),
    "length": ({"data": [datum(TOKENS)], "loss_fn": "cross_entropy"}, "needs a target"),
    "negative": ({"data": [datum([-1, *TOKENS[2:]])], "loss_fn": "cross_entropy"}, "from 0 to"),
    "infinite": ({"data": [datum(weights=[1e39] + [0.0] * 8)], "loss_fn": "cross_entropy"}, "not finite"),
    "text": ({"data": "all", "loss_fn": "cross_entropy"}, "Expected `array`"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_with_data_is_said_at_once(client: TestClient, trained: Trained, name: str) -> None:
    given, why = REFUSED[name]
    body = {"model_id": trained.id, "seq_id": trained.number + 1, "forward_backward_input": given}
    assert why in post(client, "forward_backward", OURS, 400, **body)["error"]


@pytest.mark.parametrize(
    "body", [b"\xff" * 20, b"\x0a\x7fshort", written(model_id="m", seq_id=1)[:-30], b"\x1a\x02\x0a\x00", b"\x08\x01"]
)
def test_bytes_that_are_no_message_are_refused(client: TestClient, body: bytes) -> None:
    answer = client.post("/api/v1/forward_backward", content=body, headers={"content-type": reading.WIRE})
    assert answer.status_code == 400
    assert "error" in answer.json()


def test_bodies_are_bounded_and_not_compressed(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MEGABYTE", 16)
    long = client.post("/api/v1/create_session", content=b"x" * (16 * reading.BODY_MEGABYTES + 1))
    assert (long.status_code, "MiB" in long.json()["error"]) == (413, True)
    packed = client.post("/api/v1/forward", content=b"x", headers={"content-encoding": "zstd"})
    assert packed.status_code == 415


def test_failures_and_strange_requests_have_the_forms_of_the_api(client: TestClient, trained: Trained) -> None:
    outside = trained.do("forward", **trained.forward_backward(datum([63, *TOKENS[2:]])))
    assert outside == {"error": "datum 0 has the token 63, and the model's vocabulary has 44", "category": "user"}
    post(client, "retrieve_future", OURS, 404, request_id="nothing")
    post(client, "create_model", OURS, 400, session_id=trained.session, model_seq_id=1, base_model="another")
    for name in ("../x", ".x", "a/b", "x" * 200, "ä"):
        number = trained.number + 1
        post(client, "save_weights", OURS, 400, model_id=trained.id, seq_id=number, path=name)
    for path in ("tinker://../../x", f"tinker://{trained.id}/../x", "file:///etc", f"tinker://{trained.id}/weights/no"):
        post(client, "weights_info", OURS, 400 if path.count("/") != 4 or ".." in path else 404, tinker_path=path)
    adam = {"model_id": trained.id, "seq_id": trained.number + 1}
    for params in ({"learning_rate": -1}, {"beta1": 2}, {"eps": 0}):
        post(client, "optim_step", OURS, 400, **adam, adam_params=params)
    post(client, "optim_step", OURS, 400, **adam, optimizer_params={"type": "dimuon"})


def test_checkpoints_outlive_the_server_and_expire(
    server: Server, client: TestClient, trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained.do("save_weights", path="long", ttl_seconds=3600, user_metadata={"a": "b"})
    with TestClient(application(server, [OURS]), headers={"x-api-key": OURS}) as other:
        found = {x["tinker_path"]: x for x in other.get("/api/v1/checkpoints").json()["checkpoints"]}
        own = found[f"tinker://{trained.id}/weights/long"]
        assert (own["user_metadata"], own["checkpoint_type"], own["expires_at"] > own["time"]) == ({"a": "b"}, "training", True)
        assert own["size_bytes"] > 1000
        run = other.get(f"/api/v1/training_runs/{trained.id}").json()
        assert (run["base_model"], run["lora_rank"], run["last_checkpoint"]["checkpoint_id"]) == (BASE, 4, "weights/long")
        place = f"/api/v1/training_runs/{trained.id}/checkpoints/weights/long"
        assert other.put(f"{place}/ttl", json={"ttl_seconds": 10}).status_code == 400
        assert other.put(f"{place}/ttl", json={"ttl_seconds": None}).status_code == 200
        about = server.checkpoints / own_place(trained) / "checkpoint.json"
        about.write_text(json.dumps({**json.loads(about.read_text()), "expires": 1.0}))
        assert other.delete(place).status_code == 404
        assert not about.exists()


def own_place(trained: Trained) -> Path:
    return Path(owner_of(OURS)) / trained.id / "weights" / "long"


def test_old_results_make_room_and_are_then_gone(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "MOST_KEPT", 1)
    model = Trained(client)
    first = model.send("forward", **model.forward_backward())
    result(client, first)
    for _ in range(2):
        model.loss()
    post(client, "retrieve_future", OURS, 410, request_id=first["request_id"])


def test_who_waits_for_a_result_while_the_server_ends_is_told_to_ask_again(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Each poll that was cancelled left a traceback, of hundreds that a client may have."""

    async def ended() -> list[httpx.Response]:
        made = application(server, [OURS])
        (account,) = made.state.accounts
        account.futures.start("waiting", "forward", asyncio.Event().wait)
        api = APIServer(made)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/api/v1/retrieve_future"
            serving = asyncio.create_task(api.serve(sockets=[listener]))
            async with httpx.AsyncClient(headers={"x-api-key": OURS}) as client:
                asked = [asyncio.create_task(client.post(url, json={"request_id": "waiting"})) for _ in range(20)]
                while len(api.server_state.tasks) < 20:
                    await asyncio.sleep(0.01)
                api.should_exit = True
                found = await asyncio.gather(*asked)
                await serving
        assert await account.futures.result("waiting", 3600.0) is None  # nor does one wait who asks late
        account.futures.cancel("waiting")
        return found

    for answer in asyncio.run(ended()):
        assert answer.status_code == 408
        assert answer.json() == {"type": "try_again", "request_id": "waiting", "queue_state": "active"}
    assert not caplog.records
