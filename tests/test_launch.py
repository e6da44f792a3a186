"""The jobs that `areal-x launch` writes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from areal_x import launch
from areal_x.engines.fleet.config import PROGRAMS

FILE = "examples/arithmetic/grpo.gin"
WIDE = "-b", "mesh.processes = 16", "-b", "train.backend = 'torch'"
TRAIN = ["python", "-m", "areal_x.train", FILE, "--resume=auto"]


@pytest.fixture
def written(capsys: pytest.CaptureFixture[str]):
    def write(*words: str) -> str:
        assert launch.main(words) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return write


def bindings_of(command: str) -> list[str]:
    words = shlex.split(command)
    assert words[:5] == TRAIN
    assert words[5::2] == ["-b"] * (len(words) // 2 - 2)
    return words[6::2]


def test_a_batch_script_starts_one_task_a_node(written, tmp_path: Path) -> None:
    script = written("slurm", FILE, "--nodes", "2", "--gpus", "8", *WIDE)
    (tmp_path / "job").write_text(script)
    subprocess.run(["bash", "-n", tmp_path / "job"], check=True)
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8"} <= set(script.splitlines())
    (command,) = (line for line in script.splitlines() if "areal_x.train" in line)
    assert "areal_x.cluster.node after 2 python" in command
    assert bindings_of(command.removesuffix(" &").partition(" after 2 ")[2]) == [
        "mesh.processes = 16",
        "train.backend = 'torch'",
        "train.cluster = 'ray'",
    ]


def test_a_task_of_skypilot_keeps_the_run_on_the_shared_volume(written) -> None:
    task = yaml.safe_load(written("sky", FILE, "--nodes", "2", "--gpus", "8", *WIDE))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")
    (command,) = (line.strip() for line in task["run"].splitlines() if "areal_x.train" in line)
    assert bindings_of(command)[-2:] == ["train.cluster = 'ray'", "train.runs = '/shared/runs'"]
    assert "/shared" in task["file_mounts"]


def test_a_rayjob_has_a_head_without_gpus(written) -> None:
    job = yaml.safe_load(written("kuberay", FILE, "--nodes", "2", "--gpus", "8", "--image", "registry/areal-x", *WIDE))
    spec = job["spec"]
    assert "train.cluster = 'ray'" in bindings_of(spec["entrypoint"])
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    gpus = [x["template"]["spec"]["containers"][0]["resources"]["limits"] for x in (cluster["headGroupSpec"], workers)]
    assert gpus == [{}, {"nvidia.com/gpu": 8}]
    assert workers["replicas"] == 2


def served_by(program: str) -> tuple[str, ...]:
    servers = f"train.engine = {program!r}", f"{program}.servers = 4", f"{program}.tensor = 4"
    return tuple(x for b in (*servers, "cluster.ranks_on = 'train'", "cluster.servers_on = 'serve'") for x in ("-b", b))


SERVED = served_by("vllm")
FOUR = "--nodes", "4", "--gpus", "8"


@pytest.mark.parametrize("program", PROGRAMS)
def test_nodes_have_the_labels_that_the_file_asks_for(written, program: str) -> None:
    served = served_by(program)
    script = written("slurm", FILE, *FOUR, *WIDE, *served, "-b", f"{program}.staging = '/shared/w'")
    started = [line for line in script.splitlines() if " ray start " in line]
    head, *others = (re.search(r"--labels (\S+)", line)[1] for line in started)
    steps = [re.search(r"--nodes=(\d) --ntasks=(\d) --relative=(\d)", line) for line in started[1:]]
    assert [head, *zip(others, (step.groups() for step in steps), strict=True)] == [
        "role=train",
        ("role=train", ("1", "1", "1")),
        ("role=serve", ("2", "2", "2")),
    ]
    job = yaml.safe_load(written("kuberay", FILE, *FOUR, "--image", "x", *WIDE, *served))
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [(x["groupName"], x["replicas"], x["labels"]) for x in groups] == [
        ("train", 2, {"role": "train"}),
        ("serve", 2, {"role": "serve"}),
    ]
    assert f"{program}.staging = '/shared/weights'" in bindings_of(job["spec"]["entrypoint"])


def test_nodes_that_ranks_and_servers_leave_compute_rewards(written) -> None:
    words = ("--nodes", "6", "--gpus", "8", *WIDE, *SERVED, "-b", "cluster.hosts_on = 'rewards'", "--image", "x")
    groups = yaml.safe_load(written("kuberay", FILE, *words))["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [(x["groupName"], x["replicas"]) for x in groups] == [("train", 2), ("serve", 2), ("rewards", 2)]


@pytest.mark.parametrize(("rank", "label"), [(0, "train"), (1, "train"), (2, "serve"), (3, "serve")])
def test_skypilots_nodes_are_labelled_by_their_number_and_have_the_token_in_a_file(
    written, rank: int, label: str, tmp_path: Path
) -> None:
    run = yaml.safe_load(written("sky", FILE, *FOUR, *WIDE, *SERVED))["run"]
    before = run.partition("~/sky_templates")[0]
    variables = {
        "SKYPILOT_NODE_RANK": str(rank),
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "RAY_AUTH_TOKEN": "a token",
    }
    said = subprocess.run(["bash", "-c", before + "env"], env=variables, capture_output=True, text=True, check=True)
    found = dict(line.split("=", 1) for line in said.stdout.splitlines())
    assert found["RAY_OVERRIDE_LABELS"] == f'{{"role": "{label}"}}'
    assert "RAY_AUTH_TOKEN" not in found
    token = Path(found["RAY_AUTH_TOKEN_PATH"])
    assert (token.read_text(), token.stat().st_mode & 0o777) == ("a token", 0o600)


def test_one_node_without_labels_starts_no_ray(written) -> None:
    script = written("slurm", FILE, "--nodes", "1", "--gpus", "8")
    assert "ray start" not in script
    assert "srun" not in script
    assert "unset RAY_ADDRESS" in script


def test_a_run_without_servers_is_not_judged_by_their_settings(written) -> None:
    written("slurm", FILE, "--nodes", "2", "--gpus", "8", *WIDE, "-b", "vllm.tensor = 4", "-b", "vllm.hosts = 3")


@pytest.mark.parametrize(
    "words, sentence",
    [
        (("slurm", FILE, "--nodes", "0"), "error: --nodes = 0 cannot work: it must be greater than 0\n"),
        (
            ("slurm", FILE, "--nodes", "1", "--gpus", "8", *WIDE),
            "mesh.processes = 16 cannot work: it must be at most 8",
        ),
        (("slurm", FILE, "--nodes", "2", "--gpus", "8", "-b", "mesh.processes = 3"), "it must be at most 2, a node each"),
        (
            ("slurm", FILE, "--nodes", "3", "--gpus", "8", *WIDE, *SERVED, "-b", "vllm.staging = '/s'"),
            "vllm.servers = 4 cannot work: it must be at most 2, 2 on the only node with role=serve, beside 16 ranks of",
        ),
        (
            ("slurm", FILE, "--nodes", "3", "--gpus", "8", *WIDE, *served_by("sglang"), "-b", "sglang.staging = '/s'"),
            "sglang.servers = 4 cannot work: it must be at most 2, 2 on the only node with role=serve, beside 16 ranks of",
        ),
        (
            ("slurm", FILE, *FOUR, *WIDE, *SERVED),
            "vllm.staging = '' cannot work: it must be a folder that all nodes share under one path",
        ),
        (
            ("slurm", FILE, *FOUR, *WIDE, *SERVED, "-b", "cluster.hosts_on = 'rewards'", "-b", "vllm.staging = '/s'"),
            "cluster.hosts_on = 'rewards' cannot work: it must be left out, or --nodes greater",
        ),
        (
            ("slurm", FILE, *FOUR, *WIDE, *SERVED, "-b", "vllm.hosts = 3"),
            "vllm.hosts = 3 cannot work: it must be a divisor of 4, the accelerators of a server",
        ),
        (("kuberay", FILE, "--nodes", "1"), "--image = '' cannot work: it must be a container image"),
        (("slurm", FILE, "--nodes", "1", "-b", "train.step = 3"), "train.step"),
    ],
)
def test_what_has_no_room_is_refused(words, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(words) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, label", [("My run_2", "my-run-2"), ("7b", "run-7b"), ("--", "run"), ("x" * 99, "x" * launch.LONGEST_NAME)]
)
def test_a_name_is_made_a_label(written, name: str, label: str) -> None:
    script = written("slurm", FILE, "--nodes", "1", "-b", f"train.name = {name!r}")
    assert f"#SBATCH --job-name={label}\n" in script


@pytest.mark.parametrize("runs, kept", [("/shared/mine", True), ("/shared2/runs", False), ("runs", False)])
def test_runs_that_are_on_the_shared_volume_stay_there(written, runs: str, kept: bool) -> None:
    task = yaml.safe_load(written("sky", FILE, "--nodes", "1", "-b", f"train.runs = {runs!r}"))
    assert ("train.runs = '/shared/runs'" not in task["run"]) == kept
