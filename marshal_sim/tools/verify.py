"""Folds a log twice, by the rationalizer and by the oracle, and compares both with each other and with the log.

It compares every verdict; at every checkpoint the chain digest and the digests of the groups that records have named;
at the end all groups; and each digest that a heartbeat or a snapshot carries with the fold's (PROTOCOL.md 6, N3). The
two folds share no code. If they agree, the log means what PROTOCOL.md says. If a heartbeat disagrees, its sender has
read another log or folded it otherwise. A log whose beginning was deleted is folded from the oldest confirmed snapshot
that both folds find sound. The first difference ends the comparison of that log, because everything after it may follow
from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from marshal_py.errors import CoordinationError
from marshal_py.protocol.fold import rationalizer, snapshot
from marshal_py.protocol.fold.rationalizer import Verdict
from marshal_py.protocol.fold.snapshot import SnapshotStore, Stored
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, FOLD_VERSION, World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import Checkpoint, Genesis, Heartbeat, Snapshot
from marshal_py.transport.ports import LogRecord
from marshal_sim.judge.checkpoints import Checkpoints
from marshal_sim.oracle.oracle import Oracle, OracleStop
from marshal_sim.oracle.snapshot import LogState, Snapshots
from marshal_sim.oracle.wire import decode_record


class Difference(Struct, frozen=True):
    """Names the first offset of a log at which a comparison failed. `group` is "" if the whole log is concerned."""

    log: int
    offset: int
    group: str
    what: str
    found: str
    expected: str


class Comparison(Struct):
    """The counts of what was compared, and the differences: the first one of each log."""

    logs: int = 0
    records: int = 0
    groups: int = 0
    checkpoints: int = 0
    digests: int = 0  # state digests of groups that were compared between the folds
    heartbeat_digests: int = 0  # digests in heartbeats that were compared
    snapshot_digests: int = 0  # digests in snapshots and witnesses that were compared
    other_fold_versions: int = 0  # digests in heartbeats of other fold versions, not compared (G4)
    differences: list[Difference] = []
    begins: dict[int, int] = {}  # by log: the checkpoint of the snapshot that a truncated one was folded from

    @property
    def ok(self) -> bool:
        return not self.differences


class TwoFolds:
    """Folds one log by both folds and compares them."""

    log: int
    report: Comparison

    def __init__(
        self, log: int, root: Genesis | None, root_value: bytes | None, report: Comparison, each: bool = False
    ) -> None:
        """Begins at the start of the log. `root` and `root_value` are the root Genesis and its bytes, for every log but
        0 (L4).

        With `each`, a group is compared after every record that names it, and not only at checkpoints. The cost grows
        with the partitions of the group.
        """
        self._each = each
        self._known: dict[str, int] = {}  # with `each`: the digest of a group after the last record that named it
        self.difference: Difference | None = None
        self.log, self.report = log, report
        self._world = World(log, None if log == 0 else root)
        self._oracle = Oracle(log, None if log == 0 else root_value)
        self._touched: set[str] = set()  # groups that a record since the last checkpoint named
        self._checkpoints = Checkpoints()
        self._totals = {0: 0}  # digest of the whole state (N3), by checkpoint
        self._parts: dict[str, int] = {}

    def begin(self, stored: Stored, state: LogState) -> bool:
        """Continues from a snapshot, which each fold reads in its own way (N9). Returns False if the snapshot is not
        sound.
        """
        world = snapshot.load(stored, self.log, self._world.root)
        if world is None:
            return False
        self._world = world
        self._oracle.begin_at(state, stored.key.chain)
        digests = {name: group.digest() for name, group in world.groups.items()}
        self._checkpoints = Checkpoints(stored.at, stored.key.chain, digests)
        self._totals = {stored.at: stored.key.state}
        self._parts = {name: snapshot.part_of(group) for name, group in world.groups.items()}
        return True

    def put(self, offset: int, value: bytes | None) -> None:
        """Folds the next record and compares. If the folds differ, `difference` is set."""
        if self.difference is not None:
            return
        self.report.records += 1
        stopped = ["", ""]
        try:
            verdict = rationalizer.apply(self._world, offset, value)
        except CoordinationError as error:
            stopped[0] = str(error)
        try:
            judged = self._oracle.apply(offset, value)
        except OracleStop as stop:
            stopped[1] = str(stop)
        if any(stopped):
            what = "the log cannot be folded further" if all(stopped) else "only one of the folds stops here"
            self._differs(offset, "", what, stopped[0] or "continues", stopped[1] or "continues")
            return
        ours = (verdict.outcome.name.lower(), verdict.reason, verdict.group)
        theirs = (judged.outcome, judged.reason, judged.group or "")
        if ours != theirs:
            found, expected = (" ".join(filter(None, said)) for said in (ours, theirs))
            self._differs(offset, verdict.group, "verdict", found, expected)
            return
        if isinstance(verdict.record, Heartbeat) and verdict.record.digest is not None:
            self._check_carried(offset, verdict.group, verdict.record.digest)
        elif isinstance(verdict.record, Snapshot) and verdict.accepted:
            self._check_snapshot(offset, verdict.record)
        if self._each and self.difference is None:
            self._check_record(offset, verdict)
        self._touched.add(verdict.group)
        if (offset + 1) % CHECKPOINT_OFFSETS == 0 and self.difference is None:
            self._check_block(offset)

    def _check_record(self, offset: int, verdict: Verdict) -> None:
        """Checks that both folds hold the same group, and that a record that was not accepted left it unchanged
        (F10.1).
        """
        name = verdict.group
        group = self._world.groups.get(name)
        if group is None:
            return
        digest, theirs, known = group.digest(), self._oracle.state_digest(name), self._known.get(name)
        self._known[name] = digest
        self.report.digests += 1
        if digest != theirs:
            self._differs(offset, name, "state digest", f"{digest:016x}", f"{theirs:016x}")
        elif not verdict.accepted and verdict.reason != "opaque" and known not in (None, digest):
            self._differs(
                offset, name, "a record that is not accepted changes the state", f"{digest:016x}", f"{known:016x}"
            )

    def finish(self) -> None:
        """Compares every group at the end of the log, even those that no record has named since the last checkpoint."""
        names = self._world.groups.keys()
        self.report.groups += len(names)
        if self.difference is None:
            other = self._oracle.groups.keys() ^ names
            if other:
                self._differs(self._world.next_offset - 1, min(other), "only one of the folds has the group", "", "")
            else:
                self._touched.update(names)
                self._compare_groups(self._world.next_offset - 1)

    def _check_block(self, offset: int) -> None:
        """Compares at a checkpoint the chain digest, and the groups that were named since the last one (G1)."""
        self.report.checkpoints += 1
        at, chain = self._oracle.chain_digest()
        if (self._world.chain_at, self._world.chain) != (at, chain):
            self._differs(offset, "", "chain digest", f"{self._world.chain:016x}", f"{chain:016x}")
            return
        for name in self._touched & self._world.groups.keys():
            self._parts[name] = snapshot.part_of(self._world.groups[name])
        self._totals[at] = sum(self._parts.values()) % 2**64
        self._checkpoints.put(at, chain, self._compare_groups(offset))

    def _compare_groups(self, offset: int) -> dict[str, int]:
        """Compares the groups that were named since the last call, and returns their digests."""
        found: dict[str, int] = {}
        for name in sorted(self._touched & self._world.groups.keys()):
            digest, theirs = self._world.groups[name].digest(), self._oracle.state_digest(name)
            self.report.digests += 1
            if digest != theirs:
                self._differs(offset, name, "state digest", f"{digest:016x}", f"{theirs:016x}")
                return found
            found[name] = digest
        self._touched.clear()
        return found

    def _check_snapshot(self, offset: int, record: Snapshot) -> None:
        """Compares the digests in a Snapshot record, or in a second client's witness of it, with the fold's (N3)."""
        if record.at < self._world.began_at:
            return  # the fold began after it
        self.report.snapshot_digests += 1
        expected = self._totals.get(record.at), self._checkpoints.chain(record.at)
        for what, found, known in zip(("state", "chain"), (record.state, record.chain), expected, strict=True):
            if found != known and self.difference is None:
                must_be = "no such checkpoint there" if known is None else f"{known:016x}"
                self._differs(
                    offset, "", f"{what} digest of a snapshot, of checkpoint {record.at}", f"{found:016x}", must_be
                )

    def _check_carried(self, offset: int, group: str, carried: Checkpoint) -> None:
        """Compares the digests in a heartbeat with the fold's (G4)."""
        if carried.fold != FOLD_VERSION:
            self.report.other_fold_versions += 1
            return
        if carried.at < self._world.began_at:
            return  # the fold began after it
        self.report.heartbeat_digests += 1
        chain, state = self._checkpoints.chain(carried.at), self._checkpoints.state(group, carried.at)
        if chain is None:
            known = f"checkpoints up to {self._checkpoints.newest}"
            self._differs(offset, group, "checkpoint of a heartbeat", str(carried.at), known)
        elif chain != carried.chain:
            # The logs may have parted earlier: this is the first record that shows it.
            self._differs(
                offset,
                group,
                f"chain digest of a heartbeat, of checkpoint {carried.at}",
                f"{carried.chain:016x}",
                f"{chain:016x}",
            )
        elif state != carried.state:
            self._differs(
                offset,
                group,
                f"state digest of a heartbeat, of checkpoint {carried.at}",
                f"{carried.state:016x}",
                f"{state:016x}" if state else "no such group there",
            )

    def miss(self, first: int) -> None:
        """Notes a difference: the log has lost its beginning, and no sound snapshot replaces it (N10)."""
        self._differs(first, "", "the log cannot be folded", f"it begins at offset {first}", "a confirmed snapshot")

    def _differs(self, offset: int, group: str, what: str, found: str, expected: str) -> None:
        self.difference = Difference(self.log, offset, group, what, found, expected)
        self.report.differences.append(self.difference)


