"""What every container does, whoever runs it, and what each kind is started with."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from areal_x.errors import ConfigError, UserError
from areal_x.sandbox import shell
from areal_x.sandbox.containers.choice import containers_of
from areal_x.sandbox.containers.command_line import LIVE, CommandLineContainers, run_words, start_words, works
from areal_x.sandbox.containers.container import Container, ContainerError
from areal_x.sandbox.containers.limits import ContainerLimits
from areal_x.sandbox.containers.local import LocalContainers
from areal_x.sandbox.containers.remote import read_result
from areal_x.sandbox.folder import pack_files
from tests.sandbox.machines import IMAGE, KINDS, LIMITS, started

Use = Callable[[Callable[[Container], Awaitable[Any]]], Any]


@pytest.fixture(params=KINDS)
def use(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Runs an async function of a container, in each kind."""

    def run(function: Callable[[Container], Awaitable[Any]]) -> Any:
        async def inside() -> Any:
            async with started(request.param, tmp_path, monkeypatch) as container:
                return await function(container)

        return asyncio.run(inside())

    return run


def test_files_last_from_command_to_command_and_are_copied_in_and_out(use: Use) -> None:
    content = bytes(range(256)) * 40

    async def go(container: Container) -> None:
        await container.copy_in(pack_files({"a.bin": content, "sub/b.txt": "b"}), "deep/er")
        moved = await container.run(["mv", "a.bin", "../c.bin"], directory="deep/er")
        assert (moved.output, moved.code) == ("", 0)
        assert await container.copy_out("deep/c.bin") == content
        listed = await container.run(["find", ".", "-type", "f"], directory="deep")
        assert sorted(listed.output.split()) == ["./c.bin", "./er/sub/b.txt"]

    use(go)


def test_no_shell_reads_the_words_of_a_command(use: Use) -> None:
    words = ["$HOME", "; echo no", "`id`", "'\"\\", "a\nb", "--", "-e", "*", "ü", ""]

    async def go(container: Container) -> None:
        code = 'for word; do printf "<%s>" "$word"; done'
        result = await container.run(["sh", "-c", code, "sh", *words])
        assert result.output == "".join(f"<{word}>" for word in words)
        told = await container.run(["sh", "-c", 'echo "$GIVEN"'], variables={"GIVEN": "$(id) x"})
        assert told.output == "$(id) x\n"

    use(go)


def test_both_outputs_and_the_exit_status_come_back_in_order(use: Use) -> None:
    async def go(container: Container) -> None:
        result = await container.run(["sh", "-c", "echo one; echo two >&2; echo three; exit 3"])
        assert (result.output, result.code) == ("one\ntwo\nthree\n", 3)
        assert (await container.run(["no-such-program"])).code == 127
        assert (await container.run(["true"], directory="no/such/place")).code == 127

    use(go)


def test_a_command_without_end_is_ended_and_the_next_one_runs(use: Use) -> None:
    async def go(container: Container) -> None:
        began = time.monotonic()
        result = await container.run(["sh", "-c", "echo before; sleep 600"], seconds=1)
        assert (result.output, result.code) == ("before\n", None)
        assert "after 1 seconds" in str(result.error)
        assert time.monotonic() - began < 30
        assert (await container.run(["echo", "on"])).output == "on\n"

    use(go)


def test_an_exit_status_of_its_own_is_no_timeout(use: Use) -> None:
    async def go(container: Container) -> None:
        assert (await container.run(["sh", "-c", "exit 124"])).code == 124

    use(go)


def test_of_a_flood_the_first_and_the_last_part_are_kept(use: Use) -> None:
    async def go(container: Container) -> None:
        result = await container.run(["sh", "-c", "echo first; yes | head -n 100000; echo last"])
        assert result.output.startswith("first\ny\n")
        assert result.output.endswith("y\nlast\n")
        assert "200011 bytes, the first and the last 1000 are shown" in result.output
        assert len(result.output) < 2200

    use(go)


