"""Waits until the log has accepted acks: `ack(wait=True)` and `double_ack` of messages, parts and batches.

An ack moves the position of its claim, or adds to the ranges that are finished above it; the next heartbeat or Release
tells the log so. It is accepted when this reader has folded that record (T17). Threads that wait at the same time share
heartbeats: one is sent at once, and the next when that one was read back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from marshal_py.client.acks import Acked
from marshal_py.client.consumer_driver import ConsumerDriver
from marshal_py.client.context import Context
from marshal_py.client.waits import Steps
from marshal_py.errors import AckNotConfirmed, ClaimLost, ClusterUnreachable
from marshal_py.protocol import progress
from marshal_py.protocol.claim import Claim, ClaimPhase
from marshal_py.protocol.delivery import AtLeastOnce

NO_ROOM: Final = "the log has no room for more finished messages above the lowest unfinished one, which must come first"


class Confirmations:
    """Waits for the acks of one consumer."""

    def __init__(self, context: Context, driver: ConsumerDriver) -> None:
        self._context, self._driver, self._member = context, driver, driver.member

    def wait(self, acked: Sequence[Acked], timeout_s: float) -> None:
        """Waits in the calling thread, as `accepted` says."""
        self._context.complete(self.accepted(acked, timeout_s))

    def accepted(self, acked: Sequence[Acked], timeout_s: float) -> Steps[None]:
        """Returns when the log has accepted these acks. Any thread may call it, but not the background thread.

        In at-most-once mode only lost claims matter, because the grants have moved the positions. Raises ClaimLost,
        after the others are accepted; AckNotConfirmed after `timeout_s` seconds, or if the log cannot be read any more;
        ReentrantCall, UsedAfterFork.
        """
        self._context.check_call("Message", "ack", waits=True)
        lost = {one.claim.tp for one in acked if one.late}
        waiting = [one for one in acked if one.offsets and not one.late and isinstance(one.claim.tracker, AtLeastOnce)]
        liveness = self._member.liveness
        with self._context.lock:
            sent_before = liveness.last_sent

        def returned() -> bool:
            """Returns whether a heartbeat that was sent since has come back, so that the log has what fits into it."""
            back = liveness.last_accepted  # when it was sent
            return back is not None and (sent_before is None or back.mono_ms > sent_before.mono_ms)

        def done() -> bool:
            lost.update(one.claim.tp for one in waiting if self._lost(one.claim))
            waiting[:] = [one for one in waiting if one.claim.tp not in lost and not self._accepted(one)]
            if waiting and liveness.last_sent is sent_before and not liveness.awaits_echo():
                self._member.urgent = True
                self._driver.kick()
            return not waiting

        try:
            yield from self._context.until(done, "acks to be accepted", time.monotonic() + timeout_s, self._driver.log)
        except ClusterUnreachable as error:
            with self._context.lock:
                reason = self._context.waiting_for() or (NO_ROOM if returned() else error.reason)
            places = tuple(f"{one.claim.tp}@{one.offsets[-1]}" for one in waiting)
            raise AckNotConfirmed(self._member.name, places, timeout_s, reason) from error
        if lost:
            raise ClaimLost(self._member.name, tuple(map(str, sorted(lost))))

    def _lost(self, claim: Claim) -> bool:
        return claim.phase is ClaimPhase.GONE and not claim.released

    def _accepted(self, one: Acked) -> bool:
        """Returns whether the log names all these offsets as finished: below the position, or in its progress."""
        claim, group = one.claim, self._member.group
        if claim.released:
            assert isinstance(claim.tracker, AtLeastOnce)
            position, known = claim.released_position, claim.tracker.progress()
        elif group is None or claim.epoch not in group.claims:
            return False
        else:
            position, known = group.claims[claim.epoch].position, group.claims[claim.epoch].progress
        if one.offsets[-1] < position:
            return True
        spans = [(start, to) for start, to, times in progress.decode(position, known) if not times]
        above = (offset for offset in one.offsets if offset >= position)
        return all(any(start <= offset < to for start, to in spans) for offset in above)
