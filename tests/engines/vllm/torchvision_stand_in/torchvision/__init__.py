"""Stands in for torchvision, whose builds on PyPI are for CUDA: vLLM's models that see import it.

The tests that take this one call nothing of it but what a server does with a blank image before it serves. Any module below it
can be imported, and any name from those.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0"


class Named(type):
    """A class with any attribute, each of them another value."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return CALLED.get(name, f"{cls.__name__}.{name}")


def named(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return CALLED[name] if name in CALLED else Named(name, (), {})


def pil_to_tensor(image: Any) -> Any:
    import numpy
    import torch

    return torch.tensor(numpy.array(image)).permute(2, 0, 1)


def resize(image: Any, size: Any, **_: Any) -> Any:
    return image[..., :1, :1].expand(*image.shape[:-2], *size)


def normalize(image: Any, *_: Any, **__: Any) -> Any:
    return image


def pad(image: Any, padding: Any, *_: Any, **__: Any) -> Any:
    import torch

    left, top, right, bottom = padding
    return torch.nn.functional.pad(image, (left, right, top, bottom))


CALLED: dict[str, Any] = {function.__name__: function for function in (pil_to_tensor, resize, normalize, pad)}
CALLED["InterpolationMode"] = Named("InterpolationMode", (), {})


class Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith("torchvision.") else None

    def create_module(self, spec: ModuleSpec) -> None: ...

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = named  # type: ignore[method-assign]


sys.meta_path.append(Finder())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"torchvision.{name}")
