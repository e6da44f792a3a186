"""Protocol buffers' wire format, in numpy and bytes: as much of it as the API's messages use.

A message is read as its fields by number, each with its values in order, and written from parts.
Nothing is executed and nothing is allocated beyond what arrived. Source:
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from areal_x.errors import UserError

VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5
VARINT_BYTES = 10

Value = int | bytes
Fields = Mapping[int, list[Value]]


class Malformed(UserError):
    """The bytes are not a message of this kind."""


def read(data: bytes) -> Fields:
    """Returns the values of each field: an int for a varint, else its bytes.

    Raises: Malformed.
    """
    found: dict[int, list[Value]] = {}
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        value: Value
        match key & 7:
            case 0:
                value, at = _varint(data, at)
            case 1:
                value, at = _cut(data, at, 8)
            case 2:
                size, at = _varint(data, at)
                value, at = _cut(data, at, size)
            case 5:
                value, at = _cut(data, at, 4)
            case kind:
                raise Malformed(f"a field has the unknown wire type {kind}")
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for index, byte in enumerate(data[at : at + VARINT_BYTES]):
        value |= (byte & 127) << (7 * index)
        if byte < 128:
            return value, at + index + 1
    raise Malformed("a number does not end")


def _cut(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    if at + size > len(data):
        raise Malformed(f"a field of {size} bytes ends after the message")
    return data[at : at + size], at + size


# ---- values of fields


def messages(fields: Fields, number: int) -> list[bytes]:
    """Returns the values of a field of bytes, text or messages. Raises: Malformed."""
    found = fields.get(number, [])
    if not all(isinstance(x, bytes) for x in found):
        raise Malformed(f"field {number} is a number, where bytes belong")
    return [x for x in found if isinstance(x, bytes)]


def message(fields: Fields, number: int) -> bytes:
    """Returns the last value, b"" if there is none."""
    found = messages(fields, number)
    return found[-1] if found else b""


def text(fields: Fields, number: int) -> str:
    try:
        return message(fields, number).decode()
    except UnicodeDecodeError as error:
        raise Malformed(f"field {number} is not text") from error


def numbers(fields: Fields, number: int) -> list[int]:
    """Returns the values of a field of integers, packed or not. Raises: Malformed."""
    found: list[int] = []
    for value in fields.get(number, []):
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return found


def number(fields: Fields, number: int) -> int:
    """Returns the last value, 0 if there is none."""
    found = numbers(fields, number)
    return found[-1] if found else 0


def doubles(fields: Fields, number: int) -> list[float]:
    """Returns the values of a field of doubles. Raises: Malformed."""
    found = messages(fields, number)
    if any(len(x) != 8 for x in found):
        raise Malformed(f"field {number} is no double")
    return [struct.unpack("<d", x)[0] for x in found]


def entries(fields: Fields, number: int) -> dict[str, Fields]:
    """Returns the entries of a map with text keys: each as a message whose field 2 is the value."""
    pairs = (read(x) for x in messages(fields, number))
    return {text(pair, 1): pair for pair in pairs}


# ---- writing


def varint(value: int) -> bytes:
    """Writes an integer of at least 0."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def integer(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value)


def block(number: int, value: bytes | str) -> bytes:
    """Writes a field of bytes, text or a message."""
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def double(number: int, value: float) -> bytes:
    return varint(number << 3 | EIGHT_BYTES) + struct.pack("<d", value)


def entry(number: int, key: str, value: bytes) -> bytes:
    """Writes an entry of a map. value: the field 2, written."""
    return block(number, block(1, key) + value)
