"""The raw logs of a run, folded once by the oracle, as the facts that the invariants speak of: who owned what, when.

Shares no code with the library but the oracle. What can be wrong with a log by itself (a divergent digest, a position
that falls, a second owner, a claim in a pause, a rejected record that changed something) is found here on the way.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from marshal_py.simulator.oracle import Oracle, OracleStop, Verdict
from tests.support.evidence import NEVER, Evidence, Record
from tests.support.recorder import root_of

Key = tuple[str, str, int]  # group, topic, partition
MS = 1_000_000


class Violation(NamedTuple):
    invariant: str
    ns: int
    text: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.text}"


@dataclass(slots=True)
class Tenure:
    """One accepted claim: the records [epoch, end) of its log."""

    key: Key
    log: int
    epoch: int
    session: int
    client: str
    position: int
    generation: int
    record: Record
    end: int = NEVER
    ended_by: str = ""  # type of the record that ended it
    ended: Record | None = None
    release_sent_ns: int = NEVER  # first send of any Release of it


class Extension(NamedTuple):
    sent_ns: int
    offset: int


@dataclass(slots=True)
class Stay:
    """One session."""

    id: int
    log: int
    group: str
    client: str
    interval_ns: int
    extensions: list[Extension] = field(default_factory=list)
    heartbeat_sent_ns: int = -1  # newest send of an accepted heartbeat
    leave_sent_ns: int = NEVER
    end: int = NEVER
    ended_by: str = ""

    def extended_before(self, ns: int) -> int:
        """Send of the newest extension that was sent at `ns` or before; -1 if there is none."""
        at = bisect_right(self.extensions, (ns, NEVER))
        return self.extensions[at - 1].sent_ns if at else -1


class Advance(NamedTuple):
    """An at-least-once position that grew by a record of the owner."""

    key: Key
    generation: int
    before: int
    after: int
    offset: int
    sent_ns: int


class Grant(NamedTuple):
    key: Key
    epoch: int
    generation: int
    start: int
    to: int
    sent_ns: int


class Eviction(NamedTuple):
    log: int
    group: str
    record: Record
    observed: Record
    session: int
    held: int  # partitions that it had


class Stop(NamedTuple):
    """A log, or a group of it, that no reader may go on with (S14). `group` "" means all of the log."""

    ns: int
    log: int
    group: str
    reason: str


class History:
    """All logs of a run."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.oracles: dict[int, Oracle] = {}
        self.modes: dict[str, int] = {}
        self.tenures: dict[tuple[str, int], Tenure] = {}
        self.by_key: dict[Key, list[Tenure]] = {}
        self.stays: dict[tuple[str, int], Stay] = {}
        self.advances: list[Advance] = []
        self.grants: dict[tuple[str, int], list[Grant]] = {}
        self.pauses: dict[str, list[tuple[int, int]]] = {}
        self.moved: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
        self.evictions: list[Eviction] = []
        self.claim_records: list[tuple[int, Key]] = []
        self.lost_ranges: dict[Key, list[tuple[int, int]]] = {}
        self.notes: list[tuple[int, str, dict[str, Any]]] = []
        self.divergent: list[tuple[int, str, int]] = []  # sent ns, group, session
        self.stops: list[Stop] = []
        self.verdicts: dict[str, int] = {}
        self.settled_owners: dict[Key, str] = {}  # at the settled point: client ids of live sessions
        self.settled_positions: dict[Key, int] = {}
        self.found: list[Violation] = []
        self._open: dict[str, dict[Key, Tenure]] = {}
        self._positions: dict[Key, int] = {}
        self._paused_at: dict[str, int] = {}
        self._first_sent: dict[bytes, int] = {}
        self._checkpoints: dict[int, tuple[dict[str, int], int]] = {}  # of the log that is being folded
        for log in sorted(evidence.logs):
            self._fold(log, evidence.logs[log])
        for stay in self.stays.values():
            stay.extensions.sort()
        for group, at in self._paused_at.items():
            self.pauses.setdefault(group, []).append((at, NEVER))

    def say(self, invariant: str, ns: int, text: str) -> None:
        self.found.append(Violation(invariant, ns, text))

    # --- the fold

    def _fold(self, log: int, records: list[Record]) -> None:
        root = root_of(self.evidence.logs.get(0, []), self.oracles.get(0)) if log else None
        if log and root is None:
            return
        oracle = self.oracles[log] = Oracle(log, root)
        self._checkpoints = {0: ({}, 0)}
        if self.evidence.settled.get(log) == 0:
            self._settle(log)
        for record in records:
            before = None
            if self._is_sampled(log, record):
                before = {name: oracle.state_digest(name) for name in oracle.groups}
            opaque = {name for name, group in oracle.groups.items() if group.opaque_at != -1}
            try:
                verdict = oracle.apply(record.offset, record.value)
            except OracleStop as stop:
                self.stops.append(Stop(record.read_ns, log, "", stop.reason))
                return
            self._count(log, record, verdict, before, opaque)
            if oracle.chain_digest()[0] == record.offset + 1:
                states = {name: oracle.state_digest(name) for name in oracle.groups}
                self._checkpoints[record.offset + 1] = (states, oracle.chain_digest()[1])
            if self.evidence.settled.get(log) == record.offset + 1:
                self._settle(log)

    def _is_sampled(self, log: int, record: Record) -> bool:
        """Whether to compare the state before and after: digests cost, so only for what a raw producer wrote ..."""
        # ... and for every 16th record, so that rejections in ordinary traffic are sampled too.
        return (log, record.offset) in self.evidence.forged or record.offset % 16 == 0

    def _compare(self, log: int, record: Record, group: str, fields: dict[str, Any]) -> None:
        """S1: the digest in a heartbeat against the oracle's at the same checkpoint."""
        digest = fields["digest"]
        if digest is None or digest["fold"] != 1 or (log, record.offset) in self.evidence.forged:
            return
        states, chain = self._checkpoints.get(digest["at"], ({}, -1))
        if (states.get(group, 0), chain) != (digest["state"], digest["chain"]):
            self.divergent.append((record.sent_ns, group, fields["session"]))
            self.say("S1", record.sent_ns, f"session {fields['session']} of {group} holds another world than the "
                                           f"oracle at checkpoint {digest['at']} of log {log}")  # fmt: skip

    def _count(self, log: int, record: Record, verdict: Verdict, before: dict[str, int] | None,
               opaque: set[str]) -> None:  # fmt: skip
        oracle = self.oracles[log]
        name = f"{verdict.outcome} {verdict.reason}".strip()
        self.verdicts[name] = self.verdicts.get(name, 0) + 1
        if verdict.outcome != "accepted":
            newly_opaque = {n for n, g in oracle.groups.items() if g.opaque_at != -1} - opaque
            for group in newly_opaque:
                self.stops.append(Stop(record.read_ns, log, group, "opaque"))
            if before is not None and not newly_opaque:
                after = {group: oracle.state_digest(group) for group in oracle.groups}
                if after != before:
                    self.say("S13", record.read_ns, f"record {record.offset} of log {log} is {name}, and the state "
                                                    f"changed")  # fmt: skip
        if verdict.record is not None and verdict.group is not None:
            self._seen(log, record, verdict)
            if verdict.outcome == "accepted":
                self._accepted(log, record, verdict)

    def _seen(self, log: int, record: Record, verdict: Verdict) -> None:
        """What a record shows although it may have been rejected: that somebody sent it."""
        assert verdict.record is not None
        assert verdict.group is not None
        fields, kind = verdict.record.fields, verdict.record.type
        if record.value is not None:
            self._first_sent.setdefault(record.value, record.sent_ns)
        if kind == "Heartbeat":
            self._compare(log, record, verdict.group, fields)
        elif kind == "ClaimingPartition" and (log, record.offset) not in self.evidence.forged:
            self.claim_records.append((record.sent_ns, (verdict.group, fields["topic"], fields["partition"])))
        elif kind == "ReleasingPartition":
            tenure = self.tenures.get((verdict.group, fields["epoch"]))
            if tenure is not None and tenure.session == fields["session"]:
                tenure.release_sent_ns = min(tenure.release_sent_ns, record.sent_ns)
        elif kind == "Leave":
            stay = self.stays.get((verdict.group, fields["session"]))
            if stay is not None:
                stay.leave_sent_ns = min(stay.leave_sent_ns, record.sent_ns)

    def _accepted(self, log: int, record: Record, verdict: Verdict) -> None:
        group, decoded = verdict.group, verdict.record
        assert group is not None
        assert decoded is not None
        fields, kind, oracle = decoded.fields, decoded.type, self.oracles[log]
        offset = record.offset
        # A copy says what its first sending said: a lease counts from there (T6).
        sent_ns = record.sent_ns if record.value is None else self._first_sent[record.value]
        if group in oracle.groups and oracle.groups[group].mode:
            self.modes[group] = oracle.groups[group].mode
        if kind == "Heartbeat":
            stay = self.stays[group, fields["session"]]
            stay.heartbeat_sent_ns = max(stay.heartbeat_sent_ns, sent_ns)
            if oracle.groups[group].sessions[stay.id].extended == offset:
                stay.extensions.append(Extension(sent_ns, offset))
            for entry in fields["claims"]:
                tenure = self.tenures.get((group, entry["epoch"]))
                if tenure is not None and tenure.end == NEVER and tenure.session == fields["session"]:
                    self._advance(oracle, tenure, offset, sent_ns)
        elif kind == "ReleasingPartition":
            self._release(oracle, self.tenures[group, fields["epoch"]], fields, offset, sent_ns)
        elif kind == "ClaimingMessages":
            for index in verdict.granted:
                self._grant(oracle, group, fields["ranges"][index], offset, sent_ns)
        elif kind == "ClaimingPartition":
            self._claim(oracle, log, group, fields, record)
        elif kind == "Join":
            stay = Stay(offset, log, group, fields["client_id"], fields["interval_ms"] * MS)
            stay.extensions.append(Extension(sent_ns, offset))
            self.stays[group, offset] = stay
        elif kind == "Evict":
            held = sum(tenure.session == fields["session"] for tenure in self._open.get(group, {}).values())
            observed = self.evidence.logs[log][fields["observed"]]
            self.evictions.append(Eviction(log, group, record, observed, fields["session"], held))
        elif kind == "SetPosition":
            self._move(oracle, group, fields, record)
        elif kind == "Note":
            self._note(group, fields, sent_ns)
        if kind in ("Join", "Leave", "Evict", "ReleasingPartition", "GroupConfig"):
            self._end_tenures(oracle, group, record, kind)
        if kind in ("ReleaseGroup", "SetPosition", "GroupConfig"):
            self._pause(oracle, group, offset)
        if kind in ("Topology", "GroupConfig"):
            for (topic, number), part in oracle.groups[group].partitions.items():
                if part.position == -1:
                    self._positions[group, topic, number] = -1

    def _claim(self, oracle: Oracle, log: int, group: str, fields: dict[str, Any], record: Record) -> None:
        key = (group, fields["topic"], fields["partition"])
        part = oracle.groups[group].partitions[key[1], key[2]]
        client = self.stays[group, fields["session"]].client
        tenure = Tenure(key, log, record.offset, fields["session"], client, part.position, part.generation, record)
        if key in self._open.setdefault(group, {}):
            self.say("S2", record.read_ns, f"{key} has two owners from offset {record.offset} on")
        if self.by_key.get(key) and self.by_key[key][-1].epoch >= record.offset:
            self.say("S2", record.read_ns, f"the epoch of {key} fell to {record.offset}")
        if self._positions.get(key, part.position) not in (part.position, -1):
            self.say("S10", record.read_ns, f"the position of {key} changed by the claim at {record.offset}")
        if group in self._paused_at:
            self.say("S11", record.read_ns, f"{key} was claimed in a pause, at {record.offset}")
        self._open[group][key] = self.tenures[group, record.offset] = tenure
        self.by_key.setdefault(key, []).append(tenure)
        self._positions[key] = part.position

    def _end_tenures(self, oracle: Oracle, group: str, record: Record, kind: str) -> None:
        partitions = oracle.groups[group].partitions
        for key, tenure in list(self._open.get(group, {}).items()):
            if partitions[key[1], key[2]].epoch != tenure.epoch:
                tenure.end, tenure.ended_by, tenure.ended = record.offset, kind, record
                del self._open[group][key]
        for (name, session), stay in self.stays.items():
            if name == group and stay.end == NEVER and session not in oracle.groups[group].sessions:
                stay.end, stay.ended_by = record.offset, kind

    def _release(self, oracle: Oracle, tenure: Tenure, fields: dict[str, Any], offset: int, sent_ns: int) -> None:
        """F6.3: in an at-most-once group a Release may give grants back; what it gives back was never granted."""
        group, topic, number = tenure.key
        if self.modes.get(group) != 2 or fields["observed"] == -1 or number < 0:
            self._advance(oracle, tenure, offset, sent_ns)
            return
        position, give = oracle.groups[group].partitions[topic, number].position, fields["give"]
        if position != give or not tenure.position <= give <= self._positions[tenure.key]:
            self.say("S10", sent_ns, f"{tenure.key} was given back to {position} at {offset}, its claim began at "
                                     f"{tenure.position}")  # fmt: skip
        kept = [grant._replace(to=min(grant.to, give)) for grant in self.grants.get((group, tenure.epoch), ())]
        self.grants[group, tenure.epoch] = [grant for grant in kept if grant.start < grant.to]
        self._positions[tenure.key] = position

    def _advance(self, oracle: Oracle, tenure: Tenure, offset: int, sent_ns: int) -> None:
        group, topic, number = tenure.key
        position = oracle.groups[group].partitions[topic, number].position
        before = self._positions.get(tenure.key, -1)
        if position < before:
            self.say("S10", sent_ns, f"the position of {tenure.key} fell from {before} to {position} at {offset}")
        elif position > before and self.modes.get(group) == 1:
            self.advances.append(Advance(tenure.key, tenure.generation, before, position, offset, sent_ns))
        self._positions[tenure.key] = position

    def _grant(self, oracle: Oracle, group: str, fields: dict[str, Any], offset: int, sent_ns: int) -> None:
        tenure = self.tenures[group, fields["epoch"]]
        if fields["start"] < self._positions.get(tenure.key, -1):
            self.say("S6", sent_ns, f"the grant of {tenure.key} at {offset} begins below what was granted")
        if group in self._paused_at:
            self.say("S11", sent_ns, f"messages of {tenure.key} were granted in a pause, at {offset}")
        grant = Grant(tenure.key, tenure.epoch, tenure.generation, fields["start"], fields["to"], sent_ns)
        self.grants.setdefault((group, tenure.epoch), []).append(grant)
        self._positions[tenure.key] = oracle.groups[group].partitions[tenure.key[1], tenure.key[2]].position

    def _move(self, oracle: Oracle, group: str, fields: dict[str, Any], record: Record) -> None:
        self.moved.setdefault((group, fields["by"]), []).append((record.offset, fields))
        for move in fields["moves"]:
            key = (group, move["topic"], move["partition"])
            if key in self._open.get(group, {}):
                self.say("S12", record.read_ns, f"{key} was moved under a live owner, at {record.offset}")
            self._positions[key] = oracle.groups[group].partitions[key[1], key[2]].position
            if self._positions[key] != move["position"]:
                self.say("S10", record.read_ns, f"{key} was moved to {self._positions[key]}, not to {move['position']}")

    def _note(self, group: str, fields: dict[str, Any], sent_ns: int) -> None:
        self.notes.append((sent_ns, group, fields))
        if fields["kind"] == "offset_lost":
            key = (group, fields["topic"], fields["partition"])
            self.lost_ranges.setdefault(key, []).append((fields["from"], fields["to"]))

    def _pause(self, oracle: Oracle, group: str, offset: int) -> None:
        paused = oracle.groups[group].paused
        if paused and group not in self._paused_at:
            self._paused_at[group] = offset
        elif not paused and group in self._paused_at:
            self.pauses.setdefault(group, []).append((self._paused_at.pop(group), offset))

    def _settle(self, log: int) -> None:
        """The world at the moment at which everything should have been done and owned."""
        for name, group in self.oracles[log].groups.items():
            for (topic, number), part in group.partitions.items():
                self.settled_positions[name, topic, number] = part.position
                if part.owner in group.sessions:
                    self.settled_owners[name, topic, number] = group.sessions[part.owner].join["client_id"]

    # --- questions

    def is_lost(self, key: Key, offset: int) -> bool:
        """Whether a lost-range event (D6) covers the offset."""
        return any(low <= offset < to for low, to in self.lost_ranges.get(key, ()))
