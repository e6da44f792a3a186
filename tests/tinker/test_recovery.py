"""What a server knows again after it was killed: in one process here, with servers and clients of their own in
test_kills.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("areal_x_torch")

import torch
from starlette.testclient import TestClient

from areal_x.errors import UserError
from areal_x.hf import adapters
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.protocols.trainer_config import LoRAConfig, ModelConfig, TrainerConfig
from areal_x.runtime.thread import OneThread
from areal_x.testing.models import write_model
from areal_x.tinker import results, snapshots
from areal_x.tinker.account import Server
from areal_x.tinker.app import application
from areal_x.tinker.checkpoints import heal
from areal_x.tinker.embedded_weights import EmbeddedWeights
from areal_x.tinker.host import TrainerHost
from areal_x.tinker.journal import Journal
from areal_x.tinker.recovery import check_base, recover
from areal_x.tinker.sampling import Samplers
from tests.tinker.test_server import BASE, OURS, TOKENS, Trained, post, result

Killed = Callable[[], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@contextmanager
def serving(
    root: Path, model: Path, teachers: Mapping[str, Path] | None = None, **of: Any
) -> Iterator[tuple[TestClient, Server, Killed]]:
    """Starts a server in a directory. What it gives last kills it: nothing reaches the disk any more."""
    # Of new threads too: a sampler's changed how many processors theirs use, and so the last bits of what one computes.
    torch.set_num_threads(torch.get_num_threads())
    thread = OneThread("tinker")

    def samplers_of(path: Path) -> Samplers:
        host = TrainerHost("torch", TrainerConfig(model=ModelConfig(path=str(path)), row_length=64, **of))
        return Samplers(host, thread, load_tokenizer(path), EmbeddedWeights(host, thread, 4))

    samplers, others = samplers_of(model), {name: samplers_of(path) for name, path in (teachers or {}).items()}
    places = root / "checkpoints", root / "working"
    server = Server(samplers.host, thread, samplers, BASE, *places, Journal(root), others)
    try:
        check_base(server)
        made = application(server, [OURS])
        with TestClient(made) as client:
            client.headers["x-api-key"] = OURS
            for account in made.state.accounts:
                client.portal.call(recover, account)

            def kill() -> None:
                client.portal.call(server.journal._thread.run, server.journal._file.close)
                server.journal._thread.close()
                thread.close()

            yield client, server, kill
            for one in (samplers, *others.values()):
                client.portal.call(one.close)
    finally:
        thread.close()
        server.journal._file.close()


def again(client: TestClient, model: Trained) -> Trained:
    """Returns a model's client at another server."""
    found = object.__new__(Trained)
    found.client, found.session, found.id, found.number = client, model.session, model.id, model.number
    return found


def weights(server: Server, model: Trained, name: str) -> dict[str, np.ndarray]:
    place = server.checkpoints / server_owner(server) / model.id / "weights" / name / "state"
    return dict(adapters.read(place))


def server_owner(server: Server) -> str:
    return next(x.name for x in server.checkpoints.iterdir())


