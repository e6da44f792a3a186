"""The Tinker cookbook's own tests that need a server, against `areal-x tinker` with tiny models and data under the names that
the tests look for.

    TINKER_PYTHON=… python -m benchmarks.tinker_suites tinker_cookbook-0.6.1 [--backend torch] [--only math_rl]

The argument is the unpacked source distribution of the cookbook that TINKER_PYTHON has; the environment needs pytest,
pytest-asyncio and pytest-timeout too. Prints a markdown table. Left out are tests that need images, sandboxes, further packages
or data that is not there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from examples.tinker.world import CHARACTERS, SHAPE, hub_of
from examples.tiny import model as tiny
from tests.tinker.test_client import PYTHON, serving


class Suite(NamedTuple):
    """Tests of one base model. teachers: further models that they sample from."""

    model: str
    teachers: tuple[str, ...]
    files: tuple[str, ...]


SUITES = (
    Suite(
        "Qwen/Qwen3.5-9B-Base",
        ("Qwen/Qwen3.5-9B",),
        (
            "recipes/test_recipe_chat_sl.py",
            "recipes/test_recipe_rolling_checkpoints.py",
            "recipes/test_recipe_dpo.py",
            "recipes/test_recipe_off_policy_reasoning.py",
            "recipes/test_recipe_rlhf_pipeline.py",
            "recipes/test_recipe_on_policy_distillation.py",
        ),
    ),
    Suite(
        "Qwen/Qwen3.5-4B",
        ("Qwen/Qwen3.5-9B",),
        (
            "recipes/test_recipe_math_rl.py",
            "recipes/test_recipe_guess_number.py",
            "recipes/test_recipe_twenty_questions.py",
            "recipes/test_recipe_shorter.py",
            "weights/test_lifecycle.py",
        ),
    ),
    Suite("Qwen/Qwen3-8B", (), ("weights/test_partial_lora_lifecycle.py::TestPartialLoraDense",)),
    Suite(
        "Qwen/Qwen3.5-9B",
        ("Qwen/Qwen3.6-27B", "Qwen/Qwen3.5-397B-A17B"),
        ("recipes/test_recipe_on_policy_multi_teacher.py",),
    ),
)
CONTEXT = 2048
MARKS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>")  # of Qwen's conversations, a token each
UV = '#!/bin/sh\nshift\nexec "$@"\n'  # the tests start recipes by `uv run python`


def write_world(place: Path, names: Sequence[str]) -> None:
    """Writes models of random weights under these names, and the data sets."""
    for seed, name in enumerate(names):
        tiny.write_model(place / name, [*MARKS, *CHARACTERS], seed, **SHAPE, max_position_embeddings=CONTEXT)

    def rows(file: str, content: Sequence[Mapping[str, Any]]) -> None:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text("".join(json.dumps(x) + "\n" for x in content))

    said = {"role": "user", "content": "say ok"}, {"role": "assistant", "content": "ok"}
    asked = "\n\nHuman: two?\n\nAssistant: "
    for split in ("train", "test"):
        rows(f"HuggingFaceH4/no_robots/{split}.jsonl", [{"messages": said}] * (2048 if split == "train" else 32))
        rows(f"Anthropic/hh-rlhf/{split}.jsonl", [{"chosen": asked + "2", "rejected": asked + "3"}] * 640)
    rows("allenai/tulu-3-sft-mixture/train.jsonl", [{"messages": said}] * 64)
    rows("zwhe99/DeepMath-103K/train.jsonl", [{"question": f"What is {i} + 2?"} for i in range(64)])
    talk = [{"from": "human", "value": "say ok"}, {"from": "gpt", "value": "ok"}]
    rows("open-thoughts/OpenThoughts3-1.2M/train.jsonl", [{"conversations": talk}] * 128)


def outcomes(report: Path) -> Iterator[tuple[str, str, float]]:
    """Yields name, outcome and seconds of each test in a report of pytest."""
    for case in ElementTree.parse(report).iter("testcase"):
        failure = next((x for x in case if x.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if failure is None else f"{failure.tag}: {str(failure.get('message')).splitlines()[-1][:100]}"
        yield f"{str(case.get('classname')).removeprefix('tests.')}.{case.get('name')}", outcome, float(case.get("time") or 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cookbook", type=Path)
    parser.add_argument("--backend", default="torch", choices=["torch", "jax"])
    parser.add_argument("--only", default="", help="a part of the tests' file names")
    given = parser.parse_args()
    if PYTHON is None:
        sys.exit("TINKER_PYTHON names no Python with the cookbook")
    cookbook = given.cookbook.resolve()
    print("| test of the cookbook | outcome | seconds |\n|---|---|---|")
    for name, teachers, files in SUITES:
        chosen = [str(cookbook / "tests" / file) for file in files if given.only in file]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            write_world(place, (name, *teachers))
            (place / "bin").mkdir()
            (place / "bin" / "uv").write_text(UV)
            (place / "bin" / "uv").chmod(0o755)
            report = place / "report.xml"
            options = ["--backend", given.backend, "--context", str(CONTEXT), "--slots", "32"]
            options += [x for teacher in teachers for x in ("--teacher", teacher)]
            with serving(place, name, *options) as environment:
                own = {**os.environ, **environment, **hub_of(place), "PYTHONPATH": str(cookbook)}
                own |= {"HOME": directory, "TINKER_COOKBOOK_RUNS_DIR": str(place / "runs"), "TMPDIR": directory}
                own["PATH"] = os.pathsep.join([str(place / "bin"), str(Path(PYTHON).parent), os.environ["PATH"]])
                command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={cookbook}"]
                command += ["-c", str(cookbook / "pyproject.toml"), f"--junitxml={report}", *chosen]
                ran = subprocess.run(command, cwd=place, env=own, capture_output=True, text=True)
            if not report.is_file():
                sys.exit(f"pytest did not run: {(ran.stdout + ran.stderr)[-3000:]}")
            for test, outcome, seconds in outcomes(report):
                print(f"| `{test}` | {outcome} | {seconds:.0f} |", flush=True)
            if ran.returncode:
                print((ran.stdout + ran.stderr)[-6000:], file=sys.stderr)


if __name__ == "__main__":
    main()
