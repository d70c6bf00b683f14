"""What one process does for everybody: snapshots, and the sessions that nobody else would end (PROTOCOL.md N5-N14)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from msgspec import Struct, field

from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.snapshot import SnapshotStore, Stored
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, U64, Group, Session, World
from marshal_py.protocol.time import HEARTBEATS_PER_INTERVAL, WaitClock
from marshal_py.protocol.wire.identity import NONE, Instant
from marshal_py.protocol.wire.records import BY_CHARS_MAX, EVICT_INTERVALS, INSTANCE_BYTES, Evict, Heartbeat, Snapshot

# --- Evicts silent sessions of any group in a log, for groups that have no member left to do it (N14)
#
# The session of a killed process stops the confirmation of snapshots and the truncation of its whole log, and in a
# group without other consumers no member waits to evict it (T4). So every process with a session in the log waits on
# all sessions of the log. It evicts and does nothing else: partitions are claimed by the group's own members.

EVICTS_MAX: Final = 100  # per tenth of an interval: thousands of dead sessions must not fill the producer's queue


class Presence(NamedTuple):
    """The live sessions that one process has in one log."""

    client_id: str
    sessions: set[int]  # their ids
    interval_ms: int  # the longest interval of the members that have these sessions
    proven: bool  # T2: one of its members has read back a record that it sent at most one interval ago


class _Silent(NamedTuple):
    """Names a session that may be evicted: it has been silent for `waited_ms`, which is at least `need_ms`."""

    group: Group
    session: Session
    waited_ms: int
    need_ms: int


class Orphans:
    """Waits on the sessions of one log and evicts silent ones."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._clock = WaitClock(0)
        self._interval_ms = 0
        # session -> (its `extended`, the clock's value when the wait began)
        self._waits: dict[int, tuple[int, int]] = {}
        self._sent: dict[tuple[int, int], int] = {}  # (session, extended) -> when its Evict was sent, in ms
        self._look_due_ms = 0

    def tick(self, now: Instant, me: Presence) -> list[tuple[str, Evict]]:
        """Counts the time waited (T2) and checks all sessions every tenth of an interval. Returns the Evicts to send
        now, by group."""
        if me.interval_ms != self._interval_ms:  # waits counted with another interval do not compare
            self._interval_ms, self._clock = me.interval_ms, WaitClock(me.interval_ms)
            self._waits.clear()
            self._look_due_ms = now.mono_ms
        self._clock.advance(now, me.proven)
        if now.mono_ms < self._look_due_ms:
            return []
        self._look_due_ms = now.mono_ms + self._clock.step_ms_max
        silent = self._find_silent()
        self._sent = {key: sent_ms for key, sent_ms in self._sent.items() if key[0] in silent}
        return self._evict(silent, now.mono_ms, me) if silent else []

    def _find_silent(self) -> dict[int, _Silent]:
        """Returns the sessions, by id, that may be evicted. A wait begins when this process first reads a session, and
        again with each extension (T1)."""
        clock, waits, live, found = self._clock, self._waits, 0, {}
        counted_ms, least_ms = clock.counted_ms, EVICT_INTERVALS * self._interval_ms
        for group in self.world.groups.values():  # a log may have thousands of groups: no calls here
            for session in group.sessions.values():
                live += 1
                known = waits.get(session.id)
                if known is None or known[0] != session.extended:
                    waits[session.id] = (session.extended, counted_ms)
                elif counted_ms - known[1] > least_ms:
                    waited_ms = clock.waited_ms(known[1])
                    need_ms = max(least_ms, EVICT_INTERVALS * session.join.interval_ms)
                    if waited_ms >= need_ms:
                        found[session.id] = _Silent(group, session, waited_ms, need_ms)
        if len(waits) > live:
            there = {session for group in self.world.groups.values() for session in group.sessions}
            self._waits = {session: wait for session, wait in waits.items() if session in there}
        return found

    def _evict(self, silent: dict[int, _Silent], now_ms: int, me: Presence) -> list[tuple[str, Evict]]:
        """Returns the Evicts that are due, by group. Rank k waits k thirds of an interval longer, so that usually one
        process sends it (T4)."""
        due: list[tuple[str, Evict]] = []
        third_ms = self._interval_ms // HEARTBEATS_PER_INTERVAL
        rank_ms = self._rank(silent, me.sessions) * third_ms
        for number, (group, session, waited_ms, need_ms) in sorted(silent.items()):
            if group.opaque_at != NONE or not me.sessions.isdisjoint(group.sessions):
                continue  # opaque, so nobody can evict there; or this process has a member there, which evicts (T4)
            key = (number, session.extended)
            # never sent, or a third of an interval ago (T17)
            again = key not in self._sent or now_ms - self._sent[key] >= third_ms
            if waited_ms >= need_ms + rank_ms and again and len(due) < EVICTS_MAX:
                self._sent[key] = now_ms
                due.append((group.name, Evict(number, session.extended, waited_ms, me.client_id[:BY_CHARS_MAX])))
        return due

    def _rank(self, silent: dict[int, _Silent], mine: set[int]) -> int:
        """Returns how many clients have a session, not silent, that is older than all of this process's own."""
        first = min(mine)
        sessions = (session for group in self.world.groups.values() for session in group.sessions.values())
        return len({session.join.client_id for session in sessions if session.id < first and session.id not in silent})


