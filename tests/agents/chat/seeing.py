"""A tiny vision-language model whose chat template shows texts, pictures and tools' results in any message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from areal_x.hf.tokenizer import load_tokenizer
from examples.vision.task import as_url, drawn
from examples.vision.warm_start import IMAGE, write_model

TEMPLATE = """\
{%- for message in messages %}
  {%- if message.role == "assistant" %}<assistant>{% else %}<user>{% endif %}
  {%- if message.content is string %}{{ message.content }}
  {%- else %}
    {%- for part in message.content %}
      {%- if part.type == "image" %}<vision_start><image><vision_end>{% else %}{{ part.text }}{% endif %}
    {%- endfor %}
  {%- endif %}<end>
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif -%}
"""


def write_seeing(directory: Path) -> Path:
    write_model(directory, 0)
    tokenizer = load_tokenizer(directory)  # its image token is special, as those of real models
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def picture(seed: int, pixels: int = 32) -> str:
    """The URL of a picture."""
    return as_url(drawn(np.random.default_rng(seed), 3, pixels))


def part(seed: int, pixels: int = 32) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": picture(seed, pixels)}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}
