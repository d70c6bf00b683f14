"""What every kind of consumer shares: one membership of a group, as its user holds it.

consumer.py (which fetches messages) and planner.py (which plans ranges for other readers) build on it. A membership can
be looked at, paused and stopped; what it owns and when it may deliver, the member decides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self

from marshal_py.client.consumer_driver import ConsumerDriver
from marshal_py.client.context import Context
from marshal_py.client.counters import in_flight
from marshal_py.client.ending import LEAVE_TIMEOUT_S, Ending
from marshal_py.client.info import ClaimInfo, ConsumerInfo
from marshal_py.errors import ConcurrentUse, ReentrantCall
from marshal_py.protocol.advisory import Advisory
from marshal_py.protocol.delivery import AtLeastOnce
from marshal_py.protocol.identity import NONE, TopicPartition

WAIT_SLICE_S: Final = 0.1  # a waiting call looks up at least so often: for signals, errors, a stop from elsewhere
HAND_OVER_S: Final = 1.0  # a hand-over takes some ms; a deployment must not wait for one that does not come


class Call:
    """One call of a method that is for one thread at a time, known by its identity."""

    __slots__ = ("verb",)

    def __init__(self, verb: str) -> None:
        self.verb = verb


class Membership:
    """A membership of a group. A context manager; leaving it stops the consumer and releases its claims."""

    def __init__(self, context: Context, driver: ConsumerDriver, connection: Mapping[str, Any], ending: Ending) -> None:
        self.connection = connection  # librdkafka's settings of a data consumer: other readers of its ranges need them
        self._context = context
        self._driver = driver
        self._member = driver.member
        self._ending = ending
        self._user: int | None = None  # thread that is inside a call for one thread, or in the body of an iteration
        self._inside: Call | None = None  # its call; None in the body
        self._entry = threading.RLock()  # around the two: of threads that arrive together only one may pass
        self._iterating: Call | None = None

    # --- life

    @property
    def group(self) -> str:
        return self._member.name

    @property
    def client_id(self) -> str:
        return self._member.options.client_id

    @property
    def closed(self) -> bool:
        """Whether it has stopped, by itself or by the user."""
        return self._ending.over

    @property
    def stopping(self) -> bool:
        """Whether it has stopped, is draining, or was asked to stop: the condition of a loop around `fetch`."""
        return self._ending.draining or self._ending.over or self._ending.must_stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Drops what is buffered, releases every claim at its position and leaves the group.

        In at-least-once mode messages that were delivered and not acked will be delivered again; acked ones will not,
        not even those above them. In at-most-once mode the next owner gets what was granted and not delivered.

        While the cluster does not answer, the call returns after `timeout_s` seconds. The claims are then freed once
        the other members have waited for the lease to end, and grants are lost. A second call does nothing; if the
        first was interrupted (ctrl-C), it does what is left. Raises ReentrantCall.
        """
        self._context.check_call("Consumer", "stop", waits=True)
        self._ending.stop(timeout_s)

    def drain(self, timeout_s: float | None = None) -> None:
        """Waits until what was delivered is done, at most `timeout_s` seconds, then leaves the group.

        The default is the handler timeout. Raises ReentrantCall.
        """
        self._context.check_call("Consumer", "drain", waits=True)
        self._begin_drain(timeout_s)
        self._ending.finish_drain()

    def _begin_drain(self, timeout_s: float | None) -> None:
        self._ending.drain(self._driver.options.handler_timeout_s if timeout_s is None else timeout_s)

    def request_stop(self, hand_over_s: float = HAND_OVER_S) -> None:
        """Ends iterations and waiting fetches soon. Takes no lock, so signal handlers and callbacks may call it.

        If other members take over, messages still come while those fetch ahead, for at most `hand_over_s` seconds, so
        that no partition waits (A6). A second call, or `hand_over_s=0`, ends them at once.
        """
        self._ending.request_stop(hand_over_s)

    def _enter(self, call: Call) -> None:
        """Begins a call that is for one thread at a time, and not inside another one."""
        self._context.check_call("Consumer", call.verb, waits=True)
        me = threading.get_ident()
        with self._entry:
            if self._user is not None and self._user != me:
                raise ConcurrentUse(call.verb)
            if self._inside is not None:
                raise ReentrantCall(call.verb, f"{self._inside.verb} of the same consumer")
            self._ending.raise_if_ended()
            self._user, self._inside = me, call

    # --- positions

    def flush(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Waits until the log has accepted the positions of all messages that are acked now.

        Raises ClusterUnreachable, ConcurrentUse, ReentrantCall, ConsumerClosed.
        """
        call = Call("flush")
        try:
            self._enter(call)
        finally:  # as in fetch
            if self._inside is call:
                self._inside = None
                self._user = self._user if self._iterating else None
        context, member = self._context, self._member
        with context.outbox, context.lock:
            wanted = {
                c.epoch: c.tracker.position() for c in member.claims.values() if isinstance(c.tracker, AtLeastOnce)
            }
            member.urgent = True
            self._driver.kick()

        def done() -> bool:
            group = member.group
            return (
                self._driver.ended
                or group is None
                or all(
                    epoch not in group.claims or group.claims[epoch].position >= position
                    for epoch, position in wanted.items()
                )
            )

        context.wait_for(done, "the positions to be accepted", time.monotonic() + timeout_s, self._driver.log)
        self._ending.raise_if_ended()

    def pause(self, partitions: Iterable[TopicPartition | tuple[str, int]]) -> None:
        """Stops delivering these partitions here; the claims and their leases are kept. Raises ReentrantCall."""
        self._context.check_call("Consumer", "pause")
        with self._context.outbox, self._context.lock:
            self._driver.queue.pause(TopicPartition(*tp) for tp in partitions)

    def resume(self, partitions: Iterable[TopicPartition | tuple[str, int]]) -> None:
        """Ends a local pause. Raises ReentrantCall."""
        self._context.check_call("Consumer", "resume")
        with self._context.outbox, self._context.lock:
            self._driver.queue.resume(TopicPartition(*tp) for tp in partitions)

    # --- looking

    def claims(self) -> Mapping[TopicPartition, ClaimInfo]:
        """The claims of this consumer, as far as it has read the log. Raises ReentrantCall."""
        self._context.check_call("Consumer", "claims")
        with self._context.lock:
            return self._claims()

    def _claims(self) -> dict[TopicPartition, ClaimInfo]:
        return {c.tp: self._driver.claim_info(c) for c in self._member.claims.values()}

    def cached_info(self) -> ConsumerInfo:
        """The state of this consumer as it knows it, without asking the cluster. Raises ReentrantCall."""
        self._context.check_call("Consumer", "cached_info")
        with self._context.lock:
            claims = self._claims()
            return ConsumerInfo(
                self.group,
                self.client_id,
                self._member.session,
                self._driver.options.delivery,
                self._member.paused,
                claims,
                self._lag(claims.values()),
                sum(map(in_flight, self._member.claims.values())),
                self._member.grants_dropped,
                self._member.late_acks,
                self._context.waiting_for() or self._driver.waiting_for(),
            )

    def _lag(self, claims: Collection[ClaimInfo]) -> int:
        """Messages behind the ends of the claims; -1 where that is not known.

        It is not while a topic is missing, or while this consumer owns nothing and partitions are parked.
        """
        if self._driver.missing or (not claims and self._driver.parked()):
            return -1
        return sum(max(0, claim.lag) for claim in claims)

    def info(self, timeout_s: float = LEAVE_TIMEOUT_S) -> ConsumerInfo:
        """As `cached_info`, after reading the coordination log to its end. Raises ClusterUnreachable, ReentrantCall."""
        self._context.check_call("Consumer", "info", waits=True)
        end = self._context.coordination.bounds(self._driver.log, timeout_s).end
        self._context.wait_for(
            lambda: self._member.world.next_offset >= end,
            "the end of the coordination log",
            time.monotonic() + timeout_s,
            self._driver.log,
        )
        return self.cached_info()

    def events(self) -> Iterator[Advisory]:
        """Advisories since the last call: claimed, revoking, lost, fenced, evicted, ... 10,000 are kept."""
        self._context.check_call("Consumer", "events")
        events = self._driver.events
        while events:
            yield events.popleft()

    def wait_joined(self, timeout_s: float) -> None:
        """Waits until the group has this member. Raises ClusterUnreachable, and the error that ended the consumer."""
        self._context.wait_for(
            lambda: self._member.session != NONE or self._driver.ended,
            "the group to be joined",
            time.monotonic() + timeout_s,
            self._driver.log,
        )
        if self._driver.ended:
            self._ending.raise_if_ended()
