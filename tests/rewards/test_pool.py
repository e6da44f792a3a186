"""A reward may hang, crash, fork or lie: it costs one episode, and no process is left behind."""

import asyncio
import functools
import importlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import gin
import psutil
import pytest

from areal_x.errors import ConfigError, UserError
from areal_x.rewards.pool import RewardLimits, RewardPool
from areal_x.runtime import guard
from areal_x.types import Failed, Scored, Task, TimedOut
from tests.processes import gone
from tests.rewards import reward_functions as rewards

TASK = Task("t", "p", answer="7")


def processes_of(pool):
    """Every process that the pool is responsible for now."""
    guards = [worker.guard for worker in pool._all] + list(pool._ending)
    found = []
    for one in guards:
        if not gone(one.pid):
            parent = psutil.Process(one.pid)
            found += [parent.pid, *(child.pid for child in parent.children(recursive=True))]
    return found


async def until(condition):
    """Waits for a fact about processes; the test's own time limit is the only clock."""
    while not condition():
        await asyncio.sleep(0.005)


def score(function, text="", task=TASK, **settings):
    """Scores once with a fresh pool, which is closed afterwards and must leave no process behind."""

    async def run():
        pool = RewardPool(function, workers=1, **settings)
        try:
            outcome = await pool.score(task, text)
            started = processes_of(pool)
        finally:
            await pool.close()
        await until(lambda: all(map(gone, started)))
        return outcome

    return asyncio.run(run())


def test_a_number_is_a_score():
    assert score(rewards.length, "four") == Scored(4.0)


def test_a_number_with_details_keeps_them():
    assert score(rewards.with_details) == Scored(0.5, {"format": 1.0, "answer": 0.0})


def test_a_task_arrives_as_it_is_tuples_and_integer_keys_included():
    assert score(rewards.counts_the_answer_type, task=Task("t", "p", ("a", 1), {3: {"x"}})) == Scored(1.0)


@pytest.mark.parametrize(
    "answer, words",
    [
        (float("nan"), "nan, not a finite number"),
        (float("inf"), "inf, not a finite number"),
        ("1.0", "'1.0', not a number"),
        (None, "None, not a number"),
        ((1.0, {"x": "y"}), "the reward's 'x' is 'y', not a number"),
    ],
)
def test_what_is_no_finite_number_is_a_failure_that_says_so(answer, words):
    outcome = score(rewards.given, task=Task("t", "p", answer))
    assert isinstance(outcome, Failed)
    assert words in outcome.error


def test_numbers_of_other_libraries_are_numbers():
    import numpy as np

    assert score(rewards.given, task=Task("t", "p", np.float32(0.25))) == Scored(0.25)
    assert score(rewards.given, task=Task("t", "p", True)) == Scored(1.0)


def test_an_exception_is_a_failure_of_one_line():
    failed = score(rewards.raises)
    where = Path(rewards.__file__)
    line = 1 + where.read_text().splitlines().index('    raise ValueError("no such\\nnumber")')
    shown = where.relative_to(Path.cwd()) if where.is_relative_to(Path.cwd()) else where
    assert failed == Failed(f"ValueError: no such number ({shown}:{line} in raises)")
    assert 'raise ValueError("no such\\nnumber")' in failed.traceback


def test_a_reward_that_exits_is_a_failure():
    assert re.fullmatch(r"SystemExit: 3 \(.*reward_functions\.py:\d+ in exits\)", score(rewards.exits).error)


def test_a_segfault_is_a_failure_that_names_the_signal():
    assert score(rewards.segfaults) == Failed("the reward's process ended: SIGSEGV")


@pytest.mark.parametrize("status", [0, 3, 250])
def test_a_process_that_ends_itself_is_a_failure_that_names_its_status(status):
    outcome = score(rewards.exits_at_once, task=Task("t", "p", status))
    assert outcome == Failed(f"the reward's process ended: exit status {status}")


def test_what_a_reward_prints_cannot_pass_for_its_answer():
    assert score(rewards.prints) == Scored(1.0)


def test_a_reward_has_no_standard_input_to_wait_on():
    assert score(rewards.reads_standard_input) == Scored(1.0)


def test_a_hanging_reward_is_ended_with_its_grandchildren_while_the_loop_goes_on(tmp_path):
    async def run():
        pool = RewardPool(rewards.hangs_with_a_grandchild, workers=1, timeout_seconds=2.0)
        beats = 0
        judged = asyncio.create_task(pool.score(TASK, str(tmp_path)))
        while not judged.done():
            await asyncio.sleep(0)
            beats += 1
        assert await judged == TimedOut(2.0)
        pids = list(map(int, (tmp_path / "pids").read_text().split()))
        assert len(pids) == 2
        await until(lambda: all(map(gone, pids)))
        await pool.close()
        return beats

    assert asyncio.run(run()) > 100


