"""Asks servers what their workers use, and compares it with what was published."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal_x.engines.fleet.failures import ServerLost, WeightsDiffer
from areal_x.engines.fleet.proof.claims import Claims, read_claims, recast
from areal_x.engines.fleet.proof.judge import Report, Verdict, judge, parsed, sentence
from areal_x.engines.fleet.proof.workers import in_workers, workers_with_others
from areal_x.engines.fleet.staging import StagedFiles
from areal_x.hf.model_dir import read_tensors
from areal_x.protocols.engine import EngineError
from areal_x.runtime import timeline

if TYPE_CHECKING:
    from areal_x.engines.fleet.replica import Replica


@dataclass
class Published:
    """The claims of a staged folder, and the question about them that workers are asked."""

    folder: Path
    claims: Claims
    question: str


class Prover:
    """Proves the weights of servers that have loaded a version.

    dtypes: receives the types in which servers have tensors that are published in another one, by name: what is
    claimed of the next version. report: shows a sentence to the user. whole: returns the whole files of a version.
    """

    def __init__(
        self,
        dtypes: dict[str, str],
        report: Callable[[str], None],
        whole: Callable[[StagedFiles], Awaitable[StagedFiles]],
    ) -> None:
        self._dtypes, self._report, self._whole = dtypes, report, whole
        self._published: Published | None = None
        self._reading = asyncio.Lock()
        self._told: set[str] = set()

    async def prove(self, replica: Replica, staged: StagedFiles) -> None:
        """Returns once all workers of a server have shown that they use the staged weights, or that they
        cannot be read back, which is reported once.

        Raises: WeightsDiffer with the tensor, the server and the version; ServerLost.
        """
        began = time.perf_counter()
        published = await self._claimed(staged)
        if published is None:
            return
        try:
            answers = await replica.client.prove(published.question)
            reports = [parsed(answer) for answer in answers]
        except ServerLost:
            raise
        except EngineError as error:
            self._tell(
                f"{replica.name} cannot prove its weights: {error}; only its log-probabilities of the"
                " probe prompt are compared"
            )
            return
        verdict = judge(published.claims, reports)
        if verdict.dtypes:
            self._dtypes |= verdict.dtypes
            folder = (await self._whole(staged)).folder
            async with self._reading:
                published.claims = await asyncio.to_thread(
                    recast_from, folder, published.claims, verdict
                )
            verdict = judge(published.claims, reports)
        timeline.add(
            "prove", began, time.perf_counter(), version=staged.version, server=replica.name
        )
        if verdict.differences:
            workers = await self._workers(staged, published.claims, reports, verdict)
            raise WeightsDiffer(
                sentence(replica.name, staged.version, verdict.differences, workers)
            )
        if verdict.unproved:
            name, why = next(iter(sorted(verdict.unproved.items())))
            self._tell(
                f"{replica.name} cannot prove {len(verdict.unproved)} tensors, the first {name}: {why}"
            )

    async def _claimed(self, staged: StagedFiles) -> Published | None:
        """Returns what is claimed of staged weights; None for none."""
        async with self._reading:
            if self._published is None or self._published.folder != staged.folder:
                claims = await asyncio.to_thread(read_claims, staged.folder)
                if claims is None:
                    return None
                self._published = Published(staged.folder, claims, question(claims))
            return self._published

    async def _workers(
        self, staged: StagedFiles, claims: Claims, reports: Sequence[Report], verdict: Verdict
    ) -> str:
        """Returns words that name the workers of several that have other numbers of the first tensor that
        differs; none if the files cannot be read any more."""
        if len(reports) < 2:
            return ""
        name = verdict.differences[0].split()[0]
        with suppress(EngineError, OSError):
            folder = (await self._whole(staged)).folder
            tensors = await asyncio.to_thread(lambda: dict(read_tensors(folder, {name})))
            return in_workers(
                workers_with_others(claims, reports, name, tensors[name]), len(reports)
            )
        return ""

    def _tell(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._report(sentence)


def question(claims: Claims) -> str:
    """Returns what a worker is asked, as JSON."""
    shapes = {name: claim.shape for name, claim in claims.tensors.items()}
    asked = {"version": claims.version, "full": claims.full, "adapter": claims.scale is not None}
    return json.dumps(asked | {"tensors": shapes})


def recast_from(folder: Path, claims: Claims, verdict: Verdict) -> Claims:
    missing = {
        name: dtype
        for name, dtype in verdict.dtypes.items()
        if dtype not in claims.tensors[name].sums
    }
    return recast(claims, read_tensors(folder, missing.keys()), missing)
