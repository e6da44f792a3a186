"""Runs code that a model wrote, in processes without network, with limits on what they use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_x.runtime.lazy import lazy_names

if TYPE_CHECKING:
    from areal_x.sandbox.containers.choice import containers_of as containers_of
    from areal_x.sandbox.containers.container import Container as Container
    from areal_x.sandbox.containers.container import ContainerError as ContainerError
    from areal_x.sandbox.containers.container import Containers as Containers
    from areal_x.sandbox.containers.limits import ContainerLimits as ContainerLimits
    from areal_x.sandbox.pool import Sandbox as Sandbox
    from areal_x.sandbox.pool import SandboxLimits as SandboxLimits

_NAMES = {
    "areal_x.sandbox.containers.choice": "containers_of",
    "areal_x.sandbox.containers.container": "Container ContainerError Containers",
    "areal_x.sandbox.containers.limits": "ContainerLimits",
    "areal_x.sandbox.pool": "Sandbox SandboxLimits",
}

if not TYPE_CHECKING:  # to a type checker, every name would exist
    __getattr__, __dir__ = lazy_names(__name__, _NAMES)
