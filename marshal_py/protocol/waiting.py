"""Says why nobody owns partitions, or one member none, although nothing is wrong with them (PROTOCOL.md A7, A12)."""

from __future__ import annotations

from typing import Final, NamedTuple

from marshal_py.errors import first_of
from marshal_py.protocol.assignment import overflow
from marshal_py.protocol.identity import NONE, TopicPartition
from marshal_py.protocol.member import Member
from marshal_py.protocol.overflow import POLICY
from marshal_py.protocol.records import Join
from marshal_py.protocol.subscription import consumed
from marshal_py.protocol.world import Group

NAMED_MAX: Final = 3  # how many consumers a text names


class Unserved(NamedTuple):
    """Says why nobody owns the partitions of a topic (`cause`), and how somebody can (`advice`)."""

    cause: str
    advice: str

    def __str__(self) -> str:
        return f"{self.cause}; {self.advice}"


def unserved(group: Group) -> dict[str, Unserved]:
    """Returns the topics that nobody is given because all who consume them wait for their conditions (A12).

    What the log shows decides: a session that owns a partition, or has fetched one ahead, is given partitions.
    """
    config = group.config
    if config is None or config.policy != POLICY or group.paused or group.deleted:
        return {}
    waiting: dict[str, list[Join]] = {}
    served = set[str]()
    for session in group.sessions.values():
        topics = consumed(session.join.topics, group.topics)
        if not overflow.conditioned(session) or overflow.helps(session):
            served.update(topics)
        for topic in topics:
            waiting.setdefault(topic, []).append(session.join)
    advice = f"start a consumer without conditions, or: marshal groups update {group.name} --failover 60"
    if config.failover_ms:
        advice = (
            f"they take the partitions once no consumer without conditions has asked for messages for "
            f"{config.failover_ms / 1000:g} s"
        )
    return {
        topic: Unserved(
            "under the policy overflow nobody may own them: all consumers have conditions, and none is met as far as "
            f"the log shows: {first_of((f'{join.client_id} ({_conditions(join)})' for join in joins), NAMED_MAX)}",
            advice,
        )
        for topic, joins in sorted(waiting.items())
        if topic in group.topics and topic not in served
    }


def why_idle(member: Member) -> str:
    """Returns what a member that owns nothing waits for, for people to read; "" if it owns something, or waits for
    nothing that the log shows.
    """
    group = member.group
    session = group.sessions.get(member.session) if group is not None else None
    if group is None or session is None or session.held or group.paused:
        return ""
    if overflow.conditioned(session) and group.config is not None and group.config.policy == POLICY:
        look = member.candidacy.overflow
        if not look.met:
            found = f" (the last look found {look.found[0]} pending, {look.found[1]} in flight)" if look.found else ""
            nobody = next((f"; nobody else is given partitions: {why.advice}" for why in unserved(group).values()), "")
            return f"its conditions, {_conditions(session.join)}{found}{nobody}"
    owners = set[int]()
    for topic in member.found_topics & group.topics.keys():
        for number in range(group.topics[topic].count):
            known = group.partitions.get(TopicPartition(topic, number))
            if known is None or (known.owner == NONE and not known.parked):
                return ""  # it may get this one
            owners.add(known.owner)
    names = first_of(sorted(group.sessions[owner].join.client_id for owner in owners if owner != NONE), NAMED_MAX)
    return f"a partition that is free: all of its topics belong to {names}" if names else ""


def _conditions(join: Join) -> str:
    conditions = {"min_pending": join.min_pending, "min_ack_pending": join.min_ack_pending}
    return " or ".join(f"{name} {least}" for name, least in conditions.items() if least)
