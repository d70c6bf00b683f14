"""The trace of a run, as one hash: the same seed gives the same trace on every machine."""

from __future__ import annotations

from hashlib import sha256
from struct import Struct as Pack

BYTES_KEPT = 65_536

_EVENT = Pack("<qqqq").pack


class Trace:
    """Adds events up to a hash."""

    def __init__(self) -> None:
        self._hash = sha256()
        self._kept = bytearray()

    def add(self, now_ms: int, who: int, what: int, value: int) -> None:
        kept = self._kept
        kept += _EVENT(now_ms, who, what, value)
        if len(kept) > BYTES_KEPT:
            self._hash.update(kept)
            kept.clear()

    def digest(self) -> str:
        self._hash.update(self._kept)
        self._kept.clear()
        return self._hash.hexdigest()
