"""Which tokens each layer's see, as configs describe it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_x.hf.model_dir import text_config
from areal_x_jax.families import ParsedConfig, refuse_features


def windows_of(described: ParsedConfig, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns for each layer the number of tokens that a token sees, 0 for all, by transformers'
    rule for the family and its defaults. config: as written in the file.

    Raises: UserError for windows that the family does not have.
    """
    text, rule = described.text, described.family.windows
    field = "attention_chunk_size" if described.family.chunked else "sliding_window"
    near = "chunked_attention" if described.family.chunked else "sliding_attention"
    layers, width, kinds = (
        text.num_hidden_layers,
        getattr(text, field, None),
        getattr(text, "layer_types", None),
    )
    if text.model_type == "ministral":
        rule = "layer_types"
    known = {"full_attention", "linear_attention" if described.family.delta else near}
    unknown = ", ".join(sorted(set(kinds or ()) - known))
    refuse_features({f"layers of the kind {unknown}": bool(unknown)})
    listed = [kind == near for kind in kinds or ()]
    every = {"layer_types": listed, "all": [width is not None] * layers, "none": [False] * layers}
    sliding = every[rule][:layers]
    written = text_config(config)
    pattern = written.get("_sliding_window_pattern", 6)
    refuse_features(
        {
            f"{field} = {width} in layers with a window": (any(sliding) and not (width or 0) > 0),
            "layers with a window beside use_sliding_window = False": (
                any(sliding) and not getattr(text, "use_sliding_window", True)
            ),
            "layer_types, which transformers leaves out in this family": (
                bool(listed) and listed[:layers] != sliding
            ),
            f"sliding_window = {width}, which transformers leaves out in this family": (
                rule == "none" and bool(width) and bool(getattr(text, "use_sliding_window", True))
            ),
            "sliding_window beside attention in chunks": (
                described.family.chunked and bool(getattr(text, "sliding_window", None))
            ),
            f"_sliding_window_pattern = {pattern} (sliding_window_pattern is read)": (
                described.family.gemma
                and pattern != 6
                and not {"layer_types", "sliding_window_pattern"} & set(written)
            ),
        },
        "correct its config.json",
    )
    return tuple(int(width or 0) if slides else 0 for slides in sliding)
