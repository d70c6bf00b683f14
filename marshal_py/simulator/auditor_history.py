"""One log, folded once by the oracle, as the facts that the invariants speak of: tenures, sessions, grants, pauses.

What a single record already proves wrong is said here: S1, S13, and what auditor_model.py finds (S2, S6, S10, S11, S12,
S15). Everything else is judged in auditor.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

from marshal_py.simulator.auditor_evidence import Evidence, Key, Violation
from marshal_py.simulator.auditor_model import AT_MOST_ONCE, Model
from marshal_py.simulator.oracle import Oracle, OracleStop, Verdict
from marshal_py.simulator.oracle_snapshot import Snapshots
from marshal_py.simulator.oracle_wire import SNAPSHOT_TYPE, Record, decode_record, parse_envelope

HAND_OVER = "hand-over"  # reason of a Release by A3
ENDINGS = ("Join", "Leave", "Evict", "ReleasingPartition", "GroupConfig")  # records that may end a claim


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
        if envelope is not None and (envelope.group, envelope.type) == ("", SNAPSHOT_TYPE):
            with contextlib.suppress(ValueError):
                read.read(decode_record(envelope.type, envelope.body), offset)
    for state, chain in read.confirmed(evidence.number):
        if state.at == evidence.first:
            oracle.begin_at(state, chain)
            return oracle
    return None


def finished_spans(position: int, progress: bytes) -> list[tuple[int, int]]:
    """The ranges [start, to) that the bytes of 4.2 name as finished; none if they are no such list."""
    numbers, value, shift = [], 0, 0
    for byte in progress:
        value, shift = value + ((byte % 128) << shift), shift + 7
        if byte < 128:
            numbers.append(value)
            value = shift = 0
    spans = []
    for gap, length, times in zip(*[iter(numbers)] * 3, strict=False):
        start, position = position + gap, position + gap + length
        spans += [(start, position)] if times == 0 else []
    return spans


class Tenure:
    """One accepted claim: the records [epoch, end) of the log."""

    __slots__ = (
        "end",
        "ended_by",
        "epoch",
        "finished",
        "generation",
        "given_back",
        "handed_over",
        "in_order",
        "key",
        "let_go",
        "mode",
        "ms",
        "position",
        "session",
    )  # fmt: skip

    def __init__(self, key: Key, epoch: int, session: int, ms: int, position: int, generation: int,
                 mode: int) -> None:  # fmt: skip
        self.key, self.epoch, self.session, self.ms = key, epoch, session, ms
        self.position, self.generation, self.mode = position, generation, mode
        self.end = 2**62
        self.ended_by = ""
        self.let_go = (-1, -1)  # who first sent the Release or Leave that ended it, and when
        self.finished: list[tuple[int, int]] = []  # at least once: what its claim was told to be finished (D1)
        self.in_order = True  # the heartbeats of its one owner came in the order in which they were sent, each once
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
        self._models: dict[str, Model] = {}
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
                self._read(offset, value, verdict)
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
            self._models[name] = Model()
            self._models[name].adopt(group)
            for session in group.sessions.values():
                life = Life(session.join["instance_id"], session.join["interval_ms"], name)
                life.extensions.append(Extension(session.extended, evidence.appended_ms[session.extended]))
                self.lives[name, session.id] = life
            for place, part in group.partitions.items():
                key = (name, *place)
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

    def _read(self, offset: int, value: bytes, verdict: Verdict) -> None:
        """What one record of a group did, and what the model says about it."""
        name, record = verdict.group, verdict.record
        assert name is not None
        assert record is not None
        accepted, state = verdict.outcome == "accepted", self.oracle.groups.get(name)
        if state is None or verdict.outcome == "ignored":
            return
        if accepted and record.type == "ClaimingMessages":  # what was granted of it (F5.2)
            granted = tuple(record.fields["ranges"][index] for index in verdict.granted)
            record = Record(record.type, {**record.fields, "ranges": granted})
        model = self._models.setdefault(name, Model())
        sent_ms, _, sender = self.evidence.sent.get(value, (self.evidence.appended_ms[offset], 0, -1))
        if accepted:
            self._note(offset, name, record, sent_ms, sender)
        for invariant, text in model.read(offset, record.type, record.fields, accepted, state):
            self._say(invariant, offset, f"{name}: {text}")
        if accepted:
            self._settle(offset, name, record, sent_ms, sender)

    def _note(self, offset: int, group: str, record: Record, sent_ms: int, sender: int) -> None:
        """The facts of an accepted record, while the model holds what was before it."""
        fields, kind = record.fields, record.type
        life = self.lives.get((group, fields.get("session", -1)))
        tenure = self.tenures.get((group, fields.get("epoch", -1)))
        if kind == "Heartbeat" and life is not None:
            cloned = bool(life.heartbeats.keys() - {sender})
            late = cloned or sent_ms < max(life.heartbeats.values(), default=-1)
            life.heartbeats[sender] = max(life.heartbeats.get(sender, -1), sent_ms)
            for entry in fields["claims"]:
                named = self.tenures.get((group, entry["epoch"]))
                if named is not None and named.end > offset and named.session == fields["session"]:
                    named.in_order = named.in_order and not late
                    self._advance(named, offset, sent_ms)
        elif kind == "ReleasingPartition" and tenure is not None:
            self._advance(tenure, offset, sent_ms)
            tenure.handed_over = fields["reason"] == HAND_OVER
        elif kind == "ClaimingMessages":
            for wanted in fields["ranges"]:
                owned = self.tenures.get((group, wanted["epoch"]))
                if owned is not None:
                    span = (wanted["from"], wanted["start"], wanted["to"])
                    grant = Grant(owned.key, owned.epoch, *span, sent_ms, offset)
                    self.grants.setdefault((group, owned.epoch), []).append(grant)
        elif kind == "ClaimingPartition":
            self._claim(group, fields, offset)
        elif kind == "Join":
            self.lives[group, offset] = Life(fields["instance_id"], fields["interval_ms"], group)
        elif kind == "Evict" and life is not None:
            self.evictions.append((offset, group, fields))
        elif kind == "SetPosition":
            self.moved.setdefault((group, fields["by"]), []).append((offset, fields))
        elif kind == "Note":
            self.notes.append((self.evidence.appended_ms[offset], group, fields["kind"]))
        elif kind == "ReleaseGroup" and fields["duration_ms"]:
            self.pauses_of.setdefault((group, fields["by"]), []).append(offset)

    def _settle(self, offset: int, group: str, record: Record, sent_ms: int, sender: int) -> None:
        """The facts that follow from what the model holds after an accepted record."""
        model, kind = self._models[group], record.type
        session = offset if kind == "Join" else record.fields["session"] if kind == "Heartbeat" else -1
        if model.extended.get(session) == offset:
            extensions = self.lives[group, session].extensions
            extensions.append(Extension(offset, max(sent_ms, extensions[-1].sent_ms if extensions else -1)))
        opened = self._open.get(group, {})
        for key, tenure in list(opened.items()) if kind in ENDINGS else ():
            if model.held.get((key[1], key[2])) != (tenure.session, tenure.epoch):
                tenure.end, tenure.ended_by = offset, kind
                if kind in ("Leave", "ReleasingPartition"):
                    tenure.let_go = (sender, sent_ms)
                del opened[key]
        if model.paused and group not in self._paused_at:
            self._paused_at[group] = offset
        elif not model.paused and group in self._paused_at:
            self.pauses.setdefault(group, []).append((self._paused_at.pop(group), offset))

    def _claim(self, group: str, fields: dict[str, Any], offset: int) -> None:
        key = (group, fields["topic"], fields["partition"])
        part = self.oracle.groups[group].partitions[key[1], key[2]]
        tenure = Tenure(key, offset, fields["session"], self.evidence.appended_ms[offset], part.position,
                        part.generation, self.oracle.groups[group].mode)  # fmt: skip
        if tenure.mode != AT_MOST_ONCE:
            tenure.finished = finished_spans(part.position, part.progress)
        self._open.setdefault(group, {})[key] = self.tenures[group, offset] = tenure
        self.by_key.setdefault(key, []).append(tenure)

    def _advance(self, tenure: Tenure, offset: int, sent_ms: int) -> None:
        """The position of a claim by a record of its owner."""
        group, topic, number = tenure.key
        position = self.oracle.groups[group].partitions[topic, number].position
        before = self._models[group].positions.get((topic, number), -1)
        if position < before and tenure.mode == AT_MOST_ONCE:
            tenure.given_back = position
        elif position > before and offset >= self.evidence.inherited:
            self.advances.append(Advance(tenure.key, tenure.generation, before, position, offset, sent_ms))
