"""Stages of layers, and the order in which micro-batches go through them; on several processes: test_processes.py."""

from __future__ import annotations

from collections import deque
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoConfig, AutoModelForCausalLM

from areal_x.errors import ConfigError, UserError
from areal_x.protocols.trainer_config import LoRAConfig, MeshConfig, ModelConfig, TrainerConfig
from areal_x_torch import loading, model
from areal_x_torch.attention import sdpa
from areal_x_torch.pipeline import Pipeline, Stages, chunks_of, names_of
from areal_x_torch.pipeline_schedule import Action, in_flight, order
from areal_x_torch.preflight import check
from areal_x_torch.segments import Segments
from benchmarks.pipeline import waiting
from tests.model_families import CASES
from tests.models import SIZES, write_config, write_random
from tests.thorough import further

SHAPES = [(2, 1), (2, 2), (3, 1), (4, 1), (4, 2), (3, 3)]
COUNTS = range(1, 14)
FIRST = ("granite-0", "qwen3_next-2")
# A multimodal model is refused, also if it is trained on text, Llama 4, and Gemma 4 with embeddings for each layer.
UNDIVIDED = ("llama4_text-0", "gemma4_text-0")
DIVIDED = [x for x in CASES if x.endswith("-0") and "vision_config" not in CASES[x] and x not in UNDIVIDED]
DIVIDED += ["gemma4_text-1"]
FAMILIES = [*FIRST, *further(*(name for name in DIVIDED if name not in FIRST))]
LENGTHS = (7, 12, 3)


def of_each(actions: tuple[Action, ...], *kinds: str) -> list[tuple[int, int]]:
    return [(action.chunk, action.micro_batch) for action in actions if action.kind in kinds]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("learns", [True, False])
def test_every_micro_batch_goes_through_every_chunk_once_and_back(shape: tuple[int, int], learns: bool) -> None:
    processes, chunks = shape
    for count in COUNTS:
        for process, actions in enumerate(order(processes, chunks, count, learns)):
            own = range(process, processes * chunks, processes)
            assert sorted(of_each(actions, "F")) == list(product(own, range(count)))
            assert sorted(of_each(actions, "B")) == (list(product(own, range(count))) if learns else [])
            for chunk in own:
                gone = [a.micro_batch for a in actions if a.kind == "F" and a.chunk == chunk]
                back = [a.micro_batch for a in actions if a.kind == "B" and a.chunk == chunk]
                assert gone == sorted(gone)
                assert back == sorted(back)


class Exchange:
    """Processes that do their actions in order. What two of them exchange is one queue, as NCCL's is: each transfer is made
    when both have begun it, and both must begin them in one order. Those who compute wait for what they need. sends_wait: a
    sender does nothing else until its receiver has begun."""

    def __init__(self, orders: tuple[tuple[Action, ...], ...], chunks: int, sends_wait: bool) -> None:
        self.sends_wait = sends_wait
        self.sending: dict[int, tuple[str, int, int]] = {}
        self.left = [deque(actions) for actions in orders]
        self.last = len(orders) * chunks - 1
        self.begun: dict[tuple[int, int], list[deque[Any]]] = {}  # of a pair, what only one of them has begun
        self.arrived: set[tuple[str, int, int]] = set()

    def advance(self, process: int) -> bool:
        """Does the next action of a process, if it can."""
        if (what := self.sending.pop(process, None)) is not None and what not in self.arrived:
            self.sending[process] = what
            return False
        kind, chunk, number = self.left[process][0]
        if kind in ("F", "B"):
            if chunk != (0 if kind == "F" else self.last) and (kind, chunk, number) not in self.arrived:
                return False
        else:
            peer = (process + (1 if kind in ("SEND_F", "RECV_B") else -1)) % len(self.left)
            sides = self.begun.setdefault((min(process, peer), max(process, peer)), [deque(), deque()])
            theirs, ours = sides[process < peer], sides[process > peer]
            what = kind[-1], chunk + {"SEND_F": 1, "SEND_B": -1}.get(kind, 0), number  # as its receiver calls it
            if theirs:
                assert theirs.popleft() == what, "the two of a pair begin transfers in different orders"
                self.arrived.add(what)
            else:
                ours.append(what)
                if self.sends_wait and kind.startswith("SEND"):
                    self.sending[process] = what
        self.left[process].popleft()
        return True


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("sends_wait", [True, False])
def test_no_process_waits_for_another_for_ever(shape: tuple[int, int], learns: bool, sends_wait: bool) -> None:
    processes, chunks = shape
    for count in COUNTS:
        exchange = Exchange(order(processes, chunks, count, learns), chunks, sends_wait)
        while any(exchange.left):
            moved = [exchange.advance(process) for process in range(processes) if exchange.left[process]]
            assert any(moved), [list(actions)[:1] for actions in exchange.left]
        assert not any(side for sides in exchange.begun.values() for side in sides)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_stage_keeps_as_many_micro_batches_as_there_are_stages(processes: int) -> None:
    assert in_flight(processes, 1) == processes
    assert processes < in_flight(processes, 2) < 1.5 * processes


