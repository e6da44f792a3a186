"""What a prompt of a model with a token after each row of an image's tokens is read with: a tokenizer, a chat template and an
image processor, as those of Mistral Small 3.1 are on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Up to the ids of tests.models.
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
TEMPLATE = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST]{% for item in message.content %}
{%- if item.type == 'image' %}[IMG]{% else %}{{ item.text }}{% endif %}{% endfor %}[/INST]{% endif %}{% endfor %}"""


def write_prompt_files(directory: Path, config: dict[str, Any], special: list[str] = SPECIAL) -> None:
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    images = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 40}}
    images["patch_size"] = config["vision_config"]["patch_size"]  # of the tower, as on the hub: not of a token
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    whole = {"processor_class": "PixtralProcessor", "patch_size": images["patch_size"]}
    whole["spatial_merge_size"] = config["spatial_merge_size"]
    (directory / "processor_config.json").write_text(json.dumps(whole))
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate([*special, *map(chr, range(32, 127))])}, []))
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in special])
    of_text = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **of_text).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
