"""Predictions against what can be computed by hand, and the command from a run's directory to its sentence."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from areal_x import plan
from areal_x.config.reader import load
from areal_x.monitor.metrics import MetricsWriter
from areal_x.run.journal import Journal
from areal_x.simulation import FakeEngine, FakeTrainer, Speed, fixed, simulate
from areal_x.simulation.planner import (
    Choice,
    Nodes,
    Prediction,
    Profile,
    predict,
    profile_from_sizes,
    recommended,
    search,
    splits,
)
from tests.thorough import further

# 16 tokens in steps of 1/8 s; a batch of 2 x 4 sequences of 16 + 8 tokens trains in 3 s on one accelerator.
PROFILE = Profile(0.125, 0.0, np.inf, 1 / 64, 0.5, 0.25, np.full(5, 16, np.int32), 8, 8)
CHOICE = Choice(1, 1, max_staleness=0, window=1, concurrency=8, groups_per_step=2, group_size=4)


def test_without_staleness_a_step_is_the_sum_of_its_parts():
    predicted = predict(PROFILE, CHOICE)
    assert predicted.step_seconds == 2 + 3 + 0.5 + 0.25
    assert predicted.trainer_idle == (2 + 0.25) / 5.75  # its groups and, before, the engine with the last weights
    assert predicted.generation_idle == 1 - 2 / 5.75
    assert (predicted.staleness_mean, predicted.staleness_max) == (0, 0)
    assert predicted.tokens_per_second == 2 * 4 * 16 / 5.75


def test_with_staleness_a_step_is_the_longer_of_its_parts():
    assert predict(PROFILE, replace(CHOICE, max_staleness=2)).step_seconds == 3 + 0.5  # the swap is beside it
    quick = predict(replace(PROFILE, train_token_seconds=1 / 1024, publish_seconds=0.0), replace(CHOICE, max_staleness=2))
    assert quick.step_seconds == pytest.approx(2.25, abs=0.25)


def test_twice_the_accelerators_halve_what_they_do():
    assert predict(PROFILE, replace(CHOICE, training=2)).step_seconds == 2 + 1.5 + 0.75
    halved = replace(PROFILE, decode_step_seconds=0.0, decode_request_seconds=0.125 / 8)
    assert predict(halved, replace(CHOICE, generation=2)).step_seconds == 1 + 3 + 0.75


def test_the_splits_leave_each_side_one_and_are_not_many():
    assert [(c.generation, c.training) for c in splits(3, CHOICE)] == [(1, 2), (2, 1)]
    assert [c.generation for c in splits(64, CHOICE)] == [8, 16, 24, 32, 40, 48, 56]


@pytest.mark.parametrize("together", [1, 2, 8])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
def test_no_server_and_no_group_of_ranks_is_on_two_nodes(width: int, together: int) -> None:
    """Compared with every number of servers on each of three nodes."""
    nodes = Nodes(count=3, each=8, together=together)
    possible: dict[int, int] = {}
    for counts in itertools.product(range(8 // width + 1), repeat=3):
        free = sum((8 - count * width) // together * together for count in counts)
        possible[sum(counts) * width] = max(free, possible.get(sum(counts) * width, 0))
    found = splits(24, replace(CHOICE, width=width), most=24, nodes=nodes)
    dense = {c.generation: c.training for c in found}
    assert dense.keys() <= possible.keys()
    assert all(training <= possible[generation] for generation, training in dense.items())
    assert all(c.servers * width == c.generation for c in found)
    if 8 % width == 0 and 8 % together == 0:  # then to pack servers densely is the best
        assert dense == {generation: training for generation, training in possible.items() if generation and training}


def test_a_server_of_two_accelerators_is_as_fast_as_two_servers() -> None:
    profile = replace(PROFILE, decode_step_seconds=0.0, decode_request_seconds=0.125 / 8)
    two = predict(profile, replace(CHOICE, generation=2, concurrency=8))
    assert predict(profile, replace(CHOICE, generation=2, width=2)).step_seconds == two.step_seconds


def test_the_best_is_the_least_stale_of_those_that_are_nearly_as_fast():
    def made(seconds, staleness):
        return Prediction(CHOICE, seconds, 0.0, 0.0, staleness, 1, 1.0)

    assert recommended([made(10.0, 4.0), made(10.1, 2.0), made(11.0, 0.0)]).step_seconds == 10.1


def test_the_search_finds_the_split_at_which_both_sides_are_busy():
    # A step is 128 new tokens; an accelerator generates 16 a second alone, and trains on them in 24 s: 1 to 3 in balance.
    profile = replace(PROFILE, decode_step_seconds=0.0, decode_request_seconds=1 / 16, train_token_seconds=1 / 8)
    profile = replace(profile, publish_seconds=0.0, swap_seconds=0.0)
    found = search(profile, 4, CHOICE)
    assert (recommended(found).choice.generation, recommended(found).choice.training) == (1, 3)
    assert recommended(found).choice.max_staleness > 0
    assert [p.step_seconds for p in found] == sorted(p.step_seconds for p in found)


def test_sizes_become_seconds_by_the_arithmetic_of_the_roofline():
    profile = profile_from_sizes(
        1e9, flops=1e14, bandwidth=1e12, mean_length=100, most=400, prompt_tokens=8, concurrency=8, efficiency=0.5
    )
    assert profile.decode_step_seconds == 2e9 / 0.5e12
    assert 1 / profile.prefill == profile.decode_request_seconds == 2e9 / 0.5e14
    assert profile.train_token_seconds == pytest.approx(6e9 / 0.5e14)
    assert profile.lengths.max() == 400
    assert 85 < profile.lengths.mean() <= 102  # the mean before the cut is 100


@pytest.mark.parametrize(
    ("bindings", "passes"),
    [
        ([], 0),
        (["train.algorithm = @decoupled_ppo()"], 0),  # the step's own pass
        (["train.algorithm = @decoupled_ppo()", "train.minibatches = 2"], 1),
        (["train.algorithm = @ppo()", "train.minibatches = 2"], 1),  # the critic's values
    ],
)
def test_forward_passes_before_a_step_are_counted(tmp_path, bindings, passes):
    file = tmp_path / "run.gin"
    file.write_text("\n".join(bindings))
    assert plan.forward_passes(load(file)) == passes


def recorded(run, steps=8, **ring):
    """The directory that a simulated run leaves, as a real one does."""
    run.mkdir(parents=True)
    settings = {"groups_per_step": 2, "group_size": 4, "max_staleness": 0} | ring
    engine = FakeEngine(Speed(np.inf, lambda n: 8.0 * n, 0.25), concurrency=8, length=fixed(16))
    with Journal(run) as journal, MetricsWriter(run) as metrics:
        for row in simulate(engine, FakeTrainer(3.0, 0.5), steps=steps, recorder=journal, **settings):
            metrics.write(row | {"logprob_seconds": 0.0, "publish_seconds": row["publish_seconds"]})
    (run / "config.gin").write_text(
        "import examples.arithmetic.task\ntrain.dataset = @arithmetic.problems()\ntrain.workflow = @single_turn()\n"
        "single_turn.reward = @arithmetic.verify\ntrain.engine = 'embedded'\nembedded.slots = 8\n"
        + "".join(f"train.{name} = {value}\n" for name, value in settings.items())
    )
    return run


def test_a_runs_measurements_give_the_run_again(tmp_path):
    ran, profile = plan.from_run(recorded(tmp_path / "run"))
    assert ran == CHOICE
    assert profile.lengths.tolist() == [16] * len(profile.lengths)
    assert profile.prompt_tokens == 100
    assert profile.train_token_seconds == pytest.approx(3 / (8 * 116))
    assert predict(profile, ran).step_seconds == pytest.approx(2 + 3 + 0.5 + 0.25, rel=0.02)


def test_the_command_says_what_to_bind_and_draws_it(tmp_path, capsys):
    run = recorded(tmp_path / "run")
    picture = tmp_path / "plan.png"
    assert plan.main([str(run / "config.gin"), "--from", str(run), "--accelerators", "4", "--plot", str(picture)]) == 0
    said = capsys.readouterr().out
    assert "recommended (the least staleness within 2 % of the fastest): " in said
    assert "embedded.slots = " in said
    assert picture.stat().st_size > 10_000


SIZES = ["--parameters", "7e9", "--flops", "1e15", "--bandwidth", "3e12", "--mean-length", "100"]


@pytest.mark.parametrize(
    ("engine", "sizes"),
    [
        ("vllm", "vllm.tensor = 3\n"),
        *further(("vllm", "vllm.arguments = ('--tensor-parallel-size', '3')\n"), ("sglang", "sglang.tensor = 3\n")),
    ],
    ids=["vllm", "old file", "sglang"],
)
def test_on_nodes_the_command_recommends_whole_servers(tmp_path, capsys, engine, sizes):
    file = tmp_path / "run.gin"
    few = "train.groups_per_step = 4\ntrain.group_size = 4\n"  # the simulation takes a time in proportion
    file.write_text(f"train.engine = '{engine}'\ntrain.backend = 'torch'\n{few}{sizes}")
    nodes = ["--nodes", "2", "--gpus-per-node", "4", "--plot", str(tmp_path / "plan.png")]
    assert plan.main([str(file), *nodes, *SIZES]) == 0
    said = " ".join(capsys.readouterr().out.split())
    found = re.search(r"fastest\): (\d+) to generate \((\d) servers of 3\), (\d+) to train(, (\d+) unused)?", said)
    assert found, said
    generation, servers, training = (int(found[i]) for i in (1, 2, 3))
    assert generation == 3 * servers
    assert servers <= 2
    assert generation + training + int(found[5] or 0) == 8
    assert f"{engine}.concurrency = " in said


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--accelerators", "1"], "error: --accelerators = 1 cannot work: it must be at least 2: one to generate and one"),
        ([], "error: the plan needs accelerators: add --accelerators, or --nodes and --gpus-per-node"),
        (["--nodes", "2"], "error: --gpus-per-node = 0 cannot work: it must be greater than 0"),
        (
            ["--nodes", "2", "--gpus-per-node", "8", "--accelerators", "16"],
            "error: --accelerators = 16 cannot work: it must be left",
        ),
        (
            ["--nodes", "2", "--gpus-per-node", "8", *SIZES, "-b", "vllm.tensor = 4", "-b", "vllm.data = 8"],
            "vllm.data = 8 cannot work: it must be smaller: a server has 32 accelerators (tensor 4, data 8), and a node 8",
        ),
        (
            ["--nodes", "2", "--gpus-per-node", "8", *SIZES, "-b", "mesh.tensor = 16"],
            "mesh.tensor = 16 cannot work: it must be with mesh.expert at most 8 together",
        ),
        (["--accelerators", "4"], "error: the plan needs measurements or sizes: add --from RUN, or --parameters, --flops"),
        (
            ["--accelerators", "4", "--from", "nowhere"],
            "error: --from nowhere has 0 measured steps: name the directory of",
        ),
        (
            ["--accelerators", "4", "--parameters", "-1", "--flops", "1", "--bandwidth", "1", "--mean-length", "9"],
            "error: --parameters = -1.0 cannot work: it must be greater than 0",
        ),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, capsys, arguments, sentence):
    file = tmp_path / "run.gin"
    file.write_text("train.engine = 'vllm'\n")
    assert plan.main([str(file), *arguments]) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
