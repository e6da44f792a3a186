"""Which models can be sent to servers in fp8."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from areal_x.engines.fleet.config import FleetConfig
from areal_x.errors import ConfigError, UserError
from areal_x.hf import fp8_weights, model_dir


def check_quantised(
    config: FleetConfig,
    adapters: bool,
    model: Path,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """adapters: the trainer has some. shapes: of the model's tensors, None to read them.

    Raises: ConfigError for a model whose weights cannot be published in fp8.
    """
    if not config.quantization:
        return
    why = "left out with adapters, which are published beside weights as they are"
    try:
        if not adapters:
            fp8_weights.check_shapes(shapes or model_dir.shapes(model), config.tensor)
            return
    except UserError as error:
        why = f"left out for this model: {error}"
    raise ConfigError(f"{config.binding}.quantization", config.quantization, why)
