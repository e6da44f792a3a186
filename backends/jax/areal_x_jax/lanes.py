"""The JAX backend's batched sampler: lanes that share their weights and their compiled programs."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import jax

from areal_x.rollout.lanes import Lanes, lanes_on_cpu
from areal_x_jax.sampler import Lane, take_apart
from areal_x_jax.shape import Shape


class Sampler(Lanes):
    """An `areal_x.rollout.sampler.Sampler`. XLA for CPU runs programs as small as a decoding step on one core: two lanes on two
    cores draw twice as many tokens a second."""

    def __init__(self, shape: Shape, slots: int, context: int, lanes: int | None = None) -> None:
        self._device = jax.local_devices()[0]
        count = lanes or (lanes_on_cpu(slots) if self._device.platform == "cpu" else 1)
        call = FirstAlone()
        self._take_apart = jax.jit(lambda params: take_apart(params, shape.layers))
        super().__init__([Lane(shape, slots // count, context, call) for _ in range(count)], self._to_device)

    @property
    def programs(self) -> int:
        """How many programs have been compiled; lanes share them, as they are of one size."""
        return self.lanes[0].programs + self._take_apart._cache_size()

    def _to_device(self, snapshot: Any) -> Any:
        return self._take_apart(jax.device_put(snapshot, self._device))


class FirstAlone:
    """Calls functions by name, each name's first time alone: lanes that need one program at once would each compile it."""

    def __init__(self) -> None:
        self._turn = Lock()
        self._called: set[str] = set()

    def __call__(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if name in self._called:
            return function(*arguments)
        with self._turn:
            result = function(*arguments)
            self._called.add(name)
            return result