@pytest.mark.parametrize("always", [True, False], ids=["snapshots", "requests"])
def test_a_killed_server_goes_on_with_the_weights_it_would_have_had(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    monkeypatch.setattr(snapshots, "LEAST_SECONDS", 0.0 if always else 1e9)
    monkeypatch.setattr(snapshots, "RATIO", 0.0)
    prompt = {"prompt": {"chunks": [{"tokens": TOKENS}]}, "sampling_params": {"max_tokens": 4, "stop": []}}
    with serving(tmp_path, model) as (client, server, kill):
        reference, killed = Trained(client), Trained(client)
        for _ in range(3):
            reference.step()
        reference.do("save_weights", path="end")
        seen = [killed.step()["metrics"]]
        sampler = killed.do("save_weights_for_sampler", sampling_session_seq_id=0)["sampling_session_id"]
        join = post(client, "join_sampling_session", sampling_session_id=sampler)["client_counter"]
        sent = [post(client, "asample", sampling_session_id=sampler, seq_id=5, **prompt)]
        samples = result(client, sent[0])
        backward = killed.send("forward_backward", **killed.forward_backward())
        terms = result(client, backward)
        step = killed.send("optim_step", adam_params={"learning_rate": 0.01})  # nobody has seen its result
        kill()
    with serving(tmp_path, model) as (client, server, kill):
        killed = again(client, killed)
        late = killed.send("forward_backward", **killed.forward_backward())
        killed.number += 1  # a request that has not come yet
        early = killed.send("save_weights", path="end")
        kill()
    with serving(tmp_path, model) as (client, server, _):
        killed = again(client, killed)
        assert result(client, backward) == terms
        assert seen[0] == result(client, {"request_id": f"{killed.id}:2"})["metrics"]
        assert result(client, step)["metrics"]["skipped"] == 0
        assert "metrics" in result(client, late)
        body = {"model_id": killed.id, "seq_id": killed.number - 1, "adam_params": {"learning_rate": 0.01}}
        for _ in range(2):  # the second is a client's repetition
            result(client, post(client, "optim_step", **body))
        assert result(client, early)["path"].endswith("/end")
        assert result(client, sent[0]) == samples
        assert post(client, "join_sampling_session", sampling_session_id=sampler)["client_counter"] == join + 1
        repeated = post(client, "asample", sampling_session_id=sampler, seq_id=6, **prompt)
        assert len(result(client, repeated)["sequences"][0]["tokens"]) == 4
        expected, found = (weights(server, x, "end") for x in (reference, killed))
        assert all((found[name] == x).all() for name, x in expected.items())  # bit for bit
        assert len(found) == len(expected) > 0
        info = client.get(f"/api/v1/sessions/{killed.session}").json()
        assert info["training_run_ids"] == [killed.id]
        post(client, f"sessions/{killed.session}/finish")
    with serving(tmp_path, model) as (client, server, _):
        post(client, "get_info", OURS, 404, model_id=killed.id)
        post(client, "get_info", model_id=reference.id)
        assert {x.name for x in (tmp_path / "working").glob("*/*")} <= {reference.id}


def test_requests_that_are_computed_again_share_no_pass_with_others(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they had none when their clients trained one after the other."""
    monkeypatch.setattr(snapshots, "LEAST_SECONDS", 1e9)
    with serving(tmp_path, model) as (client, _, kill):
        models = [Trained(client) for _ in range(3)]
        for trained in models:
            for _ in range(2):
                trained.step()
        kill()
    passes = []
    advance = TrainerHost.advance
    monkeypatch.setattr(TrainerHost, "advance", lambda host, portions: passes.append(len(portions)) or advance(host, portions))
    with serving(tmp_path, model) as (client, _, _):
        for trained in models:
            again(client, trained).do("save_weights", path="end")
    assert passes == [1] * 6


def test_a_checkpoint_that_was_loaded_and_deleted_is_not_needed_again(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model) as (client, _, kill):
        own = Trained(client)
        own.step()
        saved = own.do("save_weights", path="x")["path"]
        after = own.loss()
        own.step()
        sent = post(client, "load_weights", path=saved, optimizer=True, session_id=own.session, model_seq_id=1)
        other = result(client, sent)["model_id"]
        place = f"/api/v1/training_runs/{own.id}/checkpoints/weights/x"
        assert client.delete(place).status_code == 200
        kill()
    with serving(tmp_path, model) as (client, _, _):
        assert result(client, sent)["model_id"] == other
        loaded = again(client, own)
        loaded.id, loaded.number = other, 0
        assert loaded.loss() == after


def test_a_save_that_was_done_before_the_kill_is_no_second_one(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model) as (client, server, kill):
        own = Trained(client)
        own.step()
        journal = server.journal
        first = own.do("save_weights", path="x")
        client.portal.call(journal.append, "UPDATE requests SET outcome = NULL, body = ? WHERE id = ?", *unfinished(own))
        client.portal.call(journal.written)
        kill()
    with serving(tmp_path, model) as (client, _, _):
        assert result(client, {"request_id": f"{own.id}:{own.number}"}) == first
        assert "choose another name" in again(client, own).do("save_weights", path="x")["error"]


def unfinished(own: Trained) -> tuple[bytes, str]:
    body = f'{{"model_id": "{own.id}", "seq_id": {own.number}, "path": "x"}}'
    return body.encode(), f"{own.id}:{own.number}"


def test_a_directory_belongs_to_one_server_and_one_base(tmp_path: Path, model: Path) -> None:
    with serving(tmp_path, model) as (client, _, kill):
        Trained(client)
        with pytest.raises(UserError, match="stop the other server"):
            Journal(tmp_path)
        kill()
    with pytest.raises(UserError, match=r"lora.alpha was 32.0 and is 8"), serving(tmp_path, model, lora=LoRAConfig(alpha=8.0)):
        pass


def test_a_directory_that_was_being_replaced_comes_back(tmp_path: Path) -> None:
    (tmp_path / ".x.old").mkdir()
    (tmp_path / ".x.old" / "a").touch()
    heal(tmp_path / "x")
    assert (tmp_path / "x" / "a").exists()
    (tmp_path / ".x.old").mkdir()
    heal(tmp_path / "x")  # the new one is there, the old one was about to be deleted
    assert (tmp_path / "x" / "a").exists()


def test_results_are_the_same_from_the_journal() -> None:
    random = np.random.default_rng(0)
    floats = random.normal(size=(3, 2)).astype(np.float32)
    outputs = [
        {"logprobs": floats[:, 0], "elementwise_loss": floats},
        {"logprobs": floats[:2, 1], "elementwise_loss": floats[:1]},
    ]
    top = results.Top(np.array([[3, 1], [2, -1]], np.int32), np.array([[-1, -2], [-0.5, 0]], np.float32))
    logprobs = np.array([np.nan, -1, -2], np.float32)
    sequence = results.SampledSequence(np.array([4, 5], np.int32), floats[0], True, top)
    cut = results.SampledSequence(np.zeros(0, np.int32), np.zeros(0, np.float32), False)
    sparse = np.array([[0, -1], [-2, 0]], np.float32)
    every = [
        results.plain({"path": "x", "metrics": {"a": 1.5}}),
        results.Failure("no", "user"),
        results.forward_backward(outputs, {"loss:sum": 2.0}),
        results.samples([sequence, cut], results.Scored(logprobs, top, floats[:2])),
        results.samples([cut], results.Scored(named=sparse, sparse=([0, 1, 2], [1, 0]))),
        results.samples([], results.Scored()),
    ]
    for one in every:
        found = results.restored(results.stored(one))
        assert found.json() == one.json()
        assert getattr(found, "wire", None) == getattr(one, "wire", None)
