"""Predicts the effect of a split of accelerators between generation and training, by simulating
each choice with a profile of the hardware.

A profile and a choice are plain numbers, and areal_x.simulation runs them on a virtual clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int32

from areal_x.errors import ConfigError, at_least, positive, within
from areal_x.simulation import Attempt, FakeEngine, FakeTrainer, Length, Speed, simulate, uniform
from areal_x.types import Group

# Warm-up steps, in units of max_staleness + 1: a simulated run has then consumed the groups that
# filled its queue at the start.
WARMUP_FILLS = 3
MEASURED_STEPS = 12  # several, as groups arrive in waves
STALENESS = (0, 1, 2, 4)  # the bounds that are tried
ACCEPTED_SLOWDOWN = 1.02  # a step may take so many times as long if its staleness is smaller
ACCEPTED_RATE = 0.998  # share of a run's tokens per second that its simulation must reach
# A full engine generates at most this many times as fast as the whole run.
MAX_SPEEDUP = 256.0
HALVINGS = 12  # bisection steps, which find the speed to within 0.2 %


@dataclass(frozen=True)
class Profile:
    """The speed of one accelerator, and the workload.

    Training is assumed to scale linearly, so its accelerators should share a fast network.
    """

    decode_step_seconds: float
    """Time of one decoding step, independent of the number of requests."""

    decode_request_seconds: float
    """Additional time of a decoding step for each request."""

    prefill: float
    """Prompt tokens per second."""

    train_token_seconds: float
    """Time for log-probabilities and update, per packed token."""

    publish_seconds: float
    """Time to stage weights, while generation continues."""

    swap_seconds: float
    """Pause of generation for new weights."""

    lengths: Int32[np.ndarray, " samples"]
    """A sample of completion lengths in tokens."""

    prompt_tokens: int
    """Mean prompt length in tokens."""

    concurrency: int
    """Requests on one accelerator for which these numbers were measured or estimated."""

    def decode(self, n: int) -> float:
        """Tokens per second of n requests together."""
        return n / (self.decode_step_seconds + self.decode_request_seconds * n)

    def length(self) -> Length:
        ordered = np.sort(self.lengths)
        return lambda seed: int(ordered[int(uniform(seed) * len(ordered))])


@dataclass(frozen=True)
class Choice:
    """A split of accelerators, with the parameters of `train` that matter for it."""

    generation: int
    """Accelerators that generate."""

    training: int
    """Accelerators that train."""

    max_staleness: int
    window: int
    concurrency: int
    """Requests at once on one server."""

    groups_per_step: int
    group_size: int

    width: int = 1
    """Accelerators of one server, which divide its work evenly."""

    @property
    def servers(self) -> int:
        return self.generation // self.width


@dataclass(frozen=True)
class Nodes:
    """Equal nodes. No server is on two of them, and no group of accelerators that train
    together."""

    count: int

    each: int
    """Accelerators of each."""

    together: int = 1
    """Accelerators that train one part of the model, and exchange more than gradients and
    weights."""


@dataclass(frozen=True)
class Prediction:
    """Means over simulated steps, after the warm-up."""

    choice: Choice
    step_seconds: float
    trainer_idle: float
    """Share of the time that the trainer waited for groups."""

    generation_idle: float
    """Share of the engine's slots that were empty."""

    staleness_mean: float
    staleness_max: int
    tokens_per_second: float
    """Generated tokens that were trained on, per second."""


def predict(profile: Profile, choice: Choice, steps: int = MEASURED_STEPS) -> Prediction:
    """Simulates `steps` steps, after the warm-up in which the queue fills."""

    def step_seconds(groups: Sequence[Group]) -> float:
        tokens = sum(
            len(t) for group in groups for episode in group.scored for t in episode.trajectories
        )
        return tokens * profile.train_token_seconds / choice.training

    def decode(n: int) -> float:
        return choice.width * profile.decode(n)

    engine = FakeEngine(
        Speed(choice.width * profile.prefill, decode, profile.swap_seconds),
        servers=choice.servers,
        concurrency=choice.concurrency,
        length=profile.length(),
    )
    warmup = WARMUP_FILLS * (choice.max_staleness + 1)
    rows = simulate(
        engine,
        FakeTrainer(step_seconds, profile.publish_seconds),
        steps=warmup + steps,
        groups_per_step=choice.groups_per_step,
        group_size=choice.group_size,
        max_staleness=choice.max_staleness,
        window=choice.window,
        workflow=Attempt(profile.prompt_tokens),
    )[warmup:]
    seconds = sum(row["seconds"] for row in rows)
    used = sum(row["slot_seconds"] for row in rows) / (
        seconds * choice.generation * choice.concurrency
    )
    return Prediction(
        choice,
        step_seconds=seconds / len(rows),
        trainer_idle=sum(row["wait_seconds"] for row in rows) / seconds,
        generation_idle=1 - used,
        staleness_mean=sum(row["staleness_mean"] for row in rows) / len(rows),
        staleness_max=int(max(row["staleness_max"] for row in rows)),
        tokens_per_second=sum(row["trained_tokens"] for row in rows) / seconds,
    )


