"""Self-play on countdown: the policy proposes the problems that it is trained on.

    a slot of the pool ──has a problem?──no──▶ the policy proposes one, until it is well-formed, new and solvable
                              │                                   │
                              └──yes──▶ the group answers it ◀────┘
                                                 │ share of correct answers
                        neither low nor high: the problem keeps its slot, and the group is trained on
                        otherwise: the slot is free for another problem

The difficulty of a problem is thus measured again each time it is trained on, under the current
policy, and the problem leaves the pool once it has become too easy. Only answers are trained on;
proposing is taught by the warm start.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import permutations
from typing import Any

import gin
import numpy as np

from areal_x import (
    Episode,
    EpisodeResult,
    Failed,
    Generator,
    Group,
    Request,
    SamplingParams,
    Scored,
    Task,
    Workflow,
    at_least,
    encode,
    episode_of,
    one_of,
    within,
)
from examples.countdown.task import Problem, problems, task_of

SHORT = "?"
WORDS = (
    "Make up a problem of this kind: three or four whole numbers from 1 to {largest}, and a target"
    " from 1 to {highest} that can be made of them with + - * / and parentheses, each number at"
    " most once. It should be neither easy nor impossible. Let one of the numbers be {number}."
    " Write it within <problem> </problem>, for example <problem>3, 7, 5 = 38</problem>."
)
MARKED = re.compile(r"<problem>(.*?)</problem>", re.DOTALL)
FORM = re.compile(r"\s*(\d{1,6}(?:\s*,\s*\d{1,6})+)\s*=\s*(\d{1,6})\s*:?\s*")
RECENT = 200  # proposals over which the share of valid ones is reported


@gin.configurable(module="self_play")
def places(
    count: int = 64, wording: str = "short", largest: int = 99, highest: int = 999
) -> list[Task]:
    """Returns one task per slot of the pool; its prompt requests a problem for the slot.

    Args:
        count: Number of slots, more than the groups in flight at once.
        wording: As in `self_play`.
        largest: As in `self_play`.
        highest: As in `self_play`.
    """
    at_least("self_play.places.count", count, 1)
    one_of("self_play.places.wording", wording, ("words", "short"))

    def asking(place: int) -> Any:
        if wording == "short":
            return SHORT
        words = WORDS.format(largest=largest, highest=highest, number=1 + place % largest)
        return [{"role": "user", "content": words}]

    return [Task(f"place {place}", asking(place)) for place in range(count)]


@gin.configurable(module="self_play")
def middling(group: Group, low: float = 0.1, high: float = 0.9) -> bool:
    """True if a group's mean reward is strictly between the bounds: such groups are trained on, and
    their problems keep their slot.

    Args:
        group: The group.
        low: Lower bound.
        high: Upper bound.
    """
    return low < float(np.mean(group.rewards)) < high


@dataclass
class Round:
    """The work of one group on a slot of the pool."""

    place: str
    problem: Problem | None
    """None until a proposal is valid."""
    proposals: int = 0
    """Proposals so far."""
    players: int = 0
    """Episodes of the group that are not finished."""
    episodes: list[Episode] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class Pool:
    """The problems being trained on, by slot, with the latest share of correct answers. A state
    machine: no method waits."""

    keep: Callable[[Group], bool]
    """True if a group's problem keeps its slot."""
    fits: Callable[[Sequence[int], int], bool]
    """True if numbers and target are within the requested sizes."""
    unseen: frozenset[str] = frozenset()
    """Ids of held-out problems, which are rejected."""
    problems: dict[str, Problem] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Validity of the latest proposals."""
    rounds: dict[str, Round] = field(default_factory=dict)

    def join(self, place: str) -> Round:
        """Returns the round on that slot. The members of a group join in direct succession and share
        one round."""
        round = self.rounds.setdefault(place, Round(place, self.problems.get(place)))
        round.players += 1
        return round

    def leave(self, round: Round) -> None:
        """Ends the round with its last player, and keeps or removes its problem. If no episode was
        scored, nothing changes."""
        round.players -= 1
        if round.players:
            return
        del self.rounds[round.place]
        group = Group(Task(round.place, ""), 0, 0, tuple(round.episodes))
        if round.problem is None or not group.rewards:
            return
        if self.keep(group):
            self.problems[round.place], self.rates[round.place] = (
                round.problem,
                float(np.mean(group.rewards)),
            )
        else:
            self.problems.pop(round.place, None)
            self.rates.pop(round.place, None)

    def propose(self, round: Round, text: str) -> None:
        """Sets the round's problem to the one in the text if it is valid."""
        round.proposals += 1
        problem = self.judge(text)
        self.recent.append(problem is not None)
        round.problem = problem

    def judge(self, text: str) -> Problem | None:
        """Returns the problem with its solution, or None if it is malformed, already in the pool, held
        out or unsolvable."""
        numbers, target = read(text)
        if not self.fits(numbers, target):
            return None
        name = Problem(numbers, target, "").short
        there = {
            *self.problems.values(),
            *(round.problem for round in self.rounds.values() if round.problem),
        }
        if name in self.unseen or name in {problem.short for problem in there}:
            return None
        expression = solution(numbers, target)
        return None if expression is None else Problem(numbers, target, expression)

    def measures(self) -> dict[str, float]:
        rates = {"pool_pass_rate": float(np.mean(list(self.rates.values())))} if self.rates else {}
        return {
            "pool": float(len(self.problems)),
            "valid_proposals": float(np.mean(self.recent or [0.0])),
            **rates,
        }

    def state(self) -> dict[str, Any]:
        held = {
            place: [list(problem.numbers), problem.target, problem.expression, self.rates[place]]
            for place, problem in self.problems.items()
        }
        return {"problems": held, "recent": list(self.recent)}

    def restore(self, state: Mapping[str, Any]) -> None:
        for place, (numbers, target, expression, rate) in state["problems"].items():
            self.problems[place], self.rates[place] = (
                Problem(tuple(numbers), target, expression),
                rate,
            )
        self.recent.extend(state["recent"])


