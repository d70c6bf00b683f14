"""Says why a consumer does not work: protocol/member/waiting.py's table, with what this process knows beyond the log.

It knows its connection, its lease, its topics in the cluster and its handlers. Call the functions with the lock held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.ranges.ranges import Ranges
from marshal_py.errors import PartitionsParked, PartitionsUnread
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.waiting import Facts, standstills, waiting_for
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.identity import NONE, TopicPartition


def facts_of(driver: ConsumerDriver) -> Facts:
    """Returns what this process knows of a consumer beyond the log."""
    member, now = driver.member, driver.context.clock.now()
    silent = {claim.tp: claim.handler_since_ms() for claim in member.claims.values()}
    read, began_ms = member.liveness.last_accepted, now.wall_ms - now.mono_ms  # wall time at which the clock was 0
    lives = member.session != NONE and not member.ended and read is not None
    fenced = lives and not member.healthy(now) and member.lease_left_ms(now) < 0
    return Facts(
        now.wall_ms,
        gone=driver.topic_watch.missing,
        unanswered={tp: began_ms + since_ms for tp, since_ms in silent.items() if since_ms is not None},
        fenced={member.session: began_ms + read.mono_ms} if fenced and read is not None else {},
        stalled_ms=driver.context.stalled_ms(),
    )


def fenced(driver: ConsumerDriver) -> str:
    """Returns, for people, that a consumer reads no sign of life of its own back; "" if it does."""
    group = driver.member.group
    found = [] if group is None else standstills(group, facts_of(driver))
    return next((str(one) for one in found if one.cause == "fenced"), "")


def why_waiting(driver: ConsumerDriver) -> str:
    """Returns what keeps a consumer from working although it is connected, for people; "" if nothing does."""
    if driver.ended and driver.error is not None:
        return f"nothing any more: it has ended ({driver.error})"
    if found := fenced(driver) or driver.topic_watch.waiting_for():
        return found
    parked, group = driver.parked(), driver.member.group
    if group is not None and parked and not group.paused:
        whole = sum(group.topics[topic].count for topic in driver.member.found_topics if topic in group.topics)
        if len(parked) == whole:
            tp, reason = min(parked.items())
            described = records.parked_text(group.name, tp, reason)
            return f"an admin: all of its {whole} partitions are parked: {described}"
    return waiting_for(driver.member, facts_of(driver))


def not_consumed(driver: ConsumerDriver) -> dict[str, int]:
    """Returns causes with numbers of partitions that nobody consumes; 1 for all, or for this consumer alone."""
    group, found = driver.member.group, Counter[str]()
    for one in standstills(group, facts_of(driver)) if group is not None else ():
        if one.partitions or not one.sessions or driver.member.session in one.sessions:
            found[one.cause] += len(one.partitions) or 1
    return dict(found)


# --- Tells whether a job that ends by itself may end well: nothing before its end is left that nobody reads.
#
# What another live member owns is that member's work. What is parked, what belongs to a paused group, to a topic that
# is gone or to no live member is nobody's, and a job that ended well would hide that. Call it with the lock held.


NO_OWNER: Final = "no live member of the group owns it"


def check_read(driver: ConsumerDriver, ends: Mapping[TopicPartition, int]) -> None:
    """Raises PartitionsParked (F6.4) or PartitionsUnread if a job has found nothing more before `ends` of
    partitions."""
    member, group = driver.member, driver.member.group
    parked = {tp: reason for tp, reason in sorted(driver.parked().items()) if tp in ends}
    if parked:
        told = {str(tp): records.parked_text(member.name, tp, reason) for tp, reason in parked.items()}
        raise PartitionsParked(member.name, told)
    if group is None:
        return
    gone, ranges = driver.topic_watch.absent, driver.claims.queue
    assert isinstance(ranges, Ranges)
    unread = [
        tp
        for tp, end in sorted(ends.items())
        if _position(group, tp) < end
        and (group.paused or tp.topic in gone or (ranges.unowned(tp) and not ranges.full()))
    ]
    if unread:
        raise PartitionsUnread(member.name, {str(tp): _why(driver, group, tp) for tp in unread})


def _position(group: Group, tp: TopicPartition) -> int:
    part = group.partitions.get(tp)
    return 0 if part is None or part.position == NONE else part.position


def _why(driver: ConsumerDriver, group: Group, tp: TopicPartition) -> str:
    """Returns why nobody reads a partition, in words."""
    for one in standstills(group, facts_of(driver)):
        of_all = not one.topic and not one.sessions
        if of_all or (one.topic == tp.topic and (not one.partitions or tp.partition in one.partitions)):
            return str(one)
    return NO_OWNER
