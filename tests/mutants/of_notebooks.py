"""Bugs in what notebooks and the lab use: the token view's data, records of tokens, gradients without a model, forks."""

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
        "areal_x/batching/step_outputs.py",
        ("tests/monitor/test_token_records.py",),
        (
            "the last minibatch has the numbers of all",
            "self.outputs[index] = StepOutputs(logprobs, entropies)",
            "self.outputs = [StepOutputs(logprobs, entropies)] * len(self.outputs)",
        ),
        ("records have the sampling policy's numbers", "is not batch.behavior_logp", "is not None"),
    ),
    *planted(
        "areal_x/monitor/token_records.py",
        ("tests/monitor/test_token_records.py",),
        ("what was left out has a probability of 1", "np.where(batch.mask, x, np.nan)", "x"),
    ),
    *planted(
        "areal_x/cluster/ganged.py",
        ("tests/cluster/test_dealing.py",),
        ("processes are asked for one output in place of the other", "self._name, output,", 'self._name, "logprobs",'),
        ("the rows of one process are taken for all", "= batch.shape, division", "= batch.shape, None"),
    ),
    *planted(
        "backends/torch/areal_x_torch/update.py",
        ("tests/torch/test_processes.py::test_several_processes_learn_what_one_does[fsdp]",),
        ("a blank row counts as one that was kept", "sorted(self.of_micro) if self.sizes[i]]", "sorted(self.of_micro)]"),
    ),
    *planted(
        "backends/torch/areal_x_torch/update.py",
        ("tests/torch/test_processes.py::test_several_processes_learn_what_one_does[stages]",),
        ("the first stage returns that it kept nothing", "self.pipeline.stages.from_last(own)", "own"),
    ),
    *planted(
        "backends/jax/areal_x_jax/trainer.py",
        ("tests/jax/test_sharding.py",),
        ("a process takes its part of a row for all of it", 'if self.partitioner.size("context") > 1:', "if False:"),
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
