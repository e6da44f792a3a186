"""What the server of the lab answers, and to whom."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import numpy as np
import pytest

pytest.importorskip("starlette")

from starlette.testclient import TestClient

from areal_x.lab import app, main, notes
from areal_x.lab import index as indexing
from areal_x.lab.app import STATIC, Lab, application
from areal_x.run.journal import FILE, Journal
from areal_x.run.token_record import TokenRecord
from areal_x.types import Kept, Trajectory
from tests.conftest import environment_with
from tests.lab.journals import FAILED, HOSTILE, LATE, answer, group, scored, write_journal, write_metrics, write_tokenizer

KEY = "the-key"
HOST = "127.0.0.1:1"
ROUTES = [
    "",
    "static/app.js",
    "api/runs",
    "api/runs/run",
    "api/runs/run/metrics",
    "api/runs/run/trajectories",
    "api/runs/run/notes",
]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(indexing, "REFRESH_SECONDS", 0.0)
    run = tmp_path / "runs" / "run"
    attempts = [scored("the answer is 42", 1.0), scored(HOSTILE, 0.0), FAILED, LATE]
    write_journal(run, [group(0, attempts), group(1, [scored("no", 0.5, version=3)], task=HOSTILE)], [[0]])
    write_tokenizer(run / "checkpoints" / "2" / "trainer")
    (run / "config.gin").write_text("train.steps = 5\ntrain.algorithm = @grpo()\n")
    write_metrics(run, [{"step": i, "reward": i / 10, "seconds": 2.0, "wait_seconds": 0.5} for i in range(1, 4)])
    return tmp_path / "runs"


@pytest.fixture
def client(place: Path) -> Iterator[TestClient]:
    lab = Lab(place)
    yield TestClient(application(lab, KEY, lambda: {HOST}), base_url=f"http://{HOST}/{KEY}/")
    lab.close()


def read(client: TestClient, path: str, **parameters: Any) -> Any:
    answer = client.get(path, params=parameters or None)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("route", ROUTES)
def test_no_route_answers_without_the_key_or_to_another_host_or_page(client, route):
    assert client.get(route).status_code == 200
    for path in (f"/{route}", f"/wrong/{route}", f"/{KEY}x/{route}"):
        refused = client.get(f"http://{HOST}{path}")
        assert (refused.status_code, "run" in refused.text) == (403, False), path
    for host in ("evil.example:1", "127.0.0.1:2", ""):
        assert client.get(route, headers={"host": host}).status_code == 421
    assert client.get(route, headers={"origin": "http://evil.example"}).status_code == 403
    assert client.get(route, headers={"origin": f"http://{HOST}"}).status_code == 200


@pytest.mark.parametrize("route", [*ROUTES, "api/nothing", "static/nothing"])
def test_every_answer_forbids_scripts_and_requests_elsewhere(client, route):
    headers = client.get(route).headers
    assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize("name", ["%2e%2e", "%2e", "%2e%2e%2fruns%2frun", "run%2f%2e%2e%2frun", "/etc", "%2fetc", "run%00"])
def test_only_runs_of_the_folder_and_files_of_the_page_are_served(client, name):
    for path in (f"api/runs/{name}", f"api/runs/{name}/notes", f"static/{name}"):
        assert client.get(f"http://{HOST}/{KEY}/{path}").status_code == 404


def test_the_assets_need_no_other_host_and_never_parse_a_string_as_markup():
    markup = ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "srcdoc", "eval(", "Function("]
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8")
        hosts = set(re.findall(r"https?://[^\"' )]+", text)) - {"http://www.w3.org/2000/svg"}
        assert hosts == set(), file.name
        if file.suffix == ".js":
            assert [word for word in markup if word in text] == [], file.name
        if file.suffix == ".html":
            assert re.findall(r"\son\w+=|style=|<script(?! type=\"module\" src=\"static/)", text) == []
            assert set(re.findall(r'(?:src|href)="static/([^"]+)"', text)) <= {f.name for f in STATIC.iterdir()}


def test_the_overview_has_what_the_files_have(client):
    (listed,) = read(client, "api/runs")["runs"]
    assert (listed["name"], listed["state"], listed["step"], listed["steps"]) == ("run", "stopped", 3, 5)
    found = read(client, "api/runs/run")
    assert found["phases"] == {"wait_seconds": 0.25, "logprob_seconds": 0, "update_seconds": 0, "publish_seconds": 0}
    assert found["outcomes"] == {"scored": 3, "failed": 1, "timed_out": 1}
    assert found["algorithm"] == "@grpo()"
    assert found["checkpoints"] == [2]


def test_a_run_is_running_while_its_lock_is_held_and_finished_after_its_last_step(client, place):
    from areal_x.run import run_dir

    run_dir._lock(place / "run")
    assert read(client, "api/runs")["runs"][0]["state"] == "running"
    run_dir._locked.pop((place / "run").resolve() / run_dir.LOCK).close()
    (place / "run" / "checkpoints" / "5").mkdir()
    assert read(client, "api/runs")["runs"][0]["state"] == "finished"


def test_a_run_that_begins_later_is_found_and_one_that_is_deleted_is_not(client, place):
    write_metrics(place / "later", [{"step": 0}])
    assert {run["name"] for run in read(client, "api/runs")["runs"]} == {"run", "later"}
    (place / "later" / "metrics.jsonl").unlink()
    assert {run["name"] for run in read(client, "api/runs")["runs"]} == {"run"}


def test_curves_are_means_of_their_rows_with_low_and_high(client, place):
    rows = [{"step": i, "x": float(i % 7), "seconds": 1.0} for i in range(100)]
    write_metrics(place / "long", rows)
    with (place / "long" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 100, "x": NaN}\n[1]\nnot json\n{"step": 101, "x": 3')
    curve = read(client, "api/runs/long/metrics", key="x", points=10)["curves"]["x"]
    parts = np.array([row["x"] for row in rows]).reshape(10, 10)
    assert curve["value"] == pytest.approx(parts.mean(1).tolist())
    assert curve["low"] == parts.min(1).tolist()
    assert curve["high"] == parts.max(1).tolist()
    assert curve["step"] == list(range(9, 100, 10))
    assert curve["seconds"] == list(range(10, 101, 10))
    with (place / "long" / "metrics.jsonl").open("a") as file:
        file.write(".5}\n")  # the end of the torn line
    assert read(client, "api/runs/long/metrics", key="x")["curves"]["x"]["value"][-1] == 3.5
    assert read(client, "api/runs/long")["damaged_rows"] == 2


def test_a_list_of_runs_reads_long_metrics_in_several_answers(client, place, monkeypatch):
    write_metrics(place / "long", [{"step": i, "reward": 0.5} for i in range(10)])
    monkeypatch.setattr(app, "LIST_SECONDS", -1.0)
    assert {run["complete"] for run in read(client, "api/runs")["runs"]} == {False}
    monkeypatch.setattr(app, "LIST_SECONDS", 60.0)
    assert {run["name"]: (run["step"], run["complete"]) for run in read(client, "api/runs")["runs"]} == {
        "run": (3, True),
        "long": (9, True),
    }


def test_a_file_of_metrics_that_a_resumed_run_rewrote_is_read_again(client, place):
    assert read(client, "api/runs/run/metrics", key="reward")["curves"]["reward"]["step"] == [1, 2, 3]
    write_metrics(place / "new", [{"step": 1, "reward": 0.9}])
    (place / "new" / "metrics.jsonl").replace(place / "run" / "metrics.jsonl")
    assert read(client, "api/runs/run/metrics", key="reward")["curves"]["reward"]["value"] == [0.9]


def test_trajectories_are_filtered_and_read_token_by_token(client):
    found = read(client, "api/runs/run/trajectories", outcome="scored", order="-reward")
    assert [(row["ticket"], row["reward"]) for row in found["rows"]] == [(0, 1.0), (1, 0.5), (0, 0.0)]
    tokens = read(client, "api/runs/run/groups/0/0", begin=3, count=4)
    assert tokens["pieces"] == [":", " ", "t", "h"]
    assert tokens["mask"] == [False, False, True, True]
    assert tokens["logprobs"] == pytest.approx([0, 0, -0.1, -0.2])
    assert tokens["versions"] == [-1, -1, 0, 0]
    assert (tokens["begin"], tokens["end"], tokens["length"]) == (3, 7, 21)
    assert set(tokens["lacking"]) == {"advantages", "trainer_logprobs", "entropies"}
    assert "journal.token_share" in tokens["lacking"]["advantages"]
    assert not tokens.keys() & {"credit", "token_rewards", "kept", "advantages", "trainer_logprobs", "entropies"}
    assert "no step has trained" in read(client, "api/runs/run/groups/1/0")["lacking"]["advantages"]


def test_what_training_made_of_tokens_is_shown_where_it_was_recorded(client, place):
    run = place / "trained"
    write_journal(run, [group(i, [scored("yes", 1.0), FAILED, scored("no", 0.0)]) for i in range(3)], [[2, 1]])
    logprobs = np.arange(5, dtype=np.float32) / 7
    record = TokenRecord(logprobs=logprobs, advantages=np.array([1, 1, 1, -1, -1], np.float32))
    with Journal(run) as journal:
        journal.trained(1, {1: record})
        journal.trained(7, {2: record})  # of a step that a resumed run took again
    found = read(client, "api/runs/trained/trajectories", recorded="yes", order="oldest")
    assert [(row["ticket"], row["episode"]) for row in found["rows"]] == [(1, 0), (1, 1), (1, 2)]
    tokens = read(client, "api/runs/trained/groups/1/1", begin=4)
    assert tokens["advantages"] == [None, -1.0, -1.0]
    assert tokens["trainer_logprobs"] == [None, *logprobs[3:].tolist()]
    assert set(tokens["lacking"]) == {"entropies"}
    assert read(client, "api/runs/trained/groups/2/0")["lacking"].keys() == {"advantages", "trainer_logprobs", "entropies"}
    with sqlite3.connect(run / FILE) as connection:
        connection.execute("UPDATE trained SET content = x'05000000'")
    connection.close()
    assert "damaged" in read(client, "api/runs/trained/groups/1/0")["lacking"]["advantages"]
    with sqlite3.connect(run / FILE) as connection:
        connection.execute("DROP TABLE trained")  # as in a journal of an earlier version
    connection.close()
    assert "recorded for a share" in read(client, "api/runs/trained/groups/1/0")["lacking"]["advantages"]
    (place / "trained" / ".lock").touch()
    totals = [read(client, "api/runs/trained/trajectories", recorded="yes")["total"] for _ in range(3)]
    assert totals[-1] == 0


def test_every_array_that_a_trajectory_has_is_shown(client, place):
    plain = answer("yes", 1.0)
    kept = Kept(np.array([0] * 5 + [2, 0, 1], np.int32), np.array([ord("y"), 5, ord("s")], np.int32))
    numbers = np.linspace(0, 1, 8, dtype=np.float32)
    arrays = {"token_rewards": numbers, "credit": 1 - numbers, "kept": kept}
    whole = Trajectory(plain.tokens, plain.mask, plain.logprobs, plain.versions, reward=1.0, **arrays)
    episode = scored("", 1.0)
    write_journal(place / "all", [group(0, [type(episode)(episode.outcome, (whole,))])])
    found = read(client, "api/runs/all/groups/0/0")
    assert found["credit"] == pytest.approx((1 - numbers).tolist())
    assert found["token_rewards"] == pytest.approx(numbers.tolist())
    assert found["kept"] == [0] * 5 + [2, 0, 1]
    assert found["pieces"] is None  # its tokenizer is nowhere
    assert "--tokenizer" in found["no_text"]


def test_texts_of_models_arrive_as_they_are(client):
    found = read(client, "api/runs/run/groups/0")
    assert found["episodes"][1]["trajectories"][0]["answer"] == {"text": HOSTILE, "whole": True}
    assert found["episodes"][2]["error"] == FAILED.outcome.error
    assert read(client, "api/runs/run/failures")["failures"][0]["traceback"] == FAILED.outcome.traceback
    assert read(client, "api/runs/run/trajectories", ticket=1)["rows"][0]["task"] == HOSTILE
    pieces = read(client, "api/runs/run/groups/0/1")["pieces"]
    assert "".join(pieces) == "ask: " + HOSTILE


def test_a_huge_text_is_served_in_parts(client, place):
    write_journal(place / "huge", [group(0, [scored("x" * 50_000, 1.0)])])
    write_tokenizer(place / "huge" / "checkpoints" / "1" / "trainer")
    answered = read(client, "api/runs/huge/groups/0")["episodes"][0]["trajectories"][0]["answer"]
    assert (len(answered["text"]), answered["whole"]) == (4000, False)
    assert len(read(client, "api/runs/huge/groups/0/0", count=10**9)["ids"]) == 4000
    assert len(read(client, "api/runs/huge/previews", of="0.0,0.9,7.0")["texts"][0]) == 60


@pytest.mark.parametrize(
    "path, wanted",
    [
        ("trajectories?reward_min=x", "reward_min = 'x' must be a number"),
        ("trajectories?step_min=1.5", "step_min = '1.5' must be a whole number"),
        ("trajectories?begin=-1", "out of range"),
        ("trajectories?order=rewards", "did you mean 'reward'"),
        ("search?text=", "1 to 1000 characters"),
        ("groups/99", "no finished group 99"),
        ("groups/0/9", "no trajectory 9"),
        ("previews?of=a.b", "TICKET.NUMBER"),
    ],
)
def test_a_wrong_question_gets_a_sentence(client, path, wanted):
    refused = client.get(f"api/runs/run/{path}")
    assert refused.status_code == 400
    assert wanted in refused.json()["error"]


def test_a_damaged_group_gets_a_sentence_and_the_others_are_served(client, place):
    with sqlite3.connect(place / "run" / FILE) as connection:
        connection.execute("UPDATE groups SET content = x'05000000' WHERE ticket = 0")
    connection.close()
    assert "damaged" in client.get("api/runs/run/groups/0").json()["error"]
    assert read(client, "api/runs/run/trajectories")["unreadable"] == 1
    assert read(client, "api/runs/run/groups/1")["mean"] == 0.5


def test_a_resumed_run_is_indexed_anew(client, place):
    assert read(client, "api/runs/run/trajectories")["total"] == 5
    os.utime(place / "run" / ".lock", ns=(1, 1))
    with Journal(place / "run") as journal:
        journal.admitted(group(1, ()), 1)  # taken back, and in flight again
    found = [read(client, "api/runs/run/trajectories")["total"] for _ in range(3)]
    assert found[-1] == 4


def test_settings_of_two_runs_are_compared(client, place):
    write_metrics(place / "other", [])
    (place / "other" / "config.gin").write_text("train.steps = 7\noptimizer.learning_rate = 0.1\n")
    rows = {row["name"]: (row["a"], row["b"]) for row in read(client, "api/runs/run/settings", **{"with": "other"})["settings"]}
    assert rows == {"train.steps": ("5", "7"), "optimizer.learning_rate": (None, "0.1"), "train.algorithm": ("@grpo()", None)}
    (place / "other" / "config.gin").write_text("train.steps = = 7")
    assert "cannot be read" in read(client, "api/runs/other/settings")["error"]


def test_notes_are_written_whole_and_never_over_somebody_elses(client, place):
    empty = read(client, "api/runs/run/notes")
    first = client.put("api/runs/run/notes", content=json.dumps({"text": HOSTILE, "version": empty["version"]}))
    assert first.status_code == 200
    assert (place / "run" / notes.FILE).read_bytes() == HOSTILE.encode()
    late = client.put("api/runs/run/notes", content=json.dumps({"text": "mine", "version": empty["version"]}))
    assert late.status_code == 409
    assert read(client, "api/runs/run/notes") == {"text": HOSTILE, "version": first.json()["version"]}
    for body in (b"", b"[]", b'{"text": 1}', b"\xff"):
        assert client.put("api/runs/run/notes", content=body).status_code == 400
    huge = json.dumps({"text": "x" * (notes.MOST_BYTES + 1), "version": first.json()["version"]})
    assert client.put("api/runs/run/notes", content=huge).status_code == 400
    assert client.put("api/runs/run/notes", content=huge, headers={"origin": "http://evil.example"}).status_code == 403
    assert sorted(p.name for p in (place / "run").glob("notes*")) == [notes.FILE]


def test_looking_writes_nothing_into_the_run(client, place):
    before = {p: p.stat().st_mtime_ns for p in place.rglob("*") if p.is_file()}
    for path in ("", "/trajectories", "/failures", "/groups/0", "/groups/0/0", "/search?text=a", "/settings", "/notes"):
        read(client, f"api/runs/run{path}")
    assert {p: p.stat().st_mtime_ns for p in place.rglob("*") if p.is_file()} == before


def test_a_folder_that_is_gone_gets_a_sentence(client, place):
    place.rename(place.with_name("elsewhere"))
    refused = client.get("api/runs")
    assert refused.status_code == 500
    assert "cannot be read" in refused.json()["error"]


def test_more_requests_than_can_wait_are_refused(client, monkeypatch):
    monkeypatch.setattr(app, "MOST_WAITING", 0)
    assert client.get("api/runs").status_code == 503


def test_the_command_serves_the_address_that_it_prints_until_it_is_interrupted(place, tmp_path, capsys):
    command = [sys.executable, "-u", "-m", "areal_x.lab", str(place)]
    with subprocess.Popen(command, env=environment_with(1), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        with urlopen(f"{address}api/runs/run") as answer:
            assert json.load(answer)["outcomes"]["scored"] == 3
        with pytest.raises(HTTPError, match="403"):
            urlopen(address.rsplit("/", 2)[0] + "/api/runs")
        port = int(address.split(":")[2].split("/")[0])
        assert main([str(place), "--port", str(port)]) == 1
        assert f"port {port} cannot be served" in capsys.readouterr().err
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0
    assert main([str(tmp_path / "nowhere")]) == 1
    assert main([str(place), "--tokenizer", str(tmp_path)]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1][:12] for line in errors] == [" there is no"] * 2
