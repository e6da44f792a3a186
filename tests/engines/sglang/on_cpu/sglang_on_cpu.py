"""Lets SGLang's wheel, which is built for CUDA, run on a CPU: what it lacks there is supplied when it is imported.

`make sglang` puts this folder on the path of SGLang's own environment, and a line there imports this module in every
interpreter that starts, also in those that the server starts. Nothing is imported before SGLang or torchvision is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any


class OnImport:
    """Runs a function once, before the first of some modules is imported (a finder that finds nothing)."""

    def __init__(self, function: Callable[[], None], *names: str) -> None:
        self.function, self.names, self.done = function, names, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self.names and not self.done:
            self.done = True
            self.function()


def declare_torchvision() -> None:
    """torchvision's wheel is built for CUDA: its operators do not load beside a CPU torch, and it then fails to register how
    they behave on fakes. Models of text need none of them."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    declare_torchvision.library = library  # type: ignore[attr-defined]  # they last as long as it does


def leave_memory_unpinned() -> None:
    """SGLang's layers with adapters pin host memory whatever the device is, which a CPU torch refuses."""
    if "--enable-lora" not in sys.argv:
        return
    import torch

    def unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, pin_memory: bool = False, **how: Any) -> Any:
            return function(*arguments, **how)

        return call

    for name in ("tensor", "empty", "zeros", "ones", "full"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_, **how: self


def allow_seeds() -> None:
    """SGLang honours seeds in its deterministic mode alone, whose kernels need a GPU. Here: seeds, and no invariance to the
    batch."""
    if "--enable-deterministic-inference" not in sys.argv:
        return
    import sglang.srt.batch_invariant_ops as invariant
    from sglang.srt.arg_groups.choices import DETERMINISTIC_ATTENTION_BACKEND_CHOICES

    DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    invariant.enable_batch_invariant_mode = lambda *_, **how: None


sys.meta_path[:0] = [
    OnImport(declare_torchvision, "torchvision"),
    OnImport(leave_memory_unpinned, "sglang"),
    OnImport(allow_seeds, "sglang.launch_server", "sglang.srt.managers.scheduler"),
]
