"""A real server whose processes are on two hosts, here two addresses of this machine with a keeper each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_x.engines.fleet.placed import ClusterStarter
from areal_x.engines.fleet.server import Part
from areal_x.engines.fleet.widths import Widths
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.engine import VLLMEngine
from areal_x.engines.vllm.server import Launch, command, environment
from areal_x.protocols.engine import Request, SamplingParams
from tests.engines.fleet.keepers import LocalKeeper
from tests.servers import Run, Weights

GREEDY = Request(np.int32([3, 4, 5, 6]), SamplingParams(max_tokens=12, temperature=0.0))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_command_of_each_part_is_one_that_vllm_understands(rank: int, tiny_model_dir: Path) -> None:
    pytest.importorskip("vllm")
    from vllm import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    part = Part(hosts=3, rank=rank, address=f"10.0.0.{rank}", meeting_place=("10.0.0.0", 2345), engines_port=2346)
    widths = Widths(tensor=4, pipeline=3, data=2)
    launch = Launch(tiny_model_dir, Path(), Path(), 128, 8, seed=3, host=part.address, part=part, widths=widths)
    words = command(launch, 1234, cpu=True)
    assert words[1:4] == ["-P", "-m", "vllm.entrypoints.openai.api_server" if rank == 0 else "areal_x.engines.vllm.headless"]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words[4:])
    validate_parsed_serve_args(parsed)
    assert (parsed.headless, parsed.host, parsed.port) == (rank > 0, part.address, 1234)
    engine = AsyncEngineArgs.from_cli_args(parsed)
    assert (engine.nnodes, engine.node_rank, engine.master_addr, engine.master_port) == (3, rank, "10.0.0.0", 2345)
    assert (engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.seed) == (4, 3, 3)
    assert (engine.data_parallel_size, engine.data_parallel_rpc_port) == (2, 2346)
    assert environment(launch, "", cpu=True)["VLLM_HOST_IP"] == part.address
    assert environment(replace(launch, part=None), "", cpu=True)["VLLM_HOST_IP"] == "127.0.0.1"


@pytest.fixture
def keepers() -> Iterator[list[LocalKeeper]]:
    with ThreadPoolExecutor(16) as threads:
        made = [LocalKeeper(threads, f"127.0.0.{host}") for host in (2, 3)]
        yield made
        for keeper in made:
            keeper.keeper.stop()


@pytest.mark.server
@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"pipeline": 2}, {"data": 2}], ids=str)
def test_a_server_on_two_hosts_computes_as_one_on_one_host_does(
    sizes: dict[str, int], vllm_engine: VLLMEngine, run: Run, keepers: list[LocalKeeper], tiny_model_dir: Path, tmp_path: Path
) -> None:
    async def keepers_of(number: int) -> list[LocalKeeper]:
        return keepers

    places: Any = SimpleNamespace(keepers=keepers_of, departing=set, vacate=lambda number: None)
    config = VLLMConfig(context=256, concurrency=8, hosts=2, prove_every=1, **sizes)
    engine = VLLMEngine(config, vllm_engine.model, tmp_path, starter=ClusterStarter(places))

    async def compare() -> None:
        await engine.start()
        try:
            assert [keeper.keeper._server.poll() for keeper in keepers] == [None, None]
            await engine.swap(await asyncio.to_thread(engine.stage, Weights(tiny_model_dir, 3)))
            theirs = await vllm_engine.generate(GREEDY)
            for _ in range(2):  # one for each of two data-parallel engines
                ours = await engine.generate(GREEDY)
                assert ours.tokens.tolist() == theirs.tokens.tolist()
                np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
                assert set(ours.versions.tolist()) == {3}
        finally:
            await engine.close()

    run(compare())
