"""Staged weights: complete, in bounded memory, and gone when nobody needs them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from areal_x.engines.fleet import staging as staging_module
from areal_x.engines.fleet.manifest import MANIFEST, shards
from areal_x.engines.fleet.staging import Staging
from areal_x.engines.vllm.loading import read as read_tensors
from areal_x.errors import UserError
from areal_x.hf import weight_copy
from areal_x.hf.weight_copy import write_shards

TENSORS = {f"layer.{i}": np.full((4, i + 1), i, np.float32) for i in range(6)}


def read(folder: Path) -> dict[str, np.ndarray]:
    return {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    staging = Staging(tmp_path)
    yield staging
    staging.close()


def test_what_is_staged_is_what_was_given(staging: Staging) -> None:
    staged = staging.stage(iter(TENSORS.items()), 7)
    assert staged.version == 7
    found = read(staged.folder)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(found[name], tensor)


def test_no_shard_is_larger_than_the_limit_and_at_most_one_is_in_memory(tmp_path: Path) -> None:
    alive = most = 0

    class Counted(np.ndarray):
        def __del__(self) -> None:
            nonlocal alive
            alive -= self.base is not None

    def weights() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal alive, most
        for i in range(20):
            tensor = np.zeros(25, np.float32).view(Counted)
            alive += 1
            most = max(most, alive)
            yield f"w{i}", tensor

    write_shards(tmp_path, weights(), shard_bytes=300)
    files = sorted(tmp_path.iterdir())
    assert [len(load_file(file)) for file in files] == [3] * 6 + [2]
    assert most <= 5  # a shard of three, the tensor that begins the next, the generator's own


def test_the_shard_that_waits_to_be_written_is_bounded() -> None:
    assert weight_copy.SHARD_BYTES <= 2**30


def test_a_server_finds_the_files_of_several_writers_and_no_other(staging: Staging) -> None:
    parts = [dict(list(TENSORS.items())[writer::3]) for writer in range(3)]

    def write(folder: Path, _: object) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for writer, part in enumerate(parts):
            sizes |= write_shards(folder, part.items(), writer=writer)
        (folder / "left.safetensors").write_bytes(b"of a writer that ended early")
        return sizes

    staged = staging.stage((), 1, write)
    found = shards(str(staging.root), str(staged.folder))
    assert len(found) == 3
    assert {name for file in found for name in load_file(file)} == TENSORS.keys()


def test_a_file_that_is_missing_or_shorter_than_its_writer_said_is_refused(staging: Staging) -> None:
    def stage(version: int) -> list[Path]:
        folder = staging.stage((), version, lambda folder, _: write_shards(folder, TENSORS.items(), shard_bytes=100)).folder
        return sorted(folder.glob("*.safetensors"))

    missing = stage(1)[1]
    missing.unlink()  # or not yet seen by this machine
    with pytest.raises(ValueError, match=f"{missing.name} cannot be read"):
        shards(str(staging.root), str(missing.parent))
    other, *_, cut = stage(2)
    cut.write_bytes(other.read_bytes())  # whole, but not what was written
    with pytest.raises(ValueError, match=rf"{cut.name} has \d+ bytes instead of \d+"):
        shards(str(staging.root), str(cut.parent))
    (cut.parent / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"has no manifest\.json: it was not staged completely"):
        shards(str(staging.root), str(cut.parent))


def test_a_manifest_names_no_file_outside_its_folder(staging: Staging, tmp_path: Path) -> None:
    folder = staging.stage(TENSORS.items(), 1).folder
    outside = write_shards(tmp_path, {"secret": np.zeros(2)}.items())
    (name,) = outside
    (folder / MANIFEST).write_text(f'{{"../../{name}": {outside[name]}}}')
    (inside,) = folder.glob("*.safetensors")
    inside.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        shards(str(staging.root), str(folder))


def resident(file: Path) -> int:
    """Bytes of a mapped file that this process has read, as the kernel counts them."""
    maps = Path("/proc/self/smaps").read_text().split("VmFlags")
    return sum(1024 * int(re.search(r"^Rss: +(\d+)", part, re.M)[1]) for part in maps if str(file) in part)


def test_a_part_of_a_tensor_is_read_without_the_rest(tmp_path: Path) -> None:
    """As a worker of several does, whose loader narrows each tensor to the rank's rows."""
    pytest.importorskip("torch")
    rows = np.arange(16 * 2**20, dtype=np.int32).reshape(32, 2**19)
    (name,) = write_shards(tmp_path, [("a", rows)])
    ((_, tensor),) = list(read_tensors([tmp_path / name]))
    assert resident(tmp_path / name) < rows.nbytes / 8
    np.testing.assert_array_equal(tensor.narrow(0, 4, 4).clone().numpy(), rows[4:8])
    # The kernel maps what surrounds a page too: up to 2 MB at either end.
    assert rows.nbytes / 8 <= resident(tmp_path / name) < rows.nbytes / 4


