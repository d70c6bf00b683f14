"""Says why nobody consumes: the one table of causes, which every view of a group shows (docs/operations.md).

`standstills` finds them in a group's state and in what its caller knows beyond the log: an observer asks the cluster
and looks at timestamps, a client knows its own lease and its handlers. `state`, `doctor`, `waiting_for`, the
advisories and the metrics take their words from here. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from shlex import quote
from typing import Final, NamedTuple

from marshal_py.errors import first_of
from marshal_py.protocol import policy
from marshal_py.protocol.fold.policies import policy_of
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.policy import candidate_order, has_room, listed, names
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.codec import VERIFIES
from marshal_py.protocol.wire.identity import NONE, PIN, TopicPartition, consumed, names_of
from marshal_py.protocol.wire.records import EVICT_INTERVALS, Join

NAMED_MAX: Final = 3  # how many consumers a text names
HANGS_MS: Final = 10_000  # without an answer from any handler of a partition; most handlers take less
ALL_MAPPINGS: Final = " with a --map for each other member, too: they replace all mappings"
UNOWNED_MS: Final = 10_000  # without an owner, though consumers are there: a claim takes far less
READABLE: Final = ("" if VERIFIES else "pip install 'marshal_py[keys]', if the group has admin keys; else ") + (
    "look with a newer release"
)
CAUSES: Final = {
    "deleted": "the group is deleted",
    "opaque": "from here on the group's records need a newer library, or the extra `keys`",
    "paused": "an admin has paused the group",
    "pause_over": "the pause is over, and no consumer is there to end it",
    "topic_gone": "the cluster lacks a topic that a consumer names",
    "parked": "the partition is parked: nobody may claim it until an admin has looked at it",
    "no_consumer": "no consumer is in the group, and messages wait",
    "silent": "a consumer gives no sign of life, and nobody has ended its session",
    "not_read": "no consumer of the group reads the topic",
    "conditions": "all consumers of the topic wait for their conditions (policy overflow)",
    "unassigned": "the partition belongs to no member (policies members and blocks)",
    "absent": "the partition belongs to a member that is not there (policies members and blocks)",
    "unlisted": "a consumer's member is not in the group's list (policies members and blocks)",
    "hangs": f"messages of the partition wait or are in handlers, and none was finished for {HANGS_MS // 1000} s",
    "unowned": f"messages wait, consumers are there, and for {UNOWNED_MS // 1000} s nobody has owned the partition",
    "fenced": "the consumer reads no sign of life of its own back, so it delivers nothing",
}
# An observer can tell these, a consumer cannot.
OBSERVED: Final = frozenset({"pause_over", "no_consumer", "silent", "unowned"})
FAILS: Final = frozenset({"topic_gone", "parked", "no_consumer", "silent", "unowned"})  # see `fails`
LASTING: Final = frozenset({"conditions", "unassigned", "unlisted"})  # by settings alone: no restart or wait ends them


class Standstill(NamedTuple):
    """Nobody consumes some partitions: `cause` (one of CAUSES), in words, with `advice`. `partitions` of `topic`: empty
    if all, or of a consumer. `sessions`: whom it concerns. `since_ms`: since 1970, or NONE."""

    cause: str
    text: str
    advice: str
    topic: str = ""
    partitions: tuple[int, ...] = ()
    sessions: tuple[int, ...] = ()
    since_ms: int = NONE

    def __str__(self) -> str:
        return f"{self.text}{': ' if self.cause == 'parked' else '; '}{self.advice}"


class Facts(NamedTuple):
    """What a reader of a group knows beyond its log. The defaults are for one that knows nothing. `now_ms`: in ms since
    1970. `pause`: the running pause in words, `pause_over`: whether its time is over, and nobody is there to end it.
    `parked`: as the reader tells it; None: as the log does. `gone`: topics that the cluster does not have. `lag`:
    messages that wait in all partitions without an owner together; 0 if unknown.
    `silent`: ms of silence by session. `unanswered`: since when, in ms since 1970, handlers have had messages of a
    partition and none was finished. `blocked`: likewise, since when the owner of a partition has finished nothing of
    any of its partitions, though a message of this one has waited for HANGS_MS. `unowned`: how many messages wait in a
    partition that nobody has owned for UNOWNED_MS, though a consumer of its topic was there. `fenced`: since when, in
    ms since 1970, a session of this process has read no sign of life of its own back. `stalled_ms`: for how long this
    process stood still lately. `held_up`: in words and with advice, which message holds up the position."""

    now_ms: int = 0
    pause: str = ""
    pause_over: bool = False
    parked: tuple[Standstill, ...] | None = None
    gone: Collection[str] = ()
    lag: int = 0
    silent: Mapping[int, int] = {}
    unanswered: Mapping[TopicPartition, int] = {}
    blocked: Mapping[TopicPartition, int] = {}
    unowned: Mapping[TopicPartition, int] = {}
    fenced: Mapping[int, int] = {}
    stalled_ms: int = 0
    held_up: Mapping[TopicPartition, tuple[str, str]] = {}


NO_FACTS: Final = Facts()


def standstills(group: Group, facts: Facts = NO_FACTS) -> list[Standstill]:
    """Returns each cause for which nobody consumes some partitions of a group, or one of its consumers nothing."""
    name = quote(group.name)
    if group.deleted:
        return [
            Standstill(
                "deleted",
                "the group is deleted, and so are its positions; its consumers have ended",
                f"a new group of that name: marshal groups create {name}",
            )
        ]
    if group.opaque_at != NONE:
        text = f"from offset {group.opaque_at} on, this installation cannot read the group's records"
        return [Standstill("opaque", text, READABLE)]  # what it says of its group is old
    found: list[Standstill] = []
    if group.paused:
        text = f"the group is {facts.pause or f'paused for {group.pause_duration_ms / 1000:g} s'}"
        cause, way = ("pause_over", "start a consumer") if facts.pause_over else ("paused", "the pause ends by itself")
        signed = " --sign-with FILE" if group.keys else ""
        if topics := " ".join(_forgotten(group)):
            way = f"consumers begin at the beginning of {topics}, as that was created again and its positions were "
            way += f"forgotten; to set them first: marshal set-position {name} {topics} --to PLACE --take-over{signed}"
        found.append(Standstill(cause, text, f"{way}; to end it now: marshal resume {name} --take-over{signed}"))
    found += (_gone(group, topic) for topic in sorted(facts.gone) if topic in named(group))
    found += _parked(group) if facts.parked is None else facts.parked
    if not group.sessions:
        if facts.lag:
            text = f"no consumer is there, and {facts.lag} messages wait"
            found.append(Standstill("no_consumer", text, start_one(group.name)))
        return found
    found += _silent(group, facts.silent)
    found += _not_read(group, facts.gone)
    found += (
        why._replace(text=f"no partition of {topic!r} has an owner: {why.text}")
        for topic, why in _conditioned(group).items()
    )
    found += _partitioned(group)
    found += _hanging(group, facts)
    found += _unowned(group, facts.unowned, found)
    for session, since_ms in facts.fenced.items():
        silent_s = (facts.now_ms - since_ms) / 1000
        stood = f"this process stood still for {facts.stalled_ms / 1000:.1f} s"
        found.append(
            Standstill(
                "fenced",
                f"a sign of life of its own: none was read back for {silent_s:.0f} s, so it delivers nothing",
                stood if facts.stalled_ms else "the cluster does not answer",
                sessions=(session,),
                since_ms=since_ms,
            )
        )
    return found


def fails(group: Group, found: Collection[Standstill]) -> set[str]:
    """Returns the causes among `found`, the group's standstills, by which all of the group is at a standstill, or a
    part of it where nobody knows why: `marshal doctor GROUP` fails. A paused group lacks no consumer, until its pause
    is over."""
    said = {one.cause for one in found}
    causes = said & FAILS
    there = sum(topic.count for topic in group.topics.values())
    if sum(len(one.partitions) for one in found if one.cause == "parked") < there:
        causes.discard("parked")
    if any(group.sessions.keys() - one.sessions for one in found if one.cause == "silent"):
        causes.discard("silent")
    return causes - {"no_consumer", "silent"} if "paused" in said else causes


def may_be_unserved(group: Group) -> bool:
    """Returns whether the group's policy can have one of the causes of `lasting`."""
    return policy_of(group.config).partitioned or policy_of(group.config).conditions


