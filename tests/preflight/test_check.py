"""The checks before a run: each problem is provoked once, and the shipped example has none."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from packaging.requirements import Requirement

from areal_x import check, train
from areal_x.algorithms import recipes
from areal_x.algorithms.arrays import masked
from areal_x.algorithms.recipes import distill
from areal_x.cluster.config import ClusterConfig
from areal_x.engines.embedded import EmbeddedConfig
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.vllm import features
from areal_x.engines.vllm.engine import VLLMConfig
from areal_x.errors import ConfigError, UserError
from areal_x.experiment import Experiment
from areal_x.preflight import algorithm, data, deltas, memory, model, servers, storage, tokens, versions
from areal_x.preflight import cluster as nodes
from areal_x.preflight.finding import run_check
from areal_x.protocols.backends import Devices
from areal_x.protocols.engine import SamplingParams
from areal_x.protocols.trainer_config import LoRAConfig, MeshConfig, OptimizerConfig
from areal_x.testing.models import write_model
from areal_x.types import Batch, Group, Policy, Task
from areal_x.workflows.single_turn import SingleTurn
from tests import forking, row_images
from tests.config.test_bad_input import RECIPES
from tests.conftest import environment_with
from tests.experiments import TASKS, tiny_experiment
from tests.models import SEEING_ROWS, SEEING_SQUARES
from tests.ones import counts_ones
from tests.square_images import write_prompt_files
from tests.thorough import further

GPU = Devices("cuda", 1, 80 * 10**9)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def experiment(tiny_model_dir: Path, tmp_path: Path) -> Experiment:
    return tiny_experiment(tiny_model_dir, tmp_path / "runs")


@pytest.fixture
def tiny(tiny_model_dir: Path) -> model.Model:
    return model.find_model(str(tiny_model_dir))


def command(*bindings: str, model: Path, tmp_path: Path) -> list[str]:
    file = tmp_path / "run.gin"
    file.write_text(
        "import tests.check_configurables\n"
        f"model.path = '{model}'\ntrain.dataset = @checked.tasks()\ntrain.workflow = @single_turn()\n"
        f"single_turn.reward = @checked.ones\nsampling.max_tokens = 8\ntrain.row_length = 32\ntrain.runs = '{tmp_path}/runs'\n"
    )
    return [str(file), *(word for binding in bindings for word in ("-b", binding))]


@pytest.fixture
def checked(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """The status and the problems of the command with these bindings."""

    def look(*bindings: str) -> tuple[int, list[str]]:
        status = check.main(command(*bindings, model=tiny_model_dir, tmp_path=tmp_path))
        lines = capsys.readouterr().out.splitlines()
        return status, [line for line in lines if not line.startswith("ok ")]

    return look


def test_a_run_that_can_begin_has_no_problem_on_either_backend(checked: Any, backend: str) -> None:
    assert checked(f"train.backend = '{backend}'") == (0, ["no problem"])


def test_every_problem_is_one_line_with_its_place_and_what_to_set(checked: Any, backend: str) -> None:
    status, lines = checked(
        f"train.backend = '{backend}'", "embedded.context = 4", "mesh.tensor = 3", "checked.tasks.same = True"
    )
    assert status == 1
    assert [line.split(":")[0].split("  ")[1] for line in lines[:-1]] == ["dataset", "devices and mesh", "lengths"]
    assert "two different tasks with the id '0'" in lines[0]
    assert "mesh.tensor = 3" in lines[1]
    assert '-b "embedded.context = 4": embedded.context = 4 cannot work: it must be greater: all 5 tasks' in lines[2]
    assert lines[-1] == "3 problems"


def test_sampling_that_the_trainer_does_not_compute_is_refused_with_its_place(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for main in (check.main, train.main):
        assert main(command("sampling.temperature = 0.0", model=tiny_model_dir, tmp_path=tmp_path)) == 1
        said = capsys.readouterr().err
        assert said.startswith(
            'error: -b "sampling.temperature = 0.0": sampling.temperature = 0.0 cannot work: it must be above 0'
        )


def test_servers_that_could_not_divide_the_model_are_a_problem(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size, status, start in ((2, 0, "ok       parallel sizes: each server on 2 acc"), (3, 1, "PROBLEM  parallel sizes: ")):
        bindings = ("train.engine = 'sglang'", "sglang.python = 'none'", f"sglang.tensor = {size}")
        check.main(command(*bindings, model=tiny_model_dir, tmp_path=tmp_path))
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "parallel sizes" in line]
        assert line.startswith(start)
        assert ("sglang.tensor = 3 cannot work: it must be 1 or 2: the model's 4 attention heads" in line) == bool(status)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_rotation_that_servers_compute_otherwise_is_a_problem(
    engine: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turned = shutil.copytree(tiny_model_dir, tmp_path / "turned")
    config = json.loads((turned / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "proportional", "rope_theta": 1e4, "factor": 2.0}
    (turned / "config.json").write_text(json.dumps(config))
    bindings = (f"train.engine = '{engine}'", "sglang.python = 'none'")
    for served, start in ((tiny_model_dir, "ok       served model: "), (turned, "PROBLEM  served model: ")):
        check.main(command(*bindings, model=served, tmp_path=tmp_path))
        (line,) = [line for line in capsys.readouterr().out.splitlines() if "served model" in line]
        assert line.startswith(start)
        assert ("factor = 2.0 in the rope_parameters, which" in line) == (served == turned)


def test_what_deltas_take_is_a_finding(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check.main(command("train.engine = 'vllm'", "vllm.delta = 9", model=tiny_model_dir, tmp_path=tmp_path))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "deltas:" in line]
    assert re.search(r"ok +deltas: 2 versions of the weights in the trainer's host memory, \S+ MB, and up to 2 in /", line)


def test_a_model_that_a_function_makes_is_not_made_while_there_are_problems(checked: Any, tmp_path: Path) -> None:
    status, lines = checked("model.path = @checked.maker", "checked.tasks.same = True")
    assert status == 1
    assert "not made by maker while there are problems" in lines[1]
    _, lines = checked("model.path = @checked.maker")
    assert "RuntimeError: made now" in lines[0]


def test_what_the_config_itself_refuses_is_the_sentence_of_train(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main(command("train.stepz = 3", model=tiny_model_dir, tmp_path=tmp_path)) == 1
    said = capsys.readouterr().err
    assert check.main(command("train.stepz = 3", model=tiny_model_dir, tmp_path=tmp_path)) == 1
    assert capsys.readouterr().err == said


def test_the_arithmetic_example_has_no_problem_as_a_command(tmp_path: Path) -> None:
    """With a random model: making the example's own takes half a minute."""
    from examples.arithmetic.model import write_model

    write_model(tmp_path / "model", 0)
    bindings = ["-b", f"model.path = '{tmp_path}/model'", "-b", f"train.runs = '{tmp_path}'"]
    command = [sys.executable, "-m", "areal_x.check", "examples/arithmetic/grpo.gin", *bindings]
    said = forking.run(command, environment_with(1), ROOT)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "20,000 tasks" in said.stdout


