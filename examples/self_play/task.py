"""Self-play on countdown: nobody writes the problems that the policy learns from but itself.

    a place of the pool ──has it a problem?──no──▶ the policy proposes one, until it is well-formed, new, and can be solved
                                │                                     │
                                └──yes──▶ the group answers it ◀──────┘
                                                   │ the share of right answers
                        neither low nor high: it keeps its place, and the group is trained on
                        else: the place is free for another problem

A problem is thus judged anew each time that it is trained on, by the policy of that moment, and
leaves the pool as soon as that has become better than the problem needs. What proposes is trained
on nothing but answers: to propose it was taught before.
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

from areal_x.errors import at_least, one_of, within
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.protocols.workflow import Generator, Result, Workflow
from areal_x.rollout.episode import episode_of
from areal_x.types import Episode, Failed, Group, Scored, Task
from areal_x.workflows.single_turn import encode
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
RECENT = 200  # proposals of which the share that is valid is shown


@gin.configurable(module="self_play")
def places(
    count: int = 64, wording: str = "short", largest: int = 99, highest: int = 999
) -> list[Task]:
    """The places of the pool, which each task asks to fill with a problem of its own.

    count: must be more than the groups that are under way at once. wording, largest, highest: as of
    `self_play`.
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
    """Whether the mean reward of a group lies between: such groups are trained on, and such
    problems keep their place."""
    return low < float(np.mean(group.rewards)) < high


@dataclass
class Round:
    """One group's work on a place. problem: None until one is there. proposals: made for it.
    players: who is not done."""

    place: str
    problem: Problem | None
    proposals: int = 0
    players: int = 0
    episodes: list[Episode] = field(default_factory=list)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass
class Pool:
    """The problems that are trained on, by place, and the share of right answers that each had
    last. Waits for nobody.

    keep: whether a group's problem keeps its place. fits: whether numbers and target are of the
    size that is asked for. unseen: ids of problems that must not come in. recent: whether each of
    the latest proposals was valid.
    """

    keep: Callable[[Group], bool]
    fits: Callable[[Sequence[int], int], bool]
    unseen: frozenset[str] = frozenset()
    problems: dict[str, Problem] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    rounds: dict[str, Round] = field(default_factory=dict)

    def join(self, place: str) -> Round:
        """The round on that place. Members of a group come one right after the other, so they find
        the same."""
        round = self.rounds.setdefault(place, Round(place, self.problems.get(place)))
        round.players += 1
        return round

    def leave(self, round: Round) -> None:
        """With the last player the round is over: its problem keeps its place, or not. Without a
        score all stays as it is."""
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
        """The problem that the text names is the round's, where it is a valid one."""
        round.proposals += 1
        problem = self.judge(text)
        self.recent.append(problem is not None)
        round.problem = problem

    def judge(self, text: str) -> Problem | None:
        """The problem with its solution: None for what is malformed, there already or held out, or
        cannot be solved."""
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
    """Answers the problems of a pool that the policy fills by itself. Its tasks are
    `self_play.places`.

    solver: answers a problem, and is what evaluation runs. keep: a filter of groups, by which a
    problem keeps its place; the algorithm's `filters` should have the same. tries: most proposals
    for a free place; where none is valid the group failed. numbers: how many a problem may have.
    largest: number; the lowest is 1. highest: target; the lowest is 1. wording: "words" for a
    user's message, "short" for plain text.

    Beside the reward are shown: pool, how many problems it has; pool_pass_rate, their mean share of
    right answers when they were trained on last; valid_proposals, the share of the latest 200
    proposals. The pool is part of each checkpoint.
    """

    solver: Workflow
    keep: Callable[[Group], bool] = middling
    tries: int = 8
    numbers: Sequence[int] = (3, 4)
    largest: int = 99
    highest: int = 999
    wording: str = "short"
    pool: Pool | None = None
    tokenizer: Any = None

    def __post_init__(self) -> None:
        at_least("self_play.tries", self.tries, 1)
        within("self_play.numbers", max(self.numbers), 2, 4)  # the search tries all expressions
        one_of("self_play.wording", self.wording, ("words", "short"))

    @property
    def sampling(self) -> SamplingParams:
        found: SamplingParams = self.solver.sampling  # type: ignore[attr-defined]
        return found

    def setup(self, tokenizer: Any) -> SelfPlay:
        held_out = problems("test", self.numbers, self.largest, self.highest)
        pool = Pool(self.keep, self.fits, frozenset(task.id for task in held_out))
        return replace(self, solver=self.solver.setup(tokenizer), pool=pool, tokenizer=tokenizer)

    def greedy(self) -> Workflow:
        return self.solver.greedy()

    async def run(self, task: Task, engine: Generator) -> Result:
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
        """What the policy says to the request for a problem, of a marked text what stands in the
        last mark."""
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
    """The numbers and the target that a text names, as "3,7,5=38:"; no numbers where it is none of
    that form."""
    found = FORM.fullmatch(text)
    return (
        (tuple(int(number) for number in found[1].split(",")), int(found[2])) if found else ((), 0)
    )


def solution(numbers: Sequence[int], target: int) -> str | None:
    """An expression of some of the numbers that gives the target, by trying all; None where there
    is none."""
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
    """both_orders: with the operations that give the same either way, which are tried once."""
    (a, left), (b, right) = one, other
    if both_orders:
        yield a + b, f"({left}+{right})"
        yield a * b, f"({left}*{right})"
    yield a - b, f"({left}-{right})"
    if b:
        yield a / b, f"({left}/{right})"
