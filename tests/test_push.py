"""Uploads by the real client, to a server of this process that answers as the hub does."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from areal_x import export, push
from areal_x.errors import UserError
from areal_x.hf import model_dir
from tests.test_export import write_adapter

URL = "https://huggingface.co/me/adder"  # the client reads no others


class Hub(ThreadingHTTPServer):
    """The repositories that were created, and the files of each commit, by branch."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.created: list[dict[str, Any]] = []
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refuses = False


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.refuses:
            return self._answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
        path = self.path.removeprefix("/api")
        if path == "/repos/create":
            self.server.created.append(json.loads(body))
            return self._answer({"url": URL, "id": "1", "name": "me/adder"})
        if "/preupload/" in path:  # small files travel inside the commit
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]]
            return self._answer({"files": files})
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.splitlines()]
            values = [line["value"] for line in lines if line["key"] == "file"]
            branch = path.rpartition("/")[2]
            self.server.commits[branch] = {x["path"]: base64.b64decode(x["content"]) for x in values}
            return self._answer({"success": True, "commitUrl": f"{URL}/commit/1", "commitOid": "1" * 40})
        return self._answer({})  # branches, validation of the card

    def do_GET(self) -> None:
        if self.server.refuses:
            return self._answer({"error": "Repository not found"}, 404)
        return self._answer({"id": "me/adder", "sha": "0" * 40, "siblings": [], "type": "user", "name": "me"})

    def _answer(self, answer: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    import huggingface_hub

    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        real, url = huggingface_hub.HfApi, f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: real(endpoint=url, token="hf_key"))
        yield server
        server.shutdown()


def test_a_checkpoint_is_uploaded_as_a_plain_model(hub: Hub, tiny_model_dir: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "trainer", tiny_model_dir)
    export.export(tmp_path / "trainer", tmp_path / "plain")
    address = push.push(tmp_path / "trainer", "me/adder", private=True)
    assert address.endswith("/me/adder")
    assert [(x["name"], x.get("visibility") == "private" or x.get("private")) for x in hub.created] == [("adder", True)]
    assert hub.commits["main"] == {f.name: f.read_bytes() for f in (tmp_path / "plain").iterdir()}  # merged


def test_adapters_are_uploaded_alone_to_a_branch(hub: Hub, tiny_model_dir: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "trainer", tiny_model_dir)
    push.push(tmp_path / "trainer", "me/adder", revision="lora", adapter=True)
    files = set(hub.commits["lora"])
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert not files & {model_dir.MOMENTS, model_dir.STATE, "model.safetensors"}


def test_what_cannot_be_uploaded_is_told_in_a_sentence(
    hub: Hub, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"'adder' is not a repository: name it as OWNER/NAME"):
        push.push(tiny_model_dir, "adder")
    with pytest.raises(UserError, match="whose adapters were merged"):
        push.push(tiny_model_dir, "me/adder", adapter=True)
    hub.refuses = True
    assert push.main([str(tiny_model_dir), "me/adder"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: me/adder was not uploaded: ")
    assert "You don't have the rights" in error
    assert error.count("\n") == 1
