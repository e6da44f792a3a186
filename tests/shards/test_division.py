"""The servers of a run, divided among its shards; and settings that shards cannot work with."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from areal_x.cluster.config import ClusterConfig
from areal_x.engines.fleet.division import servers_of
from areal_x.engines.fleet.staging import StagedFiles, Staging
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.errors import ConfigError, UserError
from tests.experiments import tiny_experiment
from tests.rollout.fakes import Plain

URLS = tuple(f"http://127.0.0.1:{8000 + i}" for i in range(7))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "config",
    [VLLMConfig(urls=URLS), VLLMConfig(servers=7, port=9000), VLLMConfig(least=7, most=18)],
    ids=["given", "started", "elastic"],
)
def test_every_server_belongs_to_one_shard(config: VLLMConfig, count: int) -> None:
    divided = [servers_of(config, shard, count) for shard in range(count)]
    parts = [part for part, _ in divided]
    most = [len(part.urls) or part.bounds[1] for part in parts]
    assert [first for _, first in divided] == [0, *itertools.accumulate(most[:-1])]
    assert max(most) - min(most) <= 1
    assert tuple(url for part in parts for url in part.urls) == config.urls
    assert sum(part.bounds[1] for part in parts if not part.urls) == (0 if config.urls else config.bounds[1])
    assert sum(part.bounds[0] for part in parts if not part.urls) == (0 if config.urls else config.bounds[0])
    assert sum(part.requests for part in parts) == config.requests
    ports = [part.port + i for part in parts for i in range(part.servers) if part.port]
    assert ports == ([9000 + i for i in range(7)] if config.port else [])
    same = {"urls": (), "servers": 1, "least": 0, "most": 0, "port": 0}
    assert {replace(part, **same) for part in parts} == {replace(config, **same)}


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"cluster": "here"}, "0 with train.cluster = 'here'"),
        ({"engine": "embedded"}, "0 with train.engine = 'embedded'"),
        ({"vllm": VLLMConfig(servers=1)}, "at most 1, the number of the servers that it begins with"),
        ({"vllm": VLLMConfig(urls=URLS[:1])}, "at most 1, the number of vllm.urls"),
        ({"vllm": VLLMConfig(most=4)}, "at most 1, the number of the servers that it begins with"),
    ],
    ids=["here", "embedded", "one server", "one address", "begins with one"],
)
def test_settings_that_shards_cannot_work_with_are_refused(settings, sentence, tiny_model_dir, tmp_path) -> None:
    usual = {"cluster": "ray", "engine": "vllm", "vllm": VLLMConfig(servers=2), "placement": ClusterConfig(shards=2)}
    with pytest.raises(ConfigError, match="^" + re.escape(f"cluster.shards = 2 cannot work: it must be {sentence}")):
        tiny_experiment(tiny_model_dir, tmp_path, workflow=Plain(), backend="torch", **usual | settings)


def test_only_files_reach_the_servers_of_several_shards(tiny_model_dir, tmp_path) -> None:
    settings = {"cluster": "ray", "engine": "vllm", "vllm": VLLMConfig(servers=2, transport="nccl")}
    placement = ClusterConfig(shards=2)
    with pytest.raises(ConfigError, match=r"^vllm\.transport = 'nccl' cannot work: it must be 'files' with cluster\.shards"):
        tiny_experiment(tiny_model_dir, tmp_path, workflow=Plain(), backend="torch", placement=placement, **settings)


@dataclass(frozen=True)
class Begun(Plain):
    """Its users begin its episodes."""

    open_ended: ClassVar[bool] = True


def test_a_workflow_that_others_begin_is_not_divided(tiny_model_dir, tmp_path) -> None:
    settings = {"cluster": "ray", "engine": "vllm", "vllm": VLLMConfig(servers=2), "placement": ClusterConfig(shards=2)}
    with pytest.raises(
        ConfigError, match=r"^cluster\.shards = 2 cannot work: it must be 0 with a workflow whose episodes are begun"
    ):
        tiny_experiment(tiny_model_dir, tmp_path, workflow=Begun(), backend="torch", **settings)


class Remembers(Plain):
    """It keeps a state between episodes."""

    def state(self) -> int:
        return 3


def test_a_workflow_that_keeps_a_state_is_not_divided(tiny_model_dir, tmp_path) -> None:
    settings = {"cluster": "ray", "engine": "vllm", "vllm": VLLMConfig(servers=2), "placement": ClusterConfig(shards=2)}
    made = tiny_experiment(tiny_model_dir, tmp_path, workflow=Remembers(), backend="torch", **settings)
    dividing = made.sharded(tiny_model_dir, None, made.workflow, tmp_path, print)
    with pytest.raises(UserError, match=r"^cluster\.shards = 2 must be 0 with Remembers, which keeps state"), dividing:
        pass


def test_weights_that_another_process_staged_are_linked_and_stay_when_it_removes_them(tmp_path) -> None:
    driver, own = Staging(tmp_path), Staging(tmp_path, "vllm.staging")
    folder = driver.root / "v00000003"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
    (folder / "a.safetensors").write_bytes(b"tensors")
    before = StagedFiles(folder=folder, version=3, bytes=7)
    found = own.adopt(before)
    assert found == replace(before, folder=own.root / "v00000003")
    assert (found.folder / "a.safetensors").samefile(folder / "a.safetensors")
    again = own.adopt(before)  # after an interrupted publication
    driver.close()
    assert (again.folder / "a.safetensors").read_bytes() == b"tensors"
    with pytest.raises(UserError, match=r"^the node \S+ does not see the staged weights in \S+ .*: set vllm\.staging to a"):
        own.adopt(before)
    assert [x.name for x in own.root.iterdir() if x.is_dir()] == ["v00000003"]
    own.close()
