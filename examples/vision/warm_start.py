"""A Qwen2.5-VL small enough to train on a laptop, fine-tuned until it counts a few squares better
than by guessing; made once and cached.

transformers creates it from a config. Its image processor is Qwen2-VL's with smaller patches: a
picture of 32×32 pixels has 8×8 of them, and each 2×2 patches become one token.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gin

from areal_x import Batch, Task, Trajectory, image_urls, load_image_reader
from examples.tiny.model import END, PAD, SPECIAL, encode, write_tokenizer
from examples.tiny.supervised import ROWS, batches_of, supervised_trajectory
from examples.tiny.warm_start import supervised_model
from examples.vision import task as task_module
from examples.vision.task import QUESTION, pictures

IMAGE, VIDEO, START, STOP = "<image>", "<video>", "<vision_start>", "<vision_end>"
PIECES = (*"0123456789", "<user>", "<assistant>", IMAGE, VIDEO, START, STOP, QUESTION)
CHAT_TEMPLATE = """\
{%- for message in messages %}
  {%- if message.role == "assistant" %}<assistant>{{ message.content }}
  {%- else %}<user>
    {%- for part in message.content %}
      {%- if part.type == "image" %}<vision_start><image><vision_end>{% else %}{{ part.text }}{% endif %}
    {%- endfor %}
  {%- endif %}<end>
{%- endfor %}
{%- if add_generation_prompt %}<assistant>{% endif -%}
"""
TEXT = {
    "vocab_size": len(SPECIAL) + len(PIECES),
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": END,
}
TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 128,
    "patch_size": 4,
    "window_size": 16,  # in pixels
    "fullatt_block_indexes": [1],
    "out_hidden_size": TEXT["hidden_size"],
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": TOWER["patch_size"],
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
ROW_LENGTH = 120  # five pictures with their questions and answers
IN_ROW = 5


@gin.configurable(module="vision")
def warm_start(seed: int = 0, steps: int = 120, learning_rate: float = 2e-3, most: int = 5) -> str:
    """Returns the directory of the supervised model (see `supervised_model`),
    which torch trains.

    Args:
        seed: Seed of the initial weights and of the demonstrations.
        steps: Optimizer steps, at least 2.
        learning_rate: Peak learning rate.
        most: Largest number of squares in a picture.
    """
    return supervised_model(
        "vision",
        {"seed": seed, "steps": steps, "learning_rate": learning_rate, "most": most},
        write=lambda directory: write_model(directory, seed),
        batches=lambda directory: batches(directory, steps, seed, most),
        code=[task_module, sys.modules[__name__]],
        backend="torch",
    )


def write_model(directory: Path, seed: int) -> None:
    """Writes a model directory with random weights, tokenizer, chat template and image
    processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    names = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": STOP,
    }
    ids: dict[str, Any] = {name: int(encode(PIECES, piece)[0]) for name, piece in names.items()}
    config = AutoConfig.for_model(
        "qwen2_5_vl", text_config=TEXT, vision_config=TOWER, tie_word_embeddings=False, **ids
    )
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, trust_remote_code=False
    )
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=spread(name, tuple(parameter.shape)))
    model.save_pretrained(directory)
    write_tokenizer(directory, PIECES, TEXT["max_position_embeddings"])
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2))


def spread(name: str, shape: tuple[int, ...]) -> float:
    """Standard deviation of the initial weights: 1/√inputs, as in examples/tiny, for matrices and the
    tower's first convolution."""
    if name.endswith("embed_tokens.weight"):
        return 0.3
    adds = name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight"))
    return math.prod(shape[1:]) ** -0.5 * (0.4 if adds else 1.0)


def batches(directory: Path, steps: int, seed: int, most: int) -> Iterator[Batch]:
    """Yields batches of demonstrations with the correct count, each used once. `directory` holds the
    model, whose processor reads the pictures."""
    tasks = pictures(steps * ROWS * IN_ROW, most, seed=seed)
    return batches_of([shown(directory, task) for task in tasks], steps, ROW_LENGTH, seed)


def shown(directory: Path, task: Task) -> Trajectory:
    """A prompt in the format of the chat template, and its answer, which is trained on."""
    reader = load_image_reader(str(directory))
    images = reader.read(image_urls(task.prompt))
    prompt = reader.expand_tokens(
        encode(PIECES, f"<user>{START}{IMAGE}{STOP}{QUESTION}<end><assistant>"), images
    )
    answer = supervised_trajectory((prompt, False), (encode(PIECES, f"{task.answer}<end>"), True))
    return Trajectory(answer.tokens, answer.mask, answer.logprobs, answer.versions, images=images)
