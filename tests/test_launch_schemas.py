"""The jobs of `areal-x launch` against what reads them: KubeRay's own schema, SkyPilot itself. Neither is in this repository:

curl -LO https://raw.githubusercontent.com/ray-project/kuberay/v1.7.0/helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml
python -m venv sky && sky/bin/pip install skypilot==0.14.1
KUBERAY_CRD=ray.io_rayjobs.yaml SKYPILOT_PYTHON=sky/bin/python python -m pytest tests/test_launch_schemas.py
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal_x import launch

FILE = "examples/arithmetic/grpo.gin"
SIZES = "--nodes", "4", "--gpus", "8", "--cpus", "64"
ROLES = ("cluster.ranks_on = 'train'", "cluster.servers_on = 'serve'")
SERVED = (
    "train.backend = 'torch'",
    "mesh.processes = 16",
    "train.engine = 'vllm'",
    "vllm.servers = 4",
    "vllm.tensor = 4",
)
CASES = pytest.mark.parametrize("bindings", [(), SERVED, (*SERVED, *ROLES)], ids=["plain", "served", "roles"])


def written(capsys: pytest.CaptureFixture[str], form: str, bindings: tuple[str, ...]) -> str:
    words = [form, FILE, *SIZES, "--image", "registry/areal-x", *(x for b in bindings for x in ("-b", b))]
    assert launch.main(words) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def closed(schema: Any) -> Any:
    """Returns a schema that refuses unknown fields, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [closed(x) for x in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(x) for name, x in schema.items()}
    if isinstance(schema.get("properties"), dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


@cache
def rayjob_schema(file: str) -> Any:
    crd = yaml.load(Path(file).read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (version,) = (x for x in crd["spec"]["versions"] if x["name"] == "v1")
    return closed(version["schema"]["openAPIV3Schema"])


@pytest.mark.skipif("KUBERAY_CRD" not in os.environ, reason="KUBERAY_CRD is not set")
@CASES
def test_a_rayjob_has_the_fields_of_kuberays_schema(bindings: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = rayjob_schema(os.environ["KUBERAY_CRD"])
    job = yaml.safe_load(written(capsys, "kuberay", bindings))
    assert [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(job)] == []
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["gpus"] = 8
    (error,) = jsonschema.Draft7Validator(schema).iter_errors(job)
    assert "'gpus' was unexpected" in error.message


# KubeRay's operator refuses these (ray-operator/controllers/ray/utils/validation.go).
@CASES
def test_a_rayjob_has_nothing_that_kuberays_operator_refuses(
    bindings: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = yaml.safe_load(written(capsys, "kuberay", bindings))["spec"]["rayClusterSpec"]
    assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "of token authentication"
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert all("labels" not in group["rayStartParams"] for group in groups)
    assert all({"minReplicas", "maxReplicas"} <= group.keys() for group in groups[1:])


PARSE = """
import json, sky, sys, yaml
sky.Task.from_yaml(sys.argv[1])
with open(sys.argv[1]) as text:  # as the command line does with --secret
    task = sky.Task.from_yaml_config(yaml.safe_load(text), secrets_overrides=[("RAY_AUTH_TOKEN", "a token")])
(resources,) = task.resources
print(json.dumps([task.num_nodes, resources.accelerators, resources.cpus, list(task.storage_mounts), list(task.secrets)]))
"""


@pytest.mark.skipif("SKYPILOT_PYTHON" not in os.environ, reason="SKYPILOT_PYTHON is not set")
@CASES
def test_skypilot_reads_the_task(bindings: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(written(capsys, "sky", bindings))
    command = [os.environ["SKYPILOT_PYTHON"], "-c", PARSE, str(tmp_path / "job.yaml")]
    environment = os.environ | {"HOME": str(tmp_path)}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    read = json.loads(said.stdout.splitlines()[-1])
    assert read == [4, {"H100": 8}, "64+", ["/shared"], ["RAY_AUTH_TOKEN"]]
    with_mistake = (tmp_path / "job.yaml").read_text().replace("num_nodes", "number_of_nodes")
    (tmp_path / "job.yaml").write_text(with_mistake)
    assert subprocess.run(command, env=environment, capture_output=True, timeout=300).returncode != 0