def test_what_gsm8k_lacks_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    bindings = ["-b", "gsm8k.path = 'nowhere.jsonl'", "-b", "model.path = './nowhere'", "-b", "train.backend = 'jax'"]
    assert check.main(["examples/gsm8k/grpo.gin", *bindings]) == 1
    said = capsys.readouterr().out
    assert "PROBLEM  dataset: the dataset 'nowhere.jsonl' does not exist" in said
    assert "PROBLEM  model: -b \"model.path = './nowhere'\": model.path = './nowhere' is not a directory" in said


# ---- the algorithm


def one_value(policy: Policy, batch: Batch) -> Any:
    return -(batch.advantages * policy.logp * batch.mask).sum()


def a_sum(policy: Policy, batch: Batch) -> Any:
    return one_value(policy, batch), {}


def a_row_each(policy: Policy, batch: Batch) -> Any:
    return (batch.advantages * policy.logp * batch.mask).sum(1), {}


def a_number_as_metric(policy: Policy, batch: Batch) -> Any:
    return masked(policy.logp, batch.mask), {"length": 3.0}


def without_mask(policy: Policy, batch: Batch) -> Any:
    return 1 + policy.logp, {}


def not_finite(policy: Policy, batch: Batch) -> Any:
    return masked(policy.logp, batch.mask) ** 0.5, {}


def constant(policy: Policy, batch: Batch) -> Any:
    return masked(batch.advantages, batch.mask) * 2, {}


def misspelt(policy: Policy, batch: Batch) -> Any:
    return batch.advantage * policy.logp, {}


def in_numpy(policy: Policy, batch: Batch) -> Any:
    return masked(-np.exp(policy.logp), batch.mask), {}


def of_entropy(policy: Policy, batch: Batch) -> Any:
    return masked(-policy.entropy, batch.mask), {}


def well(policy: Policy, batch: Batch) -> Any:
    return -masked(batch.advantages, batch.mask) * masked(policy.logp, batch.mask), {"seen": batch.mask * 1.0}


