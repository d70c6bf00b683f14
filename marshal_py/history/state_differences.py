"""Gives a group's whole state as plain values, and the differences between two such states. Pure.

A client that diverged saves its state in this form (client/driver/divergence_report.py), and `marshal explain --state`
compares it with the log. Fields are named as in PROTOCOL.md, 5; record bodies appear as their hashes in hex, as in the
digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from marshal_py.history.explain import Cut, RawRecord, fold
from marshal_py.protocol.fold.world import Group, Partition, World

NO_LIMIT: Final = 10**9  # sessions or partitions: nothing is left out of the log's own state
PARTITION_FIELDS: Final = (
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
    "floor",
    "parked",
)


class Differing(NamedTuple):
    """A field that differs: `held` in the client's state, `log` in the log's; None where it is missing."""

    entry: str  # group, topic orders, session 41, partition orders:0
    field: str
    held: Any
    log: Any


def plain_state(group: Group | None, entries_max: int) -> dict[str, dict[str, Any]]:
    """Returns the fields by entry ("session 41") of a group, its topics, sessions and partitions; {} without one. At
    most `entries_max` sessions, the oldest, and partitions, the first."""
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
    return {name: getattr(partition, name) for name in PARTITION_FIELDS}


def left_out(group: Group | None, entries_max: int) -> int:
    """Returns how many sessions and partitions `plain_state` leaves out with the same `entries_max`."""
    if group is None:
        return 0
    return sum(max(0, len(entries) - entries_max) for entries in (group.sessions, group.partitions))


def differences(
    held: dict[str, dict[str, Any]], log: dict[str, dict[str, Any]], whole: bool = True
) -> Iterator[Differing]:
    """Yields what differs between two results of `plain_state`. `whole`: `held` has every entry; else only its entries
    count."""
    entries = held.keys() | log.keys() if whole else held.keys()
    for entry in sorted(entries):
        mine, other = held.get(entry, {}), log.get(entry, {})
        for field in dict.fromkeys([*mine, *other]):
            if mine.get(field) != other.get(field):
                yield Differing(entry, field, mine.get(field), other.get(field))


def compare_with_log(kept: Mapping[str, Any], world: World, records: Iterable[RawRecord]) -> list[Differing] | None:
    """Returns how the state that a diverged client `kept` in its file differs from the log at the same offset; None if
    the log does not reach it or is another one. `world`: folded to where `records` begin. Raises CoordinationError."""
    for _ in fold(world, records, Cut(kept["at_offset"])):
        pass
    known = world.genesis.incarnation.hex() if world.genesis is not None else ""
    if world.next_offset != kept["at_offset"] + 1 or known != kept["incarnation"]:
        return None
    log = plain_state(world.groups.get(kept["group"]), NO_LIMIT)
    return list(differences(kept["state"], log, whole=not kept["left_out"]))
