"""Runs samples of an inspect-ai task, in a Python that has the package: lists a task's samples, or
evaluates one of them with a model at an address, and prints the result as JSON on its last line.

Executed as a file, by areal_x.agents.inspect_tasks; needs nothing of this project. Standard input is
a JSON object: task, arguments, and for a sample also sample, base_url, scorer, model_arguments.
INSPECT_KEY holds the key.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

MODEL = "openai-api/areal/policy"  # any server that speaks OpenAI's protocol
QUIET: dict[str, Any] = {
    "log_level": "error",
    "ctl_server": False,
    "epochs": 1,
    "max_tasks": 1,
    "score_display": False,
}


def main() -> None:
    request = json.load(sys.stdin)
    printed = sys.stdout
    sys.stdout = sys.stderr  # of a task, whatever it prints
    with tempfile.TemporaryDirectory(prefix="areal_x_inspect_") as folder:
        result = (evaluate if "sample" in request else samples)(request, folder)
    print(json.dumps(result), file=printed)


def samples(request: dict[str, Any], folder: str) -> dict[str, Any]:
    """Returns the ids of the samples."""
    from inspect_ai import eval as run

    (log,) = run(
        request["task"],
        model="mockllm/model",
        task_args=request["arguments"],
        display="none",
        run_samples=False,
        log_dir=folder,
        **QUIET,
    )
    return {"samples": log.eval.dataset.sample_ids}


def evaluate(request: dict[str, Any], folder: str) -> dict[str, Any]:
    """Returns the value of a sample's score, and its name. Errors are in `error`."""
    from inspect_ai import eval as run
    from inspect_ai.model import get_model
    from inspect_ai.scorer import value_to_float

    model = get_model(MODEL, base_url=request["base_url"], api_key=os.environ["INSPECT_KEY"])
    (log,) = run(
        request["task"],
        model=model,
        task_args=request["arguments"],
        display="none",
        sample_id=request["sample"],
        log_dir=folder,
        fail_on_error=False,
        **QUIET,
    )
    sample = log.samples[0] if log.samples else None
    failed = log.error or (sample and sample.error)
    if sample is None or failed:
        return {"error": failed.message if failed else "no sample was run"}
    scores = sample.scores or {}
    name = request["scorer"] or next(iter(scores), None)
    if name not in scores:
        return {"error": f"no score {name!r}; there are {', '.join(scores) or 'none'}"}
    value = scores[name].value
    values = list(value.values()) if isinstance(value, dict) else [value]
    number = value_to_float()
    return {"score": sum(number(one) for one in values) / len(values), "scorer": name}


if __name__ == "__main__":
    main()
