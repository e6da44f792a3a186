"""Runs the Python code of the documentation as a reader would: each page from its top, in one namespace.

    python -m tests.docs_pages        # prints one line of JSON: an error by page, "" for none

A block whose first line is `# name.py` becomes that file. All pages run in one process, apart from the tests', because they
register configurables with gin.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import os
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
MODULE = re.compile(r"# (\w+)\.py\b.*\n")
NOT_RUN = {  # a line that only this block has, and the reason
    "service = tinker.ServiceClient()": "needs a served model: tests/tinker/test_client.py runs a program of the client",
    "path = client.save_weights_external(": "needs a served model: tests/tinker/test_downloads.py runs a program of the client",
    "with session() as episode:": "needs a served run: tests/test_serve.py and tests/agents/test_online.py run these lines",
    "fork_run(": "needs a run with a checkpoint: tests/run/test_forking.py forks some",
    "token_gradients(algorithm": "needs a turn of a run: colab/loss.ipynb and colab/trajectories.ipynb run these lines",
    'AutoProcessor.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct")': "needs the hub: tests/jax/test_images.py makes a processor",
}
Namespace = dict[str, Any]


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """(line, text) of each block of a language."""
    text = page.read_text(encoding="utf-8")
    return [(text.count("\n", 0, m.start()) + 2, m[2]) for m in BLOCK.finditer(text) if m[1] == language]


def pages(language: str) -> list[Path]:
    return [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if blocks(page, language)]


def write_modules(folder: Path) -> None:
    """Writes the files that pages show, so that other blocks can import them."""
    for page in pages("python"):
        for _, text in blocks(page, "python"):
            if named := MODULE.match(text):
                (folder / f"{named[1]}.py").write_text(text, encoding="utf-8")


# ---- objects that a page assumes


def of_gateway() -> Namespace:
    from openai import OpenAI

    from areal_x.agents.client import Session
    from tests.agents.gateway.scripted import RUN, Letters, Scripted

    def start_agent(base_url: str, key: str) -> threading.Thread:
        def work() -> None:
            with OpenAI(base_url=base_url, api_key=key) as client:
                client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "2+2?"}])
            Session(base_url.removesuffix("/v1"), key).end(1.0)

        agent = threading.Thread(target=work)
        agent.start()
        return agent

    opened = SimpleNamespace(url="http://127.0.0.1:9", base_url="http://127.0.0.1:9/v1", key="key")
    return {"session": opened, "engine": Scripted("4"), "renderer": Letters(), "sampling": RUN, "start_agent": start_agent}


def a_run() -> Namespace:
    """The run runs/arithmetic-grpo-1 with three steps, and an experiment."""
    from areal_x.hf.tokenizer import load_tokenizer
    from areal_x.testing.models import write_model
    from tests.experiments import tiny_experiment

    model = Path("model")
    if not model.is_dir():
        write_model(model)
        first = tiny_experiment(model, Path("runs"), name="arithmetic-grpo-1", steps=3)
        for _ in first.turns(first.open(), message=lambda _: None):
            pass
    experiment = tiny_experiment(model, Path("runs"), name=f"run-{len(list(Path('runs').iterdir()))}", steps=1)
    return {"experiment": experiment, "tokenizer": load_tokenizer(model)}


SETTINGS: dict[str, Callable[[], Namespace]] = {"gateway.md": of_gateway, "journal.md": a_run, "monitoring.md": a_run}


# ---- checks of a page's results


def check_agents(found: Namespace) -> None:
    from dataclasses import replace

    from areal_x.agents.agent import Agent
    from areal_x.agents.tools.toolbox import tool_of
    from areal_x.protocols.engine import SamplingParams
    from areal_x.types import Scored, Task
    from areal_x.workflows.single_turn import with_end
    from tests.agents import test_agent
    from tests.agents.chat.speaking import Says, tokenizer_of

    assert found["hint"](None, "5", 0.0) == "No. It is not 5."
    assert tool_of(found["weather"]).schema["function"]["parameters"]["required"] == ["city"]
    tokenizer = tokenizer_of("qwen25")
    reply = tokenizer.encode("the answer is 42", add_special_tokens=False)

    async def debate() -> Any:
        ready = found["Debate"](reward=longest_answer).setup(tokenizer)
        ready = replace(ready, sampling=with_end(SamplingParams(max_tokens=20), tokenizer))
        try:
            return await ready.run(Task("1", "what is the sum of 12 and 30?"), Says(*[[*reply, tokenizer.eos_token_id]] * 4))
        finally:
            await ready.close()

    episode = asyncio.run(debate())
    assert episode.outcome.reward == len("the answer is 42")
    assert sum(int(t.mask.sum()) for t in episode.trajectories) == 4 * (len(reply) + 1)
    from transformers import AutoTokenizer

    a_run()
    (answered,) = test_agent.run(Agent(solve=found["my_agent"].solve), AutoTokenizer.from_pretrained("model"))
    assert isinstance(answered.outcome, Scored)


def longest_answer(task: Any, text: str) -> float:
    return float(len(text))


def check_extending(found: Namespace) -> None:
    from dataclasses import replace

    import numpy as np

    from areal_x.types import Policy, Task
    from tests.algorithms.test_losses import make
    from tests.experiments import TASKS

    theta, batch = make()
    batch = batch.replace(advantages=np.where(batch.mask, batch.advantages, np.nan))
    terms, _ = found["algorithm"].loss(Policy(logp=theta), batch)
    assert np.isfinite(terms).all()
    assert (terms[~batch.mask] == 0).all()
    assert (terms[batch.mask] != 0).any()
    assert found["exact"](Task("1", "2+2=", "4"), " 4\n") == 1.0
    experiment = a_run()["experiment"]
    tries = replace(found["workflow"], sampling=replace(found["workflow"].sampling, max_tokens=4), reward_workers=1)
    tasks = [replace(task, answer="") for task in TASKS]
    experiment = replace(experiment, dataset=tasks, workflow=tries, row_length=32)
    *_, last = experiment.turns(experiment.open(), message=lambda _: None)
    assert all(len(episode.trajectories) == 2 for group in last.groups for episode in group.scored)
    assert np.isfinite(last.metrics["loss"])


def check_gateway(found: Namespace) -> None:
    from areal_x.types import Scored

    found["agent"].join()
    assert found["outcome"] == Scored(1.0)
    assert len(found["calls"]) == 1


def check_sandbox(found: Namespace) -> None:
    result = found["result"]
    assert (result.output, result.status) == ("42\n", "error")
    assert "ZeroDivisionError: division by zero" in result.error


def check_scale(found: Namespace) -> None:
    assert len(found["rows"]) == 12


def check_journal(found: Namespace) -> None:
    assert len(found["groups"]) == 2
    assert len(found["table"]) >= 3 * 2 * 4


def check_tools(found: Namespace) -> None:
    from areal_x.agents.tools.toolbox import tool_of

    assert set(tool_of(found["weather"]).schema["function"]["parameters"]["properties"]) == {"city", "days"}
    game = found["my_game"]
    played = game.guess()
    first, _ = played.reset(seed=0)
    assert first.startswith("Guess a number")
    assert game.last_number("I say 7, no, 50") == "50"
    assert played.step("50")[0] in ("right", "higher", "lower")


def check_pairs(found: Namespace) -> None:
    assert set(found["my_pairs"].pairs()[0].answer) == {"chosen", "rejected"}


CHECKS = {
    "agents.md": check_agents,
    "extending.md": check_extending,
    "gateway.md": check_gateway,
    "journal.md": check_journal,
    "recipes.md": check_pairs,
    "sandbox.md": check_sandbox,
    "scale.md": check_scale,
    "tools.md": check_tools,
}


# ---- running


def read_through(page: Path, loop: asyncio.AbstractEventLoop) -> Namespace:
    """Runs the blocks of a page in order, as a notebook does, with an event loop for those that await."""
    found: Namespace = {"__name__": "__main__", **SETTINGS.get(page.name, dict)()}
    for line, text in blocks(page, "python"):
        if any(first in text for first in NOT_RUN):
            continue
        if named := MODULE.match(text):
            found[named[1]] = importlib.import_module(named[1])
            continue
        code = compile("\n" * (line - 1) + text, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            loop.run_until_complete(eval(code, found))
        else:
            exec(code, found)
    return found


def problem_of(page: Path) -> str:
    try:
        with closing(asyncio.new_event_loop()) as loop:
            CHECKS.get(page.name, lambda _: None)(read_through(page, loop))
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    os.environ["MPLBACKEND"] = "Agg"
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        write_modules(Path(folder))
        print(json.dumps({page.name: problem_of(page) for page in pages("python")}))
