"""No child of a run that executes code of others sees the token of its Ray cluster or the key of its servers."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_x.agents.external_program import inherited_environment, run_program
from areal_x.agents.tools.mcp_tools import McpServer
from areal_x.agents.tools.terminal import Shell
from areal_x.agents.tools.toolbox import Toolbox
from areal_x.rewards.pool import RewardPool
from areal_x.sandbox.folder import Folder, sandbox_for
from areal_x.sandbox.pool import Sandbox, SandboxLimits
from areal_x.types import Scored, Task
from tests.rewards import reward_functions as rewards

CREDENTIALS = ("RAY_AUTH_TOKEN", "VLLM_API_KEY")
SHOW = "import os; print(sorted(os.environ))"
TASK = Task("t", "p")


async def of_a_reward(_: Path) -> str:
    pool = RewardPool(rewards.variables, workers=1)
    try:
        outcome = await pool.score(TASK, "")
    finally:
        await pool.close()
    assert isinstance(outcome, Scored), outcome
    assert "SEARCH_KEY" in outcome.details  # a reward may ask a service
    return " ".join(outcome.details)


async def of_a_program_in_the_sandbox(_: Path) -> str:
    sandbox = Sandbox(SandboxLimits(), workers=1)
    try:
        return (await sandbox.run(SHOW)).output
    finally:
        await sandbox.close()


async def of_a_shell_command(_: Path) -> str:
    limits = SandboxLimits()
    sandbox = sandbox_for(limits, 1.0, workers=1)
    try:
        return await Shell(Folder(sandbox, limits, {})).call({"command": "env"})
    finally:
        await sandbox.close()


async def of_an_agents_program(folder: Path) -> str:
    shown = folder / "shown"
    code = f"import os; open({str(shown)!r}, 'w').write(' '.join(os.environ))"
    await run_program([sys.executable, "-c", code], TASK, inherited_environment(()), str(folder), 1000, 64)
    return shown.read_text()


async def of_an_mcp_server(_: Path) -> str:
    pytest.importorskip("mcp")
    script = Path(__file__).parents[1] / "agents" / "tools" / "mcp_server_script.py"
    toolbox = Toolbox([McpServer((sys.executable, str(script)))])
    try:
        await toolbox.setup()
        names = [*CREDENTIALS, "PATH"]
        values = [await toolbox.call("environment", json.dumps({"name": name})) for name in names]
    finally:
        await toolbox.close()
    return " ".join(name for name, value in zip(names, values, strict=True) if value != "nothing")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
@pytest.mark.parametrize(
    "child", [of_a_reward, of_a_program_in_the_sandbox, of_a_shell_command, of_an_agents_program, of_an_mcp_server]
)
def test_a_child_does_not_see_the_runs_credentials(
    child: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*CREDENTIALS, "SEARCH_KEY"):
        monkeypatch.setenv(name, "a secret")
    seen = asyncio.run(child(tmp_path))  # type: ignore[arg-type]
    assert "PATH" in seen  # it is the environment
    assert [name for name in CREDENTIALS if name in seen] == []
