"""The versions of an adapter that servers hold, and the arguments of a server for them. No server."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_x.engines.fleet.adapters import AdapterVersions
from areal_x.engines.fleet.staging import StagedFiles
from areal_x.engines.vllm.adapters import arguments
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.errors import ConfigError
from areal_x.protocols.trainer_config import LoRAConfig


def test_a_version_is_unused_once_its_last_request_has_ended() -> None:
    versions, staged = AdapterVersions(), [StagedFiles(folder=Path(f"v{i}"), version=i) for i in range(5)]
    with versions.request() as none:
        assert none is None
    assert versions.publish(staged[1]) == []
    with versions.request() as first, versions.request() as same:
        assert first == same == staged[1]
        assert versions.publish(staged[2]) == []
        with pytest.raises(RuntimeError), versions.request():
            raise RuntimeError("a request that failed has ended too")
        assert versions.publish(staged[3]) == [staged[2]]
    assert versions.publish(staged[4]) == [staged[1], staged[3]]
    assert versions.newest == staged[4]


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (48, 64), (512, 512)])
def test_a_server_gets_room_for_the_rank(rank: int, room: int) -> None:
    words = arguments(rank)
    assert words[words.index("--max-lora-rank") + 1] == str(room)


def test_a_rank_that_no_server_has_room_for_is_refused_before_one_starts(tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lora\.rank = 513 cannot work: it must be at most 512"):
        VLLMEngine(VLLMConfig(context=64), tiny_model_dir, tmp_path, lora=LoRAConfig(rank=513))
