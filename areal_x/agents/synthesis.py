"""Makes tasks for agents: a request, the world that it is about, and a program that verifies what became
of that world.

    proposals ──verifier run in the sandbox──▶ accepted ──near duplicates dropped──▶ tasks.jsonl
                                                                                        │ areal-x rollout: pass rates
                                                       tasks neither too easy nor too hard ◀── @curriculum()

A proposal comes from a program or from a model, and nothing in it is believed: its verifier must reward
the world as its solution leaves it, and must not reward the world untouched, or any of the other worlds
that come with it (solutions with a step left out, or one too many).
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import gin

from areal_x.agents.prompt_text import prompt_text
from areal_x.errors import UserError, within
from areal_x.protocols.engine import Request, SamplingParams
from areal_x.protocols.workflow import Generator
from areal_x.runtime.loop import together
from areal_x.sandbox.pool import ProgramResult
from areal_x.tasks.datasets import Record, load_dataset
from areal_x.types import Message, Task
from areal_x.workflows.single_turn import encode, text_of, with_end

VERIFIER, WORLD = "verifier", "world"  # where a task's metadata has them
MARK = "verdicts:"
AT_ONCE = 64  # proposals that a model is asked for at the same time

PROGRAM = f"""\
import json, sys
given = json.load(sys.stdin)
names = {{}}
exec(compile(given["verifier"], "verifier", "exec"), names)
copied = lambda x: json.loads(json.dumps(x))
verdicts = [names["verify"](copied(given["before"]), copied(after)) for after in given["after"]]
print("\\n{MARK}" + json.dumps(verdicts))
"""


Question = tuple[str | Sequence[Message], Callable[[str], "Proposal"]]


class Runs(Protocol):
    """What runs a verifier: areal_x.sandbox.Sandbox."""

    async def run(self, code: str, stdin: str = "") -> ProgramResult: ...


@dataclass(frozen=True)
class Proposal:
    """A task that nobody has checked yet. Worlds are whatever JSON can hold."""

    prompt: str | Sequence[Message]
    """What the agent is asked."""

    world: Any
    """As the agent finds it."""

    solved: Any
    """The world as a solution leaves it."""

    verifier: str
    """Source of a Python function `verify(before, after)`, which returns whether `after` is as it should
    be: a bool, or a number from 0 to 1."""

    unsolved: Sequence[Any] = ()
    """Worlds that must not pass, beside the untouched one."""

    metadata: dict[str, Any] = field(default_factory=dict)
    """More of the task's."""

    untouched: bool = False
    """True if to change nothing is the solution: `world` must then pass, and some of `unsolved` must
    be given."""

    def task(self, id: str) -> Task:
        made = {**self.metadata, WORLD: self.world, VERIFIER: self.verifier}
        return Task(id, self.prompt, self.solved, made)


@dataclass(frozen=True)
class Synthesized:
    """The tasks that were accepted, and how many proposals were refused for each reason."""

    tasks: Sequence[Task]
    refused: Counter[str]

    def __str__(self) -> str:
        reasons = "".join(f"\n  {count}: {reason}" for reason, count in self.refused.most_common())
        return f"{len(self.tasks)} tasks, {self.refused.total()} proposals refused{reasons}"


class Unverifiable(Exception):
    """A verifier that gave no verdict: the message has the reason."""


async def verdicts(sandbox: Runs, verifier: str, before: Any, worlds: Sequence[Any]) -> list[float]:
    """Returns what a verifier says of each world, from 0 to 1, in one program.

    Raises: Unverifiable if it does not run, or returns anything else.
    """
    given = json.dumps({"verifier": verifier, "before": before, "after": list(worlds)})
    result = await sandbox.run(PROGRAM, given)
    last = result.output.rstrip().rpartition("\n")[2]
    if result.status != "ok" or not last.startswith(MARK):
        reason = (result.error or "it printed no verdict").strip().splitlines()[-1]
        raise Unverifiable(f"the verifier failed ({result.status}): {reason}")
    found = json.loads(last.removeprefix(MARK))
    if not all(isinstance(x, bool | int | float) and 0 <= x <= 1 for x in found):
        raise Unverifiable("the verifier returned neither a bool nor a number from 0 to 1")
    return [float(x) for x in found]


