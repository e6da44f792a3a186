"""Runs a command in a network namespace that has nothing but its own loopback, where a port leads to the gateway.

    unshare --net [--map-root-user] python -I relay.py PORT SOCKET COMMAND…

What connects to 127.0.0.1:PORT in there is connected to the Unix socket, and so to the test's side, which is in another
namespace. Whoever closes, both connections are closed, so that the gateway sees a client that hangs up.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import struct
import sys

SIOCSIFFLAGS, IFF_UP = 0x8914, 1


async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass


async def joined(
    one: tuple[asyncio.StreamReader, asyncio.StreamWriter], other: tuple[asyncio.StreamReader, asyncio.StreamWriter]
) -> None:
    """Passes on what two connections say until one of them is closed."""
    tasks = [asyncio.create_task(copied(one[0], other[1])), asyncio.create_task(copied(other[0], one[1]))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        for writer in (one[1], other[1]):
            writer.close()


def raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))


async def main(port: int, path: str, command: list[str]) -> int:
    raise_loopback()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await joined((reader, writer), await asyncio.open_unix_connection(path))

    async with await asyncio.start_server(connected, "127.0.0.1", port):
        process = await asyncio.create_subprocess_exec(*command)
        # the test's signals are for the client, which has the same process group
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
        return await process.wait()


if __name__ == "__main__":
    code = asyncio.run(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
    os._exit(code if code >= 0 else 128 - code)
