"""What the trainer publishes: the sums of each tensor, in a file beside the staged weights.

They are computed from the trainer's tensors as they are written, in the thread that writes them. The
file is read by whoever judges the servers, which with `cluster.shards` is another process than the
trainer's: it is validated as any file from a shared folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from areal_x.engines.fleet.proof.sums import MASK, Sums, columns, of_array, rounded
from areal_x.hf.model_dir import read_tensors
from areal_x.protocols.engine import EngineError

CLAIMS = "claims.json"
Tensors = Iterable[tuple[str, np.ndarray]]


@dataclass(frozen=True)
class Claim:
    """A tensor that was published."""

    shape: tuple[int, ...]

    dtype: str
    """The type in which it was published."""

    sums: Mapping[str, Sums]
    """By the type that the numbers are cast to first: a server may compute in another one."""


@dataclass(frozen=True)
class Claims:
    """The tensors of a version by their Hugging Face names, or an adapter's by PEFT's."""

    version: int

    full: bool
    """True if the sums are those of whole tensors; False if of a sample of each (sums.columns)."""

    tensors: Mapping[str, Claim] = field(default_factory=dict)

    scale: float | None = None
    """Of an adapter: what servers multiply the matrices B with; None for whole weights."""

    def write(self, folder: Path) -> None:
        tensors = {
            name: [
                claim.shape,
                claim.dtype,
                {dtype: [x.plain, x.placed] for dtype, x in claim.sums.items()},
            ]
            for name, claim in self.tensors.items()
        }
        written = {
            "version": self.version,
            "full": self.full,
            "scale": self.scale,
            "tensors": tensors,
        }
        (folder / CLAIMS).write_text(json.dumps(written))


def read_claims(folder: Path) -> Claims | None:
    """Returns the claims of a staged folder; None if it has none. Raises: EngineError for a file that
    is not one of claims."""
    try:
        found = json.loads((folder / CLAIMS).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder / CLAIMS} cannot be read: {error}") from error
    try:
        tensors = {
            str(name): Claim(
                tuple(natural(size) for size in shape),
                str(dtype),
                {
                    str(kind): Sums(natural(plain), natural(placed))
                    for kind, (plain, placed) in sums.items()
                },
            )
            for name, (shape, dtype, sums) in found["tensors"].items()
        }
        scale = found["scale"]
        if scale is not None and not isinstance(scale, float):
            raise ValueError(f"{scale!r} is no scale")
        return Claims(natural(found["version"]), bool(found["full"]), tensors, scale)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise EngineError(f"{folder / CLAIMS} is no file of claims: {error}") from error


def natural(number: Any) -> int:
    if type(number) is not int or not 0 <= number <= MASK:
        raise ValueError(f"{number!r} is no size and no sum")
    return number


class Claiming:
    """Computes claims from tensors that pass by. dtypes: of tensors that servers compute with in
    another type, by their names. scale: see Claims."""

    def __init__(
        self,
        version: int,
        full: bool,
        dtypes: Mapping[str, str] | None = None,
        scale: float | None = None,
    ) -> None:
        self.version, self.full, self.scale = version, full, scale
        self._dtypes = dtypes or {}
        self._tensors: dict[str, Claim] = {}

    def of(self, tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
        """Yields the tensors, and claims each."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def add(self, name: str, tensor: np.ndarray) -> None:
        kinds = {tensor.dtype.name, self._dtypes.get(name, tensor.dtype.name)}
        indices = columns(self.version, tensor.shape, self.full)
        sums = {
            kind: of_array(claimed_numbers(tensor, kind, self.scale, name), indices, kind)
            for kind in kinds
        }
        self._tensors[name] = Claim(tensor.shape, tensor.dtype.name, sums)

    def write(self, folder: Path) -> None:
        """Writes the claims into the staged folder. If other processes have written the tensors, they
        are those of the files."""
        if not self._tensors:
            for name, tensor in read_tensors(folder):
                self.add(name, tensor)
        self.done().write(folder)

    def done(self) -> Claims:
        return Claims(self.version, self.full, self._tensors, self.scale)


def claimed_numbers(tensor: np.ndarray, dtype: str, scale: float | None, name: str) -> np.ndarray:
    """Returns the numbers of a tensor as servers use them: of an adapter's matrix B the product with its
    scale, of the numbers in their type, which whoever sums it rounds to that type again."""
    if scale is None or scale == 1 or not name.endswith(".lora_B.weight"):
        return tensor
    return rounded(tensor, dtype) * np.float32(scale)


def recast(claims: Claims, tensors: Tensors, dtypes: Mapping[str, str]) -> Claims:
    """Returns the claims with those of more types, by tensor. tensors: the published ones."""
    claiming = Claiming(claims.version, claims.full, dtypes, claims.scale)
    for name, tensor in tensors:
        if name in dtypes:
            claiming.add(name, tensor)
    more = claiming.done().tensors
    return replace(claims, tensors={**claims.tensors, **more})
