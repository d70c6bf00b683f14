"""The digests that a fold held at each checkpoint (G1), to compare with the digests that records carry (S1).

The auditor uses it with the oracle's fold; `marshal verify` uses it after it has compared both folds. A group's
digest is kept only where it changed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Final

CHECKPOINT_OFFSETS: Final = 16  # G1


class Checkpoints:
    """The digests of one log, from the checkpoint at which reading begins."""

    def __init__(self, at: int = 0, chain: int = 0, states: Mapping[str, int] | None = None) -> None:
        self.first = at
        self._chains: dict[int, int] = {}
        self._states: dict[str, tuple[list[int], list[int]]] = {}  # group -> checkpoints at which it changed, digests
        self.put(at, chain, states or {})

    @property
    def newest(self) -> int:
        return max(self._chains)

    def put(self, at: int, chain: int, states: Mapping[str, int]) -> None:
        """Adds a checkpoint. `states` has the digests of the groups that may have changed since the last one."""
        self._chains[at] = chain
        for group, digest in states.items():
            checkpoints, digests = self._states.setdefault(group, ([], []))
            checkpoints.append(at)
            digests.append(digest)

    def chain(self, at: int) -> int | None:
        """Returns the log's chain digest at the checkpoint `at`, or None if there is no such checkpoint."""
        return self._chains.get(at)

    def state(self, group: str, at: int) -> int:
        """Returns a group's state digest at the checkpoint `at`; 0 if the group had no state yet (G3)."""
        checkpoints, digests = self._states.get(group, ([], []))
        known = bisect_right(checkpoints, at) - 1
        return digests[known] if known >= 0 else 0

    def states(self, at: int) -> dict[str, int]:
        """Returns the state digests of all groups at the checkpoint `at`."""
        return {group: self.state(group, at) for group in self._states}
