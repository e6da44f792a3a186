"""A run's config.gin has its settings, however it was started, and describes values that gin cannot express."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import gin
import pytest

from areal_x import train
from areal_x.algorithms import corrections, losses, weighting
from areal_x.algorithms.assembly import PARTS
from areal_x.algorithms.filters import varied
from areal_x.algorithms.rebuild import same
from areal_x.algorithms.recipes import dapo, distill, grpo, m2po, ppo
from areal_x.config.fingerprint import fingerprint
from areal_x.config.reader import config_text, load
from areal_x.config.types import check_early, check_experiment
from areal_x.config.writer import PythonOnly, changed_settings, gin_file_of, parse_bindings
from areal_x.engines.embedded import EmbeddedConfig
from areal_x.errors import UserError
from areal_x.experiment import Experiment
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.trainer_config import LoRAConfig, MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from areal_x.protocols.workflow import Workflow
from areal_x.run.run_dir import open_run
from areal_x.settings import Settings
from areal_x.types import Task
from areal_x.workflows.single_turn import SingleTurn
from tests import forking
from tests.conftest import environment_with
from tests.experiments import TASKS
from tests.ones import counts_ones
from tests.thorough import thorough


@gin.configurable(module="recorded_test")
def ten_recorded_tasks(offset: int = 0) -> list[Task]:
    return [Task(str(i + offset), f"{i}=") for i in range(10)]


@gin.configurable(module="recorded_test")
def a_reward(task: Task, text: str, weight: float = 1.0) -> float:
    return weight


@gin.configurable(module="recorded_test")
@dataclass(frozen=True)
class OwnWorkflow(Workflow):
    inner: Any
    tries: int = 2
    sampling: SamplingParams = field(default_factory=SamplingParams)


def own_loss(policy, batch, *, width: float = 1.0):
    return losses.reinforce(policy, batch)


def made(**changes: Any) -> Experiment:
    workflow = SingleTurn(reward=a_reward, sampling=SamplingParams(max_tokens=9, temperature=0.5))
    return Experiment(**{"dataset": (), "workflow": workflow} | changes)


def read_again(text: str, folder: Path) -> Experiment:
    """The experiment that a command builds from the file."""
    (folder / "written.gin").write_text(text)
    config = load(folder / "written.gin")
    check_early(config)
    check_experiment(config)
    return gin.get_configurable("train")()


@pytest.fixture(autouse=True)
def _no_bindings():
    gin.clear_config()
    yield
    gin.clear_config()


EXPRESSED = {
    "settings of every part": {
        "trainer": TrainerConfig(
            model=ModelConfig("/some where/it's"),
            optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=7),
            mesh=MeshConfig(fsdp=4),
            lora=LoRAConfig(rank=8, targets=("q_proj",)),
            balance=float("inf"),
        ),
        "embedded": EmbeddedConfig(slots=3),
        "steps": 7,
        "loggers": (),
        "reference": ["http://127.0.0.1:1", "http://127.0.0.1:2"],
    },
    "a recipe with its numbers": {"algorithm": grpo(0.1, clip_high=0.28, weighting=weighting.token_mean, proximal="recompute")},
    "a recipe's penalties": {"algorithm": dapo(max_tokens=90, overlong_buffer=9, kl_coefficient=0.1, kl_estimator="k1")},
    "a part that was replaced": {"algorithm": replace(grpo(), loss=losses.reinforce, filters=(varied,))},
    "a loss that was replaced where there was a penalty": {
        "algorithm": replace(grpo(entropy_coefficient=0.0), loss=losses.sft)
    },
    "a part with numbers": {"algorithm": grpo(corrections=partial(corrections.truncated, cap=3.5))},
    "two parts of one function": {
        "algorithm": ppo(corrections=corrections.truncated, loss=partial(losses.ppo_clip, dual_clip=3.0))
    },
    "a recipe in a recipe": {"algorithm": distill(rl=grpo(clip_high=0.4), rl_weight=0.3), "teacher": "/teacher"},
    "a function of a module": {"algorithm": replace(grpo(), loss=own_loss), "workflow": SingleTurn(reward=counts_ones)},
    "a function of a module with numbers": {"algorithm": grpo(loss=partial(own_loss, width=0.3))},
    "two workflows with other numbers": {
        "workflow": SingleTurn(reward=a_reward, sampling=SamplingParams(max_tokens=5)),
        "evaluation": SingleTurn(reward=a_reward, sampling=SamplingParams(max_tokens=50), reward_workers=1),
    },
    "a workflow of one's own": {
        "workflow": OwnWorkflow(SingleTurn(reward=a_reward), 3, SamplingParams(temperature=0.7)),
        "algorithm": m2po(threshold=0.1),
    },
}


@pytest.mark.parametrize("name", EXPRESSED)
def test_what_python_made_is_made_again_from_the_file_that_was_written(name, tmp_path):
    experiment = made(**EXPRESSED[name])
    again = read_again(gin_file_of(experiment), tmp_path)
    for f in fields(Settings):
        ours, theirs = getattr(experiment, f.name), getattr(again, f.name)
        if f.name == "algorithm":
            for part in (*PARTS, "needs", "name"):
                assert same_but_for_gin(getattr(ours, part), getattr(theirs, part)), part
        else:
            assert same_but_for_gin(ours, theirs), f.name
    assert gin_file_of(again) == config_text()  # the second was made by gin


def same_but_for_gin(ours: Any, theirs: Any) -> bool:
    """Bound by partial in one, by gin in a scope in the other: then called alike."""
    if isinstance(ours, partial) and not isinstance(theirs, partial):
        where = ours.func if not hasattr(ours.func, "__wrapped__") else ours.func.__wrapped__
        bound = {k: v for s in [parse_bindings(gin.config_str())[1]] for k, v in s.items()}
        return theirs.__name__ == where.__name__ and all(
            any(key.endswith(f"{where.__name__}.{name}") and text == repr(x) for key, text in bound.items())
            for name, x in ours.keywords.items()
        )
    if isinstance(ours, losses.Combined | losses.Scaled):
        return type(ours) is type(theirs) and all(
            same_but_for_gin(getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(ours)
        )
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(same_but_for_gin, ours, theirs))
    return same(ours, theirs) or ours == theirs


def test_two_runs_with_different_losses_leave_different_files(tmp_path):
    texts = [gin_file_of(made(algorithm=grpo(loss=loss))) for loss in (lambda p, b: (p.logp, {}), lambda p, b: (-p.logp, {}))]
    assert len({line for text in texts for line in text.splitlines() if ".what" in line}) == 2
    assert "test_writer.py:" in texts[0]
    (told,) = changed_settings(*texts)
    assert told.startswith("grpo_loss/given_in_python.what = ")


def closing_over(number):
    return lambda policy, batch: (policy.logp * number, {})


def test_a_digest_sees_what_a_function_closes_over_and_not_where_it_stands():
    one, other, again = (fingerprint(closing_over(x)).rpartition("sha256")[2] for x in (1, 2, 1))
    assert one == again != other
    assert fingerprint([Task("a", "b")]) != fingerprint([Task("a", "c")])
    source = "def loss(policy, batch):\n    return policy.logp, {}\n"
    places = []
    for lines in ("", "\n\n"):
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(lines + source, "<ipython-input-1>", "exec"), names)
        places.append(fingerprint(names["loss"]))
    assert places[0] == places[1]


def test_what_gin_cannot_say_is_told_in_words_and_each_command_says_what_it_lacks(tmp_path, capsys):
    experiment = made(dataset=TASKS, algorithm=grpo(loss=closing_over(3)))
    file = tmp_path / "config.gin"
    file.write_text(gin_file_of(experiment))
    assert "# This run was started from Python: values that gin cannot express are described below." in file.read_text()
    from areal_x import check

    for command in (train.main, check.main):
        assert command([str(file)]) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"error: {file} belongs to a run that was started from Python, and gin cannot express its ")
        assert told.count("\n") == 1
        assert "train.dataset (10 tasks, the first '0', sha256 " in told
        assert "grpo.loss (tests.config.test_writer.closing_over.<locals>.<lambda> (" in told
        assert told.endswith("with Experiment(...).run(resume=True)\n")
    given = load(file, ["train.dataset = @ten_recorded_tasks()", "grpo.loss = @reinforce"])
    check_early(given)
    check_experiment(given)
    assert len(gin.get_configurable("train")().dataset) == 10


def test_what_is_missing_says_so_when_it_is_used():
    missing = PythonOnly("a list")
    for use in (len, list, lambda x: x[0], lambda x: x()):
        with pytest.raises(UserError, match="only the Python program that started the run has this value: a list"):
            use(missing)


BY_GIN = """
import tests.config.test_writer
big/sampling.max_tokens = 77
REWARD = @recorded_test.a_reward
train.dataset = @ten_recorded_tasks()
ten_recorded_tasks.offset = 5
train.workflow = @single_turn()
single_turn.reward = %REWARD
single_turn.sampling = @big/sampling()
train.algorithm = @grpo()
grpo.clip_high = 0.3
grpo.corrections = @mine/corrections.truncated
mine/corrections.truncated.cap = 9.0
optimizer.learning_rate = 1e-3
"""


def test_what_gin_made_keeps_gins_own_file(tmp_path):
    (tmp_path / "run.gin").write_text(BY_GIN)
    load(tmp_path / "run.gin", ["train.name = 'x'"])
    experiment = gin.get_configurable("train")()
    assert gin_file_of(experiment, name="x") == config_text()


def test_what_an_object_holds_wins_over_what_gin_has_bound(tmp_path):
    (tmp_path / "run.gin").write_text(BY_GIN)
    load(tmp_path / "run.gin")
    experiment = gin.get_configurable("train")()
    changed = replace(
        experiment, trainer=replace(experiment.trainer, optimizer=OptimizerConfig(learning_rate=5e-2)), steps=3, name="mixed"
    )
    gin.bind_parameter("optimizer.learning_rate", 8.0)
    bound = parse_bindings(text := gin_file_of(changed, name="mixed"))[1]
    assert bound["optimizer.learning_rate"] == "0.05"
    assert bound["train.steps"] == "3"
    assert bound["train.dataset"] == "@ten_recorded_tasks()"  # gin made it, and can make it again
    again = read_again(text, tmp_path)
    assert again.dataset == experiment.dataset == ten_recorded_tasks(5)
    assert again.trainer == changed.trainer
    assert again.workflow.sampling.max_tokens == 77
    assert again.algorithm.loss.keywords == {"clip_low": 0.2, "clip_high": 0.3}
    assert "cap = 9.0" in text
    assert again.algorithm.corrections.__name__ == "truncated"
    gin.clear_config()
    load(tmp_path / "run.gin")
    mixed = Experiment(dataset=TASKS, steps=4)  # gin gives the rest
    bound = parse_bindings(gin_file_of(mixed))[1]
    assert bound["train.dataset"] == "@train_dataset/given_in_python()"
    assert (bound["train.steps"], bound["sampling.max_tokens"], bound["grpo.clip_high"]) == ("4", "77", "0.3")


def test_a_resumed_run_says_which_settings_changed_and_keeps_the_file_from_before(tmp_path):
    said: list[str] = []
    before, now = (gin_file_of(made(algorithm=grpo(clip_high=x), steps=n, name="run")) for x, n in ((0.2, 5), (0.3, 6)))
    open_run(tmp_path, "run", before)
    open_run(tmp_path, "run", before, resume=True, message=said.append, changed_settings=changed_settings)
    assert said == []
    open_run(tmp_path, "run", now, resume=True, message=said.append, changed_settings=changed_settings)
    assert said == ["the run continues with changed settings: grpo.clip_high = 0.3 (was 0.2); train.steps = 6 (was 5)"]
    assert (tmp_path / "run" / "config-1.gin").read_text() == before
    assert (tmp_path / "run" / "config.gin").read_text() == now


NOTEBOOK = """
import sys
from areal_x import train
from areal_x.algorithms.recipes import grpo
from tests.experiments import tiny_experiment
from tests.config.test_writer import a_reward
from areal_x.protocols.engine import SamplingParams
from areal_x.workflows.single_turn import SingleTurn

def unreachable(task, text):
    return float(len(text))

if __name__ == "__main__":
    workflow = SingleTurn(reward=unreachable, sampling=SamplingParams(max_tokens=8), reward_workers=1)
    tiny_experiment(sys.argv[1], "runs", steps=2, workflow=workflow, algorithm=grpo(clip_high=0.5), name="mine").run()
"""


@thorough
def test_a_run_from_python_is_replayed_without_its_tasks_and_its_reward(tiny_model_dir, tmp_path):
    (tmp_path / "program.py").write_text(NOTEBOOK)
    for command in (["program.py", str(tiny_model_dir)], ["-m", "areal_x.replay", "runs/mine"]):
        done = forking.run([sys.executable, *command], environment_with(1), tmp_path)
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all 2 losses equal the run's to the last bit"
    written = (tmp_path / "runs" / "mine" / "config.gin").read_text()
    assert "grpo.clip_high = 0.5" in written
    assert f"model.path = '{tiny_model_dir}'" in written
    assert "train.name = 'mine'" in written
    assert "__main__.unreachable (" in written
