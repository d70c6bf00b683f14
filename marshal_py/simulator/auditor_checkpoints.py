"""What a fold held at each checkpoint (G1), and whether a digest that somebody carries is the same (S1).

Asked by the auditor, whose fold is the oracle's, and by `marshal log verify`, which folds twice and has compared the
two before. A group's digest is kept only where it changed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Final

CHECKPOINT_OFFSETS: Final = 16  # G1


class Checkpoints:
    """Of one log, from the checkpoint on at which reading begins."""

    def __init__(self, at: int = 0, chain: int = 0, states: Mapping[str, int] | None = None) -> None:
        self.first = at
        self._chains: dict[int, int] = {}
        self._states: dict[str, tuple[list[int], list[int]]] = {}  # group -> checkpoints at which it changed, digests
        self.put(at, chain, states or {})

    @property
    def newest(self) -> int:
        return max(self._chains)

    def put(self, at: int, chain: int, states: Mapping[str, int]) -> None:
        """A checkpoint; `states`: of the groups that may have changed since the one before."""
        self._chains[at] = chain
        for group, digest in states.items():
            checkpoints, digests = self._states.setdefault(group, ([], []))
            checkpoints.append(at)
            digests.append(digest)

    def chain(self, at: int) -> int | None:
        """None if there is no such checkpoint."""
        return self._chains.get(at)

    def state(self, group: str, at: int) -> int:
        """0 for a group that had no state yet (G3)."""
        checkpoints, digests = self._states.get(group, ([], []))
        known = bisect_right(checkpoints, at) - 1
        return digests[known] if known >= 0 else 0

    def states(self, at: int) -> dict[str, int]:
        """Of all groups."""
        return {group: self.state(group, at) for group in self._states}