KILLED = """
import os, sys
from pathlib import Path
import numpy as np
from areal_x.engines.fleet.staging import Staging
from areal_x.hf.weight_copy import write_shards
staging = Staging(Path(sys.argv[1]))
print(staging.root, flush=True)
def write(folder, tensors):
    sizes = write_shards(folder, tensors)
    if len(list(staging.root.glob("v*"))):
        os.kill(os.getpid(), 9)  # one writer of two is done
    return sizes
for version in (1, 2):
    staging.stage([("a", np.full(5, version))], version, write)
"""


def test_a_crash_between_two_writers_leaves_nothing_that_a_server_would_load(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert killed.returncode == -9
    root = Path(killed.stdout.strip())
    assert (root / "partial" / "00000-00000.safetensors").exists()
    assert [folder.name for folder in root.glob("v*")] == ["v00000001"]
    with pytest.raises(ValueError, match="was not staged completely"):
        shards(str(root), str(root / "partial"))
    (whole,) = shards(str(root), str(root / "v00000001"))
    assert load_file(whole)["a"].tolist() == [1] * 5


def test_a_version_is_kept_until_a_newer_one_is(staging: Staging) -> None:
    first, second, third = (staging.stage(TENSORS.items(), version) for version in (1, 2, 3))
    staging.keep(second)
    assert [staged.folder.exists() for staged in (first, second, third)] == [False, True, True]
    staging.keep(None)
    assert not third.folder.exists()


def test_the_bytes_of_a_staged_version_are_those_of_its_files(staging: Staging) -> None:
    tensors = sum(tensor.nbytes for tensor in TENSORS.values())
    assert tensors < staging.stage(TENSORS.items(), 1).bytes < tensors + 1000 * len(TENSORS)


def test_closing_removes_everything(tmp_path: Path) -> None:
    staging = Staging(tmp_path)
    staging.stage(TENSORS.items(), 1)
    staging.close()
    staging.close()
    assert list(tmp_path.iterdir()) == []


def test_weights_that_end_in_an_error_leave_no_folder_behind(staging: Staging) -> None:
    def broken() -> Iterator[tuple[str, np.ndarray]]:
        yield from TENSORS.items()
        raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        staging.stage(broken(), 1)
    assert [path.name for path in staging.root.iterdir()] == ["lock"]


def test_a_full_file_system_is_one_sentence(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        # What safetensors was seen to raise on a full tmpfs.
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(staging_module, "write_shards", full)
    monkeypatch.setattr(staging, "_binding", "vllm.staging")
    with pytest.raises(UserError, match=r"no room .* set vllm\.staging to a folder with more"):
        staging.stage(TENSORS.items(), 1)
    assert [path.name for path in staging.root.iterdir()] == ["lock"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"set vllm\.staging"):
        Staging(tmp_path / "file" / "below", "vllm.staging")


OWNER = """
import sys
from pathlib import Path
from areal_x.engines.fleet.staging import Staging
staging = Staging(Path(sys.argv[1]))
print(staging.root, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_run_left_is_removed_at_the_next_start_and_a_living_runs_is_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as spared,
    ):
        try:
            dead, living = (Path(owner.stdout.readline().strip()) for owner in (killed, spared))
            assert dead.is_dir()
            assert living.is_dir()
            killed.kill()
            killed.wait()
            mine = Staging(tmp_path)
            assert not dead.exists()
            assert living.is_dir()
            mine.close()
        finally:
            killed.kill()
            spared.kill()
