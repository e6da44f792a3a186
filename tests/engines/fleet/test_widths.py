"""The parallel sizes of servers: settings, old files' arguments, devices, nodes, and the model that is divided."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from areal_x.cluster.config import ClusterConfig
from areal_x.config.reader import load
from areal_x.config.types import check_early
from areal_x.engines.fleet.config import PROGRAMS, FleetConfig, widths_in
from areal_x.engines.fleet.widths import Widths, check_model, obstacles
from areal_x.engines.sglang.config import SGLangConfig
from areal_x.engines.sglang.server import Launch as SGLangLaunch
from areal_x.engines.sglang.server import command as sglang_command
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.server import Launch, command, environment
from areal_x.errors import ConfigError
from areal_x.shards.starter import threads_of
from areal_x.testing.models import QWEN3, write_model
from tests.models import MODELS

MIXTURE = {**QWEN3, "num_experts": 8, "moe_intermediate_size": 96}


@pytest.mark.parametrize(
    ("arguments", "typed", "left"),
    [
        ((), {}, ()),
        (("--tensor-parallel-size", "8"), {"tensor": 8}, ()),
        (("--tensor-parallel-size=4", "-pp", "2"), {"tensor": 4, "pipeline": 2}, ()),
        (("--tensor_parallel_size=4", "--seed", "-dp", "-dp", "2"), {"tensor": 4, "data": 2}, ("--seed", "-dp")),
        (("-tp", "2", "--max-num-batched-tokens", "512", "-tp", "4"), {"tensor": 4}, ("--max-num-batched-tokens", "512")),
        (("-tp", "2", "--enable-expert-parallel", "-dp=2"), {"tensor": 2, "data": 2, "expert": 4}, ()),
        (("-tp",), {}, ("-tp",)),
        (("-tp", "many"), {}, ("-tp", "many")),
    ],
)
def test_sizes_in_the_arguments_of_old_files_count_as_settings(
    arguments: tuple[str, ...], typed: dict[str, int], left: tuple[str, ...]
) -> None:
    config = VLLMConfig(arguments=arguments)
    assert config == VLLMConfig(**typed, arguments=left)
    assert replace(config, context=64) == VLLMConfig(**typed, arguments=left, context=64)
    assert config.widths == Widths(**typed)


def test_sglangs_arguments_count_too() -> None:
    config = SGLangConfig(arguments=("--tp", "4", "--ep-size=2", "--mem-fraction-static", "0.5"))
    assert config == SGLangConfig(tensor=4, expert=2, arguments=("--mem-fraction-static", "0.5"))
    assert config.widths.accelerators == 4


def test_the_file_of_an_old_run_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.gin"
    file.write_text("vllm.arguments = ('--tensor-parallel-size', '4', '--seed', '1')\nvllm.devices = ('0,1,2,3',)\n")
    check_early(load(file))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: VLLMConfig(tensor=4, arguments=("-tp", "4")),
            r"vllm\.arguments = \('-tp', '4'\) .* without -tp, which vllm\.tensor = 4 gives",
        ),
        (lambda: SGLangConfig(tensor=2, arguments=("--tp=4",)), r"sglang\.arguments .* without --tp, which sglang\.tensor = 2"),
        (lambda: VLLMConfig(arguments=("-pcp", "2")), r"vllm\.arguments .* without -pcp: it takes accelerators that no"),
        (lambda: VLLMConfig(tensor=0), r"vllm\.tensor = 0 .* greater than 0"),
        (lambda: VLLMConfig(data=-1), r"vllm\.data = -1 .* greater than 0"),
        (lambda: VLLMConfig(arguments=("-tp", "0")), r"vllm\.arguments, -tp = 0 .* greater than 0"),
        (lambda: VLLMConfig(tensor=2, data=2, expert=2), r"vllm\.expert = 2 .* 1 or 4: vLLM divides experts among all"),
        (lambda: SGLangConfig(tensor=4, expert=3), r"sglang\.expert = 3 .* a divisor of sglang\.tensor = 4"),
        (lambda: SGLangConfig(pipeline=2), r"sglang\.pipeline = 2 .* 1: SGLang's pause leaves requests in the stages"),
        (lambda: SGLangConfig(servers=2, data=3), r"sglang\.data = 3 .* 1: replicas .* set sglang\.servers = 6"),
        (lambda: SGLangConfig(arguments=("--dp-size", "2")), r"sglang\.data = 2 .* would sample the same tokens"),
        (
            lambda: VLLMConfig(servers=2, tensor=2, devices=("0,1", "2")),
            r"vllm\.devices = \('0,1', '2'\) .* 2 in each entry, as many as a server computes on",
        ),
        (lambda: SGLangConfig(devices=("0,1",)), r"sglang\.devices = \('0,1',\) .* 1 in each entry"),
        (
            lambda: VLLMConfig(transport="handles", allow_unpickling=True, pipeline=2),
            r"vllm\.pipeline = 2 .* 1 with vllm\.transport = 'handles'",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_the_setting(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_sizes_of_a_file_are_those_of_the_program_that_serves(program: str) -> None:
    given = {f"{name}.{size}": 1 for name in PROGRAMS for size in ("tensor", "pipeline", "data", "expert", "hosts")}
    given |= {f"{name}.arguments": () for name in PROGRAMS} | {"train.engine": program, f"{program}.tensor": 4}
    assert widths_in(given.__getitem__) == Widths(tensor=4)
    assert widths_in({**given, "train.engine": "embedded"}.__getitem__) == Widths()


def test_servers_divide_the_model_if_the_run_starts_them_and_gives_them_several_accelerators() -> None:
    assert VLLMConfig(pipeline=2).divides
    assert not VLLMConfig().divides
    assert not VLLMConfig(tensor=2, urls=("http://127.0.0.1:1",)).divides


def test_devices_for_every_accelerator_are_taken() -> None:
    config = VLLMConfig(servers=2, tensor=2, pipeline=2, devices=("0,1,2,3", "4,5,6,7"))
    assert config.widths.accelerators == 4


def test_a_server_is_started_with_the_sizes_that_it_has(tiny_model_dir: Path) -> None:
    wide = Launch(tiny_model_dir, Path(), Path(), 128, 8, seed=0, widths=Widths(2, 3, 4, 8), arguments=("--seed", "7"))
    words = command(wide, 1, cpu=False)
    assert {a: b for a, b in pairwise(words) if a.endswith("-parallel-size")} == {
        "--tensor-parallel-size": "2",
        "--pipeline-parallel-size": "3",
        "--data-parallel-size": "4",
    }
    assert "--enable-expert-parallel" in words
    narrow = replace(wide, widths=Widths())
    assert not any("parallel" in word for word in command(narrow, 1, cpu=True))
    binding = "VLLM_CPU_OMP_THREADS_BIND"
    assert environment(wide, "", cpu=True)[binding] == "nobind"
    assert binding not in environment(narrow, "", cpu=True)

    other = SGLangLaunch(tiny_model_dir, Path(), Path(), 128, 8, seed=0, widths=Widths(tensor=4, expert=2))
    words = sglang_command(other, 1, cpu=True)
    assert [words[words.index(name) + 1] for name in ("--tp-size", "--ep-size")] == ["4", "2"]
    assert not any(word.startswith(("--tp", "--ep")) for word in sglang_command(replace(other, widths=Widths()), 1, True))


@pytest.mark.parametrize(
    ("kind", "widths", "config", "words"),
    [
        ("vLLM", Widths(tensor=3), QWEN3, r"vllm\.tensor = 3 .* 1 or 2: the model's 4 attention heads must be divisible by it"),
        ("SGLang", Widths(tensor=8), QWEN3, r"sglang\.tensor = 8 .* 1 or 2 or 4: the model's 4 attention heads must be"),
        (
            "vLLM",
            Widths(tensor=4),
            QWEN3 | {"num_attention_heads": 12, "num_key_value_heads": 6},
            r"vllm\.tensor = 4 .* 1 or 2: the model's 6 key heads must be divisible by it, or it by them",
        ),
        (
            "vLLM",
            Widths(tensor=4),
            QWEN3 | {"intermediate_size": 90},
            r"vllm\.tensor = 4 .* 1 or 2: the model's intermediate_size 90 must be divisible by it",
        ),
        (
            "vLLM",
            Widths(tensor=3),
            QWEN3 | {"num_attention_heads": 6, "num_key_value_heads": 3},
            r"vllm\.tensor = 3 .* 1: the vocabulary, which vLLM pads to 64, must be divisible by it",
        ),
        ("vLLM", Widths(pipeline=3), QWEN3, r"vllm\.pipeline = 3 .* 1 or 2: the model has 2 layers"),
        ("vLLM", Widths(tensor=2, expert=2), QWEN3, r"vllm\.expert = 2 .* 1: the model has no experts"),
        (
            "SGLang",
            Widths(tensor=4, expert=4),
            MIXTURE | {"num_experts": 6},
            r"sglang\.expert = 4 .* the 6 experts of a layer must be",
        ),
        (
            "vLLM",
            Widths(tensor=4, data=8),
            MIXTURE | {"moe_intermediate_size": 80},
            r"vllm\.tensor = 4 .* 1 or 2: each expert's 80 intermediate columns must be divisible into 32 slices",
        ),
        (
            "vLLM",
            Widths(tensor=4),
            MIXTURE | {"num_experts": 2},
            r"vllm\.tensor = 4 .* 1 or 2: it may not exceed the 2 experts",
        ),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused(kind: str, widths: Widths, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_model(kind, kind.lower(), widths, config)


@pytest.mark.parametrize(
    ("kind", "widths", "config"),
    [
        ("vLLM", Widths(tensor=4, pipeline=2, data=3), QWEN3),  # two key heads, each in two places
        ("SGLang", Widths(tensor=3), QWEN3 | {"num_attention_heads": 6, "num_key_value_heads": 3}),  # pads by the size
        ("vLLM", Widths(tensor=4, data=2, expert=8), MIXTURE | {"num_experts": 9, "moe_intermediate_size": 90}),
        ("SGLang", Widths(tensor=4, expert=2), MIXTURE | {"moe_intermediate_size": 90}),
        ("vLLM", Widths(tensor=4), MIXTURE | {"intermediate_size": 90}),  # no layer is dense
        ("vLLM", Widths(), {}),
    ],
)
def test_a_model_that_can_be_divided_so_is_taken(kind: str, widths: Widths, config: dict[str, Any]) -> None:
    check_model(kind, kind.lower(), widths, config)


def test_no_family_is_refused_for_a_server_of_one_accelerator() -> None:
    found = {(kind, name): list(obstacles(kind, Widths(), x)) for kind in ("vLLM", "SGLang") for name, x in MODELS.items()}
    assert set(map(tuple, found.values())) == {()}


def test_an_engine_refuses_before_it_starts_a_server(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vllm\.tensor = 3 .* 1 or 2: the model's 4 attention heads must be divisible by it"):
        VLLMEngine(VLLMConfig(context=64, tensor=3), tiny_model_dir, tmp_path)
    VLLMEngine(VLLMConfig(context=64, tensor=3, urls=("http://localhost:1",)), tiny_model_dir, tmp_path)


def test_a_mixture_of_which_vllm_on_a_cpu_cannot_compute_parts_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    mixture = Launch(write_model(tmp_path, num_experts=4), Path(), Path(), 128, 8, seed=0, widths=Widths(data=2))
    with pytest.raises(ConfigError, match=r"vllm\.data = 2 .* 1 for a mixture with vLLM on a CPU, .* set vllm\.servers"):
        command(mixture, 1, cpu=True)
    with pytest.raises(ConfigError, match=r"vllm\.expert = 2 .* 1 with vLLM on a CPU"):
        command(replace(mixture, widths=Widths(tensor=2, expert=2)), 1, cpu=True)
    command(mixture, 1, cpu=False)
    command(replace(mixture, model=tiny_model_dir), 1, cpu=True)
    command(replace(mixture, widths=Widths(tensor=2)), 1, cpu=True)


def test_the_cores_of_a_node_are_divided_among_the_workers_there() -> None:
    config = VLLMConfig(servers=3, hosts=2, tensor=4, data=2)
    assert (config.workers, config.widths.on_each_host) == (24, 4)
    assert threads_of(config, ClusterConfig(server_cpus=8)) == 2
    assert threads_of(VLLMConfig(tensor=4), ClusterConfig(server_cpus=1)) == 1
    assert threads_of(replace(config, threads=3), ClusterConfig(server_cpus=8)) == 3


def test_every_size_has_its_setting() -> None:
    assert set(vars(Widths())) <= set(FleetConfig.__dataclass_fields__)
