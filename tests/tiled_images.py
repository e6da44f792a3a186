"""What a prompt of a model with images in tiles is read with: a tokenizer, a chat template and an image processor, as those of
Llama 4 are on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Up to the ids of tests.models.
SPECIAL = ["<|begin_of_text|>", "<|eot|>", "<|header_start|>", "<|header_end|>", "<|image|>", "<|patch|>", "<|image_start|>"]
SPECIAL += ["<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]
TEMPLATE = """{{ bos_token }}{% for message in messages %}{% for item in message.content %}
{%- if item.type == 'image' %}<|image|>{% else %}{{ item.text }}{% endif %}{% endfor %}<|eot|>{% endfor %}"""


def write_prompt_files(directory: Path, config: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    side = config["vision_config"]["image_size"]
    images = {"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": side, "width": side}}
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": "Llama4Processor"}))
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate([*SPECIAL, *map(chr, range(32, 127))])}, []))
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    of_text = {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **of_text).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