# --- Keeps a log short: decides when a snapshot is due, who writes it, who vouches for it, and what may be deleted
#
# There is one Snapshotter per log and process (PROTOCOL.md N5-N8, N12). The driver calls `folded` after every record
# and `tick` when it has time, and carries out the SnapshotTasks. A process that came to the same digests vouches for a
# snapshot by a witness record; the snapshot is confirmed then. A silent session would block all of this, so such
# sessions are evicted (N14). A process without a session in the log writes nothing: it might end at any moment.


SNAPSHOT_EVERY_RECORDS: Final = 16_000  # at most: 0.1 to 0.3 s of folding, which a start, or a look, costs
# At least: a command that looks at all groups folds, of each log, what follows its newest snapshot.
SNAPSHOT_RECORDS_MIN: Final = 500
# So many bytes of the state make one record between two snapshots. A record has 60 and more, so snapshots are at most
# three tenths of the log, and usually much less.
SNAPSHOT_BYTES_PER_RECORD: Final = 25
# each rank waits for so many more records: by then the snapshot of the rank before was read
STAGGER_RECORDS: Final = 1_024
RETRY_RECORDS: Final = 4_096  # after so many without a witness another snapshot is written
STAGGER_MS: Final = 500  # each rank vouches so much later: by then the witness of the rank before was usually read
CHECKPOINTS_HELD: Final = 1_024  # own digests kept: a snapshot is read seconds after its checkpoint


class SnapshotTasks(Struct):
    """Lists what the driver must do after a tick."""

    send: list[Snapshot] = field(default_factory=list)  # to the log, under no group
    evict: list[tuple[str, Evict]] = field(default_factory=list)  # to the log, under the group that is named
    audit: Stored | None = None  # read and fold the log again, then call `audited` (N6)
    mismatched: Stored | None = None  # a snapshot of another process that differs from what this one folded


