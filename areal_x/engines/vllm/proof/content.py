"""Runs inside the vLLM worker: the parameters of its model as loaders expect them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def without_content(model: Any) -> Iterator[None]:
    """Gives the layers of a model parameters as loaders expect them, without content, and then their own ones
    back."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        _get_original_loader,
        _place_kernel_tensors,
        get_layerwise_info,
    )
    from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
    from vllm.model_executor.model_loader.reload.utils import (
        get_layer_params_buffers,
        get_layer_tensors,
    )

    layers = list(model.modules())
    for layer in layers:
        info = get_layerwise_info(layer)
        info.kernel_tensors = get_layer_params_buffers(layer)
        info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
    try:
        for layer in layers:
            restore_layer_on_meta(layer, get_layerwise_info(layer))
            for tensor in get_layer_tensors(layer).values():  # a reload has wrapped their loaders
                tensor.weight_loader = _get_original_loader(tensor)
        yield
    finally:
        for layer in layers:
            info = get_layerwise_info(layer)
            _place_kernel_tensors(layer, info)
            info.reset()
