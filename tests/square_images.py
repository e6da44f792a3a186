"""What a prompt of a model with images of one size is read with: a tokenizer, a chat template and an image processor, as
those of Gemma 3 are on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Up to the ids of tests.models.
SPECIAL = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<image_soft_token>", "<unused0>"]
SPECIAL += ["<start_of_image>", "<end_of_image>"]
BREAKS = ["\n", "\n\n", "\n\n\n", "\n\n\n\n"]  # which are tokens, as in Gemma's vocabulary
# But for what it does with a system message.
TEMPLATE = """{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}
{% if message.content is string %}{{ message.content | trim }}{% else %}{% for item in message.content %}
{%- if item.type == 'image' %}<start_of_image>{% else %}{{ item.text | trim }}{% endif %}{% endfor %}{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""


def write_prompt_files(directory: Path, config: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    write_processor(directory, config)
    merges = [(BREAKS[0], BREAKS[0]), (BREAKS[1], BREAKS[0]), (BREAKS[1], BREAKS[1])]
    pieces = [*SPECIAL, *BREAKS, *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    of_text = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=names, **of_text).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def write_processor(directory: Path, config: dict[str, Any], **changes: Any) -> None:
    side = config["vision_config"]["image_size"]
    size = {"height": side, "width": side}
    images = {"image_processor_type": "Gemma3ImageProcessor", "size": size, "do_pan_and_scan": None} | changes
    whole = {"processor_class": "Gemma3Processor", "image_seq_length": config["mm_tokens_per_image"]}
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    (directory / "processor_config.json").write_text(json.dumps(whole))
