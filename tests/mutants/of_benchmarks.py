"""Bugs in the environments and benchmarks of others."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, planted

NEMO_GYM = ("tests/agents/test_nemo_gym.py",)
PROGRAMS = ("tests/agents/test_package_programs.py",)

MUTANTS: list[Mutant] = [
    *planted(
        "areal_x/agents/nemo_gym.py",
        NEMO_GYM,
        ("a model calls a path of the server that is no tool", "if name not in tools:", "if False:"),
        ("a masked episode is trained on", 'if verdict.get("mask_sample"):', "if False:"),
        ("what a tool answers is missing in what is verified", '"output": self._items, "usage"', '"usage"'),
        ("an episode's reward is that of its last step", "total += reward", "total = reward"),
        ("the environment of a full context is left open", '.get("supports_explicit_close") is True', '.get("closes") is True'),
    ),
    *planted(
        "areal_x/agents/package_programs.py",
        PROGRAMS,
        ("a program's error is a result", 'if "error" in result:', "if False:"),
        ("what a package prints stands for the result", "if not mark:", "if False:"),
    ),
    *planted(
        "areal_x/agents/package_main.py",
        PROGRAMS,
        ("a package imports this project's modules for its own", "resolve() != here", 'resolve() != ""'),
    ),
    *planted(
        "areal_x/agents/external_program.py",
        PROGRAMS,
        (
            "a program that reads no input ends its episode",
            "with suppress(BrokenPipeError, ConnectionResetError):",
            "with suppress():",
        ),
        ("a program waits for the end of its input", "    stream.close()\n", ""),
    ),
    *planted(
        "areal_x/agents/program_launcher.py",
        PROGRAMS,
        ("a package's temporary files stay", "folder=folder,", "folder=None,"),
    ),
    *planted(
        "areal_x/tasks/answer_tags.py",
        ("tests/tasks/test_answer_tags.py",),
        ("the first answer counts", "found, at = text[begins", "return text[begins"),
        ("a tag that was not closed begins the answer", "text.rfind(OPENED, start, end)", "start"),
    ),
    *planted(
        "areal_x/agents/gateway/content.py",
        ("tests/agents/gateway/test_ignored.py",),
        (
            "a file is decoded twice",
            "    @cached_property  # to be counted and shown, and a file may be large\n    def text(self)",
            "    @property\n    def text(self)",
        ),
    ),
]