def profile_from_sizes(
    parameters: float,
    flops: float,
    bandwidth: float,
    mean_length: float,
    most: int,
    prompt_tokens: int,
    concurrency: int,
    efficiency: float = 0.4,
    sigma: float = 1.0,
    passes: int = 0,
) -> Profile:
    """Estimates a profile from the sizes of a model and the peak rates of a device, without any
    measurement.

    Weights and gradients have 2 bytes per parameter. A decoding step reads all weights once; a
    token costs 2 operations per parameter to prefill or generate, 6 to train on, and 2 for each of
    the further forward `passes`; weights are staged once. All at `efficiency` of the peak rates.
    Caches, attention over long rows and the network are ignored. Lengths are lognormal.
    """
    for name, value in (
        ("parameters", parameters),
        ("flops", flops),
        ("bandwidth", bandwidth),
        ("mean-length", mean_length),
    ):
        positive(f"--{name}", value)
    within("--efficiency", efficiency, 0.01, 1)
    token_seconds = 2 * parameters / (flops * efficiency)
    read_seconds = 2 * parameters / (bandwidth * efficiency)
    normal = np.random.default_rng(0).normal(np.log(mean_length) - sigma**2 / 2, sigma, 10_000)
    lengths = np.clip(np.exp(normal), 1, most).astype(np.int32)
    return Profile(
        decode_step_seconds=read_seconds,
        decode_request_seconds=token_seconds,
        prefill=1 / token_seconds,
        train_token_seconds=(3 + passes) * token_seconds,
        publish_seconds=read_seconds,
        swap_seconds=read_seconds,
        lengths=lengths,
        prompt_tokens=prompt_tokens,
        concurrency=concurrency,
    )


def profile_from_run(
    rows: Sequence[Mapping[str, float]],
    lengths: Int32[np.ndarray, " samples"],
    prompt_tokens: int,
    ran: Choice,
) -> Profile:
    """A profile from a run's metrics and the completion lengths in its journal. ran: the run's own
    choice.

    The first two steps, which compile, are skipped. The decoding speed is the lowest with which the
    simulation of the run generates as many tokens per second as the run did (a lower bound if the
    run's trainer never waited). One batch size does not show the cost of others, so every decoding
    step is assumed to cost the same. Prompts are assumed to be read as fast as a full batch is
    decoded, another lower bound.
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
        publish_seconds=mean("publish_seconds"),
        swap_seconds=mean("pause_seconds"),
        lengths=lengths,
        prompt_tokens=prompt_tokens,
        concurrency=ran.concurrency,
    )

    def faster(times: float) -> Profile:
        return replace(
            base, decode_step_seconds=base.decode_step_seconds / times, prefill=base.prefill * times
        )

    enough = ACCEPTED_RATE * min(rate, predict(faster(MAX_SPEEDUP), ran).tokens_per_second)
    # geometric bisection for the lowest speed that is enough
    low, high = 1.0, MAX_SPEEDUP
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (
            (low, middle)
            if predict(faster(middle), ran).tokens_per_second >= enough
            else (middle, high)
        )
    return faster(high)


def splits(
    accelerators: int, ran: Choice, most: int = 7, nodes: Nodes | None = None
) -> list[Choice]:
    """At most `most` splits of the accelerators, nearly evenly spaced, with the other settings of
    `ran`. nodes: on which the accelerators are.

    Raises: ConfigError if none leaves something for both sides.
    """
    at_least("--accelerators", accelerators, 2)
    possible = [
        (servers * ran.width, training)
        for servers in range(1, accelerators // ran.width + 1)
        if (training := left_for_training(servers, accelerators, ran.width, nodes)) > 0
    ]
    if not possible:
        wanted = f"more than {ran.width}, the accelerators of one server"
        raise ConfigError("--accelerators", accelerators, wanted)
    targets = [accelerators * i / (most + 1) for i in range(1, most + 1)]
    near = {min(possible, key=lambda pair: abs(pair[0] - target)) for target in targets}
    chosen = possible if len(possible) <= most else sorted(near)
    return [replace(ran, generation=n, training=training) for n, training in chosen]


def left_for_training(servers: int, accelerators: int, width: int, nodes: Nodes | None) -> int:
    """Returns how many accelerators can train beside so many servers; 0 or less if the servers have
    no room. On nodes, servers are packed densely, and whole groups train on what each node has
    left."""
    if nodes is None:
        return accelerators - servers * width
    on_a_node = nodes.each // width
    if on_a_node == 0 or servers > nodes.count * on_a_node:
        return 0
    full, rest = divmod(servers, on_a_node)
    left = [nodes.each - on_a_node * width] * full
    left += [nodes.each - rest * width] * (rest > 0)
    left += [nodes.each] * (nodes.count - len(left))
    return sum(free - free % nodes.together for free in left)


def search(
    profile: Profile, accelerators: int, ran: Choice, nodes: Nodes | None = None
) -> list[Prediction]:
    """Predicts all splits at each staleness bound; then, around the best of them, other windows and
    concurrencies. Returns the fastest first. nodes: see `splits`."""
    tried = [
        predict(profile, replace(choice, max_staleness=s))
        for choice in splits(accelerators, ran, nodes=nodes)
        for s in STALENESS
    ]
    around = recommended(tried).choice
    windows = {1, max(1, ran.groups_per_step // 2), ran.groups_per_step} - {around.window}
    fewer = {max(1, ran.concurrency // 2), max(1, ran.concurrency // 4)} - {around.concurrency}
    more = [replace(around, window=w) for w in sorted(windows)] + [
        replace(around, concurrency=c) for c in sorted(fewer)
    ]
    return sorted(
        tried + [predict(profile, choice) for choice in more], key=lambda p: p.step_seconds
    )


def recommended(predictions: Sequence[Prediction]) -> Prediction:
    """Among those that are nearly as fast as the fastest, the one with the least staleness."""
    fastest = min(p.step_seconds for p in predictions)
    return min(
        (p for p in predictions if p.step_seconds <= ACCEPTED_SLOWDOWN * fastest),
        key=lambda p: (p.staleness_mean, p.step_seconds),
    )
