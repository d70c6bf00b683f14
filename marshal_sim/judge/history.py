"""One log, folded once by the oracle, as the facts that the invariants speak of: claims, sessions, grants, pauses.

This file judges what a single record proves wrong: S1, S13, and what model.py finds (S2, S6, S10, S11, S12,
S15). The functions that auditor.py lists judge everything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from marshal_sim.judge.checkpoints import Checkpoints
from marshal_sim.judge.evidence import SIMULATED, Client, Delivery, Evidence, Key, LostTail, Slack, Violation
from marshal_sim.judge.facts import (
    FOREVER,
    NOBODY,
    Advance,
    ClaimSpan,
    Eviction,
    Extension,
    FinalPosition,
    Grant,
    Raise,
    SessionFacts,
    WaitedOut,
    finished_spans,
)
from marshal_sim.judge.model import AT_MOST_ONCE, GroupModel
from marshal_sim.oracle.oracle import Oracle, OracleStop, Verdict
from marshal_sim.oracle.snapshot import FOLD_VERSION, Snapshots
from marshal_sim.oracle.wire import SIGNED_TYPE, SNAPSHOT_TYPE, Record, decode_record, parse_envelope

LOST = "offset_lost"  # kind of a Note
STUCK = "handler_stuck"  # kind of a Note
HAND_OVER = "hand-over"  # reason of a Release by A3
BEHIND = "falls behind"  # reason of a Release by D16
DRAINED = "drained"  # reason of a Release by a drain of the user
DIED = "died"  # reason of a Release by T19
ENDINGS = ("Join", "Leave", "Evict", "ReleasingPartition", "SeekingPartition", "GroupConfig")  # may end a claim
MAY_COUNT = ("replay", "newer", "forged")  # foreign records that the rules may accept, or that end a group
COPY = "copy"  # of a record with a signature: counts no second time


def root_of(values: Iterable[bytes | None]) -> tuple[bytes, int]:
    """Returns the root Genesis in log 0 and the number of logs that it names; b"" and 1 if there is no root (L3)."""
    oracle = Oracle()
    for offset, value in enumerate(values):
        if oracle.apply(offset, value).outcome == "accepted" and value is not None:
            return value, oracle.partitions or 1
    return b"", 1


def oracle_of(evidence: Evidence) -> Oracle | None:
    """Returns the oracle where reading of the log begins: at 0, or at the snapshot that replaces deleted records (N9).

    Returns None if records are deleted and no snapshot is sound and confirmed.
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


