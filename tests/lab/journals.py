"""Journals of runs that nobody ran, written with the run's own `Journal`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.run.journal import Journal
from areal_x.runtime.timeline import Recorder
from areal_x.types import Episode, Failed, Group, Scored, Task, TimedOut, Trajectory

HOSTILE = "<script>window.pwned=1</script><img src=x onerror=pwned=1>\x1b[31m\u202eevil\u2066"


def answer(text: str, reward: float | None, version: int = 0, finish: str = "stop") -> Trajectory:
    """The trajectory of the prompt "ask: " and an answer, a token per byte (`write_tokenizer`)."""
    prompt, tokens = (np.array([*part.encode()], np.int32) for part in ("ask: ", text))
    logprobs = -np.arange(1, len(tokens) + 1, dtype=np.float32) / 10
    versions = np.full(len(tokens), version, np.int32)
    return Trajectory.from_completion(prompt, tokens, logprobs, versions, reward, finish)


def scored(text: str, reward: float, **more: Any) -> Episode:
    return Episode(Scored(reward, {"exact": reward}), (answer(text, reward, **more),))


FAILED = Episode(Failed("ValueError: no <b>number</b>", "Traceback (most recent call last):\n  <i>here</i>"))
LATE = Episode(TimedOut(3.0))


def group(ticket: int, episodes: Sequence[Episode], task: str = "", version: int = 0) -> Group:
    return Group(Task(task or f"task-{ticket}", ""), ticket, version, tuple(episodes))


def write_journal(run: Path, groups: Sequence[Group], steps: Sequence[Sequence[int]] = (), first_step: int = 1) -> None:
    """Records finished groups, and the tickets that each step consumed."""
    run.mkdir(parents=True, exist_ok=True)
    (run / ".lock").touch()
    with Journal(run) as journal:
        for one in groups:
            journal.admitted(one, one.ticket)
            journal.finished(one)
        by_ticket = {one.ticket: one for one in groups}
        for step, tickets in enumerate(steps, first_step):
            journal.consumed(step, [by_ticket.get(ticket) or group(ticket, ()) for ticket in tickets])


def write_tokenizer(folder: Path, extra: Sequence[str] = ()) -> Path:
    """A tokenizer with a token per byte, whose id is the byte, and further tokens."""
    from tokenizers import Tokenizer, decoders, models

    from areal_x.lab.vocabulary import byte_letters

    vocabulary = dict(byte_letters())
    vocabulary |= {token: 256 + i for i, token in enumerate(extra)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_metrics(run: Path, rows: Sequence[dict[str, Any]]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_timeline(run: Path) -> None:
    """One step of two seconds: it waited for the second of two episodes, which generated, scored and did something else."""
    recorder = Recorder()
    at = recorder.began
    for name, start, end in (("wait", 0, 1.5), ("update", 1.5, 2), ("publish", 2, 2)):
        recorder.add(name, at + start, at + end, step=1)
    recorder.add("episode", at, at + 0.5, ticket=0, index=1)
    recorder.add("episode", at, at + 1.5, ticket=1, index=0)
    recorder.add("generate", at, at + 1.2, ticket=1, index=0)
    recorder.add("reward", at + 1.3, at + 1.5, of="group 1, episode 0 (task x)", queued=0.1)
    recorder.write(run)
