"""Random bytes without chance: the same process draws the same bytes, another process others."""

from __future__ import annotations

from hashlib import blake2b


class DeterministicBytes:
    """The random bytes of one process. `number` distinguishes the processes, restarted ones too."""

    __slots__ = ("count", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0

    def __call__(self, size: int) -> bytes:
        self.count += 1
        return blake2b(b"%d %d" % (self.number, self.count), digest_size=size).digest()