@pytest.mark.parametrize(
    "loss, error",
    [
        (one_value, r"the loss one_value returned an array \[\]: it must return \(terms, metrics\)"),
        (a_sum, r"the loss a_sum returned an array \[\] as its terms: it must return one per token, an array \[\d+, 24\]"),
        (a_row_each, r"the loss a_row_each returned an array \[\d+\] as its terms"),
        (lambda policy, batch: None, "the loss <lambda> returned nothing"),
        (a_number_as_metric, "the loss a_number_as_metric returned a float as its metric 'length'"),
        (without_mask, "the loss without_mask is not 0 where batch.mask is False"),
        (not_finite, "the loss not_finite or its gradient is not finite"),
        (in_numpy, r"the loss in_numpy calls numpy, .* xp = array_namespace\(policy.logp\)"),
        (
            of_entropy,
            "the loss of_entropy reads an array that this algorithm does not provide .*: policy.logp, batch",
        ),
        (constant, "the loss constant has no gradient with respect to policy.logp: nothing would be learnt"),
    ],
)
def test_a_loss_that_cannot_be_trained_with_is_refused(loss: Any, error: str, backend: str) -> None:
    with pytest.raises(UserError, match=error):
        algorithm.check_algorithm(replace(recipes.grpo(), loss=loss), backend, 4)


def test_a_loss_that_raises_is_a_problem_with_its_place(backend: str) -> None:
    config: Any = None
    found = run_check(
        config, "algorithm", lambda: algorithm.check_algorithm(replace(recipes.grpo(), loss=misspelt), backend, 4)
    )
    assert not found.ok
    assert re.match(r"AttributeError: .*'advantage'.* \(.*test_check\.py:\d+ in misspelt\)$", found.message)


def of_values(policy: Policy, batch: Batch) -> Any:
    return masked(policy.values - batch.returns, batch.mask).sum(), {}


def test_a_critics_loss_is_looked_at_too(backend: str) -> None:
    with pytest.raises(UserError, match="the loss of_values returned an array"):
        algorithm.check_algorithm(replace(recipes.ppo(), value_loss=of_values), backend, 4)


@pytest.mark.parametrize(
    "parts, error",
    [
        ({"advantages": lambda rewards: rewards[:-1]}, r"<lambda> returned advantages of shape \[11\]: it must be \[12\]"),
        ({"advantages": lambda rewards, mask: rewards.sum(1)}, r"returned advantages of shape \[12\]: it must be \[12, \d+\]"),
        ({"weighting": lambda mask: mask.sum(1)}, r"<lambda> returned weighting of shape"),
        ({"corrections": lambda log_ratio, mask, segment_ids: 1.0}, r"<lambda> returned corrections of shape \[\]"),
        ({"shaping": lambda lengths: lengths.sum()}, r"<lambda> returned shaping of shape \[\]: it must be \[12\]"),
        ({"filters": (lambda group: None,)}, "the filter <lambda> did not return a bool"),
    ],
)
def test_a_part_of_another_shape_is_refused(parts: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        algorithm.check_algorithm(replace(recipes.grpo(), **parts), "torch", 4)


OTHERS = {
    "dpo": recipes.dpo(),
    "ipo": recipes.ipo(),
    "reward_model": recipes.reward_model(),
    "own": replace(recipes.grpo(), loss=well),
}


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *(("torch", name) for name in (*RECIPES, *OTHERS)),
        *(("jax", name) for name in ("ppo", "own")),
        *further(*(("jax", name) for name in (*RECIPES, *OTHERS) if name not in ("ppo", "own"))),
    ],
    indirect=["backend"],
)
def test_every_recipe_and_a_loss_that_is_well_have_no_problem(name: str, backend: str) -> None:
    made = {**RECIPES, **OTHERS}[name]
    size = 1 if made.advantages is None or "greedy" in made.needs else 4
    assert algorithm.check_algorithm(made, backend, size).startswith(made.name)


def test_a_filter_sees_the_runs_own_tasks() -> None:
    def hard(group: Group) -> bool:
        return bool(group.task.metadata["hard"])

    tasks = [replace(task, metadata={"hard": True}) for task in TASKS]
    assert algorithm.check_algorithm(replace(recipes.grpo(), filters=(hard,)), "torch", 4, tasks)


def test_the_command_names_the_loss(checked: Any) -> None:
    status, lines = checked("grpo.loss = @checked.one_value")
    assert status == 1
    assert lines[0].startswith("PROBLEM  algorithm: the loss one_value returned an array []")


# ---- versions


def test_a_package_of_another_version_or_none_is_named_with_what_installs_it() -> None:
    found = list(versions.conflicts([Requirement("numpy>=1"), Requirement("numpy<1"), Requirement("no-such-thing>=2")], False))
    assert found == [
        f"needs numpy<1, and {distribution('numpy').version} is installed: pip install 'numpy<1'",
        "needs no-such-thing>=2, which is not installed: pip install 'no-such-thing>=2'",
    ]
    assert list(versions.conflicts([Requirement("no-such-thing>=2")], True)) == []


