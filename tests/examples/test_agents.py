"""The arithmetic example through agents: each file can be run, and learns from the very tokens that a workflow would."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import gin
import numpy as np
import pytest

from areal_x.config.reader import load
from areal_x.config.types import check_early, check_experiment
from areal_x.protocols.engine import Completion
from areal_x.rollout.episode import run_episode
from areal_x.rollout.episodes import EpisodeEngine
from examples.arithmetic.model import END, encode, write_model
from examples.arithmetic.task import demonstration

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples" / "agents").glob("*.gin"))


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("adder")
    write_model(directory, 0)
    return AutoTokenizer.from_pretrained(directory)


class Adder:
    """An engine that adds as the tutor does who forgets nothing."""

    concurrency, context, version = 8, 128, 1

    async def generate(self, request):
        task = gin.get_configurable("arithmetic.problems")(1)[0]
        np.testing.assert_array_equal(request.tokens, encode(task.prompt))
        said = np.append(encode(demonstration(task)), END).astype(np.int32)
        return Completion(said, np.full(len(said), -0.25, np.float32), np.ones(len(said), np.int32), "stop")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_can_be_run(file):
    config = load(file, [])
    check_early(config)
    check_experiment(config)


@pytest.mark.parametrize("name", ["openai_client", "agents_sdk", "javascript"])
def test_an_agent_is_trained_on_what_the_workflow_would_be(name, tokenizer):
    pytest.importorskip({"agents_sdk": "agents"}.get(name, "openai"))
    if name == "javascript" and not (shutil.which("node") and (ROOT / "examples" / "agents" / "node_modules").is_dir()):
        pytest.skip("needs node and `npm install --prefix examples/agents`")

    async def episode(file):
        load(file, ["arithmetic.problems.count = 1"])
        experiment = gin.get_configurable("train")()
        workflow = experiment.workflow.setup(tokenizer)
        try:
            view = EpisodeEngine(Adder(), (0,), lambda _: None, lambda _: None)
            return await run_episode(workflow, experiment.dataset[0], view, 60)
        finally:
            await workflow.close()

    of_agent = asyncio.run(episode(f"examples/agents/{name}.gin"))
    of_workflow = asyncio.run(episode("examples/arithmetic/grpo.gin"))
    assert of_agent.outcome.reward == of_workflow.outcome.reward == 1.0
    for a, b in zip(of_agent.trajectories, of_workflow.trajectories, strict=True):
        for part in ("tokens", "mask", "logprobs", "versions"):
            np.testing.assert_array_equal(getattr(a, part), getattr(b, part))
