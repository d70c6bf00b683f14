"""The judge of a run: raw log bytes and the delivery journal against invariants.md, by the oracle's fold alone.

It shares no code with what it judges: nothing of marshal_py.protocol, its own model of claims, grants and pauses. One
pass folds the log (`_History`), then each invariant is one function over what the pass found. Liveness has its own
judge, auditor_progress.py.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from marshal_py.simulator.oracle import Oracle, Verdict

Key = tuple[str, str, int]  # group, topic, partition
DRIFT_PPM = 1_000  # the widest clock rate that a run may use, with room
SLACK_MS = 3  # two floors and a ceiling between a client's clock and true time


class Delivery:
    """One message handed to a handler. `read_to`: how much of the log the client had read at the gate."""

    __slots__ = ("begin_ms", "client", "end_ms", "epoch", "gate_ms", "group", "inherited", "instance", "offset",
                 "partition", "read_to", "topic")  # fmt: skip

    def __init__(self, group: str, client: int, instance: bytes, epoch: int, topic: str, partition: int, offset: int,
                 read_to: int, gate_ms: int, begin_ms: int, end_ms: int = -1) -> None:  # fmt: skip
        self.group, self.client, self.instance, self.epoch = group, client, instance, epoch
        self.topic, self.partition, self.offset, self.read_to = topic, partition, offset, read_to
        self.gate_ms, self.begin_ms, self.end_ms = gate_ms, begin_ms, end_ms
        self.inherited = False

    @property
    def key(self) -> Key:
        return self.group, self.topic, self.partition

    def inherited_by(self, client: int) -> Delivery:
        """The same call, still running in a forked twin."""
        born = Delivery(self.group, client, self.instance, self.epoch, self.topic, self.partition, self.offset,
                        self.read_to, self.gate_ms, self.begin_ms)  # fmt: skip
        born.inherited = True
        return born


class Report(NamedTuple):
    """What an admin's tool said about its SetPosition (S12)."""

    group: str
    by: str
    said: str  # moved, not moved, unknown
    moves: tuple[tuple[str, int, int], ...]  # topic, partition, wanted offset


@dataclass
class Evidence:
    """All that a run leaves behind. `sent`: value -> (first send, last send, first sender)."""

    log: list[bytes] = field(default_factory=list)
    appended_ms: list[int] = field(default_factory=list)
    sent: dict[bytes, tuple[int, int, int]] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)
    digests: dict[tuple[str, int, int, int], int] = field(default_factory=dict)  # group, at, state, chain -> client
    finals: list[tuple[int, str, int, int]] = field(default_factory=list)  # client, group, read to, state digest
    topics: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    forks: list[tuple[int, int, int]] = field(default_factory=list)  # ms, original, twin
    reports: list[Report] = field(default_factory=list)


class Violation(NamedTuple):
    invariant: str
    ms: int
    offset: int  # in the log, -1 if it stands for no record
    text: str


class Tenure:
    """One accepted claim: the records [epoch, end) of the log."""

    __slots__ = ("end", "ended_by", "epoch", "extended_at", "generation", "key", "ms", "position", "session")

    def __init__(self, key: Key, epoch: int, session: int, ms: int, position: int, generation: int) -> None:
        self.key, self.epoch, self.session, self.ms = key, epoch, session, ms
        self.position, self.generation = position, generation
        self.end = 2**62
        self.ended_by = ""
        self.extended_at = 0


class Extension(NamedTuple):
    offset: int
    sent_ms: int  # the newest send among this and all earlier extensions


class Life:
    """One session."""

    def __init__(self, instance: bytes, interval_ms: int, group: str) -> None:
        self.instance, self.interval_ms, self.group = instance, interval_ms, group
        self.extensions: list[Extension] = []
        self.heartbeats: dict[int, int] = {}  # client (a cloned one is another) -> newest send of an accepted one


class Advance(NamedTuple):
    """An at-least-once position that grew by a record of the owner."""

    key: Key
    generation: int
    before: int
    after: int
    offset: int
    sent_ms: int


class Grant(NamedTuple):
    key: Key
    epoch: int
    start: int
    to: int
    sent_ms: int


