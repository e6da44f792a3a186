"""An agent with the methods of NIXL's that Ray calls. It reads the memory of other processes of this machine, as far as they
have registered it."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

PR_SET_PTRACER = 0x59616D61
C = ctypes.CDLL(None, use_errno=True)
C.process_vm_readv.restype = ctypes.c_ssize_t
Region = tuple[int, int, int]  # address, bytes, device


class Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Descriptors(list[Region]):
    def descCount(self) -> int:
        return len(self)


class nixl_agent_config:
    def __init__(self, backends: Sequence[str] = ()) -> None: ...


class nixl_agent:
    def __init__(self, name: str, config: nixl_agent_config) -> None:
        self.name = name
        self._registered: list[Region] = []
        self._others: dict[str, tuple[int, list[Region]]] = {}
        C.prctl(PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)  # any process of this user may read

    def register_memory(self, memory: Iterable[Any], mem_type: str | None = None) -> list[Region]:
        registered = [tuple(region[:3]) for region in memory]
        self._registered += registered
        return registered

    def deregister_memory(self, registered: Iterable[Region]) -> None:
        for region in registered:
            self._registered.remove(region)

    def get_xfer_descs(self, memory: Iterable[Any], mem_type: str | None = None) -> Descriptors:
        return Descriptors((x.data_ptr(), x.nbytes, 0) if hasattr(x, "data_ptr") else tuple(x) for x in memory)

    def get_serialized_descs(self, descriptors: Descriptors) -> bytes:
        return json.dumps(descriptors).encode()

    def deserialize_descs(self, written: bytes) -> Descriptors:
        return Descriptors(tuple(region) for region in json.loads(written))

    def get_agent_metadata(self) -> bytes:
        return json.dumps([self.name, os.getpid(), self._registered]).encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        name, process, registered = json.loads(metadata)
        self._others[name] = process, registered
        return str(name)

    def remove_remote_agent(self, name: str) -> None:
        self._others.pop(name, None)

    def initialize_xfer(self, operation: str, local: Descriptors, remote: Descriptors, name: str, message: bytes) -> Any:
        process, registered = self._others[name]
        assert operation == "READ"
        check_registered(local, self._registered)
        check_registered(remote, registered)
        return process, local, remote

    def transfer(self, handle: Any) -> str:
        process, local, remote = handle
        for (to, size, _), (source, length, _) in zip(local, remote, strict=True):
            assert size == length
            read(process, source, to, size)
        return "DONE"

    def check_xfer_state(self, handle: Any) -> str:
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None: ...


def check_registered(regions: Iterable[Region], registered: Iterable[Sequence[int]]) -> None:
    for address, size, _ in regions:
        if not any(x[0] <= address and address + size <= x[0] + x[1] for x in registered):
            raise RuntimeError("NIXL_ERR_NOT_FOUND")


def read(process: int, source: int, to: int, size: int) -> None:
    """Copies memory of another process into this one's."""
    done = 0
    while done < size:
        here, there = Vector(to + done, size - done), Vector(source + done, size - done)
        count = C.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done += count
