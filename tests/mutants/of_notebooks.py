"""Bugs in what notebooks use: the token view's data, gradients without a model, forks."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

MUTANTS: list[Mutant] = [
    *planted(
        "areal_x/lab/token_view.py",
        ("tests/lab/test_token_view.py",),
        ("the token view shows a group without training's numbers", '("trained", "consumed")', '("consumed", "trained")'),
        ("the token view ends after the first part", 'while found["end"] < found["length"]:', "while False:"),
        ("the widget imports by addresses that a notebook does not have", 'IMPORT.sub("", source)', "source"),
    ),
    *planted(
        "areal_x/batching/gradients.py",
        ("tests/batching/test_gradients.py",),
        ("what makes a token more likely is negative", "[0 - x for x in", "[x for x in"),
        (
            "the gradient is that of the sampling policy",
            "Policy(logp=logp), batch)",
            "Policy(logp=batch.behavior_logp), batch)",
        ),
        ("corrections read the sampling policy", "return self.logp", "return np.asarray(batch.behavior_logp)"),
    ),
    *planted(
        "areal_x/run/forking.py",
        ("tests/run/test_forking.py",),
        (
            "the fork of an earlier checkpoint trains on later policies' samples",
            "if newest_version(content) > step:",
            "if False:",
        ),
        (
            "a fork writes into the metrics of its run",
            "shutil.copyfile(run / file, unfinished / file)",
            "os.link(run / file, unfinished / file)",
        ),
        ("a damaged checkpoint is forked", "if damage := checkpoint.find_damage(run / place):", 'if damage := "":'),
    ),
]