def test_a_vllm_whose_endpoints_are_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    other = SimpleNamespace(name="vllm", version="0.33.1", requires=[])
    find = versions.find_package
    monkeypatch.setattr(versions, "find_package", lambda name: other if name in versions.DISTRIBUTIONS else find(name))
    with pytest.raises(UserError, match=r"vllm 0\.33\.1 is installed, .* pip install 'vllm==0\.32\.\*'"):
        versions.check_versions("jax", with_vllm=True)
    assert "vllm" not in versions.check_versions("jax", with_vllm=False)


# ---- tasks and rewards


def test_the_reward_is_called_in_a_process_of_its_own_and_ended_after_its_time() -> None:
    task = Task("one", "1+0=", "1")
    assert "counts_ones gives 0.125 for its own answer" in data.check_reward(SingleTurn(reward=counts_ones), [task])
    with pytest.raises(UserError, match=r"fails failed on task 'one' \(ZeroDivisionError"):
        data.check_reward(SingleTurn(reward=fails), [task])
    with pytest.raises(UserError, match=r"sleeps did not finish .* within 0\.2 seconds: .*reward_timeout_seconds"):
        data.check_reward(SingleTurn(reward=sleeps, reward_timeout_seconds=0.2), [task])


@pytest.mark.parametrize(
    "reward, sentence",
    [
        ("blind", "blind never reads the text"),
        ("generous", r"generous gives 1 for each of 14 different texts, an empty one included"),
    ],
)
def test_a_reward_that_tells_no_answer_from_another_is_refused(reward: str, sentence: str) -> None:
    tasks = [Task("one", "1+0=", "1"), Task("two", "1+1=", "2")]
    with pytest.raises(UserError, match=sentence):
        data.check_reward(SingleTurn(reward=globals()[reward]), tasks, must_vary=True)


def test_a_reward_may_judge_all_samples_alike_where_it_could_give_more() -> None:
    tasks = [Task("one", "1+0=", "1")]
    assert data.check_reward(SingleTurn(reward=counts_ones), tasks, must_vary=True).endswith("to task 'one'")
    assert "0 for its own answer to task 'one', and the same for 7 other" in data.check_reward(
        SingleTurn(reward=demanding), tasks, must_vary=True
    )


def test_a_constant_reward_is_a_problem_where_the_algorithm_learns_from_rewards(checked: Any) -> None:
    status, lines = checked("single_turn.reward = @checked.blind")
    assert status == 1
    assert "PROBLEM  reward: blind never reads the text" in lines[0]


def test_a_group_of_one_is_refused_where_attempts_are_compared(tiny_model_dir: Path, tmp_path: Path, capsys: Any) -> None:
    assert check.main(command("train.group_size = 1", model=tiny_model_dir, tmp_path=tmp_path)) == 1
    said = capsys.readouterr().err
    assert '-b "train.group_size = 1": train.group_size = 1 cannot work: it must be at least 2: grpo compares' in said


def blind(task: Task, text: str) -> float:
    return float(len(task.prompt))


def generous(task: Task, text: str) -> float:
    return 1.0 if "never said" not in text else 0.0


def demanding(task: Task, text: str) -> float:
    return float("def solve" in text)


def fails(task: Task, text: str) -> float:
    return 1 / 0


def sleeps(task: Task, text: str) -> float:
    time.sleep(600)
    return 1.0


@pytest.mark.parametrize(
    "tasks, sentence",
    [
        ([], "has no tasks"),
        (["a prompt"], "contains a str instead of tasks"),
        ([Task("a", "1"), Task("a", "2")], "two different tasks with the id 'a'"),
        ([Task("a", "1", "x"), Task("a", "1", "y")], "two different tasks with the id 'a'"),
    ],
)
def test_tasks_that_cannot_be_trained_on(tasks: list[Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        data.check_tasks("train.dataset", tasks)


def test_a_task_that_comes_twice_is_no_problem() -> None:
    assert (
        data.check_tasks("train.dataset", [Task("a", "1"), Task("a", "1")]) == "2 tasks, 1 of them different; the first is 'a'"
    )


# ---- folders


def test_a_run_that_exists_and_a_folder_that_is_a_file(experiment: Experiment, tmp_path: Path) -> None:
    assert "can be written" in storage.check_run_directory(experiment)
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "config.gin").touch()
    with pytest.raises(ConfigError, match=r"train\.name = 'run' .* exists"):
        storage.check_run_directory(experiment)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"train\.runs = .* is a file"):
        storage.check_run_directory(replace(experiment, runs=str(tmp_path / "file" / "runs")))


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda place, mode: False)
    with pytest.raises(ConfigError, match=r"vllm\.staging = .* that can be written"):
        storage.check_writable("vllm.staging", tmp_path)


