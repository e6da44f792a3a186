"""Lists the samples of an inspect-ai task, or evaluates one of them with a model at an address.

Executed by areal_x.agents.package_main in a Python that has inspect-ai. A request has the task, its
arguments, and for a sample also id, scorer, base_url and api_key.
"""

from __future__ import annotations

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


def listed(request: dict[str, Any]) -> list[Any]:
    """Returns the ids of the samples."""
    log = evaluated(request, "mockllm/model", run_samples=False)
    return list(log.eval.dataset.sample_ids)


def play(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the value of a sample's score, and its name. Errors are in `error`."""
    from inspect_ai.model import get_model
    from inspect_ai.scorer import value_to_float

    model = get_model(MODEL, base_url=request["base_url"], api_key=request["api_key"])
    log = evaluated(request, model, sample_id=request["id"], fail_on_error=False)
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


def evaluated(request: dict[str, Any], model: Any, **more: Any) -> Any:
    """Returns the log of an evaluation. Its file is among the temporary ones."""
    from inspect_ai import eval as run

    (log,) = run(
        request["task"],
        model=model,
        task_args=request["arguments"],
        display="none",
        log_dir=tempfile.gettempdir(),
        **QUIET,
        **more,
    )
    return log
