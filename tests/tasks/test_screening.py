"""Tasks whose prompts are too long are skipped, wherever they are and whenever they are counted."""

import asyncio
import threading
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_x.errors import ConfigError
from areal_x.protocols.engine import SamplingParams
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.runner import Runner
from areal_x.run.journal import Resumed
from areal_x.tasks.screening import MARGIN, Screen, create_screen
from areal_x.tasks.stream import TaskStream
from areal_x.types import Task
from areal_x.workflows.learned_reward import LearnedReward
from areal_x.workflows.single_turn import SingleTurn, encode
from areal_x.workflows.supervised import Demonstrations, PreferencePairs
from tests.rollout.fakes import Doing, FakeEngine, Plain

LONGEST = 12
LENGTHS = [3, 40, 12, 13, 5, 5, 90, 1, 30, 8]
TASKS = [Task(str(i), "1" * length) for i, length in enumerate(LENGTHS)]
FITTING = {str(i) for i, length in enumerate(LENGTHS) if length <= LONGEST}
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}a>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model_dir)


def length(task):
    return len(task.prompt)


def sampled(screen, count, start=0):
    """The ids of the next tasks of a shuffled stream, and its position afterwards."""

    async def draw():
        stream = TaskStream(TASKS, seed=5)
        stream.position = start
        ids = []
        for _ in range(count):
            await screen.skip_long_prompts(stream)
            ids.append(stream.next()[1].id)
        return ids, stream.position

    return asyncio.run(draw())


def test_the_order_of_what_fits_is_that_of_the_stream_whenever_it_is_looked_at():
    stream = TaskStream(TASKS, seed=5)
    expected = [task.id for _, task in (stream.next() for _ in range(60)) if task.id in FITTING][:25]
    scanned, lazily = Screen(length, LONGEST), Screen(length, LONGEST)
    assert scanned.scan(TASKS) == "4 of 10 tasks have prompts longer than 12 tokens and are left out"
    assert sampled(scanned, 25)[0] == expected
    assert sampled(lazily, 25)[0] == expected
    assert scanned.left_out == lazily.left_out > 0


def test_a_resumed_stream_passes_by_the_same_tasks():
    first, position = sampled(Screen(length, LONGEST), 10)
    rest, _ = sampled(Screen(length, LONGEST), 15, start=position)
    assert first + rest == sampled(Screen(length, LONGEST), 25)[0]


def test_where_no_prompt_fits_the_run_ends_with_the_setting():
    with pytest.raises(ConfigError, match=r"train\.longest_prompt = 0 .* greater: all 10 tasks have prompts longer than 0"):
        Screen(length, 0).scan(TASKS)
    with pytest.raises(ConfigError, match=r"train\.longest_prompt = 0 .* greater: all 10 tasks have prompts longer than 0"):
        sampled(Screen(length, 0), 1)


def test_what_there_is_no_time_for_is_looked_at_when_it_is_drawn():
    screen = Screen(length, LONGEST)
    assert screen.scan(TASKS, seconds=-1) is None
    assert set(sampled(screen, 25)[0]) == FITTING


def test_a_long_prompt_is_counted_on_another_thread_and_once():
    threads = []

    def counted(task):
        threads.append(threading.current_thread())
        return len(task.prompt)

    sampled(Screen(counted, LONGEST), 50)
    unsure = [length for length in LENGTHS if length + MARGIN > LONGEST]
    of_tasks = [thread for thread in threads if thread is not threading.main_thread()]
    assert len(of_tasks) == len(unsure)
    assert len(threads) - len(of_tasks) <= 1  # an empty prompt


def test_a_task_that_cannot_be_counted_is_drawn():
    def fails(task):
        raise RuntimeError("no template")

    assert set(sampled(Screen(fails, LONGEST), 25)[0]) == {task.id for task in TASKS}
    assert set(sampled(Screen(lambda task: None, LONGEST), 25)[0]) == {task.id for task in TASKS}
    assert Screen(length, LONGEST).fits(0, Task("odd", [None]))


TEXT = st.text(alphabet="0123456789+=ab ", max_size=30)
PROMPT = TEXT | st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": TEXT}), min_size=1, max_size=3
)


@settings(max_examples=150, deadline=None)
@given(prompts=st.lists(PROMPT, min_size=1, max_size=6), longest=st.integers(1, 60))
def test_what_fits_is_what_the_tokenizer_says(tokenizer, prompts, longest):
    """Also for prompts that fit by their bytes alone."""
    tokenizer.chat_template = TEMPLATE
    workflow = SingleTurn(len, SamplingParams(max_tokens=4))
    screen = create_screen(workflow, tokenizer, longest, 64)
    for index, prompt in enumerate(prompts):
        assert screen.fits(index, Task(str(index), prompt)) == (len(encode(tokenizer, prompt)) <= longest)


def test_a_prompt_far_beyond_the_limit_is_not_tokenised_to_its_end(tokenizer):
    seen = []

    class Counting:
        chat_template = None

        def encode(self, text, **how):
            seen.append(len(text))
            return tokenizer.encode(text, **how)

    screen = create_screen(SingleTurn(len, SamplingParams(max_tokens=4)), Counting(), 40, 64)
    assert not screen.fits(0, Task("0", "1" * 4_000_000))
    assert sum(seen) < 100_000


def test_by_default_there_is_room_for_an_answer_but_no_more_than_half_of_the_context(tokenizer):
    def longest(max_tokens, given=None, workflow=SingleTurn):
        return create_screen(workflow(len, SamplingParams(max_tokens=max_tokens)), tokenizer, given, 64).longest

    assert (longest(16), longest(1000), longest(16, given=3)) == (48, 32, 3)
    assert (
        create_screen(LearnedReward(SingleTurn(len, SamplingParams(max_tokens=16)), "nowhere"), tokenizer, None, 64).longest
        == 48
    )


def test_answers_that_are_written_count(tokenizer):
    task = Task("0", "1+1=", "22")
    assert Demonstrations().tokens_of(task, tokenizer) == 4 + 2 + 1
    pair = Task("0", "1+1=", {"chosen": "2", "rejected": "333"})
    assert PreferencePairs().tokens_of(pair, tokenizer) == 2 * 4 + 2 + 4
    screen = create_screen(PreferencePairs(), tokenizer, None, 13)
    assert not screen.fits(0, pair)
    assert screen.fits(1, Task("1", "1+1=", {"chosen": "2", "rejected": "33"}))


def test_a_workflow_that_makes_prompts_of_its_own_is_left_alone(tokenizer):
    @dataclass(frozen=True)
    class Summarising(SingleTurn):
        async def run(self, task, engine):
            return await super().run(Task(task.id, task.prompt[:10]), engine)

    assert create_screen(Summarising(len), tokenizer, None, 64) is None
    assert create_screen(Doing(None), tokenizer, None, 64) is None


def test_a_runner_never_admits_what_is_too_long_and_counts_it():
    async def run():
        screen = Screen(length, LONGEST)
        stream = TaskStream(TASKS, shuffle=False)
        runner = Runner(FakeEngine(), Plain(), stream, TrajectoryQueue(2, 0), group_size=2, screen=screen)
        runner.begin(0, Resumed(position=3))  # at a long one
        running = asyncio.create_task(runner.run())
        ids = []
        for step in range(1, 5):
            ids += [group.task.id for group in await runner.take()]
            runner.published(step)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return ids, runner.stats().left_out

    ids, left_out = asyncio.run(run())
    assert ids == ["4", "5", "7", "9", "0", "2", "4", "5"]
    assert left_out >= 5
