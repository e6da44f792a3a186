"""The network interface by which a process reaches another one."""

from __future__ import annotations

import fcntl
import socket
import struct
from contextlib import suppress
from pathlib import Path

ADDRESS_OF = 0x8915  # SIOCGIFADDR
PORT = 9  # of nothing: a datagram socket that is connected sends nothing
IPV6 = Path("/proc/net/if_inet6")


def interface_towards(address: str) -> str | None:
    """Returns the interface with the address from which this process reaches another one; None if
    it is not known."""
    with suppress(OSError):
        family, kind, protocol, _, place = socket.getaddrinfo(
            address, PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            own = probe.getsockname()[0]
        return interface_of_ipv6(own) if family == socket.AF_INET6 else interface_of_ipv4(own)
    return None


def interface_of_ipv4(address: str) -> str | None:
    """Returns the interface whose first address this is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                asked = struct.pack("256s", name.encode())
                if socket.inet_ntoa(fcntl.ioctl(probe, ADDRESS_OF, asked)[20:24]) == address:
                    return name
    return None


def interface_of_ipv6(address: str) -> str | None:
    """Returns the interface that has this address."""
    wanted = socket.inet_pton(socket.AF_INET6, address).hex()
    rows = [line.split() for line in IPV6.read_text().splitlines()]
    return next((row[-1] for row in rows if row[0] == wanted), None)
