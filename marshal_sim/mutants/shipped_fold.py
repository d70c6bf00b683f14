"""The shipped fold in the place of the oracle, for hunts of bugs of the fold. mutants.py alone calls this file.

With a bug in the shipped fold alone the oracle differs from it, so S1 finds the bug at once, whatever it breaks. For a
hunt the judge folds the log by the shipped fold, too: S1 is silent, and the bug counts as found only if it breaks
another invariant. The judge reads the oracle's states, so this makes them from the shipped ones.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from marshal_py.errors import CoordinationError
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import Group as ShippedGroup
from marshal_py.protocol.fold.world import Partition as ShippedPartition
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import RECORD_TYPES, Genesis, GroupConfig, Join
from marshal_sim.oracle.oracle import Group, Oracle, Partition, Session, Topic, Verdict
from marshal_sim.oracle.snapshot import LogState
from marshal_sim.oracle.wire import decode_record, parse_envelope

JOIN: Final = RECORD_TYPES.index(Join)
CONFIG: Final = RECORD_TYPES.index(GroupConfig)


class ShippedFold(Oracle):
    """Judges the records of groups by the shipped fold. What belongs to a whole log is the oracle's."""

    def __init__(self, log: int = 0, root: bytes | None = None, expect_incarnation: bytes | None = None) -> None:
        super().__init__(log, root, expect_incarnation)
        self._world = World(log, None if root is None else _genesis(root), expect_incarnation)

    def begin_at(self, snapshot: LogState, chain: int) -> None:
        """Raises ValueError: faults that delete records are none of these hunts."""
        raise ValueError("the shipped fold judges a log from its beginning on")

    def _judge(self, offset: int, value: bytes | None) -> Verdict:
        try:
            shipped = rationalizer.apply(self._world, offset, value)
        except CoordinationError:
            return super()._judge(offset, value)  # which must stop, too
        envelope = parse_envelope(value)
        if envelope is None or not shipped.group:
            return super()._judge(offset, value)
        known = self._world.groups.get(shipped.group)
        if known is not None:
            self.groups[shipped.group] = group = _group(known)
            group.granted, group.unsettled = shipped.granted, shipped.unsettled
        record = None if shipped.record is None else decode_record(envelope.type, envelope.body)
        if record is not None and record.type == "Signed":
            record = decode_record(record.fields["kind"], record.fields["body"])
        named = shipped.outcome.name.lower()
        return Verdict(named, shipped.reason, shipped.group, record, shipped.granted, shipped.unsettled)


def _genesis(root: bytes) -> Genesis:
    envelope = codec.open_envelope(root, -1)
    assert envelope is not None
    genesis = envelope[5]
    assert isinstance(genesis, Genesis)
    return genesis


def _group(shipped: ShippedGroup) -> Group:
    config = None if shipped.config is None else decode_record(CONFIG, shipped.config_body, 2 if shipped.keys else 1)
    return Group(
        shipped.mode,
        shipped.pause_change,
        shipped.pause_duration_ms,
        config,
        shipped.config_body,
        shipped.config_offset,
        shipped.opaque_at,
        shipped.deleted_at,
        {name: Topic(one.count, one.first_count, one.offset, one.id) for name, one in shipped.topics.items()},
        {
            number: Session(
                one.id,
                decode_record(JOIN, one.join_body).fields,
                one.join_body,
                one.extended,
                one.mark,
                one.ready,
                one.idle_ms,
                one.sequence,
            )
            for number, one in shipped.sessions.items()
        },
        {(tp.topic, tp.partition): _partition(one) for tp, one in shipped.partitions.items()},
    )


def _partition(shipped: ShippedPartition) -> Partition:
    return Partition(**{one.name: getattr(shipped, one.name) for one in fields(Partition)})