def lasting(group: Group) -> dict[tuple[str, str, tuple[int, ...]], str]:
    """Returns the text, by cause, topic and sessions, of each cause that lasts until somebody changes something."""
    if not may_be_unserved(group):
        return {}
    return {(one.cause, one.topic, one.sessions): str(one) for one in standstills(group) if one.cause in LASTING}


def start_one(group: str) -> str:
    """Returns what to do where no consumer is left."""
    kinds = " ".join(f"--kind {kind}" for kind in ("left", "died", "evicted"))
    return f"start one; why the last ones ended: marshal advisories {quote(group)} {kinds} -n 5"


def _forgotten(group: Group) -> list[str]:
    """Returns the topics of which another id was accepted since partitions had a position or an owner (F9.10)."""
    anew = {name: topic.count for name, topic in group.topics.items() if not topic.first_count}
    lost = (tp for tp, p in group.partitions.items() if p.position == NONE)
    return sorted({tp.topic for tp in lost if 0 <= tp.partition < anew.get(tp.topic, 0)})


def _gone(group: Group, topic: str) -> Standstill:
    if topic not in group.topics:
        text = f"consumers want to read {topic!r}, which the cluster does not have"
        return Standstill("topic_gone", text, f"create it: marshal topics create {topic}", topic)
    kept = sum(tp.topic == topic and tp.partition >= 0 and p.position != NONE for tp, p in group.partitions.items())
    text = f"the group keeps {kept} positions of {topic!r}, which is gone"
    advice = f"if it comes back empty: marshal set-position {quote(group.name)} {topic} --to earliest"
    return Standstill("topic_gone", text, advice, topic)