def test_checkpoints_and_weights_that_will_not_fit_on_the_disk(
    experiment: Experiment, tiny: model.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1_000_000))
    with pytest.raises(
        ConfigError, match=r"train\.keep_checkpoints = 2 .* 3 times a checkpoint of 1\.[0-9]+ MB .* 1 MB are free"
    ):
        storage.check_disk(experiment, tiny)
    with pytest.raises(ConfigError, match=r"train\.export_every = 1 .* larger, .*, [0-9]+ exports of .* together"):
        storage.check_disk(replace(experiment, steps=50, export_every=1), tiny)
    config = VLLMConfig(staging="/tmp")
    many = replace(experiment, vllm=config)
    assert "1 MB are free" in storage.check_staging(many, config, tiny, on_cpu=True)
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"vllm\.staging = '/tmp' .* the size of the weights"):
        storage.check_staging(many, config, tiny, on_cpu=True)


def test_a_checkpoint_takes_what_was_counted(experiment: Experiment, tiny: model.Model) -> None:
    once = replace(experiment, steps=1, engine="embedded")
    saved = once.run().directory / "checkpoints" / "1" / "trainer"
    tensors = sum(file.stat().st_size for file in saved.glob("*.safetensors"))
    assert storage.checkpoint_bytes(experiment, tiny) == pytest.approx(tensors, rel=0.05)
    assert storage.checkpoint_bytes(replace(experiment, algorithm=recipes.ppo()), tiny) == 2 * storage.checkpoint_bytes(
        experiment, tiny
    )


# ---- memory


def qwen(parameters: int) -> Any:
    config = {"hidden_size": 1536, "num_hidden_layers": 28, "intermediate_size": 8960, "num_attention_heads": 12}
    return SimpleNamespace(parameters=parameters, config={**config, "num_key_value_heads": 2, "head_dim": 128})


def with_trainer(experiment: Experiment, **changes: Any) -> Experiment:
    return replace(experiment, trainer=replace(experiment.trainer, **changes))


def test_memory_is_counted_by_parameter_and_by_token(experiment: Experiment) -> None:
    experiment = replace(experiment, engine="none", row_length=1024, cluster="ray")
    need = memory.estimate(experiment, qwen(10**9), GPU)
    assert need.state == 18e9  # weight, gradient and two moments in fp32, and bf16 to compute with
    per_layer = 3 * 1536 + (12 + 2 * 2) * 128 + 2 * 8960
    assert need.activations == 4 * 1024 * 28 * per_layer * 2
    split = with_trainer(experiment, mesh=MeshConfig(fsdp=4, tensor=2, processes=8))
    assert memory.estimate(split, qwen(10**9), GPU).state == 18e9 / 8
    adapters = with_trainer(experiment, lora=LoRAConfig(rank=8))
    assert memory.estimate(adapters, qwen(10**9), GPU).state == 2e9
    fewer = with_trainer(experiment, optimizer=OptimizerConfig(name="adafactor"))
    assert memory.estimate(fewer, qwen(10**9), GPU).state == 10e9


def test_latent_attention_is_cached_as_all_heads_have_it(experiment: Experiment) -> None:
    run = replace(experiment, embedded=EmbeddedConfig(slots=3), row_length=1024)
    plain = qwen(10**9)
    widths = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 96}
    latent = SimpleNamespace(parameters=10**9, config={**plain.config, **widths, "num_key_value_heads": 12})
    assert memory.estimate(run, plain, GPU).engine == 2e9 + 3 * 1024 * 28 * 2 * (2 * 128) * 2
    assert memory.estimate(run, latent, GPU).engine == 2e9 + 3 * 1024 * 28 * 12 * (128 + 64 + 96) * 2


