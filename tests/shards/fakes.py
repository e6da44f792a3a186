"""Shards in threads of this process, whose end a test decides; Ray's are tested in tests/cluster."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

from areal_x.protocols.engine import EngineError, Staged
from areal_x.runtime import background
from areal_x.shards.shard import Shard, ShardParts
from tests.rollout.fakes import FakeEngine, Plain


class Thread:
    """The process of a shard (areal_x.shards.seat.Remote): each call is a thread's."""

    node = "127.0.0.1"

    def __init__(self, shard):
        self.shard, self.gone, self.calls, self.pending = shard, False, [], set()
        self.lock = threading.Lock()

    def call(self, method, *arguments):
        self.calls.append((method, arguments))
        found = Future()
        with self.lock:
            if self.gone:
                found.set_exception(ConnectionError("the process is gone"))
                return found
            self.pending.add(found)
        working = background.future(lambda: getattr(self.shard, method)(*arguments), name=method)

        def ended(done):
            with self.lock:
                if found not in self.pending:
                    return
                self.pending.remove(found)
            error = done.exception()
            if not found.set_running_or_notify_cancel():
                return
            if error is None:
                found.set_result(done.result())
            else:
                found.set_exception(as_told(error))

        working.add_done_callback(ended)
        return found

    def end(self):
        with self.lock:
            self.gone, pending, self.pending = True, self.pending, set()
        for found in pending:
            if found.set_running_or_notify_cancel():
                found.set_exception(ConnectionError("the process is gone"))


def as_told(error):
    """The driver reads every error of a process as a sentence."""
    from areal_x.errors import UserError

    return error if isinstance(error, UserError) else UserError(f"{error}")


class Threads:
    """Places for shards. make: the engine of each process. opened: all that were made, in order."""

    def __init__(self, settings, make=FakeEngine, workflow=None, evaluation=None):
        self.settings, self.make = settings, make
        self.workflow = workflow or Plain()
        self.evaluation = evaluation or self.workflow.greedy()
        self.held, self.opened, self.engines = {}, [], []

    async def keepers(self, number):
        if number not in self.held or self.held[number].gone:
            remote = Thread(Shard(self.parts, self.settings))
            self.held[number] = remote
            self.opened.append(remote)
        return [self.held[number]]

    def parts(self, number, times, message):
        engine = self.make()
        self.engines.append(engine)
        return ShardParts(engine, self.workflow, self.evaluation)


class FakeStager:
    """Weights that are staged at once."""

    def __init__(self):
        self.calls, self.current = [], None

    def open(self):
        self.calls.append("open")

    def stage(self, trainer, version):
        return Staged(version)

    async def written(self, copied):
        await asyncio.sleep(0)
        return copied

    def keep(self, staged):
        self.calls.append(("keep", staged.version))

    async def close(self):
        self.calls.append("close")

    def remove_files(self):
        self.calls.append("remove")


class Dying(FakeEngine):
    """Fails every request, as an engine does whose servers are all lost."""

    def __init__(self):
        super().__init__()
        self.error = EngineError("no server is left")
