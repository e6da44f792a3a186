"""Runs inside the SGLang server's workers: proves what each uses (areal_x.engines.fleet.proof.worker).

Question and answers go the way of SGLang's own checksums: /weights_checker calls `WeightChecker.handle` in each
worker, here with `PROVE` and a question after it, and returns one checksum per worker, which is its report.
Models with adapters, and what kernels read in another form than loaders write, are not proved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

from areal_x.engines.fleet.proof.readers import Reader, Unreadable, memory_reader
from areal_x.engines.fleet.proof.regions import Held, Shape
from areal_x.engines.fleet.proof.worker import answer, report

PROVE = "areal_x_prove "
REPORT = "report"


def install(checker: Any) -> None:
    """Patches the class of sglang.srt.utils.weight_checker."""
    handle = checker.WeightChecker.handle

    @wraps(handle)
    def handle_or_prove(self: Any, action: str, *others: Any, **named: Any) -> Any:
        if not action.startswith(PROVE):
            return handle(self, action, *others, **named)
        found = prove(self._get_model(), action.removeprefix(PROVE))
        role = {"role": named["role"]} if "role" in named else {}  # since SGLang 0.5.21
        worker = self._parallelism_info(**role)
        return checker.ChecksumInfo(
            checksums={REPORT: json.dumps(found)}, per_gpu_checksum="", parallelism_info=worker
        ).model_dump()

    checker.WeightChecker.handle = handle_or_prove


def prove(model: Any, question: str) -> dict[str, Any]:
    """Returns the answer to a question about a model's weights."""

    def found(
        shapes: Mapping[str, Shape], version: int, full: bool, of_adapter: bool
    ) -> dict[str, Any]:
        return report(model, shapes, version, full, readers_of, unchanged)

    return answer(question, found)


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Undoes what loaders do beside filling parameters, as setting attributes of layers. The parameters
    are those that they filled before: SGLang loads into the ones that kernels read."""
    before = [
        (module, dict(vars(module)), dict(module._parameters), dict(module._buffers))
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, attributes, parameters, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            for own, old in ((module._parameters, parameters), (module._buffers, buffers)):
                own.clear()
                own.update(old)


def readers_of(held: Held, modules: Mapping[str, Any], aliases: Sequence[str]) -> list[Reader]:
    """Returns the way in which a parameter is used (areal_x.engines.fleet.proof.worker.ReadersOf).

    Raises: Unreadable unless kernels read it in the form in which it was loaded.
    """
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedEmbeddingMethod,
        UnquantizedFusedMoEMethod,
        UnquantizedLinearMethod,
    )

    module = modules[held.module]
    method = getattr(module, "quant_method", None)
    if getattr(module, "use_intel_amx_backend", False):
        raise Unreadable("it is packed for the CPU's matrix units")
    if isinstance(method, UnquantizedFusedMoEMethod):
        if next(module.parameters()).device.type != "cpu":
            raise Unreadable("kernels may have the experts in another order")
    elif method is not None and not isinstance(
        method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod
    ):
        raise Unreadable(f"it is quantised or packed by {type(method).__name__}")
    if held.module.endswith(".kv_b_proj"):
        raise Unreadable("attention multiplies with copies of it")
    return [Reader(f"{held.module}.{held.name}", memory_reader(module, held))]
