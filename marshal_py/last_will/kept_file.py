"""The memory in which a session keeps its last will, so that it outlives the process: two slots, written in turn.

It is a file without a name, open in the consumer and in its witness alone, and it is gone with the last of them. A
process that is killed while it writes leaves one slot torn. Its checksum shows that, and the other slot has what was
kept before. What was kept earlier names lower positions only, so neither an old nor a torn slot can make a witness
release a partition beyond what is finished.
"""

from __future__ import annotations

import os
import tempfile
from struct import Struct as Pack
from typing import Final
from zlib import crc32

from msgspec import DecodeError
from msgspec.msgpack import Decoder, Encoder
from msgspec.structs import replace

from marshal_py.protocol.wire.records import LastWill

MAGIC: Final = b"MrW1"
SLOT_BYTES: Final = 8 * 1024 * 1024  # 10,000 claims with all their progress; only what is written takes memory
_HEADER: Final = Pack(">4sQII")  # magic, sequence, length, CRC-32 of the sequence and what follows
_SEQUENCE: Final = Pack(">Q")
_ENCODER: Final = Encoder()
_DECODER: Final = Decoder(LastWill | None)


class KeptFile:
    """Writes one session's will. One thread uses it."""

    def __init__(self) -> None:
        self.fd: int = _unnamed_file()
        self._sequence = 0
        self._kept: LastWill | None = None

    def keep(self, will: LastWill | None) -> bool:
        """Keeps `will` in place of the one before; None if there is nothing to do after a death. Returns False if it
        was kept already, and nothing was written."""
        if will == self._kept and self._sequence:
            return False
        shortened, body = will, _ENCODER.encode(will)
        while shortened is not None and len(body) > SLOT_BYTES - _HEADER.size:
            half = shortened.claims[: len(shortened.claims) // 2]  # the Leave frees the others
            shortened = replace(shortened, claims=half)
            body = _ENCODER.encode(shortened)
        sequence = self._sequence + 1
        checksum = crc32(body, crc32(_SEQUENCE.pack(sequence)))
        os.pwrite(self.fd, _HEADER.pack(MAGIC, sequence, len(body), checksum) + body, sequence % 2 * SLOT_BYTES)
        self._kept, self._sequence = will, sequence  # not before: a write that failed is made again, in the same slot
        return True

    def close(self) -> None:
        os.close(self.fd)


def read(fd: int) -> LastWill | None:
    """Returns the newest will that was kept whole in the file `fd`; None if there is none."""
    found = [kept for slot in (0, 1) if (kept := _read_slot(fd, slot * SLOT_BYTES)) is not None]
    return max(found, key=lambda kept: kept[0])[1] if found else None


def _read_slot(fd: int, at: int) -> tuple[int, LastWill | None] | None:
    """Returns (sequence, will) of a slot; None if it is empty or torn."""
    header = os.pread(fd, _HEADER.size, at)
    if len(header) < _HEADER.size:
        return None
    magic, sequence, length, checksum = _HEADER.unpack(header)
    if magic != MAGIC or length > SLOT_BYTES - _HEADER.size:
        return None
    body = os.pread(fd, length, at + _HEADER.size)
    if crc32(body, crc32(_SEQUENCE.pack(sequence))) != checksum:
        return None
    try:
        return sequence, _DECODER.decode(body)
    except DecodeError:
        return None


def _unnamed_file() -> int:
    """Returns the descriptor of a new file that has no name and that nobody else can open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("marshal-last-will", os.MFD_CLOEXEC)
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    with tempfile.TemporaryFile(dir=runtime if os.path.isdir(runtime) else None, buffering=0) as file:
        return os.dup(file.fileno())
