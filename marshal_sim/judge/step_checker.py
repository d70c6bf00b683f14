"""The judge of one step: the facts of each prefix of a log, and whether a record or a delivery may follow it.

The exhaustive search calls it at every transition. Like auditor.py it knows the oracle alone and shares no code with
what it judges. `Facts` are values: adding a record makes new ones, because a search continues from each state in many
ways. A judgement is "" if nothing is broken, or a sentence that begins with the invariant. The journal is the set of
marks that handlers leave: which messages they have begun or finished.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from marshal_sim.judge.claims import COVERED
from marshal_sim.oracle.oracle import Oracle, Record, Verdict
from marshal_sim.oracle.rules import EVICT_INTERVALS

Key = tuple[str, int]  # topic, partition
Mark = tuple[str, str, int, int, int]  # "begun" (at most once) or "finished", topic, partition, generation, offset
AT_LEAST_ONCE, AT_MOST_ONCE = 1, 2


class AcceptedClaim(NamedTuple):
    """One accepted claim of a partition."""

    key: Key
    session: int
    instance: bytes
    position: int
    generation: int
    live: bool


class Extension(NamedTuple):
    """The newest extension of a live session. `sent_ms` is the latest time at which an extension so far was
    sent.
    """

    offset: int
    sent_ms: int
    interval_ms: int


class PositionAdvance(NamedTuple):
    """Says that a record of the owner moved a position of an at-least-once group forward, from `before` to `after`."""

    key: Key
    generation: int
    before: int
    after: int


class Facts:
    """The facts of one prefix of the log about one group."""

    __slots__ = (
        "advances",
        "broken",
        "by",
        "claims",
        "covers",
        "digest",
        "extensions",
        "frozen",
        "grants",
        "kind",
        "mode",
        "newest",
        "opaque",
        "outcome",
        "paused",
        "positions",
        "reason",
        "sent_ms",
    )

    by: str
    kind: str
    opaque: bool
    outcome: str
    paused: bool
    reason: str

    def __init__(self) -> None:
        """Makes the facts of the empty log."""
        self.frozen: bytes = pickle.dumps(Oracle(), 5)  # the oracle, which has folded this prefix
        self.outcome, self.reason, self.kind, self.by = "", "", "", ""  # of the newest record
        self.digest: int = 0
        self.mode: int = 0
        self.paused = self.opaque = False
        self.covers: str = ""  # the group's policy, if it demands a claim above each partition (A9, A11)
        self.sent_ms: tuple[int, ...] = ()  # by offset
        self.claims: dict[int, AcceptedClaim] = {}  # by epoch
        self.newest: dict[Key, int] = {}  # epoch of the newest claim
        self.grants: dict[int, tuple[tuple[int, int], ...]] = {}  # by epoch
        self.extensions: dict[int, Extension] = {}  # by session
        self.positions: dict[Key, int] = {}
        self.advances: tuple[PositionAdvance, ...] = ()  # by the newest record
        self.broken: str = ""  # what the newest record violates by itself

    def then(self, group: str, value: bytes | None, sent_ms: int) -> Facts:
        """Returns the facts of this prefix with one more record."""
        oracle: Oracle = pickle.loads(self.frozen)
        verdict = oracle.apply(oracle.next_offset, value)
        after = Facts.__new__(Facts)
        after.frozen = pickle.dumps(oracle, 5)
        after.outcome, after.reason = verdict.outcome, verdict.reason
        after.kind = verdict.record.type if verdict.record is not None else ""
        after.by = str(verdict.record.fields.get("by", "")) if verdict.record is not None else ""
        after.digest = oracle.state_digest(group)
        after.sent_ms = (*self.sent_ms, sent_ms)
        after.grants, after.newest = self.grants, self.newest
        state = oracle.groups.get(group)
        after.mode = state.mode if state is not None else 0
        after.paused = state is not None and state.paused
        after.opaque = state is not None and state.opaque_at >= 0
        policy = state.config.fields["policy"] if state is not None and state.config is not None else ""
        after.covers = policy if policy in COVERED else ""
        parts = state.partitions if state is not None else {}
        live = {part.epoch for part in parts.values() if part.owner >= 0}
        after.claims = {
            epoch: claim if epoch in live or not claim.live else claim._replace(live=False)
            for epoch, claim in self.claims.items()
        }
        after.positions = {key: part.position for key, part in parts.items()}
        after.extensions = self._extended(state.sessions if state is not None else {}, after.sent_ms)
        after.advances = ()
        after.broken = after._take(self, parts, verdict) if verdict.outcome == "accepted" else ""
        return after

    def _extended(self, sessions: dict[int, Any], sent_ms: tuple[int, ...]) -> dict[int, Extension]:
        found = {}
        for session in sessions.values():
            known = self.extensions.get(session.id)
            if known is None or known.offset != session.extended:
                newest_ms = max(sent_ms[session.extended], known.sent_ms if known is not None else -1)
                known = Extension(session.extended, newest_ms, session.join["interval_ms"])
            found[session.id] = known
        return found

    def _take(self, before: Facts, parts: dict[Key, Any], verdict: Verdict) -> str:
        """Judges an accepted record by S2, S6, S10, S11, S12 and S15, as far as the log alone shows them."""
        record, offset = verdict.record, len(self.sent_ms) - 1
        if record is None:
            return ""
        fields = record.fields
        if self.kind == "ClaimingPartition":
            key = (fields["topic"], fields["partition"])
            part, last = parts[key], before.newest.get(key, -1)
            if last >= 0 and before.claims[last].live:
                return f"S2: {key} is claimed while it is owned"
            if before.paused:
                return f"S11: {key} is claimed in a pause"
            instance = self._instance(fields["session"])
            self.newest = {**self.newest, key: offset}
            self.claims[offset] = AcceptedClaim(key, fields["session"], instance, part.position, part.generation, True)
        elif self.kind == "ClaimingMessages":
            for wanted in [fields["ranges"][index] for index in verdict.granted]:
                claim = self.claims[wanted["epoch"]]
                if before.paused:
                    return f"S11: messages of {claim.key} are granted in a pause"
                if wanted["start"] < before.positions[claim.key]:
                    return f"S6: a grant of {claim.key} begins below what was granted"
                grants = (*self.grants.get(wanted["epoch"], ()), (wanted["start"], wanted["to"]))
                self.grants = {**self.grants, wanted["epoch"]: grants}
        elif self.kind == "Evict":
            known = before.extensions[fields["session"]]
            waited_ms = self.sent_ms[offset] - before.sent_ms[fields["observed"]]
            if waited_ms < EVICT_INTERVALS * known.interval_ms:
                return f"S15: session {fields['session']} is evicted {waited_ms} ms after its last sign was sent"
        elif self.kind == "SetPosition":
            for move in fields["moves"]:
                key = (move["topic"], move["partition"])
                if before.newest.get(key, -1) >= 0 and before.claims[before.newest[key]].live:
                    return f"S12: {key} moves under a live owner"
                if self.positions[key] != move["position"]:
                    return f"S10: {key} moves to {self.positions[key]}, not to {move['position']}"
        return self._positions(before, parts, record)

    def _given_back(self, before: Facts, record: Record, key: Key, position: int) -> bool:
        """Returns True if the record is a Release by which an at-most-once owner gave messages back down to `position`
        (F6.3).
        """
        if self.kind != "ReleasingPartition" or self.mode != AT_MOST_ONCE or record.fields["observed"] == -1:
            return False
        claim = before.claims[record.fields["epoch"]]
        return claim.key == key and claim.position <= position == record.fields["give"]

    def _instance(self, session: int) -> bytes:
        oracle: Oracle = pickle.loads(self.frozen)
        for group in oracle.groups.values():
            if session in group.sessions:
                return bytes(group.sessions[session].join["instance_id"])
        return b""

    def _positions(self, before: Facts, parts: dict[Key, Any], record: Record) -> str:
        """Judges whether positions fall (S10), and notes those that grew, which `judge_advances` judges (S7)."""
        for key, position in self.positions.items():
            was = before.positions.get(key, -1)
            if position == was or self.kind in ("SetPosition", "Topology", "GroupConfig"):
                continue
            if position < was and not self._given_back(before, record, key, position):
                return f"S10: the position of {key} falls from {was} to {position}"
            if self.mode == AT_LEAST_ONCE and was >= 0:
                self.advances = (*self.advances, PositionAdvance(key, parts[key].generation, was, position))
        return ""


class Delivery(NamedTuple):
    """A message that is being handed to a handler. `first`: whether it is the claim's first."""

    instance: bytes
    epoch: int
    offset: int
    first: bool