async def verified(sandbox: Runs, task: Task, after: Any) -> float:
    """Returns the reward of a world that an agent left, by the verifier of its task."""
    metadata = task.metadata
    return (await verdicts(sandbox, metadata[VERIFIER], metadata[WORLD], [after]))[0]


async def refusal(proposal: Proposal, sandbox: Runs) -> str:
    """Returns why a proposal is no task; "" if it is one."""
    if not prompt_text(proposal.prompt).strip():
        return "the request is empty"
    if proposal.untouched and not proposal.unsolved:
        return "nothing is to be changed, and no change is given that must not pass"
    others = [*proposal.unsolved, *([] if proposal.untouched else [proposal.world])]
    solved = proposal.world if proposal.untouched else proposal.solved
    if solved in others:
        return "its solution leaves a world that must not pass"
    try:
        right, *wrong = await verdicts(
            sandbox, proposal.verifier, proposal.world, [solved, *others]
        )
    except Unverifiable as error:
        return f"{error}"
    except (TypeError, ValueError) as error:  # of json.dumps
        return f"its worlds are not JSON: {error}"
    if right < 1:
        return "the verifier does not accept the solution"
    if any(x >= 1 for x in wrong):
        untouched = not proposal.untouched and wrong[-1] >= 1
        return f"the verifier accepts {'the untouched world' if untouched else 'a wrong solution'}"
    return ""


async def synthesize(
    proposals: AsyncIterator[Proposal | str] | Iterable[Proposal | str],
    sandbox: Runs,
    count: int,
    most: int,
    similarity: float = 0.9,
    prefix: str = "synthetic",
) -> Synthesized:
    """Takes proposals until `count` are accepted, `most` were looked at, or none are left.

    proposals: each, or in its place the reason why there is none. similarity: see `Duplicates`. prefix:
    of the tasks' ids.
    """
    tasks: list[Task] = []
    refused: Counter[str] = Counter()
    known = Duplicates(similarity)
    async for proposal in each(proposals):
        reason = proposal if isinstance(proposal, str) else await refusal(proposal, sandbox)
        if not reason and known.has(fingerprint(proposal)):  # type: ignore[arg-type]
            reason = "it is nearly a task that was accepted before"
        if reason:
            refused[reason] += 1
        else:
            assert isinstance(proposal, Proposal)
            tasks.append(proposal.task(f"{prefix}/{len(tasks)}"))
        if len(tasks) == count or len(tasks) + refused.total() == most:
            break
    return Synthesized(tasks, refused)


async def each(
    proposals: AsyncIterator[Proposal | str] | Iterable[Proposal | str],
) -> AsyncIterator[Proposal | str]:
    if isinstance(proposals, Iterable):
        for proposal in proposals:
            yield proposal
    else:
        async for proposal in proposals:
            yield proposal


# ---- proposals of a model


async def proposals_of(
    engine: Generator,
    tokenizer: Any,
    questions: Iterable[Question],
    sampling: SamplingParams,
    at_once: int = AT_ONCE,
) -> AsyncIterator[Proposal | str]:
    """Asks a model for one proposal a question, and yields them, or why there is none.

    questions: prompts, each with what turns the model's text into a proposal, or raises ValueError with
    the reason why it is none; `at_once` are asked at a time.
    """
    sampling = with_end(sampling, tokenizer)

    async def proposed(question: Question) -> Proposal | str:
        prompt, read = question
        completion = await engine.generate(Request(encode(tokenizer, prompt), sampling))
        if completion.finish_reason != "stop":
            return f"the model's text ended early ({completion.finish_reason})"
        try:
            return read(text_of(tokenizer, completion.tokens))
        except ValueError as error:
            return f"{error}"

    waiting: list[Question] = []
    for question in questions:
        waiting.append(question)
        if len(waiting) == at_once:
            for proposal in await together(map(proposed, waiting)):
                yield proposal
            waiting = []
    for proposal in await together(map(proposed, waiting)):
        yield proposal


