"""An MCP server for the tests. MODE in its environment: "" works; "hangs" never answers; "http PORT" listens there."""

import os
import sys
import threading

from mcp.server.mcpserver import MCPServer
from mcp_types import CallToolResult, TextContent, Tool

server = MCPServer("test")


async def listed(tools):
    return tools


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def fails() -> str:
    """Fails."""
    raise ValueError("no luck")


@server.tool()
def environment(name: str) -> str:
    """Returns the value of a variable."""
    return os.environ.get(name, "nothing")


@server.tool()
def sleeps() -> str:
    """Never answers."""
    threading.Event().wait()
    return ""


@server.tool()
def dies() -> str:
    """Ends the server."""
    os._exit(1)


@server.tool()
def process() -> int:
    """Returns the server's process id."""
    return os.getpid()


@server.tool()
def answers(kind: str) -> CallToolResult:
    """Returns far too much."""
    match kind:
        case "a text":
            return CallToolResult(content=[TextContent(type="text", text="is it " * 10**6)])
        case "many":
            return CallToolResult(content=[TextContent(type="text", text="is")] * 10**5)
        case "values":
            return CallToolResult(content=[], structured_content={"a": [[i] for i in range(10**6)]})
        case _:
            return CallToolResult(content=[TextContent(type="text", text="\\" * 10**6)], meta={str(i): i for i in range(10**5)})


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["many"]:
            properties = {f"p{i}": {"type": "string"} for i in range(10**5)}
            big = Tool(name="big", input_schema={"type": "object", "properties": properties})
            server.list_tools = lambda *_, **__: listed([big])
            server.run()
        case []:
            server.run()
        case ["hangs"]:
            threading.Event().wait()
        case ["http", port]:
            server.run("streamable-http", host="127.0.0.1", port=int(port))
