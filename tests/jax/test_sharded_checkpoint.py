"""Checkpoints that each device writes its part of, read onto other meshes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_x.errors import UserError
from areal_x.hf.model_dir import check_portable
from tests.launching import finished
from tests.thorough import further, thorough

from .resharding import make_trainer

MadeModel = Callable[[str], Path]
CHUNKS = {"stage": 2, "stage_chunks": 2, "fsdp": 2}
FILES = ("model.safetensors", "optimizer.safetensors", "trainer.json", "config.json")


def contents(directory: Path) -> list[bytes]:
    return [(directory / name).read_bytes() for name in FILES]


def write(directory: Path, folder: Path, optimizer: str, *meshes: dict[str, int]) -> None:
    """Runs resharding.py on four devices."""
    processes = meshes[0].get("processes", 1)
    command = [sys.executable, "-m", "tests.jax.resharding", str(directory), str(folder), optimizer, *map(json.dumps, meshes)]
    finished(command, processes, 4 // processes, folder)


@thorough
@pytest.mark.parametrize(
    ("name", "optimizer", "meshes"),
    [
        ("even", "adamw", ({"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"stage": 2, "tensor": 2})),
        # Stages with several groups of layers have them in another order.
        ("even-deep", "adamw", (CHUNKS, {"fsdp": 4}, {"stage": 2, "tensor": 2}, {"stage": 4, "stage_chunks": 2})),
        *further(
            ("even", "muon", ({"fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"stage": 2, "tensor": 2})),
            ("even-deep", "adafactor", ({"stage": 2, "fsdp": 2}, CHUNKS, {"stage": 4, "stage_chunks": 2})),
            ("even-moe-deep", "muon", (CHUNKS, {"expert": 4}, {"stage": 2, "expert": 2})),
            ("even-moe-deep", "muon", ({"fsdp": 4}, CHUNKS)),
        ),
    ],
)
def test_a_run_saved_on_one_mesh_is_read_on_others_bit_for_bit(
    name: str, optimizer: str, meshes: tuple[dict[str, int], ...], model_dir_of: MadeModel, tmp_path: Path
) -> None:
    directory = model_dir_of(name)
    write(directory, tmp_path, optimizer, *meshes)
    alone = make_trainer(directory, optimizer, {})
    alone.restore(tmp_path / "sharded")
    alone.save(tmp_path / "alone")
    assert alone.version == 2
    for other in (*map(str, range(len(meshes) - 1)), "alone"):
        assert contents(tmp_path / other) == contents(tmp_path / "portable"), other


@pytest.mark.parametrize(("name", "mesh"), [("even", {"fsdp": 2, "tensor": 2}), *further(("even-deep", CHUNKS))])
def test_two_processes_write_one_checkpoint(name: str, mesh: dict[str, int], model_dir_of: MadeModel, tmp_path: Path) -> None:
    directory = model_dir_of(name)
    write(directory, tmp_path, "adamw", {**mesh, "processes": 2})
    alone = make_trainer(directory, "adamw", {})
    alone.restore(tmp_path / "sharded")
    alone.save(tmp_path / "alone")
    assert contents(tmp_path / "alone") == contents(tmp_path / "portable")


def test_what_cannot_go_on_from_a_sharded_checkpoint_says_why(model_dir_of: MadeModel, tmp_path: Path) -> None:
    trainer = make_trainer(model_dir_of("even"), "adamw", {})
    wait = trainer.save_in_background(tmp_path)
    assert wait is not None
    wait()
    with pytest.raises(UserError, match=r"sharded checkpoint of the jax backend.*trainer\.checkpoint = 'portable'"):
        check_portable(tmp_path)
    with pytest.raises(UserError, match=r"holds another model or optimizer: its .* has the shape"):
        make_trainer(model_dir_of("qwen3"), "adamw", {}).restore(tmp_path)
    with pytest.raises(UserError, match="holds the state of adamw"):
        make_trainer(model_dir_of("even"), "muon", {}).restore(tmp_path)
    part = next(file for file in (tmp_path / "arrays").rglob("d/*") if file.stat().st_size > 1000)
    part.unlink()
    with pytest.raises(UserError, match="copy the checkpoint again"):
        trainer.restore(tmp_path)