def test_a_delta_rule_has_a_state_for_each_slot_in_place_of_keys_and_values(experiment: Experiment) -> None:
    run = replace(experiment, embedded=EmbeddedConfig(slots=3), row_length=1024)
    plain = qwen(10**9)
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 7
    rule = {"linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 96}
    hybrid = SimpleNamespace(parameters=10**9, config={**plain.config, **rule, "layer_types": kinds})
    assert memory.estimate(run, hybrid, GPU).engine == 2e9 + 3 * (1024 * 7 * 2 * (2 * 128) * 2 + 21 * 32 * 128 * 96 * 4)


def test_heads_of_other_sizes_count_where_they_are_and_shared_keys_once(experiment: Experiment) -> None:
    run = replace(experiment, embedded=EmbeddedConfig(slots=3), row_length=1024)
    full = {str(layer): {"head_dim": 512, "num_key_value_heads": 1} for layer in (6, 13, 20, 27)}
    changes = {"per_layer_config": full, "num_kv_shared_layers": 14}
    varied = SimpleNamespace(parameters=10**9, config={**qwen(10**9).config, **changes})
    assert memory.estimate(run, varied, GPU).engine == 2e9 + 3 * 1024 * (12 * 2 * 128 + 2 * 512) * 2 * 2


@pytest.mark.parametrize(("remat", "of_each_layer"), [("layers", 1536), ("attention", 1536 + 2 * 12 * 128 + 2 * 2 * 128)])
def test_what_is_recomputed_is_kept_of_one_layer_alone(remat: str, of_each_layer: int, experiment: Experiment) -> None:
    run = with_trainer(replace(experiment, engine="none", row_length=1024), remat=remat)
    one = 2 * 1536 + (12 + 2 * 2) * 128 + 2 * 8960
    assert memory.estimate(run, qwen(10**9), GPU).activations == 4 * 1024 * (28 * of_each_layer + one) * 2


@pytest.mark.parametrize(
    "parameters, changes, binding",
    [
        (10**10, {"engine": "none"}, "mesh.fsdp"),
        (4 * 10**9, {"engine": "none", "row_length": 16384}, "trainer.micro_batch_rows"),
        (10**9, {"engine": "vllm"}, "vllm.arguments"),
        (10**9, {"embedded": EmbeddedConfig(slots=100_000), "row_length": 1024}, "embedded.slots"),
    ],
)
def test_what_does_not_fit_names_what_to_lower(experiment: Experiment, parameters: int, changes: Any, binding: str) -> None:
    with pytest.raises(ConfigError) as raised:
        memory.check_memory(replace(experiment, **changes), qwen(parameters), GPU)
    assert raised.value.binding == binding
    assert "of the 80 GB that each device has" in str(raised.value)


def test_servers_of_either_program_are_counted_among_what_the_nodes_need(experiment: Experiment) -> None:
    described = []
    for made in (VLLMConfig, SGLangConfig):
        config = made(least=2, most=3, tensor=2)
        placement = ClusterConfig(server_cpus=6)
        changes = {"engine": config.binding, "cluster": "ray", "placement": placement, config.binding: config}
        run = replace(experiment, backend="jax", **changes)
        described.append(nodes.described(run, [{"CPU": 8.0, "GPU": 8.0}]))
        assert run.other_cpus() == 3 * 6
        *_, need = nodes.needs(run, [{"CPU": 8.0, "GPU": 8.0}])
        assert need.count_setting == f"{config.binding}.servers"
        assert run.completed(config, placed=True).threads == 3
    assert described[0] == described[1] == "1 rank on a node each, with all of its GPUs; 2 servers of 2 GPU and 6 CPU"
    beside = replace(run, engine="embedded", vllm=VLLMConfig(tensor=8))  # whose servers it does not start
    assert nodes.described(beside, [{"CPU": 8.0, "GPU": 8.0}]) == "1 rank on a node each, with all of its GPUs"
    assert servers.check_sglang_servers(config, placed=True).startswith("2 to 3 will be started on the nodes of the cluster")


def test_servers_on_gpus_of_their_own_take_nothing_of_the_trainers(experiment: Experiment) -> None:
    shared = replace(experiment, engine="vllm", vllm=VLLMConfig(arguments=("--gpu-memory-utilization", "0.4")))
    assert memory.estimate(shared, qwen(10**9), GPU).engine == 0.4 * 80e9
    assert memory.estimate(replace(experiment, engine="vllm", vllm=VLLMConfig(devices=("1",))), qwen(10**9), GPU).engine == 0
    wide = replace(experiment, engine="vllm", vllm=VLLMConfig(servers=2, tensor=2, data=2))
    assert memory.estimate(wide, qwen(10**9), Devices("cpu", 1, None)).engine == 4 * (4e9 + 2e9)  # fp32, in each engine whole
    assert memory.estimate(replace(shared, cluster="ray"), qwen(10**9), GPU).engine == 0  # Ray gives them others


def test_two_versions_beside_the_trainer_and_two_beside_each_machines_servers_are_counted_for_deltas(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, here = Devices("cpu", 1, None), "http://127.0.0.1:8000"

    def memory_of(**changes: Any) -> float:
        run = replace(experiment, engine="vllm", **changes)
        return memory.estimate(run, qwen(10**9), cpu).deltas / 1e9

    monkeypatch.setattr(deltas, "default_parent", lambda: Path("/dev/shm"))
    version = 4  # GB in fp32
    assert memory_of(vllm=VLLMConfig()) == 0
    shared, on_disk = VLLMConfig(delta=9), VLLMConfig(delta=9, delta_cache=str(tmp_path))
    assert memory_of(vllm=shared) == 4 * version
    assert memory_of(vllm=on_disk) == 2 * version
    assert memory_of(vllm=replace(shared, servers=3)) == 4 * version  # one cache for a machine's servers
    assert memory_of(vllm=replace(shared, urls=("http://far:8000",), staging="/far")) == 2 * version
    assert memory_of(vllm=replace(shared, urls=("http://far:8000", here), staging="/far")) == 4 * version
    assert memory_of(vllm=shared, cluster="ray") == 0  # neither is here
    assert memory.estimate(replace(experiment, engine="vllm", vllm=shared), qwen(10**9), GPU).deltas == 0

    def refused(free: float, host: float, config: VLLMConfig, on_cpu: bool = False, **changes: Any) -> str:
        monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=free))
        monkeypatch.setattr(deltas, "host_memory", lambda: host)
        monkeypatch.setattr(memory, "host_memory", lambda: host)
        run = replace(experiment, engine="vllm", vllm=config, **changes)
        room = deltas.delta_room(run, qwen(10**9), on_cpu)
        assert room is not None
        try:
            deltas.check_deltas(run, qwen(10**9), room, on_cpu)
            memory.check_memory(run, qwen(10**9), cpu if on_cpu else replace(GPU, memory=10**12))
        except ConfigError as error:
            return f"{error}"
        return ""

    apart = replace(on_disk, staging="/proc")  # another file system than the cache's; in bf16 a version is 2 GB
    assert refused(4e9, 4e9, apart) == ""
    assert re.search(
        r"vllm\.delta_cache = .* room for 2 versions of the weights, 4 GB: /.* has 3\.9 GB", refused(3.9e9, 4e9, apart)
    )
    assert re.search(r"vllm\.delta = 9 .* 0, or a machine with more memory than 3\.9 GB", refused(4e9, 3.9e9, apart))
    beside = replace(on_disk, staging=str(tmp_path))
    assert refused(6e9, 4e9, beside) == ""
    assert "4 GB beside the staged one, 2 GB" in refused(5.9e9, 4e9, beside)
    assert refused(0, 0, apart, cluster="ray") == ""  # the machines that serve and train are others
    need = memory.estimate(replace(experiment, engine="vllm", vllm=apart), qwen(10**9), cpu)
    whole = need.state + need.activations + need.engine + 8e9
    assert refused(8e9, whole, apart, on_cpu=True) == ""
    assert re.search(r"vllm\.delta = 9 .* 0: .* deltas 8 GB, of the", refused(8e9, whole - 1, apart, on_cpu=True))


