"""Several Snapshotters over one log, in virtual time: which one writes, which ones vouch, what may be deleted."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import msgspec
import pytest

from marshal_py.protocol import duties
from marshal_py.protocol.duties import (
    CHECKPOINTS_HELD,
    RETRY_RECORDS,
    STAGGER_MS,
    STAGGER_RECORDS,
    Presence,
    SnapshotTasks,
    Snapshotter,
)
from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.fold.rationalizer import apply
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import Instant
from marshal_py.protocol.wire.records import Checkpoint, Evict, Heartbeat, Leave, Note, Snapshot
from tests.support import wire
from tests.support.differential_log import GROUP, INCARNATION, INTERVAL_MS, DifferentialLog

EVERY = 64


def at(ms: int) -> Instant:
    return Instant(ms, ms, ms)


class Process:
    """One process: a world and a keeper of its own over the common log."""

    def __init__(
        self, log: DifferentialLog, client: str, interval_ms: int = INTERVAL_MS, every: int = EVERY, least: int = EVERY
    ) -> None:
        self.log, self.client, self.interval_ms = log, client, interval_ms
        self.world = World()
        self.snapshotter = Snapshotter(self.world, every, Random(client).randbytes, least)
        self.now_ms = 0
        self.session = log.join(client)
        self.proof_ms = 0
        self.read()

    def read(self) -> None:
        while self.world.next_offset < self.log.world.next_offset:
            verdict = apply(self.world, self.world.next_offset, self.log.values[self.world.next_offset])
            self.snapshotter.folded(verdict, self.now_ms)

    def tick(self, pass_ms: int = 0) -> SnapshotTasks:
        self.read()
        self.now_ms += pass_ms
        proven = self.now_ms - self.proof_ms <= self.interval_ms
        return self.snapshotter.tick(at(self.now_ms), Presence(self.client, {self.session}, self.interval_ms, proven))

    def write(self, tasks: SnapshotTasks) -> None:
        for record in tasks.send:
            assert self.log.put(codec.encode(record, "", INCARNATION)).accepted

    def beat(self) -> None:
        """A heartbeat, which is read at once."""
        self.log.must(Heartbeat(self.session, self.log.world.next_offset))
        self.read()
        self.proof_ms = self.now_ms


def grow(log: DifferentialLog, records: int) -> None:
    for _ in range(records):
        log.must(Note(-1, "k"))


def due(log: DifferentialLog, process: Process) -> list[Snapshot]:
    """What the process sends when it ticks now, and again after the next checkpoint."""
    process.write(process.tick())
    grow(log, 16)
    tasks = process.tick()
    process.write(tasks)
    return tasks.send


def test_the_first_in_rank_writes_and_another_vouches() -> None:
    """N6, N8: one snapshot, at a checkpoint, after enough new records; the second in rank vouches in its turn."""
    log = DifferentialLog(exhaustive=False)
    one, two, three = Process(log, "one"), Process(log, "two"), Process(log, "three")
    grow(log, EVERY - log.world.next_offset - 1)
    assert not due(log, one), "not yet"
    (written,) = due(log, one)
    assert written.at % 16 == 0
    assert written.instance == one.snapshotter.instance
    assert not due(log, two)
    assert not one.tick(10 * STAGGER_MS).send, "its own, and others live: it waits for them"
    assert not two.tick(STAGGER_MS - 1).send
    tasks = two.tick(1)
    assert tasks.send == [
        snapshot.witness(written.genesis, two.snapshotter.instance, written.at, written.state, written.chain)
    ]
    two.write(tasks)
    assert not three.tick(10 * STAGGER_MS).send, "another process has"
    assert {p.snapshotter.confirmed_at for p in (one, two, three) if p.tick() is not None} == {written.at}
    assert not due(log, one), "counted from the confirmed one"


@pytest.mark.parametrize("every", [10_000, 96])
def test_a_larger_state_is_written_less_often(monkeypatch: pytest.MonkeyPatch, every: int) -> None:
    """N8: by the bytes of the newest confirmed snapshot, and at most as many records as the setting says."""
    monkeypatch.setattr(duties, "SNAPSHOT_BYTES_PER_RECORD", 1)
    log = DifferentialLog(exhaustive=False)
    one, two = Process(log, "one", every=every), Process(log, "two", every=every)
    grow(log, EVERY)
    (written,) = due(log, one)
    assert 96 < len(written.data) < 10_000
    two.tick()
    two.write(two.tick(STAGGER_MS))
    one.read()
    assert one.snapshotter.confirmed_at == written.at
    grow(log, written.at + min(every, len(written.data)) - log.world.next_offset - 1)
    assert not due(log, one)
    assert due(log, one)


def test_the_next_in_rank_writes_when_the_first_does_not() -> None:
    """N8: for each older live session it waits for so many records more."""
    log = DifferentialLog(exhaustive=False)
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
    log = DifferentialLog(exhaustive=False)
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
    log = DifferentialLog(exhaustive=False)
    one = Process(log, "one")
    grow(log, 2 * EVERY)
    one.read()
    assert not one.snapshotter.tick(at(0), Presence("one", set(), 0, True)).send
    grow(log, 16)
    one.read()
    assert not one.snapshotter.tick(at(0), Presence("one", set(), 0, True)).send


def test_nobody_vouches_for_what_it_did_not_fold() -> None:
    """N6: another state or chain, or a checkpoint that this process did not fold; and nothing unsound."""
    log = DifferentialLog(exhaustive=False)
    one, two = Process(log, "one"), Process(log, "two")
    grow(log, EVERY)
    (written,) = due(log, one)
    two.tick()
    two.snapshotter._to_judge.clear()
    for wrong in (
        msgspec.structs.replace(written, state=written.state ^ 1),
        msgspec.structs.replace(written, chain=written.chain ^ 1),
        msgspec.structs.replace(written, instance=b"9" * 16, data=written.data[:-1]),
    ):
        log.put(codec.encode(wrong, "", INCARNATION))
        tasks = two.tick()
        tasks = tasks if tasks.mismatched else two.tick(10 * STAGGER_MS)
        assert not tasks.send
        assert tasks.mismatched is not None
        assert tasks.mismatched.at == written.at
    log.put(codec.encode(msgspec.structs.replace(written, at=written.at + 1), "", INCARNATION))
    tasks = two.tick(10 * STAGGER_MS)
    assert (tasks.send, tasks.mismatched) == ([], None), "no checkpoint of ours"
    late = Process(log, "late")
    late.snapshotter._digests = {at: digests for at, digests in late.snapshotter._digests.items() if at > written.at}
    log.put(codec.encode(msgspec.structs.replace(written, instance=b"8" * 16), "", INCARNATION))
    assert not late.tick(10 * STAGGER_MS).send


def test_alone_in_the_log() -> None:
    """N6: it reads and folds the log again, and vouches for its own snapshot if that gives the same."""
    log = DifferentialLog(exhaustive=False)
    one = Process(log, "one")
    grow(log, EVERY)
    (written,) = due(log, one)
    tasks = one.tick()
    assert tasks.audit is not None
    assert tasks.audit.at == written.at
    assert one.tick().audit is None, "once"
    again = World()
    for offset in range(written.at):
        apply(again, offset, log.values[offset])
    vouched = one.snapshotter.audited(tasks.audit, again)
    assert [(record.instance, record.at, record.data) for record in vouched] == [
        (one.snapshotter.instance, written.at, b"")
    ]
    log.put(codec.encode(vouched[0], "", INCARNATION))
    one.read()
    (confirmed,) = one.snapshotter.store.confirmed()
    assert confirmed.self_audit
    assert one.snapshotter.audited(confirmed, World()) == [], "another state than re-read bytes give"
    assert one.snapshotter.audited(confirmed, None) == [], "it could not be done"


def test_not_alone_any_more() -> None:
    """N6: a session of another client lives somewhere in the log: no self audit."""
    log = DifferentialLog(exhaustive=False)
    one = Process(log, "one")
    other = log.must(log.new_join("elsewhere"), "other")
    grow(log, EVERY)
    assert due(log, one)
    assert one.tick().audit is None
    log.must(Leave(other), "other")
    assert one.tick().audit is not None


def test_nobody_writes_while_a_group_is_opaque() -> None:
    """N7: nor vouches: the checkpoint's state is not known."""
    log = DifferentialLog(exhaustive=False)
    one = Process(log, "one")
    log.put(wire.record("newer", 3, 0, record_version=3))
    grow(log, 2 * EVERY)
    assert not due(log, one)
    assert not due(log, one)