def _parked(group: Group) -> Iterator[Standstill]:
    by_reason: dict[tuple[str, str], list[int]] = {}
    for tp, partition in sorted(group.partitions.items()):
        if partition.parked:
            by_reason.setdefault((tp.topic, partition.parked), []).append(tp.partition)
    for (topic, reason), numbers in by_reason.items():
        yield Standstill(
            "parked",
            f"{len(numbers)} partitions of {topic!r} are parked ({reason})",
            ("of the first one, " if len(numbers) > 1 else "")
            + str(records.parked_error(group.name, TopicPartition(topic, numbers[0]), reason)),
            topic,
            tuple(numbers),
        )


def _silent(group: Group, silent: Mapping[int, int]) -> Iterator[Standstill]:
    if not silent:
        return
    words = []
    for number, silent_ms in sorted(silent.items()):
        join = group.sessions[number].join
        interval = f"(its interval: {join.interval_ms / 1000:g} s)"
        words.append(f"session {number} of {join.client_id!r} for {silent_ms / 1000:.0f} s {interval}")
    causes = "its process hangs, is gone, or may not write: its own log says which"
    if silent.keys() >= group.sessions.keys():
        causes = f"the cluster takes no records (marshal doctor says so), or {causes}"
    yield Standstill(
        "silent",
        f"no sign of life of {first_of(words, NAMED_MAX)}",
        f"{causes}; any running consumer of this log evicts them: start one of this group, or: "
        f"marshal evict {quote(group.name)} {min(silent)}",
        sessions=tuple(sorted(silent)),
    )


