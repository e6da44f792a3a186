"""The lab's token view as a widget of notebooks: its data from a journal, and what its script makes of them (in Node, and in a
browser: make browser)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from areal_x.errors import UserError
from areal_x.lab.token_view import COLOURS, STATIC, newest_group, script, token_view, trajectory_data
from areal_x.run.journal import Journal
from areal_x.run.token_record import TokenRecord
from tests.lab.journals import FAILED, HOSTILE, answer, group, scored, write_journal, write_tokenizer

ADVANTAGES = [-1.0, 0.5, 2.0]
TRAINER = [-0.1, -0.2, 0.1]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Group 3 has what training made of its tokens: the answers "xyz" and "ab"; group 5 is newer and has not."""
    run = tmp_path / "run"
    groups = [
        group(3, [scored("xyz", 1.0, version=2), FAILED, scored("ab", 0.0)], task=HOSTILE),
        group(5, [scored("n" * 3994 + "é" * 503, 1.0)]),  # one of whose characters is on both sides of token 4000
        group(7, [scored("not consumed", 1.0)]),
    ]
    write_journal(run, groups, [[3], [5]])
    with Journal(run) as journal:
        both = [np.array([*x, 0, 0], np.float32) for x in (TRAINER, ADVANTAGES)]
        journal.trained(1, {3: TokenRecord(logprobs=both[0], advantages=both[1])})
    write_tokenizer(run / "checkpoints" / "1" / "trainer")
    return run


def test_its_data_are_the_journals_in_jsons_own_numbers(run):
    data = trajectory_data(run, 3)
    assert data["pieces"] == list("ask: xyz")
    assert data["advantages"] == [None] * 5 + ADVANTAGES
    assert np.allclose(data["trainer_logprobs"][5:], TRAINER)
    assert np.allclose(data["logprobs"][5:], [-0.1, -0.2, -0.3])
    assert data["mask"] == [False] * 5 + [True] * 3
    assert "entropies" in data["lacking"]
    assert json.loads(json.dumps(data, allow_nan=False)) == data


def test_by_default_it_shows_the_newest_group_whose_tokens_were_recorded(run):
    assert newest_group(run) == 3
    with Journal(run) as journal:
        journal.trained(2, {5: TokenRecord(advantages=np.ones(5000, np.float32))})
    assert newest_group(run) == 5


def test_without_records_it_shows_the_newest_group_that_was_consumed(tmp_path):
    write_journal(tmp_path / "run", [group(i, [scored("a", 1.0)]) for i in range(3)], [[0], [1]])
    assert newest_group(tmp_path / "run") == 1
    write_journal(tmp_path / "none", [group(0, [scored("a", 1.0)])])
    with pytest.raises(UserError, match=r"no step of .*none has consumed a group"):
        newest_group(tmp_path / "none")


def test_a_long_trajectory_is_whole(run):
    data = trajectory_data(run, 5)
    assert data["length"] == len(data["ids"]) == len(data["pieces"]) == 5005
    assert data["ids"] == answer("n" * 3994 + "é" * 503, 1.0).tokens.tolist()
    assert "".join(data["pieces"]) == "ask: " + "n" * 3994 + "é" * 503


@pytest.mark.parametrize("arguments", [(4,), (3, 2), (3, -1)])
def test_what_is_not_there_gets_a_sentence(run, arguments):
    with pytest.raises(UserError, match=r"has no (finished group 4|trajectory)"):
        trajectory_data(run, *arguments)


def test_a_wrong_colour_gets_a_sentence(run):
    with pytest.raises(UserError, match="colour = 'loud'"):
        token_view(run, colour="loud")


def test_its_script_is_the_pages_own_and_asks_for_nothing():
    source = script()
    own = (STATIC / "token_view.js").read_text()
    assert own[own.index("function prepare") : own.index("export function tokenFacts")] in source
    assert not re.search(r"^\s*(import|export (?!default))", source, re.MULTILINE)
    assert not re.search(r"\bfetch\(|XMLHttpRequest|WebSocket|url\(|innerHTML", source)
    assert set(re.findall(r"https?://[^\"'\s]*", source)) <= {"http://www.w3.org/2000/svg"}
    table = own[own.index("const COLOURS = {") : own.index("const NEEDS")]
    assert tuple(re.findall(r"^  (\w+): \[", table, re.MULTILINE)) == COLOURS


DOCUMENT = Path(__file__).with_name("document.mjs").read_text()


