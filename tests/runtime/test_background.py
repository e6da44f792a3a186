"""Background work that ends unexpectedly ends the run with one sentence, and no background work is started unobserved."""

from __future__ import annotations

import ast
import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_x.engines.embedded import EmbeddedEngine
from areal_x.engines.fleet.supervisor import Supervisor
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.errors import EngineError, UserError
from areal_x.rollout.episode import run_episode
from areal_x.rollout.queue import TrajectoryQueue
from areal_x.rollout.rollout import Rollout
from areal_x.rollout.runner import Runner
from areal_x.run.journal import Journal
from areal_x.runtime import background
from areal_x.runtime import loop as loops
from areal_x.runtime.thread import OneThread
from areal_x.tasks.stream import TaskStream
from areal_x.types import Failed, Trajectory
from areal_x.workflows.learned_reward import RewardModel
from tests.imports import parsed
from tests.rollout.fakes import TASKS, Doing, FakeEngine, Plain

pytestmark = pytest.mark.timeout(60)  # what nobody hears of is waited for for ever

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "areal_x").rglob("*.py"), *(ROOT / "backends").glob("*/areal_x_*/**/*.py")]
HELPER = ROOT / "areal_x" / "runtime" / "background.py"

# ---- every place

EXECUTORS = {  # and who reads what their work comes to
    "areal_x/run/checkpoint.py": "the next save and the end of the run wait for it",
    "areal_x/engines/lanes.py": "each call waits for all lanes",
    "areal_x/workflows/learned_reward.py": "awaited where it is called",
    "areal_x/agents/json_checks/schemas.py": "awaited where it is called",
    "areal_x/runtime/thread.py": "awaited where it is called",
    "areal_x/lab/app.py": "awaited where it is called",
    "areal_x/hf/fp8_weights.py": "each tensor waits for its rows",
    "backends/jax/areal_x_jax/attention_kernels.py": "the next line waits for it",
    "backends/torch/areal_x_torch/sampler.py": "the next line waits for it",
}
LOOPS = {  # run by background.serve
    "areal_x/agents/calling.py",
    "areal_x/cluster/hosts.py",
    "areal_x/rollout/rollout.py",
    "areal_x/runtime/hosts.py",
    "areal_x/runtime/loop.py",
}


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def owner_of(call: ast.Call) -> str:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def holds(node: ast.AST, call: ast.Call) -> bool:
    return any(call is inner for inner in ast.walk(node))


def calls_in(tree: ast.AST) -> list[tuple[ast.Call, list[ast.AST]]]:
    """Each call with the functions around it, the innermost last."""
    found = []

    def look(node: ast.AST, around: list[ast.AST]) -> None:
        if isinstance(node, ast.Call):
            found.append((node, around))
        inner = [*around, node] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else around
        for child in ast.iter_child_nodes(node):
            look(child, inner)

    look(tree, [])
    return found


def is_attended(call: ast.Call, function: ast.AST) -> bool:
    """True if a task belongs to a TaskGroup or is awaited by the function that starts it."""
    nodes = list(ast.walk(function))
    items = [item for node in nodes if isinstance(node, ast.AsyncWith) for item in node.items]
    groups = [ast.unparse(item.optional_vars) for item in items if item.optional_vars and "TaskGroup" in ast.unparse(item)]
    if owner_of(call) in groups:
        return True
    targets = [t for node in nodes if isinstance(node, ast.Assign) and holds(node.value, call) for t in node.targets]
    kept = {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)} - {"self"}
    awaited = [name for node in nodes if isinstance(node, ast.Await) for name in ast.walk(node)]
    return bool(kept & {name.id for name in awaited if isinstance(name, ast.Name)})


def unattended(source: str, file: str) -> list[str]:
    """Each place that begins something whose exception nobody would hear of."""
    tree = parsed(source)
    awaits = [node for node in ast.walk(tree) if isinstance(node, ast.Await)]
    found = []
    for call, around in calls_in(tree):
        match name_of(call):
            case "create_task" | "ensure_future":
                bad = not around or not is_attended(call, around[-1])
            case "Thread" | "Timer":
                bad = owner_of(call) in ("", "threading")
            case "run_in_executor" | "to_thread":
                bad = not any(holds(node, call) for node in awaits)
            case "ThreadPoolExecutor" | "ProcessPoolExecutor":
                bad = file not in EXECUTORS
            case "new_event_loop":
                bad = file not in LOOPS
            case "start_new_thread" | "add_reader" | "add_writer" | "add_signal_handler":
                bad = True
            case _:
                bad = False
        found += [f"{file}:{call.lineno}: {name_of(call)}"] if bad else []
    return found


