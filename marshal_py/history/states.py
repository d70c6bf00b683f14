"""A group's whole state as plain values, and what differs between two of them. Pure.

For the evidence that a broken client keeps (client/divergence_report.py) and for whoever compares it with the log.
Entries have the names of PROTOCOL.md, 5; bodies stand as their hashes in hex, as in the digest (G3).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from marshal_py.history.explain import Cut, RawRecord, fold
from marshal_py.protocol.world import Group, Partition, World

WHOLE: Final = 10**9  # entries: what the log says is not cut
FIGURES: Final = (
    "owner",
    "epoch",
    "position",
    "generation",
    "version",
    "last_owner",
    "successor",
    "lag",
    "in_flight",
    "attempts",
    "began",
    "parked",
)


class Differing(NamedTuple):
    """One value. None: the state does not have it."""

    entry: str  # group, topic orders, session 41, partition orders:0
    field: str
    held: Any
    log: Any


def plain(group: Group | None, entries_max: int) -> dict[str, dict[str, Any]]:
    """By entry, its fields. At most so many sessions and so many partitions, the first ones."""
    if group is None:
        return {}
    found: dict[str, dict[str, Any]] = {
        "group": {
            "mode": group.mode,
            "pause_change": group.pause_change,
            "pause_duration_ms": group.pause_duration_ms,
            "config_offset": group.config_offset,
            "config": f"{group.config_hash:016x}",
            "opaque_at": group.opaque_at,
        }
    }
    for name, topic in sorted(group.topics.items()):
        found[f"topic {name}"] = {"count": topic.count, "first_count": topic.first_count, "offset": topic.offset}
    for _, session in sorted(group.sessions.items())[:entries_max]:
        found[f"session {session.id}"] = {
            "client_id": session.join.client_id,
            "join": f"{session.join_hash:016x}",
            "extended": session.extended,
            "mark": session.mark,
            "ready": list(session.ready),
        }
    for tp, partition in sorted(group.partitions.items())[:entries_max]:
        found[f"partition {tp}"] = _partition(partition)
    return found


def _partition(partition: Partition) -> dict[str, int]:
    return {name: getattr(partition, name) for name in FIGURES}


def left_out(group: Group | None, entries_max: int) -> int:
    """How many entries `plain` would not name."""
    if group is None:
        return 0
    return sum(max(0, len(entries) - entries_max) for entries in (group.sessions, group.partitions))


def differences(
    held: dict[str, dict[str, Any]], log: dict[str, dict[str, Any]], whole: bool = True
) -> Iterator[Differing]:
    """`whole`: nothing was left out of `held`, so what it does not have it did not hold."""
    entries = held.keys() | log.keys() if whole else held.keys()
    for entry in sorted(entries):
        mine, other = held.get(entry, {}), log.get(entry, {})
        for field in dict.fromkeys([*mine, *other]):
            if mine.get(field) != other.get(field):
                yield Differing(entry, field, mine.get(field), other.get(field))


def against(kept: Mapping[str, Any], world: World, records: Iterable[RawRecord]) -> list[Differing] | None:
    """What a broken client had kept (client/divergence_report.py) beside what the log folds to there.

    `world`, `records`: the group's log from as far back as it is there. None if this history, or its incarnation, is
    not the one that the client had read. Raises CoordinationError if the log cannot be folded.
    """
    for _ in fold(world, records, Cut(kept["at_offset"])):
        pass
    known = world.genesis.incarnation.hex() if world.genesis is not None else ""
    if world.next_offset != kept["at_offset"] + 1 or known != kept["incarnation"]:
        return None
    log = plain(world.groups.get(kept["group"]), WHOLE)
    return list(differences(kept["state"], log, whole=not kept["left_out"]))
