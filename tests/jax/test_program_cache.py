"""The bound of the cache of compiled programs, and how it is switched off."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import pytest

import areal_x_jax
from areal_x_jax.program_cache import prune


def files(folder: Path, **ages: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, age in ages.items():
        (folder / name).write_bytes(b"0123456789")
        os.utime(folder / name, (1e9 - age, 1e9 - age))


def test_what_was_used_longest_ago_is_deleted_beyond_the_limit(tmp_path: Path) -> None:
    files(tmp_path, old=3, new=1, middle=2)
    prune(tmp_path, 30)
    assert len(list(tmp_path.iterdir())) == 3
    os.utime(tmp_path / "old", (1e9, 1e9 - 3))  # it was read since
    prune(tmp_path, 29)
    assert {file.name for file in tmp_path.iterdir()} == {"old", "new"}
    prune(tmp_path / "missing", 0)


def test_programs_are_kept_where_the_users_caches_are_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(chosen: str | None, enabled: bool = True) -> str | None:
        before = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
        names = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
        try:
            for name, value in zip(names, (chosen, enabled), strict=True):
                jax.config.update(name, value)
            areal_x_jax.keep_compiled_programs()
            return jax.config.jax_compilation_cache_dir
        finally:
            for name, value in zip(names, before, strict=True):
                jax.config.update(name, value)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shortest = jax.config.jax_persistent_cache_min_compile_time_secs
    assert place(None) == str(tmp_path / "areal_x" / "jax")
    assert place(None, enabled=False) is None
    assert place("/elsewhere") == "/elsewhere"
