"""A checkpoint is whole or it is not one."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_x.errors import UserError
from areal_x.run import checkpoint

STATE = {"position": 17, "pending": [[3, 4]], "seed": 2**63}


def filler(content: bytes = b"weights", size: int = 1000):
    def write(directory: Path) -> None:
        (directory / "model").mkdir()
        (directory / "model" / "model.safetensors").write_bytes(content * size)

    return write


def names(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "checkpoints").iterdir())


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 20, filler(), STATE)
    assert checkpoint.newest(tmp_path) == (20, path, STATE)
    assert path == tmp_path / "checkpoints" / "20"
    assert (path / "model" / "model.safetensors").read_bytes() == b"weights" * 1000


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        checkpoint.save(tmp_path, step, filler(), {}, keep=2)
    assert names(tmp_path) == ["10", "11"]


@pytest.mark.parametrize("name", ["model/model.safetensors", "state.json", "manifest.json"])
def test_one_changed_byte_in_the_newest_is_refused_by_name_and_the_one_before_used(tmp_path: Path, name: str) -> None:
    checkpoint.save(tmp_path, 10, filler(b"old"), {"at": 10})
    checkpoint.save(tmp_path, 20, filler(b"new"), {"at": 20})
    damaged = tmp_path / "checkpoints" / "20" / name
    content = bytearray(damaged.read_bytes())
    content[0] ^= 1
    damaged.write_bytes(content)
    said: list[str] = []
    step, path, state = checkpoint.newest(tmp_path, said.append)
    assert (step, path.name, state) == (10, "10", {"at": 10})
    assert len(said) == 1
    assert f"checkpoint {tmp_path}/checkpoints/20 is damaged ({name} " in said[0]


@pytest.mark.parametrize("name", ["model/model.safetensors", "state.json", "manifest.json"])
def test_a_missing_or_short_file_is_damage(tmp_path: Path, name: str) -> None:
    path = checkpoint.save(tmp_path, 10, filler(), {})
    file = path / name
    file.write_bytes(file.read_bytes()[:-1])
    assert checkpoint.find_damage(path).startswith(name)
    file.unlink()
    assert checkpoint.find_damage(path) == f"{name} is missing"


def test_no_whole_checkpoint_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no checkpoint to resume from$"):
        checkpoint.newest(tmp_path)
    path = checkpoint.save(tmp_path, 10, filler(), {})
    (path / "state.json").write_text("{")
    with pytest.raises(
        UserError, match=r"has no checkpoint to resume from: .*checkpoints/10 is damaged \(state.json has 1 bytes, not"
    ):
        checkpoint.newest(tmp_path, lambda text: None)


def test_a_damaged_one_does_not_push_out_whole_ones_and_is_replaced(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 10, filler(), {}, keep=1)
    checkpoint.save(tmp_path, 30, filler(), {}, keep=2)
    (tmp_path / "checkpoints" / "30" / "state.json").unlink()
    checkpoint.save(tmp_path, 20, filler(), {}, keep=1)  # gone on from 10
    assert checkpoint.newest(tmp_path, lambda text: None)[0] == 20
    checkpoint.save(tmp_path, 30, filler(), {"again": True}, keep=1)
    assert checkpoint.newest(tmp_path)[2] == {"again": True}
    assert names(tmp_path) == ["30"]


def test_a_writer_that_fails_leaves_the_earlier_checkpoints_and_nothing_else(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 10, filler(), {})

    def fails(directory: Path) -> None:
        filler()(directory)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        checkpoint.save(tmp_path, 20, fails, {})
    assert names(tmp_path) == ["10"]
    assert checkpoint.newest(tmp_path)[0] == 10


def test_a_process_killed_while_saving_leaves_no_checkpoint_and_the_next_save_clears_up(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 10, filler(), {})
    killed = (
        "import os, signal, sys; from pathlib import Path; from areal_x.run import checkpoint\n"
        "def write(p): (p / 'half').write_bytes(b'x'); os.kill(os.getpid(), signal.SIGKILL)\n"
        "checkpoint.save(Path(sys.argv[1]), 20, write, {})"
    )
    assert subprocess.run([sys.executable, "-c", killed, str(tmp_path)], check=False).returncode == -9
    assert checkpoint.newest(tmp_path)[0] == 10
    checkpoint.save(tmp_path, 20, filler(), {})
    assert names(tmp_path) == ["10", "20"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB, where the tests may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=256k", "none", str(place)]
    if mount is None or subprocess.run([mount, *options], capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system is not permitted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def writes_in_python(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"x" * 1_000_000)


def writes_in_rust(directory: Path) -> None:
    save_file({"x": np.zeros(250_000, np.float32)}, directory / "model.safetensors")


@pytest.mark.parametrize("write", [writes_in_python, writes_in_rust])
def test_a_full_disk_is_one_sentence_and_the_earlier_checkpoint_is_whole(small_disk: Path, write) -> None:
    checkpoint.save(small_disk, 10, filler(), {"at": 10})
    with pytest.raises(UserError) as raised:
        checkpoint.save(small_disk, 20, write, {})
    assert str(raised.value).startswith(
        f"the checkpoint of step 20 could not be saved because the disk of {small_disk}/checkpoints is full"
    )
    assert "\n" not in str(raised.value)
    assert names(small_disk) == ["10"]
    assert checkpoint.newest(small_disk)[2] == {"at": 10}


@pytest.mark.parametrize(
    "error, told",
    [
        (OSError(errno.ENOSPC, "No space left on device"), UserError),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), UserError),
        (RuntimeError("I/O error: No space left on device (os error 28)"), UserError),
        (RuntimeError("I/O error: Disk quota exceeded (os error 122)"), UserError),
        (OSError(errno.EACCES, "Permission denied"), PermissionError),
    ],
)
def test_a_full_disk_is_recognised_however_it_is_told(tmp_path: Path, error: Exception, told: type[Exception]) -> None:
    """The same where no file system can be mounted: as the system and as a library in another language say it."""

    def fails(directory: Path) -> None:
        raise error

    with pytest.raises(told):
        checkpoint.save(tmp_path, 20, fails, {})
    assert names(tmp_path) == []


def test_a_checkpoint_that_is_written_in_the_background_is_absent_until_it_is_whole(tmp_path: Path) -> None:
    said: list[str] = []
    going_on = Event()

    def write(directory: Path) -> checkpoint.Wait:
        def finish() -> None:
            assert going_on.wait(60)
            filler()(directory)

        return finish

    with checkpoint.Saver(tmp_path, 2, said.append) as saver:
        saver.save(10, filler(), STATE)
        assert said == ["checkpoint of step 10 saved"]
        saver.save(20, write, STATE)
        assert checkpoint.newest(tmp_path)[0] == 10
        going_on.set()
        saver.save(30, write, {"at": 30})  # after that of step 20
        assert checkpoint.newest(tmp_path)[0] >= 20
    assert checkpoint.newest(tmp_path) == (30, tmp_path / "checkpoints" / "30", {"at": 30})
    assert said[-1] == "checkpoint of step 30 saved"


def test_what_goes_wrong_in_the_background_is_raised_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    def write(_: Path) -> checkpoint.Wait:
        def fails() -> None:
            raise RuntimeError("lost")

        return fails

    saver = checkpoint.Saver(tmp_path, 2, print)
    saver.save(10, filler(), STATE)
    saver.save(20, write, STATE)
    with pytest.raises(RuntimeError, match="lost"):
        saver.wait()
    assert checkpoint.newest(tmp_path)[0] == 10
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["10"]
