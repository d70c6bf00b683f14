"""One log, folded once by the oracle, as the facts that the invariants speak of: tenures, sessions, grants, pauses.

What a single record already proves wrong (S1, S2, S6, S10, S12) is said here; everything else is judged in auditor.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from marshal_py.simulator.auditor_evidence import Evidence, Key, Violation
from marshal_py.simulator.oracle import Oracle, OracleStop, Verdict
from marshal_py.simulator.oracle_snapshot import Snapshots
from marshal_py.simulator.oracle_wire import HIGHEST_TYPE, decode_record, parse_envelope

HAND_OVER = "hand-over"  # reason of a Release by A3
AT_MOST_ONCE = 2


def root_of(values: Iterable[bytes | None]) -> tuple[bytes, int]:
    """The root in log 0, and the number of logs that it names; nothing and 1 where there is none (L3)."""
    oracle = Oracle()
    for offset, value in enumerate(values):
        if oracle.apply(offset, value).outcome == "accepted" and value is not None:
            return value, oracle.partitions or 1
    return b"", 1


def oracle_of(evidence: Evidence) -> Oracle | None:
    """The oracle where reading of the log begins: at 0, or at the snapshot that stands for what was deleted (N9).

    None if there is no such snapshot that is sound and confirmed.
    """
    oracle = Oracle(evidence.number, evidence.root or None)
    if not evidence.first:
        return oracle
    read = Snapshots()
    for offset in range(evidence.first, len(evidence.log)):
        envelope = parse_envelope(evidence.log[offset])
        if envelope is not None and (envelope.group, envelope.type) == ("", HIGHEST_TYPE):
            with contextlib.suppress(ValueError):
                read.read(decode_record(envelope.type, envelope.body))
    for state, chain in read.confirmed(evidence.number):
        if state.at == evidence.first:
            oracle.begin_at(state, chain)
            return oracle
    return None


class Tenure:
    """One accepted claim: the records [epoch, end) of the log."""

    __slots__ = ("end", "ended_by", "epoch", "generation", "given_back", "handed_over", "key", "let_go", "mode", "ms",
                 "position", "session")  # fmt: skip

    def __init__(self, key: Key, epoch: int, session: int, ms: int, position: int, generation: int,
                 mode: int) -> None:  # fmt: skip
        self.key, self.epoch, self.session, self.ms = key, epoch, session, ms
        self.position, self.generation, self.mode = position, generation, mode
        self.end = 2**62
        self.ended_by = ""
        self.let_go = (-1, -1)  # who first sent the Release or Leave that ended it, and when
        self.handed_over = False  # by a Release for the sake of another live member, after its handlers had finished
        self.given_back: int | None = None  # at most once: its Release made this the position, which had been greater


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
    from_: int
    start: int
    to: int
    sent_ms: int
    offset: int  # of the record


class History:
    """The log, folded once by the oracle, as the facts that the invariants speak of."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        oracle = oracle_of(evidence)
        self.oracle = oracle or Oracle(evidence.number, evidence.root or None)
        self.stopped: OracleStop | None = None  # where no reader may go on (S14)
        self.tenures: dict[tuple[str, int], Tenure] = {}
        self.by_key: dict[Key, list[Tenure]] = {}
        self.lives: dict[tuple[str, int], Life] = {}
        self.advances: list[Advance] = []
        self.grants: dict[tuple[str, int], list[Grant]] = {}
        self.pauses: dict[str, list[tuple[int, int]]] = {}
        self.moved: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
        self.evictions: list[tuple[int, str, dict[str, Any]]] = []
        self.claim_records: list[tuple[int, Key]] = []
        self.claimants: list[tuple[int, int, int]] = []  # of each claim record: offset, sender, first sent
        self.notes: list[tuple[int, str, str]] = []  # ms, group, kind
        self.pauses_of: dict[tuple[str, str], list[int]] = {}  # group, author -> accepted starts and renewals
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
        if oracle is None:
            self.stopped = OracleStop("no snapshot", evidence.first)
            self._say("S14", evidence.first, "no sound and confirmed snapshot stands for what was deleted before")
        elif evidence.first:
            self._begin()
        for offset in range(self.oracle.next_offset, len(evidence.log) if oracle is not None else 0):
            value = evidence.log[offset]
            if offset in evidence.gaps:
                continue
            before = self._states() if offset in evidence.poisoned else {}
            try:
                verdict = self.oracle.apply(offset, value)
            except OracleStop as stop:
                self.stopped = stop
                break
            if before and before != self._states() and evidence.poisoned[offset] not in ("replay", "newer"):
                self._say("S13", offset, f"poison ({evidence.poisoned[offset]}) changes the world")
            if value is not None and verdict.group is not None and verdict.record is not None:
                if verdict.outcome == "accepted":
                    self._note(offset, value, verdict)
                if verdict.record.type == "ClaimingPartition":
                    fields = verdict.record.fields
                    key = (verdict.group, fields["topic"], fields["partition"])
                    self.claim_records.append((evidence.appended_ms[offset], key))
                    sent_ms, _, sender = evidence.sent.get(value, (-1, -1, -1))
                    self.claimants.append((offset, sender, sent_ms))
            for group, state, chain, client in digests.get(offset + 1, ()):
                held = (self.oracle.state_digest(group), self.oracle.chain_digest()[1])
                if held != (state, chain) and client not in evidence.corrupted:
                    self._say("S1", offset, f"client {client} holds another world at checkpoint {offset + 1}")
            for client, group, state in finals.get(offset + 1, ()):
                if self.oracle.state_digest(group) != state and client not in evidence.corrupted:
                    self._say("S1", offset, f"client {client} ends with another world after {offset}")
        for group, at in self._paused_at.items():
            self.pauses.setdefault(group, []).append((at, 2**62))

    def _begin(self) -> None:
        """What holds where reading begins, as if all before it had been read."""
        evidence = self.evidence
        for name, group in self.oracle.groups.items():
            for session in group.sessions.values():
                life = Life(session.join["instance_id"], session.join["interval_ms"], name)
                life.extensions.append(Extension(session.extended, evidence.appended_ms[session.extended]))
                self.lives[name, session.id] = life
            for place, part in group.partitions.items():
                key = (name, *place)
                self._positions[key] = part.position
                if part.owner >= 0:
                    tenure = Tenure(key, part.epoch, part.owner, evidence.appended_ms[part.epoch], part.position,
                                    part.generation, group.mode)  # fmt: skip
                    self._open.setdefault(name, {})[key] = self.tenures[name, part.epoch] = tenure
                    self.by_key.setdefault(key, []).append(tenure)
            if group.paused:
                self._paused_at[name] = group.pause_change

    def _states(self) -> dict[str, int]:
        return {"": 0, **{name: self.oracle.state_digest(name) for name in self.oracle.groups}}

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
            self._advance(self.tenures[group, fields["epoch"]], offset, sent_ms, released=True)
            self.tenures[group, fields["epoch"]].handed_over = fields["reason"] == HAND_OVER
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
        elif kind == "Note":
            self.notes.append((self.evidence.appended_ms[offset], group, fields["kind"]))
        if kind in ("Join", "Leave", "Evict", "ReleasingPartition", "GroupConfig"):
            self._end_tenures(group, offset, kind, (self.evidence.sent.get(value, (0, 0, -1))[2], sent_ms))
        if kind in ("ReleaseGroup", "SetPosition", "GroupConfig"):
            self._pause(group, offset)
        if kind == "ReleaseGroup" and fields["duration_ms"]:
            self.pauses_of.setdefault((group, fields["by"]), []).append(offset)
        if kind in ("Topology", "GroupConfig"):
            self._forget(group)

    def _extend(self, life: Life, offset: int, sent_ms: int) -> None:
        newest = life.extensions[-1].sent_ms if life.extensions else -1
        life.extensions.append(Extension(offset, max(newest, sent_ms)))

    def _claim(self, group: str, fields: dict[str, Any], offset: int) -> None:
        key = (group, fields["topic"], fields["partition"])
        part = self.oracle.groups[group].partitions[key[1], key[2]]
        tenure = Tenure(key, offset, fields["session"], self.evidence.appended_ms[offset], part.position,
                        part.generation, self.oracle.groups[group].mode)  # fmt: skip
        if key in self._open.setdefault(group, {}):
            self._say("S2", offset, f"{key} is claimed while it is owned")
        if group in self._paused_at:
            self._say("S11", offset, f"{key} is claimed in a pause")
        if self._positions.get(key, part.position) not in (part.position, -1):
            self._say("S10", offset, f"the position of {key} changed by a claim")
        self._open[group][key] = self.tenures[group, offset] = tenure
        self.by_key.setdefault(key, []).append(tenure)
        self._positions[key] = part.position

    def _end_tenures(self, group: str, offset: int, kind: str, sent: tuple[int, int]) -> None:
        opened = self._open.get(group, {})
        partitions = self.oracle.groups[group].partitions
        for key, tenure in list(opened.items()):
            if partitions[key[1], key[2]].epoch != tenure.epoch:
                tenure.end, tenure.ended_by = offset, kind
                if kind in ("Leave", "ReleasingPartition"):
                    tenure.let_go = sent
                del opened[key]

    def _advance(self, tenure: Tenure, offset: int, sent_ms: int, released: bool = False) -> None:
        group, topic, number = tenure.key
        position = self.oracle.groups[group].partitions[topic, number].position
        before = self._positions.get(tenure.key, -1)
        if position < before and tenure.mode == AT_MOST_ONCE and released and position >= tenure.position:
            tenure.given_back = position
        elif position < before:
            self._say("S10", offset, f"the position of {tenure.key} fell from {before} to {position}")
        elif position > before and offset >= self.evidence.inherited:
            self.advances.append(Advance(tenure.key, tenure.generation, before, position, offset, sent_ms))
        self._positions[tenure.key] = position

    def _grant(self, group: str, fields: dict[str, Any], offset: int, sent_ms: int) -> None:
        tenure = self.tenures[group, fields["epoch"]]
        if group in self._paused_at:
            self._say("S11", offset, f"messages of {tenure.key} are granted in a pause")
        if fields["start"] < self._positions.get(tenure.key, -1):
            self._say("S6", offset, f"a grant of {tenure.key} begins below what was granted")
        grant = Grant(tenure.key, tenure.epoch, fields["from"], fields["start"], fields["to"], sent_ms, offset)
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
