"""Planted bugs of the fold: each replaces one rule of rationalizer.py by a weaker one. mutants.py alone calls this
file.

A replaced rule has the shape of a rule: (group, offset, record, body) -> its answer, which is the reason of a refusal
or, if it accepts, "" or what the verdict names beside (`_refused` tells them apart). `MUTANTS` has for each the number
of the record type whose rule it wraps. The docstring of a bug says what holds with the bug.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from marshal_py.admin.plans.pause import Drain
from marshal_py.protocol.fold import world
from marshal_py.protocol.fold.rationalizer import reshape
from marshal_py.protocol.fold.world import Group, Partition
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import (
    AT_MOST_ONCE,
    ClaimingMessages,
    ClaimingPartition,
    Evict,
    GroupConfig,
    Heartbeat,
    Join,
    ReleaseGroup,
    ReleasingPartition,
    SetPosition,
    Signed,
)
from marshal_sim.mutants import claims as mutants_claims

Rule = Callable[[Group, int, Any, bytes], str]

JOIN, HEARTBEAT, EVICT, CLAIM, RELEASE, GRANT, PAUSE, MOVE, CONFIG = 1, 2, 4, 5, 6, 7, 8, 9, 11


def _x6(rule: Rule) -> Rule:
    def move(group: Group, offset: int, record: SetPosition, body: bytes) -> str:
        kept = [move.position for move in record.moves]
        for at, item in enumerate(record.moves):
            known = group.partitions.get(TopicPartition(item.topic, item.partition))
            kept[at] = max(item.position, NONE if known is None else known.position)
        moves = tuple(replace(item, position=position) for item, position in zip(record.moves, kept, strict=True))
        return rule(group, offset, replace(record, moves=moves), body)

    return move


def _x7(rule: Rule) -> Rule:
    def move(group: Group, offset: int, record: SetPosition, body: bytes) -> str:
        change, duration_ms = group.pause_change, group.pause_duration_ms
        if group.paused and record.token == change:
            return rule(group, offset, record, body)
        group.pause_change, group.pause_duration_ms = record.token, max(1, duration_ms)
        reason = rule(group, offset, replace(record, resume=False), body)
        group.pause_change, group.pause_duration_ms = change, duration_ms
        return reason

    return move


def _x8(rule: Rule) -> Rule:
    def grant(group: Group, offset: int, record: ClaimingMessages, body: bytes) -> Any:
        verdict: Any = rule(group, offset, record, body)
        for index in verdict if isinstance(verdict, tuple) else ():
            wanted = record.ranges[index]
            group.claims[wanted.epoch].position = wanted.from_  # the next heartbeat would set it
        return verdict

    return grant


def _x9(rule: Rule) -> Rule:
    def grant(group: Group, offset: int, record: ClaimingMessages, body: bytes) -> Any:
        ranges = []
        for wanted in record.ranges:
            claim = group.claims.get(wanted.epoch)
            if claim is not None:
                wanted = replace(wanted, from_=claim.position, start=max(wanted.start, claim.position))
            ranges.append(wanted)
        return rule(group, offset, replace(record, ranges=tuple(ranges)), body)

    return grant


def _x10(rationalizer: Any) -> list[tuple[Any, str, Any]]:
    """Plants X10: a record that names an older claim of a session counts for that session's newer claim of the
    partition.
    """
    epochs: dict[tuple[int, int], Partition] = {}
    exact = rationalizer._claim_of

    def claim_of(group: Group, session: int, epoch: int) -> Partition | None:
        for live, partition in group.claims.items():
            epochs[id(group), live] = partition
        found: Partition | None = exact(group, session, epoch)
        if found is None:
            found = epochs.get((id(group), epoch))
        return found if found is not None and found.owner == session else None

    return [(rationalizer, "_claim_of", claim_of)]


def _x11(rationalizer: Any) -> list[tuple[Any, str, Any]]:
    """Plants X11: when a session ends, its claims go to another process with the same name."""
    end = rationalizer.end_session

    def end_session(group: Group, session: Any) -> None:
        for other in group.sessions.values():
            if other is not session and other.join.client_id == session.join.client_id:
                for epoch in sorted(session.epochs):
                    group.claims[epoch].owner = other.id
                    group.dirty.add(group.claims[epoch])
                    other.epochs.add(epoch)
                    other.held += 1
                session.epochs.clear()
                break
        end(group, session)

    return [(rationalizer, "end_session", end_session)]


def _x13(rule: Rule) -> Rule:
    def heartbeat(group: Group, offset: int, record: Heartbeat, body: bytes) -> str:
        for entry in record.claims:
            claim = group.claims.get(entry.epoch)
            if claim is not None and claim.owner == record.session:
                claim.position = min(claim.position, entry.position)
        return rule(group, offset, record, body)

    return heartbeat


def _p4(rule: Rule) -> Rule:
    def heartbeat(group: Group, offset: int, record: Heartbeat, body: bytes) -> str:
        session = group.sessions.get(record.session)
        if session is not None:
            record = replace(record, sequence=max(record.sequence, session.sequence))
        return rule(group, offset, record, body)

    return heartbeat


def _x15(rule: Rule) -> Rule:
    """Plants X15: a heartbeat is old if its sequence is lower than the greatest of the whole group, instead of its
    session.
    """
    greatest: dict[int, int] = {}

    def heartbeat(group: Group, offset: int, record: Heartbeat, body: bytes) -> str:
        if record.sequence < greatest.get(id(group), -1):
            return "sequence"
        greatest[id(group)] = record.sequence
        return rule(group, offset, record, body)

    return heartbeat


def _x19(rule: Rule) -> Rule:
    def evict(group: Group, offset: int, record: Evict, body: bytes) -> str:
        session = group.sessions.get(record.session)
        if session is not None:
            record = replace(record, observed=session.extended)
        return rule(group, offset, record, body)

    return evict


def _x20(rationalizer: Any) -> list[tuple[Any, str, Any]]:
    """Plants X20: a SetPosition is judged entry by entry, instead of as a whole.

    Its tool does not wait until all partitions are free, so some entries fail.
    """
    rules, rule = list(rationalizer._RULES), rationalizer._RULES[MOVE]

    def move(group: Group, offset: int, record: SetPosition, body: bytes) -> str:
        reasons = [rule(group, offset, replace(record, moves=(item,), resume=False), body) for item in record.moves]
        if record.resume and "" in reasons:
            group.pause_change, group.pause_duration_ms = offset, 0
            reshape(group, group)
        return "" if "" in reasons else reasons[0] if reasons else "empty"

    rules[MOVE] = move
    return [(rationalizer, "_RULES", tuple(rules)), (Drain, "empty", lambda self, group, now: True)]


def _x21(rationalizer: Any) -> list[tuple[Any, str, Any]]:
    """Plants X21: a SetPosition is accepted even if partitions are owned, and its tool does not wait until all are
    free.
    """
    rules, rule = list(rationalizer._RULES), rationalizer._RULES[MOVE]

    def move(group: Group, offset: int, record: SetPosition, body: bytes) -> str:
        owners = {p.tp: p.owner for p in group.partitions.values()}
        for partition in group.partitions.values():
            partition.owner = NONE
        reason: str = rule(group, offset, record, body)
        for partition in group.partitions.values():
            partition.owner = owners.get(partition.tp, NONE)
        return reason

    rules[MOVE] = move
    return [(rationalizer, "_RULES", tuple(rules)), (Drain, "empty", lambda self, group, now: True)]


def _x22(rule: Rule) -> Rule:
    def heartbeat(group: Group, offset: int, record: Heartbeat, body: bytes) -> str:
        reason = rule(group, offset, record, body)
        if not reason:
            group.sessions[record.session].extended = offset
            group.dirty.add(group.sessions[record.session])
        return reason

    return heartbeat


def _x28(rule: Rule) -> Rule:
    def pause(group: Group, offset: int, record: ReleaseGroup, body: bytes) -> str:
        token = group.pause_change
        reason = rule(group, offset, record, body)
        if not reason and record.token == token != NONE:
            group.pause_change = token
        return reason

    return pause


def _x29(rule: Rule) -> Rule:
    def move(group: Group, offset: int, record: SetPosition, body: bytes) -> str:
        token = group.pause_change
        reason = rule(group, offset, record, body)
        group.pause_change = token
        return reason

    return move


def _x32(rule: Rule) -> Rule:
    def claim(group: Group, offset: int, record: ClaimingPartition, body: bytes) -> Any:
        reason: Any = rule(group, offset, record, body)
        if not _refused(reason) and group.partitions[TopicPartition(record.topic, record.partition)].generation == 0:
            group.partitions[TopicPartition(record.topic, record.partition)].position = max(0, record.start)
        return reason

    return claim


def _x33(rationalizer: Any) -> list[tuple[Any, str, Any]]:
    """Plants X33: the mode of a Join is not checked, so each member delivers by its own mode."""
    rules, read_claim = list(rationalizer._RULES), Member._read_claim
    join, grant = rules[JOIN], rules[GRANT]

    def any_join(group: Group, offset: int, record: Join, body: bytes) -> str:
        reason: str = join(group, offset, replace(record, mode=group.mode or record.mode), body)
        return reason

    def any_grant(group: Group, offset: int, record: ClaimingMessages, body: bytes) -> str:
        mode, group.mode = group.mode, AT_MOST_ONCE
        reason: str = grant(group, offset, record, body)
        group.mode = mode
        return reason

    def own_way(self: Member, record: ClaimingPartition, verdict: Any, now: Any) -> None:
        group = self.group
        assert group is not None
        mode, group.mode = group.mode, self.options.mode
        read_claim(self, record, verdict, now)
        group.mode = mode

    rules[JOIN], rules[GRANT] = any_join, any_grant
    return [(rationalizer, "_RULES", tuple(rules)), (Member, "_read_claim", own_way)]


def _x38(rationalizer: Any) -> list[tuple[Any, str, Any]]:
    rules, config = list(rationalizer._RULES), rationalizer._RULES[CONFIG]

    def lenient(group: Group, offset: int, record: GroupConfig, body: bytes) -> str:
        end, rationalizer.end_session = rationalizer.end_session, lambda group, session: None
        try:
            reason: str = config(group, offset, record, body)
        finally:
            rationalizer.end_session = end
        return reason

    rules[CONFIG] = lenient
    return [(rationalizer, "_RULES", tuple(rules))]


def _g2(rule: Rule) -> Rule:
    def claim(group: Group, offset: int, record: ClaimingPartition, body: bytes) -> Any:
        reason: Any = rule(group, offset, record, body)
        known = group.partitions.get(TopicPartition(record.topic, record.partition))
        if _refused(reason) and known is not None:
            known.position, known.floor = 0, min(known.floor, 0)  # W2: the world itself stays well formed
            group.dirty.add(known)
        return reason

    return claim


def _g4(rule: Rule) -> Rule:
    """Plants G4: a heartbeat's entry for a claim that has ended takes the partition from its present owner."""
    epochs: dict[tuple[int, int], Partition] = {}

    def heartbeat(group: Group, offset: int, record: Heartbeat, body: bytes) -> str:
        for live, partition in group.claims.items():
            epochs[id(group), live] = partition
        session = group.sessions.get(record.session)
        for entry in record.claims if session is not None else ():
            taken = epochs.get((id(group), entry.epoch))
            if taken is None or session is None or taken.owner in (NONE, session.id):
                continue
            loser = group.sessions[taken.owner]
            loser.epochs.discard(taken.epoch)
            loser.held -= 1
            session.epochs.add(taken.epoch)
            session.held += 1
            taken.owner = session.id
            reshape(group, taken)
        return rule(group, offset, record, body)

    return heartbeat


