"""Gives the memory of tensors on a CPU back to the operating system, which keeps their addresses.

The tensors read as zeros from then on, and take memory again as soon as something is written to
them: what a sleeping server does on a CPU, where no CUDA memory can be unmapped. Runs inside the
processes of servers.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any


def tensors_in(caches: Any) -> list[Any]:
    """Returns the tensors in nested lists."""
    if isinstance(caches, list | tuple):
        return [tensor for part in caches for tensor in tensors_in(part)]
    return [] if caches is None else [caches]


def release(tensor: Any) -> None:
    """Gives back the whole pages of a tensor's memory, whose numbers are zeros from then on."""
    storage = tensor.untyped_storage()
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def trim() -> None:
    """Gives back what was freed and the allocator kept."""
    trim_heap = getattr(_libc(), "malloc_trim", None)  # glibc's
    if trim_heap is not None:
        trim_heap(0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
