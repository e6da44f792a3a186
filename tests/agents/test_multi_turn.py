"""Multi-turn workflows with real tokenizers, rewards and tools, over scripted engines and a real one."""

import asyncio
import json
from dataclasses import replace

import gin
import numpy as np
import pytest

from areal_x.agents.chat.credit import Credit
from areal_x.agents.multi_turn import MultiTurn, ToolUse
from areal_x.errors import ConfigError, UserError
from areal_x.protocols.engine import Completion, PromptTooLong, SamplingParams
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.runner import Runner
from areal_x.tasks.stream import TaskStream
from areal_x.types import Failed, Scored, Task, TimedOut
from tests.agents.chat.speaking import Says, tokenizer_of
from tests.experiments import tiny_experiment

END = "<|im_end|>"


def exact(task, text):
    return (float(text.split("</think>")[-1].strip() == task.answer), {"length": len(text)})


def says_how_much(task, text):
    return float(text)


def texts(tokenizer, *replies):
    return [tokenizer.encode(reply, add_special_tokens=False) for reply in replies]


class Here:
    """Computes rewards in this process, which needs no time to start."""

    def __init__(self, reward):
        self.reward = reward

    async def score(self, task, text):
        reward = self.reward(task, text)
        return Scored(*reward) if isinstance(reward, tuple) else Scored(reward)

    async def close(self): ...


def run(workflow, tokenizer, engine, task, here=True):
    async def once():
        ready = workflow.setup(tokenizer)
        if here:
            ready = replace(ready, pool=Here(ready.reward))
        try:
            return await ready.run(task, engine)
        finally:
            await ready.close()

    return asyncio.run(once())


def parts(tokenizer, trajectory):
    """Returns the trajectory's text, split alternately into context and trained tokens."""
    edges = np.flatnonzero(np.diff(trajectory.mask)) + 1
    return [tokenizer.decode(part.tolist()) for part in np.split(trajectory.tokens, edges)]


