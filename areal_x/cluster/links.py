"""Links between the processes that train one model: process 0 announces the next call, over plain
sockets.

    process 0, the Leader                          every other process, a Follower
    ────────────────────────────────────────────────────────────────────────────────
    with together(message, arrays): ──message──▶   receive()
        does its part                                does its part
                 ◀── done, or the error ──────────  answer(call, error)
    close(error) ──────────────── end ─────────▶   receive() returns None, or raises what ended process 0

Between two steps process 0 may wait minutes for rollouts: a socket waits that long, a collective
has a time limit. What the processes compute together goes through the backend's own process group;
the links carry small JSON and the arrays of a batch, never a pickle, after both ends have proved
that they know a key exchanged through that group.

No process hangs because another is gone. A thread of each process watches its links, since the main
thread may be in a collective, which nothing interrupts. The main thread raises what the thread saw
as soon as it checks; a main thread that does not check within SECONDS_TO_NOTICE is ended with its
process. A follower whose leader vanishes ends at once: it has nothing to clean up.
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

SECONDS_TO_MEET = 300.0  # from the first process that joins to the last
# How long a call may go on that another process has left: longer than an error needs that every
# process runs into by itself.
SECONDS_TO_NOTICE = 8.0
SECONDS_TO_FOLLOW = 2.0  # for a follower to end after process 0
SECONDS_TO_END = 60.0  # to close servers and workers after a notification
LOOPBACK = ("localhost", "127.0.0.1", "::1")

Arrays = Mapping[str, np.ndarray]


class ProcessGroup(Protocol):
    """A backend's process group: this process's rank, the number of processes, and a broadcast of
    bytes from rank 0 (a collective call)."""

    rank: int
    size: int

    def broadcast(self, data: bytes) -> bytes: ...


class Leader:
    """Process 0's end of the links. A context manager that ends the other processes when it
    ends."""

    rank = 0

    def __init__(self, links: Mapping[int, Connection]) -> None:
        self._links = links
        self._done = dict.fromkeys(links, 0)  # each process's last completed call
        self._gone: set[int] = set()
        self._call = 0
        self._busy = False  # in a call
        self._trouble = ""  # the first error of another process
        self._noticed = False  # the main thread has raised it
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
        """Makes the others run the call in `message` while the body runs here; leaving it waits
        until they have.

        Raises: UserError naming the process that failed or is gone, and why; whatever the body
        raises, unless that was a consequence.
        """
        # before the others begin, as no process can leave a call alone
        interrupts.raise_if_interrupted()
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
                # What failed here may have failed because another process is gone: then that is the
                # error to raise.
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
        """Returns the value of `make()` and sends it to every process."""
        value = make()
        self._send({"value": value})
        return value

    def done(self) -> None:
        """Tells the others that these trainers have finished: their `serve` returns."""
        self._send({"done": True})

    def close(self, error: str | None = None) -> None:
        """Ends the others, with the reason if there was an error, and waits until they are gone:
        the rendezvous of their process group lives here."""
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
            with suppress(OSError):  # the thread that watches this link reports it
                send(link, message, arrays)

    def _behind(self, message: Mapping[str, Any]) -> str:
        ranks = [rank for rank, call in self._done.items() if call < self._call]
        return f"of {message.get('method', 'a call')}: processes {ranks} have not"

    def _check(self) -> None:
        if self._trouble:
            self._noticed = True
            raise UserError(self._trouble)

    # ---- the methods below run on the threads that watch links

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
            f"process {rank} ended without an error message: see its own output or its host's log"
        )

    def _report(self, trouble: str) -> None:
        """Makes the main thread raise it, or ends the process if that is impossible."""
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
            if not self._busy:  # the main thread waits for rollouts, or evaluates
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
        self._ended = False  # this process has finished its work
        self._over = False  # process 0 has finished
        self._inbox: SimpleQueue[tuple[dict[str, Any], dict[str, np.ndarray]]] = SimpleQueue()
        background.thread(
            self._watch, what="the watch over process 0", failed=ended_by, name="process-0"
        )

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Reports an error to process 0, or waits until process 0 ends: one that left earlier would
        be reported as missing.

        The link stays open until this process is gone, which is what process 0 waits for.
        """
        self._ended = True
        if error is not None:
            self.answer(0, described(error))
            return
        while not self._over:
            self.receive()

    def receive(self) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
        """Returns the next message and its arrays; None at the end. Raises: UserError with what
        ended process 0."""
        while True:
            # Process 0, if it was signalled too, ends all processes in order: it goes first.
            interrupts.raise_if_interrupted(since_seconds=SECONDS_TO_FOLLOW)
            try:
                # Short waits, as a signal does not end a long one.
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
        """Returns the value of process 0's `make()`; this process's is not called."""
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
            end_now(
                "process 0 ended without an error message: see its own output or its host's log"
            )
        reason = f"process 0 ended: {message['end']}" if message["end"] else ""
        self._inbox.put(({"end": reason}, {}))
        if reason:
            time.sleep(SECONDS_TO_FOLLOW)
            if not self._ended:  # it waits in a collective that process 0 will never enter
                end_now(reason)


def meet(group: ProcessGroup, config: str) -> Leader | Follower:
    """Links the processes of a group; every process calls it. config: text that must be the same on
    all.

    Raises: UserError if a process has another config, naming a line of it, or does not join.
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
        (line for rank in sorted(configs) if (line := difference(rank, configs[rank], config))), ""
    )
    for link in links.values():
        send(link, {"refused": refused})
    if refused:
        raise UserError(refused)
    return Leader(links)


def accept(listener: Listener, count: int) -> tuple[dict[int, Connection], dict[int, str]]:
    """Returns the links and configs of `count` processes, by rank."""
    came: Queue[Connection | BaseException] = Queue()

    def wait() -> None:
        left = count
        while left:
            # of strangers that connect to this port
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
                    f"{missing()} did not connect to {where}: MASTER_ADDR must be an address that"
                    " all can reach"
                ) from None
            if isinstance(link, BaseException):
                raise link
            hello, _ = receive(link)
            links[hello["rank"]], configs[hello["rank"]] = link, hello["config"]
    return links, configs


def difference(rank: int, theirs: str, ours: str) -> str:
    """Returns a sentence about the first line in which another process's config differs from
    process 0's; empty if they are the same."""
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
        f" has {mine!r}; start all with the same file and the same -b options"
    )


def own_address(master: str | None) -> str:
    """Returns the IPv4 address at which the others reach process 0: the one that MASTER_ADDR names,
    or that of its default route.

    Many hosts resolve their own name to a loopback address, at which no other host would find them.
    """
    if master in LOOPBACK:
        return "127.0.0.1"
    with suppress(OSError):
        if master and not (named := socket.gethostbyname(master)).startswith("127."):
            return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # a reserved address: this sends nothing, and selects the interface of the default route
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
    text = sentence(error).strip()
    if isinstance(error, UserError):
        return text
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"


def ended_by(error: BaseException) -> None:
    """Ends this process with the error of a thread without which it would wait forever."""
    end_now(f"{error}")


def end_now(why: str) -> None:
    """Ends this process with a sentence, whatever its main thread does: a collective cannot be
    interrupted."""
    sys.stdout.flush()
    os.write(sys.stderr.fileno(), f"error: {why}\n".encode())
    os._exit(1)