def test_a_snapshot_from_the_future_changes_nothing() -> None:
    """N1: it would be the newest one that was ever read, and no other would ever be due."""
    log = DifferentialLog(exhaustive=False)
    one, two = Process(log, "one"), Process(log, "two")
    genesis = one.world.genesis
    assert genesis is not None
    for record in (
        *snapshot.split(genesis, b"9" * 16, 1 << 40, 1, 1, b"state"),
        snapshot.witness(genesis, b"8" * 16, 1 << 40, 1, 1),
    ):
        log.put(codec.encode(record, "", INCARNATION))
    one.read()
    assert (one.snapshotter.confirmed_at, one.snapshotter.store.whole) == (-1, {})
    first = confirm(log, one, two)
    assert one.snapshotter.confirmed_at == first


def confirm(log: DifferentialLog, writer: Process, other: Process, records: int = EVERY) -> int:
    grow(log, records)
    (written,) = due(log, writer)
    other.write(other.tick(10 * STAGGER_MS))
    other.write(other.tick(10 * STAGGER_MS))
    writer.read()
    assert writer.snapshotter.confirmed_at == written.at
    return written.at


def beat(log: DifferentialLog, process: Process, at: int | None) -> None:
    digest = None if at is None else Checkpoint(at, 1, 1, 1)
    log.must(Heartbeat(process.session, log.world.next_offset, digest=digest))


