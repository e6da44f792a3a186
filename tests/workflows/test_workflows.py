"""single_turn with a real tokenizer and real reward processes; only the engine is a fake."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import Completion, SamplingParams
from areal_x.protocols.workflow import Workflow
from areal_x.types import Failed, Scored, Task, TimedOut
from areal_x.workflows.single_turn import SingleTurn, encode
from tests.rollout.fakes import FakeEngine

TEMPLATE = "{% for m in messages %}{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}a>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


class Says(FakeEngine):
    """Completes every prompt with the same text and the end token."""

    def __init__(self, tokenizer, text, finish_reason="stop"):
        super().__init__()
        self.version = 3
        self.tokens = np.asarray([*tokenizer.encode(text), tokenizer.eos_token_id], np.int32)
        self.finish_reason = finish_reason

    async def generate(self, request):
        self.requests.append(request)
        n = len(self.tokens)
        return Completion(self.tokens, -np.arange(n, dtype=np.float32), np.full(n, self.version, np.int32), self.finish_reason)


def says_the_answer(task, text):
    return (1.0, {"length": len(text)}) if text == task.answer else 0.0


def run(workflow, tokenizer, engine, task):
    async def once():
        ready = workflow.setup(tokenizer)
        try:
            return await ready.run(task, engine)
        finally:
            await ready.close()

    return asyncio.run(once())


def test_an_episode_is_the_prompt_and_the_completion_scored_by_its_text(tokenizer):
    engine = Says(tokenizer, "42")
    episode = run(SingleTurn(says_the_answer), tokenizer, engine, Task("t", "6+7=", "42"))
    assert episode.outcome == Scored(1.0, {"length": 2.0})
    (trajectory,) = episode.trajectories
    assert tokenizer.decode(trajectory.tokens) == "6+7=42<end>"
    assert trajectory.mask.tolist() == [False] * 4 + [True] * 3
    assert trajectory.logprobs.tolist() == [0, 0, 0, 0, 0, -1, -2]
    assert trajectory.versions.tolist() == [-1] * 4 + [3] * 3
    assert (trajectory.reward, trajectory.finish_reason) == (1.0, "stop")


def test_the_engine_is_asked_for_the_prompts_tokens_and_to_stop_at_the_end_token(tokenizer):
    engine = Says(tokenizer, "1")
    run(SingleTurn(says_the_answer, SamplingParams(max_tokens=9, stop_token_ids=(7,))), tokenizer, engine, Task("t", "6+7="))
    (request,) = engine.requests
    assert request.tokens.dtype == np.int32
    assert tokenizer.decode(request.tokens) == "6+7="
    assert request.sampling == SamplingParams(max_tokens=9, stop_token_ids=(7, tokenizer.eos_token_id))


def test_greedy_changes_the_temperature_alone_and_judges_with_the_same_processes(tokenizer):
    ready = SingleTurn(says_the_answer, SamplingParams(temperature=0.7, top_p=0.9)).setup(tokenizer)
    assert ready.greedy() == replace(ready, sampling=replace(ready.sampling, temperature=0.0))
    assert ready.greedy().pool is ready.pool


def test_messages_go_through_the_chat_template_with_the_assistants_turn_opened(tokenizer):
    tokenizer.chat_template = TEMPLATE
    try:
        tokens = encode(tokenizer, [{"role": "system", "content": "s"}, {"role": "user", "content": "1+2"}])
    finally:
        tokenizer.chat_template = None
    assert tokenizer.decode(tokens) == "s>1+2>a>"


def test_messages_without_a_chat_template_are_a_users_error(tokenizer):
    with pytest.raises(UserError, match="no chat template"):
        encode(tokenizer, [{"role": "user", "content": "1"}])


def test_a_tokenizer_without_an_end_token_is_refused(tokenizer):
    class Endless:
        eos_token_id = None
        name_or_path = "some/model"

    with pytest.raises(UserError, match="some/model has no end token"):
        SingleTurn(says_the_answer).setup(Endless())


def test_what_the_reward_could_not_score_is_its_outcome(tokenizer):
    def nan(task, text):
        return float("nan")

    def hangs(task, text):
        while True:
            pass

    task = Task("t", "1+1=")
    assert run(SingleTurn(nan), tokenizer, Says(tokenizer, "2"), task) == Failed(
        "ValueError: the reward is nan, not a finite number"
    )
    assert run(SingleTurn(hangs, reward_timeout_seconds=0.2), tokenizer, Says(tokenizer, "2"), task) == TimedOut(0.2)


def test_a_request_that_the_engine_aborted_is_a_failure(tokenizer):
    outcome = run(SingleTurn(says_the_answer), tokenizer, Says(tokenizer, "2", "abort"), Task("t", "1+1=", "2"))
    assert outcome == Failed("the engine aborted the request")


def test_settings_that_cannot_work_are_refused_by_name():
    with pytest.raises(UserError, match=r"single_turn\.reward = 3 cannot work: it must be a function"):
        SingleTurn(3)
    with pytest.raises(ConfigError, match=r"single_turn\.reward_workers = 0"):
        SingleTurn(says_the_answer, reward_workers=0)
    with pytest.raises(ConfigError, match=r"single_turn\.reward_timeout_seconds = 0"):
        SingleTurn(says_the_answer, reward_timeout_seconds=0)


def test_a_workflow_of_ones_own_needs_only_run():
    class Mine(Workflow):
        async def run(self, task, engine):
            return Failed("no")

    mine = Mine()
    assert mine.setup(None) is mine
    assert mine.greedy() is mine
    assert asyncio.run(mine.close()) is None
