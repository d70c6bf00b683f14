"""The initial state of a run that starts from a dump: its logs, groups, topics and positions when it was taken.

The records of the dump are the history of the simulated coordination topic. Its clients are dead and write
nothing more. A long history starts at its newest confirmed snapshot, as a starting consumer reads it (PROTOCOL.md N9).
A dump holds positions of the target topics and no messages, so this file makes up a few messages after each position.
It reads a file and runs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from marshal_py.errors import CoordinationError, FileUnusable
from marshal_py.log import replay
from marshal_py.protocol.fold.world import Group, Partition, World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, Genesis
from marshal_py.transport.dump import Header, memory_transport
from marshal_py.transport.ports import CoordinationLog

READ_S: Final = 30.0  # a dump in memory answers at once
BACKLOG_MESSAGES: Final = 32  # made up after a position, at most as many as the owner's last lag
GROUPS_MAX: Final = 8  # each needs a client, and every client of a log folds all that the others write
PLACES_MAX: Final = 256  # partitions of all groups: each is claimed, fetched and judged in every run
PAUSE_MS_MAX: Final = 3_600_000  # a pause that lasts longer is not waited out in a run


class InitialLog(NamedTuple):
    """The part of one log that a starting reader needs."""

    number: int
    first: int  # 0, or the checkpoint of a confirmed snapshot
    values: tuple[bytes | None, ...]


class InitialGroup(NamedTuple):
    """One group, as it is at the end of the dump."""

    name: str
    mode: int
    topics: tuple[str, ...]


class InitialPartition(NamedTuple):
    """A partition of a target topic: the offsets of its messages, and its end."""

    offsets: tuple[int, ...]
    end: int


class DumpState(NamedTuple):
    """Everything that a run begins with."""

    root: bytes  # the root Genesis, as bytes in log 0
    partitions: int  # logs
    logs: tuple[InitialLog, ...]
    groups: tuple[InitialGroup, ...]
    counts: dict[str, int]  # partitions by topic
    targets: dict[tuple[str, int], InitialPartition]
    interval_ms: int  # the longest of a session that lived
    pause_ms: int  # the longest pause that was running


@lru_cache(maxsize=2)  # every run of a sweep starts from the same dump
def read(file: str, group: str = "") -> DumpState:
    """Returns the initial state that a dump gives; with `group`, of that group alone.

    Raises FileUnusable, also if no run can start from the dump.
    """
    header, transport = memory_transport(Path(file))
    log = transport.log(header.topic, "dump", writes=False)
    try:
        root = _root(log, file, header)
        logs, worlds = [], []
        for span in header.logs:
            if span.log < root.partitions:
                log_start, world = _initial_log(log, span.log, None if span.log == 0 else root)
                logs.append(log_start)
                worlds.append(world)
    except CoordinationError as error:
        raise FileUnusable(file, f"its history cannot be folded: {error}") from error
    groups = _groups(file, worlds, group or header.group)
    intervals_ms = [session.join.interval_ms for state in groups for session in state.sessions.values()]
    return DumpState(
        root=codec.encode(root, "", root.incarnation),
        partitions=root.partitions,
        logs=tuple(logs),
        groups=tuple(
            InitialGroup(each.name, each.mode or AT_LEAST_ONCE, tuple(sorted(each.topics))) for each in groups
        ),
        counts=_counts(groups),
        targets=_targets(groups),
        interval_ms=max(intervals_ms, default=0),
        pause_ms=max(state.pause_duration_ms for state in groups),
    )


def _root(log: CoordinationLog, file: str, header: Header) -> Genesis:
    if not any(span.first < span.end for span in header.logs):
        raise FileUnusable(file, "it holds no record")
    bounds = log.bounds(0, READ_S)
    world = replay.open_world(log, 0, None, bounds)
    root = world.genesis or replay.genesis_of(log, world, bounds.end)
    if root is None:
        raise FileUnusable(file, "log 0 has no Genesis: no consumer has ever run there")
    return root


def _initial_log(log: CoordinationLog, number: int, root: Genesis | None) -> tuple[InitialLog, World]:
    bounds = log.bounds(number, READ_S)
    world = replay.open_world(log, number, root, bounds)
    first = world.next_offset
    values = tuple(
        record.value
        for records in log.read(number, first, bounds.end, READ_S)
        for record in records
        if record.offset < bounds.end
    )
    return InitialLog(number, first, values), replay.refold(log, world, bounds.end)


def _groups(file: str, worlds: list[World], wanted: str) -> list[Group]:
    """Returns the groups that a run can start from, in the order of their names. With `wanted`, only that group."""
    known = {name: state for world in worlds for name, state in world.groups.items()}
    found = sorted(known.items())
    if wanted:
        state = known.get(wanted)
        if state is None:
            raise FileUnusable(file, f"it holds no group {wanted!r}; it has {', '.join(sorted(known)) or 'none'}")
        if (reason := _why_not(state)) is not None:
            raise FileUnusable(file, f"group {wanted!r} {reason}")
        groups = [state]
    else:
        groups = [state for _, state in found if _why_not(state) is None]
    if not groups:
        reasons = "; ".join(f"group {name!r} {_why_not(state)}" for name, state in found[:GROUPS_MAX])
        raise FileUnusable(file, reasons or "no group has begun there")
    places = sum(topic.count for state in groups for topic in state.topics.values())
    if len(groups) > GROUPS_MAX or (places > PLACES_MAX and len(groups) > 1):
        raise FileUnusable(
            file,
            f"its {len(groups)} groups with {places} partitions are more than a run can race on "
            f"({GROUPS_MAX} and {PLACES_MAX}): name one of them (--group)",
        )
    return groups


def _why_not(state: Group) -> str | None:
    """Returns the reason why no run can start from a group, or None if one can."""
    if state.opaque_at != NONE:
        return f"holds records of a newer library (offset {state.opaque_at})"
    if state.deleted:
        return "is deleted"
    if not state.topics:
        return "has no topic yet"
    if state.pause_duration_ms > PAUSE_MS_MAX:
        return (
            f"is paused for {state.pause_duration_ms // 1000} s, longer than a run lasts: resume it, and take "
            f"another dump"
        )
    return None


def _counts(groups: list[Group]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for state in groups:
        for name, topic in state.topics.items():
            counts[name] = max(topic.count, counts.get(name, 0))
    return dict(sorted(counts.items()))


def _targets(groups: list[Group]) -> dict[tuple[str, int], InitialPartition]:
    """Makes up messages after each group's position, so that old messages of a topic need not be read."""
    found: dict[tuple[str, int], InitialPartition] = {}
    for topic, count in _counts(groups).items():
        for number in range(count):
            offsets = sorted({offset for state in groups for offset in _backlog(state, topic, number)})
            positions = [part.position for state in groups for part in _parts(state, topic, number)]
            end = max([*positions, *(offset + 1 for offset in offsets), 0])
            found[topic, number] = InitialPartition(tuple(offsets), end)
    return found


def _backlog(state: Group, topic: str, number: int) -> Iterator[int]:
    for part in _parts(state, topic, number):
        if part.position >= 0:
            yield from range(part.position, part.position + min(part.lag, BACKLOG_MESSAGES))


def _parts(state: Group, topic: str, number: int) -> list[Partition]:
    return [part for tp, part in state.partitions.items() if tp == (topic, number)]