@gin.configurable("self_play", denylist=["pool", "tokenizer"])
@dataclass(frozen=True)
class SelfPlay(Workflow):
    """Answers the problems of a pool that the policy fills itself. Its tasks are
    `self_play.places`.

    Reported beside the reward: pool, the number of its problems; pool_pass_rate, their mean share of
    correct answers when last trained on; valid_proposals, the valid share of the latest 200
    proposals. The pool is part of each checkpoint.
    """

    solver: Workflow
    """Workflow that answers a problem; evaluation runs it alone."""
    keep: Callable[[Group], bool] = middling
    """Filter of groups whose problem keeps its slot; use the same in the algorithm's `filters`."""
    tries: int = 8
    """Maximum number of proposals for a free slot; if none is valid, the group fails."""
    numbers: Sequence[int] = (3, 4)
    """How many numbers a problem may have."""
    largest: int = 99
    """Largest number; the smallest is 1."""
    highest: int = 999
    """Largest target; the smallest is 1."""
    wording: str = "short"
    """"words" for a user message, "short" for plain text."""
    pool: Pool | None = None
    tokenizer: Any = None

    def __post_init__(self) -> None:
        at_least("self_play.tries", self.tries, 1)
        within(
            "self_play.numbers", max(self.numbers), 2, 4
        )  # the search enumerates all expressions
        one_of("self_play.wording", self.wording, ("words", "short"))

    @property
    def sampling(self) -> SamplingParams:
        found = self.solver.sampling_params()
        assert found is not None, "the solver must have a `sampling`"
        return found

    def setup(self, tokenizer: Any) -> SelfPlay:
        held_out = problems("test", self.numbers, self.largest, self.highest)
        pool = Pool(self.keep, self.fits, frozenset(task.id for task in held_out))
        return replace(self, solver=self.solver.setup(tokenizer), pool=pool, tokenizer=tokenizer)

    def greedy(self) -> Workflow:
        return self.solver.greedy()

    async def run(self, task: Task, engine: Generator) -> EpisodeResult:
        assert self.pool is not None, "call setup(tokenizer) first"
        round = self.pool.join(task.id)
        try:
            async with round.turn:  # the first player proposes for all
                while round.problem is None and round.proposals < self.tries:
                    self.pool.propose(round, await self.proposed(task, engine))
            if round.problem is None:
                return Failed(
                    f"none of {self.tries} proposals was a problem of the right form that is new"
                    " and can be solved"
                )
            episode = episode_of(
                await self.solver.run(task_of(round.problem, self.wording), engine)
            )
            round.episodes.append(episode)
            if isinstance(episode.outcome, Scored):
                details = {**episode.outcome.details, **self.pool.measures()}
                episode = replace(episode, outcome=replace(episode.outcome, details=details))
            return episode
        finally:
            self.pool.leave(round)

    async def proposed(self, task: Task, engine: Generator) -> str:
        """Returns the policy's proposal; in worded form, the content of the last <problem>
        </problem>."""
        completion = await engine.generate(
            Request(encode(self.tokenizer, task.prompt), self.sampling)
        )
        text: str = self.tokenizer.decode(completion.tokens.tolist(), skip_special_tokens=True)
        if self.wording == "short":
            return text
        return (MARKED.findall(text) or [""])[-1]

    def fits(self, numbers: Sequence[int], target: int) -> bool:
        within_size = (
            all(1 <= number <= self.largest for number in numbers) and 1 <= target <= self.highest
        )
        return len(numbers) in self.numbers and within_size and target not in numbers

    def state(self) -> Any:
        return None if self.pool is None else self.pool.state()

    def restore(self, state: Any) -> None:
        assert self.pool is not None, "call setup(tokenizer) first"
        self.pool.restore(state)

    async def close(self) -> None:
        await self.solver.close()


def read(text: str) -> tuple[tuple[int, ...], int]:
    """Parses numbers and target from a text such as "3,7,5=38:". Returns no numbers if it does not
    match."""
    found = FORM.fullmatch(text)
    return (
        (tuple(int(number) for number in found[1].split(",")), int(found[2])) if found else ((), 0)
    )


def solution(numbers: Sequence[int], target: int) -> str | None:
    """Searches all expressions of the numbers for one that equals the target; None if there is
    none."""
    return _search([(Fraction(number), str(number)) for number in numbers], target)


def _search(terms: Sequence[tuple[Fraction, str]], target: int) -> str | None:
    for value, expression in terms:
        if value == target:
            return expression
    for i, j in permutations(range(len(terms)), 2):
        rest = [term for place, term in enumerate(terms) if place not in (i, j)]
        for combined in _combined(terms[i], terms[j], both_orders=i < j):
            if found := _search([*rest, combined], target):
                return found
    return None


def _combined(
    one: tuple[Fraction, str], other: tuple[Fraction, str], both_orders: bool
) -> Iterator[tuple[Fraction, str]]:
    """Yields the values of two terms combined. Commutative operations are included only with
    `both_orders`, so that they are tried once."""
    (a, left), (b, right) = one, other
    if both_orders:
        yield a + b, f"({left}+{right})"
        yield a * b, f"({left}*{right})"
    yield a - b, f"({left}-{right})"
    if b:
        yield a / b, f"({left}/{right})"
