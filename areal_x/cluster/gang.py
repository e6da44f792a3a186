"""A gang: processes that exist together or not at all. Each holds one object, and all make the same
calls on their objects.

    driver ── call(method, …) ──▶ process 0, 1, …: object.method(…)        the first's result returns

The driver speaks to the first process only, which passes its calls on (areal_x.cluster.leader).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from areal_x.errors import UserError

Make = Callable[[int], Any]
"""Makes the object of the process with this rank."""


@dataclass(frozen=True)
class Room:
    """What one process needs of its node."""

    cpus: float = 1.0

    accelerators: int = 0

    resource: str = "GPU"
    """The kind of accelerator, as Ray names it."""

    labels: dict[str, str] = field(default_factory=dict)
    """Labels that the node must have."""

    def bundle(self) -> dict[str, float]:
        """Returns the room as Ray's resources."""
        accelerators = {self.resource: float(self.accelerators)} if self.accelerators else {}
        return {"CPU": self.cpus, **accelerators}


@dataclass(frozen=True)
class PerNode:
    """The last argument of a call that all make, a batch or parts of one: it travels to each node
    once."""

    values: Mapping[str, Any]
    """By node."""


@dataclass(frozen=True)
class Span:
    """A call that a process has made."""

    method: str

    began: float
    """time.time() there."""

    seconds: float

    cpu_seconds: float
    """CPU time of the process meanwhile, of all its threads."""

    peak_bytes: int
    """The most memory that the process has used so far."""


class Lost(UserError):
    """A process of a gang has ended or failed; the gang has been ended."""

    died: bool
    """True if the process or its node is gone, False if its call raised."""

    def __init__(self, text: str, died: bool) -> None:
        super().__init__(text)
        self.died = died


def loss_behind(error: BaseException | None) -> Lost | None:
    """Returns the loss of a gang that led to an error: what other threads raise after it are
    consequences."""
    while error is not None:
        if isinstance(error, Lost):
            return error
        error = error.__cause__
    return None


class Gang(Protocol):
    """The processes, seen from the driver. Its methods may be called from any thread.

    As soon as a process is gone, or a call of one has raised, the call under way raises; if there
    is none, the main thread does where it looks for interrupts.
    """

    nodes: Sequence[str]
    """The node of each process."""

    def call(self, method: str, *arguments: Any, batch: PerNode | None = None) -> Any:
        """Makes all objects run the call, and returns the first's result once it is there.

        Raises: a UserError of the call; Lost for any other error, and as soon as a process is gone.
        After either the gang has ended.
        """
        ...

    def gather(self, method: str, *arguments: Any, batch: PerNode | None = None) -> list[Any]:
        """As `call`, but returns all results."""
        ...

    def measured(
        self, method: str, *arguments: Any, batch: PerNode | None = None
    ) -> tuple[Any, dict[str, float]]:
        """As `call`, but ends when all have run it, and also returns how the processes differ
        (areal_x.cluster.measures.differences)."""
        ...

    def each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Makes each object run the call with arguments of its own, and returns all results. Only
        before the first call of all. Raises: as `call`."""
        ...

    def first(self, method: str, *arguments: Any) -> Any:
        """Makes the first object run the call, beside calls of all. Raises: as `call`."""
        ...

    def beside(self, method: str, *arguments: Any) -> Any:
        """As `call`, but ends when all have run it, and the next call of all need not wait for
        it."""
        ...

    def stream(self, method: str, *arguments: Any) -> Iterator[Any]:
        """Yields what the first object's generator yields, as soon as it does. The generators of
        all objects run to their end, also if this one is closed early. Raises: as `call`."""
        ...

    def spans(self) -> list[tuple[int, Span]]:
        """Returns the calls that have ended since the last time, with the rank of each; none after
        the gang has ended."""
        ...

    def end(self) -> None:
        """Ends all processes. Safe to call twice."""
        ...
