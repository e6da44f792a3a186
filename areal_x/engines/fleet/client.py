"""What a fleet asks of a server, whatever program serves: the client that each dialect writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float32, Int32

from areal_x.engines.fleet.concurrency import Load
from areal_x.protocols.engine import Completion, SamplingParams

MODEL = "policy"  # the name that servers serve the model under
HEALTH_SECONDS = 5.0
WEIGHTS, CACHES = "weights", "kv_cache"  # the memory of a server that can be released
CONTROL_SECONDS = 600.0  # loading the weights of a large model from a shared folder


class Client(Protocol):
    """A client of one server. Made inside the event loop that uses it.

    Errors: ServerLost if the server is gone, ServerFailed and other EngineErrors if it responds
    with an error, UserError if it refuses the key or lacks an endpoint.
    """

    url: str

    async def close(self) -> None: ...

    async def is_healthy(self, seconds: float = HEALTH_SECONDS) -> bool:
        """True if the server responds within this time. Raises: OutOfFiles if no request can be
        sent."""
        ...

    async def accepts_without_key(self) -> bool:
        """True if it accepts control requests without a key."""
        ...

    async def load_figures(self) -> Load | None:
        """Returns the server's own figures; None if it counts none."""
        ...

    async def negotiate(self, ours: bool) -> None:
        """Finds out what the server can do, before any other call. ours: the run has started it.

        Raises: UserError for a release that cannot be used.
        """
        ...

    # ---- tokens

    async def context(self) -> int:
        """Returns the maximum length of prompt and completion together."""
        ...

    async def generate(
        self,
        tokens: Int32[np.ndarray, " prompt"],
        sampling: SamplingParams,
        model: str = MODEL,
        experts: bool = False,
        kept: bool = False,
        stop: Sequence[str] = (),
        features: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> Completion:
        """Generates from prompt tokens, with the model itself or an adapter by its name; versions
        are those of the model. Cancelling the coroutine aborts the request on the server.

        experts: the completion contains the experts of each token. kept: what truncated sampling
        kept, if it truncates. stop: strings that end it.
        features: of images, as the dialect sends them. seed: of its random numbers, where the server
        takes one.
        """
        ...

    async def probe(self, model: str, tokens: Sequence[int]) -> Float32[np.ndarray, " T"]:
        """Returns the log-probability of each token given those before it, at temperature 1; 0 for
        the first. Safe beside running requests."""
        ...

    async def hand_over(self) -> None:
        """Ends all requests in flight: each is answered with its tokens so far, and ends with
        "abort"."""
        ...

    # ---- weights

    async def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        """Prepares the server to be given weights. info: `staging_root`, the folder below which
        staged weights are."""
        ...

    async def set_version(self, version: int) -> None:
        """Sets the version of the weights that the server already has."""
        ...

    async def is_paused(self) -> bool: ...

    async def validate_folder(self, staging_root: Path, folder: Path) -> None:
        """Raises EngineError if the server could not load a staged folder; changes nothing and is
        safe beside running requests."""
        ...

    async def pause(self) -> None:
        """Freezes requests in flight: they are recomputed after `resume` under the weights held
        then."""
        ...

    async def start_update(self) -> None:
        """Begins an update of the paused server."""
        ...

    async def update_weights(self, info: Any) -> None:
        """Replaces all weights of the paused server, and drops what it has cached of the old ones.
        info: `folder`, where they are staged."""
        ...

    async def finish_update(self, version: str) -> None:
        """Ends an update: the weights have this version from now on."""
        ...

    async def abandon_update(self) -> None:
        """Ends an update that broke off and is still open; the weights keep their version."""
        ...

    async def make_version(self, order: str) -> list[Any]:
        """Returns each worker's answer to an order of a version in its cache
        (areal_x.engines.fleet.delta.maker)."""
        ...

    async def forget_versions(self) -> None:
        """Removes the versions in the server's cache."""
        ...

    async def prove(self, question: str) -> list[Any]:
        """Returns what each worker uses of the weights that are asked about
        (areal_x.engines.fleet.proof.prover)."""
        ...

    async def resume(self, seconds: float = CONTROL_SECONDS) -> None: ...

    async def sleep(self, keep_weights: bool) -> None:
        """Freezes requests in flight, as `pause` does, and releases the memory of caches and weights.
        keep_weights: keeps a copy in the host's memory; else they must be loaded after `wake`."""
        ...

    async def wake(self, memory: str) -> None:
        """Takes the memory of WEIGHTS or CACHES again, of a server that sleeps. Whether requests go on
        once it has both is the server's own: `resume` makes them."""
        ...

    # ---- adapters

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Loads an adapter under an unused name."""
        ...

    async def unload_adapter(self, name: str) -> None: ...

    async def adapters(self) -> list[str]:
        """Returns the names of the loaded adapters."""
        ...
