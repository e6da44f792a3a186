"""A real SGLang server on a node of a Ray cluster: its keeper starts it, it ends with its keeper, and is placed anew."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from areal_x.engines.sglang import launcher
from areal_x.monitor.metrics import read
from tests.cluster.cluster import HEAD, ROLE, cluster
from tests.cluster.watched import Watched, servers_left
from tests.engines.fleet.test_placed import wait_for
from tests.engines.sglang.conftest import PYTHON
from tests.launching import ONE_RANK, ONLINE, command_of, slow_rewards, started
from tests.processes import lives

pytest.importorskip("ray")
pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(600), pytest.mark.cluster, pytest.mark.sglang]

STEPS = 8
SERVED = f"""
single_turn.reward = @processes_test.slow_ones
single_turn.reward_workers = 1
train.engine = 'sglang'
train.max_staleness = 1
train.steps = {STEPS}
train.algorithm = @grpo()
sglang.python = '{Path(PYTHON).absolute()}'
sglang.concurrency = 8
sglang.heartbeat_seconds = 60
cluster.ranks_on = '{HEAD}'
cluster.servers_on = '{ROLE}'
cluster.server_cpus = 2
"""


def keepers(model: Path) -> set[psutil.Process]:
    """The keepers of this model's servers."""
    parents = {process.parent() for process in servers_left(model)}
    return {parent for parent in parents if parent is not None and "ray::" in " ".join(parent.cmdline())}


def test_a_run_goes_on_when_the_keeper_of_its_server_is_killed(tiny_model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = command_of(tiny_model_dir, folder, ONLINE + SERVED, *ONE_RANK)
    fast = slow_rewards(folder)

    with cluster(2) as ray, started(command, 1, 1, folder, **ray.environment) as (process,):
        watched = Watched(process, folder, 150)
        watched.until(lambda: watched.step() >= 2)  # two swaps
        (keeper,) = keepers(tiny_model_dir)
        family = keeper.children(recursive=True)
        (server,) = (p for p in family if launcher.__file__ in p.cmdline()[:3])
        words = server.cmdline()
        assert words[0] == str(Path(PYTHON).absolute())
        assert words[words.index("--host") + 1] == ray.address.partition(":")[0]
        key = server.environ()[launcher.KEY]
        assert not any(key in word for member in family for word in member.cmdline())
        log = watched.run / "logs" / "sglang-0.log"
        keeper.kill()
        wait_for(lambda: not any(map(lives, family)))
        watched.until(lambda: "is lost" in watched.out())
        watched.until(lambda: "serves again" in watched.out())
        (second,) = keepers(tiny_model_dir)
        family = second.children(recursive=True)
        fast.touch()
        watched.succeeds(120)
        wait_for(lambda: not any(map(lives, family)))
        assert "(secret)" in log.read_text(), "SGLang logs its settings"
        assert key not in log.read_text() + watched.out() + watched.errors()
    rows = read(watched.run)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert not any(row.get("failed") for row in rows)
    assert "quarantined" not in watched.out()
    assert not servers_left(tiny_model_dir)