def test_everything_that_runs_beside_a_run_is_begun_by_the_helper_or_awaited() -> None:
    files = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in SOURCES if file != HELPER}
    assert len(files) > 150
    assert set(EXECUTORS) | LOOPS <= set(files)
    found = [place for file, source in files.items() for place in unattended(source, file)]
    assert found == [], "begin it with areal_x.runtime.background, in a TaskGroup, or await it where it begins"


@pytest.mark.parametrize(
    "source",
    [
        "async def f():\n    asyncio.create_task(g())",
        "async def f(self):\n    self.task = asyncio.create_task(g())\n    await self.other()",
        "async def f():\n    asyncio.get_running_loop().create_task(g())",
        "async def f():\n    task = asyncio.ensure_future(g())\n    await h()",
        "threading.Thread(target=f).start()",
        "Thread(target=f).start()",
        "async def f():\n    loop.run_in_executor(None, g)",
        "pool = ThreadPoolExecutor(2)",
        "loop = asyncio.new_event_loop()",
    ],
)
def test_a_new_bare_one_is_found(source: str) -> None:
    assert len(unattended(source, "areal_x/new.py")) == 1


@pytest.mark.parametrize(
    "source",
    [
        "async def f():\n    async with asyncio.TaskGroup() as tasks:\n        tasks.create_task(g())",
        "async def f():\n    task = asyncio.create_task(g())\n    await asyncio.wait([task])",
        "async def f():\n    await asyncio.to_thread(g)",
        "async def f():\n    a, b = asyncio.ensure_future(g()), asyncio.ensure_future(h())\n    await asyncio.gather(a, b)",
        "async def f():\n    background.start(g(), 'a task')",
    ],
)
def test_one_that_is_attended_is_not(source: str) -> None:
    assert unattended(source, "areal_x/new.py") == []


# ---- each kind, in a run


class Trainer:
    version = 0


async def never(task: Any, engine: Any) -> Any:
    await asyncio.Event().wait()


def ended_with(begin: Callable[[], object]) -> BaseException:
    """The exception of taking groups after `begin` was called on the rollout's loop. Without an error it waits forever."""
    runner = Runner(FakeEngine(), Doing(never), TaskStream(TASKS), TrajectoryQueue(1, 0), group_size=1)
    with Rollout(runner) as rollout:
        rollout.start()
        rollout.publish(Trainer())  # type: ignore[arg-type]
        assert rollout._loop is not None
        rollout._loop.call_soon_threadsafe(begin)
        with pytest.raises((UserError, EngineError)) as raised:
            rollout.take()
        with pytest.raises(type(raised.value)):
            rollout.evaluate(TASKS)
    assert "close" in runner.engine.calls  # type: ignore[attr-defined]
    return raised.value


def broken() -> None:
    raise KeyError("server 2")


async def broken_soon() -> None:
    await asyncio.sleep(0)
    broken()


def exits() -> None:
    raise SystemExit(3)


for function in (broken, exits):
    function.__module__ = "areal_x.tests"  # as a callback of this project's


def finished_with(callback: Callable[..., Any]) -> None:
    future = asyncio.get_running_loop().create_future()
    future.add_done_callback(callback)
    future.set_result(None)


def done(_: Any) -> None:
    broken()


done.__module__ = "areal_x.tests"


@pytest.mark.parametrize(
    "begin",
    [
        lambda: background.start(broken_soon(), "a task"),
        lambda: background.thread(broken, what="a thread", failed=background.on_loop()),
        lambda: asyncio.get_running_loop().call_soon(broken),
        lambda: asyncio.get_running_loop().call_later(0, broken),
        lambda: finished_with(done),
    ],
    ids=["a task", "a thread", "call_soon", "call_later", "add_done_callback"],
)
def test_an_unexpected_end_beside_a_run_ends_it_with_one_sentence(begin: Callable[[], object]) -> None:
    error = ended_with(begin)
    assert isinstance(error, background.Unexpected)
    assert str(error).partition(" ended with ")[2].startswith("KeyError: 'server 2' (test_background.py, line ")
    assert isinstance(error.__cause__, KeyError)


def test_what_is_a_sentence_already_stays_as_it_is() -> None:
    async def refused() -> None:
        raise EngineError("the server died")

    error = ended_with(lambda: background.start(refused(), "a task"))
    assert (type(error), str(error)) == (EngineError, "the server died")


def test_what_would_end_an_event_loop_ends_the_run_and_the_engine_is_closed() -> None:
    error = ended_with(lambda: asyncio.get_running_loop().call_soon(exits))
    assert "SystemExit: 3" in str(error)


def test_a_workflow_that_exits_is_a_failed_episode() -> None:
    async def leaves(task: Any, engine: Any) -> Any:
        exits()

    episode = asyncio.run(run_episode(Doing(leaves), TASKS[0], None, None))  # type: ignore[arg-type]
    assert isinstance(episode.outcome, Failed)
    assert episode.outcome.error.startswith("SystemExit: 3")


