"""Records in the form of SWE-bench as tasks on repositories."""

from __future__ import annotations

import json
from typing import Any

import pytest

from areal_x.tasks.swe import read_swe, swebench_task

PATCH = """diff --git a/tests/test_app.py b/tests/test_app.py
--- a/tests/test_app.py
+++ b/tests/test_app.py
@@ -1 +1,2 @@
 import app
+assert app
diff --git a/tests/new.py b/tests/new.py
new file mode 100644
--- /dev/null
+++ b/tests/new.py
@@ -0,0 +1 @@
+x = 1
"""
RECORD = {
    "instance_id": "Pallets__flask-1",
    "repo": "pallets/flask",
    "base_commit": "3e1d7f",
    "problem_statement": "It breaks.",
    "patch": "the solution",
    "hints_text": "look there",
    "test_patch": PATCH,
    "FAIL_TO_PASS": json.dumps(["tests/test_app.py::test_new"]),
    "PASS_TO_PASS": json.dumps(["tests/test_app.py::test_old"]),
    "version": "2.0",
}


def test_a_record_becomes_a_task_whose_hidden_tests_are_named() -> None:
    task = swebench_task(RECORD, "0")
    read = read_swe(task)
    assert (task.id, task.prompt) == ("Pallets__flask-1", "It breaks.")
    assert read.image == "swebench/sweb.eval.x86_64.pallets_1776_flask-1:latest"
    assert (read.repository, read.directory, read.commit, read.patch) == (None, "/testbed", "3e1d7f", PATCH)
    assert read.hidden_paths() == ["tests/new.py", "tests/test_app.py"]
    (test,) = read.tests
    assert test.passes == ("tests/test_app.py::test_new", "tests/test_app.py::test_old")
    assert test.command[-2:] == ("tests/new.py", "tests/test_app.py")
    assert "the solution" not in repr(task)
    assert "look there" not in repr(task)


def test_siblings_of_the_benchmark_have_lists_and_images_of_their_own() -> None:
    lists = {"FAIL_TO_PASS": ["a::b"], "PASS_TO_PASS": [], "image_name": "mine:1"}
    assert read_swe(swebench_task({**RECORD, **lists}, "0")).image == "mine:1"
    assert read_swe(swebench_task({**RECORD, "docker_image": "other:2"}, "0")).image == "other:2"
    local: Any = read_swe(swebench_task(RECORD, "0", repositories="repos"))
    assert (local.repository, local.image, local.directory) == ("repos/pallets__flask", None, "repository")
    unnamed = {name: x for name, x in RECORD.items() if name != "instance_id"}
    assert swebench_task(unnamed, "7").id == "7"


def test_a_record_without_tests_is_refused() -> None:
    with pytest.raises(ValueError, match="no FAIL_TO_PASS and no PASS_TO_PASS"):
        swebench_task({**RECORD, "FAIL_TO_PASS": "[]", "PASS_TO_PASS": ""}, "0")
