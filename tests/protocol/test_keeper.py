"""Who writes snapshots, who vouches for them, what may be deleted: several Keepers over one log, in made-up time."""

from __future__ import annotations

from random import Random

import msgspec

from marshal_py.protocol import codec, snapshot
from marshal_py.protocol.keeper import (
    CHECKPOINTS_HELD,
    RETRY_RECORDS,
    STAGGER_MS,
    STAGGER_RECORDS,
    Chores,
    Keeper,
)
from marshal_py.protocol.rationalizer import apply
from marshal_py.protocol.records import Checkpoint, Heartbeat, Leave, Note, Snapshot
from marshal_py.protocol.world import World
from tests.support import wire
from tests.support.logbook import GROUP, INCARNATION, Logbook

EVERY = 64


class Process:
    """One process: a world and a keeper of its own over the common log."""

    def __init__(self, log: Logbook, client: str) -> None:
        self.log, self.client = log, client
        self.world = World()
        self.keeper = Keeper(self.world, EVERY, Random(client).randbytes)
        self.now_ms = 0
        self.session = log.join(client)
        self.read()

    def read(self) -> None:
        while self.world.next_offset < self.log.world.next_offset:
            verdict = apply(self.world, self.world.next_offset, self.log.values[self.world.next_offset])
            self.keeper.folded(verdict, self.now_ms)

    def tick(self, pass_ms: int = 0) -> Chores:
        self.read()
        self.now_ms += pass_ms
        return self.keeper.tick(self.now_ms, self.client, {self.session})

    def write(self, chores: Chores) -> None:
        for record in chores.send:
            assert self.log.put(codec.encode(record, "", INCARNATION)).accepted


def grow(log: Logbook, records: int) -> None:
    for _ in range(records):
        log.must(Note(-1, "k"))


def due(log: Logbook, process: Process) -> list[Snapshot]:
    """What the process sends when it ticks now, and once more behind the next checkpoint."""
    process.write(process.tick())
    grow(log, 16)
    chores = process.tick()
    process.write(chores)
    return chores.send


def test_the_first_in_rank_writes_and_another_vouches() -> None:
    """N6, N8: one snapshot, at a checkpoint, once so many lie behind; the second in rank vouches in its turn."""
    log = Logbook(exhaustive=False)
    one, two, three = Process(log, "one"), Process(log, "two"), Process(log, "three")
    grow(log, EVERY - log.world.next_offset - 1)
    assert not due(log, one), "not yet"
    (written,) = due(log, one)
    assert written.at % 16 == 0
    assert written.instance == one.keeper.instance
    assert not due(log, two)
    assert not one.tick(10 * STAGGER_MS).send, "its own, and others live: it waits for them"
    assert not two.tick(STAGGER_MS - 1).send
    chores = two.tick(1)
    assert chores.send == [snapshot.witness(written.genesis, two.keeper.instance, written.at, written.state,
                                            written.chain)]  # fmt: skip
    two.write(chores)
    assert not three.tick(10 * STAGGER_MS).send, "somebody else has"
    assert {p.keeper.confirmed_at for p in (one, two, three) if p.tick() is not None} == {written.at}
    assert not due(log, one), "counted from the confirmed one"


def test_the_next_in_rank_writes_when_the_first_does_not() -> None:
    """N8: for each older live session it waits for so many records more."""
    log = Logbook(exhaustive=False)
    Process(log, "one")
    two = Process(log, "two")
    grow(log, EVERY)
    assert not due(log, two)
    grow(log, STAGGER_RECORDS - 64)
    assert not due(log, two)
    grow(log, 64)
    assert due(log, two)


def test_a_snapshot_that_nobody_vouched_for() -> None:
    """N8: is followed by another one, not before so many records."""
    log = Logbook(exhaustive=False)
    one = Process(log, "one")
    Process(log, "two")
    grow(log, EVERY)
    (first,) = due(log, one)
    grow(log, RETRY_RECORDS - 64)
    assert not due(log, one)
    grow(log, 64)
    (second,) = due(log, one)
    assert second.at > first.at


def test_without_a_session() -> None:
    """N8: a process that lives in no group of the log keeps nothing."""
    log = Logbook(exhaustive=False)
    one = Process(log, "one")
    grow(log, 2 * EVERY)
    one.read()
    assert not one.keeper.tick(0, "one", set()).send
    grow(log, 16)
    one.read()
    assert not one.keeper.tick(0, "one", set()).send


def test_nobody_vouches_for_what_it_did_not_fold() -> None:
    """N6: another state or chain, or a checkpoint that this process did not fold; and nothing unsound."""
    log = Logbook(exhaustive=False)
    one, two = Process(log, "one"), Process(log, "two")
    grow(log, EVERY)
    (written,) = due(log, one)
    two.tick()
    two.keeper._judge.clear()
    for wrong in (
        msgspec.structs.replace(written, state=written.state ^ 1),
        msgspec.structs.replace(written, chain=written.chain ^ 1),
        msgspec.structs.replace(written, instance=b"9" * 16, data=written.data[:-1]),
    ):
        log.put(codec.encode(wrong, "", INCARNATION))
        chores = two.tick()
        chores = chores if chores.doubtful else two.tick(10 * STAGGER_MS)
        assert not chores.send
        assert chores.doubtful is not None
        assert chores.doubtful.at == written.at
    log.put(codec.encode(msgspec.structs.replace(written, at=written.at + 1), "", INCARNATION))
    chores = two.tick(10 * STAGGER_MS)
    assert (chores.send, chores.doubtful) == ([], None), "no checkpoint of ours"
    late = Process(log, "late")
    late.keeper._past = {at: digests for at, digests in late.keeper._past.items() if at > written.at}
    log.put(codec.encode(msgspec.structs.replace(written, instance=b"8" * 16), "", INCARNATION))
    assert not late.tick(10 * STAGGER_MS).send


