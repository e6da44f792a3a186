"""Tasks chosen by pass rates of a journal."""

from __future__ import annotations

import pytest

from areal_x.errors import ConfigError, UserError
from areal_x.rollout.curriculum import curriculum, pass_rates
from areal_x.run.journal import Journal
from areal_x.types import Episode, Failed, Group, Scored, Task

TASKS = [Task(str(i), "") for i in range(6)]


@pytest.fixture
def run(tmp_path):
    """Task 0 is solved never, 1 in half (of two groups), 2 always (its group was given back), 3 failed; 4 and 5 are new."""
    rewards = {0: [0, 0, 0.9, 0], 1: [1, 1, 1, 0], 2: [1, 1, 1, 1]}
    groups = [Group(TASKS[i], i, 0, tuple(Episode(Scored(float(r))) for r in found)) for i, found in rewards.items()]
    groups.append(Group(TASKS[1], 7, 0, (Episode(Scored(0.0)), Episode(Scored(0.0)), Episode(Failed("lost")))))
    groups.append(Group(TASKS[3], 8, 0, (Episode(Failed("lost")),)))
    with Journal(tmp_path) as journal:
        for group in groups:
            journal.admitted(group, 0)
            (journal.given_back if group.ticket in (2, 8) else journal.finished)(group)
    return tmp_path


def test_pass_rates_are_shares_of_the_scored_attempts_of_all_groups(run):
    assert pass_rates(run) == {"0": 0.0, "1": 0.5, "2": 1.0}
    assert pass_rates(run, threshold=0.5)["0"] == 0.25
    with pytest.raises(UserError, match=r"has no journal\.sqlite"):
        pass_rates(run / "nothing")


def test_tasks_are_kept_between_the_bounds_in_their_order(run, capsys):
    def kept(**bounds):
        return [task.id for task in curriculum(TASKS, str(run), **bounds)]

    assert kept(low=0.1, high=0.9) == ["1", "3", "4", "5"]
    said = "of 6 tasks 3 have attempts in"
    assert said in (shown := capsys.readouterr().out)
    assert "1 are solved too rarely and 1 too often; 4 are kept" in shown
    assert kept(low=0.1, unseen="drop") == ["1", "2"]
    assert kept(low=0.5, high=0.5, unseen="drop") == ["1"]
    with pytest.raises(UserError, match="no task is left"):
        kept(low=0.6, high=0.7, unseen="drop")
    with pytest.raises(ConfigError, match=r"curriculum\.low"):
        kept(low=0.7, high=0.6)
    with pytest.raises(ConfigError, match=r"curriculum\.unseen"):
        kept(unseen="skip")
