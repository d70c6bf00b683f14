"""How a consumer moves the position of a partition that it owns: the question to the cluster, the record, the wait.

The member writes the record and replaces the claim (PROTOCOL.md T20). Nothing here holds the lock while it waits.
"""

from __future__ import annotations

from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.receive.ending import Ending
from marshal_py.client.values.waits import Steps
from marshal_py.errors import ClaimLost, InvalidOption, NeedsAtLeastOnce, PositionOutOfRange
from marshal_py.protocol.claims.claim import ClaimPhase
from marshal_py.protocol.wire.identity import NONE, TopicPartition


def seek(driver: ConsumerDriver, ending: Ending, tp: TopicPartition, offset: int, deadline: float) -> Steps[None]:
    """Returns when the log has the position; one thread at a time. `deadline`: monotonic seconds. Raises as
    `Consumer.seek`."""
    context, member = driver.context, driver.member
    if driver.queue.at_most_once:
        raise NeedsAtLeastOnce("seek", member.name)
    if type(offset) is not int:
        raise InvalidOption("offset", offset, "a whole number, as message.offset is")
    if tp not in _owned(driver):
        raise _not_claimed(driver, tp)
    bounds = context.admin.bounds([tp], timeout_s=max(0.0, deadline - context.monotonic()))[tp]
    if not bounds.first <= offset <= bounds.end:
        raise PositionOutOfRange(*tp, offset, bounds.first, bounds.end)
    with context.outbox, context.lock:
        claim = member.seek(tp, offset, context.clock.now())
        driver.kick()
    if claim is not None:
        what = f"the position of {tp}"
        yield from context.until(lambda: claim.phase is ClaimPhase.GONE or driver.ended, what, deadline, driver.log)
        if claim.phase is not ClaimPhase.GONE:  # a stop that has not read back that it left
            ending.check_open()
    if claim is None or claim.seek_to == NONE:
        raise _not_claimed(driver, tp)


def _owned(driver: ConsumerDriver) -> set[TopicPartition]:
    with driver.context.lock:
        return {claim.tp for claim in driver.member.claims.values()}


def _not_claimed(driver: ConsumerDriver, tp: TopicPartition) -> ClaimLost:
    return ClaimLost(driver.member.name, (str(tp),), tuple(map(str, sorted(_owned(driver) - {tp}))))