def test_alone_in_the_log() -> None:
    """N6: it folds once more from re-read bytes, and vouches for its own snapshot if that gives the same."""
    log = Logbook(exhaustive=False)
    one = Process(log, "one")
    grow(log, EVERY)
    (written,) = due(log, one)
    chores = one.tick()
    assert chores.audit is not None
    assert chores.audit.at == written.at
    assert one.tick().audit is None, "once"
    again = World()
    for offset in range(written.at):
        apply(again, offset, log.values[offset])
    vouched = one.keeper.audited(chores.audit, again)
    assert [(record.instance, record.at, record.data) for record in vouched] == [(one.keeper.instance, written.at, b"")]
    log.put(codec.encode(vouched[0], "", INCARNATION))
    one.read()
    (confirmed,) = one.keeper.shelf.confirmed()
    assert confirmed.self_audit
    assert one.keeper.audited(confirmed, World()) == [], "another state than re-read bytes give"
    assert one.keeper.audited(confirmed, None) == [], "it could not be done"


def test_not_alone_any_more() -> None:
    """N6: a session of another client lives somewhere in the log: no self audit."""
    log = Logbook(exhaustive=False)
    one = Process(log, "one")
    other = log.must(log.new_join("elsewhere"), "other")
    grow(log, EVERY)
    assert due(log, one)
    assert one.tick().audit is None
    log.must(Leave(other), "other")
    assert one.tick().audit is not None


def test_nobody_writes_while_a_group_is_opaque() -> None:
    """N7: nor vouches: the checkpoint's state is not known."""
    log = Logbook(exhaustive=False)
    one = Process(log, "one")
    log.put(wire.record("newer", 3, 0, record_version=2))
    grow(log, 2 * EVERY)
    assert not due(log, one)
    assert not due(log, one)


def test_a_snapshot_from_the_future_changes_nothing() -> None:
    """N1: it would be the newest one that was ever read, and no other would ever be due."""
    log = Logbook(exhaustive=False)
    one, two = Process(log, "one"), Process(log, "two")
    genesis = one.world.genesis
    assert genesis is not None
    for record in (*snapshot.split(genesis, b"9" * 16, 1 << 40, 1, 1, b"state"),
                   snapshot.witness(genesis, b"8" * 16, 1 << 40, 1, 1)):  # fmt: skip
        log.put(codec.encode(record, "", INCARNATION))
    one.read()
    assert (one.keeper.confirmed_at, one.keeper.shelf.whole) == (-1, {})
    first = confirm(log, one, two)
    assert one.keeper.confirmed_at == first


def confirm(log: Logbook, writer: Process, other: Process, records: int = EVERY) -> int:
    grow(log, records)
    (written,) = due(log, writer)
    other.write(other.tick(10 * STAGGER_MS))
    other.write(other.tick(10 * STAGGER_MS))
    writer.read()
    assert writer.keeper.confirmed_at == written.at
    return written.at


def beat(log: Logbook, process: Process, at: int | None) -> None:
    digest = None if at is None else Checkpoint(at, 1, 1, 1)
    log.must(Heartbeat(process.session, log.world.next_offset, digest=digest))


def test_what_may_be_deleted() -> None:
    """N12: up to the older of the two newest confirmed ones, and no further than any live session has folded."""
    log = Logbook(exhaustive=False)
    one, two = Process(log, "one"), Process(log, "two")
    assert one.keeper.deletable() == 0
    first = confirm(log, one, two)
    beat(log, one, first)
    beat(log, two, first)
    one.read()
    assert one.keeper.deletable() == 0, "there is one only"
    second = confirm(log, one, two)
    assert one.keeper.deletable() == first
    third = confirm(log, one, two)
    assert one.keeper.deletable() == first, "nobody has shown to have folded more"
    beat(log, one, third)
    one.read()
    assert one.keeper.deletable() == first
    beat(log, two, second)
    one.read()
    assert one.keeper.deletable() == second
    silent = log.must(log.new_join("three"), "other")
    one.read()
    assert one.keeper.deletable() == second, "its Join is newer"
    log.must(Leave(silent), "other")
    assert one.keeper.leads({one.session})
    assert not two.keeper.leads({two.session})


def test_a_session_without_a_digest_counts_by_its_join() -> None:
    """N12: without one, its Join."""
    log = Logbook(exhaustive=False)
    silent = log.join("silent")
    one, two = Process(log, "one"), Process(log, "two")
    for _ in range(2):
        newest = confirm(log, one, two, EVERY + STAGGER_RECORDS)
    beat(log, one, newest)
    beat(log, two, newest)
    one.read()
    assert one.keeper.deletable() == silent


def test_digests_of_the_whole_state_step_by_step() -> None:
    """N3: kept from checkpoint to checkpoint, it is the one computed from nothing; few are kept."""
    log = Logbook(exhaustive=False)
    one = Process(log, "one")
    for number in range(40):
        log.must(log.new_join(f"c{number}"), f"group-{number % 5}")
        grow(log, 3)
        one.read()
        if one.world.chain_at == one.world.next_offset:
            assert one.keeper._past[one.world.chain_at] == (snapshot.digest_of(one.world), one.world.chain)
    grow(log, 16 * CHECKPOINTS_HELD)
    one.read()
    assert len(one.keeper._past) == CHECKPOINTS_HELD
    assert log.world.groups.keys() >= {GROUP}
