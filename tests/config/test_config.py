"""Every mistake in a gin file or a -b binding is one sentence: the place, what is wrong, the nearest valid name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gin
import pytest

from areal_x.config.reader import config_text, load
from areal_x.config.types import check_early, check_experiment
from areal_x.errors import ConfigError, UserError

CALLED: list[str] = []  # what was called that must not be called while the config is checked


@gin.configurable(module="config_test")
def slow_problems(number: int = 3) -> list[int]:
    CALLED.append("slow_problems")
    return list(range(number))


@gin.configurable(module="config_test")
def judge(task: Any, text: str) -> float:
    return 0.0


@gin.configurable(module="a_config_test")
def first_with_steps(steps: int = 1) -> None:
    """No file binds it, and its name comes before that of `train`."""


@gin.configurable(module="config_test")
@dataclass
class Inner:
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError("Inner.size", self.size, "at least 1")


@gin.configurable(module="config_test")
@dataclass
class Outer:
    data: list[int]
    inner: Inner = field(default_factory=Inner)
    word: str | None = None


@gin.configurable(module="config_test")
@dataclass
class Picky:
    data: list[int]
    size: int = 1
    function: Any = judge
    functions: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if not all(map(callable, self.functions)):
            raise ConfigError("Picky.functions", self.functions, "functions")
        if self.size < 1:
            raise ConfigError("Picky.size", self.size, "at least 1")
        if not isinstance(self.data, list):
            raise ConfigError("Picky.data", self.data, "a list")
        if not callable(self.function):
            raise UserError("Picky.function must be a function")


GOOD = """
train.dataset = @slow_problems()
train.workflow = @single_turn()
train.steps = 6
optimizer:
    learning_rate = %rate
    beta1 = 0.9
