"""Bytes for tests, built by hand from PROTOCOL.md: a plain MessagePack encoder and the envelope of 4.1.

It shares nothing with either implementation, so that a test cannot inherit the mistake it looks for. It builds whatever
the test asks for, also what no writer would send.
"""

import struct
import zlib

INCARNATION = bytes(range(16))
OTHER_INCARNATION = bytes(range(16, 32))
HASH_NAME = "murmur3-x86-32"


class Raw(bytes):
    """Bytes that `pack` writes as they are: MessagePack that the encoder would not choose, or none at all."""


def pack(value: object) -> bytes:
    """MessagePack in the shortest forms; tuples and lists are arrays."""
    if isinstance(value, Raw):
        return bytes(value)
    if value is None:
        return b"\xc0"
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return _pack_int(value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, bytes):
        return _header(len(value), None, 0, (0xC4, 0xC5, 0xC6)) + value
    if isinstance(value, str):
        raw = value.encode("utf-8")
        return _header(len(raw), 0xA0, 31, (0xD9, 0xDA, 0xDB)) + raw
    if isinstance(value, list | tuple):
        return _header(len(value), 0x90, 15, (None, 0xDC, 0xDD)) + b"".join(pack(element) for element in value)
    if isinstance(value, dict):
        pairs = b"".join(pack(key) + pack(element) for key, element in value.items())
        return _header(len(value), 0x80, 15, (None, 0xDE, 0xDF)) + pairs
    raise TypeError(f"no MessagePack for {type(value)}")


def _pack_int(value: int) -> bytes:
    if -32 <= value <= 127:
        return struct.pack(">b", value)
    unsigned = ((8, 0xCC, "B"), (16, 0xCD, "H"), (32, 0xCE, "I"), (64, 0xCF, "Q"))
    signed = ((7, 0xD0, "b"), (15, 0xD1, "h"), (31, 0xD2, "i"), (63, 0xD3, "q"))
    for bits, head, form in unsigned if value >= 0 else signed:
        if -(1 << bits) <= value < 1 << bits:
            return struct.pack(f">B{form}", head, value)
    raise ValueError("no MessagePack integer is that wide")


def _header(size: int, short: int | None, short_max: int, heads: tuple[int | None, int, int]) -> bytes:
    if short is not None and size <= short_max:
        return bytes([short | size])
    for head, form, limit in zip(heads, "BHI", (0xFF, 0xFFFF, 0xFFFFFFFF), strict=True):
        if head is not None and size <= limit:
            return struct.pack(f">B{form}", head, size)
    raise ValueError("too long for MessagePack")


def envelope(
    group: str | bytes,
    number: int,
    body: bytes,
    *,
    incarnation: bytes = INCARNATION,
    version: int = 1,
    record_version: int = 1,
    magic: bytes = b"Mr",
    length: int | None = None,
) -> bytes:
    """A value with a CRC that fits, whatever else is wrong with it."""
    name = group.encode("utf-8") if isinstance(group, str) else group
    tail = bytes([len(name)]) + name + bytes([record_version, number]) + body
    head = magic + bytes([version]) + struct.pack(">I", 11 + len(tail) if length is None else length)
    return head + struct.pack(">I", zlib.crc32(incarnation + head + tail)) + tail


def record(
    group: str, number: int, *fields: object, incarnation: bytes = INCARNATION, record_version: int = 1
) -> bytes:
    """A record whose body is the type and the fields."""
    return envelope(group, number, pack([number, *fields]), incarnation=incarnation, record_version=record_version)


def genesis(
    partitions: int = 1, incarnation: bytes = INCARNATION, hash_name: str = HASH_NAME, protocol: int = 2
) -> bytes:
    return record("", 0, incarnation, partitions, hash_name, protocol, incarnation=incarnation)


def snapshot(
    incarnation: bytes = INCARNATION, *, chain: int = 3, version: int = 1, record_version: int = 1, protocol: int = 2
) -> bytes:
    inner = [0, incarnation, 1, HASH_NAME, protocol]
    body = pack([14, inner, bytes(16), 16, 0, 1, 2**64 - 1, chain, b"data"])
    return envelope("", 14, body, incarnation=incarnation, version=version, record_version=record_version)
