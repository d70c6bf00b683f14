"""Random bytes without chance: a process draws the same bytes in every run, and other bytes than other processes."""

from __future__ import annotations

from hashlib import blake2b


class DeterministicBytes:
    """Makes the random bytes of one process. Every process has its own `number`, a restarted one too."""

    __slots__ = ("count", "number")

    def __init__(self, number: int) -> None:
        self.number: int = number
        self.count: int = 0

    def __call__(self, size: int) -> bytes:
        self.count += 1
        return blake2b(b"%d %d" % (self.number, self.count), digest_size=size).digest()
