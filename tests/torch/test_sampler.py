"""The torch sampler, behind the embedded engine against transformers, and by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from areal_x.rollout.embedded import EmbeddedEngine  # noqa: E402
from areal_x.rollout.engine import SamplingParams  # noqa: E402
from areal_x.rollout.sampler import SlotRequest  # noqa: E402
from areal_x.trainer import ModelConfig, Trainer, TrainerConfig, create_trainer  # noqa: E402
from areal_x_torch import sampler as sampling  # noqa: E402
from areal_x_torch.draw import Drawing, draw, uniform  # noqa: E402
from areal_x_torch.layout import by_length  # noqa: E402
from areal_x_torch.sampler import Sampler  # noqa: E402
from tests.conftest import write_model  # noqa: E402
from tests.rollout import conformance  # noqa: E402

SLOTS, CONTEXT = 16, 384


def trainer_of(directory: Path) -> Trainer:
    return create_trainer("torch", TrainerConfig(model=ModelConfig(path=str(directory))))


@pytest.fixture(scope="module")
def trainer(tiny_model_dir: Path) -> Trainer:
    return trainer_of(tiny_model_dir)


@pytest.fixture(scope="module")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("other"), seed=11)


@pytest.fixture(scope="module")
def engine_and_run(trainer: Trainer) -> Iterator[tuple[EmbeddedEngine, Callable[[Any], Any]]]:
    loop = asyncio.new_event_loop()
    engine = EmbeddedEngine(trainer.sampler(SLOTS, CONTEXT))
    loop.run_until_complete(engine.start())
    loop.run_until_complete(engine.swap(engine.stage(trainer)))
    yield engine, loop.run_until_complete
    loop.run_until_complete(engine.close())
    loop.close()


@pytest.fixture
def engine(engine_and_run) -> EmbeddedEngine:
    return engine_and_run[0]


@pytest.fixture
def run(engine_and_run) -> Callable[[Any], Any]:
    return engine_and_run[1]


def test_logprobs_are_those_of_a_full_forward(engine, run, tiny_model_dir) -> None:
    run(conformance.check_logprobs_are_those_of_a_full_forward(engine, tiny_model_dir))


def test_greedy_takes_the_most_likely_token(engine, run, tiny_model_dir) -> None:
    run(conformance.check_greedy_takes_the_most_likely_token(engine, tiny_model_dir))


def test_a_stop_token_ends_the_completion(engine, run, tiny_model_dir) -> None:
    run(conformance.check_a_stop_token_ends_the_completion_and_belongs_to_it(engine, tiny_model_dir))


@pytest.mark.parametrize("top_k, top_p", [(5, 1.0), (0, 0.6), (7, 0.8), (1, 1.0)])
def test_truncated_sampling(engine, run, tiny_model_dir, top_k, top_p) -> None:
    run(conformance.check_truncated_sampling(engine, tiny_model_dir, top_k, top_p))


def test_plain_sampling(engine, run, tiny_model_dir) -> None:
    run(conformance.check_truncated_sampling(engine, tiny_model_dir, top_k=0, top_p=1.0, samples=1000))


def test_a_cancelled_request_gives_its_place_to_others(engine, run, tiny_model_dir) -> None:
    run(conformance.check_a_cancelled_request_gives_its_place_to_others(engine, tiny_model_dir))


def test_a_prompt_without_room_is_refused(engine, run) -> None:
    run(conformance.check_a_prompt_without_room_is_refused(engine, "embedded.context"))


def test_max_tokens_is_cut_to_the_room_left(engine, run) -> None:
    run(conformance.check_max_tokens_is_cut_to_the_room_left(engine))


def test_weights_swapped_in_flight(engine, run, trainer, tiny_model_dir, other_dir) -> None:
    other = trainer_of(other_dir)
    other.version = 1
    run(conformance.check_weights_swapped_in_flight(engine, tiny_model_dir, other, other_dir))
    run(engine.swap(engine.stage(trainer)))


# The sampler by itself.


@pytest.fixture
def sampler(trainer: Trainer) -> Sampler:
    sampler = trainer.sampler(SLOTS, CONTEXT)
    sampler.load(trainer.snapshot())
    return sampler


def slot_request(slot: int, prompt: int, most: int = 20, generated: int = 0, seed: int = 0, **sampling: Any) -> SlotRequest:
    tokens = np.random.default_rng(prompt).integers(2, 40, prompt).astype(np.int32)
    return SlotRequest(slot, tokens, generated, SamplingParams(max_tokens=most, **sampling), seed)


def to_the_end(sampler: Sampler, requests: list[SlotRequest], steps: int = 7) -> dict[int, tuple[list[int], list[float]]]:
    """What each slot says until all have finished."""
    sampler.fill(requests)
    said: dict[int, tuple[list[int], list[float]]] = {request.slot: ([], []) for request in requests}
    live = set(said)
    while live:
        decoded = sampler.decode(steps, sampler.slots)
        for slot in said:
            said[slot][0].extend(decoded.tokens[slot, : decoded.counts[slot]].tolist())
            said[slot][1].extend(decoded.logprobs[slot, : decoded.counts[slot]].tolist())
            if decoded.finished[slot]:
                live.remove(slot)
    return said


def test_a_completion_depends_neither_on_its_slot_nor_on_what_else_runs(sampler: Sampler) -> None:
    mine = {"prompt": 30, "most": 40, "seed": 2**40 + 5}
    tokens, logprobs = to_the_end(sampler, [slot_request(3, **mine)])[3]
    others = [slot_request(slot, 5 + 20 * slot, 10 + 3 * slot, seed=slot) for slot in range(SLOTS) if slot != 9]
    for requests in ([slot_request(9, **mine), *others], [*others, slot_request(9, **mine)], [slot_request(9, **mine)]):
        again, its_logprobs = to_the_end(sampler, requests)[9]
        assert again == tokens
        np.testing.assert_allclose(its_logprobs, logprobs, atol=1e-5)


def test_slots_filled_while_others_run_say_what_they_would_say_alone(sampler: Sampler, trainer: Trainer) -> None:
    """Continuous batching, step by step: rows move into the gaps of those that finish, new ones come in behind."""
    rng = np.random.default_rng(0)
    shapes = rng.integers(1, 60, (40, 2)).tolist()
    requests = [slot_request(0, prompt, most, seed=i) for i, (prompt, most) in enumerate(shapes)]
    waiting, free = list(enumerate(requests)), list(range(5))
    running: dict[int, int] = {}
    said: dict[int, list[int]] = {i: [] for i in range(len(requests))}
    while waiting or running:
        admitted = []
        while waiting and free:
            i, request = waiting.pop(0)
            running[free[0]] = i
            admitted.append(SlotRequest(free.pop(0), request.tokens, 0, request.sampling, request.seed))
        sampler.fill(admitted)
        decoded = sampler.decode(16, 1)
        for slot, i in list(running.items()):
            said[i] += decoded.tokens[slot, : decoded.counts[slot]].tolist()
            if decoded.finished[slot]:
                free.append(slot)
                del running[slot]
    assert [len(tokens) for tokens in said.values()] == [most for _, most in shapes]
    alone = trainer.sampler(1, CONTEXT)
    alone.load(trainer.snapshot())
    for i, request in enumerate(requests):
        assert to_the_end(alone, [request], steps=32)[0][0] == said[i]


def test_going_on_from_what_was_generated_draws_what_would_have_come(sampler: Sampler, trainer: Trainer) -> None:
    """What a swap of weights does: the same weights again change nothing."""
    whole = slot_request(0, 150, 30, seed=4)
    tokens, logprobs = to_the_end(sampler, [whole])[0]
    so_far = np.concatenate([whole.tokens, np.array(tokens[:11], np.int32)])
    sampler.load(trainer.snapshot())
    rest, its_logprobs = to_the_end(sampler, [SlotRequest(5, so_far, 11, whole.sampling, whole.seed)])[5]
    assert rest == tokens[11:]
    np.testing.assert_allclose(its_logprobs, logprobs[11:], atol=1e-5)


def test_a_slot_filled_again_or_freed_forgets_what_it_held(sampler: Sampler) -> None:
    expected = to_the_end(sampler, [slot_request(2, 9, seed=7)])[2]
    sampler.fill([slot_request(2, 33, seed=1), slot_request(4, 12, seed=2)])
    sampler.decode(3, SLOTS)
    sampler.free([4, 11])  # slot 11 holds nothing
    assert to_the_end(sampler, [slot_request(2, 9, seed=7)])[2] == expected
    assert sampler.decode(3, SLOTS).counts.tolist() == [0] * SLOTS


def test_decode_returns_when_enough_slots_are_free(sampler: Sampler) -> None:
    sampler.fill([slot_request(slot, 5, 2 + slot) for slot in range(SLOTS)])
    decoded = sampler.decode(100, 3)
    assert decoded.finished.sum() == 3
    assert decoded.counts.tolist() == [2, 3] + [4] * (SLOTS - 2)
    assert sampler.decode(5, SLOTS).counts.tolist() == [0, 0, 0, 1, 2, 3, 4, 5] + [5] * (SLOTS - 8)


def test_a_sampler_without_weights_and_a_sequence_without_room_are_refused(sampler: Sampler, trainer: Trainer) -> None:
    with pytest.raises(RuntimeError, match="load a snapshot"):
        trainer.sampler(2, 8).fill([slot_request(0, 3)])
    with pytest.raises(ValueError, match="no room"):
        sampler.fill([slot_request(0, CONTEXT)])


@pytest.mark.parametrize("chunk, together", [(512, 8192), (16, 8192), (1, 8192), (50, 60)])
def test_the_chunks_of_a_prefill_do_not_matter(sampler: Sampler, monkeypatch, chunk, together) -> None:
    requests = [slot_request(slot, prompt, 6, seed=slot) for slot, prompt in enumerate((1, 2, 17, 50, 51, 130, 33))]
    expected = to_the_end(sampler, requests)
    monkeypatch.setattr(sampling, "CHUNK", chunk)
    monkeypatch.setattr(sampling, "PREFILL", together)
    for slot, (tokens, logprobs) in to_the_end(sampler, requests).items():
        assert tokens == expected[slot][0]
        np.testing.assert_allclose(logprobs, expected[slot][1], atol=1e-5)


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("qwen2", {"tie_word_embeddings": True}),
        ("llama", {}),
        ("phi", {}),  # a bias in the head, LayerNorm, half-rotated heads
        ("mistral", {"sliding_window": 7}),
        ("qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("gemma", {"head_dim": 8}),
        ("olmo2", {}),
    ],
)
def test_it_samples_any_model_whose_attention_goes_through_transformers_interface(tmp_path, monkeypatch, kind, changes) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setattr(sampling, "CHUNK", 8)
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
    more = {"num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small, **more, **changes)).save_pretrained(tmp_path)
    trainer = trainer_of(tmp_path)
    sampler = trainer.sampler(4, 64)
    sampler.load(trainer.snapshot())
    requests = [slot_request(slot, prompt, 20, seed=slot) for slot, prompt in enumerate((3, 21, 10))]
    for slot, (tokens, logprobs) in to_the_end(sampler, requests).items():
        prompt = requests[slot].tokens
        table = conformance.full_forward(tmp_path, np.concatenate([prompt, tokens]))
        expected = table[np.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1), tokens]
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_bf16_weights_are_sampled_in_bf16_with_log_probabilities_in_fp32(tiny_model_dir) -> None:
    config = TrainerConfig(model=ModelConfig(path=str(tiny_model_dir)), precision="bf16")
    trainer = create_trainer("torch", config)
    sampler = trainer.sampler(2, 64)
    sampler.load(trainer.snapshot())
    assert {p.dtype for p in sampler.model.parameters()} == {torch.bfloat16}
    request = slot_request(0, 9, 12, seed=1)
    tokens, logprobs = to_the_end(sampler, [request])[0]
    table = conformance.full_forward(tiny_model_dir, np.concatenate([request.tokens, tokens]))
    np.testing.assert_allclose(logprobs, table[np.arange(8, 20), tokens], atol=0.3)


# Drawing.


def test_uniforms_are_uniform_and_independent_of_neighbouring_seeds_and_counts() -> None:
    seed = np.stack([np.arange(500), np.zeros(500)], 1).astype(np.uint32)
    counts = np.broadcast_to(np.arange(500), (500, 500))
    drawn = uniform(seed, counts)
    assert drawn.min() > 0
    assert drawn.max() < 1
    for first, second in ((drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:])):
        cells = np.histogram2d(first.ravel(), second.ravel(), 16, ((0, 1), (0, 1)))[0].ravel()
        assert abs(conformance.chi_square(cells, np.full(256, cells.sum() / 256))) < 4
    seed[:, 1] = 1  # the seed's upper 32 bits
    assert np.abs(np.corrcoef(uniform(seed, counts).ravel(), drawn.ravel())[0, 1]) < 0.01


def test_both_backends_draw_with_the_same_numbers() -> None:
    jax_draw = pytest.importorskip("areal_x_jax.draw")
    rng = np.random.default_rng(0)
    seed, count = rng.integers(0, 2**32, (100, 2), dtype=np.uint32), rng.integers(0, 10**6, 100)
    np.testing.assert_array_equal(uniform(seed, count), np.asarray(jax_draw.uniform(seed, count)))


@pytest.mark.parametrize("vocabulary", [17, 700])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (12, 0.9)])
def test_draws_follow_the_distribution(vocabulary: int, top_k: int, top_p: float) -> None:
    rows = 4000
    logits = np.random.default_rng(vocabulary).normal(0, 2, vocabulary).astype(np.float32)
    how = Drawing.of(np.full(rows, 0.7), np.full(rows, top_p), np.full(rows, top_k), torch.device("cpu"))
    uniforms = torch.from_numpy(np.random.default_rng(0).uniform(size=(rows, 1)).astype(np.float32))
    tokens, logprobs = (x.numpy() for x in draw(torch.from_numpy(np.tile(logits, (rows, 1))), uniforms, how))
    logits = logits.astype(np.float64) / 0.7
    expected = conformance.truncated(logits - np.log(np.exp(logits).sum()), top_k, top_p)
    np.testing.assert_allclose(logprobs, np.log(expected[tokens]), atol=1e-5)
    assert conformance.chi_square(np.bincount(tokens, minlength=vocabulary), expected * rows) < 4


def test_rows_that_ask_for_different_things_get_each_its_own() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4, 1)
    how = Drawing.of(np.array([0, 1, 1, 2.0]), np.array([1, 0.6, 1, 1.0]), np.array([2, 0, 1, 0]), torch.device("cpu"))
    tokens, logprobs = draw(logits, torch.full((4, 1), 0.99), how)
    hot = np.sqrt([0.5, 0.3, 0.15, 0.05])
    assert tokens.tolist() == [0, 1, 0, 3]
    expected = [0.5, 0.3 / 0.8, 1.0, hot[3] / hot.sum()]
    np.testing.assert_allclose(logprobs.exp(), expected, rtol=1e-5)


def test_an_extreme_uniform_still_draws_a_token_that_has_mass() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 30, (16, 400)).astype(np.float32))
    for kwargs in ({"top_p": np.full(16, 0.5), "top_k": np.full(16, 9)}, {"top_p": np.ones(16), "top_k": np.zeros(16, int)}):
        how = Drawing.of(np.ones(16), device=torch.device("cpu"), **kwargs)
        for extreme in (2.0**-24, 1 - 2.0**-24):
            _, logprobs = draw(logits, torch.full((16, 1), extreme), how)
            assert torch.isfinite(logprobs).all()


def test_groups_by_length_hold_each_once_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 300, 200)
    for budget in (1, 300, 1000, 10**6):
        groups = by_length(lengths, budget)
        assert sorted(np.concatenate(groups).tolist()) == list(range(200))
        longest = [lengths[group].max() for group in groups]
        assert longest == sorted(longest, reverse=True)
        assert all(len(group) == 1 or len(group) * most <= budget for group, most in zip(groups, longest, strict=True))
