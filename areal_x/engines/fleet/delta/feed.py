"""Where each server reads a version from: its own cache, in which it makes the version from a delta or
of whole files, while it generates; or, if that fails, the staging folder.

    delta      the changes since the base that the server has; a server without it, or whose result has
               another digest, gets
    whole      all files, copied into its cache; a server that has no room for them reads
    directly   what is staged, as without deltas

Each step down is reported in a sentence, and the next publication begins with a delta again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_x.engines.fleet.config import FleetConfig
from areal_x.engines.fleet.delta.cache import Order
from areal_x.engines.fleet.failures import ServerFailed, ServerLost, ServerRefused
from areal_x.engines.fleet.replica import Place, Replica
from areal_x.engines.fleet.stager import Stager
from areal_x.engines.fleet.staging import StagedFiles
from areal_x.errors import UserError
from areal_x.protocols.engine import EngineError
from areal_x.runtime.waits import waiting

LEAST_SLEEP_SECONDS, MOST_SLEEP_SECONDS = 0.02, 1.0
FORGET_SECONDS = 10.0


class Feed:
    """Has servers make versions in their caches. report: shows a sentence to the user."""

    def __init__(self, config: FleetConfig, stager: Stager, report: Callable[[str], None]) -> None:
        self._config, self._stager, self._report = config, stager, report

    async def place(self, replica: Replica, staged: StagedFiles) -> Place:
        """Returns where a server is to load a version from. Raises: ServerLost, and EngineError if
        there is a newer one."""
        if not staged.digest:
            return self._stager.root, staged.folder
        for instead in ("whole", "from the staging folder, without its cache")[not staged.base :]:
            try:
                return await self._cached(replica, staged)
            except ServerLost:
                raise
            except EngineError as error:
                self._report(f"{replica.name} gets version {staged.version} {instead}: {error}")
            staged = await self._stager.whole(staged)
        return self._stager.root, staged.folder

    async def _cached(self, replica: Replica, staged: StagedFiles) -> Place:
        """Returns the place in the server's cache, once the version is there."""
        order = Order(
            parent=self._config.delta_cache,
            run=self._stager.root.name,
            staging_root=f"{self._stager.root}",
            folder=f"{staged.folder}",
            digest=staged.digest,
            base=staged.base,
        )
        text, sleep = json.dumps(vars(order)), LEAST_SLEEP_SECONDS
        seconds = self._config.wait_seconds
        with waiting(replica.name, f"version {staged.version} to be made in its cache"):
            try:
                async with asyncio.timeout(seconds):
                    while (found := place_in(await replica.client.make_version(text))) is None:
                        await asyncio.sleep(sleep)
                        sleep = min(2 * sleep, MOST_SLEEP_SECONDS)
            except TimeoutError:
                raise ServerFailed(f"it was not made within {seconds:g} s") from None
        return found

    async def forget(self, replica: Replica) -> None:
        """Removes a server's cache."""
        if self._config.delta:
            with suppress(EngineError, UserError, TimeoutError):
                async with asyncio.timeout(FORGET_SECONDS):
                    await replica.client.forget_versions()


def place_in(answers: list[Any]) -> Place | None:
    """Returns the place that all workers of a server have named; None while one has not. Raises:
    ServerRefused with the first sentence."""
    places = set[Place | None]()
    for answer in answers:
        if not isinstance(answer, dict):
            raise ServerRefused(f"its worker answered {answer!r:.100}")
        if "refused" in answer:
            raise ServerRefused(str(answer["refused"]))
        places.add((Path(answer["root"]), Path(answer["folder"])) if "folder" in answer else None)
    if None in places:
        return None
    if len(places) != 1:
        raise ServerRefused("its workers do not have the cache under the same path")
    return places.pop()
