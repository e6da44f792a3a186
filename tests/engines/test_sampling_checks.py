"""Training samples from the distribution that the trainer computes; a setting that changes it is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from areal_x.agents.environment import Environment
from areal_x.agents.gateway import Gateway
from areal_x.agents.multi_turn import MultiTurn, ToolUse
from areal_x.agents.online import Online
from areal_x.algorithms.recipes import distill, grpo
from areal_x.engines.sampling_checks import LEAST_OF_VLLM, REPORTING, check_distribution, may_truncate
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.errors import ConfigError
from areal_x.experiment import Experiment
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.trainer_config import TrainerConfig
from areal_x.protocols.workflow import Workflow
from areal_x.types import Task
from areal_x.workflows.learned_reward import LearnedReward
from areal_x.workflows.single_turn import SingleTurn


def reward(task: Task, text: str) -> float:
    return 0.0


@dataclass(frozen=True)
class Own(Workflow):
    """A user's workflow."""

    sampling: SamplingParams = field(default_factory=SamplingParams)


class Without(Workflow):
    """A workflow without sampling settings."""


WORKFLOWS: dict[str, Callable[[SamplingParams], Any]] = {
    "single turn": lambda sampling: SingleTurn(reward, sampling),
    "multi turn": lambda sampling: MultiTurn(reward, sampling),
    "tools": lambda sampling: ToolUse(reward, sampling),
    "environment": lambda sampling: Environment(make=lambda: None, sampling=sampling),
    "online": lambda sampling: Online(sampling=sampling),
    "learned reward": lambda sampling: LearnedReward(SingleTurn(reward, sampling), "judge"),
    "own": Own,
}


def experiment(workflow: Any, **changes: Any) -> Experiment:
    return Experiment(dataset=[Task("a", "1")], workflow=workflow, **changes)


@pytest.mark.parametrize("workflow", WORKFLOWS)
@pytest.mark.parametrize("engine", ["embedded", "vllm"])
@pytest.mark.parametrize(
    ("sampling", "sentence"),
    [
        ({"min_p": 1.5}, r"sampling\.min_p = 1\.5 cannot work"),
        ({"temperature": 0.0}, r"sampling\.temperature = 0\.0 cannot work: it must be above 0 in training"),
    ],
)
def test_what_changes_the_distribution_is_refused_in_training(
    workflow: str, engine: str, sampling: dict[str, Any], sentence: str
) -> None:
    experiment(WORKFLOWS[workflow](SamplingParams(temperature=0.7)), engine=engine)
    with pytest.raises(ConfigError, match=sentence):
        experiment(WORKFLOWS[workflow](SamplingParams(**sampling)), engine=engine)


