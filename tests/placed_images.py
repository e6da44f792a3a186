"""What a prompt of a model whose patches have places is read with: a tokenizer, a chat template and an image processor, as
those of Gemma 4 are on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Up to the ids of tests.models.
SPECIAL = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|image|>", "<unused0>", "<|image>", "<image|>"]
TEMPLATE = """{{ bos_token }}{% for message in messages %}<|turn>{{ message.role }}
{% for item in message.content %}{% if item.type == 'image' %}<|image|>{% else %}{{ item.text }}{% endif %}{% endfor %}<turn|>
{% endfor %}"""
MOST = 70  # tokens of an image


def write_prompt_files(directory: Path, config: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    name = "Gemma4UnifiedImageProcessor" if "unified" in config["model_type"] else "Gemma4ImageProcessor"
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": name, "max_soft_tokens": MOST}))
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate([*SPECIAL, "\n", *map(chr, range(32, 127))])}, []))
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    of_text = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **of_text).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    whole = {"processor_class": name.replace("Image", "")}
    (directory / "processor_config.json").write_text(json.dumps(whole))
