"""Reads a pickled text without unpickling: a pickle is a program that may run anything, and files of
tasks come from strangers."""

from __future__ import annotations

import base64
import binascii
import pickletools
import zlib

MOST_BYTES = 1 << 30  # of a decompressed text
TEXTS = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
# they neither make nor change a value
AROUND = ("PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP")
CONVERT = (
    "only a pickled text is read, as opcodes that are never executed: write the tests as JSON, or"
    " base64(zlib(pickle(JSON text)))"
)


def read_pickled_text(data: bytes) -> str:
    """Returns the text of a pickle that holds exactly one. Raises: ValueError for any other."""
    found: list[str] = []
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in TEXTS and not found:
                found.append(str(argument))
            elif opcode.name not in AROUND:
                raise ValueError(f"the pickle has the opcode {opcode.name} ({CONVERT})")
    except (ValueError, UnicodeDecodeError, EOFError, IndexError) as error:
        if str(error).endswith(f"({CONVERT})"):
            raise
        raise ValueError(f"the pickle is damaged ({error}; {CONVERT})") from None
    if not found:
        raise ValueError(f"the pickle holds no text ({CONVERT})")
    return found[0]


def read_compressed_text(text: str) -> str:
    """Returns the text of base64(zlib(pickle(text))).

    Raises: ValueError for anything else, and for more than 1 GiB.
    """
    try:
        packed = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"neither JSON nor base64 ({error}; {CONVERT})") from None
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(packed, MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"base64, but not zlib ({error}; {CONVERT})") from None
    if not unpacking.eof:
        raise ValueError(
            f"the compressed tests are cut off, or larger than {MOST_BYTES >> 20} MiB ({CONVERT})"
        )
    return read_pickled_text(data)