class _History:
    """The log, folded once by the oracle, as the facts that the invariants speak of."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.oracle = Oracle()
        self.tenures: dict[tuple[str, int], Tenure] = {}
        self.by_key: dict[Key, list[Tenure]] = {}
        self.lives: dict[tuple[str, int], Life] = {}
        self.advances: list[Advance] = []
        self.grants: dict[tuple[str, int], list[Grant]] = {}
        self.pauses: dict[str, list[tuple[int, int]]] = {}
        self.moved: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
        self.evictions: list[tuple[int, str, dict[str, Any]]] = []
        self.claim_records: list[tuple[int, Key]] = []
        self.found: list[Violation] = []
        self._open: dict[str, dict[Key, Tenure]] = {}
        self._positions: dict[Key, int] = {}
        self._paused_at: dict[str, int] = {}
        digests: dict[int, list[tuple[str, int, int, int]]] = {}
        for group, at, state, chain in evidence.digests:
            digests.setdefault(at, []).append((group, state, chain, evidence.digests[group, at, state, chain]))
        finals: dict[int, list[tuple[int, str, int]]] = {}
        for client, group, at, state in evidence.finals:
            finals.setdefault(at, []).append((client, group, state))
        for offset, value in enumerate(evidence.log):
            verdict = self.oracle.apply(offset, value)
            if verdict.outcome == "accepted" and verdict.group is not None:
                self._note(offset, value, verdict)
            if verdict.group is not None and verdict.record is not None and verdict.record.type == "ClaimingPartition":
                fields = verdict.record.fields
                key = (verdict.group, fields["topic"], fields["partition"])
                self.claim_records.append((evidence.appended_ms[offset], key))
            for group, state, chain, client in digests.get(offset + 1, ()):
                if (self.oracle.state_digest(group), self.oracle.chain_digest()[1]) != (state, chain):
                    self._say("S1", offset, f"client {client} holds another world at checkpoint {offset + 1}")
            for client, group, state in finals.get(offset + 1, ()):
                if self.oracle.state_digest(group) != state:
                    self._say("S1", offset, f"client {client} ends with another world after {offset}")
        for group, at in self._paused_at.items():
            self.pauses.setdefault(group, []).append((at, 2**62))

    def _say(self, invariant: str, offset: int, text: str) -> None:
        self.found.append(Violation(invariant, self.evidence.appended_ms[offset], offset, text))

    def _note(self, offset: int, value: bytes, verdict: Verdict) -> None:
        """What one accepted record did."""
        group, record = verdict.group, verdict.record
        assert group is not None
        assert record is not None
        fields, kind = record.fields, record.type
        sent_ms = self.evidence.sent.get(value, (self.evidence.appended_ms[offset],))[0]
        if kind == "Heartbeat":
            life = self.lives[group, fields["session"]]
            sender = self.evidence.sent.get(value, (0, 0, -1))[2]
            life.heartbeats[sender] = max(life.heartbeats.get(sender, -1), sent_ms)
            if self.oracle.groups[group].sessions[fields["session"]].extended == offset:
                self._extend(life, offset, sent_ms)
            for entry in fields["claims"]:
                tenure = self.tenures.get((group, entry["epoch"]))
                if tenure is not None and tenure.end > offset and tenure.session == fields["session"]:
                    self._advance(tenure, offset, sent_ms)
            return
        if kind == "ReleasingPartition":
            self._advance(self.tenures[group, fields["epoch"]], offset, sent_ms)
        elif kind == "ClaimingMessages":
            self._grant(group, fields, offset, sent_ms)
        elif kind == "ClaimingPartition":
            self._claim(group, fields, offset)
        elif kind == "Join":
            life = self.lives[group, offset] = Life(fields["instance_id"], fields["interval_ms"], group)
            self._extend(life, offset, sent_ms)
        elif kind == "Evict":
            self.evictions.append((offset, group, fields))
        elif kind == "SetPosition":
            self._move(group, fields, offset)
        if kind in ("Join", "Leave", "Evict", "ReleasingPartition", "GroupConfig"):
            self._end_tenures(group, offset, kind)
        if kind in ("ReleaseGroup", "SetPosition", "GroupConfig"):
            self._pause(group, offset)
        if kind in ("Topology", "GroupConfig"):
            self._forget(group)

    def _extend(self, life: Life, offset: int, sent_ms: int) -> None:
        newest = life.extensions[-1].sent_ms if life.extensions else -1
        life.extensions.append(Extension(offset, max(newest, sent_ms)))

    def _claim(self, group: str, fields: dict[str, Any], offset: int) -> None:
        key = (group, fields["topic"], fields["partition"])
        part = self.oracle.groups[group].partitions[key[1], key[2]]
        tenure = Tenure(key, offset, fields["session"], self.evidence.appended_ms[offset], part.position,
                        part.generation)  # fmt: skip
        if key in self._open.setdefault(group, {}):
            self._say("S2", offset, f"{key} is claimed while it is owned")
        if self._positions.get(key, part.position) not in (part.position, -1):
            self._say("S10", offset, f"the position of {key} changed by a claim")
        self._open[group][key] = self.tenures[group, offset] = tenure
        self.by_key.setdefault(key, []).append(tenure)
        self._positions[key] = part.position

    def _end_tenures(self, group: str, offset: int, kind: str) -> None:
        opened = self._open.get(group, {})
        partitions = self.oracle.groups[group].partitions
        for key, tenure in list(opened.items()):
            if partitions[key[1], key[2]].epoch != tenure.epoch:
                tenure.end, tenure.ended_by = offset, kind
                del opened[key]

    def _advance(self, tenure: Tenure, offset: int, sent_ms: int) -> None:
        group, topic, number = tenure.key
        position = self.oracle.groups[group].partitions[topic, number].position
        before = self._positions.get(tenure.key, -1)
        if position < before:
            self._say("S10", offset, f"the position of {tenure.key} fell from {before} to {position}")
        elif position > before:
            self.advances.append(Advance(tenure.key, tenure.generation, before, position, offset, sent_ms))
        self._positions[tenure.key] = position

    def _grant(self, group: str, fields: dict[str, Any], offset: int, sent_ms: int) -> None:
        tenure = self.tenures[group, fields["epoch"]]
        if fields["start"] < self._positions.get(tenure.key, -1):
            self._say("S6", offset, f"a grant of {tenure.key} begins below what was granted")
        grant = Grant(tenure.key, tenure.epoch, fields["start"], fields["to"], sent_ms)
        self.grants.setdefault((group, tenure.epoch), []).append(grant)
        self._positions[tenure.key] = fields["to"]

    def _move(self, group: str, fields: dict[str, Any], offset: int) -> None:
        self.moved.setdefault((group, fields["by"]), []).append((offset, fields))
        for move in fields["moves"]:
            key = (group, move["topic"], move["partition"])
            if key in self._open.get(group, {}):
                self._say("S12", offset, f"{key} moved under a live owner")
            self._positions[key] = self.oracle.groups[group].partitions[key[1], key[2]].position
            if self._positions[key] != move["position"]:
                self._say("S10", offset, f"{key} moved to {self._positions[key]}, not to {move['position']}")

    def _pause(self, group: str, offset: int) -> None:
        paused = self.oracle.groups[group].paused
        if paused and group not in self._paused_at:
            self._paused_at[group] = offset
        elif not paused and group in self._paused_at:
            self.pauses.setdefault(group, []).append((self._paused_at.pop(group), offset))

    def _forget(self, group: str) -> None:
        for (topic, number), part in self.oracle.groups[group].partitions.items():
            if part.position == -1:
                self._positions[group, topic, number] = -1


# ---------------------------------------------------------------------------------------------------------------------
# The invariants


class Judgement(NamedTuple):
    violations: list[Violation]
    counted: dict[str, int]  # what the text says is counted, not failed
    history: _History


def judge(evidence: Evidence) -> Judgement:
    """Every violation of S1-S12 and S15 that the evidence shows, in the order of the invariants."""
    history = _History(evidence)
    counted = {"S3": 0, "S4": 0, "S5": 0}
    found = list(history.found)
    found += _owners_and_leases(history, counted)
    found += _at_most_once(history, counted)
    found += _at_least_once(history)
    found += _redelivery(history)
    found += _reports(history)
    found += _waits(history)
    return Judgement(found, counted, history)


def _owners_and_leases(history: _History, counted: dict[str, int]) -> Iterator[Violation]:
    """S2, S3, S4, S11, one delivery at a time, and the fence of T8 (reported as S3)."""
    greatest: dict[Key, int] = {}
    for d in sorted(history.evidence.deliveries, key=lambda d: d.begin_ms):
        if d.inherited:
            continue
        tenure = history.tenures.get((d.group, d.epoch))
        if d.epoch < greatest.get(d.key, -1):
            counted["S4"] += 1  # the store refuses it: its token is older
        greatest[d.key] = max(d.epoch, greatest.get(d.key, -1))
        if tenure is None or tenure.key != d.key or not d.epoch < d.read_to <= tenure.end:
            yield Violation("S2", d.gate_ms, d.epoch, f"client {d.client} delivers {d.key} {d.offset}, not its own")
            continue
        life = history.lives[d.group, tenure.session]
        if life.instance != d.instance:
            yield Violation("S2", d.gate_ms, d.epoch, f"the token of {d.key} {d.offset} is another instance's")
        tenures = history.by_key[d.key]
        after = bisect_right(tenures, d.epoch, key=lambda t: t.epoch)
        if after < len(tenures) and tenures[after].session != tenure.session:
            if tenures[after].ms < d.gate_ms:
                yield Violation("S3", d.gate_ms, tenures[after].epoch, f"client {d.client} delivers {d.key} {d.offset}"
                                f", owned by another since {tenures[after].ms}")  # fmt: skip
            elif tenures[after].ms < d.begin_ms:
                counted["S3"] += 1  # stopped between gate and call (X3)
        yield from _lease(d, life)
        for start, end in history.pauses.get(d.group, ()):
            if start < d.read_to <= end:
                yield Violation("S11", d.gate_ms, start, f"client {d.client} delivers {d.key} {d.offset} in a pause")


def _lease(d: Delivery, life: Life) -> Iterator[Violation]:
    read = bisect_left(life.extensions, d.read_to, key=lambda e: e.offset)
    sent_ms = life.extensions[read - 1].sent_ms if read else -1
    limit_ms = life.interval_ms * (1_000_000 + DRIFT_PPM) // 1_000_000 + SLACK_MS
    if d.gate_ms - sent_ms > limit_ms:
        yield Violation("S3", d.gate_ms, -1, f"client {d.client} delivers {d.key} {d.offset} "
                                             f"{d.gate_ms - sent_ms} ms after its last extension was sent")  # fmt: skip


def _separated_ms(history: _History, a: int, b: int) -> int:
    """When the memories of two clients parted (ms), -1 if they never were one."""
    parents = {twin: (original, ms) for ms, original, twin in history.evidence.forks}

    def line(client: int) -> dict[int, int]:
        since = {client: 2**62}
        while client in parents:
            client, ms = parents[client][0], min(parents[client][1], since[client])
            since[client] = ms
        return since

    mine, other = line(a), line(b)
    return max((min(mine[c], other[c]) for c in mine if c in other), default=-1)


def _at_most_once(history: _History, counted: dict[str, int]) -> Iterator[Violation]:
    """S5, S6.

    A cloned machine holds the grants that the original asked for before the cloning: counted, nobody can mend that.
    """
    seen: dict[tuple[Key, int, int], Delivery] = {}
    for d in history.evidence.deliveries:
        tenure = history.tenures.get((d.group, d.epoch))
        if d.inherited or tenure is None or history.oracle.groups[d.group].mode != 2:
            continue
        inside = [g for g in history.grants.get((d.group, d.epoch), ()) if g.start <= d.offset < g.to]
        if len(inside) != 1:
            yield Violation("S6", d.begin_ms, d.epoch, f"{d.key} {d.offset} lies in {len(inside)} grants")
        known = seen.setdefault((d.key, tenure.generation, d.offset), d)
        if known is d:
            continue
        one_ms = _separated_ms(history, known.client, d.client) if d.client != known.client else -1
        if inside and inside[0].sent_ms <= one_ms:
            counted["S5"] += 1
        else:
            yield Violation("S5", d.begin_ms, d.epoch, f"{d.key} {d.offset} is delivered twice, by {known.client} "
                                                       f"and {d.client}")  # fmt: skip


def _at_least_once(history: _History) -> Iterator[Violation]:
    """S7, S8: every position that the log accepted lies behind finished messages only."""
    ended: dict[tuple[Key, int, int], int] = {}
    for d in history.evidence.deliveries:
        tenure = history.tenures.get((d.group, d.epoch))
        if tenure is not None and d.end_ms >= 0:
            place = (d.key, tenure.generation, d.offset)
            ended[place] = min(d.end_ms, ended.get(place, d.end_ms))
    for step in history.advances:
        offsets = history.evidence.topics.get((step.key[1], step.key[2]), [])
        for offset in offsets[bisect_left(offsets, step.before) : bisect_left(offsets, step.after)]:
            end_ms = ended.get((step.key, step.generation, offset))
            if end_ms is None:
                yield Violation("S7", step.sent_ms, step.offset, f"{step.key} {offset} is skipped")
            elif end_ms > step.sent_ms:
                yield Violation("S8", step.sent_ms, step.offset, f"{step.key} {offset} was unfinished when reported")


def _redelivery(history: _History) -> Iterator[Violation]:
    """S9, for each take-over in an at-least-once group."""
    by_epoch: dict[tuple[str, int], list[Delivery]] = {}
    for d in history.evidence.deliveries:
        by_epoch.setdefault((d.group, d.epoch), []).append(d)
    for key, tenures in history.by_key.items():
        if history.oracle.groups[key[0]].mode != 1:
            continue
        for old, new in pairwise(tenures):
            if old.ended_by != "Evict" or old.generation != new.generation:
                continue
            for client, sent_ms in history.lives[key[0], old.session].heartbeats.items():
                begun = [d for d in by_epoch.get((key[0], old.epoch), ()) if d.client == client]
                before = {d.offset: d for d in begun if d.begin_ms <= sent_ms}
                low = min((o for o, d in before.items() if d.end_ms < 0 or d.end_ms >= sent_ms), default=2**63)
                for d in by_epoch.get((key[0], new.epoch), ()):
                    if d.offset in before and d.offset < low and not d.inherited:
                        yield Violation("S9", d.begin_ms, new.epoch, f"{key} {d.offset}, finished in time, comes again")


def _reports(history: _History) -> Iterator[Violation]:
    """S12: what the tool said is what happened, also later."""
    first: dict[tuple[str, int, int], int] = {}
    for d in history.evidence.deliveries:
        first[d.group, d.epoch, d.partition] = min(d.offset, first.get((d.group, d.epoch, d.partition), d.offset))
    for report in history.evidence.reports:
        accepted = history.moved.get((report.group, report.by), [])
        if report.said == "not moved" and accepted:
            yield Violation("S12", -1, accepted[0][0], f"{report.by} said not moved, and it moved")
        if report.said != "moved":
            continue
        if not accepted:
            yield Violation("S12", -1, -1, f"{report.by} said moved, and nothing did")
            continue
        for topic, number, wanted in report.moves:
            heirs = [t for t in history.by_key.get((report.group, topic, number), ()) if t.epoch > accepted[0][0]]
            offsets = history.evidence.topics.get((topic, number), [])
            expected = offsets[bisect_left(offsets, wanted)] if offsets and wanted <= offsets[-1] else wanted
            if heirs and heirs[0].position == wanted and (
                first.get((report.group, heirs[0].epoch, number), expected) != expected
                and history.oracle.groups[report.group].mode == 1
            ):
                yield Violation("S12", -1, heirs[0].epoch, f"{report.by} moved {topic} {number} to {wanted}, and "
                                                           f"delivery went on elsewhere")  # fmt: skip


def _waits(history: _History) -> Iterator[Violation]:
    """S15: who evicts has waited, in true time."""
    appended_ms = history.evidence.appended_ms
    for offset, group, fields in history.evictions:
        need_ms = 2 * history.lives[group, fields["session"]].interval_ms
        waited_ms = appended_ms[offset] - appended_ms[fields["observed"]]
        if waited_ms < need_ms - need_ms * DRIFT_PPM // 1_000_000 - SLACK_MS:
            yield Violation("S15", appended_ms[offset], offset, f"session {fields['session']} was evicted after "
                                                                f"{waited_ms} ms of {need_ms}")  # fmt: skip
