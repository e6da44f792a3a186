"""Bugs by which a run ends, or goes on, where it should not, or learns from another reward than it was given."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

MUTANTS: list[Mutant] = [
    *planted(
        "areal_x/rollout/episode.py",
        ("tests/rollout/test_runner.py",),
        (
            "an episode that raised counts as one without reward",
            "            return Episode(TimedOut(seconds))\n        return Episode(failed_by(error))",
            "            return Episode(TimedOut(seconds))\n        return Episode(Scored(0.0))",
        ),
        (
            "an episode that took too long counts as one without reward",
            "            return Episode(TimedOut(seconds))",
            "            return Episode(Scored(0.0))",
        ),
        ("a prompt that is too long ends the run", " and not isinstance(error, TaskError)", ""),
        (
            "an over-long prompt is raised out of its episode",
            "    except TaskError as error:\n        return Episode(failed_by(error))\n",
            "",
        ),
        (
            "a lost engine under a task group is a failed episode",
            "or ends_run(first := first_of(errors))",
            "or (first := first_of(errors)) is None",
        ),
        ("a trajectory longer than a row is let through", "    if longest > row_length:", "    if False:"),
    ),
    *planted(
        "areal_x/rollout/episode.py",
        ("tests/runtime/test_background.py",),
        (
            "a workflow's sys.exit goes on to the event loop",
            "    except SystemExit as error:",
            "    except ZeroDivisionError as error:",
        ),
    ),
    *planted(
        "areal_x/rollout/patience.py",
        ("tests/rollout/test_runner.py",),
        (
            "filters may give far more groups back than is said",
            "self.filtered_in_a_row == bound and",
            "self.filtered_in_a_row == 9 * bound and",
        ),
        (
            "a kept group does not end the count",
            "self.failed_in_a_row = self.filtered_in_a_row = 0",
            "self.failed_in_a_row = 0",
        ),
        ("more groups may fail than is said", "self.failed_in_a_row >= self", "self.failed_in_a_row >= 7 * self"),
    ),
    *planted(
        "areal_x/algorithms/validation.py",
        ("tests/algorithms/test_recipes.py",),
        ("groups of one are compared with nothing", "> ROUNDING\n", "> -1\n"),
        (
            "a filter that rejects every group is not called",
            "if is_built_in(keep) and not keep(Group(",
            "if not is_built_in(keep) and not keep(Group(",
        ),
    ),
    *planted(
        "areal_x/tasks/screening.py",
        ("tests/tasks/test_screening.py",),
        ("a long prompt is admitted", "        while not await self.fits_at(stream):", "        while False:"),
        (
            "a prompt counts as many tokens as characters",
            "        tokens = self._count(task)",
            "        tokens = sum(map(len, task_texts(task)))",
        ),
        ("the chat template's tokens are not counted", "template + MARGIN", "0 * MARGIN"),
        (
            "prompts are tokenised on the event loop",
            "        return await in_thread(self.fits, index, task)",
            "        return self.fits(index, task)",
        ),
    ),
    *planted(
        "areal_x/batching/batch.py",
        ("tests/batching/test_batch.py",),
        (
            "an episode without a trajectory counts as 0 in its group",
            "    return np.where(has_any, ",
            "    return np.where(True, ",
        ),
        (
            "a trajectory without a trained token counts as 0 in its group",
            "        earned[last] += reward + extra",
            "        earned[last] += (reward + extra) * trajectory.mask.any()",
        ),
        (
            "token advantages forget episodes without a trajectory",
            "for e in episodes_without_trajectory(part)]",
            "for e in ()]",
        ),
    ),
    *planted(
        "areal_x/workflows/wrapper.py",
        ("tests/workflows/test_learned_reward.py", "tests/agents/test_online.py"),
        (
            "the greedy answer that others are compared with is judged by the verifier",
            "        return replace(self, workflow=self.workflow.baseline())",
            "        return self.workflow.greedy()",
        ),
        (
            "a learned reward around sessions has a time limit",
            "        return self.workflow.open_ended",
            "        return False",
        ),
    ),
    *planted(
        "areal_x/workflows/learned_reward.py",
        ("tests/workflows/test_learned_reward.py", "tests/agents/test_online.py"),
        ("one answer that is too long fails all that are judged with it", " > self.row_length:", " > 1 << 30:"),
    ),
    *planted(
        "areal_x/agents/online.py",
        ("tests/agents/test_online.py",),
        (
            "a label that never comes holds its group up",
            "            self.slots.close_after(task.id, self.group_seconds)\n",
            "",
        ),
    ),
    *planted(
        "areal_x/runtime/background.py",
        ("tests/runtime/test_background.py",),
        (
            "a task that ended with an exception is forgotten",
            "        report(task.get_loop(), described(what, error))",
            "        pass",
        ),
        (
            "a thread that ended with an exception is forgotten",
            "            failed(described(what, error))",
            "            pass",
        ),
        (
            "an exception in a callback is only logged",
            "    if error is not None and handle is not None and",
            "    if False and",
        ),
    ),
    *planted(
        "areal_x/engines/fleet/supervisor.py",
        ("tests/runtime/test_background.py",),
        (
            "a server that leaves during a heartbeat ends the watch",
            "        replica = self.replicas.get(name)\n        if replica is None:",
            "        replica = self.replicas[name]\n        if replica is None:",
        ),
    ),
    *planted(
        "areal_x/monitor/step_metrics.py",
        ("tests/test_metrics_page.py",),
        ("groups of equal rewards count as varied", "len(set(group.rewards)) < 2", "len(set(group.rewards)) < 1"),
        ("the estimate of the entropy has the wrong sign", '{"entropy_estimate": -float(', '{"entropy_estimate": float('),
        (
            "a new metric is on no page",
            '        "trained_tokens": int(',
            '        "undocumented": 0.0,\n        "trained_tokens": int(',
        ),
    ),
    *planted(
        "areal_x/monitor/display.py",
        ("tests/monitor/test_display.py",),
        ("a run that learns nothing says nothing", "    if rest or times.bit_count() != 1:", "    if True:"),
    ),
    *planted(
        "areal_x/preflight/data.py",
        ("tests/preflight/test_check.py",),
        ("a reward that never reads the text passes", "    if not reads_text(reward):", "    if False:"),
    ),
]