class History:
    """Holds the facts of one log, which it folds once by the oracle."""

    evidence: Evidence
    slack: Slack

    def __init__(self, evidence: Evidence, slack: Slack = SIMULATED) -> None:
        self.evidence, self.slack = evidence, slack
        # In the order in which they began, without those that a clone inherited.
        self.deliveries: list[Delivery] = sorted(
            (d for d in evidence.deliveries if not d.inherited), key=lambda d: d.begin_ms
        )
        self._newest_epochs: dict[tuple[str, int], int] = {}  # by claim: the highest leader epoch that it delivered
        for d in self.deliveries if evidence.lost else ():
            claimed = d.group, d.epoch
            self._newest_epochs[claimed] = max(d.leader_epoch, self._newest_epochs.get(claimed, 0))
        oracle = oracle_of(evidence)
        self.oracle: Oracle = oracle or Oracle(evidence.number, evidence.root or None)
        self.stopped: OracleStop | None = None  # where no reader may continue (S14)
        self.claims: dict[tuple[str, int], ClaimSpan] = {}
        self.by_key: dict[Key, list[ClaimSpan]] = {}
        self.sessions: dict[tuple[str, int], SessionFacts] = {}
        self.advances: list[Advance] = []
        self.grants: dict[tuple[str, int], list[Grant]] = {}
        # by group, session and sender: when each ClaimingMessages was first sent, accepted or not
        self.asked: dict[tuple[str, int, Client], dict[bytes, float]] = {}
        self.pauses: dict[str, list[tuple[int, int]]] = {}
        self.moved: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
        self.set_at: dict[Key, list[int]] = {}  # by partition: records that set its position, or forgot it (F9.2, F9.5)
        self.renewed: dict[tuple[str, str], list[int]] = {}  # by group and topic: records by which it is another one
        self.replaced: dict[tuple[str, str, str], float] = {}  # by group, topic and id: when another one took its place
        self.sought: dict[Key, list[int]] = {}  # by partition: claims that a seek of their owner has begun (F6.6)
        self.stuck: list[tuple[float, str, dict[str, Any]]] = []  # Notes of silent handlers: when sent, group, fields
        self.evictions: list[Eviction] = []
        self.waited_out: list[WaitedOut] = []
        self.claim_records: list[tuple[float, Key]] = []
        self.claimants: list[tuple[int, Client, float]] = []  # of each claim record: offset, sender, first sent
        self.notes: list[tuple[float, str, dict[str, Any]]] = []  # ms, group, fields
        self.lost_ranges: dict[Key, list[tuple[int, int]]] = {}  # [from, to) that Kafka had deleted before (D6)
        self.pauses_of: dict[tuple[str, str], list[int]] = {}  # group, author -> accepted starts and renewals
        self.divergent: list[tuple[int, str, int, Client]] = []  # offset, group, session, sender of a foreign digest
        self.verdicts: dict[str, int] = {}
        self.final_positions: dict[Key, FinalPosition] = {}
        self.counted: dict[str, int] = {
            "S3": 0,
            "S4": 0,
            "S5": 0,
            "X12": 0,
            "V6": 0,
            "V15": 0,  # messages for which it was judged how long their partition had to wait
            **dict.fromkeys((f"S{number}" for number in range(19, 31)), 0),  # how often it was judged
        }  # cases that are counted and are no violations
        self.found: list[Violation] = []
        self._open: dict[str, dict[Key, ClaimSpan]] = {}
        self._models: dict[str, GroupModel] = {}
        self._paused_at: dict[str, int] = {}
        self._touched: set[str] = set()  # groups that a record since the last checkpoint named
        self._signed: set[bytes] = set()  # accepted records with a signature
        if oracle is None:
            self.stopped = OracleStop("no snapshot", evidence.first)
            self._report("S14", evidence.first, "no sound and confirmed snapshot replaces what was deleted before")
        elif evidence.first:
            self._begin()
        self.checkpoints: Checkpoints = Checkpoints(
            self.oracle.next_offset, self.oracle.chain_digest()[1], self._states()
        )
        if oracle is not None:
            self._fold()
        if not self.final_positions:
            self._take_final_positions()
        for group, at in self._paused_at.items():
            self.pauses.setdefault(group, []).append((at, FOREVER))

    def _fold(self) -> None:
        evidence = self.evidence
        digests: dict[int, list[tuple[str, int, int, Client]]] = {}
        for (group, at, state, chain), client in evidence.digests.items():
            digests.setdefault(at, []).append((group, state, chain, client))
        finals: dict[int, list[tuple[Client, str, int]]] = {}
        for client, group, at, state in evidence.finals:
            finals.setdefault(at, []).append((client, group, state))
        for offset in range(self.oracle.next_offset, len(evidence.log)):
            if offset == evidence.settled:
                self._take_final_positions()
            if offset in evidence.gaps:
                continue
            if not self._apply(offset, evidence.log[offset]):
                break
            for group, state, chain, client in digests.get(offset + 1, ()):
                held = (self.oracle.state_digest(group), self.oracle.chain_digest()[1])
                if held != (state, chain) and client not in evidence.corrupted:
                    self._report("S1", offset, f"client {client} holds another world at checkpoint {offset + 1}")
            for client, group, state in finals.get(offset + 1, ()):
                if self.oracle.state_digest(group) != state and client not in evidence.corrupted:
                    self._report("S1", offset, f"client {client} ends with another world after {offset}")

    def _apply(self, offset: int, value: bytes | None) -> bool:
        """Folds one record; returns False if no reader may continue after it."""
        evidence, foreign = self.evidence, self.evidence.foreign_records.get(offset, "")
        # Digests cost: of our own records only every 16th that changes nothing is looked at.
        sampled = offset == self.checkpoints.newest
        before = self._states() if foreign else self.checkpoints.states(offset) if sampled else {}
        opaque = self._opaque() if foreign or sampled else set()
        try:
            verdict = self.oracle.apply(offset, value)
        except OracleStop as stop:
            self.stopped = stop
            return False
        name = f"{verdict.outcome} {verdict.reason}".strip()
        self.verdicts[name] = self.verdicts.get(name, 0) + 1
        harmless = verdict.outcome != "accepted" and opaque == self._opaque() if foreign or sampled else False
        refused = foreign == COPY and value not in self._signed  # then the reason may have passed (F11.4)
        if (harmless or (foreign and foreign not in MAY_COUNT and not refused)) and before != self._states():
            what = f"a foreign record ({foreign})" if foreign else f"a record that is {name}"
            self._report("S13", offset, f"{what} changes the world")
        if verdict.group is not None:
            self._touched.add(verdict.group)
            if value is not None and verdict.outcome == "accepted" and value[13 + value[11]] == SIGNED_TYPE:
                self._signed.add(value)
        if value is not None and verdict.group is not None and verdict.record is not None:
            self._read(offset, value, verdict)
            if verdict.record.type == "ClaimingPartition" and foreign != "forged":
                fields = verdict.record.fields
                key = (verdict.group, fields["topic"], fields["partition"])
                self.claim_records.append((evidence.appended_ms[offset], key))
                sent_ms, _, sender = evidence.sent.get(value, (-1, -1, NOBODY))
                self.claimants.append((offset, self._sender(sender, verdict.group, fields), sent_ms))
        at, chain = self.oracle.chain_digest()
        if at == offset + 1:
            known = self._touched & self.oracle.groups.keys()
            self.checkpoints.put(at, chain, {group: self.oracle.state_digest(group) for group in known})
            self._touched.clear()
        return True

    def _sender(self, sender: Client | None, group: str, fields: dict[str, Any]) -> Client:
        """Returns the first sender of a record if it is known, otherwise the client of the session that the record
        names.
        """
        if sender is not None:
            return sender
        facts = self.sessions.get((group, fields.get("session", NOBODY)))
        return facts.client_id if facts is not None else str(fields.get("client_id", NOBODY))

    def _take_final_positions(self) -> None:
        """Notes all positions. Called at the offset by which everything should be done."""
        for name, group in self.oracle.groups.items():
            for place, part in group.partitions.items():
                self.final_positions[name, *place] = FinalPosition(part.position, bool(part.parked))

    def _opaque(self) -> set[str]:
        return {name for name, group in self.oracle.groups.items() if group.opaque_at != NOBODY}

    def _begin(self) -> None:
        """Notes the facts of the state at which reading begins, as if the records before it had been read."""
        evidence = self.evidence
        for name, group in self.oracle.groups.items():
            self._models[name] = GroupModel()
            self._models[name].adopt(group)
            for session in group.sessions.values():
                facts = SessionFacts(
                    session.join["instance_id"], session.join["client_id"], session.join["interval_ms"]
                )
                facts.extensions.append(Extension(session.extended, evidence.appended_ms[session.extended]))
                self.sessions[name, session.id] = facts
            for place, part in group.partitions.items():
                key = (name, *place)
                if part.owner >= 0:
                    client_id = group.sessions[part.owner].join["client_id"]
                    ms = evidence.appended_ms[part.epoch]
                    where, rules = (part.position, part.generation), (group.mode, self._models[name].policy)
                    known = self._id_of(name, place[0])
                    claim = ClaimSpan(key, part.epoch, part.owner, client_id, ms, ms, *where, *rules, known)
                    self._open.setdefault(name, {})[key] = self.claims[name, part.epoch] = claim
                    self.by_key.setdefault(key, []).append(claim)
            if group.paused:
                self._paused_at[name] = group.pause_change

    def _states(self) -> dict[str, int]:
        return {"": 0, **{name: self.oracle.state_digest(name) for name in self.oracle.groups}}

    def _report(self, invariant: str, offset: int, text: str) -> None:
        self.found.append(Violation(invariant, self.evidence.appended_ms[offset], offset, text))

    def _read(self, offset: int, value: bytes, verdict: Verdict) -> None:
        """Notes what one record of a group did, and lets the group's model judge it."""
        name, record = verdict.group, verdict.record
        assert name is not None
        assert record is not None
        accepted, state = verdict.outcome == "accepted", self.oracle.groups.get(name)
        if state is None or verdict.outcome == "ignored":
            return
        if accepted and record.type == "ClaimingMessages":  # what was granted of it (F5.2)
            granted = tuple(record.fields["ranges"][index] for index in verdict.granted)
            record = Record(record.type, {**record.fields, "ranges": granted})
        model = self._models.setdefault(name, GroupModel())
        sent_ms, _, known = self.evidence.sent.get(value, (self.evidence.appended_ms[offset], 0, NOBODY))
        sender = self._sender(known, name, record.fields)
        if offset not in self.evidence.foreign_records:
            self._note_attempt(offset, name, record, accepted, sent_ms, sender)
            if record.type == "ClaimingMessages":
                self.asked.setdefault((name, record.fields["session"], sender), {})[value] = sent_ms
        if accepted:
            self._note_accepted(offset, name, record, sent_ms, sender)
        for invariant, text in model.read(offset, record.type, record.fields, accepted, state):
            self._report(invariant, offset, f"{name}: {text}")
        if accepted:
            self._note_consequences(offset, name, record, sent_ms, sender)

    def _note_attempt(
        self, offset: int, group: str, record: Record, accepted: bool, sent_ms: float, sender: Client
    ) -> None:
        """Notes what a record shows about its sender. A rejected record shows that, too."""
        fields, kind = record.fields, record.type
        session = fields.get("session", NOBODY)
        if kind == "Heartbeat" and fields["digest"] is not None:
            if not self._holds(group, fields["digest"]):
                if sender not in self.evidence.corrupted and not self.evidence.branched:
                    at = fields["digest"]["at"]
                    self._report("S1", offset, f"session {session} of {group} reports another state at checkpoint {at}")
                if accepted:
                    self.divergent.append((offset, group, session, sender))
        elif kind == "Leave" and (group, session) in self.sessions:
            self.sessions[group, session].left.setdefault(sender, sent_ms)
        elif kind == "ReleasingPartition":
            claim = self.claims.get((group, fields["epoch"]))
            if claim is not None and claim.session == session:
                claim.released.setdefault(sender, sent_ms)
                if fields["reason"] == DRAINED:
                    claim.drained.setdefault(sender, sent_ms)

    def _holds(self, group: str, digest: dict[str, int]) -> bool:
        """Returns True if a heartbeat's digest equals the oracle's at that checkpoint, or cannot be compared with it
        (G4).
        """
        at, told = digest["at"], (digest["state"], digest["chain"])
        if digest["fold"] != FOLD_VERSION or at < self.checkpoints.first:
            return True
        return told == (self.checkpoints.state(group, at), self.checkpoints.chain(at))

    def _note_accepted(self, offset: int, group: str, record: Record, sent_ms: float, sender: Client) -> None:
        """Notes the facts of an accepted record. Called while the model still holds the state before it."""
        fields, kind = record.fields, record.type
        facts = self.sessions.get((group, fields.get("session", -1)))
        claim = self.claims.get((group, fields.get("epoch", -1)))
        if kind == "Heartbeat" and facts is not None:
            cloned = bool(facts.heartbeats.keys() - {sender})
            late = cloned or sent_ms < max(facts.heartbeats.values(), default=-1)
            told_ms = self.evidence.told.get(offset, sent_ms)  # acks after it need not be in there
            facts.heartbeats[sender] = max(facts.heartbeats.get(sender, -1), told_ms)
            for entry in fields["claims"]:
                named = self.claims.get((group, entry["epoch"]))
                if named is not None and named.end > offset and named.session == fields["session"]:
                    named.in_order = named.in_order and not late
                    self._advance(named, offset, sent_ms)
        elif kind == "ReleasingPartition" and claim is not None:
            self._advance(claim, offset, sent_ms)
            claim.behind = fields["reason"] == BEHIND
            claim.handed_over = claim.behind or fields["reason"] == HAND_OVER
            claim.died = fields["reason"] == DIED
        elif kind == "ClaimingMessages":
            for wanted in fields["ranges"]:
                owned = self.claims.get((group, wanted["epoch"]))
                if owned is not None:
                    span = (wanted["from"], wanted["start"], wanted["to"])
                    grant = Grant(owned.key, owned.epoch, *span, sent_ms, offset)
                    self.grants.setdefault((group, owned.epoch), []).append(grant)
        elif kind == "ClaimingPartition":
            self._claim(kind, (group, fields["topic"], fields["partition"]), fields["session"], offset, sent_ms)
        elif kind == "Join":
            self.sessions[group, offset] = SessionFacts(
                fields["instance_id"], fields["client_id"], fields["interval_ms"]
            )
        elif kind == "Evict" and facts is not None:
            held = sum(t.session == fields["session"] for t in self._open.get(group, {}).values())
            waited_ms = sent_ms - self.evidence.appended_ms[fields["observed"]]
            self.evictions.append(
                Eviction(offset, group, fields["session"], fields["observed"], waited_ms, fields["by"], held)
            )
        elif kind == "SetPosition":
            self.moved.setdefault((group, fields["by"]), []).append((offset, fields))
            for move in fields["moves"]:
                self.set_at.setdefault((group, move["topic"], move["partition"]), []).append(offset)
        elif kind == "Topology":
            known = self._models[group].ids.get(fields["topic"], "")
            if "" not in (known, fields["topic_id"]) and known != fields["topic_id"]:
                self.renewed.setdefault((group, fields["topic"]), []).append(offset)
                self.replaced[group, fields["topic"], known] = sent_ms
        elif kind == "GroupConfig" and fields["deleted"]:
            for place in self._models[group].positions:
                self.set_at.setdefault((group, *place), []).append(offset)
        elif kind == "Note":
            self.notes.append((self.evidence.read_ms[offset], group, fields))
            if fields["kind"] == STUCK:
                self.stuck.append((sent_ms, group, fields))
            if fields["kind"] == LOST:
                key = (group, fields["topic"], fields["partition"])
                self.lost_ranges.setdefault(key, []).append((fields["from"], fields["to"]))
        elif kind == "ReleaseGroup" and fields["duration_ms"]:
            self.pauses_of.setdefault((group, fields["by"]), []).append(offset)
        elif kind == "ReleaseGroup":
            model = self._models[group]  # as it was before this record
            if model.paused and fields["token"] != model.pause_change:
                waited_ms = sent_ms - self.evidence.appended_ms[model.pause_change]
                need_ms = model.pause_ms
                self.waited_out.append(WaitedOut(offset, group, model.pause_change, need_ms, waited_ms, fields["by"]))

    def _note_consequences(self, offset: int, group: str, record: Record, sent_ms: float, sender: Client) -> None:
        """Notes the facts that follow from the model's state after an accepted record."""
        model, kind = self._models[group], record.type
        session = offset if kind == "Join" else record.fields["session"] if kind == "Heartbeat" else -1
        if model.extended.get(session) == offset:
            extensions = self.sessions[group, session].extensions
            extensions.append(Extension(offset, max(sent_ms, extensions[-1].sent_ms if extensions else -1)))
        opened = self._open.get(group, {})
        for key, claim in list(opened.items()) if kind in ENDINGS else ():
            if model.held.get((key[1], key[2])) != (claim.session, claim.epoch):
                claim.end, claim.ended_by = offset, kind
                if kind in ("Leave", "ReleasingPartition"):
                    claim.released_by = (sender, sent_ms)
                del opened[key]
        for place, position in model.positions.items() if kind in ("Topology", "GroupConfig") else ():
            if position == NOBODY:
                self.set_at.setdefault((group, *place), []).append(offset)
        if kind == "SeekingPartition":
            left = self.claims.get((group, record.fields["epoch"]))
            if left is not None and left.end == offset:
                self._claim(kind, left.key, left.session, offset, sent_ms)
                self.sought.setdefault(left.key, []).append(offset)
        if model.paused and group not in self._paused_at:
            self._paused_at[group] = offset
        elif not model.paused and group in self._paused_at:
            self.pauses.setdefault(group, []).append((self._paused_at.pop(group), offset))

    def _claim(self, kind: str, key: Key, session: int, offset: int, sent_ms: float) -> None:
        group = self.oracle.groups[key[0]]
        part, facts = group.partitions[key[1], key[2]], self.sessions.get((key[0], session))
        client_id = facts.client_id if facts is not None else ""
        claim = ClaimSpan(
            key,
            offset,
            session,
            client_id,
            self.evidence.read_ms[offset],
            sent_ms,
            part.position,
            part.generation,
            group.mode,
            self._models[key[0]].policy,
            self._id_of(key[0], key[1]),
        )
        if claim.mode != AT_MOST_ONCE:
            claim.finished = finished_spans(part.position, part.progress)
            claim.attempts = part.attempts - 1  # the claim itself counts as one (F4.5)
        elif kind == "ClaimingPartition":
            claim.unsettled = group.unsettled or claim.unsettled
        self._open.setdefault(key[0], {})[key] = self.claims[key[0], offset] = claim
        self.by_key.setdefault(key, []).append(claim)

    def _advance(self, claim: ClaimSpan, offset: int, sent_ms: float) -> None:
        """Notes how a record of the owner moved the position of its claim, or its floor."""
        group, topic, number = claim.key
        part, model = self.oracle.groups[group].partitions[topic, number], self._models[group]
        position, before = part.position, model.positions.get((topic, number), -1)
        floor = model.floors.get((topic, number), -1)
        if part.floor > floor and claim.mode == AT_MOST_ONCE:
            claim.raised.append(Raise(floor, part.floor, offset, sent_ms))
        if position < before and claim.mode == AT_MOST_ONCE:
            claim.given_back = position
        elif position > before and offset >= self.evidence.inherited:
            self.advances.append(Advance(claim, before, position, offset, sent_ms))

    def _id_of(self, group: str, topic: str) -> str:
        known = self.oracle.groups[group].topics.get(topic)
        return "" if known is None else known.id

    def offsets(self, claim: ClaimSpan) -> list[int]:
        """Returns the offsets of all messages of the partition, as the topic has or had it that the log knew at the
        claim."""
        _, topic, number = claim.key
        former = self.evidence.former.get((topic, claim.topic_id))
        return self.evidence.topics.get((topic, number), []) if former is None else former.offsets.get(number, [])

    def is_gone(self, claim: ClaimSpan, ms: float) -> bool:
        """Returns whether the topic that a claim is about was deleted by then: its owner may have gone on in another
        one of its name, and what it had not read is nobody's."""
        former = self.evidence.former.get((claim.key[1], claim.topic_id))
        return former is not None and former.deleted_ms <= ms

    def lost_tails(self, claim: ClaimSpan) -> list[LostTail]:
        """Returns how the partition of a claim lost its newest messages, in the topic that the log knew at the
        claim."""
        return [
            tail
            for tail in self.evidence.lost.get((claim.key[1], claim.key[2]), ())
            if tail.topic_id in ("", claim.topic_id) or not claim.topic_id
        ]

    def is_anew(self, claim: ClaimSpan, offset: int) -> bool:
        """Returns whether the message that a partition has at an offset is none that a claim is about: it was written
        where another one was lost, and the claim began at or read what was lost (S29)."""
        return any(
            tail.end <= offset
            and (claim.ms < tail.ms or claim.position > tail.end)
            and self._newest_epochs.get((claim.key[0], claim.epoch), 0) < tail.leader_epoch
            for tail in (self.lost_tails(claim) if self.evidence.lost else ())
        )

    def is_outlived(self, claim: ClaimSpan) -> bool:
        """Returns whether the topic of a claim was deleted before the claim was over."""
        read_ms = self.evidence.read_ms
        return self.is_gone(claim, read_ms[claim.end] if claim.end < len(read_ms) else FOREVER)
