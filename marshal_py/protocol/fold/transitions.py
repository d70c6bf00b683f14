"""Makes changes that several rules of the fold share: free a claim, end a session, begin a generation (PROTOCOL.md 5).

Only rationalizer.py and admin_rules.py call these.
"""

from __future__ import annotations

from marshal_py.protocol.fold.world import Change, Group, Partition, Session, hash64
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import AT_MOST_ONCE


def reshape(group: Group, entry: Change) -> None:
    """Notes that an entry of the group (a topic, a session, a partition or the group itself) has changed.

    A rule of the fold calls it when more has changed than a position, counts or an extension. It adds 1 to
    `Group.shape`, by which members see that they must compute assignments again. The next digest is computed with the
    changed entry.
    """
    group.shape += 1
    group.changes.append(entry)
    group.dirty.add(entry)


def partition_of(group: Group, tp: TopicPartition) -> Partition:
    """Returns the state of a partition, which is created when a record first names the partition."""
    found = group.partitions.get(tp)
    if found is None:
        found = group.partitions[tp] = Partition(tp, hash64(tp.topic.encode()), generation=group.deleted_at + 1)
    return found


def free(group: Group, partition: Partition, successor: int, floor: int = NONE) -> None:
    """Takes a claim from its owner (F3.3, F6.4). Position, generation, version, counts and progress stay.

    `successor`: the session that should claim the partition next, or NONE. `floor`: the partition's floor from now on.
    """
    session = group.sessions[partition.owner]
    session.epochs.discard(partition.epoch)
    if partition.tp.partition >= 0:
        session.held -= 1
    del group.claims[partition.epoch]
    partition.last_owner = partition.owner
    partition.owner = partition.epoch = NONE
    partition.floor = floor
    partition.successor = successor
    reshape(group, partition)


def end_session(group: Group, session: Session) -> None:
    """Frees all claims of a session and removes the session (F3.3).

    In at-most-once mode the floors stay: what lies between floor and position is unsettled.
    """
    for epoch in tuple(session.epochs):
        partition = group.claims[epoch]
        free(group, partition, NONE, partition.floor if group.mode == AT_MOST_ONCE else NONE)
    del group.sessions[session.id]
    reshape(group, session)
    group.forget_entry(session)


def begin_generation(group: Group, partition: Partition) -> None:
    """Begins a new generation of a partition (PROTOCOL.md 5).

    Drops the counts (lag, messages in flight, deliveries), the floor and the progress of the old one; the partition is
    no longer parked.
    """
    partition.generation += 1
    partition.floor = NONE
    partition.lag = partition.in_flight = partition.attempts = 0
    partition.progress, partition.parked = b"", ""
    reshape(group, partition)


def forget_position(group: Group, partition: Partition, offset: int) -> None:
    """Removes a partition's position and makes `offset` its version (F9.2).

    So the fold refuses records that name the old version.
    """
    partition.position = NONE
    partition.version = offset
    begin_generation(group, partition)