def in_node(tmp_path: Path, state: dict[str, object], program: str) -> object:
    """What `program` prints, once the widget has drawn `state`."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node")
    (tmp_path / "widget.mjs").write_text(script())
    command = [node, "--input-type=module", "-e", DOCUMENT + program, "--", str(tmp_path / "widget.mjs")]
    done = subprocess.run(command, input=json.dumps(state), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_token_is_coloured_by_the_journals_number(run, tmp_path):
    program = """
    const found = {};
    for (const button of root().querySelectorAll()) { button.listeners.click(); found[button.dataset.colour] = spans(); }
    console.log(JSON.stringify({found, chosen: state.colour}));
    """
    drawn = in_node(tmp_path, {"trajectory": trajectory_data(run, 3), "colour": "advantage"}, program)
    found = drawn["found"]
    assert set(found) == {"logprob", "advantage", "gap", "version", "mask"}
    assert "".join(text for text, *_ in found["mask"]) == "ask: xyz"
    for colour, of_prompt in (("mask", "out"), ("advantage", "out"), ("gap", "out"), ("logprob", "out")):
        assert {kind for _, kind, _ in found[colour][:5]} == {f"t {of_prompt}"}
    assert [kind for _, kind, _ in found["advantage"][5:]] == ["t neg", "t pos", "t pos"]
    assert [float(a) for *_, a in found["advantage"][5:]] == pytest.approx(
        [0.08 + 0.52 * abs(x) / 2 for x in ADVANTAGES], abs=1e-3
    )
    # the trainer's minus the engine's: 0, 0 and 0.4 nats, of ½
    assert [float(a) for *_, a in found["gap"][5:]] == pytest.approx([0.08, 0.08, 0.08 + 0.52 * 0.8], abs=1e-3)
    assert [float(a) for *_, a in found["logprob"][5:]] == pytest.approx(
        [0.08 + 0.52 * x / 4 for x in (0.1, 0.2, 0.3)], abs=1e-3
    )
    assert drawn["chosen"] == "mask"


def test_python_changes_what_is_shown(run, tmp_path):
    other = json.dumps(trajectory_data(run, 3, 1))
    program = f"""
    const first = spans().length;
    set("colour", "mask");
    const masked = spans().map((x) => x[1]);
    set("trajectory", {other});
    console.log(JSON.stringify([first, masked.slice(4, 6), spans().map((x) => x[0]).join("")]));
    """
    state = {"trajectory": trajectory_data(run, 3), "colour": "advantage"}
    assert in_node(tmp_path, state, program) == [8, ["t out", "t pos"], "ask: ab"]


def test_long_ones_are_shown_in_parts(run, tmp_path):
    program = """
    const counts = [spans().length];
    for (let more; (more = find((x) => x.tag === "button" && x.textContent.startsWith("show more"))); ) {
      more.listeners.click();
      await new Promise((done) => setTimeout(done));
      counts.push(spans().length);
    }
    console.log(JSON.stringify(counts));
    """
    assert in_node(tmp_path, {"trajectory": trajectory_data(run, 5), "colour": "logprob"}, program) == [2000, 4000, 5005]


def test_the_widget_has_the_data_and_the_script(run):
    pytest.importorskip("anywidget")
    view = token_view(run, colour="gap")
    assert view.trajectory == trajectory_data(run, 3)
    state = view.get_state()
    assert state["colour"] == "gap"
    assert state["_esm"] == script()


def test_without_anywidget_a_sentence_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "areal_x.lab.widget", raising=False)
    with pytest.raises(UserError, match=r"needs the package anywidget: pip install 'areal-x\[notebook\]'"):
        token_view(run)


WHY = "BROWSER_PYTHON names no interpreter with playwright: make browser"


@pytest.mark.browser
@pytest.mark.skipif("BROWSER_PYTHON" not in os.environ, reason=WHY)
def test_a_browser_shows_it_whatever_the_notebooks_own_styles(run):
    state = {"trajectory": trajectory_data(run, 3), "colour": "logprob"}
    command = [os.environ["BROWSER_PYTHON"], str(Path(__file__).with_name("widget_browser.py"))]
    given = json.dumps({"source": script(), "state": state})
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["problems"] == []
    assert found["text"] == "ask: xyz"
    assert found["backgrounds"] == ["rgba(0, 0, 0, 0)", "rgba(213, 94, 0, 0.494)"]  # 0.08 + 0.52 · 0.8, in 255ths
    assert found["color"] == "rgb(26, 33, 41)"
    read = [x for x in found["read"] if x]
    assert read[read.index("trainer − engine") + 1] == "0.4"
    assert not found["markup"]