def _hanging(group: Group, facts: Facts) -> Iterator[Standstill]:
    """Yields the consumers that finish nothing, each with all the partitions for which that is so; apart from them the
    partitions of which the log tells more: that a message holds them up, or comes again."""
    by_owner: dict[tuple[int, str], dict[int, int]] = {}
    again: dict[tuple[int, str], dict[int, int]] = {}
    for tp, since_ms in sorted({**facts.blocked, **facts.unanswered}.items()):
        known = group.partitions.get(tp)
        owned = known is not None and known.owner in group.sessions and known.owner not in facts.silent
        if known is None or not owned or facts.now_ms - since_ms < HANGS_MS:
            continue
        if tp in facts.held_up:
            yield Standstill("hangs", *facts.held_up[tp], tp.topic, (tp.partition,), (known.owner,), since_ms)
        else:
            found = by_owner if known.attempts <= 1 else again
            found.setdefault((known.owner, tp.topic), {})[tp.partition] = since_ms
    for (owner, topic), numbers in again.items():
        rows = [group.partitions[TopicPartition(topic, number)] for number in numbers]
        words = [f"of {row.tp} at offset {row.position} was delivered {row.attempts} times" for row in rows]
        text = f"the message {first_of(words, NAMED_MAX)} and not acked: its handler fails, hangs or dies"
        advice = f"see: marshal advisories {quote(group.name)} --kind poison_message"
        yield Standstill("hangs", text, advice, topic, tuple(numbers), (owner,), max(numbers.values()))
    for (owner, topic), numbers in by_owner.items():
        since_ms, client = max(numbers.values()), group.sessions[owner].join.client_id
        text = f"no message of {topic}:{first_of([str(number) for number in numbers], 2 * NAMED_MAX)} was finished for "
        text += f"{(facts.now_ms - since_ms) / 1000:.0f} s, though "
        if any(tp.topic == topic and tp.partition in numbers for tp in facts.unanswered):
            text += f"handlers of {client!r} have some: they hang, or take long"
        else:
            text += f"some wait: {client!r}, which owns them, hangs, asks for none, or has given them back with a delay"
        advice = "restart that process if it hangs; if it is slow, others can take what waits: "
        advice += f"marshal members step-down {quote(group.name)} {quote(client)}"
        yield Standstill("hangs", text, advice, topic, tuple(numbers), (owner,), since_ms)


