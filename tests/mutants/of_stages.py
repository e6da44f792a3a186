"""Bugs in the stages of a pipeline: what each computes, in which order, and what they share."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

TORCH = "backends/torch/areal_x_torch/"
ALONE = ("tests/torch/test_pipeline.py",)
TOGETHER = ("tests/torch/test_processes.py::test_several_processes_learn_what_one_does[stages]",)
MIXED = ("tests/torch/test_processes.py::test_several_processes_learn_what_one_does[stages-mixture]",)

MUTANTS: list[Mutant] = [
    *planted(
        TORCH + "pipeline.py",
        ALONE,
        ("the last stages have the most layers", "(number < layers % count)", "(number >= count - layers % count)"),
        (
            "the norm follows every chunk",
            "        if not chunk.is_last:\n            setattr(whole",
            "        if False:\n            setattr(whole",
        ),
        ("a chunk begins with the embedding again", "return self.states[None]", "return hidden"),
        (
            "a stage without adapters is accepted",
            "if not adapted.intersection(layers):",
            "if not adapted:",
        ),
    ),
    *planted(
        TORCH + "pipeline.py",
        TOGETHER,
        (
            "the head and the embedding that it is tied to learn apart",
            "dist.all_reduce(local(copied.grad), group=self.stages.ends)",
            "local(copied.grad)",
        ),
    ),
    *planted(
        TORCH + "update.py",
        TOGETHER,
        (
            "a tied embedding counts twice in the gradient's norm",
            "counted = [g for g in gradients if not (pipeline.stages.is_last and g is copied.grad)]",
            "counted = gradients",
        ),
    ),
    *planted(
        TORCH + "update.py",
        MIXED,
        (
            "each stage balances its experts as if they were all",
            "(layers * trained / whole.step_trained)",
            "(trained / whole.step_trained)",
        ),
    ),
    *planted(
        TORCH + "pipeline_schedule.py",
        ALONE,
        (
            "the first stage is one micro-batch further ahead",
            "min(processes - 1 - process, count)",
            "min(processes - process, count)",
        ),
        ("micro-batches that only an order needs are computed", "a.microbatch_index < count", "a.microbatch_index <= count"),
    ),
]