# ---- servers


def test_servers_that_are_not_there(experiment: Experiment, tiny_model_dir: Path) -> None:
    with pytest.raises(UserError, match=r"no healthy vLLM server answers at http://127\.0\.0\.1:1:"):
        servers.check_engine_servers(VLLMConfig(urls=("http://127.0.0.1:1",)))
    distilling = replace(experiment, algorithm=distill(), teacher="http://127.0.0.1:1")
    with pytest.raises(UserError, match=r"no server answers at http://127\.0\.0\.1:1, which is to be the reference or teacher"):
        servers.check_scoring_servers(distilling, tiny_model_dir)


# ---- tokens


def test_prompts_with_images_need_a_model_and_an_engine_that_see(experiment, tiny, tmp_path) -> None:
    pytest.importorskip("torch")
    from examples.vision.task import pictures
    from examples.vision.warm_start import write_model

    write_model(tmp_path / "seeing", 0)
    seeing = model.find_model(str(tmp_path / "seeing"))
    for backend in ("torch", "jax"):
        assert "22 tokens" in fit(replace(experiment, backend=backend), pictures(3), seeing)
    with pytest.raises(ConfigError, match=r"train\.engine = 'sglang' .* 'vllm' or 'embedded': .* not send to SGLang"):
        fit(replace(experiment, backend="torch", engine="sglang"), pictures(3), seeing)
    with pytest.raises(UserError, match="reads text only"):
        fit(replace(experiment, backend="torch"), pictures(3), tiny)


