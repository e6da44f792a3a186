"""Settings of the trainer: ranges, the schedule, and what importing the core must not load."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from areal_x.errors import ConfigError
from areal_x.protocols.backends import create_trainer, find_backend
from areal_x.protocols.trainer_config import LoRAConfig, OptimizerConfig, TrainerConfig


def test_the_schedule_warms_up_linearly_then_follows_half_a_cosine():
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=4, schedule="cosine", schedule_steps=12, final_ratio=0.25)
    rates = [float(config.learning_rate_at(np.float32(step))) for step in range(14)]
    assert rates[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    for step in range(4, 14):
        done = min((step - 4) / 8, 1.0)
        assert rates[step] == pytest.approx(2.0 * (0.25 + 0.75 * 0.5 * (1 + math.cos(math.pi * done))))


def test_a_constant_schedule_only_warms_up():
    config = OptimizerConfig(learning_rate=3.0, warmup_steps=3)
    assert [float(config.learning_rate_at(np.float32(s))) for s in (0, 1, 2, 50)] == pytest.approx([1.0, 2.0, 3.0, 3.0])


@pytest.mark.parametrize(
    "build, sentence",
    [
        (lambda: OptimizerConfig(learning_rate=0), r"optimizer\.learning_rate = 0 .* greater than 0"),
        (lambda: OptimizerConfig(schedule="cosin"), "did you mean 'cosine'"),
        (lambda: OptimizerConfig(schedule="cosine", warmup_steps=5, schedule_steps=5), "more than the 5 warm-up steps"),
        (lambda: LoRAConfig(rank=-1), r"lora\.rank = -1 .* at least 0"),
        (lambda: LoRAConfig(alpha=0), r"lora\.alpha = 0 .* greater than 0"),
        (lambda: LoRAConfig(targets=("q_proj", "q_proj")), r"lora\.targets .* each once"),
        (lambda: TrainerConfig(precision="fp16"), r"trainer\.precision .*'fp32'"),
    ],
)
def test_a_value_that_cannot_work_is_one_sentence_with_its_binding(build, sentence):
    with pytest.raises(ConfigError, match=sentence):
        build()


def test_an_unknown_backend_is_answered_with_those_installed():
    with pytest.raises(ConfigError, match=r"train\.backend = 'jacks' .*installed backends: .*jax"):
        create_trainer("jacks", TrainerConfig())


def test_finding_a_backend_does_not_import_it():
    code = "import sys; from areal_x.trainer import find_backend; find_backend('jax'); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert find_backend("jax").value == "areal_x_jax"


def test_importing_every_module_of_the_core_loads_no_framework():
    code = (
        "import pkgutil, importlib, sys, areal_x\n"
        "for module in pkgutil.walk_packages(areal_x.__path__, 'areal_x.'):\n"
        "    importlib.import_module(module.name)\n"
        "loaded = {'torch', 'jax', 'vllm', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
