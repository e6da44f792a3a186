"""An MCP server for the tests. MODE in its environment: "" works; "hangs" never answers; "http PORT" listens there."""

import os
import sys
import threading

from mcp.server.mcpserver import MCPServer

server = MCPServer("test")


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
    """What a variable holds."""
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
    """The server's process."""
    return os.getpid()


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            server.run()
        case ["hangs"]:
            threading.Event().wait()
        case ["http", port]:
            server.run("streamable-http", host="127.0.0.1", port=int(port))
