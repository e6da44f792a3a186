"""The version of the weights that each token was sampled with, as servers return it: in spans."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from jaxtyping import Int32

from areal_x.engines.fleet.failures import ServerRestarted


class Span(msgspec.Struct, gc=False):
    """Output tokens of one version of the weights, half open."""

    start: int
    end: int
    version: str | int


def versions_from(spans: Sequence[Span], length: int) -> Int32[np.ndarray, " N"]:
    """Expands half-open spans over the output tokens to one version per token. Raises
    ServerRestarted unless they cover each token once."""
    versions, known = np.empty(length, np.int32), 0
    for span in spans:
        contiguous = span.start == known <= span.end <= length
        if not contiguous or not str(span.version).isdigit():
            break
        versions[known : span.end] = int(span.version)
        known = span.end
    if known != length:
        cause = "it may have been restarted, or updated by someone else"
        raise ServerRestarted(
            f"the server returned the weight versions {list(map(msgspec.to_builtins, spans))} for {length}"
            f" tokens: {cause}"
        )
    return versions