def json_object(text: str) -> dict[str, Any]:
    """Returns the first JSON object of a model's text, also one in a fence. Raises: ValueError."""
    decoder, begin = json.JSONDecoder(), text.find("{")
    while begin >= 0:
        try:
            found, _ = decoder.raw_decode(text, begin)
        except (ValueError, RecursionError):
            begin = text.find("{", begin + 1)
            continue
        assert isinstance(found, dict)
        return found
    raise ValueError("the model's text has no JSON object")


# ---- duplicates


class Duplicates:
    """Finds texts that are nearly alike: by the share of their word triples that they have in common
    (Jaccard), through an index of triples.

    similarity: from which on two texts are alike, above 0 and at most 1.
    """

    def __init__(self, similarity: float = 0.9) -> None:
        within("similarity", similarity, 0, 1)
        self._similarity = similarity
        self._known: list[frozenset[tuple[str, ...]]] = []
        self._at: dict[tuple[str, ...], list[int]] = defaultdict(list)

    def has(self, text: str) -> bool:
        """True if a text like it was seen before. Remembers one that was not."""
        own = triples(text)
        common: Counter[int] = Counter(i for triple in own for i in self._at[triple])
        for i, shared in common.items():
            if shared >= self._similarity * (len(own) + len(self._known[i]) - shared):
                return True
        for triple in own:
            self._at[triple].append(len(self._known))
        self._known.append(own)
        return False


def triples(text: str) -> frozenset[tuple[str, ...]]:
    words = ["", *"".join(c if c.isalnum() else " " for c in text.lower()).split(), ""]
    return frozenset(tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2)))


def fingerprint(proposal: Proposal) -> str:
    """Returns what makes a proposal the same as another: its request and what it changes of the world.
    Tasks with other numbers and names in the same words are different tasks."""
    before, after = (leaves(world) for world in (proposal.world, proposal.solved))
    changed = sorted(
        f"{place} {after.get(place)}" for place in after if before.get(place) != after[place]
    )
    return " ".join([prompt_text(proposal.prompt), *changed])


def leaves(world: Any, place: str = "") -> dict[str, Any]:
    """Returns the values of nested JSON by their paths."""
    if isinstance(world, dict):
        pairs: Iterable[tuple[Any, Any]] = world.items()
    elif isinstance(world, list | tuple):
        pairs = enumerate(world)
    else:
        return {place: world}
    return {path: x for key, value in pairs for path, x in leaves(value, f"{place}/{key}").items()}


# ---- files


def write_tasks(file: Path, tasks: Sequence[Task]) -> None:
    """Writes a JSON object a line, which `@synthetic_tasks` reads."""
    lines = [
        json.dumps(
            {"id": t.id, "prompt": t.prompt, "answer": t.answer, "metadata": dict(t.metadata)},
            ensure_ascii=False,
        )
        for t in tasks
    ]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@gin.configurable
def synthetic_tasks(path: str) -> Sequence[Task]:
    """Returns the tasks of a file that `write_tasks` wrote.

    Args:
        path: The .jsonl file.

    Raises: UserError for a file that is not there, or has another form.
    """
    return load_dataset(path, to_task=to_task)


def to_task(record: Record, id: str) -> Task:
    metadata = record["metadata"]
    if missing := {VERIFIER, WORLD} - set(metadata):
        raise UserError(f"task {record['id']!r} has no {min(missing)} in its metadata")
    return Task(record["id"], record["prompt"], record["answer"], metadata)
