"""Tools of a real MCP server, started as a process or reached at a URL."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from areal_x.agents.tools.mcp_tools import McpServer
from areal_x.agents.tools.toolbox import Toolbox
from areal_x.errors import ConfigError, UserError
from tests.launching import free_port
from tests.processes import gone

pytest.importorskip("mcp")

SCRIPT = str(Path(__file__).with_name("mcp_server_script.py"))
COMMAND = (sys.executable, SCRIPT)


def answers(server, *calls, **settings):
    """Returns the results of one toolbox, one call after the other."""

    async def run():
        toolbox = Toolbox([server], **settings)
        try:
            await toolbox.setup()
            return [await toolbox.call(name, json.dumps(arguments)) for name, arguments in calls]
        finally:
            await toolbox.close()

    return asyncio.run(run())


def test_a_servers_tools_are_listed_and_called():
    async def run():
        toolbox = Toolbox([McpServer(COMMAND)])
        await toolbox.setup()
        schemas = {schema["function"]["name"]: schema["function"] for schema in toolbox.schemas}
        sums = await asyncio.gather(*(toolbox.call("add", json.dumps({"a": n, "b": 1})) for n in range(10)))
        pid = int(await toolbox.call("process", "{}"))
        await toolbox.close()
        await toolbox.close()
        return schemas, sums, pid

    schemas, sums, pid = asyncio.run(run())
    assert list(schemas) == ["add", "fails", "environment", "sleeps", "dies", "process", "answers"]
    assert schemas["add"]["description"] == "Adds two numbers."
    assert schemas["add"]["parameters"]["required"] == ["a", "b"]
    assert sums == [str(n + 1) for n in range(10)]
    assert gone(pid)


def test_mistakes_are_sentences():
    wrong, failed, slow, well = answers(
        McpServer(COMMAND),
        ("add", {"a": "x", "b": 1}),
        ("fails", {}),
        ("sleeps", {}),
        ("add", {"a": 1, "b": 1}),
        tool_seconds=4.0,
    )
    assert wrong == "The arguments of add do not fit: a: 'x' is not of type 'integer'."
    assert failed.startswith("The tool fails failed: ")
    assert slow == "The tool sleeps did not answer within 4 seconds."
    assert well == "2"


def test_a_server_that_dies_is_started_anew_for_the_next_call():
    first, died, second = answers(McpServer(COMMAND), ("process", {}), ("dies", {}), ("process", {}))
    assert died.startswith("The tool dies failed: ")
    assert first != second
    assert gone(int(first))
    assert gone(int(second))


def test_only_named_variables_reach_the_server(monkeypatch):
    monkeypatch.setenv("GIVEN", "1")
    monkeypatch.setenv("SECRET_KEY", "2")
    server = McpServer(COMMAND, variables=("GIVEN", "NOT_THERE"))
    assert answers(server, *(("environment", {"name": name}) for name in ("GIVEN", "SECRET_KEY"))) == ["1", "nothing"]


def test_some_tools_can_be_chosen_and_renamed():
    async def names(server):
        toolbox = Toolbox([server])
        try:
            await toolbox.setup()
            return [schema["function"]["name"] for schema in toolbox.schemas], await toolbox.call("my_add", '{"a": 1, "b": 2}')
        finally:
            await toolbox.close()

    assert asyncio.run(names(McpServer(COMMAND, only=("add",), prefix="my_"))) == (["my_add"], "3")
    with pytest.raises(UserError, match=r"only names 'ad', but the server has add, .*did you mean 'add'"):
        asyncio.run(names(McpServer(COMMAND, only=("ad",))))


def test_a_server_at_an_address_is_reached_with_its_key(monkeypatch):
    port = free_port()
    monkeypatch.setenv("MCP_KEY", "k")
    server = McpServer(url=f"http://127.0.0.1:{port}/mcp", key_variable="MCP_KEY")
    with subprocess.Popen([*COMMAND, "http", str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            listening = False
            while not listening:
                assert process.poll() is None
                with socket.socket() as trial:
                    listening = trial.connect_ex(("127.0.0.1", port)) == 0
            assert answers(server, ("add", {"a": 2, "b": 2})) == ["4"]
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"command": ("no-such-command-here",)}, "cannot be reached .*no-such-command-here"),
        ({"command": (sys.executable, "-c", "print('x')")}, "cannot be reached"),
        ({"command": (*COMMAND, "hangs"), "start_seconds": 0.5}, "did not answer within 0.5 seconds"),
        ({"url": "http://127.0.0.1:9/mcp"}, "cannot be reached"),
        ({"url": "http://127.0.0.1:9/mcp", "key_variable": "NO_SUCH_KEY"}, "key_variable = 'NO_SUCH_KEY'"),
    ],
)
def test_a_server_that_cannot_be_used_is_a_users_error(settings, words):
    with pytest.raises(UserError, match=words):
        answers(McpServer(**settings))


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(UserError, match="set one of the two"):
        McpServer()
    with pytest.raises(UserError, match="set one of the two"):
        McpServer(COMMAND, "http://127.0.0.1/mcp")
    with pytest.raises(UserError, match="one by one"):
        McpServer("npx server")
    with pytest.raises(ConfigError, match="start_seconds"):
        McpServer(COMMAND, start_seconds=0)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match=r"pip install 'areal-x\[mcp\]'"):
        answers(McpServer(COMMAND))


def test_a_tool_that_says_too_much_of_itself_is_refused():
    with pytest.raises(UserError, match=r"the description of its tool 'big' has \d+ characters, more than 262144"):
        answers(McpServer((*COMMAND, "many")))


def test_an_answer_is_cut_and_says_so():
    server = McpServer(COMMAND)

    async def run():
        (tool,) = [tool for tool in await server.setup() if tool.name == "answers"]
        try:
            return await tool.call({"kind": "a text"})
        finally:
            await server.close()

    text = asyncio.run(run())
    assert text.endswith("… (5737856 characters more)")
    assert text.startswith("is it is it")


def test_a_call_that_is_given_up_goes_on_nowhere():
    """And the connection serves the next call."""

    async def run():
        server = McpServer(COMMAND)
        tools = {tool.name: tool for tool in await server.setup()}
        try:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(tools["sleeps"].call({}), 0.2)
            return await tools["add"].call({"a": 1, "b": 1}), server.connection._pending
        finally:
            await server.close()

    assert asyncio.run(run()) == ("2", {})


def test_the_processes_end_with_a_run_that_is_killed(tmp_path):
    code = (
        "import asyncio, sys\n"
        "from areal_x.agents.tools.mcp_tools import McpServer\n"
        "async def run():\n"
        f"    tools = {{t.name: t for t in await McpServer({COMMAND!r}).setup()}}\n"
        "    print(await tools['process'].call({}), flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(run())"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        (worker,) = psutil.Process(process.pid).children()
        process.kill()
    while not (gone(pid) and gone(worker.pid)):
        pass
