"""Waits until the log has accepted acks: `flush` and `double_ack`, and the commit of planned ranges.

An ack moves the position of its claim, or adds to the ranges that are finished above it; the next heartbeat or Release
tells the log so. It is accepted when this reader has folded that record (T17). Threads that wait at the same time share
heartbeats: one is sent at once, and the next when that one was read back.

A claim may end before. If a record of the log has ended it, the log says which acks it has: the others are lost, and
their messages are delivered again. If this process has given the claim up (the consumer has ended, or the log's history
was deleted), nobody knows: a heartbeat that was sent before may still be accepted.
"""

from __future__ import annotations

from typing import Final

from marshal_py.client.connection.context import Context
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.messages.acks import Ack, Acked, LostAcks
from marshal_py.client.values.waits import Steps
from marshal_py.errors import AckNotConfirmed, ClaimLost, ClusterUnreachable, MarshalError
from marshal_py.protocol.claims.claim import ClaimPhase, finished_spans, log_has
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.wire.identity import TopicPartition

NO_ROOM: Final = "the log has no room for more finished messages above the lowest unfinished one, which must come first"
STOPPED: Final = "the consumer has ended"
HISTORY_LOST: Final = "records were deleted from the log before this process read them, so it gave its claims up"


class Confirmations:
    """Waits for the acks of one consumer."""

    def __init__(self, context: Context, driver: ConsumerDriver, lost_acks: LostAcks) -> None:
        self._context, self._driver, self._member, self._lost_acks = context, driver, driver.member, lost_acks

    def wait(self, ack: Ack, timeout_s: float) -> None:
        """Waits in the calling thread, as `accepted` says."""
        self._context.complete(self.accepted(ack, timeout_s))

    def accepted(self, ack: Ack, timeout_s: float) -> Steps[None]:
        """Calls `ack`, and returns when the log has accepted what that has acked. Any thread may call it, but not the
        background thread: a call that is refused has acked nothing. In at-most-once mode only late acks matter, because
        the grants have moved the positions. Raises ClaimLost, after the others are accepted; AckNotConfirmed after
        `timeout_s` seconds, or as soon as it will never be known; ReentrantCall, UsedAfterFork."""
        self._context.check_call("Message", "ack", waits=True)
        acked = ack()
        late = {one.claim.tp for one in acked if one.late}
        waiting = [one for one in acked if one.spans and not one.late and isinstance(one.claim.tracker, AtLeastOnce)]
        return self._accepted(waiting, late, set(), timeout_s)

    def flush(self, timeout_s: float, after: int | None = None) -> Steps[None]:
        """Returns when the log has accepted all acks before this call, as `accepted` does. Acks that were lost since
        the last flush raise ClaimLost, once. `after`: instead only those after so many losses (`LostAcks.count`), which
        another flush still raises."""
        with self._context.outbox, self._context.lock:
            self._member.settle_acks()
            claims = self._member.claims.values()
            waiting = [
                Acked(claim, finished_spans(claim.tracker))
                for claim in claims
                if isinstance(claim.tracker, AtLeastOnce)
            ]
            before = self._lost_acks.after(after or 0)
        lost = {tp for tp, certain in before.items() if certain}
        unknown = {*before} - lost
        try:
            yield from self._accepted(waiting, lost, unknown, timeout_s)
        except (ClaimLost, AckNotConfirmed) as error:
            if after is None:
                with self._context.lock:
                    self._lost_acks.reported(lost if isinstance(error, ClaimLost) else unknown if error.over else ())
            raise

    def _accepted(
        self, waiting: list[Acked], lost: set[TopicPartition], unknown: set[TopicPartition], timeout_s: float
    ) -> Steps[None]:
        """Waits for what is `waiting`, and adds to `lost` and `unknown` the partitions whose claims end before."""
        liveness, name, broken = self._member.liveness, self._member.name, ""
        deadline = self._context.monotonic() + timeout_s
        with self._context.lock:
            sent_before = liveness.last_sent

        def returned() -> bool:
            """Returns whether a heartbeat that was sent since has come back, so that the log has what fits into it."""
            back = liveness.last_accepted  # when it was sent
            return back is not None and (sent_before is None or back.mono_ms > sent_before.mono_ms)

        def done() -> bool:
            left = [one for one in waiting if not log_has(one.spans, one.claim, self._member.group)]
            ended = [one.claim for one in left if one.claim.phase is ClaimPhase.GONE or self._driver.ended]
            lost.update(claim.tp for claim in ended if claim.final is not None)
            unknown.update(claim.tp for claim in ended if claim.final is None)
            waiting[:] = [one for one in left if one.claim not in ended]
            if waiting and liveness.last_sent is sent_before and not liveness.awaits_echo():
                self._member.urgent = True
                self._driver.kick()
            return not waiting

        try:
            yield from self._context.until(done, "acks to be accepted", deadline, self._driver.log)
        except ClusterUnreachable as error:
            with self._context.lock:
                reason = self._context.coordination.waiting_for() or (NO_ROOM if returned() else error.reason)
            places = tuple(f"{one.claim.tp}@{one.spans[-1][1] - 1}" for one in waiting)
            raise AckNotConfirmed(name, places, timeout_s, reason) from error
        except MarshalError as error:  # nothing more is read of the log
            unknown.update(one.claim.tp for one in waiting)
            broken = str(error)
        if lost:
            raise ClaimLost(name, tuple(map(str, sorted(lost))))
        if unknown:
            reason = broken or (str(self._driver.error or STOPPED) if self._driver.ended else HISTORY_LOST)
            raise AckNotConfirmed(name, tuple(map(str, sorted(unknown))), timeout_s, reason, over=True)