def test_what_cannot_be_copied_is_an_error_with_a_reason(use: Use) -> None:
    async def go(container: Container) -> None:
        await container.run(["sh", "-c", "head -c 3000000 /dev/zero >large; mkdir folder; mkfifo pipe || :"])
        for path in ("missing", "large", "folder"):
            with pytest.raises(ContainerError):
                await container.copy_out(path)
        with pytest.raises(ContainerError, match=r"containers\.copy_mb"):
            await container.copy_in(b"x" * 3_000_000)
        with pytest.raises(ContainerError):
            await container.copy_in(b"no archive")
        assert (await container.run(["echo", "on"])).output == "on\n"

    use(go)


def test_a_stopped_container_may_be_stopped_again(use: Use) -> None:
    async def go(container: Container) -> None:
        await container.stop()
        await container.stop()

    use(go)


def test_commands_at_once_run_one_after_the_other(use: Use) -> None:
    async def go(container: Container) -> None:
        add = ["sh", "-c", "n=$(cat n 2>/dev/null || echo 0); sleep 0.05; echo $((n + 1)) >n"]
        await asyncio.gather(*(container.run(add) for _ in range(4)))
        assert await container.copy_out("n") == b"4\n"

    use(go)


def in_local(function: Callable[[Container], Awaitable[Any]], **settings: Any) -> Any:
    async def inside() -> Any:
        containers = LocalContainers(ContainerLimits(kind="local", **settings), workers=1)
        try:
            return await function(await containers.start())
        finally:
            await containers.close()

    return asyncio.run(inside())


def test_a_local_command_beyond_the_memory_or_the_files_fails_and_the_next_one_runs() -> None:
    async def go(container: Container) -> None:
        greedy = await container.run([sys.executable, "-c", "x = bytearray(10**9)"])
        assert greedy.code == 1
        assert "MemoryError" in greedy.output
        assert (await container.run(["sh", "-c", "head -c 9000000 /dev/urandom >b"])).code == 1
        assert (await container.run(["sh", "-c", "rm b; echo on"])).output == "on\n"

    in_local(go, memory_mb=300, disk_mb=4, seconds=20)


@pytest.mark.parametrize("kind", ["podman", "docker"])
def test_a_container_beyond_its_memory_is_ended_and_reaches_no_network(kind: Any) -> None:
    if not works(kind):
        pytest.skip(f"{kind} runs no containers here")

    async def go() -> None:
        containers = containers_of(ContainerLimits(kind=kind, image=IMAGE, memory_mb=64, seconds=20, life_seconds=3))
        container = await containers.start()
        greedy = await container.run(["sh", "-c", "head -c 300000000 /dev/zero | tail -c 200000000 | wc -c"])
        assert greedy.output != "200000000\n"
        interfaces = (await container.run(["cat", "/proc/net/dev"])).output
        assert [line.split(":")[0].strip() for line in interfaces.splitlines()[2:]] == ["lo"]
        await asyncio.sleep(4)  # its life is over
        with pytest.raises(ContainerError):
            await container.run(["true"])
        await container.stop()

    asyncio.run(go())