@pytest.mark.parametrize("workflow", WORKFLOWS)
@pytest.mark.parametrize("truncation", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_truncated_sampling_is_for_engines_that_report_what_they_kept(
    workflow: str, truncation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = WORKFLOWS[workflow](SamplingParams(**truncation))
    for engine in REPORTING:
        experiment(cut, engine=engine)
    ((name, value),) = truncation.items()
    with pytest.raises(ConfigError, match=rf"sampling\.{name} = {value} .* 'another', which does not report"):
        check_distribution(cut, "another", 1.0)
    check_distribution(WORKFLOWS[workflow](SamplingParams()), "another", 1.0)


@pytest.mark.parametrize("name", ["reference", "teacher"])
def test_a_server_does_not_score_what_was_sampled_from_some_tokens_alone(name: str) -> None:
    algorithm = grpo(kl_coefficient=0.1) if name == "reference" else distill()
    url: Any = {name: "http://127.0.0.1:8000"}
    experiment(SingleTurn(reward), algorithm=algorithm, **url)
    with pytest.raises(ConfigError, match=rf"train\.{name} = .* a model directory with sampling\.top_p"):
        experiment(SingleTurn(reward, SamplingParams(top_p=0.9)), algorithm=algorithm, **url)


def test_experts_are_not_recorded_beside_kept_tokens() -> None:
    replays: dict[str, Any] = {"engine": "vllm", "trainer": TrainerConfig(replay_experts=True)}
    experiment(SingleTurn(reward), **replays)
    with pytest.raises(ConfigError, match=r"trainer\.replay_experts = True .* False with sampling\.top_p"):
        experiment(SingleTurn(reward, SamplingParams(top_k=9)), **replays)


def test_only_a_workflow_that_declares_whole_distributions_needs_no_report() -> None:
    assert not may_truncate(SingleTurn(reward))
    assert not may_truncate(SingleTurn(reward, SamplingParams(temperature=0.0, top_p=0.5)))
    assert may_truncate(SingleTurn(reward, SamplingParams(min_p=0.5)))
    assert may_truncate(Without())


def test_evaluation_and_serving_may_sample_from_any_distribution() -> None:
    cut = SingleTurn(reward, SamplingParams(top_p=0.9, top_k=5))
    experiment(SingleTurn(reward), evaluation=cut, held_out=[Task("b", "1")])
    experiment(cut, serving=True)
    experiment(Online(gateway=Gateway(sampling="client")), serving=True)


def test_a_trainer_at_another_temperature_than_the_samples_is_refused() -> None:
    for sampled in (1.0, 0.7):
        at = SingleTurn(reward, SamplingParams(temperature=sampled))
        for temperature in (1.0, sampled):  # 1 is what it is where nobody says otherwise
            experiment(at, trainer=TrainerConfig(temperature=temperature))
        with pytest.raises(ConfigError, match=rf"trainer\.temperature = 0\.5 .* sampling\.temperature = {sampled}"):
            experiment(at, trainer=TrainerConfig(temperature=0.5))


@pytest.mark.parametrize("own", [True, False])
def test_a_temperature_that_vllm_would_raise_is_refused_with_vllm_alone(own: bool) -> None:
    def at(temperature: float, **changes: Any) -> None:
        if own:
            experiment(SingleTurn(reward, SamplingParams(temperature=temperature)), **changes)
        else:
            experiment(Without(), trainer=TrainerConfig(temperature=temperature), **changes)

    at(0.005)
    at(0.01, engine="vllm")
    name = "sampling" if own else "trainer"
    with pytest.raises(ConfigError, match=rf"{name}\.temperature = 0\.005 .* at least 0\.01 with train\.engine = 'vllm'"):
        at(0.005, engine="vllm")


def test_the_least_temperature_is_that_of_the_installed_vllm() -> None:
    installed = find_spec("vllm")
    if installed is None or installed.origin is None:
        pytest.skip("no vLLM")
    source = Path(installed.origin).with_name("sampling_params.py").read_text()
    assert [float(least) for least in re.findall(r"^_MAX_TEMP = (\S+)$", source, re.MULTILINE)] == [LEAST_OF_VLLM]


@pytest.mark.parametrize("inside", [True, False])
def test_agents_that_choose_their_own_sampling_are_not_trained_on(inside: bool) -> None:
    workflow: Any = Online(gateway=Gateway(sampling="client"))
    with pytest.raises(ConfigError, match=r"gateway\.sampling = 'client' .* 'run' in training"):
        experiment(LearnedReward(workflow, "judge") if inside else workflow)


@pytest.mark.parametrize(
    "words", [("--logprobs-mode", "raw_logprobs"), ("--logprobs_mode=raw_logits",), ("--logits-processors", "x")]
)
def test_a_servers_command_line_changes_no_log_probability(words: tuple[str, ...]) -> None:
    VLLMConfig(arguments=("--gpu-memory-utilization", "0.4"))
    with pytest.raises(ConfigError, match=r"vllm\.arguments = .* without --log(probs-mode|its-processors), which makes"):
        VLLMConfig(arguments=words)