@pytest.mark.parametrize("shape", SHAPES)
def test_stages_wait_for_the_share_of_a_step_that_the_formula_gives(shape: tuple[int, int]) -> None:
    processes, chunks = shape
    for rounds in (1, 2, 5):
        count = rounds * processes
        assert waiting(processes, chunks, count) == pytest.approx((processes - 1) / (count * chunks + processes - 1))


def test_chunks_are_as_equal_as_possible_and_the_longer_ones_first() -> None:
    assert [len(chunk.layers) for chunk in chunks_of(7, 2, 2)] == [2, 2, 2, 1]
    assert [chunk.number for chunk in chunks_of(4, 4, 1) if chunk.is_last] == [3]
    assert [n for chunk in chunks_of(61, 4, 3) for n in chunk.layers] == list(range(61))


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_one_after_another_compute_what_the_whole_model_does_and_its_gradient(family: str, tmp_path: Any) -> None:
    """Whatever a family does before its layers, between them and after them."""
    directory, device = write_config(CASES[family], tmp_path), torch.device("cpu")
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    row = model.PackedRow(positions * 5 % 37 + 1, positions, Segments.of(LENGTHS, sdpa, device))
    whole = loading.build(directory, "policy")
    chunks = 2 if whole.config.num_hidden_layers >= 4 else 1
    parts = []
    for rank in range(2):
        part = loading.build(directory, "policy")
        group: Any = None
        mesh = MeshConfig(stage=2, stage_chunks=chunks, processes=2)
        parts.append(Pipeline.divide(part, Stages(group, group, rank, 2), mesh))
    for net in (whole, *(pipeline.model for pipeline in parts)):
        loading.materialize(net, device)
        loading.fill(net, directory)

    expected = model.decoder_states(whole, row)
    upstream = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    expected.backward(upstream)

    states, computed = None, []
    for number in range(2 * chunks):
        pipeline = parts[number % 2]
        received = None if states is None else states.detach().requires_grad_()
        with pipeline.computing(pipeline.chunk(number), received):
            states = model.decoder_states(pipeline.model, row)
        computed.append((received, states))
    assert torch.equal(states, expected)
    for received, states in reversed(computed):
        states.backward(upstream)
        upstream = None if received is None else received.grad

    of_parts: dict[str, Any] = {}
    for pipeline in parts:
        of_parts |= {name: x.grad for name, x in pipeline.model.named_parameters() if x.grad is not None}
    for name, x in whole.named_parameters():
        assert (name in of_parts) == (x.grad is not None), name
        if x.grad is not None:
            assert torch.equal(of_parts[name], x.grad), name  # stages compute the same operations in the same order
    own = [{name for name, _ in pipeline.model.named_parameters()} for pipeline in parts]
    assert own[0] & own[1] <= {name for name, x in whole.named_parameters() if x is whole.get_input_embeddings().weight}


def test_a_decoder_with_other_parts_is_refused() -> None:
    config = AutoConfig.for_model(**SIZES, model_type="gpt2", eos_token_id=1, bos_token_id=1)
    with torch.device("meta"):
        gpt2 = AutoModelForCausalLM.from_config(config)
    wanted = r"mesh\.stage = 2 .* 1 for a GPT2LMHeadModel, .* but wte, wpe, h, ln_f: use mesh\.fsdp"
    with pytest.raises(ConfigError, match=wanted):
        names_of(gpt2, 2)


@pytest.mark.parametrize(
    "name, mesh, wanted",
    [
        ("qwen3", {"stage": 4}, "mesh.stage = 4 cannot work: it must be at most the model's 2 layers: each chunk"),
        ("qwen3", {"stage": 2, "stage_chunks": 2}, "mesh.stage = 2 .* 2 layers / mesh.stage_chunks = 1: each chunk"),
        ("qwen3_vl", {"stage": 2}, "mesh.stage = 2 .* 1 for a model with images"),
        ("even-gemma4", {"stage": 2}, "mesh.stage = 2 .* 1 for a model whose layers read embeddings of their own"),
        ("qwen3", {"stage": 2, "processes": 3}, "mesh.stage = 2 .* such that stage · data"),
        ("qwen3", {"stage_chunks": 2}, "mesh.stage_chunks = 2 .* 1 with mesh.stage = 1"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_check(name: str, mesh: dict[str, int], wanted: str, tmp_path: Any) -> None:
    directory = write_random(name, tmp_path)
    with pytest.raises(UserError, match=wanted):
        check(TrainerConfig(ModelConfig(str(directory)), mesh=MeshConfig(**{"processes": mesh.get("stage", 1), **mesh})))


def test_a_stage_without_any_adapter_is_refused(tmp_path: Any) -> None:
    directory = write_config(CASES["qwen3_next-2"], tmp_path)  # whose layers 1 and 2 have no queries
    of_queries = LoRAConfig(rank=2, targets=("q_proj",))
    mesh = MeshConfig(stage=4, processes=4)
    with pytest.raises(ConfigError, match=r"lora\.targets .* every stage has an adapter, as the layers 1 of mesh\.stage = 4"):
        check(TrainerConfig(ModelConfig(str(directory)), mesh=mesh, lora=of_queries))
    check(TrainerConfig(ModelConfig(str(directory)), mesh=MeshConfig(stage=2, processes=2), lora=of_queries))
