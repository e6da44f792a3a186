"""Runs inside the vLLM worker: an adapter as it stands in the slot that requests use.

The slot of a layer has the matrices A [rank, in] and B · alpha / rank [out, rank] of each of the layer's fused
parts, of a tensor-parallel worker its slices, with zeros up to the largest rank that a server takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_x.engines.fleet.proof.regions import Shape, view_of
from areal_x.engines.fleet.proof.sums import as_slice, columns, within
from areal_x.engines.fleet.proof.tensors import sums_at, type_name

MATRICES = ("lora_A", "lora_B")


def report(
    worker: Any, shapes: Mapping[str, Shape], version: int, full: bool
) -> dict[str, dict[str, str] | list[Any]]:
    """Returns the report of the adapter that was loaded last. shapes: of its tensors by PEFT's names. A part of a layer
    for which nothing was published must be empty."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager = worker.model_runner.lora_manager._adapter_manager
    newest = max(manager.list_adapters(), default=None)
    wrong: dict[str, str] = {}
    parts: list[Any] = []
    if newest not in manager.lora_index_to_id:
        return {"parts": [], "unproved": {}, "wrong": dict.fromkeys(shapes, "is in no slot")}
    slot = manager.lora_index_to_id.index(newest)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    published: dict[tuple[str, str], str] = {}
    for name in shapes:
        module, is_a = parse_fine_tuned_lora_name(name, mapper)
        published[module, MATRICES[0] if is_a else MATRICES[1]] = name
    for module, layer in manager.modules.items():
        if not isinstance(getattr(layer, "lora_a_stacked", None), tuple):
            continue  # embeddings and experts: their tensors have no place then
        parent, _, last = module.rpartition(".")
        own = [f"{parent}.{x}" for x in manager.packed_modules_mapping.get(last, [last])]
        if len(own) != len(layer.lora_a_stacked):
            continue
        for matrix, stacked in zip(
            MATRICES, (layer.lora_a_stacked, layer.lora_b_stacked), strict=True
        ):
            names = [published.get((x, matrix)) for x in own]
            places = boxes(layer, matrix, names, shapes)
            for number, (tensor, box) in enumerate(zip(names, places, strict=True)):
                held = stacked[number][slot, 0]
                if tensor is None or box is None:
                    if matrix == MATRICES[1] and bool(held.any()):
                        wrong[own[number]] = "has an adapter that was not published"
                    continue
                values = held[tuple(slice(0, stop - start) for start, stop in box)]
                if held.count_nonzero() != values.count_nonzero():
                    wrong[tensor] = "has other numbers beside it in its slot"
                shape = shapes[tensor]
                last_axis = within(columns(version, shape, full), *box[1])
                indices = [range(*box[0]), last_axis]
                found = sums_at(values[:, as_slice(last_axis, box[1][0])], indices, shape)
                parts.append(
                    [
                        tensor,
                        f"{module}, slot",
                        box,
                        type_name(values.dtype),
                        [found.plain, found.placed],
                    ]
                )
    return {"parts": parts, "unproved": {}, "wrong": wrong}


def boxes(
    layer: Any, matrix: str, names: list[str | None], shapes: Mapping[str, Shape]
) -> list[tuple[tuple[int, int], ...] | None]:
    """Returns which part of each published tensor a layer's slot has, as the layer's own code cuts it."""
    import torch

    given = [None if name is None else torch.empty(shapes[name], device="meta") for name in names]
    cut: Any = given
    if layer.tp_size > 1:
        slice_it = layer.slice_lora_a if matrix == MATRICES[0] else layer.slice_lora_b
        if len(given) > 1:
            cut = slice_it(given)
        elif given[0] is not None:
            cut = [slice_it(given[0])]
    found: list[Any] = []
    for whole, part in zip(given, cut, strict=True):
        view = None if whole is None else view_of(part, tuple(whole.shape), whole.stride())
        found.append(None if view is None else view.box)
    return found
