"""Tells whether a job that ends by itself may end well: nothing before its end is left that nobody reads.

What another live member owns is that member's work. What is parked, what belongs to a paused group, to a topic that is
gone or to no live member is nobody's, and a job that ended well would hide that. Call it with the lock held.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.driver.standing import facts_of
from marshal_py.client.ranges.ranges import Ranges
from marshal_py.errors import PartitionsParked, PartitionsUnread
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.waiting import standstills
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.identity import NONE, TopicPartition

NO_OWNER: Final = "no live member of the group owns it"


def check_read(driver: ConsumerDriver, ends: Mapping[TopicPartition, int]) -> None:
    """Checks partitions for whose offsets before `ends` a job has found nothing more to read.

    Raises PartitionsParked, if partitions are parked (F6.4); PartitionsUnread.
    """
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