def test_tasks_of_others_and_cancelled_ones_end_nothing() -> None:
    """A library's own trouble is for asyncio's handler, as before."""

    async def come_and_go() -> None:
        background.start(asyncio.sleep(60), "a task").cancel()
        lost = asyncio.ensure_future(broken_soon())
        await asyncio.wait([lost])

    runner = Runner(FakeEngine(), Plain(), TaskStream(TASKS), TrajectoryQueue(1, 0), group_size=1)
    with Rollout(runner) as rollout:
        rollout.start()
        rollout.publish(Trainer())  # type: ignore[arg-type]
        rollout._call(come_and_go())
        assert len(rollout.take()) == 1


def test_a_command_on_a_loop_of_its_own_ends_with_it_too() -> None:
    async def waits() -> None:
        background.start(broken_soon(), "the watch")
        await asyncio.Event().wait()

    with pytest.raises(background.Unexpected, match=r"^the watch ended with KeyError: 'server 2'"):
        loops.run(waits(), "test")


# ---- the parts that have such tasks and threads


def test_the_watch_over_servers_ends_the_run() -> None:
    def begin() -> None:
        supervisor = Supervisor(VLLMConfig(), print, *(None,) * 3, lambda: None)  # type: ignore[arg-type]
        supervisor._check_alive = broken_soon  # type: ignore[method-assign]
        supervisor.watch()

    assert str(ended_with(begin)).startswith("the watch over the servers ended with KeyError: 'server 2'")


def test_a_server_that_leaves_during_a_heartbeat_ends_nothing() -> None:
    """Also one whose load is asked for, as limits adapt."""

    async def main() -> None:
        supervisor = Supervisor(VLLMConfig(adaptive=True), print, *(None,) * 3, lambda: None)  # type: ignore[arg-type]
        asked = asyncio.Event()

        class Client:
            async def is_healthy(self, seconds: float) -> bool:
                asked.set()
                await asyncio.sleep(0)
                return True

            async def load_figures(self) -> None: ...

        class Server:
            ours, server, client = False, None, Client()

            def __init__(self, name: str) -> None:
                self.name = name

            def cause_of_death(self) -> None:
                return None

            async def vacate(self) -> None: ...

        for name in ("a", "b"):
            supervisor.add(Server(name))  # type: ignore[arg-type]
            supervisor.fleet.due(1e18)
            supervisor.fleet.reached(name)
            supervisor.fleet.accepted(name, 0, 0.0)
        look = asyncio.ensure_future(supervisor._check_alive())
        await asyncio.sleep(0)  # the heartbeats are made, and have not begun
        await supervisor.remove("a")
        await asked.wait()
        await supervisor.remove("b")  # in the middle of one
        await look
        assert supervisor.fleet.members == {}

    asyncio.run(main())


class Sampler:
    slots, context, supports_images = 2, 32, False

    def load(self, snapshot: Any) -> None: ...


def test_the_embedded_engines_thread_ends_what_waits_for_it_wherever_it_breaks() -> None:
    async def main() -> None:
        engine = EmbeddedEngine(Sampler())  # type: ignore[arg-type]
        engine._has_work = broken  # type: ignore[method-assign, assignment]
        await engine.start()
        with pytest.raises(EngineError, match="the embedded engine's thread ended with KeyError: 'server 2'"):
            await engine.swap(None)  # type: ignore[arg-type]
        await engine.close()

    asyncio.run(main())


def test_what_breaks_a_learned_reward_ends_the_run() -> None:
    def begin() -> None:
        judge = RewardModel(SimpleNamespace(values=None), 8)  # type: ignore[arg-type]
        judge._scores = lambda taken: []  # type: ignore[method-assign]
        nothing = [np.zeros(2, kind) for kind in (np.int32, np.bool_, np.float32, np.int32)]
        scoring = judge.score([Trajectory(*nothing)])
        background.start(scoring, "an episode", failed=lambda _: None)

    assert str(ended_with(begin)).startswith("the learned reward ended with ValueError: zip()")


def test_a_thread_of_blocking_functions_ends_the_run() -> None:
    def begin() -> None:
        OneThread()._put(broken)

    assert str(ended_with(begin)).startswith("the thread areal-x blocking ended with KeyError: 'server 2'")


def test_a_journal_whose_thread_ended_refuses_every_call(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal._urgent = SimpleNamespace(wait=lambda _: broken(), set=lambda: None, clear=lambda: None)  # type: ignore[assignment]
        for _ in range(2):
            with pytest.raises(UserError, match=r"could not be written \(the journal's thread ended with KeyError"):
                journal.flush()


def test_a_thread_tells_its_owner_and_nobody_else() -> None:
    told: list[BaseException] = []
    background.thread(broken, what="the watch over process 1", failed=told.append).join()
    assert str(told[0]).startswith("the watch over process 1 ended with KeyError: 'server 2'")
    assert threading.active_count() >= 1