def _u1(rationalizer: Any) -> list[tuple[Any, str, Any]]:
    def any_join(config: GroupConfig | None, join: Join) -> str:
        return ""

    return [(module, "misfit", any_join) for module in (rationalizer, world)]  # world: W9


def _u2(rationalizer: Any) -> list[tuple[Any, str, Any]]:
    def nothing_stays(config: GroupConfig | None, mode: int, after: GroupConfig) -> str:
        return ""

    return [(rationalizer, "lifelong", nothing_stays)]


def _u3(rationalizer: Any) -> list[tuple[Any, str, Any]]:
    """Plants U3: a deletion needs no pause, and its tool does not wait until all partitions are free."""
    rules, config = list(rationalizer._RULES), rationalizer._RULES[CONFIG]

    def delete(group: Group, offset: int, record: GroupConfig, body: bytes) -> str:
        if record.deleted and record.observed == group.config_offset:
            for session in tuple(group.sessions.values()):
                rationalizer.end_session(group, session)
        reason: str = config(group, offset, record, body)
        return reason

    rules[CONFIG] = delete
    return [(rationalizer, "_RULES", tuple(rules)), (Drain, "empty", lambda self, group, now: True)]


def _f11a(rationalizer: Any) -> list[tuple[Any, str, Any]]:
    return [(rationalizer, "unsigned", lambda group, record: "")]