def test_a_wrong_answer_is_followed_by_feedback_and_a_right_one_by_nothing():
    tokenizer = tokenizer_of("qwen25")
    engine = Says(*texts(tokenizer, f"41{END}", f"42{END}", f"never said{END}"))
    task = Task("t", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7"}], "42")
    episode = run(MultiTurn(exact, turns=3, feedback="No."), tokenizer, engine, task)
    assert episode.outcome == Scored(1.0, {"length": 2.0, "tries": 2, "first": 1, "continued": 1, "rewritten": 0, "forked": 0})
    (trajectory,) = episode.trajectories
    assert parts(tokenizer, trajectory) == [
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n6*7<|im_end|>\n<|im_start|>assistant\n",
        f"41{END}",
        "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n",
        f"42{END}",
    ]
    assert trajectory.reward == 1.0
    assert len(engine.replies) == 1


def test_plain_text_goes_on_as_one_text():
    tokenizer = tokenizer_of("qwen25")
    engine = Says(*texts(tokenizer, "41", "42"))
    episode = run(MultiTurn(exact, feedback=". No: "), tokenizer, engine, Task("t", "6*7=", "42"))
    assert parts(tokenizer, episode.trajectories[0]) == ["6*7=", "41", ". No: ", "42"]


def test_feedback_may_be_made_of_what_was_said():
    tokenizer = tokenizer_of("qwen25")
    engine = Says(*texts(tokenizer, "41", "42"))

    def feedback(task, text, reward):
        return f" {text} is worth {reward:g} of {task.answer}. "

    episode = run(MultiTurn(exact, feedback=feedback), tokenizer, engine, Task("t", "6*7=", "42"))
    assert parts(tokenizer, episode.trajectories[0])[2] == " 41 is worth 0 of 42. "


def test_each_try_after_the_first_discounts_the_reward():
    tokenizer = tokenizer_of("qwen25")
    for replies, reward, tries in ((["1"], 1.0, 1), (["0.5", "1"], 0.8, 2), (["0.5", "0.25", "0.5"], 0.5 * 0.64, 3)):
        workflow = MultiTurn(says_how_much, turns=3, discount_turns=0.8, feedback=" ")
        outcome = run(workflow, tokenizer, Says(*texts(tokenizer, *replies)), Task("t", "?")).outcome
        assert outcome.reward == pytest.approx(reward)
        assert outcome.details["tries"] == tries


def test_what_is_enough_may_be_said():
    tokenizer = tokenizer_of("qwen25")
    workflow = MultiTurn(says_how_much, turns=3, enough=0.5)
    assert run(workflow, tokenizer, Says(*texts(tokenizer, "0.5", "1")), Task("t", "?")).outcome.reward == 0.5


def test_the_credit_of_a_workflow_is_its_trajectories():
    tokenizer = tokenizer_of("qwen25")
    made = {}
    for credit in (Credit("last"), Credit("discounted", 0.5), Credit(export="individual")):
        engine = Says(*texts(tokenizer, "41", "42"))
        made[credit] = run(
            MultiTurn(exact, feedback=" no ", credit=credit), tokenizer, engine, Task("t", "?", "42")
        ).trajectories
    last, discounted, individual = made.values()
    assert parts(tokenizer, last[0]) == ["?41 no ", "42"]
    first, second = (t.mask.sum() for t in individual)
    assert discounted[0].credit[discounted[0].mask].tolist() == [0.5] * first + [1.0] * second
    assert [parts(tokenizer, t) for t in individual] == [["?", "41"], ["?41 no ", "42"]]


def test_a_conversation_that_outgrows_the_engine_is_judged_as_far_as_it_came():
    tokenizer = tokenizer_of("qwen25")
    engine = Says(*texts(tokenizer, "41", "42"), context=20)
    episode = run(MultiTurn(exact, feedback=" no" * 20), tokenizer, engine, Task("t", "?", "42"))
    assert episode.outcome.reward == 0.0
    assert episode.outcome.details["tries"] == 1
    with pytest.raises(PromptTooLong, match=r"leaves no room in a context of 3: raise train\.row_length"):
        run(MultiTurn(exact), tokenizer, Says(context=3), Task("t", "what is the sum?"))


def test_what_could_not_be_judged_or_was_aborted_is_the_outcome():
    tokenizer = tokenizer_of("qwen25")

    def hangs(task, text):
        while True:
            pass

    task = Task("t", "?", "42")
    outcome = run(
        MultiTurn(hangs, reward_timeout_seconds=0.2), tokenizer, Says(*texts(tokenizer, "1")), task, here=False
    ).outcome
    assert outcome == TimedOut(0.2)
    for workflow in (MultiTurn(exact), ToolUse(exact)):
        engine = Says(*texts(tokenizer, "1"), finish_reason="abort")
        assert run(workflow, tokenizer, engine, task) == Failed("the engine aborted the request")


SCHEMA = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Weather:
    name, schema = "weather", SCHEMA

    def __init__(self, together=1):
        self.asked, self.together = [], asyncio.Barrier(together)

    async def call(self, arguments):
        self.asked.append(arguments["city"])
        await self.together.wait()
        if arguments["city"] == "Atlantis":
            raise RuntimeError("no such\ncity")
        return f"{arguments['city']}: rain"


def call(name, arguments):
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


TASK = Task("t", [{"role": "user", "content": "the weather in Rome and Paris?"}], "rain")


def test_tools_are_called_together_and_their_results_shown_until_a_reply_calls_none():
    tokenizer = tokenizer_of("qwen25")
    weather = Weather(together=2)
    both = call("weather", {"city": "Rome"}) + "\n" + call("weather", {"city": "Paris"})
    engine = Says(*texts(tokenizer, both + END, f"rain{END}"))
    episode = run(ToolUse(exact, tools=(weather,)), tokenizer, engine, TASK)
    assert episode.outcome.reward == 1.0
    assert (episode.outcome.details["turns"], episode.outcome.details["tool_calls"]) == (2, 2)
    assert sorted(weather.asked) == ["Paris", "Rome"]
    before, called, results, answer = parts(tokenizer, episode.trajectories[0])
    assert json.dumps(SCHEMA) in before
    assert called == both + END
    assert results == (
        "\n<|im_start|>user\n<tool_response>\nRome: rain\n</tool_response>\n<tool_response>\nParis: rain\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert answer == f"rain{END}"


@pytest.mark.parametrize(
    "written, says",
    [
        (call("wether", {"city": "Rome"}), "wether"),
        (call("weather", {"city": "Atlantis"}), "no such city"),
        (call("weather", {"town": "Rome"}), "city"),
        (call("weather", "{broken"), "JSON"),
    ],
)
def test_what_goes_wrong_with_a_call_is_said_to_the_model(written, says):
    tokenizer = tokenizer_of("qwen25")
    engine = Says(*texts(tokenizer, written + END, f"rain{END}"))
    episode = run(ToolUse(exact, tools=(Weather(),)), tokenizer, engine, TASK)
    assert episode.outcome.reward == 1.0
    response = parts(tokenizer, episode.trajectories[0])[2]
    assert says in response.split("<tool_response>\n")[1].split("\n</tool_response>")[0]


def test_a_call_that_is_not_one_is_an_answer():
    tokenizer = tokenizer_of("qwen25")
    engine = Says(*texts(tokenizer, '<tool_call>{"name": "weather"' + END))
    episode = run(ToolUse(exact, tools=(Weather(),)), tokenizer, engine, TASK)
    assert (episode.outcome.reward, episode.outcome.details["turns"]) == (0.0, 1)


def test_after_the_last_turn_no_tool_is_called_and_the_reply_is_judged():
    tokenizer = tokenizer_of("qwen25")
    weather, rome = Weather(), call("weather", {"city": "Rome"})
    engine = Says(*texts(tokenizer, rome + END, rome + END, rome + END))
    episode = run(ToolUse(exact, tools=(weather,), max_turns=2), tokenizer, engine, TASK)
    assert weather.asked == ["Rome"]
    assert (episode.outcome.reward, episode.outcome.details["turns"], episode.outcome.details["tool_calls"]) == (0.0, 2, 1)


def test_reasoning_is_kept_while_tools_answer():
    tokenizer = tokenizer_of("qwen3")
    thought = "<think>\nI look.\n</think>\n\n" + call("weather", {"city": "Rome"}) + END
    engine = Says(*texts(tokenizer, thought, f"<think>\nSo.\n</think>\n\nrain{END}"))
    episode = run(ToolUse(exact, tools=(Weather(),)), tokenizer, engine, TASK)
    assert episode.outcome.reward == 1.0
    assert episode.outcome.details["continued"] == 1
    assert parts(tokenizer, episode.trajectories[0])[1] == thought


def test_calls_that_the_template_refuses_fail_the_episode_and_messages_of_the_task_end_the_run():
    tokenizer = tokenizer_of("llama31")
    two = call("weather", {"city": "Rome"}) * 2
    outcome = run(ToolUse(exact, tools=(Weather(),)), tokenizer, Says(*texts(tokenizer, two)), TASK)
    assert "only supports single tool-calls at once" in outcome.error
    task = Task("t", [{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(UserError, match=r"not .*image"):
        run(ToolUse(exact, tools=(Weather(),)), tokenizer, Says(), task)


def test_variables_of_the_template_reach_it():
    tokenizer = tokenizer_of("qwen3")
    for workflow in (MultiTurn, ToolUse):
        engine = Says(*texts(tokenizer, "rain"))
        run(workflow(exact, template={"enable_thinking": False}), tokenizer, engine, TASK)
        assert tokenizer.decode(engine.prompts[0]).endswith("</think>\n\n")


def test_tools_that_have_to_be_started_are_and_end_with_the_workflow():
    class Station:
        begun, ended = False, False

        async def setup(self):
            self.begun = True
            return [Weather()]

        async def close(self):
            self.ended = self.begun

    tokenizer, station = tokenizer_of("qwen25"), Station()
    engine = Says(*texts(tokenizer, call("weather", {"city": "Rome"}) + END, f"rain{END}"))
    episode = run(ToolUse(exact, tools=(station,)), tokenizer, engine, TASK)
    assert "Rome: rain" in parts(tokenizer, episode.trajectories[0])[2]
    assert station.ended


def test_a_result_too_long_for_the_engine_ends_the_conversation():
    tokenizer = tokenizer_of("qwen25")
    engine = Says(*texts(tokenizer, call("weather", {"city": "Rome" * 200}) + END), context=900)
    episode = run(ToolUse(exact, tools=(Weather(),)), tokenizer, engine, TASK)
    assert episode.outcome.details["turns"] == 1
    assert len(episode.trajectories) == 1


def test_tools_need_a_chat_template(tiny_model_dir):
    from transformers import AutoTokenizer

    with pytest.raises(UserError, match="no chat template"):
        run(ToolUse(exact), AutoTokenizer.from_pretrained(tiny_model_dir), Says(), Task("t", "1+1="))


def test_settings_that_cannot_work_are_refused_by_name():
    with pytest.raises(UserError, match=r"multi_turn\.reward = 3 cannot work"):
        MultiTurn(3)
    with pytest.raises(ConfigError, match=r"multi_turn\.turns = 0"):
        MultiTurn(exact, turns=0)
    with pytest.raises(ConfigError, match=r"multi_turn\.discount_turns = 2"):
        MultiTurn(exact, discount_turns=2)
    with pytest.raises(ConfigError, match=r"tool_use\.max_turns = 0"):
        ToolUse(exact, max_turns=0)
    with pytest.raises(ConfigError, match=r"tool_use\.reward_workers = 0"):
        ToolUse(exact, reward_workers=0)


class Caller:
    """Calls the weather, then repeats the result: depends on the prompt alone, because several episodes run at once."""

    concurrency, context, version = 8, 4000, 3

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    async def generate(self, request):
        await asyncio.sleep(0)
        heard = "<tool_response>" in self.tokenizer.decode(request.tokens.tolist())
        tokens = self.tokenizer.encode(("rain" if heard else call("weather", {"city": "Rome"})) + END)
        return Completion(
            np.asarray(tokens, np.int32), np.full(len(tokens), -1, np.float32), np.full(len(tokens), 3, np.int32), "stop"
        )


def test_a_runner_makes_groups_of_conversations_with_tools():
    tokenizer = tokenizer_of("qwen25")

    async def take():
        workflow = ToolUse(exact, tools=(Weather(),), reward_workers=1).setup(tokenizer)
        stream = TaskStream([TASK], shuffle=False)
        runner = Runner(Caller(tokenizer), workflow, stream, TrajectoryQueue(1, 0, 1), group_size=4)
        runner.begin(3)
        running = asyncio.create_task(runner.run())
        try:
            return await runner.take()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await workflow.close()

    (group,) = asyncio.run(take())
    assert group.rewards == [1.0] * 4
    for episode in group.episodes:
        (trajectory,) = episode.trajectories
        assert parts(tokenizer, trajectory)[1::2] == [call("weather", {"city": "Rome"}) + END, f"rain{END}"]
        assert (trajectory.versions[trajectory.mask] == 3).all()


def ones(task, text):
    return text.count("1") / 8


@pytest.mark.parametrize("export", ["merged", "individual"])
def test_engine_and_trainer_agree_on_every_token_of_several_turns(tiny_model_dir, tmp_path, export):
    sampling = SamplingParams(max_tokens=8)
    workflow = MultiTurn(ones, sampling, reward_workers=1, turns=3, enough=2.0, feedback=" no ", credit=Credit(export=export))
    experiment = tiny_experiment(tiny_model_dir, tmp_path, workflow=workflow, steps=2, row_length=48)
    seen = 0
    for turn in experiment.turns(experiment.open()):
        for group in turn.groups:
            for episode in group.scored:
                assert episode.outcome.details["tries"] == 3
                assert len(episode.trajectories) == (1 if export == "merged" else 3)
                seen += 1
        if turn.groups:
            assert turn.metrics["policy_gap"] <= 1e-4
            assert turn.metrics["ratio"] == pytest.approx(1.0, abs=1e-4)
            assert turn.metrics["reward/tries"] == 3
    assert seen == 2 * 2 * 4


def test_gin_makes_them_with_the_credit_and_sampling_that_it_binds():
    gin.parse_config("credit.how = 'discounted'\ncredit.discount = 0.5\nsampling.max_tokens = 3\ntool_use.max_turns = 2")
    for name, kind in (("multi_turn", MultiTurn), ("tool_use", ToolUse)):
        made = gin.get_configurable(name)(reward=exact)
        assert isinstance(made, kind)
        assert made.credit == Credit("discounted", 0.5)
        assert made.sampling.max_tokens == 3
    assert made.max_turns == 2