class Truncated:
    """Collects the records of a log whose beginning is deleted.

    `finish` folds them from the oldest confirmed snapshot, because the first records alone do not show which that is.
    """

    folds: TwoFolds
    first: int

    def __init__(self, folds: TwoFolds, first: int) -> None:
        self.folds, self.first = folds, first
        self._records: list[tuple[int, bytes | None]] = []
        self._shelf, self._read = SnapshotStore(), Snapshots()

    def put(self, offset: int, value: bytes | None) -> None:
        self._records.append((offset, value))
        found = codec.open_snapshot(value)
        if found is not None and value is not None:
            self._shelf.take(found, offset)
            self._read.read(decode_record(codec.SNAPSHOT, value[14:]), offset)

    def finish(self) -> None:
        by_place = {(state.at, chain): state for state, chain in self._read.confirmed(self.folds.log, self.first)}
        for stored in reversed(self._shelf.confirmed(self.first)):
            state = by_place.get((stored.at, stored.key.chain))
            if state is not None and self.folds.begin(stored, state):
                self.folds.report.begins[self.folds.log] = stored.at
                for offset, value in self._records:
                    if offset >= stored.at:
                        self.folds.put(offset, value)
                self.folds.finish()
                return
        self.folds.miss(self.first)


def verify(
    records: Iterable[LogRecord], root: Genesis | None, root_value: bytes | None, each: bool = False
) -> Comparison:
    """Compares the two folds on whole logs, or on what is left of them.

    Records of several logs may come mixed, but those of one log must come in its order.
    """
    report = Comparison()
    logs: dict[int, TwoFolds | Truncated] = {}
    for record in records:
        folds = logs.get(record.log)
        if folds is None:
            folds = TwoFolds(record.log, root, root_value, report, each)
            if record.offset:
                folds = Truncated(folds, record.offset)
            logs[record.log] = folds
        folds.put(record.offset, record.value)
    for folds in logs.values():
        folds.finish()
    report.logs = len(logs)
    report.differences.sort(key=lambda difference: (difference.log, difference.offset))
    return report