def _f11b(rationalizer: Any) -> list[tuple[Any, str, Any]]:
    exact = rationalizer.badly_signed

    def any_key(group: Group, record: Signed, incarnation: bytes) -> str:
        reason: str = exact(group, record, incarnation)
        fits = rationalizer.fits(record, incarnation, group.name)
        return "" if reason == "key" and record.observed == group.config_offset and fits else reason

    return [(rationalizer, "badly_signed", any_key)]


def _f11c(rationalizer: Any) -> list[tuple[Any, str, Any]]:
    return [(rationalizer, "fits", lambda record, incarnation, name: True)]


def _f11d(rationalizer: Any) -> list[tuple[Any, str, Any]]:
    """Plants F11D: a pause that a key has signed counts at any time."""
    rules, pause, exact = list(rationalizer._RULES), rationalizer._RULES[PAUSE], rationalizer.badly_signed

    def any_settings(group: Group, record: Signed, incarnation: bytes) -> str:
        reason: str = exact(group, record, incarnation)
        return "" if reason == "observed" and rationalizer.fits(record, incarnation, group.name) else reason

    def any_pause(group: Group, offset: int, record: ReleaseGroup, body: bytes) -> str:
        token = group.pause_change if group.paused else NONE
        reason: str = pause(group, offset, replace(record, observed=group.pause_change, token=token), body)
        return reason

    rules[PAUSE] = any_pause
    return [(rationalizer, "_RULES", tuple(rules)), (rationalizer, "badly_signed", any_settings)]


