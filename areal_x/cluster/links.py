"""Links between the processes that train one model: process 0 says what is done next, on plain
sockets.

    process 0, the Leader                          every other process, a Follower
    ────────────────────────────────────────────────────────────────────────────────
    with together(message, arrays): ──message──▶   receive()
        does its part                                does its part
                 ◀── done, or what went wrong ───  answer(call, error)
    close(error) ──────────────── end ─────────▶   receive() gives None, or raises what ended process 0

Between two steps process 0 may wait minutes for rollouts: a socket waits that long, a collective
has a time limit. What the processes compute together goes through the backend's own process group;
the links carry small JSON and the arrays of a batch, never a pickle, after both ends have proved
that they know a key agreed on through that group.

Nobody hangs on somebody who is gone. A thread of each process watches its links, since the main
thread may sit in a collective that nothing interrupts. What it sees is told by the main thread as
soon as that looks; a main thread that does not look for SECONDS_TO_NOTICE is ended with its
process. A follower whose leader vanishes ends at once: it has nothing to put in order.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import ndiff
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from queue import Empty, Queue, SimpleQueue
from typing import Any, Protocol

import numpy as np

from areal_x.errors import UserError, sentence
from areal_x.runtime import background, interrupts
from areal_x.runtime.waits import waiting

SECONDS_TO_MEET = 300.0  # from the first process at the meeting place to the last
# in a call that somebody else has left: longer than an error takes that all run into by themselves
SECONDS_TO_NOTICE = 8.0
SECONDS_TO_FOLLOW = 2.0  # the end of process 0
SECONDS_TO_END = 60.0  # to close servers and workers, once told
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Arrays = Mapping[str, np.ndarray]


class ProcessGroup(Protocol):
    """A backend's processes: this one's rank, how many there are, and how bytes of rank 0 reach all
    (a collective call)."""

    rank: int
    size: int

    def broadcast(self, data: bytes) -> bytes: ...


class Leader:
    """Process 0's end of the links. A context manager that takes the others along when it ends."""

    rank = 0

    def __init__(self, links: Mapping[int, Connection]) -> None:
        self._links = links
        self._done = dict.fromkeys(links, 0)  # of each process, the last call that it went through
        self._gone: set[int] = set()
        self._call = 0
        self._busy = False  # in a call
        self._trouble = ""  # the first thing that went wrong elsewhere
        self._noticed = False  # by the main thread
        self._interrupted = False
        self._ended = False
        self._changed = threading.Condition()  # guards everything above
        for rank, link in links.items():
            what = f"the watch over process {rank}"
            background.thread(
                self._watch, rank, link, what=what, failed=ended_by, name=f"process-{rank}"
            )

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with self._changed:
            trouble = (
                self._trouble if self._interrupted and isinstance(error, KeyboardInterrupt) else ""
            )
        self.close(None if error is None else trouble or described(error))
        if trouble:
            raise UserError(trouble) from None

    @contextmanager
    def together(self, message: Mapping[str, Any], arrays: Arrays | None = None) -> Iterator[None]:
        """While the body runs here, the others do what the message says; leaving it waits until
        they have.

        Raises: UserError naming the process that failed or is gone, and why; whatever the body
        raises, unless that came of it.
        """
        interrupts.raise_if_interrupted()  # before the others begin, as none can leave a call alone
        with self._changed:
            self._check()
            self._call += 1
            self._busy = True
        try:
            self._send({**message, "call": self._call}, arrays)
            yield
            with self._changed:
                with waiting(
                    "process 0",
                    "the other processes to do their part",
                    lambda: self._behind(message),
                ):
                    self._changed.wait_for(
                        lambda: self._trouble or min(self._done.values()) >= self._call
                    )
                self._check()
        except Exception as error:
            with self._changed:
                # What failed here may have failed because somebody is gone: then that is what there
                # is to say.
                if not isinstance(error, UserError) and self._changed.wait_for(
                    lambda: self._trouble, timeout=1
                ):
                    self._noticed = True
                    raise UserError(self._trouble) from error
                self._noticed = True
            raise
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def agree(self, make: Callable[[], str]) -> str:
        """What `make` gives here, on every process."""
        value = make()
        self._send({"value": value})
        return value

    def done(self) -> None:
        """Tells the others that these trainers have done their work: their `serve` returns."""
        self._send({"done": True})

    def close(self, error: str | None = None) -> None:
        """Tells the others that it is over, and why if not well, and waits until they are gone:
        what joins them lives here."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._changed.notify_all()
        self._send({"end": error or ""})
        with self._changed, waiting("process 0", "the other processes to end"):
            self._changed.wait_for(lambda: len(self._gone) == len(self._links), SECONDS_TO_END)

    def _send(self, message: Mapping[str, Any], arrays: Arrays | None = None) -> None:
        for link in self._links.values():
            with suppress(OSError):  # whoever watches this link says so
                send(link, message, arrays)

    def _behind(self, message: Mapping[str, Any]) -> str:
        ranks = [rank for rank, call in self._done.items() if call < self._call]
        return f"of {message.get('method', 'a call')}: processes {ranks} have not"

    def _check(self) -> None:
        if self._trouble:
            self._noticed = True
            raise UserError(self._trouble)

    # ---- what follows runs on threads that watch

    def _watch(self, rank: int, link: Connection) -> None:
        with suppress(EOFError, OSError):
            while True:
                answer, _ = receive(link)
                if answer["error"] is not None:
                    self._report(f"process {rank} ended: {answer['error']}")
                with self._changed:
                    self._done[rank] = answer["call"]
                    self._changed.notify_all()
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()
        self._report(
            f"process {rank} ended without a word: its own output or its host's log may say why"
        )

    def _report(self, trouble: str) -> None:
        """Has the main thread raise it, or ends the process where that cannot be had."""
        background.thread(
            self._insist,
            trouble,
            what="the report of another process's end",
            failed=ended_by,
            name="insist",
        )

    def _insist(self, trouble: str) -> None:
        def heard() -> bool:
            return self._noticed or self._ended

        with self._changed:
            if self._trouble or self._ended:
                return
            self._trouble = trouble
            self._changed.notify_all()
            if self._changed.wait_for(heard, SECONDS_TO_NOTICE if self._busy else 1):
                return
            if not self._busy:  # it waits for rollouts, or measures
                self._interrupted = True
                if not interrupts.request_stop():
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                if self._changed.wait_for(heard, SECONDS_TO_END):
                    return
        end_now(trouble)


class Follower:
    """Another process's end of its link."""

    def __init__(self, rank: int, link: Connection) -> None:
        self.rank = rank
        self._link = link
        self._ended = False  # this process's work
        self._over = False  # process 0's
        self._inbox: SimpleQueue[tuple[dict[str, Any], dict[str, np.ndarray]]] = SimpleQueue()
        background.thread(
            self._watch, what="the watch over process 0", failed=ended_by, name="process-0"
        )

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Tells process 0 of an error, or waits until that says that it is over: whoever is gone
        before is missed.

        The link stays open until this process is gone, which is what process 0 waits for.
        """
        self._ended = True
        if error is not None:
            self.answer(0, described(error))
            return
        while not self._over:
            self.receive()

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """The next message and its arrays; None at the end. Raises: UserError with what ended
        process 0."""
        while True:
            try:
                # In short waits, as a signal does not end a long one.
                with waiting(f"process {self.rank}", "process 0's next call", idle=True):
                    message, arrays = self._inbox.get(timeout=0.5)
            except Empty:
                interrupts.raise_if_interrupted()
                continue
            if "end" not in message:
                return message, arrays
            self._over = True
            if message["end"]:
                raise UserError(message["end"])
            return None

    def answer(self, call: int, error: str | None = None) -> None:
        with suppress(OSError):  # process 0 is gone: the thread that watches ends this one
            send(self._link, {"call": call, "error": error})

    def agree(self, make: Callable[[], str]) -> str:
        """What process 0's `make` gave; this one's is not called."""
        received = self.receive()
        if received is None:
            raise UserError("process 0 ended before the run began")
        return str(received[0]["value"])

    def _watch(self) -> None:
        try:
            while True:
                message, arrays = receive(self._link)
                if "end" in message:
                    break
                self._inbox.put((message, arrays))
        except (EOFError, OSError):
            end_now("process 0 ended without a word: its own output or its host's log may say why")
        told = f"process 0 ended: {message['end']}" if message["end"] else ""
        self._inbox.put(({"end": told}, {}))
        if told:
            time.sleep(SECONDS_TO_FOLLOW)
            if not self._ended:  # it waits in a collective that process 0 will never enter
                end_now(told)


def meet(group: ProcessGroup, config: str) -> Leader | Follower:
    """Links the processes of a group; every one of them calls it. config: what has to be the same
    on all.

    Raises: UserError where a process was given another config, naming a line of it, or does not
    come.
    """
    if group.rank:
        place = json.loads(group.broadcast(b""))
        try:
            link = Client((place["host"], place["port"]), authkey=bytes.fromhex(place["key"]))
        except OSError as error:
            where = f"process 0 at {place['host']}:{place['port']}"
            raise UserError(
                f"{where} cannot be reached ({error.strerror}): MASTER_ADDR must be an address of"
                " its host"
            ) from None
        send(link, {"rank": group.rank, "config": config})
        with waiting(f"process {group.rank}", "process 0 to compare the configs"):
            refused = receive(link)[0]["refused"]
        if refused:
            raise UserError(refused)
        return Follower(group.rank, link)
    key = secrets.token_bytes(32)
    with Listener(
        (own_address(os.environ.get("MASTER_ADDR")), 0), backlog=group.size, authkey=key
    ) as listener:
        host, port = listener.address
        group.broadcast(json.dumps({"host": host, "port": port, "key": key.hex()}).encode())
        links, configs = accept(listener, group.size - 1)
    refused = next(
        (told for rank in sorted(configs) if (told := difference(rank, configs[rank], config))), ""
    )
    for link in links.values():
        send(link, {"refused": refused})
    if refused:
        raise UserError(refused)
    return Leader(links)


def accept(listener: Listener, count: int) -> tuple[dict[int, Connection], dict[int, str]]:
    """The links and configs of so many processes, by rank."""
    came: Queue[Connection | BaseException] = Queue()

    def wait() -> None:
        left = count
        while left:
            # whoever else looks at this port
            with suppress(AuthenticationError, EOFError, ConnectionError):
                came.put(listener.accept())
                left -= 1

    background.thread(wait, what="the meeting of the processes", failed=came.put, name="accept")
    links: dict[int, Connection] = {}
    configs: dict[int, str] = {}
    until = time.monotonic() + SECONDS_TO_MEET

    def missing() -> str:
        return f"processes {sorted(set(range(1, count + 1)) - set(links))}"

    with waiting("process 0", "the other processes to come", lambda: f"{missing()} have not"):
        while len(links) < count:
            try:
                link = came.get(timeout=min(max(until - time.monotonic(), 0), 0.5))
            except Empty:
                interrupts.raise_if_interrupted()
                if time.monotonic() < until:
                    continue
                where = ":".join(map(str, listener.address))
                raise UserError(
                    f"{missing()} did not come to {where}: MASTER_ADDR must be an address that all"
                    " reach"
                ) from None
            if isinstance(link, BaseException):
                raise link
            hello, _ = receive(link)
            links[hello["rank"]], configs[hello["rank"]] = link, hello["config"]
    return links, configs


def difference(rank: int, theirs: str, ours: str) -> str:
    """A sentence about the first line in which another process's config is not process 0's; empty
    where they are one."""
    lines = [
        line
        for line in ndiff(ours.splitlines(), theirs.splitlines())
        if line[:2] in ("- ", "+ ") and line[2:].strip()
    ]
    if theirs == ours or not lines:
        return ""
    mine, other = (
        next((line[2:] for line in lines if line.startswith(sign)), "nothing") for sign in "-+"
    )
    return (
        f"process {rank} was started with another config than process 0: {other!r} where process 0"
        f" has {mine!r}; start all with the same file and the same -b"
    )


def own_address(master: str | None) -> str:
    """The IPv4 address at which the others find this process, 0: the one that MASTER_ADDR names, or
    its default route's.

    Many hosts call themselves by their name at a loopback address, at which nobody else would find
    them.
    """
    if master in LOOPBACK:
        return "127.0.0.1"
    with suppress(OSError):
        if master and not (named := socket.gethostbyname(master)).startswith("127."):
            return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # an address of nobody's: this sends nothing, and tells the interface it would take
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def send(link: Connection, message: Mapping[str, Any], arrays: Arrays | None = None) -> None:
    link.send_bytes(json.dumps({"message": message, "arrays": arrays is not None}).encode())
    if arrays is not None:
        packed = io.BytesIO()
        np.savez(packed, **arrays)  # type: ignore[arg-type]  # its stub takes the names for its own parameters
        link.send_bytes(packed.getbuffer())


def receive(link: Connection) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    head = json.loads(link.recv_bytes())
    if not head["arrays"]:
        return head["message"], {}
    with np.load(io.BytesIO(link.recv_bytes()), allow_pickle=False) as packed:
        return head["message"], dict(packed)


def described(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "it was stopped"
    said = sentence(error).strip()
    return (
        said
        if isinstance(error, UserError)
        else f"{type(error).__name__}: {said.splitlines()[0] if said else ''}"
    )


def ended_by(error: BaseException) -> None:
    """For a thread without which this process would wait for ever: ends it with what ended the
    thread."""
    end_now(f"{error}")


def end_now(why: str) -> None:
    """Ends this process with a sentence, whatever its main thread does: a collective cannot be
    interrupted."""
    sys.stdout.flush()
    os.write(sys.stderr.fileno(), f"error: {why}\n".encode())
    os._exit(1)
