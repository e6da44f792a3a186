"""Certificates for tests, made by openssl, and machines of their own in network namespaces."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.cables import available, ip, remove

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@dataclass(frozen=True)
class Certificate:
    """Paths of PEM files. file: also the authority to trust."""

    file: str
    key: str


def certificate(folder: Path, *addresses: str) -> Certificate:
    made = Certificate(str(folder / "certificate.pem"), str(folder / "key.pem"))
    names = ",".join(f"IP:{address}" for address in ("127.0.0.1", *addresses))
    about = ["-subj", "/CN=a test", "-addext", f"subjectAltName={names}", "-days", "2"]
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command = ["openssl", "req", "-x509", *kind, "-keyout", made.key, "-out", made.file, *about]
    subprocess.run(command, check=True, capture_output=True)
    return made


@dataclass(frozen=True)
class OtherMachine:
    """A network namespace with a cable to this one. here: this side's address. addresses: the other side's."""

    name: str
    here: str
    addresses: tuple[str, str]

    def inside(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]


@contextmanager
def other_machine() -> Iterator[OtherMachine]:
    """Skips the test where namespaces cannot be made."""
    if os.geteuid() or not available():
        pytest.skip("only root may make network namespaces, and not everywhere")
    key = secrets.token_hex(3)
    net = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(256)}"
    made = OtherMachine(f"areal-x-{key}", f"{net}.1", (f"{net}.2", f"{net}.3"))
    ip("netns", "add", made.name)
    try:
        ip("link", "add", f"ax{key}", "type", "veth", "peer", "name", "eth0", "netns", made.name)
        ip("address", "add", f"{made.here}/24", "dev", f"ax{key}")
        ip("link", "set", f"ax{key}", "up")
        for address in made.addresses:
            ip("-n", made.name, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", made.name, "link", "set", device, "up")
        yield made
    finally:
        remove(made.name)  # and the cable with it