def _refused(answer: Any) -> bool:
    """Returns whether a rule of the fold has refused the record. A rule that accepts may answer with what it found (a
    span that a claim leaves unsettled), which is no reason.
    """
    return isinstance(answer, str) and answer != ""


def _r4(rule: Rule) -> Rule:
    def release(group: Group, offset: int, record: ReleasingPartition, body: bytes) -> str:
        claim = group.claims.get(record.epoch)
        if claim is not None and record.observed != NONE:
            record = replace(record, observed=claim.position)
        return rule(group, offset, record, body)

    return release


# name -> (what it breaks, number of the record type or -1, how)
MUTANTS: Final[dict[str, tuple[str, int, Callable[[Any], Any]]]] = {
    "X6": ("a rewind is swallowed by a global max", MOVE, _x6),
    "X7": ("SetPosition is accepted outside its live pause", MOVE, _x7),
    "X8": ("the position at most once is what heartbeats say", GRANT, _x8),
    "X9": ("ClaimingMessages without `from`", GRANT, _x9),
    "X10": ("no epoch on records", -1, _x10),
    "X11": ("ownership by client id", -1, _x11),
    "X13": ("the last heartbeat wins", HEARTBEAT, _x13),
    "X15": ("one scope of sequences drops reordered heartbeats as old", HEARTBEAT, _x15),
    "X19": ("Evict without compare-and-set", EVICT, _x19),
    "X20": ("SetPosition entry by entry", -1, _x20),
    "X21": ("SetPosition under a live owner", -1, _x21),
    "X22": ("heartbeats extend a session that keeps claims through a pause", HEARTBEAT, _x22),
    "X28": ("a renewal keeps the token", PAUSE, _x28),
    "X29": ("a resume by SetPosition is no pause change", MOVE, _x29),
    "X32": ("the log's position does not count for a start", CLAIM, _x32),
    "X33": ("at least once and at most once mixed in one group", -1, _x33),
    "X38": ("a change of mode leaves old sessions alive", -1, _x38),
    "G2": ("a failed claim sets the position to 0", CLAIM, _g2),
    "G4": ("a heartbeat takes ownership", HEARTBEAT, _g4),
    "R4": ("a Release gives back whatever it has observed", RELEASE, _r4),
    "R5": ("a Release gives back what its owner had reported as handled", -1, mutants_claims.r5),
    "L3": ("nothing says what an owner that died had not reported", -1, mutants_claims.l3),
    "U1": ("a Join counts whatever the settings of the group are", -1, _u1),
    "U2": ("settings for the life of a group change", -1, _u2),
    "U3": ("a group is deleted under its owners", -1, _u3),
    "F11A": ("a group with keys takes what nobody has signed", -1, _f11a),
    "F11B": ("a signature by any key counts", -1, _f11b),
    "F11C": ("a false signature counts", -1, _f11c),
    "F11D": ("a copy of a pause counts again", -1, _f11d),
    "P3": ("progress outlives a generation", -1, mutants_claims.p3),
    "P4": ("a late heartbeat takes back what a newer one has said", HEARTBEAT, _p4),
}