def judge_delivery(delivery: Delivery, read: Facts, log: Facts, journal: frozenset[Mark], now_ms: int) -> str:
    """Judges a delivery by S2, S3, S5, S6, S7, S11 and S14. Returns "" or the sentence about what is broken.

    `read` has the facts of the part of the log that the process has read, `log` the facts of the whole log. `journal`
    says what handlers did.
    """
    claim = read.claims.get(delivery.epoch)
    what = f"offset {delivery.offset} under epoch {delivery.epoch}"
    if claim is None or not claim.live:
        return f"S2: {what}, which is no live claim in what was read"
    if claim.instance != delivery.instance:
        return f"S2: {what}, the claim of another instance"
    if read.covers:
        cover = read.claims.get(read.newest.get((claim.key[0] if read.covers == "topic" else "", -1), -1))
        if cover is None or not cover.live or cover.session != claim.session:
            return f"S2: {what}, without the claim that covers it"
    if read.opaque:
        return f"S14: {what}, in a group that cannot be read any more"
    if read.paused:
        return f"S11: {what}, in a pause that was read"
    newest = log.newest[claim.key]
    if newest != delivery.epoch and log.claims[newest].session != claim.session:
        return f"S3: {what}, which session {log.claims[newest].session} owns by epoch {newest}"
    extension = read.extensions[claim.session]
    if now_ms - extension.sent_ms > extension.interval_ms:
        return f"S3: {what}, {now_ms - extension.sent_ms} ms after the newest extension was sent"
    if read.mode == AT_MOST_ONCE:
        inside = [grant for grant in read.grants.get(delivery.epoch, ()) if grant[0] <= delivery.offset < grant[1]]
        if len(inside) != 1:
            return f"S6: {what} lies in {len(inside)} grants"
        if begun(claim, delivery.offset) in journal:
            return f"S5: {what}, which was delivered before"
    elif delivery.first and delivery.offset != claim.position:
        return f"S7: {what}, where its claim begins at {claim.position}"
    return ""


def begun(claim: AcceptedClaim, offset: int) -> Mark:
    return ("begun", *claim.key, claim.generation, offset)


def finished(claim: AcceptedClaim, offset: int) -> Mark:
    return ("finished", *claim.key, claim.generation, offset)


def judge_advances(facts: Facts, journal: frozenset[Mark]) -> str:
    """Judges whether the newest record moved a position over finished messages only (S7)."""
    for step in facts.advances:
        for offset in range(step.before, step.after):
            if ("finished", *step.key, step.generation, offset) not in journal:
                return f"S7: {step.key} {offset} is skipped"
    return ""


def judge_fold(facts: Facts, outcome: str, reason: str, digest: int) -> str:
    """Judges whether the rationalizer's verdict (`outcome`, `reason`) and state digest are the oracle's (S1)."""
    if (outcome, reason) != (facts.outcome, facts.reason):
        return f"S1: {outcome} {reason}, where the oracle says {facts.outcome} {facts.reason}"
    return "" if digest == facts.digest else "S1: another world than the oracle's"
