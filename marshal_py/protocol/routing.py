"""Group -> coordination partition (PROTOCOL.md L2). Nothing else."""

from __future__ import annotations

import mmh3

HASH_NAME = "murmur3-x86-32"  # named in the root; another name refuses (L6)


def route(group: str, partitions: int) -> int:
    """The log of `group` among `partitions` logs: MurmurHash3 x86-32, seed 0, read unsigned, modulo."""
    return mmh3.hash(group.encode(), 0, signed=False) % partitions
