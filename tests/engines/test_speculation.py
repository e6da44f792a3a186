"""Speculative decoding by both backends' samplers: what is sampled is what would have been."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare

from areal_x.engines.embedded import EmbeddedEngine
from areal_x.engines.speculation import continuations, taken
from areal_x.errors import ConfigError
from areal_x.protocols.backends import create_trainer
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.protocols.sampler import Sampler, SlotRequest
from areal_x.protocols.speculation import NOTHING, Guesses, Speculation
from areal_x.protocols.trainer import Trainer
from areal_x.protocols.trainer_config import ModelConfig, TrainerConfig
from areal_x.testing.conformance.helpers import sample_with_kept, slot_request
from areal_x.testing.models import write_model
from areal_x.testing.reference import Reference
from tests.model_families import CASES
from tests.models import write_config
from tests.thorough import further, thorough

SLOTS, CONTEXT = 8, 96
LOOKUP = Speculation(method="ngram", tokens=3, longest=3, shortest=1)


def trainer_of(backend: str, directory: Path) -> Trainer:
    return create_trainer(backend, TrainerConfig(model=ModelConfig(path=str(directory))))


def sampler_of(trainer: Trainer, speculation: Speculation = NOTHING, slots: int = SLOTS) -> Sampler:
    sampler = trainer.sampler(slots, CONTEXT, speculation)
    sampler.load(trainer.snapshot())
    return sampler


@pytest.fixture(scope="module")
def trainer(backend: str, tiny_model_dir: Path) -> Trainer:
    return trainer_of(backend, tiny_model_dir)


@pytest.fixture(scope="module")
def plain(trainer: Trainer) -> Sampler:
    return sampler_of(trainer)


@pytest.fixture(scope="module", params=["ngram", "draft"])
def speculation(request: pytest.FixtureRequest, tiny_model_dir: Path) -> Speculation:
    """The policy itself is a draft that is nearly always right."""
    if request.param == "ngram":
        return LOOKUP
    return Speculation(method="draft", tokens=3, draft=str(tiny_model_dir))


@pytest.fixture(scope="module")
def guessing(trainer: Trainer, speculation: Speculation) -> Sampler:
    return sampler_of(trainer, speculation)


def repeating(slot: int, most: int = 30, **sampling: Any) -> SlotRequest:
    """A request whose prompt repeats itself, at a temperature at which the answer does, too."""
    prompt = np.tile(np.arange(5, 9 + slot % 3, dtype=np.int32), 3)
    params = SamplingParams(max_tokens=most, **{"temperature": 0.3} | sampling)
    return SlotRequest(slot, prompt, 0, params, 1000 + slot)


EACH: dict[str, list[SlotRequest]] = {
    "temperatures": [repeating(s, 10 + 5 * s, temperature=(0.0, 0.2, 0.5, 1.0)[s % 4]) for s in range(SLOTS)],
    "truncated": [
        repeating(s, 25, **({}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1, "temperature": 0.7})[s % 4]) for s in range(SLOTS)
    ],
    "alone": [slot_request(5, 20, 40, seed=3, temperature=0.4)],
    "to the end of the context": [slot_request(s, CONTEXT - 5 - s, 60, seed=s, temperature=0.2) for s in range(4)],
    "of one token": [slot_request(s, 1, 12, seed=s, temperature=0.2) for s in range(3)],
}


@pytest.mark.parametrize("requests", EACH.values(), ids=EACH)
def test_the_same_seeds_sample_the_same_tokens_as_without(plain: Sampler, guessing: Sampler, requests) -> None:
    expected, found = sample_with_kept(plain, requests), sample_with_kept(guessing, requests)
    for slot, (tokens, logprobs, kept) in expected.items():
        assert found[slot][0] == tokens
        np.testing.assert_allclose(found[slot][1], logprobs, atol=5e-5)  # a temperature of 0.2: five times the logits' rounding
        assert (kept is None) == (found[slot][2] is None)
        if kept is not None:
            np.testing.assert_array_equal(found[slot][2].counts, kept.counts)
            np.testing.assert_array_equal(found[slot][2].ids, kept.ids)


def test_a_stop_token_within_a_guess_ends_the_sequence(plain: Sampler, guessing: Sampler) -> None:
    """A greedy answer that goes round is guessed as a whole; each of its tokens may be the one to stop at."""
    (tokens, _, _) = sample_with_kept(plain, [repeating(0, temperature=0.0)])[0]
    for stop in dict.fromkeys(tokens):
        request = repeating(0, temperature=0.0, stop_token_ids=(43, stop))
        assert sample_with_kept(guessing, [request])[0][0] == tokens[: tokens.index(stop) + 1]


def test_no_more_tokens_than_asked_for_come_from_one_call(guessing: Sampler) -> None:
    guessing.fill([repeating(slot, 20, temperature=0.0) for slot in range(4)])
    counts = np.zeros(SLOTS, int)
    while counts.sum() < 4 * 20:
        decoded = guessing.decode(2, SLOTS)
        assert 1 <= decoded.counts.max() <= 2 == decoded.tokens.shape[1]
        counts += decoded.counts
    assert counts.tolist() == [20] * 4 + [0] * 4
    assert guessing.decode(2, SLOTS).counts.sum() == 0


def test_guesses_save_passes_and_are_counted(trainer: Trainer, guessing: Sampler, speculation: Speculation) -> None:
    requests = [repeating(slot, 30, temperature=0.0) for slot in range(4)]
    guessing.fill(requests)
    total, tokens = Guesses(), 0
    while (decoded := guessing.decode(64, SLOTS)).counts.any():
        total, tokens = total + decoded.guesses, tokens + int(decoded.counts.sum())
    assert tokens == 4 * 30 == total.passes + total.accepted
    assert total.accepted <= total.drafted <= speculation.tokens * total.passes
    most = 1 + speculation.tokens
    if speculation.method == "draft":  # of itself
        assert total.passes == 4 * -(-30 // most)
    else:
        assert total.accepted > 20
    assert total.metrics["speculation/accepted_per_pass"] == total.accepted / total.passes
    assert total.metrics["speculation/accepted_share"] == total.accepted / total.drafted


def test_slots_that_are_freed_and_filled_again_while_others_run_forget_their_sequences(
    plain: Sampler, guessing: Sampler
) -> None:
    (expected, _, _) = sample_with_kept(plain, [repeating(2)])[2]
    guessing.fill([repeating(slot, 40) for slot in range(4)])
    guessing.decode(9, SLOTS)
    guessing.free([2, 3, 7])
    guessing.fill([repeating(2)])
    found: list[int] = []
    while (decoded := guessing.decode(9, SLOTS)).counts.any():
        found += decoded.tokens[2, : decoded.counts[2]].tolist()
    assert found == expected


@pytest.mark.parametrize("method", ["draft", *further("ngram")])
def test_other_guesses_change_nothing_either(
    backend: str, trainer: Trainer, plain: Sampler, tmp_path: Path, method: str
) -> None:
    """A draft of other weights, layers and sizes, that is hardly ever right; one slot and one guess."""
    smaller = write_model(tmp_path, seed=5, hidden_size=32, num_hidden_layers=1)
    draft = {"method": "draft", "draft": str(smaller), "tokens": 2}
    other = Speculation(**draft) if method == "draft" else Speculation(method="ngram", tokens=1)
    sampler = sampler_of(trainer, other, slots=1)
    for request in (repeating(0, 25, temperature=0.6), repeating(0, 25, temperature=0.0)):
        assert sample_with_kept(sampler, [request])[0][0] == sample_with_kept(plain, [request])[0][0]


@pytest.mark.parametrize("speculation", ["ngram", *further("draft")], indirect=True)
def test_tokens_are_distributed_as_the_model_says(trainer: Trainer, speculation: Speculation, tiny_model_dir: Path) -> None:
    """The second and third token after a prompt, most often guessed, of many seeds."""
    slots, temperature = 400, 0.35
    sampler = sampler_of(trainer, speculation, slots)
    prompt = np.array([7, 8, 9, 10, 7, 8, 9, 10, 7, 8], np.int32)
    params = SamplingParams(max_tokens=3, temperature=temperature)
    found: list[list[int]] = []
    guesses = Guesses()
    for turn in range(4):
        sampler.fill([SlotRequest(s, prompt, 0, params, slots * turn + s) for s in range(slots)])
        made: list[list[int]] = [[] for _ in range(slots)]
        while (decoded := sampler.decode(8, slots)).counts.any():
            guesses += decoded.guesses
            for slot, tokens in enumerate(made):
                tokens += decoded.tokens[slot, : decoded.counts[slot]].tolist()
        found += made
    assert guesses.accepted > 20
    reference = Reference(tiny_model_dir)
    first = np.exp(reference.distributions(prompt, temperature)[-1])
    assert_distributed(np.bincount([t[0] for t in found], minlength=len(first)), first)
    commonest = int(np.bincount([t[0] for t in found]).argmax())
    after = np.exp(reference.distributions(np.append(prompt, commonest).astype(np.int32), temperature)[-1])
    second = [t[1] for t in found if t[0] == commonest]
    assert_distributed(np.bincount(second, minlength=len(after)), after)


def assert_distributed(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """χ² over tokens that are expected at least 5 times, the others as one."""
    expected = probabilities / probabilities.sum() * counts.sum()
    common = expected >= 5
    pooled = [*counts[common], counts[~common].sum()], [*expected[common], expected[~common].sum()]
    assert chisquare(*pooled).pvalue > 1e-4


@pytest.mark.parametrize("speculation", ["ngram", *further("draft")], indirect=True)
def test_weights_that_are_swapped_in_the_middle(
    backend: str, trainer: Trainer, plain: Sampler, speculation: Speculation, tmp_path: Path
) -> None:
    """Each token has the version and the log-probability of the weights that sampled it, and is the one
    that these sample there without guesses."""
    other = trainer_of(backend, write_model(tmp_path, seed=11))
    other.version = 1
    requests = [repeating(slot, 60, temperature=0.4) for slot in range(4)]

    async def generate() -> tuple[list[Any], dict[str, float]]:
        engine = EmbeddedEngine(trainer.sampler(SLOTS, CONTEXT, speculation))
        await engine.start()
        await engine.swap(engine.stage(trainer, version=0))
        decode, begun = engine._sampler.decode, asyncio.Event()
        loop = asyncio.get_running_loop()

        def few(steps: int, until_free: int) -> Any:
            """At most ten tokens before the swap, and one while it waits."""
            if engine.version == 1:
                return decode(steps, until_free)
            if not begun.is_set():
                loop.call_soon_threadsafe(begun.set)
                return decode(10, until_free)
            with engine._changed:
                engine._changed.wait_for(lambda: engine._swaps)
            return decode(1, until_free)

        engine._sampler.decode = few  # type: ignore[method-assign]
        futures = engine.submit([Request(r.tokens, r.sampling, r.seed) for r in requests])
        await begun.wait()
        await engine.swap(engine.stage(other))
        completions = await asyncio.gather(*futures)
        metrics = engine.balance(0.0, 0.0)
        await engine.close()
        return completions, metrics

    found, metrics = asyncio.run(generate())
    assert metrics["speculation/accepted_per_pass"] > 0
    before, of_other = sample_with_kept(plain, requests), sampler_of(other)
    for request, completion in zip(requests, found, strict=True):
        old = int((completion.versions == 0).sum())
        assert completion.versions.tolist() == [0] * old + [1] * (60 - old)
        assert 1 <= old <= 12
        tokens, logprobs, _ = before[request.slot]
        assert completion.tokens[:old].tolist() == tokens[:old]
        np.testing.assert_allclose(completion.logprobs[:old], logprobs[:old], atol=1e-5)
        so_far = np.concatenate([request.tokens, completion.tokens[:old]])
        rest = SlotRequest(request.slot, so_far, old, request.sampling, request.seed)
        tokens, logprobs, _ = sample_with_kept(of_other, [rest])[request.slot]
        assert completion.tokens[old:].tolist() == tokens
        np.testing.assert_allclose(completion.logprobs[old:], logprobs, atol=1e-5)


# States beside keys and values; sinks, windows and experts; caps; latent attention; attention in chunks.
KINDS = ["qwen3_5_text-0", *further("gpt_oss-0", "qwen3_next-1", "gemma3_text-0", "deepseek_v3-0", "llama4_text-0")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_attention_samples_the_same_tokens(backend: str, tmp_path: Path, kind: str) -> None:
    directory = write_config(CASES[kind], tmp_path)
    policy = trainer_of(backend, directory)
    requests = [repeating(slot, 40, temperature=(0.0, 0.3, 0.6)[slot]) for slot in range(3)]
    expected = sample_with_kept(sampler_of(policy, slots=3), requests)
    sampler = sampler_of(policy, LOOKUP, slots=3)
    sampler.fill(requests)
    found: dict[int, list[int]] = {slot: [] for slot in expected}
    logprobs: dict[int, list[float]] = {slot: [] for slot in expected}
    guesses = Guesses()
    while (decoded := sampler.decode(16, 3)).counts.any():
        guesses += decoded.guesses
        for slot, count in enumerate(decoded.counts):
            found[slot] += decoded.tokens[slot, :count].tolist()
            logprobs[slot] += decoded.logprobs[slot, :count].tolist()
    assert 0 < guesses.accepted < guesses.drafted  # some are rejected, too
    for slot, (tokens, own, _) in expected.items():
        assert found[slot] == tokens
        np.testing.assert_allclose(logprobs[slot], own, atol=1e-4)


@thorough
def test_a_smaller_model_with_states_is_refused(trainer: Trainer, tmp_path: Path) -> None:
    draft = write_config(CASES["qwen3_5_text-0"], tmp_path)
    with pytest.raises(ConfigError, match=r"speculation\.draft = .*a wrong guess would change the states"):
        trainer.sampler(2, 64, Speculation(method="draft", draft=str(draft)))


# The rules, as arrays.


def test_the_newest_place_of_the_longest_match_is_looked_up() -> None:
    history = np.array(
        [
            [1, 2, 3, 7, 1, 2, 3, 8, 9, 2, 3, 5, 1, 2, 3, 0],  # three alike, twice: 8 follows the newer one
            [4, 4, 4, 4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # goes round
            [6, 5, 6, 5, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
            [1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # nothing again; the zeros do not count
            [9, 1, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # one alike is too few
            [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        ],
        np.int32,
    )
    lengths = np.array([15, 6, 5, 7, 3, 1])
    rule = Speculation(method="ngram", tokens=4, longest=3, shortest=2)
    nothing = [-1] * 4
    expected = [[8, 9, 2, 3], [4] * 4, [5, 6, 5, 6], nothing, nothing, nothing]
    for xp in (np, pytest.importorskip("jax.numpy")):
        assert continuations(xp, xp.asarray(history), xp.asarray(lengths), rule).tolist() == expected


def test_positions_count_as_long_as_the_guess_before_them_was_right() -> None:
    sampled = np.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    guessed = np.array([[1, 2], [1, 9], [9, 2], [-1, -1], [1, 2], [1, 2], [1, 2]])
    stops = np.array([[-1], [-1], [-1], [-1], [2], [-1], [-1]])
    left = np.array([9, 9, 9, 9, 9, 2, 0])
    for xp in (np, pytest.importorskip("jax.numpy")):
        counts, stopped = taken(xp, *map(xp.asarray, (sampled, guessed, stops, left)))
        assert counts.sum(1).tolist() == [3, 2, 1, 1, 2, 2, 0]
        assert stopped.tolist() == [False] * 4 + [True] + [False] * 2


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"method": "lookahead"}, "speculation.method"),
        ({"method": "ngram", "tokens": 0}, "speculation.tokens"),
        ({"method": "ngram", "tokens": 200}, "speculation.tokens"),
        ({"method": "ngram", "longest": 1, "shortest": 2}, "speculation.longest"),
        ({"method": "ngram", "shortest": 0}, "speculation.shortest"),
        ({"method": "draft"}, "speculation.draft"),
        ({"method": "ngram", "draft": "somewhere"}, "speculation.draft"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Speculation(**values)