def test_a_reward_that_holds_the_interpreter_is_ended():
    assert score(rewards.hangs_in_c, timeout_seconds=0.3) == TimedOut(0.3)


def test_a_forked_child_ends_with_the_pool(tmp_path):
    assert score(rewards.forks, str(tmp_path / "pid")) == Scored(1.0)
    child = int((tmp_path / "pid").read_text())
    asyncio.run(until(lambda: gone(child)))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_child_that_leaves_its_session_ends_with_the_pool(tmp_path):
    assert score(rewards.forks_and_leaves, str(tmp_path / "pid")) == Scored(1.0)
    child = int((tmp_path / "pid").read_text())
    asyncio.run(until(lambda: gone(child)))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_too_many_processes_are_a_failure_and_all_of_them_end(tmp_path):
    outcome = score(rewards.forks_without_end, str(tmp_path), Task("t", "p", 40), limits=RewardLimits(processes=8))
    assert outcome == Failed("the reward's process ended: it had more than 8 processes (reward_limits.processes)")
    started = [int(path.name) for path in tmp_path.iterdir()]
    assert len(started) >= 7  # beside the reward's process and the one child too many, which may not have begun
    assert all(map(gone, started))


@pytest.mark.parametrize(
    ("reward", "asked", "limits", "words"),
    [
        (rewards.allocates, 400 << 20, RewardLimits(memory_gb=0.3), "MemoryError"),
        (rewards.opens_files, 40, RewardLimits(files=32), "Too many open files"),
        (rewards.writes, 3_000_000, RewardLimits(file_gb=0.002), "File too large"),
    ],
)
def test_what_a_reward_uses_beyond_its_limits_is_a_failure(reward, asked, limits, words, tmp_path):
    task = Task("t", "p", asked)
    outcome = score(reward, str(tmp_path / "file"), task, limits=limits)
    assert isinstance(outcome, Failed)
    assert words in outcome.error
    assert isinstance(score(reward, str(tmp_path / "file"), task), Scored)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize(("reward", "asked"), [(rewards.shares, 600_000_000), (rewards.divides, 110_000_000)])
def test_memory_that_is_shared_and_that_of_several_processes_counts_together(reward, asked, groups):
    settings = {"limits": RewardLimits(memory_gb=0.3), "timeout_seconds": 60, "groups": groups}
    outcome = score(reward, "1000", Task("t", "p", asked), **settings)
    assert outcome == Failed(
        "the reward's process ended: its processes used more than 0.3 GB of memory (reward_limits.memory_gb)"
    )
    assert score(rewards.shares, "", Task("t", "p", 100_000_000), **settings) == Scored(10.0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize("again", ["", "again"])
def test_a_guard_that_a_reward_stops_does_not_keep_the_pool_open(again, monkeypatch):
    monkeypatch.setattr(guard, "END_SECONDS", 1.0)
    assert score(rewards.stops_its_guard, again) == Scored(1.0)  # and no process stays


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_a_reward_reaches_the_network_only_when_it_may(caplog):
    with socket.create_server(("127.0.0.1", 0)) as server:
        task = Task("t", "p", server.getsockname()[1])
        assert score(rewards.connects, task=task, limits=RewardLimits(network=True)) == Scored(1.0)
        found = score(rewards.connects, task=task)
    if "as this machine allows no namespace" in caplog.text:
        assert found == Scored(1.0)
    else:
        assert isinstance(found, Failed)
        assert found.error.startswith("OSError: [Errno 101]") or "unreachable" in found.error


@pytest.mark.parametrize(("name", "value"), [("memory_gb", 0), ("processes", 0), ("files", 3), ("file_gb", -1)])
def test_limits_that_cannot_work_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"reward_limits\.{name}"):
        RewardLimits(**{name: value})


def test_a_new_worker_takes_the_place_of_an_ended_one():
    def sometimes(task, text):
        while text == "hang":
            time.sleep(1000)
        return 2.0

    async def run():
        pool = RewardPool(sometimes, workers=1, timeout_seconds=0.5)
        outcomes = [await pool.score(TASK, text) for text in ("", "hang", "", "")]
        alive = len(pool._all)
        await pool.close()
        return outcomes, alive

    assert asyncio.run(run()) == ([Scored(2.0), TimedOut(0.5), Scored(2.0), Scored(2.0)], 1)