class Snapshotter:
    """Handles the snapshots of one log."""

    def __init__(
        self, world: World, every_records: int, draw: Callable[[int], bytes], least_records: int = SNAPSHOT_RECORDS_MIN
    ) -> None:
        """`every_records`, `least_records`: the most and the fewest between two snapshots (N8)."""
        self.world = world
        self.every_records, self.least_records = every_records, least_records
        self.instance: bytes = draw(INSTANCE_BYTES)  # a cloned machine shares it, and so cannot vouch for itself
        self.store: SnapshotStore = SnapshotStore()
        self.orphans: Orphans = Orphans(world)
        self.reported: dict[int, int] = {}  # session -> the newest checkpoint whose digest its heartbeats have named
        self._digests: dict[int, tuple[int, int]] = {}  # checkpoint -> digests of state and chain, as folded here
        self._parts = {name: snapshot.part_of(group) for name, group in world.groups.items()}
        self._total = sum(self._parts.values()) & U64
        self._touched: set[str] = set()
        self._digests[world.chain_at] = (self._total, world.chain)
        self._write_next = False  # whether to write a snapshot at the next checkpoint
        self._written: list[Snapshot] = []  # chunks to send with the next tick
        self._seen_at = NONE  # newest checkpoint of any snapshot that was read whole
        self._state_bytes = 0  # of the newest confirmed snapshot
        self._to_judge: dict[int, tuple[Stored, int]] = {}  # by checkpoint: (snapshot, ms when it was read)
        self._audits: set[int] = set()

    # --- reading

    def folded(self, verdict: Verdict, now_ms: int) -> None:
        """The driver calls this when it has folded a record into the world. `now_ms`: monotonic."""
        if verdict.group:
            self._touched.add(verdict.group)
        record = verdict.record
        if type(record) is Heartbeat:
            if record.digest is not None and not verdict.outcome:
                self.reported[record.session] = record.digest.at
        elif type(record) is Snapshot and not verdict.outcome:
            self._read(record, verdict.offset, now_ms)
        if verdict.offset % CHECKPOINT_OFFSETS == CHECKPOINT_OFFSETS - 1:
            self._checkpoint()

    def _checkpoint(self) -> None:
        world, parts, total = self.world, self._parts, self._total
        for name in self._touched:
            group = world.groups.get(name)
            if group is not None:
                fresh = snapshot.part_of(group)
                total += fresh - parts.get(name, 0)
                parts[name] = fresh
        self._touched.clear()
        self._total = total & U64
        self._digests[world.chain_at] = (self._total, world.chain)
        if len(self._digests) > CHECKPOINTS_HELD:
            del self._digests[next(iter(self._digests))]
        if self._write_next:
            self._write_next = False
            self._written += self.write() or ()

    def write(self) -> list[Snapshot] | None:
        """Returns the world, at a checkpoint, as Snapshot records (N7); None without a Genesis or with a group of
        records that are too new."""
        world, data = self.world, snapshot.state_of(self.world)
        if data is None or world.genesis is None:
            return None
        state, chain = self._digests[world.chain_at]
        return snapshot.split(world.genesis, self.instance, world.chain_at, state, chain, data)

    def _read(self, record: Snapshot, offset: int, now_ms: int) -> None:
        found = self.store.take(record, offset)
        if found is None:
            return
        self._seen_at = max(self._seen_at, found.at)
        if not found.confirmed:
            self._to_judge[found.at] = (found, now_ms)
            return
        self._to_judge.pop(found.at, None)
        kept = self.store.confirmed()[:2]
        if len(kept) == 2:
            self.store.forget_below(kept[1].at)
        self._state_bytes = len(kept[0].data) or self._state_bytes
        for stored in kept:
            stored.data = b""  # of a confirmed snapshot only the checkpoint is needed
        live = {session for group in self.world.groups.values() for session in group.sessions}
        self.reported = {session: at for session, at in self.reported.items() if session in live}

    # --- acting

    def tick(self, now: Instant, me: Presence) -> SnapshotTasks:
        """Returns the tasks that are due at `now`. `me`: this process's sessions in the log; without any, nothing is
        due."""
        tasks, sessions = SnapshotTasks(), me.sessions
        if not sessions:
            self._write_next = False
            self._written.clear()
            return tasks
        tasks.evict = self.orphans.tick(now, me)
        tasks.send, self._written = self._written, []
        if tasks.send:
            self._seen_at = max(self._seen_at, tasks.send[0].at)
        if self._due(sessions):
            self._write_next = True
        for at, (stored, since_ms) in list(self._to_judge.items()):
            self._judge_one(at, stored, now.mono_ms - since_ms, me.client_id, sessions, tasks)
        return tasks

    def _due(self, sessions: set[int]) -> bool:
        confirmed, end = self.confirmed_at, self.world.next_offset
        uncovered = end - max(confirmed, 0)
        wanted = max(self.least_records, self._state_bytes // SNAPSHOT_BYTES_PER_RECORD)
        least = min(self.every_records, wanted)
        if uncovered < least or (self._seen_at > confirmed and end < self._seen_at + RETRY_RECORDS):
            return False
        return uncovered >= least + self._rank(sessions) * STAGGER_RECORDS

    def _rank(self, sessions: set[int]) -> int:
        """Returns how many live sessions of the log are older than the oldest one of this process (N8)."""
        first = min(sessions)
        return sum(sid < first for group in self.world.groups.values() for sid in group.sessions)

    def _judge_one(
        self, at: int, stored: Stored, waited_ms: int, client_id: str, sessions: set[int], tasks: SnapshotTasks
    ) -> None:
        """Adds what to do about a snapshot that is not confirmed, and was read `waited_ms` ago (N6): vouch for it,
        report it as `mismatched`, or, if it is this process's own and no other client has a live session, audit it."""
        key, own = stored.key, self._digests.get(at)
        if own is None:
            del self._to_judge[at]
        elif own != (key.state, key.chain):
            del self._to_judge[at]
            tasks.mismatched = stored
        elif key.instance == self.instance:
            alone = all(
                session.join.client_id == client_id
                for group in self.world.groups.values()
                for session in group.sessions.values()
            )
            if alone and at not in self._audits:
                self._audits.add(at)
                tasks.audit = stored
        elif waited_ms >= self._rank(sessions) * STAGGER_MS:
            del self._to_judge[at]
            if snapshot.load(stored, self.world.log, self.world.root) is None:
                tasks.mismatched = stored
            else:
                tasks.send.append(snapshot.witness(stored.genesis, self.instance, at, key.state, key.chain))

    def audited(self, stored: Stored, again: World | None) -> list[Snapshot]:
        """The driver has folded the log again (N6): `again` is the world at the checkpoint of `stored`, None if it
        failed. Returns the witness to send; nothing if they differ."""
        self._audits.discard(stored.at)
        self._to_judge.pop(stored.at, None)
        key = stored.key
        if again is None or (snapshot.digest_of(again), again.chain) != (key.state, key.chain):
            return []
        if snapshot.load(stored, self.world.log, self.world.root) is None:
            return []
        return [snapshot.witness(stored.genesis, self.instance, stored.at, key.state, key.chain)]

    # --- what may be deleted

    @property
    def confirmed_at(self) -> int:
        """Returns the checkpoint of the newest confirmed snapshot that was read, -1 if there is none."""
        return max([stored.at for stored in self.store.whole.values() if stored.confirmed], default=NONE)

    def deletable(self) -> int:
        """Returns the offset below which records may be deleted, or 0 (N12): the checkpoint of the older of the two
        newest confirmed snapshots, or a lower one that a live session has reported."""
        confirmed = self.store.confirmed()
        if len(confirmed) < 2:
            return 0
        live = [
            self.reported.get(session, session) for group in self.world.groups.values() for session in group.sessions
        ]
        return min([confirmed[1].at, *live])

    def leads(self, sessions: set[int]) -> bool:
        """Returns whether this process has the log's oldest live session, so that it is the one that deletes (N12)."""
        return bool(sessions) and self._rank(sessions) == 0
