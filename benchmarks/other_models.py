"""Value of a critic, a reward model, preferences and a teacher on the arithmetic task, as a markdown table.

    python -m benchmarks.other_models [--backend jax]

Claims: PPO's critic explains more than half of the returns' variance; a reward model prefers the correct answer in at least 9
of 10 held-out pairs, and can replace the verifier; DPO widens the margin and raises the accuracy; a student reaches its
teacher, within 3 points, in fewer generated tokens than GRPO.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence

from areal_x.monitor.metrics import Row
from benchmarks.recipes import accuracies, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="jax")
    given = parser.parse_args()
    shared = [f"train.backend = '{given.backend}'"]
    print("| claim | figure |\n|---|---|", flush=True)

    rows = train("ppo", shared)
    explained = [row["explained_variance"] for row in rows if "explained_variance" in row]
    say(
        "PPO: explained variance of the critic, mean of steps 1 to 5, and of the last 10",
        mean(explained[:5]),
        mean(explained[-10:]),
    )

    with tempfile.TemporaryDirectory() as runs:
        rows = train("reward_model", shared, runs)
        say("reward model: held-out pairs in the right order, before and after", *course(rows, "held_out/pair_accuracy"))
        judge = f"learned_reward.path = '{runs}/run/checkpoints/100/trainer'"
        rows = train("learned_reward", [*shared, judge])
        say("GRPO on that model's scores: held-out accuracy by the verifier, %, start and end", *ends(accuracies(rows)))

    for name in ("dpo", "ipo"):
        rows = train(name, shared)
        say(f"{name}: margin, steps 1 and last", *ends([row["margin"] for row in rows if "margin" in row]))
        say(f"{name}: held-out accuracy, %, start and end", *ends(accuracies(rows)))

    rows = train("sft", shared)
    say("sft on right answers: held-out accuracy, %, start and end", *ends(accuracies(rows)))

    teacher = ["model.path = @teacher/arithmetic.warm_start", "teacher/arithmetic.warm_start.forgetting = 0.0"]
    goal = accuracies(train("grpo", [*shared, *teacher, "train.steps = 1", "optimizer.learning_rate = 1e-12"]))[0]
    say("the teacher's held-out accuracy, %", goal)
    for name in ("distill", "grpo"):
        rows = train(name, [*shared, "train.evaluate_every = 1"])
        say(f"{name}: thousand tokens generated until it is within 3 points of the teacher", tokens_until(rows, goal - 3))


def course(rows: Sequence[Row], key: str) -> list[float]:
    return ends([row[key] for row in rows if key in row])


def ends(values: Sequence[float]) -> list[float]:
    return [values[0], values[-1]]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def tokens_until(rows: Sequence[Row], percent: float) -> float:
    """Thousands of tokens generated for training before the first evaluation at `percent` or more; infinite without one."""
    reached = (row["generated_tokens"] / 1000 for row in rows if 100 * row.get("accuracy", 0) >= percent)
    return next(reached, float("inf"))


def say(claim: str, *figures: float) -> None:
    print(f"| {claim} | {' → '.join(f'{x:.4g}' for x in figures)} |", flush=True)


if __name__ == "__main__":
    main()