rate = 1e-4
train.algorithm = @grpo()
grpo.clip_low = 0.1
single_turn.reward = @judge
"""
AFTER = GOOD.count("\n") + 1  # the line of what a test adds


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    CALLED.clear()


def problem_of(text: str, *bindings: str) -> str:
    Path("run.gin").write_text(text)
    with pytest.raises(UserError) as raised:
        check(*bindings)
    assert CALLED == []
    assert "\n" not in str(raised.value)
    return str(raised.value)


def check(*bindings: str) -> None:
    config = load("run.gin", bindings)
    check_early(config)
    check_experiment(config)


@pytest.mark.parametrize(
    "line, said",
    [
        ("train.stepz = 3", "train has no parameter 'stepz'; did you mean 'steps'?"),
        ("trian.steps = 3", "nothing configurable is called 'trian'; did you mean 'train'?"),
        ("train.algorithm = @grop()", "@grop: nothing configurable is called 'grop'; did you mean 'grpo'?"),
        ("train.steps = %rat", "the macro %rat is not defined; did you mean 'rate'?"),
        ("steps = 3", "steps names no configurable, and no value uses it as the macro %steps; did you mean train.steps?"),
        ("train.steps = 0", "train.steps = 0 cannot work: it must be greater than 0"),
        ("optimizer.learning_rate = -1", "optimizer.learning_rate = -1 cannot work: it must be greater than 0"),
        (
            "optimizer.schedule = 'cosin'",
            "optimizer.schedule = 'cosin' cannot work: it must be one of 'constant', 'cosine'; did you mean 'cosine'?",
        ),
        ("grpo.clip_low = -0.5", "grpo.clip_low = -0.5 cannot work: it must be at least 0"),
        (
            "sampling.min_tokens = 3",
            "sampling.min_tokens is not supported: it forbids the end tokens at first, which the trainer's distribution has:"
            " score short answers lower instead",
        ),
        *(
            (
                f"sampling.{name} = 0.5",
                f"sampling.{name} is not supported: it changes the distribution in a way that the trainer does not compute;"
                " top_p, top_k, min_p and temperature are exact",
            )
            for name in ("logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty")
        ),
        ("sampling.n = 4", "sampling.n is not supported: the attempts at a task are train.group_size"),
        (
            "sampling.stop = ('x',)",
            "sampling.stop is not supported: not every engine decodes text while it samples: end completions with"
            " sampling.stop_token_ids, or cut the text in the reward",
        ),
        ("evaluation/sampling.top_p = 3", "sampling.top_p = 3 cannot work: it must be between 0 and 1"),
        ("train.backend = 'jaxx'", "train.backend = 'jaxx' cannot work: it must be one of the installed backends: jax, torch"),
        (
            "train.engine = 'vlm'",
            "train.engine = 'vlm' cannot work: it must be one of 'embedded', 'vllm', 'sglang', 'none'; did you mean 'vllm'?",
        ),
        ("train.steps = '48'", "train.steps = '48' cannot work: it must be a whole number"),
        ("train.steps = 1e3", "train.steps = 1000.0 cannot work: it must be a whole number"),
        ("train.steps = True", "train.steps = True cannot work: it must be a whole number"),
        ("optimizer.eps = 'small'", "optimizer.eps = 'small' cannot work: it must be a number"),
        ("train.loggers = 'wandb'", "train.loggers = 'wandb' cannot work: it must be a list, each item text in quotes"),
        (
            "sampling.stop_token_ids = ['a']",
            "sampling.stop_token_ids = ['a'] cannot work: it must be a list, each item a whole number",
        ),
        ("model.path = 3", "model.path = 3 cannot work: it must be text in quotes or a function (@name)"),
        ("train.algorithm = 'grpo'", "train.algorithm = 'grpo' cannot work: it must be of class Algorithm (@name())"),
        (
            "train.algorithm = @grpo",
            "train.algorithm = @grpo cannot work: it must be what grpo returns, not the function itself: write @grpo()",
        ),
        (
            "train.workflow = @judge()",
            "train.workflow = @judge() calls judge, which needs task, text: bind judge.task, judge.text, "
            "or write @judge to pass the function itself",
        ),
        (
            "train.backend = torch",
            "torch is not a value: write text in quotes, a configurable as @name, a macro as %name "
            "(in 'train.backend = torch')",
        ),
        ("train.backend =", "a value is missing or cannot be read in 'train.backend ='"),
        ("train.steps 3", "cannot read 'train.steps 3': Couldn't parse statement, expected ':' or '='."),
        ("include 'runn.gin'", "the gin file 'runn.gin' does not exist; did you mean 'run.gin'?"),
        ("include 'run.gin'", "run.gin includes itself"),
        (
            "import areal_x.trainr",
            "there is no module 'areal_x.trainr' here or installed; did you mean 'areal_x.trainer'?",
        ),
        (
            "import areal_x.types.Task",
            "areal_x.types is a module, not a package, so 'areal_x.types.Task' cannot be imported: "
            "write `import areal_x.types`, and @Task where it is used",
        ),
        (
            "train.dataset = @load_dataset",
            "train.dataset = @load_dataset cannot work: it must be what load_dataset returns, not the function itself: "
            "write @load_dataset()",
        ),
        (
            "train.workflow = @single_turn",
            "train.workflow = @single_turn cannot work: it must be what single_turn returns, not the function itself: "
            "write @single_turn()",
        ),
        (
            "from __gin__ import dynamic_registration",
            "gin's dynamic_registration is not supported: decorate with @gin.configurable instead",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line_and_what_would_work(line: str, said: str) -> None:
    assert problem_of(GOOD + line + "\n") == f"run.gin:{AFTER}: {said}"


def test_a_binding_on_the_command_line_is_named_as_it_was_typed() -> None:
    assert (
        problem_of(GOOD, "train.stepz = 3") == "-b \"train.stepz = 3\": train has no parameter 'stepz'; did you mean 'steps'?"
    )
    assert problem_of(GOOD, "train.steps = 0").startswith('-b "train.steps = 0": train.steps = 0 cannot work')


def test_a_value_from_a_macro_is_placed_where_the_macro_is_defined() -> None:
    assert problem_of(GOOD.replace("1e-4", "-1e-4")).startswith("run.gin:8: optimizer.learning_rate = -0.0001")
    assert problem_of(GOOD, "rate = 'fast'").startswith("-b \"rate = 'fast'\": optimizer.learning_rate = 'fast'")


def test_a_mistake_in_an_included_file_is_placed_there() -> None:
    Path("base.gin").write_text("\n\ntrain.stepz = 3\n")
    assert problem_of("include 'base.gin'\n" + GOOD).startswith("base.gin:3: train has no parameter 'stepz'")


def test_a_mistake_in_an_indented_block_is_placed_on_its_own_line() -> None:
    assert problem_of(GOOD.replace("beta1", "eps1")) == "run.gin:7: optimizer has no parameter 'eps1'; did you mean 'eps'?"


def test_an_unclosed_bracket_is_a_sentence() -> None:
    assert "a bracket or quote is not closed" in problem_of(GOOD + "train.loggers = ('wandb',\n")


def test_a_default_that_does_not_fit_a_bound_value_names_the_file() -> None:
    said = problem_of(GOOD + "optimizer.schedule = 'cosine'\n")
    assert said.startswith("run.gin: optimizer.schedule_steps = 0 cannot work")
    assert "its default" in said


def test_a_missing_file_is_named_with_the_nearest_one() -> None:
    Path("grpo.gin").touch()
    with pytest.raises(UserError, match=r"the gin file 'grop.gin' does not exist; did you mean 'grpo.gin'\?"):
        load("grop.gin")


def test_what_the_experiment_must_be_given_is_asked_for() -> None:
    assert problem_of("train.steps = 3\n") == "run.gin does not bind train.dataset, train.workflow"


def test_a_module_that_lacks_a_package_is_told_apart_from_a_missing_module(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("needs_something.py").write_text("import no_such_package_here\n")
    monkeypatch.syspath_prepend(".")
    said = problem_of("import needs_something\n" + GOOD)
    assert said == "run.gin:1: needs_something needs the package 'no_such_package_here', which is not installed"


def test_a_name_with_two_meanings_asks_which() -> None:
    for module in ("config_test.one", "config_test.other"):
        gin.external_configurable(lambda size=1: size, "twin", module=module)
    said = problem_of(GOOD + "twin.size = 1\n")
    assert said == f"run.gin:{AFTER}: 'twin' may be any of config_test.one.twin, config_test.other.twin: write one of these"


def test_settings_inside_settings_are_tried_without_calling_what_is_slow() -> None:
    """Outer needs what slow_problems returns; its other fields, and Inner within it, are judged all the same."""
    good = GOOD + "Outer.data = @slow_problems()\nOuter.word = 'a'\n"
    assert problem_of(good + "Inner.size = 0\n").startswith(f"run.gin:{AFTER + 2}: Inner.size = 0")
    Path("run.gin").write_text(good + "Inner.size = 2\n")
    check()
    assert CALLED == []


def test_a_complaint_about_what_is_not_known_yet_is_no_complaint() -> None:
    """Picky refuses everything but a list, also what stands for the result of a function that is not called yet."""
    Path("run.gin").write_text(GOOD + "Picky.data = @slow_problems()\nPicky.function = @judge\nPicky.functions = (@judge,)\n")
    check()
    assert problem_of(Path("run.gin").read_text() + "Picky.size = 0\n").startswith(f"run.gin:{AFTER + 3}: Picky.size = 0")
    assert "Picky.functions = (1,) cannot work" in problem_of(GOOD + "Picky.data = @slow_problems()\nPicky.functions = (1,)\n")


def test_what_is_right_is_bound_and_the_command_line_wins() -> None:
    Path("run.gin").write_text(GOOD)
    config = load("run.gin", ["train.steps = 9", "a/sampling.top_k = 5"])
    check_early(config)
    check_experiment(config)
    assert gin.query_parameter("train.steps") == 9
    assert config.value("train.steps") == 9
    assert config.value("optimizer.learning_rate") == 1e-4
    assert config.value("train.runs") == "runs"
    assert config.is_bound("train.steps")
    assert not config.is_bound("train.runs")


def test_loading_again_forgets_what_was_bound() -> None:
    Path("run.gin").write_text(GOOD)
    load("run.gin", ["train.steps = 9", "train.seed = 5"])
    load("run.gin")
    assert gin.query_parameter("train.steps") == 6
    with pytest.raises(ValueError, match="no value bound"):
        gin.query_parameter("train.seed")


def test_the_written_config_builds_the_same_again() -> None:
    """Values in use and their defaults, what is bound but was never used, macros and imports come back."""
    Path("run.gin").write_text("import areal_x.errors\n" + GOOD + "sampling.top_k = 7\nInner.size = 4\n")
    config = load("run.gin")
    assert gin.get_configurable("Inner")().size == 4
    optimizer = gin.get_configurable("optimizer")()
    Path("written.gin").write_text(config_text())
    assert "import areal_x.errors" in config_text()
    again = load("written.gin")
    assert gin.get_configurable("optimizer")() == optimizer
    assert again.value("sampling.top_k") == 7
    assert again.value("optimizer.beta2") == optimizer.beta2
    assert again.is_bound("optimizer.beta2")
    unchanged = {name: config.value(name) for name in ("train.steps", "grpo.clip_low", "Inner.size")}
    assert {name: again.value(name) for name in unchanged} == unchanged
