"""The containers of Daytona and E2B, by the interface of their real SDKs; the services themselves are not reached.

The SDKs' classes have stand-ins for their methods with the same signatures (mock.create_autospec): a call that the SDK would
refuse fails here.
"""

from __future__ import annotations

import asyncio
import inspect
import shlex
from typing import Any
from unittest import mock

import pytest

from areal_x.sandbox.containers.container import ContainerError
from areal_x.sandbox.containers.limits import ContainerLimits
from areal_x.sandbox.containers.remote import ARCHIVE, SCRIPT
from areal_x.sandbox.folder import CommandResult

LIMITS = ContainerLimits(seconds=5, life_seconds=90, memory_mb=1500, processors=1.5, disk_mb=100, copy_mb=1)


def answer(command: str) -> str:
    """What the container prints for a command of the adapter."""
    if "command -v setsid" in command:
        return "ok\n"
    if "fail" in command:
        return ""
    return "3 3\n42\n" if command.endswith("false") else "0 3\n42\n"


async def use(containers: Any) -> dict[str, Any]:
    """Does everything that a container can do."""
    container = await containers.start("an/image")
    done: dict[str, Any] = {"run": repr(await container.run(["ls", "a b; $HOME"], directory="sub", variables={"A": "1"}))}
    assert await container.run(["false"]) == CommandResult("42\n", 3)
    await container.copy_in(b"archive")
    done["content"] = (await container.copy_out("patch")).decode()
    try:
        await container.run(["fail"])
    except ContainerError as error:
        done["error"] = str(error)
    await container.stop()
    await container.stop()
    await containers.close()
    return done


async def daytona() -> dict[str, Any]:
    import daytona as sdk

    from areal_x.sandbox.containers.on_daytona import DaytonaContainers

    containers = DaytonaContainers("", LIMITS)  # the real client, which connects to nothing yet
    # the SDK's own parameters, checked by its own classes
    image, plain = containers.parameters("an/image"), containers.parameters(None)
    assert type(image) is sdk.CreateSandboxFromImageParams
    assert type(plain) is sdk.CreateSandboxFromSnapshotParams
    sandbox = mock.create_autospec(sdk.AsyncSandbox, instance=True)
    commands: list[str] = []

    async def run(command: str, **_: Any) -> Any:
        commands.append(command)
        if "fail" in command:
            raise sdk.DaytonaError("no runner")
        return sdk.ExecuteResponse(exit_code=0, result=answer(command))

    from daytona._async.filesystem import AsyncFileSystem
    from daytona._async.process import AsyncProcess

    sandbox.process = mock.create_autospec(AsyncProcess, instance=True)
    sandbox.process.exec.side_effect = run
    sandbox.fs = mock.create_autospec(AsyncFileSystem, instance=True)

    async def parts() -> Any:
        yield b"a "
        yield b"patch"

    sandbox.fs.download_file_stream.side_effect = lambda *a, **k: parts()
    inspect.signature(AsyncFileSystem.upload_files).bind(sandbox.fs, [], 600)
    create = mock.create_autospec(type(containers._client).create, return_value=sandbox)
    with mock.patch.object(type(containers._client), "create", create):
        done = await use(containers)
    (call,) = create.await_args_list
    parameters = call.args[1]
    upload = sandbox.fs.upload_file.await_args.args
    return {
        **done,
        "image": parameters.image,
        "resources": [parameters.resources.cpu, parameters.resources.memory, parameters.resources.disk],
        "offline": parameters.network_block_all,
        "minutes": parameters.ttl_minutes,
        "ephemeral": parameters.ephemeral,
        "uploaded": [upload[0].decode(), upload[1]],
        "commands": commands,
        "removed": sandbox.delete.await_count,
    }


async def e2b() -> dict[str, Any]:
    import e2b as sdk
    from e2b.sandbox_async.commands.command import Commands
    from e2b.sandbox_async.filesystem.filesystem import Filesystem

    from areal_x.sandbox.containers.on_e2b import E2BContainers

    containers = E2BContainers("", LIMITS)
    commands: list[str] = []

    async def run(command: str, **_: Any) -> Any:
        commands.append(command)
        if "fail" in command:
            raise sdk.TimeoutException("no answer")
        printed = answer(command)
        if printed.startswith("3"):  # as the SDK reports a nonzero exit status
            raise sdk.CommandExitException(stderr="", stdout=printed, exit_code=1, error=None)
        return sdk.CommandResult(stderr="", stdout=printed, exit_code=0, error=None)

    class Reader:
        async def __aenter__(self) -> Any:
            return self

        async def __aexit__(self, *_: Any) -> None: ...

        async def __aiter__(self) -> Any:
            yield b"a "
            yield b"patch"

    sandbox = mock.MagicMock()
    sandbox.commands = mock.create_autospec(Commands, instance=True)
    sandbox.commands.run.side_effect = run
    sandbox.files = mock.create_autospec(Filesystem, instance=True)

    async def read(*_: Any, **__: Any) -> Any:
        return Reader()

    sandbox.files.read.side_effect = read
    sandbox.kill = mock.AsyncMock(return_value=True)
    signature = inspect.signature(sdk.AsyncSandbox.create)

    async def create(*arguments: Any, **named: Any) -> Any:
        signature.bind(*arguments, **named)
        created.update(named)
        return sandbox

    created: dict[str, Any] = {}
    with mock.patch.object(sdk.AsyncSandbox, "create", create):
        done = await use(containers)
    upload = sandbox.files.write.await_args.args
    return {
        **done,
        "image": created["template"],
        "offline": not created["allow_internet_access"],
        "seconds": created["timeout"],
        "uploaded": [upload[1].decode(), upload[0]],
        "commands": commands,
        "removed": sandbox.kill.await_count,
    }


@pytest.mark.parametrize(("sdk", "use_it"), [("daytona", daytona), ("e2b", e2b)])
def test_every_call_fits_the_sdk(sdk: str, use_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(sdk)
    monkeypatch.setenv(f"{sdk.upper()}_API_KEY", "key")
    done = asyncio.run(use_it())
    assert done["run"] == "CommandResult(output='42\\n', code=0, error=None)"
    assert done["content"] == "a patch"
    assert done["uploaded"] == ["archive", ARCHIVE]
    assert (done["image"], done["offline"], done["removed"]) == ("an/image", True, 1)
    assert done["error"].lower().startswith(f"{sdk}: no ")
    # one text for a shell there, whose words are those that were given
    words = shlex.split(done["commands"][1])
    assert words[:3] == ["sh", "-c", SCRIPT]
    assert words[-4:] == ["env", "A=1", "ls", "a b; $HOME"]
    if sdk == "daytona":
        assert (done["resources"], done["minutes"], done["ephemeral"]) == ([2, 2, 1], 2, True)
    else:
        assert done["seconds"] == 90