def test_what_may_be_deleted() -> None:
    """N12: up to the older of the two newest confirmed ones, and no further than any live session has folded."""
    log = DifferentialLog(exhaustive=False)
    one, two = Process(log, "one"), Process(log, "two")
    assert one.snapshotter.deletable() == 0
    first = confirm(log, one, two)
    beat(log, one, first)
    beat(log, two, first)
    one.read()
    assert one.snapshotter.deletable() == 0, "there is one only"
    second = confirm(log, one, two)
    assert one.snapshotter.deletable() == first
    third = confirm(log, one, two)
    assert one.snapshotter.deletable() == first, "nobody has shown to have folded more"
    beat(log, one, third)
    one.read()
    assert one.snapshotter.deletable() == first
    beat(log, two, second)
    one.read()
    assert one.snapshotter.deletable() == second
    silent = log.must(log.new_join("three"), "other")
    one.read()
    assert one.snapshotter.deletable() == second, "its Join is newer"
    log.must(Leave(silent), "other")
    assert one.snapshotter.leads({one.session})
    assert not two.snapshotter.leads({two.session})


def test_a_session_without_a_digest_counts_by_its_join() -> None:
    """N12: without one, its Join."""
    log = DifferentialLog(exhaustive=False)
    silent = log.join("silent")
    one, two = Process(log, "one"), Process(log, "two")
    for _ in range(2):
        newest = confirm(log, one, two, EVERY + STAGGER_RECORDS)
    beat(log, one, newest)
    beat(log, two, newest)
    one.read()
    assert one.snapshotter.deletable() == silent


