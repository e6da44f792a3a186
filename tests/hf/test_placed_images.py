"""Images as patches with their places, Gemma 4's: patches and tokens are those of Hugging Face's own processor."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest

torch = pytest.importorskip("torch")
Image = pytest.importorskip("PIL.Image")
pytest.importorskip("transformers.image_processing_backends")  # before torchvision is replaced, for which it looks

from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.features import check_sent_images
from areal_x.errors import UserError
from areal_x.hf.image_reader import read_prompt_images
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.workflows.single_turn import encode
from tests.models import SEEING_PLACED, in_rows

from .test_square_images import message, noise

# Up to the ids of tests.models.
SPECIAL = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|image|>", "<unused0>", "<|image>", "<image|>"]
TEMPLATE = """{{ bos_token }}{% for message in messages %}<|turn>{{ message.role }}
{% for item in message.content %}{% if item.type == 'image' %}<|image|>{% else %}{{ item.text }}{% endif %}{% endfor %}<turn|>
{% endfor %}"""
MOST = 70  # tokens of an image
PICTURES = [noise(24, 24), noise(40, 17, 1), noise(9, 100, 2)]
FAMILIES = ["gemma4_vl-whole", "gemma4_unified_vl"]


def write_prompt_files(directory: Path, config: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    name = "Gemma4UnifiedImageProcessor" if "unified" in config["model_type"] else "Gemma4ImageProcessor"
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": name, "max_soft_tokens": MOST}))
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate([*SPECIAL, "\n", *map(chr, range(32, 127))])}, []))
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    of_text = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **of_text).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def merged_by_transformers(patches: Any, places: Any, tokens: int) -> Any:
    """transformers' own function, of a module that imports torchvision."""
    needed = "torchvision", "torchvision.transforms", "torchvision.transforms.v2", "torchvision.transforms.v2.functional"
    with patch.dict(sys.modules, {name: MagicMock() for name in needed}):
        from transformers.models.gemma4_unified.image_processing_gemma4_unified import patches_merge
    return patches_merge(patches, places, tokens)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", [(PICTURES[0], "What is it?"), ("one", *PICTURES[1:], "two", PICTURES[0])])
def test_tokens_and_patches_are_those_of_hugging_faces_own_processor(
    family: str, parts: tuple[Any, ...], tmp_path: Path
) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    config = SEEING_PLACED[family]
    write_prompt_files(tmp_path, config)
    tower, unified = config["vision_config"], "unified" in family
    tokenizer, prompt = load_tokenizer(tmp_path), message(*parts)
    images = read_prompt_images(tokenizer, prompt)
    shown = [Image.fromarray(x) for x in parts if not isinstance(x, str)]
    sizes = {"patch_size": tower["patch_size"], "pooling_kernel_size": tower["pooling_kernel_size"]}
    theirs = Gemma4ImageProcessorPil(max_soft_tokens=MOST, **sizes)(images=shown, return_tensors="pt")
    counts = theirs["num_soft_tokens_per_image"].tolist()
    each = iter(counts)
    text = "".join(x if isinstance(x, str) else f"<|image>{'<|image|>' * next(each)}<image|>" for x in parts)
    expected = tokenizer.encode(f"<bos><|turn>user\n{text}<turn|>\n", add_special_tokens=False)
    assert encode(tokenizer, prompt, images).tolist() == expected
    merge, start = (1, 0) if unified else (3, 0)
    for patches, places, count, grid in zip(
        theirs["pixel_values"], theirs["image_position_ids"], counts, images.grids.tolist(), strict=True
    ):
        patches, places = patches[: count * 9], places[: count * 9]
        if unified:
            patches, places = merged_by_transformers(patches, places, count)
        of_image = images.patches[start : start + math.prod(grid)]
        ours, own_places = in_rows(of_image, grid, merge)
        assert torch.equal(own_places, places)
        np.testing.assert_allclose(ours, patches, atol=1e-6)
        start += len(of_image)
    assert start == len(images.patches)


def test_images_are_not_sent_to_vllm_servers(tmp_path: Path) -> None:
    write_prompt_files(tmp_path, SEEING_PLACED["gemma4_vl"])
    with pytest.raises(UserError, match=r"is a gemma4, whose images are not sent to vLLM servers: use train\.engine"):
        check_sent_images(tmp_path, VLLMConfig(urls=("http://127.0.0.1:1",)))