def test_an_idle_worker_is_used_again_and_a_second_is_started_only_for_work_at_the_same_time():
    def process(task, text):
        return os.getpid()

    async def run():
        pool = RewardPool(process, workers=3)
        one_by_one = {(await pool.score(TASK, "")).reward for _ in range(5)}
        await asyncio.gather(*(pool.score(TASK, "") for _ in range(12)))
        started = len(pool._all)
        await pool.close()
        return len(one_by_one), started

    assert asyncio.run(run()) == (1, 3)


def test_a_cancelled_score_ends_its_worker_and_the_next_answer_is_the_right_one():
    def slow_or_length(task, text):
        if text == "slow":
            Path(task.answer).touch()
            time.sleep(1000)
        return len(text)

    async def run(flag):
        pool = RewardPool(slow_or_length, workers=1)
        cancelled = asyncio.create_task(pool.score(Task("t", "p", str(flag)), "slow"))
        await until(flag.exists)
        old = processes_of(pool)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        outcome = await pool.score(TASK, "four")
        await until(lambda: all(map(gone, old)))
        await pool.close()
        return outcome

    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        assert asyncio.run(run(Path(folder) / "started")) == Scored(4.0)


def test_closures_and_partials_travel_by_value():
    scale = 3.0
    assert score(lambda task, text: scale * len(text), "ab") == Scored(6.0)
    assert score(functools.partial(lambda task, text, bonus: bonus, bonus=2.5)) == Scored(2.5)


def test_a_reward_that_cannot_travel_is_a_users_error():
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"cannot be sent to a process of its own .*top level of a module"):
        RewardPool(lambda task, text: lock.locked())


def test_a_reward_that_cannot_be_imported_is_a_users_error(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def reward(task, text):\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = importlib.import_module("only_here").reward
    assert score(reward) == Scored(1.0)  # found through the ring's own sys.path
    (tmp_path / "only_here.py").write_text("import no_such_module")
    with pytest.raises(UserError, match=r"cannot be imported in a process of its own: ModuleNotFoundError.*no_such_module"):
        score(reward)


def test_gin_parameters_reach_the_worker_scoped_ones_too():
    try:
        with gin.unlock_config():
            gin.parse_config("reward_functions.bound_by_gin.scale = 4.0\nstrict/reward_functions.bound_by_gin.scale = 5.0")
        assert score(rewards.bound_by_gin) == Scored(4.0)
        assert score(gin.config.ConfigurableReference("strict/bound_by_gin", False).scoped_configurable_fn) == Scored(5.0)
    finally:
        gin.clear_config()
    assert score(rewards.bound_by_gin) == Scored(1.0)


def test_the_working_directory_is_the_rings():
    assert score(rewards.where, str(Path.cwd())) == Scored(1.0)


def test_a_worker_imports_no_framework():
    assert score(rewards.loaded) == Scored(0.0)


def test_texts_longer_than_any_buffer_arrive_whole():
    assert score(rewards.length, "x" * 3_000_000) == Scored(3_000_000.0)


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="reward_workers = 0"):
        RewardPool(rewards.length, workers=0)
    with pytest.raises(ConfigError, match="reward_timeout_seconds = 0"):
        RewardPool(rewards.length, timeout_seconds=0)


def test_workers_and_their_children_end_when_the_ring_is_killed(tmp_path):
    script = (
        "import asyncio, sys\n"
        "from areal_x.rewards.pool import RewardLimits, RewardPool\n"
        "from areal_x.types import Task\n"
        "from tests.rewards.reward_functions import hangs_with_a_grandchild\n"
        "asyncio.run(RewardPool(hangs_with_a_grandchild, timeout_seconds=1000).score(Task('t', 'p'), sys.argv[1]))\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=root) as ring:
        asyncio.run(until((tmp_path / "pids").exists))
        ring.kill()
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    asyncio.run(until(lambda: all(map(gone, pids))))


def test_a_reward_of_the_script_itself_travels_with_its_gin_parameters(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, gin\n"
        "from areal_x.rewards.pool import RewardLimits, RewardPool\n"
        "from areal_x.types import Task\n"
        "BONUS = 0.5\n"
        "@gin.configurable\n"
        "def reward(task, text, scale=1.0):\n"
        "    return scale * len(text) + BONUS\n"
        "async def run():\n"
        "    pool = RewardPool(reward)\n"
        "    print(await pool.score(Task('t', 'p'), 'ab'))\n"
        "    await pool.close()\n"
        "gin.parse_config('reward.scale = 3.0')\n"
        "asyncio.run(run())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    ran = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(Scored(6.5))
