"""Computes which coordination partition, that is which log, a group belongs to (PROTOCOL.md L2)."""

from __future__ import annotations

import mmh3

HASH_NAME = "murmur3-x86-32"  # the Genesis names it; a log with another hash is refused (L6)


def route(group: str, partitions: int) -> int:
    """Returns the number of the log of `group`: its MurmurHash3 x86-32, seed 0, unsigned, modulo `partitions`."""
    return mmh3.hash(group.encode(), 0, signed=False) % partitions
