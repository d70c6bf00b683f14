"""The bugs of fold.py once more, in the oracle. mutants.py alone calls this file.

With a bug in both folds their states agree, so S1 finds nothing, and the bug counts as found only if it breaks another
invariant. Each bug weakens the oracle as the bug of the same name weakens the shipped fold. `COUNTERPARTS` gives the
replaced attributes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from marshal_sim.judge.model import AT_MOST_ONCE
from marshal_sim.mutants import claims as mutants_claims
from marshal_sim.oracle import oracle
from marshal_sim.oracle import rules as oracle_rules
from marshal_sim.oracle.oracle import Group, Partition

Patch = tuple[Any, str, Any]
Rule = Callable[[Group, dict[str, Any], int, bytes], str]
NONE: Final = -1


class _EarlierClaims:
    """Remembers for each claim, by group and epoch, which partition it was for, even after the claim has ended.

    It learns only of claims that are live when a rule calls `of`.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Group, dict[int, Partition]]] = {}  # keeps the group: its id stays its own

    def of(self, group: Group) -> dict[int, Partition]:
        _, seen = self._seen.setdefault(id(group), (group, {}))
        seen.update((part.epoch, part) for part in group.partitions.values() if part.owner != NONE)
        return seen


def _x6(rule: Rule) -> Rule:
    def move(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        moves = tuple(
            {**item, "position": max(item["position"], _known(group, item).position)} for item in fields["moves"]
        )
        return rule(group, {**fields, "moves": moves}, offset, body)

    return move


def _x7(rule: Rule) -> Rule:
    def move(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        change, duration_ms = group.pause_change, group.pause_duration_ms
        if group.pause_held_by(fields["token"]):
            return rule(group, fields, offset, body)
        group.pause_change, group.pause_duration_ms = fields["token"], max(1, duration_ms)
        reason = rule(group, {**fields, "resume": False}, offset, body)
        group.pause_change, group.pause_duration_ms = change, duration_ms
        return reason

    return move


def _x8(rule: Rule) -> Rule:
    def grant(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        reason = rule(group, fields, offset, body)
        for wanted in [fields["ranges"][index] for index in group.granted] if not reason else ():
            claim = group.claim(fields["session"], wanted["epoch"])
            if claim is not None:
                claim[1].position = wanted["from"]
        return reason

    return grant


def _x9(rule: Rule) -> Rule:
    def grant(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        owned = {part.epoch: part.position for part in group.partitions.values() if part.owner != NONE}
        ranges = [
            {**wanted, "from": owned[wanted["epoch"]], "start": max(wanted["start"], owned[wanted["epoch"]])}
            if wanted["epoch"] in owned
            else wanted
            for wanted in fields["ranges"]
        ]
        return rule(group, {**fields, "ranges": tuple(ranges)}, offset, body)

    return grant


def _x10() -> list[Patch]:
    past = _EarlierClaims()

    def lenient(rule: Rule) -> Rule:
        def any_epoch(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
            session = fields["session"]
            if session in group.sessions:
                seen = past.of(group)

                def now(named: dict[str, Any]) -> dict[str, Any]:
                    known = seen.get(named["epoch"])
                    return named if known is None or known.owner != session else {**named, "epoch": known.epoch}

                if "ranges" in fields:
                    fields = {**fields, "ranges": tuple(map(now, fields["ranges"]))}
                else:
                    fields = now(fields)
            return rule(group, fields, offset, body)

        return any_epoch

    return _rules(ReleasingPartition=lenient, ClaimingMessages=lenient)


def _x11() -> list[Patch]:
    end = Group.end_session

    def end_session(group: Group, session: int) -> None:
        name = group.sessions[session].join["client_id"]
        heirs = (other for other in group.sessions.values() if other.id != session and other.join["client_id"] == name)
        successor = next(heirs, None)
        for part in group.partitions.values():
            if successor is not None and part.owner == session:
                part.owner = successor.id
        end(group, session)

    return [(Group, "end_session", end_session)]


def _x13(rule: Rule) -> Rule:
    def heartbeat(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        for entry in fields["claims"]:
            claim = group.claim(fields["session"], entry["epoch"])
            if claim is not None:
                claim[1].position = min(claim[1].position, entry["position"])
        return rule(group, fields, offset, body)

    return heartbeat


def _x15(rule: Rule) -> Rule:
    greatest: dict[int, tuple[Group, int]] = {}

    def heartbeat(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        _, known = greatest.get(id(group), (group, NONE))
        if fields["sequence"] < known:
            return "sequence"
        greatest[id(group)] = (group, fields["sequence"])
        return rule(group, fields, offset, body)

    return heartbeat


def _x19(rule: Rule) -> Rule:
    def evict(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        session = group.sessions.get(fields["session"])
        if session is not None:
            fields = {**fields, "observed": session.extended}
        return rule(group, fields, offset, body)

    return evict


def _x20(rule: Rule) -> Rule:
    def move(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        reasons = [rule(group, {**fields, "moves": (item,), "resume": False}, offset, body) for item in fields["moves"]]
        if fields["resume"] and "" in reasons:
            group.pause_change, group.pause_duration_ms = offset, 0
        return "" if "" in reasons else reasons[0] if reasons else "empty"

    return move


def _x21(rule: Rule) -> Rule:
    def move(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        owners = {place: part.owner for place, part in group.partitions.items()}
        for part in group.partitions.values():
            part.owner = NONE
        reason = rule(group, fields, offset, body)
        for place, part in group.partitions.items():
            part.owner = owners.get(place, NONE)
        return reason

    return move


def _x22(rule: Rule) -> Rule:
    def heartbeat(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        reason = rule(group, fields, offset, body)
        if not reason:
            group.sessions[fields["session"]].extended = offset
        return reason

    return heartbeat


def _x28(rule: Rule) -> Rule:
    def pause(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        token = group.pause_change
        reason = rule(group, fields, offset, body)
        if not reason and fields["token"] == token != NONE:
            group.pause_change = token
        return reason

    return pause


def _x29(rule: Rule) -> Rule:
    def move(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        token = group.pause_change
        reason = rule(group, fields, offset, body)
        group.pause_change = token
        return reason

    return move


def _x32(rule: Rule) -> Rule:
    def claim(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        reason = rule(group, fields, offset, body)
        if not reason and _known(group, fields).generation == 0:
            _known(group, fields).position = max(0, fields["start"])
        return reason

    return claim


def _x33() -> list[Patch]:
    def any_mode(rule: Rule) -> Rule:
        def join(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
            return rule(group, {**fields, "mode": group.mode or fields["mode"]}, offset, body)

        return join

    def any_group(rule: Rule) -> Rule:
        def grant(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
            mode, group.mode = group.mode, AT_MOST_ONCE
            reason = rule(group, fields, offset, body)
            group.mode = mode
            return reason

        return grant

    return _rules(Join=any_mode, ClaimingMessages=any_group)


def _x38(rule: Rule) -> Rule:
    def config(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        vars(group)["end_session"] = lambda session: None
        try:
            return rule(group, fields, offset, body)
        finally:
            del vars(group)["end_session"]

    return config


def _g2(rule: Rule) -> Rule:
    def claim(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        reason = rule(group, fields, offset, body)
        if reason:
            known = _known(group, fields)
            known.position, known.floor = 0, min(known.floor, 0)
        return reason

    return claim


def _g4() -> list[Patch]:
    past = _EarlierClaims()

    def taking(rule: Rule) -> Rule:
        def heartbeat(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
            seen, session = past.of(group), group.sessions.get(fields["session"])
            for entry in fields["claims"] if session is not None else ():
                taken = seen.get(entry["epoch"])
                if taken is not None and taken.owner != NONE:
                    taken.owner = fields["session"]
            return rule(group, fields, offset, body)

        return heartbeat

    return _rules(Heartbeat=taking)


def _r4(rule: Rule) -> Rule:
    def release(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        claim = group.claim(fields["session"], fields["epoch"])
        if claim is not None and fields["observed"] != NONE:
            fields = {**fields, "observed": claim[1].position}
        return rule(group, fields, offset, body)

    return release


def _r5(rule: Rule) -> Rule:
    def release(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        claim = group.claim(fields["session"], fields["epoch"])
        if claim is None or fields["observed"] == NONE:
            return rule(group, fields, offset, body)
        part = claim[1]
        floor, part.floor = part.floor, min(part.floor, fields["give"])
        reason = rule(group, fields, offset, body)
        if reason:
            part.floor = floor
        return reason

    return release


def _u1() -> list[Patch]:
    return [(oracle_rules, "fits", lambda join, policy, priority_groups: True)]


def _u2() -> list[Patch]:
    return [(oracle_rules, "changes_what_stays", lambda group, wanted: False)]


def _u3(rule: Rule) -> Rule:
    def config(group: Group, fields: dict[str, Any], offset: int, body: bytes) -> str:
        if fields["deleted"] and fields["observed"] == group.config_offset:
            for session in list(group.sessions):
                group.end_session(session)
        return rule(group, fields, offset, body)

    return config


def _known(group: Group, fields: dict[str, Any]) -> Partition:
    """Returns the partition that a record names. If the group does not have it, returns an empty one outside the
    group.
    """
    return group.partitions.get((fields["topic"], fields["partition"]), Partition())


def _rules(**changed: Callable[[Rule], Rule]) -> list[Patch]:
    """Returns a patch that plants bugs in rules of the oracle.

    Each keyword is a record type. Its value is a function that takes the oracle's rule for this type and returns the
    rule with the bug.
    """
    replaced = {kind: mutated(oracle.RULES[kind]) for kind, mutated in changed.items()}
    return [(oracle, "RULES", {**oracle.RULES, **replaced})]


COUNTERPARTS: Final[dict[str, Callable[[], list[Patch]]]] = {
    "X6": lambda: _rules(SetPosition=_x6),
    "X7": lambda: _rules(SetPosition=_x7),
    "X8": lambda: _rules(ClaimingMessages=_x8),
    "X9": lambda: _rules(ClaimingMessages=_x9),
    "X10": _x10,
    "X11": _x11,
    "X13": lambda: _rules(Heartbeat=_x13),
    "X15": lambda: _rules(Heartbeat=_x15),
    "X19": lambda: _rules(Evict=_x19),
    "X20": lambda: _rules(SetPosition=_x20),
    "X21": lambda: _rules(SetPosition=_x21),
    "X22": lambda: _rules(Heartbeat=_x22),
    "X28": lambda: _rules(ReleaseGroup=_x28),
    "X29": lambda: _rules(SetPosition=_x29),
    "X32": lambda: _rules(ClaimingPartition=_x32),
    "X33": _x33,
    "X38": lambda: _rules(GroupConfig=_x38),
    "G2": lambda: _rules(ClaimingPartition=_g2),
    "G4": _g4,
    "R4": lambda: _rules(ReleasingPartition=_r4),
    "R5": lambda: _rules(ReleasingPartition=_r5),
    "L3": mutants_claims.l3_in_the_oracle,
    "U1": _u1,
    "U2": _u2,
    "U3": lambda: _rules(GroupConfig=_u3),
    "P3": mutants_claims.p3_in_the_oracle,
}