def test_servers_on_a_cpu_are_no_engine_for_images_that_see_themselves(
    experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from examples.vision.task import pictures

    write_prompt_files(tmp_path, SEEING_SQUARES["gemma3_vl"])
    (tmp_path / "config.json").write_text(json.dumps(SEEING_SQUARES["gemma3_vl"]))
    squares, served = model.Model(tmp_path, {}), replace(experiment, backend="torch", engine="vllm")
    monkeypatch.setattr(features, "is_cpu_build", lambda: True)
    with pytest.raises(UserError, match="which vLLM's attention on a CPU does not"):
        fit(served, pictures(1), squares)
    monkeypatch.setattr(features, "is_cpu_build", lambda: False)
    assert "the longest of the first 1 prompts" in fit(replace(served, row_length=256), pictures(1), squares)


def test_vllm_servers_without_areal_x_are_no_engine_for_images_with_text_between_their_rows(experiment, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from examples.vision.task import pictures

    row_images.write_prompt_files(tmp_path, SEEING_ROWS["mistral3_vl"])
    (tmp_path / "config.json").write_text(json.dumps(SEEING_ROWS["mistral3_vl"]))
    of, longer = model.Model(tmp_path, {}), replace(experiment, backend="torch", row_length=256)
    assert "the longest of the first 1 prompts" in fit(longer, pictures(1), of)
    assert "the longest of the first 1 prompts" in fit(replace(longer, engine="vllm"), pictures(1), of)
    others = VLLMConfig(urls=("http://127.0.0.1:1",), transport="nccl")
    with pytest.raises(UserError, match=r"with areal-x installed beside them alone: set vllm\.transport = 'files'"):
        fit(replace(longer, engine="vllm", vllm=others), pictures(1), of)


def fit(experiment: Experiment, tasks: list[Task], of: model.Model) -> str:
    from areal_x.hf.tokenizer import load_tokenizer

    return tokens.check_lengths(experiment, tasks, load_tokenizer(of.directory), of)


@pytest.mark.parametrize(
    "change, tasks, sentence",
    [
        (lambda e: e, [Task("long", "1" * 40)], r"train\.row_length = 32 .* greater: all 1 tasks have prompts longer than 24"),
        (lambda e: replace(e, row_length=1024), TASKS, r"train\.row_length = 1024 .* at most 512, the longest context"),
        (lambda e: with_trainer(e, mesh=MeshConfig(context=3)), TASKS, r"a multiple of mesh\.context = 3"),
        (
            lambda e: replace(e, workflow=SingleTurn(reward=counts_ones, sampling=SamplingParams(max_tokens=30))),
            TASKS,
            r"sampling\.max_tokens = 30 .* at most 28, or train\.row_length = 32 raised",
        ),
        (lambda e: e, [Task("chat", [{"role": "user", "content": "1"}])], "the tokenizer has no chat template"),
    ],
)
def test_lengths_that_do_not_go_together(
    experiment: Experiment, tiny: model.Model, change: Callable[[Any], Any], tasks: list[Task], sentence: str
) -> None:
    assert "the longest of the first 10 prompts has 4 tokens, answers up to 8, of 32" in fit(experiment, TASKS, tiny)
    with pytest.raises(UserError, match=sentence):
        fit(change(experiment), tasks, tiny)


def test_prompts_that_are_too_long_are_counted_wherever_they_stand(experiment: Experiment, tiny: model.Model) -> None:
    tasks = [*(Task(f"{i}", "1+1=") for i in range(500)), Task("long", "1" * 25), Task("last", "1+1=")]
    said = fit(experiment, tasks, tiny)
    assert "1 of 502 tasks have prompts longer than 24 tokens and are left out; the longest of the first 100 other" in said


def test_an_answer_that_could_not_end(tiny: model.Model) -> None:
    class Ending:
        def __init__(self, token: int | None) -> None:
            self.eos_token_id, self.name_or_path = token, "x"

    with pytest.raises(UserError, match="has no end token"):
        tokens.check_end_tokens(Ending(None), tiny)
    with pytest.raises(UserError, match="the end token 99 is outside the vocabulary of 44"):
        tokens.check_end_tokens(Ending(99), tiny)


# ---- models of other families


def test_a_config_has_common_names_and_transformers_defaults() -> None:
    small = model.with_defaults({"model_type": "gpt2", "n_embd": 48, "n_head": 4, "n_layer": 3})
    names = "hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"
    assert [small[name] for name in names] == [48, 4, 3, 50257]
    sees = {"model_type": "qwen3_vl", "text_config": {"hidden_size": 40}, "vision_config": {}}
    assert model.with_defaults(sees)["hidden_size"] == 40
    for unread in ({"model_type": "mystery", "a": 1}, {"model_type": "qwen3", "num_hidden_layers": "two"}, {"model_type": [1]}):
        assert model.with_defaults(unread) == unread


def test_a_model_with_names_of_its_own_is_checked_whole_and_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("areal_x_torch")
    from transformers import GPT2Config, GPT2LMHeadModel

    directory = write_model(tmp_path / "model")  # for its tokenizer
    config = GPT2Config(vocab_size=44, n_embd=32, n_head=2, n_layer=2, n_positions=512, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(directory)

    def said(backend: str) -> list[str]:
        check.main(command(f"train.backend = '{backend}'", model=directory, tmp_path=tmp_path))
        lines = capsys.readouterr().out.splitlines()
        assert any(" memory: " in line for line in lines) == (backend == "torch")
        return [line for line in lines if line.startswith("PROBLEM") and " versions: " not in line]

    assert said("torch") == []
    (refused,) = said("jax")
    assert "GPT2LMHeadModel" in refused