def _unowned(group: Group, waiting: Mapping[TopicPartition, int], found: Sequence[Standstill]) -> list[Standstill]:
    """Returns the partitions without an owner for which no other cause is known. `found`: the other causes."""
    free: dict[str, list[TopicPartition]] = {}
    for tp in sorted(waiting):
        said = any(one.topic == tp.topic and (not one.partitions or tp.partition in one.partitions) for one in found)
        if not said and not group.paused:
            free.setdefault(tp.topic, []).append(tp)
    why = _unpinned(group)
    stuck = "restart one whose handler is stuck; who owned it last, and why that ended: marshal explain"
    full = "each consumer of the topic owns as many partitions as its max_claims allows: start more, or raise it"
    room = {topic for one in group.sessions.values() if has_room(one) for topic in consumed(one.join.topics, free)}
    text = "have had no owner for more than {} s, though {} messages wait and {} consumers are there"
    return [
        Standstill(
            "unowned",
            f"{_partitions(topic, (tp.partition for tp in tps))} "
            + text.format(UNOWNED_MS // 1000, sum(waiting[tp] for tp in tps), len(group.sessions)),
            str(why) if why is not None else stuck if topic in room else full,
            topic,
            tuple(tp.partition for tp in tps),
        )
        for topic, tps in free.items()
    ]


def named(group: Group) -> set[str]:
    """Returns the topics that consumers name: one that is gone, and that nobody names any more, nobody misses."""
    return {name for session in group.sessions.values() for name in names_of(session.join.topics)}


def _not_read(group: Group, gone: Collection[str]) -> Iterator[Standstill]:
    read = {topic for session in group.sessions.values() for topic in consumed(session.join.topics, group.topics)}
    for topic, known in sorted(group.topics.items()):
        if topic not in read and topic not in gone:
            text = f"no consumer of the group reads {topic!r}"
            advice = "start one that names it; to leave it for good, take another group id, and there "
            advice += f"start={f'committed:{group.name}'!r}"
            yield Standstill("not_read", text, advice, topic, tuple(range(known.count)))


def _partitioned(group: Group) -> Iterator[Standstill]:
    config = group.config
    if config is None or not policy_of(config).partitioned:
        return
    members = [each.member for each in config.mappings] or listed(config)
    order = candidate_order(group, ())
    owners = names(group, order)
    present = {session.join.member for session in group.sessions.values()}
    nobodys: dict[str, list[int]] = {}
    absent: dict[tuple[str, str], list[int]] = {}
    for topic, known in sorted(group.topics.items()):
        for number in range(known.count):
            tp = TopicPartition(topic, number)
            if group.parked(tp):
                continue
            if tp not in owners:
                nobodys.setdefault(topic, []).append(number)
            elif owners[tp] not in present:
                absent.setdefault((topic, owners[tp]), []).append(number)
    way = (
        f"marshal groups update {quote(group.name)} --map MEMBER=PARTITIONS{ALL_MAPPINGS}"
        if config.mappings
        else f"marshal groups update {quote(group.name)} --add-member NAME"
    )
    if members and not config.mappings:
        way = f"max_members is {config.max_members}: a group with more, or with mappings"
    for topic, numbers in nobodys.items():
        text = f"{_partitions(topic, numbers)} belong to no member"
        yield Standstill("unassigned", text, f"what gives them to one: {way}", topic, tuple(numbers))
    for (topic, member), numbers in absent.items():
        text = f"{_partitions(topic, numbers)} belong to member {member!r}, of which no consumer is there"
        yield Standstill("absent", text, f"start one with member={member!r}", topic, tuple(numbers))
    for session in group.sessions.values():
        member = session.join.member
        if member not in members:
            text = f"{session.join.client_id!r} gets no partition: member {member!r} is not in the group's list"
            if member in config.members:  # sorted, of which the first ones count
                text = f"{session.join.client_id!r} gets no partition: member {member!r} is beyond max_members"
                advice = f"{config.max_members} members count: {first_of(members, NAMED_MAX)}. To have others, "
                advice += f"marshal groups update {quote(group.name)} --drop-member NAME"
                yield Standstill("unlisted", text, advice, sessions=(session.id,))
                continue
            change = f"marshal groups update {quote(group.name)} --add-member {quote(member)}"
            if config.mappings:
                change = f"marshal groups update {quote(group.name)} --map {quote(member)}=PARTITIONS{ALL_MAPPINGS}"
            advice = f"correct the name ({first_of(members, NAMED_MAX) or 'the list is empty'}), or: {change}"
            yield Standstill("unlisted", text, advice, sessions=(session.id,))


def _partitions(topic: str, numbers: Iterable[int]) -> str:
    count = len(found := list(numbers))
    return f"{count} partitions of {topic!r} ({first_of([str(number) for number in found], 2 * NAMED_MAX)})"


def unserved(group: Group) -> dict[str, Standstill]:
    """Returns the topics that nobody is given, as far as the log shows, each with why."""
    why = _unpinned(group)
    return _conditioned(group) if why is None else dict.fromkeys(group.topics, why)


def _unpinned(group: Group) -> Standstill | None:
    """Returns why no consumer of a group with the policy pinned is pinned, although some are there."""
    pinning = policy_of(group.config).pins and not group.paused
    if not pinning or not group.sessions or policy.owner_of(group, PIN) != NONE:
        return None
    if all(policy.idle(group, session) for session in group.sessions):
        why = f"no consumer is pinned: none has asked for a message for {policy.timeout_ms(group) / 1000:g} s"
        return Standstill("unowned", why, "look at their programs; the first that asks is pinned")
    way = f"the first in line claims it: marshal state {quote(group.name)} --settings"
    return Standstill("unowned", "no consumer is pinned", way)


def _conditioned(group: Group) -> dict[str, Standstill]:
    """Returns the topics that nobody is given because all their consumers wait for conditions (A12). By what the log
    shows: who owns a partition, or has fetched one ahead, is given some."""
    config = group.config
    if config is None or not policy_of(config).conditions or group.paused or group.deleted:
        return {}
    waiting: dict[str, list[Join]] = {}
    served = set[str]()
    for session in group.sessions.values():
        topics = consumed(session.join.topics, group.topics)
        if not policy.conditioned(session) or policy.helps(session):
            served.update(topics)
        for topic in topics:
            waiting.setdefault(topic, []).append(session.join)
    advice = f"start a consumer without conditions, or: marshal groups update {quote(group.name)} --failover 60"
    if config.failover_ms:
        advice = (
            f"they take the partitions once no consumer without conditions has asked for messages for "
            f"{config.failover_ms / 1000:g} s"
        )
    return {
        topic: Standstill(
            "conditions",
            f"under the policy {config.policy} nobody may own them: all consumers have conditions, and none is "
            "met as far as the log shows: "
            f"{first_of((f'{join.client_id} ({_conditions(join)})' for join in joins), NAMED_MAX)}",
            advice,
            topic,
        )
        for topic, joins in sorted(waiting.items())
        if topic in group.topics and topic not in served
    }


def waiting_for(member: Member, facts: Facts) -> str:
    """Returns, for people, what keeps a member from working; "" for nothing. `facts`: what its process knows."""
    group = member.group
    if group is None:
        return ""
    found = standstills(group, facts)
    for cause in ("fenced", "paused", "unlisted", "hangs"):
        for one in found:
            if one.cause == cause and (not one.sessions or member.session in one.sessions):
                return str(one)
    session = group.sessions.get(member.session)
    if session is not None and policy_of(group.config).partitioned and not session.held:
        owners = names(group, candidate_order(group, ()))
        if group.topics and session.join.member not in owners.values():
            return f"a partition of its member: none belongs to {session.join.member!r}"
    return why_idle(member)


def why_idle(member: Member) -> str:
    """Returns, for people, what a member that owns nothing waits for; "" if it owns something or the log shows nothing.
    A standby waits for its turn, which is no fault."""
    group = member.group
    session = group.sessions.get(member.session) if group is not None else None
    if group is None or session is None or session.held or group.paused:
        return ""
    if member.handler_stuck:
        return "its program, which asks for no messages: a handler is stuck. It gets partitions again when it asks"
    if policy.conditioned(session) and policy_of(group.config).conditions:
        look = member.candidacy.overflow
        if not look.met:
            found = f" (the last look found {look.found[0]} pending, {look.found[1]} in flight)" if look.found else ""
            nobody = next(
                (f"; nobody else is given partitions: {why.advice}" for why in _conditioned(group).values()), ""
            )
            return f"its conditions, {_conditions(session.join)}{found}{nobody}"
    if member.candidacy.policy.pins and policy.idle(group, session.id):
        return f"its user, who has asked for no message for {policy.timeout_ms(group) / 1000:g} s: it is not in line"
    owners = set[int]()
    for tp in _could_own(member, group):
        known = group.partitions.get(tp)
        if known is None or (known.owner == NONE and not known.parked):
            return ""  # it may get this one
        owners.add(known.owner)
    joins = [group.sessions[owner].join for owner in owners if owner != NONE]
    return _turn(member, group, joins) if joins else ""


def _could_own(member: Member, group: Group) -> Iterator[TopicPartition]:
    """Yields what a member could own: of its topics, or what it is in line for under a restricted policy (A7)."""
    lines = member.candidacy.lines
    if lines is not None:
        yield from (tp for tp, line in lines.items() if member.session in line)
        return
    for topic in member.found_topics & group.topics.keys():
        yield from (TopicPartition(topic, number) for number in range(group.topics[topic].count))


def _turn(member: Member, group: Group, owners: Sequence[Join]) -> str:
    names = first_of(sorted(join.client_id for join in owners), NAMED_MAX)
    seconds = EVICT_INTERVALS * max(join.interval_ms for join in owners) / 1000
    who, what = (names, "owns") if len(owners) == 1 else ("one of them", "own")
    when = f"{who} leaves, and {seconds:g} s after {who} dies"
    if member.candidacy.policy.pins:
        idle_s = policy.timeout_ms(group) / 1000
        when = f"{who} leaves or is unpinned, {seconds:g} s after {who} dies, and {idle_s:g} s "
        when += f"after {who} last asked for messages"
    stands_by = f"it stands by for {names}, which {what} all that it could own"
    return f"its turn: {stands_by}. The next in line takes over when {when}"


def _conditions(join: Join) -> str:
    conditions = {"min_pending": join.min_pending, "min_ack_pending": join.min_ack_pending}
    return " or ".join(f"{name} {least}" for name, least in conditions.items() if least)
