"""Runs inside the vLLM server: tokens of text between the rows of an image's tokens, as Mistral Small 3.1
has them.

vLLM's own processor marks which tokens of an image's range its embeddings replace. A request that
brings the image's patches beside its tokens (areal_x.engines.vllm.features) gives the range alone: vLLM
0.32 would want as many embeddings as the range has tokens, and the engine would end.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps
from typing import Any


def install() -> None:
    """Makes this process mark them. A vLLM without requests of this kind is left as it is."""
    try:
        from vllm.v1.engine.input_processor import InputProcessor
    except ImportError:
        return
    process = InputProcessor.process_inputs

    @wraps(process)
    def mark_and_process(
        self: Any, request_id: str, prompt: Any, *arguments: Any, **named: Any
    ) -> Any:
        marked = with_marks(prompt, self.model_config.hf_config)
        return process(self, request_id, marked, *arguments, **named)

    InputProcessor.process_inputs = mark_and_process


def with_marks(prompt: Any, config: Any) -> Any:
    """Returns vLLM's input of a request, in which each image's range has marks: those that it had, else
    the tokens with the image's id. config: transformers' of the served model."""
    if getattr(config, "model_type", None) != "mistral3" or not isinstance(prompt, dict):
        return prompt
    if "image" not in prompt.get("mm_placeholders", ()):
        return prompt
    import torch

    def marked(place: Any) -> Any:
        if place.is_embed is not None:
            return place
        own = prompt["prompt_token_ids"][place.offset : place.offset + place.length]
        return replace(place, is_embed=torch.tensor(own) == config.image_token_id)

    images = [marked(place) for place in prompt["mm_placeholders"]["image"]]
    return {**prompt, "mm_placeholders": {**prompt["mm_placeholders"], "image": images}}
