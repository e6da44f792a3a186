"""What a split of accelerators between generation and training would do: a profile, and a
simulation of each choice.

Pure: a profile is numbers, a choice is numbers, and the ring of areal_x.simulation tells what
becomes of both on a virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int32

from areal_x.errors import at_least, positive, within
from areal_x.simulation import Attempt, FakeEngine, FakeTrainer, Length, Speed, simulate, uniform
from areal_x.types import Group

# of the queue's slots: steps so many times max_staleness + 1 before a simulated run has used up its
# first stock
FILLS = 3
SETTLED = 12  # steps that are measured: groups come in waves
STALENESS = (0, 1, 2, 4)  # bounds that are tried
AS_GOOD = 1.02  # a step that takes so many times as long is worth what it saves in staleness
AS_FAST = 0.998  # of a run's tokens a second: what its simulation reaches
# a full engine is at most so many times as fast as the whole run; to 0.2 % of it
FASTEST, HALVINGS = 256.0, 12


@dataclass(frozen=True)
class Profile:
    """What one accelerator does, and what it is asked to do.

    decode_step_seconds, decode_request_seconds: a token of each of n requests takes the first + n
    times the second. prefill: prompt tokens a second. train_token_seconds: log-probabilities and
    update, of a packed token. publish_seconds: to stage weights, swap_seconds: that generation
    stands still. lengths: of completions, a sample. prompt_tokens: on average. concurrency: up to
    how many requests on one accelerator this was measured or holds. Training is taken to share out
    evenly, so its accelerators should be of one fast network.
    """

    decode_step_seconds: float
    decode_request_seconds: float
    prefill: float
    train_token_seconds: float
    publish_seconds: float
    swap_seconds: float
    lengths: Int32[np.ndarray, " samples"]
    prompt_tokens: int
    concurrency: int

    def decode(self, n: int) -> float:
        """Tokens a second of n requests together."""
        return n / (self.decode_step_seconds + self.decode_request_seconds * n)

    def length(self) -> Length:
        ordered = np.sort(self.lengths)
        return lambda seed: int(ordered[int(uniform(seed) * len(ordered))])


@dataclass(frozen=True)
class Choice:
    """generation, training: accelerators. The others are parameters of `train`; concurrency: of one
    server."""

    generation: int
    training: int
    max_staleness: int
    window: int
    concurrency: int
    groups_per_step: int
    group_size: int


@dataclass(frozen=True)
class Predicted:
    """Means of settled steps. trainer_idle: share of the time in which it waited for groups.
    generation_idle: share of the engine's slots that were empty. tokens_per_second: new ones that
    were trained on."""

    choice: Choice
    step_seconds: float
    trainer_idle: float
    generation_idle: float
    staleness_mean: float
    staleness_max: int
    tokens_per_second: float


def predict(profile: Profile, choice: Choice, settled: int = SETTLED) -> Predicted:
    """Simulates `settled` steps, after those in which the queue fills."""

    def step_seconds(groups: Sequence[Group]) -> float:
        tokens = sum(
            len(t) for group in groups for episode in group.scored for t in episode.trajectories
        )
        return tokens * profile.train_token_seconds / choice.training

    engine = FakeEngine(
        Speed(profile.prefill, profile.decode, profile.swap_seconds),
        servers=choice.generation,
        concurrency=choice.concurrency,
        length=profile.length(),
    )
    first = FILLS * (choice.max_staleness + 1)
    rows = simulate(
        engine,
        FakeTrainer(step_seconds, profile.publish_seconds),
        steps=first + settled,
        groups_per_step=choice.groups_per_step,
        group_size=choice.group_size,
        max_staleness=choice.max_staleness,
        window=choice.window,
        workflow=Attempt(profile.prompt_tokens),
    )[first:]
    seconds = sum(row["seconds"] for row in rows)
    used = sum(row["slot_seconds"] for row in rows) / (
        seconds * choice.generation * choice.concurrency
    )
    return Predicted(
        choice,
        seconds / len(rows),
        sum(row["wait_seconds"] for row in rows) / seconds,
        1 - used,
        sum(row["staleness_mean"] for row in rows) / len(rows),
        int(max(row["staleness_max"] for row in rows)),
        sum(row["trained_tokens"] for row in rows) / seconds,
    )


def described(
    parameters: float,
    flops: float,
    bandwidth: float,
    mean_length: float,
    most: int,
    prompt_tokens: int,
    concurrency: int,
    efficiency: float = 0.4,
    sigma: float = 1.0,
) -> Profile:
    """A profile from the sizes of a model and a device, where nothing was measured.

    Weights and gradients of 2 bytes a parameter. A decoding step reads all weights once; a token
    costs 2 operations a parameter to generate or read and 8 to train on (2 of its log-probability,
    6 of forward and backward); weights are staged once. All at `efficiency` of the peaks. Caches,
    attention over long rows and the network are left out. lengths: lognormal.
    """
    for name, value in (
        ("parameters", parameters),
        ("flops", flops),
        ("bandwidth", bandwidth),
        ("mean-length", mean_length),
    ):
        positive(f"--{name}", value)
    within("--efficiency", efficiency, 0.01, 1)
    token = 2 * parameters / (flops * efficiency)
    read = 2 * parameters / (bandwidth * efficiency)
    normal = np.random.default_rng(0).normal(np.log(mean_length) - sigma**2 / 2, sigma, 10_000)
    lengths = np.clip(np.exp(normal), 1, most).astype(np.int32)
    return Profile(
        read, token, 1 / token, 4 * token, read, read, lengths, prompt_tokens, concurrency
    )


def measured(
    rows: Sequence[Mapping[str, float]],
    lengths: Int32[np.ndarray, " samples"],
    prompt_tokens: int,
    ran: Choice,
) -> Profile:
    """A profile from a run's metrics and the lengths in its journal. ran: the choice that it made.

    Steps after the first two are used, as those compile. The speed of decoding is that with which
    the simulation of the run itself generates as many tokens a second as the run did (a lower bound
    where the run's trainer never waited). One batch says nothing of others, so every decoding step
    is taken to cost the same. Prompts are taken to be read as fast as a full batch is decoded,
    another lower bound.
    """
    rows = [row for row in rows if row["step"] > 2 and row.get("seconds")]

    def mean(name: str) -> float:
        return float(np.mean([row[name] for row in rows]))

    trained = sum(row["logprob_seconds"] + row["update_seconds"] for row in rows) / sum(
        row["packed_tokens"] for row in rows
    )
    rate = sum(row["trained_tokens"] for row in rows) / sum(row["seconds"] for row in rows)
    base = Profile(
        decode_step_seconds=ran.generation * ran.concurrency / rate,
        decode_request_seconds=0.0,
        prefill=rate / ran.generation,
        train_token_seconds=trained * ran.training,
        publish_seconds=max(0.0, mean("publish_seconds") - mean("pause_seconds")),
        swap_seconds=mean("pause_seconds"),
        lengths=lengths,
        prompt_tokens=prompt_tokens,
        concurrency=ran.concurrency,
    )

    def faster(times: float) -> Profile:
        return replace(
            base, decode_step_seconds=base.decode_step_seconds / times, prefill=base.prefill * times
        )

    enough = AS_FAST * min(rate, predict(faster(FASTEST), ran).tokens_per_second)
    low, high = 1.0, FASTEST  # bisected by ratios for the least speed that is enough
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (
            (low, middle)
            if predict(faster(middle), ran).tokens_per_second >= enough
            else (middle, high)
        )
    return faster(high)


def choices(accelerators: int, ran: Choice, most: int = 7) -> list[Choice]:
    """Splits of the accelerators, at most so many of them, with the other settings of `ran`."""
    at_least("--accelerators", accelerators, 2)
    sizes = sorted(
        {
            max(1, min(accelerators - 1, round(accelerators * i / (most + 1))))
            for i in range(1, most + 1)
        }
    )
    return [replace(ran, generation=n, training=accelerators - n) for n in sizes]


def search(profile: Profile, accelerators: int, ran: Choice) -> list[Predicted]:
    """All splits at each staleness; then, around the best of them, other windows and concurrencies.
    The fastest first."""
    tried = [
        predict(profile, replace(choice, max_staleness=s))
        for choice in choices(accelerators, ran)
        for s in STALENESS
    ]
    around = best(tried).choice
    windows = {1, max(1, ran.groups_per_step // 2), ran.groups_per_step} - {around.window}
    fewer = {max(1, ran.concurrency // 2), max(1, ran.concurrency // 4)} - {around.concurrency}
    more = [replace(around, window=w) for w in sorted(windows)] + [
        replace(around, concurrency=c) for c in sorted(fewer)
    ]
    return sorted(
        tried + [predict(profile, choice) for choice in more], key=lambda p: p.step_seconds
    )


def best(predictions: Sequence[Predicted]) -> Predicted:
    """Of those that are nearly as fast as the fastest, the one with the least staleness."""
    fastest = min(p.step_seconds for p in predictions)
    return min(
        (p for p in predictions if p.step_seconds <= AS_GOOD * fastest),
        key=lambda p: (p.staleness_mean, p.step_seconds),
    )