def test_an_archive_cannot_leave_the_folder() -> None:
    async def go(container: Container) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name in ("/tmp/absolute", "../../elsewhere"):
                about = tarfile.TarInfo(name)
                about.size = 1
                tar.addfile(about, io.BytesIO(b"x"))
        with pytest.raises(ContainerError, match=r"OutsideDestination|outside of the folder"):
            await container.copy_in(packed.getvalue())

    in_local(go, disk_mb=4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("names", [("../elsewhere",), ("up", "up/elsewhere")])
def test_nor_can_it_with_a_python_whose_archives_have_no_filters(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "tar_filter", raising=False)

    def archive(*names: str) -> str:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            for name in names:
                about = tarfile.TarInfo(name)
                if name == "up":
                    about.type, about.linkname = tarfile.SYMTYPE, ".."
                tar.addfile(about)
        return base64.b64encode(packed.getvalue()).decode()

    shell.unpack(archive("/inside", "of/one"), tmp_path / "folder")
    with pytest.raises(tarfile.TarError, match="elsewhere"):
        shell.unpack(archive(*names), tmp_path / "folder")
    assert {path.name for path in tmp_path.rglob("*")} - {"up"} == {"folder", "inside", "of", "one"}


def test_a_local_container_has_no_image() -> None:
    with pytest.raises(UserError, match=r"'python:3' needs podman, Docker, Daytona or E2B"):
        asyncio.run(LocalContainers(LIMITS).start("python:3"))


def test_an_image_of_a_dataset_is_no_option() -> None:
    with pytest.raises(ContainerError, match="'--privileged' is no name of an image"):
        asyncio.run(CommandLineContainers("true", "python:3.12", ContainerLimits()).start("--privileged"))


def test_a_container_is_started_with_bounds_on_all_that_it_uses() -> None:
    words = start_words("podman", "an/image", ContainerLimits(memory_mb=64, processors=1.5, processes=7, life_seconds=90))
    assert words[:2] == ["podman", "run"]
    for option, value in (
        ("--memory", "64000000b"),
        ("--memory-swap", "64000000b"),
        ("--cpus", "1.5"),
        ("--pids-limit", "7"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--network", "none"),
    ):
        assert words[words.index(option) + 1] == value
    assert words[-5:] == ["an/image", "-c", LIVE, "sh", "90"]
    assert "--network" not in start_words("podman", "an/image", ContainerLimits(network=True))


def test_the_first_process_of_a_container_ends_in_time_and_survives_the_death_of_its_children() -> None:
    began = time.monotonic()
    asyncio.run(run_words(["sh", "-c", LIVE, "sh", "1"], 30, 10))
    assert 0.9 < time.monotonic() - began < 10


@pytest.mark.parametrize("printed", [b"", b"sh: not found\n", b"0\nx", b"x 3\nabc", b"-1 3\nabc"])
def test_an_answer_that_is_none_is_an_error(printed: bytes) -> None:
    with pytest.raises(ContainerError, match="did not run a command"):
        read_result(printed, 100, 1.0, 0.5)


def test_a_platform_that_fails_or_does_not_answer_is_an_error() -> None:
    with pytest.raises(ContainerError, match=r"sh -c: broken"):
        asyncio.run(run_words(["sh", "-c", "echo broken >&2; exit 1"], 30, 10))
    with pytest.raises(ContainerError, match=r"did not answer within 0\.1 seconds"):
        asyncio.run(run_words(["sleep", "60"], 0.1, 10))


def test_where_neither_podman_nor_docker_works_the_sandbox_is_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert isinstance(containers_of(ContainerLimits()), LocalContainers)
    with pytest.raises(UserError, match=r"`podman info` fails here"):
        containers_of(ContainerLimits(kind="podman"))
    for name in ("podman", "docker"):  # the first that works
        program = tmp_path / name
        program.write_text("#!/bin/sh\nexit 0\n")
        program.chmod(0o755)
        assert works(name)
    assert isinstance(chosen := containers_of(ContainerLimits()), CommandLineContainers)
    assert chosen._program == "podman"


@pytest.mark.parametrize("kind", ["daytona", "e2b"])
def test_without_an_sdk_it_is_a_sentence(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(UserError, match=f"pip install {kind}"):
        containers_of(ContainerLimits(kind=kind))


@pytest.mark.parametrize("name", ["seconds", "start_seconds", "life_seconds", "processors", "disk_mb", "copy_mb", "memory_mb"])
def test_limits_that_cannot_work_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"containers\.{name}"):
        ContainerLimits(**{name: 0})
    with pytest.raises(ConfigError, match=r"containers\.kind"):
        ContainerLimits(kind="chroot")  # type: ignore[arg-type]
