"""Records with pictures as Geometry3K and CLEVR-count have them, from JSON lines and from parquet as the hub stores it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest

Image = pytest.importorskip("PIL.Image")

from areal_x.errors import UserError
from areal_x.hf.image_reader import _decode, image_urls
from areal_x.tasks.datasets import load_dataset
from areal_x.tasks.pictures import picture_task


def png(colour: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 6), (colour, 0, 0)).save(file, kind)
    return file.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def colours(task: Any) -> list[int]:
    return [_decode(shown).getpixel((0, 0))[0] for shown in image_urls(task.prompt)]


def test_parquet_as_the_hub_stores_geometry3k_becomes_tasks(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"images": [{"bytes": png(200), "path": None}], "problem": "<image>Find x.", "answer": "\\sqrt{3}"},
        {
            "images": [{"bytes": png(9), "path": None}, {"bytes": png(90), "path": None}],
            "problem": "In <image> find y.",
            "answer": "2",
        },
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train-00000-of-00001.parquet")
    first, second = load_dataset(str(tmp_path), "train", to_task=picture_task)
    assert (first.answer, colours(first)) == ("\\sqrt{3}", [200])
    assert [part["type"] for part in first.prompt[0]["content"]] == ["image_url", "text"]
    assert [part["type"] for part in second.prompt[0]["content"]] == ["image_url", "text", "image_url", "text"]
    assert [part["text"] for part in second.prompt[0]["content"] if part["type"] == "text"] == ["In ", " find y."]
    assert colours(second) == [9, 90]


def test_lines_as_clevr_count_has_them_become_tasks(tmp_path: Path) -> None:
    record = {"image": url(png(7)), "problem": "How many items?", "solution": "<answer> 3 </answer>", "id": 5}
    (tmp_path / "train.jsonl").write_text(json.dumps(record))
    (task,) = load_dataset(str(tmp_path), to_task=lambda r, id: picture_task(r, id, instruction="Count."))
    assert (task.answer, colours(task), dict(task.metadata)) == ("3", [7], {"id": 5})
    assert task.prompt[0]["content"][-1] == {"type": "text", "text": "How many items? Count."}


@pytest.mark.parametrize("picture", [png(1, "JPEG"), png(1, "WEBP"), Image.new("L", (4, 4))])
def test_a_picture_may_have_any_of_the_forms(picture: Any) -> None:
    task = picture_task({"image": picture, "question": "?", "answer": 1}, "t")
    assert len(colours(task)) == 1
    assert task.answer == "1"


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"image": "a.png"}, "files and addresses are not read"),
        ({"image": {"bytes": b"GIF89a", "path": None}}, "no PNG, JPEG or WEBP"),
        ({"question": "<image> and <image>"}, "marks 2 pictures and has 1"),
        ({"answer": None}, "none of the fields answer, solution: it has image, question"),
        ({"question": 3}, "no text but int"),
    ],
)
def test_a_record_of_another_form_is_refused_with_its_id(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=f"task 't.*{reason}"):
        picture_task({"image": url(png(1)), "question": "?", "answer": 1} | change, "t")
