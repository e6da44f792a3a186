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
pytest.importorskip("msgpack")
pytest.importorskip("transformers.image_processing_backends")  # before torchvision is replaced, for which it looks

from areal_x.engines.vllm import features
from areal_x.engines.vllm.config import VLLMConfig
from areal_x.engines.vllm.features import check_sent_images, features_of, served_format
from areal_x.errors import UserError
from areal_x.hf.image_reader import read_prompt_images
from areal_x.hf.tokenizer import load_tokenizer
from areal_x.workflows.single_turn import encode
from tests.models import IMAGE, SEEING_PLACED, in_rows
from tests.placed_images import MOST, write_prompt_files
from tests.sent_images import arrays_of

from .test_square_images import message, noise

PICTURES = [noise(24, 24), noise(40, 17, 1), noise(9, 100, 2)]
FAMILIES = ["gemma4_vl-whole", "gemma4_unified_vl"]


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
    (tmp_path / "config.json").write_text(json.dumps(config))
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


def test_servers_get_patches_with_their_places(tmp_path: Path) -> None:
    config = SEEING_PLACED["gemma4_vl"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_prompt_files(tmp_path, config)
    tokenizer, prompt = load_tokenizer(tmp_path), message(PICTURES[0], "and", PICTURES[2])
    images = read_prompt_images(tokenizer, prompt)
    tokens = encode(tokenizer, prompt, images)
    sent, start = features_of(tokens, images, served_format(tmp_path)), 0
    for packed, place, grid in zip(
        sent["kwargs_data"]["image"], sent["mm_placeholders"]["image"], images.grids.tolist(), strict=True
    ):
        found = arrays_of(packed)
        (pixels, batching), (places, _) = found["pixel_values"], found["pixel_position_ids"]
        own = images.patches[start : start + math.prod(grid)]
        in_order, of_rows = (x.numpy() for x in in_rows(own, grid, 2))
        order = np.lexsort(places.T)
        np.testing.assert_array_equal(places[order], of_rows)
        np.testing.assert_array_equal(pixels[order], in_order)
        assert (batching, places.dtype) == ("batched", np.int64)
        assert place["length"] == len(own) // 4
        assert (tokens[place["offset"] :][: place["length"]] == IMAGE).all()
        start += len(own)
    assert start == len(images.patches)


@pytest.mark.parametrize("family", SEEING_PLACED)
def test_servers_on_a_cpu_get_no_images_whose_tokens_see_each_other(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEEING_PLACED[family]))
    monkeypatch.setattr(features, "is_cpu_build", lambda: True)
    if family in ("gemma4_vl", "gemma4_unified_vl-causal"):
        check_sent_images(tmp_path, VLLMConfig())
        return
    with pytest.raises(UserError, match=r"see each other in layers with a window, which vLLM's attention on a CPU does not"):
        check_sent_images(tmp_path, VLLMConfig())
    check_sent_images(tmp_path, VLLMConfig(urls=("http://127.0.0.1:1",)))
