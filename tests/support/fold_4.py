"""Makes tests/fixtures/fold_4.dump: a log in which everything occurs, and what fold version 4 makes of it.

    python -m tests.support.fold_4        writes the dump, and fold_4.json beside it

It was run once, when fold version 4 was new. No test runs it, and it must not be run again: the two files represent
logs that users have, so a library that needs other files cannot read those logs. A later fold version gets its own
files; protocol_2.dump and fold_3.dump are of earlier ones.

Log 1 has two groups: `billing` in at-least-once mode and `audit` in at-most-once mode. Log 0 has `archive`, which is
deleted and revived, a group for each policy that asks something of a consumer, and values from a seed that a hostile
writer might have sent. Each record is folded when it is written, and its expected verdict is asserted.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from marshal_py.errors import CoordinationError
from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.world import Group, World
from marshal_py.protocol.wire import codec, progress
from marshal_py.protocol.wire.identity import NONE, TopicPartition, route
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    ClaimingMessages,
    ClaimingPartition,
    ClaimState,
    Evict,
    Genesis,
    GroupConfig,
    Heartbeat,
    Join,
    Leave,
    Mapping,
    MessageRange,
    Move,
    Note,
    PauseWaited,
    Record,
    ReleaseGroup,
    ReleasingPartition,
    SeekingPartition,
    SetPosition,
    StepDown,
    Topology,
)
from marshal_py.transport.dump import Header, Span, Writer
from marshal_py.transport.ports import LogRecord
from tests.support import checkpoints
from tests.support.differential_log import INCARNATION, genesis
from tests.support.hostile import hostile

FIXTURES = Path(__file__).parents[1] / "fixtures"
DUMP, DIGESTS = FIXTURES / "fold_4.dump", FIXTURES / "fold_4.json"
BEGIN_MS = 1_763_700_000_000
STEP_MS = 100
LOGS = 2
SEED, UNFRIENDLY = 2, 110


class Scribe:
    """Writes one log, record by record."""

    def __init__(self, log: int, root: bytes) -> None:
        opened = codec.open_envelope(root, -1)
        assert opened is not None
        assert isinstance(opened[5], Genesis)
        self.genesis = opened[5]
        self.world = World(log, None if log == 0 else self.genesis)
        self.world.watched.update(("billing", "audit", "archive"))
        self.records: list[LogRecord] = []
        self.ms = BEGIN_MS
        self._sequence = self._instances = 0
        self.put(root)

    def put(self, value: bytes | None, group: str = "") -> str:
        """Why the value was not accepted, "" if it was."""
        offset = len(self.records)
        verdict = apply(self.world, offset, value)
        self.records.append(LogRecord(self.world.log, offset, value, self.ms, group.encode()))
        self.ms += STEP_MS
        return verdict.reason

    def say(self, group: str, record: Record, refused: str = "") -> int:
        """The offset of the record, which is accepted or refused as foreseen."""
        reason = self.put(codec.encode(record, group, self.genesis.incarnation), group)
        assert reason == refused, f"{record}: {reason or 'accepted'}"
        return len(self.records) - 1

    def copy(self, group: str, offset: int, refused: str = "") -> None:
        """The same record once more."""
        assert self.put(self.records[offset].value, group) == refused

    def group(self, name: str) -> Group:
        return self.world.groups[name]

    def join(self, group: str, client: str, mode: int, *topics: str, **fields: Any) -> int:
        self._instances += 1
        instance = (self.world.log << 64 | self._instances).to_bytes(16, "big")
        return self.say(group, Join(client, instance, mode, fields.pop("interval_ms", 1_000), topics, **fields))

    def beat(self, group: str, session: int, *claims: ClaimState, **fields: Any) -> int:
        """A heartbeat with the digests of the newest checkpoint."""
        self._sequence += 1
        digest = self.world.checkpoints.get(group)
        return self.say(group, Heartbeat(session, self._sequence, claims, digest=digest, **fields))

    def claim(self, group: str, session: int, topic: str, number: int, start: int = NONE, refused: str = "") -> int:
        known = self.group(group).partitions.get(TopicPartition(topic, number))
        observed = NONE if known is None else known.version
        return self.say(group, ClaimingPartition(session, topic, number, observed, start), refused)

    def pause(self, group: str, **fields: Any) -> int:
        change = self.group(group).pause_change
        return self.say(group, ReleaseGroup(change, change, 60_000, reason="a move", by="ada@desk", **fields))

    def snapshot(self) -> None:
        """In two chunks, the second one first, with a copy, and two witnesses (N1, N5)."""
        while len(self.records) % 16:
            self.say("billing", Note(NONE, "probe", text="waits for a checkpoint"))
        at, state, chain = len(self.records), snapshot.digest_of(self.world), self.world.chain
        data = snapshot.state_of(self.world)
        assert data is not None
        (whole,) = snapshot.split(self.genesis, bytes(16), at, state, chain, data)
        half = len(data) // 2
        parts = [
            type(whole)(self.genesis, bytes(16), at, number, 2, state, chain, piece)
            for number, piece in enumerate((data[:half], data[half:]))
        ]
        seen = [snapshot.witness(self.genesis, bytes(15) + mark, at, state, chain) for mark in (b"v", b"w")]
        for record in (parts[1], parts[0], parts[1], *seen):
            assert self.put(codec.encode(record, "", self.genesis.incarnation)) == ""


def at_least_once(scribe: Scribe) -> None:
    """`billing`: claims, progress, a hand-over, a seek, a parked partition, a move, recreated and shrunk topics."""
    name, say, beat, claim = "billing", scribe.say, scribe.beat, scribe.claim
    ada = scribe.join(
        name,
        "ada",
        AT_LEAST_ONCE,
        "orders",
        "bills",
        capacity=2,
        claims_max=9,
        rank=1,
        reads_version=1,
        library="marshal_py 0.1.0",
        witness="keeper",
    )
    say(name, Topology("orders", 4, NONE, by="ada", topic_id="orders-1"))
    bills = say(name, Topology("bills", 2, NONE))
    say(name, Topology("bills", 2, bills), "same")
    say(name, Topology("bills", 2, bills, topic_id="bills-1"))
    bob = scribe.join(name, "bob", AT_LEAST_ONCE, "orders", "bills", reads_version=2)
    zero, one = claim(name, ada, "orders", 0, 100), claim(name, ada, "orders", 1, 200)
    two, three = claim(name, bob, "orders", 2, 0), claim(name, bob, "orders", 3, 300)
    claim(name, bob, "orders", 3, refused="held")
    claim(name, bob, "orders", 4, 0, "topology")
    claim(name, bob, "bills", 0, refused="start")
    whole, pin = claim(name, bob, "bills", -1), claim(name, ada, "", -1)
    known = progress.encode(110, [Range(112, 115, 0), Range(120, 121, 3), Range(200, 10_200, 0)])
    beat(name, ada, ClaimState(zero, 110, 9_999, 7, 2, known), ClaimState(one, 200, 3, 1, 1), idle_ms=250)
    beat(name, ada, ClaimState(zero, 105, 1, 1, 1), ClaimState(two, 50))  # behind the position; not hers
    say(name, Heartbeat(ada, 0, (ClaimState(zero, 110, 9, 9, 1), ClaimState(one, 201, 2, 1, 1)), (zero,)))  # late
    beat(name, bob, ClaimState(two, 40, 60, 2, 1, progress.encode(40, [Range(41, 60, 0)])), ready=(one,))
    say(
        name,
        ReleasingPartition(
            ada,
            one,
            230,
            bob,
            "hand-over",
            attempts=1,
            in_flight=3,
            progress=progress.encode(230, [Range(233, 240, 0), Range(241, 242, 2)]),
        ),
    )
    one = claim(name, bob, "orders", 1)
    beat(name, bob, ClaimState(one, 232, 70, 0, 1, b"\x80"))  # bytes that are no list of ranges
    sought = say(name, SeekingPartition(bob, one, 20))
    scribe.copy(name, sought, "claim")
    beat(name, bob, ClaimState(one, 260), ClaimState(sought, 25, 230))
    mark = say(name, StepDown(ada, NONE, "stopping", "ada"))
    say(name, StepDown(ada, NONE), "observed")
    say(name, ReleasingPartition(bob, three, 310, parked="poison", attempts=5, in_flight=1))
    claim(name, bob, "orders", 3, refused="parked")
    config = GroupConfig(
        NONE,
        policy="greedy",
        priority_groups=("p1", "p2"),
        priority_timeout_ms=5_000,
        ack_policy="each",
        max_members=7,
        members=("m1", "m2"),
        mappings=(Mapping("m1", (0, 3)),),
        max_batch=100,
        max_expires_ms=900,
        max_bytes=1 << 20,
        max_deliver=5,
        by="ada@desk",
        on_topic_recreated="fail",
        failover_ms=700,
        lag_weighted=True,
        release_behind_ms=1_200,
    )
    say(name, config)
    assert scribe.group(name).sessions[ada].mark == NONE < mark
    say(name, config, "observed")

    token = scribe.pause(name, msg_expire_time_ms=9_000)
    say(name, ReleaseGroup(NONE, NONE, 1_000), "observed")
    claim(name, ada, "orders", 3, refused="paused")
    beat(name, bob, pause=PauseWaited(token, 400))
    say(name, SetPosition(token, (Move("orders", 0, zero, 90),)), "held")
    for session, epoch, position in ((ada, zero, 115), (bob, two, 61), (bob, sought, 30), (bob, whole, NONE)):
        say(name, ReleasingPartition(session, epoch, position, reason="paused"))
    token = scribe.pause(name)  # renewed
    moves = tuple(
        Move("orders", number, scribe.group(name).partitions[TopicPartition("orders", number)].version, to)
        for number, to in ((0, 90), (3, 311))
    )
    say(name, SetPosition(token, moves[:1] * 2), "repeats")
    moved = say(name, SetPosition(token, moves, True, "ada@desk run 1: a bad message"))
    scribe.copy(name, moved, "paused")

    token = scribe.pause(name)
    orders, bills = (scribe.group(name).topics[topic].offset for topic in ("orders", "bills"))
    say(name, Topology("bills", 3, bills, topic_id="bills-2"), "token")  # made anew
    say(name, Topology("bills", 3, bills, token, "ada@desk", "bills-2"))
    say(name, Topology("orders", 3, orders, NONE, "ada@desk"), "token")  # fewer
    say(name, Topology("orders", 3, orders, token, "ada@desk"))
    say(name, ReleaseGroup(token, NONE, 0, 59_999), "paused")
    say(name, ReleaseGroup(token, NONE, 0, 60_000, reason="waited out", by="bob"))

    one, two = claim(name, bob, "orders", 1), claim(name, ada, "orders", 2)
    say(name, ReleasingPartition(ada, pin, NONE))
    claim(name, bob, "bills", 2, 0)
    beat(name, bob, ClaimState(one, 31, 5, 1, 1))
    heard = beat(name, ada, ClaimState(two, 61, 8, 4, 1))
    scribe.ms += 1_000
    say(name, Evict(ada, heard, 1_999, "bob"), "waited")
    say(name, Evict(ada, heard - 1, 2_000, "bob"), "observed")
    scribe.ms += 1_500
    say(name, Evict(ada, heard, 2_400, "bob"))
    say(name, Heartbeat(ada, 999), "session")
    claim(name, bob, "orders", 2)
    again = scribe.join(name, "bob", AT_LEAST_ONCE, "orders", predecessor=bob)
    claim(name, again, "orders", 2)
    say(name, Note(again, "offset_lost", "orders", 2, 61, 70, "retention"))


def at_most_once(scribe: Scribe) -> None:
    """`audit`: grants of several partitions in a record, some refused; give-backs; a pause; a change of mode."""
    name, say, beat, claim = "audit", scribe.say, scribe.beat, scribe.claim
    cem = scribe.join(name, "cem", AT_MOST_ONCE, "trail", interval_ms=2_000)
    dee = scribe.join(name, "dee", AT_MOST_ONCE, "trail", claims_max=1)
    say(name, Join("eve", bytes(16), AT_LEAST_ONCE, 1_000, ("trail",)), "mode")
    say(name, Topology("trail", 3, NONE, topic_id="trail-1"))
    zero, one, two = (
        claim(name, session, "trail", number, start)
        for session, number, start in ((cem, 0, 0), (cem, 1, 500), (dee, 2, 7))
    )
    asked = say(name, ClaimingMessages(cem, (MessageRange(zero, 0, 0, 100), MessageRange(one, 500, 510, 600)), 11))
    scribe.copy(name, asked, "from")
    # Of one that is not hers, one from elsewhere, and two of which the second one follows the first.
    say(
        name,
        ClaimingMessages(
            cem,
            (
                MessageRange(two, 7, 7, 9),
                MessageRange(one, 1, 1, 2),
                MessageRange(zero, 100, 100, 150),
                MessageRange(zero, 150, 150, 4_150),
            ),
            12,
        ),
    )
    say(name, ClaimingMessages(cem, (MessageRange(one, 600, 600, 1_000_601),), 13), "range")
    say(name, ClaimingMessages(dee, (MessageRange(two, 7, 7, 107),), 2**63 - 1))
    beat(name, cem, ClaimState(zero, 9_999, 12, 30), ClaimState(one, 0, 0, 1, 9, b"\x01\x02\x00"))
    beat(name, dee, ready=(zero,))
    say(name, ReleasingPartition(cem, zero, NONE, dee, "hand-over", 4_149, 60), "observed")
    say(name, ReleasingPartition(cem, zero, NONE, dee, "hand-over", 4_150, 4_151), "range")
    say(name, ReleasingPartition(cem, zero, NONE, dee, "hand-over", 4_150, 160, in_flight=1))
    claim(name, cem, "trail", 0)
    say(name, ReleasingPartition(dee, two, NONE, cem, "stopped"))  # gives nothing back
    say(name, Leave(dee, "stopped"))
    two = claim(name, cem, "trail", 2)
    say(name, ClaimingMessages(cem, (MessageRange(two, 107, 200, 300),), 14))  # 107 to 199 do not exist
    say(name, SeekingPartition(cem, two, 1), "mode")
    token = scribe.pause(name)
    say(name, ClaimingMessages(cem, (MessageRange(two, 300, 300, 400),), 15), "paused")
    for epoch, position, give in ((one, 600, 500), (two, 300, 107)):
        say(name, ReleasingPartition(cem, epoch, NONE, NONE, "paused", position, give))
    last = next(epoch for epoch, known in scribe.group(name).claims.items() if known.owner == cem)
    say(name, ReleasingPartition(cem, last, NONE, NONE, "paused", 160, 160, parked="DataTopicRecreated"))
    say(name, GroupConfig(NONE, NONE, AT_LEAST_ONCE), "token")
    say(name, GroupConfig(NONE, token, AT_LEAST_ONCE, on_topic_recreated="earliest"))
    say(name, ReleaseGroup(token, token, 0))
    new = scribe.join(name, "cem", AT_LEAST_ONCE, "trail")
    back = claim(name, new, "trail", 0)
    beat(name, new, ClaimState(back, 161, 5, 1, 1))
    # And back again, so that the group ends at most once, with an open grant.
    token = scribe.pause(name)
    say(name, ReleasingPartition(new, back, 162, reason="paused", attempts=1))
    config = scribe.group(name).config_offset
    say(name, GroupConfig(config, token, AT_MOST_ONCE))
    say(name, ReleaseGroup(token, token, 0))
    cem = scribe.join(name, "cem", AT_MOST_ONCE, "trail")
    zero = claim(name, cem, "trail", 0)
    say(name, ClaimingMessages(cem, (MessageRange(zero, 162, 162, 262),), 16))
    beat(name, cem, ClaimState(zero, 0, 40, 12))


def deleted_and_revived(scribe: Scribe) -> None:
    """`archive`: what a deletion leaves, and what it refuses."""
    name, say = "archive", scribe.say
    fay = scribe.join(name, "fay", AT_LEAST_ONCE, "old")
    shape = say(name, Topology("old", 1, NONE))
    scribe.claim(name, fay, "old", 0, 5)
    say(name, GroupConfig(NONE, deleted=True), "sessions")
    say(name, Leave(fay))
    gone = say(name, GroupConfig(NONE, deleted=True, by="ada@desk"))
    scribe.copy(name, shape, "deleted")
    revived = say(name, GroupConfig(gone))
    token = scribe.pause(name)
    fay = scribe.join(name, "fay", AT_LEAST_ONCE, "old")
    say(name, GroupConfig(revived, NONE, deleted=True), "sessions")
    say(name, GroupConfig(revived, token, deleted=True, by="ada@desk"))  # with a session that lives
    gone = scribe.group(name).config_offset
    say(name, Leave(fay), "deleted")
    revived = say(name, GroupConfig(gone))
    scribe.copy(name, shape, "observed")
    say(name, Topology("old", 2, gone))
    fay = scribe.join(name, "fay", AT_MOST_ONCE, "old")
    scribe.beat(name, fay, ClaimState(scribe.claim(name, fay, "old", 1, 0), 0, 3))
    assert scribe.group(name).config_offset == revived


def with_policies(scribe: Scribe) -> None:
    """Groups whose settings ask something of their consumers, and what contradicts them (F1.7, F9.11)."""
    asked: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "members": ({"max_members": 4, "members": ("m1",)}, {"member": "m1"}),
        "prioritized": ({"priority_groups": ("jobs",)}, {"priority_group": "jobs", "priority": 3}),
        "overflow": (
            {"priority_groups": ("jobs",)},
            {"priority_group": "jobs", "min_pending": 5, "min_ack_pending": 6},
        ),
    }
    for policy, (settings, fields) in asked.items():
        name = next(f"{policy}-{n}" for n in range(99) if route(f"{policy}-{n}", LOGS) == scribe.world.log)
        config = scribe.say(name, GroupConfig(NONE, policy=policy, **settings))
        scribe.say(name, Join("gus", bytes(16), AT_LEAST_ONCE, 1_000, ("parts",)), "config")
        scribe.join(name, "gus", AT_LEAST_ONCE, "parts", **fields)
        scribe.say(name, GroupConfig(config, policy="greedy"), "lifelong")


def unfriendly(scribe: Scribe) -> None:
    """Whatever else a topic that is open to everybody may hold, but for what stops a log or lies about its state."""
    rng, left = Random(SEED), UNFRIENDLY
    while left:
        value = hostile(rng, scribe.world, [record.value for record in scribe.records])
        if value is not None and (len(value) > 300 or codec.open_snapshot(value) is not None):
            continue
        elsewhere = value is not None and any(value[12:].startswith(name.encode()) for name in ("billing", "grüppe"))
        if elsewhere and rng.random() < 0.9:
            continue
        try:
            scribe.put(value)
        except CoordinationError:
            continue
        left -= 1


def made() -> list[LogRecord]:
    root = genesis(LOGS)
    first, second = Scribe(0, root), Scribe(1, root)
    deleted_and_revived(first)
    with_policies(first)
    first.say("billing", Note(NONE, "probe"), "misrouted")
    unfriendly(first)
    assert second.put(None) == second.put(b"Mr no envelope") == "garbage"
    at_least_once(second)
    second.snapshot()
    assert second.put(root) == "genesis"
    at_most_once(second)
    second.snapshot()
    for name in ("billing", "audit"):
        group = second.group(name)
        second.beat(name, max(group.sessions))
    return [*first.records, *second.records]


def main() -> None:
    records = made()
    spans = tuple(Span(log, 0, sum(record.log == log for record in records)) for log in range(LOGS))
    header = Header(
        topic="__marshal",
        incarnation=INCARNATION.hex(),
        partitions=LOGS,
        logs=spans,
        time_ms=max(record.timestamp_ms for record in records),
        by="marshal_py 0.1.0",
    )
    with DUMP.open("wb") as file:
        writer = Writer(file, header)
        for record in records:
            writer.write(record)
        writer.finish()
    digests = checkpoints.by_the_oracle(DUMP)
    assert digests == checkpoints.by_the_core(DUMP)
    DIGESTS.write_text(json.dumps(digests, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(records)} records, {DUMP.stat().st_size} bytes")


if __name__ == "__main__":
    main()
