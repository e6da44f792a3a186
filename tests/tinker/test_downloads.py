"""Weights that are taken away: what the server gives, and what others compute with it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("areal_x_torch")

from starlette.testclient import TestClient

from areal_x.errors import UserError
from areal_x.testing.models import write_model
from areal_x.tinker import exports
from tests.tinker import test_server
from tests.tinker.test_client import PYTHON, needs_client, serving
from tests.tinker.test_server import BASE, OURS, Trained, post

server, client, trained = test_server.server, test_server.client, test_server.trained
PROGRAM = Path(__file__).parent / "download_program.py"
RECIPIENT = "age1lggyhqrw2nlhcxprm67z43rta597azn8gknawjehu9d9dl0jq3yqqvfafg"  # of age's README


def test_an_export_is_a_peft_directory_and_so_is_an_archive(client: TestClient, trained: Trained) -> None:
    trained.step()
    path = trained.do("save_weights_external", path="one", ttl_seconds=3600)["path"]
    assert path == f"tinker://{trained.id}/external_weights/one"
    place = f"/api/v1/training_runs/{trained.id}/checkpoints"
    found = client.get(f"{place}/external_weights/one/external_weights_urls").json()
    names = set(found["urls"])
    assert names >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert not any("optimizer" in x or "trainer" in x for x in names)
    fetched = {name: TestClient(client.app).get(url) for name, url in found["urls"].items()}
    config = fetched["adapter_config.json"].json()
    assert (config["r"], config["base_model_name_or_path"]) == (4, BASE)
    trained.do("save_weights_for_sampler", path="two")
    moved = client.get(f"{place}/sampler_weights/two/archive", follow_redirects=False)
    assert moved.status_code == 302
    data = TestClient(client.app).get(moved.headers["location"]).content
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert set(tar.getnames()) == names
        weights: Any = tar.extractfile("adapter_model.safetensors")
        assert weights.read() == fetched["adapter_model.safetensors"].content
    refused = client.get(f"{place}/sampler_weights/two/external_weights_urls")
    assert (refused.status_code, "is not external" in refused.json()["error"]) == (400, True)
    expires = client.get(place).json()["checkpoints"][0]["expires_at"]
    assert expires is not None
    again = trained.do("save_weights_external", path="one")
    assert "choose another name" in again["error"]


def test_a_copy_is_a_checkpoint_of_its_own_and_is_made_once(client: TestClient, trained: Trained) -> None:
    path = trained.do("save_weights", path="source")["path"]
    before = trained.loss()
    asked = {"source_path": path, "destination_project_id": "p", "ttl_seconds": 3600}
    headers = {"x-idempotency-key": "one"}
    made = [client.post("/api/v1/copy_weights", json=asked, headers=headers).json()["tinker_path"] for _ in range(2)]
    assert made[0] == made[1] != path
    other = post(client, "copy_weights", **asked)["tinker_path"]
    assert other not in (made[0], path)
    assert client.delete(f"/api/v1/training_runs/{trained.id}/checkpoints/weights/source").status_code == 200
    trained.step()
    assert trained.loss() < before
    trained.do("load_weights", path=other, optimizer=True)
    assert trained.loss() == before
    (listed,) = client.get(f"/api/v1/training_runs/{other.split('/')[2]}/checkpoints").json()["checkpoints"]
    assert (listed["tinker_path"], listed["expires_at"] is None, listed["public"]) == (other, False, False)
    assert post(client, "weights_info", tinker_path=other)["lora_rank"] == 4
    sampled = trained.do("save_weights_for_sampler", path="source")["path"]
    own = post(client, "copy_weights", source_path=sampled, session_id=trained.session, model_seq_id=9)["tinker_path"]
    assert own == f"tinker://{trained.session}:train:9/sampler_weights/source"
    post(client, "copy_weights", OURS, 404, source_path=path)


@pytest.mark.parametrize(
    "text, why",
    [
        (RECIPIENT[:-1] + "h", "is no age recipient"),
        (RECIPIENT.replace("age1", "pge1"), "is no age recipient"),
        ("ssh-ed25519 AAAA", "is no age recipient"),
        ("", "is no age recipient"),
    ],
)
def test_recipients_are_checked_before_anything_is_saved(client: TestClient, trained: Trained, text: str, why: str) -> None:
    pytest.importorskip("cryptography")
    body = {"model_id": trained.id, "seq_id": trained.number + 1, "path": "x", "age_encryption_recipients": [text]}
    assert why in post(client, "save_weights_external", OURS, 400, **body)["error"]


def test_recipients_are_read_and_limited() -> None:
    pytest.importorskip("cryptography")
    assert exports.recipients_of([RECIPIENT, RECIPIENT.upper()])[0] == exports.recipients_of([RECIPIENT])[0]
    with pytest.raises(UserError, match="at most 10"):
        exports.recipients_of([RECIPIENT] * 11)


@needs_client
@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_transformers_and_peft_compute_with_downloads_what_the_server_computes(tmp_path: Path, backend: str) -> None:
    pytest.importorskip(f"areal_x_{backend}")
    assert PYTHON is not None
    if subprocess.run([PYTHON, "-c", "import peft, tinker_cookbook.weights"], capture_output=True).returncode:
        pytest.skip("TINKER_PYTHON has no peft and tinker-cookbook")
    model = str(write_model(tmp_path / "m", num_hidden_layers=2))
    with serving(tmp_path, model, "--backend", backend, "--context", "64", "--slots", "2") as environment:
        clean = {name: x for name, x in environment.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
        command = [PYTHON, str(PROGRAM), model, str(tmp_path)]
        ran = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(next(x for x in ran.stdout.splitlines() if x.startswith("RESULT ")).removeprefix("RESULT "))
    if report := os.environ.get("TINKER_CURVES"):
        Path(report).write_text(json.dumps(found))
    for kind in ("external", "training", "merged"):
        np.testing.assert_allclose(found[kind], found["served"], atol=2e-5)
    assert not np.allclose(found["base"], found["served"], atol=0.1)
    assert found["files of external"] == found["files of training"]
    assert not any("optimizer" in x or ".age" in x for x in found["files of external"])
    assert found["config"] == model
    assert found["types"] == ["external", "sampler", "training"]
    assert found["expiry"] == pytest.approx(7200, abs=5)
    assert (found["public"], found["unknown"]) == ([True], "NotFoundError")
    assert "is no age recipient" in found["recipient"]