def test_digests_of_the_whole_state_step_by_step() -> None:
    """N3: kept from checkpoint to checkpoint, it is the one computed from nothing; few are kept."""
    log = DifferentialLog(exhaustive=False)
    one = Process(log, "one")
    for number in range(40):
        log.must(log.new_join(f"c{number}"), f"group-{number % 5}")
        grow(log, 3)
        one.read()
        if one.world.chain_at == one.world.next_offset:
            assert one.snapshotter._digests[one.world.chain_at] == (snapshot.digest_of(one.world), one.world.chain)
    grow(log, 16 * CHECKPOINTS_HELD)
    one.read()
    assert len(one.snapshotter._digests) == CHECKPOINTS_HELD
    assert log.world.groups.keys() >= {GROUP}


# --- sessions of other groups (N14)

STEP_MS = INTERVAL_MS // 10
THIRD_MS = INTERVAL_MS // 3
Evicted = list[tuple[int, str, Evict]]  # by which process, in which group


def live(
    log: DifferentialLog, processes: list[Process], for_ms: int, *others: int, write: bool = True, outage: bool = False
) -> Evicted:
    """So many ms in the life of these processes, and of sessions in the group "other"; what they evict.

    Signs of life come every third of the interval, but in an outage. `write`: evictions reach the log.
    """
    found: Evicted = []
    for number in range(for_ms // STEP_MS):
        for session in others if not outage and number % 3 == 0 else ():
            log.must(Heartbeat(session, log.world.next_offset), "other")
        for index, process in enumerate(processes):
            if not outage and number % 3 == 0:
                process.beat()
            evicts = process.tick(STEP_MS).evict
            found += [(index, group, record) for group, record in evicts]
            for group, record in evicts if write else ():
                log.must(record, group)
    return found


def test_an_orphan_does_not_stop_truncation() -> None:
    """N14: a killed one, alone in its group, is waited out and evicted; then the log is kept short again."""
    log = DifferentialLog(exhaustive=False)
    orphan = log.must(log.new_join("killed"), "other")
    one, two = Process(log, "one"), Process(log, "two")
    confirm(log, one, two, EVERY + STAGGER_RECORDS)
    newest = confirm(log, one, two, EVERY + STAGGER_RECORDS)
    for process in (one, two):
        beat(log, process, newest)
        process.read()
        assert not process.snapshotter.leads({process.session})
        assert process.snapshotter.deletable() == orphan
    assert not live(log, [one, two], 2 * INTERVAL_MS), "nobody has waited for two intervals"
    ((who, group, evict),) = live(log, [one, two], 3 * STEP_MS)
    assert (who, group) == (0, "other"), "the first in rank; the orphan, which is older, does not count"
    assert (evict.session, evict.observed, evict.by) == (orphan, orphan, "one")
    assert 2 * INTERVAL_MS <= evict.waited_ms <= 2 * INTERVAL_MS + 3 * STEP_MS
    assert not log.world.groups["other"].sessions
    one.read()
    assert one.snapshotter.leads({one.session})
    assert one.snapshotter.deletable() > orphan
    assert not live(log, [one, two], 5 * INTERVAL_MS)


def test_a_live_session_of_another_group_is_never_evicted() -> None:
    """N14: not while it shows signs of life, and not because of an outage, however long and with whatever intervals."""
    for own_ms, outage_ms in ((1_000, 1_000), (1_000, 30_000), (500, 1_000), (10_000, 9_000), (10_000, 11_000)):
        log = DifferentialLog(exhaustive=False)
        other = log.must(log.new_join("elsewhere"), "other")
        one = Process(log, "one", own_ms)
        for _ in range(3):
            assert not live(log, [one], 3 * INTERVAL_MS, other)
            assert not live(log, [one], outage_ms, other, outage=True)
        assert not live(log, [one], 10 * INTERVAL_MS, other)
        longer_ms = max(own_ms, INTERVAL_MS)
        ((_, _, evict),) = live(log, [one], 5 * longer_ms)
        assert evict.waited_ms >= 2 * longer_ms, "and when it is silent, it is"


def test_an_owner_that_has_stopped_waits_again() -> None:
    """N14: a process that ran on after a stop has read nothing meanwhile; one long step counts as a tenth (T2)."""
    log = DifferentialLog(exhaustive=False)
    log.must(log.new_join("killed"), "other")
    one = Process(log, "one")
    live(log, [one], INTERVAL_MS)
    assert not one.tick(10 * INTERVAL_MS).evict
    assert not live(log, [one], 2 * INTERVAL_MS - STEP_MS), "the stop is an unproven step"
    assert len(live(log, [one], 3 * STEP_MS)) == 1


def test_the_next_in_rank_evicts_when_the_first_does_not() -> None:
    """N14: a third of an interval later per client with an older session, as long as that one lives."""
    log = DifferentialLog(exhaustive=False)
    log.must(log.new_join("killed"), "other")
    one, two = Process(log, "one"), Process(log, "two")
    found = live(log, [one, two], 3 * INTERVAL_MS, write=False)
    waited_ms = [next(evict.waited_ms for who, _, evict in found if who == index) for index in range(2)]
    assert 2 * INTERVAL_MS <= waited_ms[0] < 2 * INTERVAL_MS + THIRD_MS <= waited_ms[1] < 3 * INTERVAL_MS
    mine = [evict.waited_ms for who, _, evict in found if who == 0]
    assert len(mine) == 3, "again every third, as long as nothing of it is read (T17)"
    log = DifferentialLog(exhaustive=False)
    log.must(log.new_join("killed"), "other")
    log.join("dead")
    two = Process(log, "two")
    ((_, _, evict),) = live(log, [two], 2 * INTERVAL_MS + 3 * STEP_MS)
    assert evict.waited_ms < 2 * INTERVAL_MS + THIRD_MS, "whom it has waited out itself does not count"


def test_sessions_that_a_snapshotter_does_not_evict() -> None:
    """N14: its own groups, where its members wait, and opaque groups, where an Evict would be ignored."""
    log = DifferentialLog(exhaustive=False)
    log.join("silent")
    log.must(log.new_join("newer"), "other")
    log.put(wire.record("other", 3, 0, record_version=3))
    one = Process(log, "one")
    assert not live(log, [one], 5 * INTERVAL_MS)
    assert len(log.group.sessions) == 2


def test_a_process_that_gets_another_interval_waits_again() -> None:
    """N14: what was waited by a shorter interval was proven for a shorter time (T2)."""
    log = DifferentialLog(exhaustive=False)
    log.must(log.new_join("killed"), "other")
    one = Process(log, "one")
    live(log, [one], 2 * INTERVAL_MS - STEP_MS)
    one.interval_ms *= 2
    assert not live(log, [one], 4 * INTERVAL_MS)
    assert len(live(log, [one], 4 * STEP_MS)) == 1


def test_a_dead_fleet_is_evicted_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """N14: so many at one look and no more; a look every tenth of an interval, however often there is a tick."""
    monkeypatch.setattr(duties, "EVICTS_MAX", 3)
    log = DifferentialLog(exhaustive=False)
    dead = [log.must(log.new_join(f"c{number}"), f"group-{number}") for number in range(7)]
    one = Process(log, "one")
    looks: list[int] = []
    look = duties.Orphans._find_silent
    monkeypatch.setattr(duties.Orphans, "_find_silent", lambda self: looks.append(one.now_ms) or look(self))
    sent: list[list[int]] = []
    while one.now_ms < 2 * INTERVAL_MS + 5 * STEP_MS:
        one.proof_ms = one.now_ms
        evicts = one.tick(1).evict
        if evicts:
            sent.append([evict.session for _, evict in evicts])
        for group, record in evicts:
            log.must(record, group)
    assert sent == [dead[:3], dead[3:6], dead[6:]]
    assert all(later - earlier == STEP_MS for earlier, later in pairwise(looks))
    assert len(one.snapshotter.orphans._waits) == 1, "the others are forgotten"
