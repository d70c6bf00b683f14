"""What every kind of consumer shares: one membership of a group, as its user holds it.

consumer.py (which fetches messages) and planner.py (which plans ranges for other readers) build on it. Its methods
inspect, pause and stop it. What it owns and when it may deliver is decided by protocol.member.Member.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self

from marshal_py.client.connection.context import Context
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.driver.standing import fenced, why_waiting
from marshal_py.client.messages.acks import LostAcks
from marshal_py.client.receive.confirmations import Confirmations
from marshal_py.client.receive.ending import LEAVE_TIMEOUT_S, Ending
from marshal_py.client.values.info import ClaimInfo, ConsumerInfo, in_flight
from marshal_py.client.values.requests import AnyPartition, check_partitions, check_timeout, check_wait
from marshal_py.client.values.waits import Steps
from marshal_py.errors import AckNotConfirmed, ConcurrentUse, InvalidOption, ReentrantCall
from marshal_py.protocol.member.advisory import Advisory
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.subscription import consumes

HEALTHY_SILENCE_S: Final = 60.0  # twice the expiry of a fetch: a program that asks is never silent for so long
WAIT_SLICE_S: Final = 0.1  # a waiting call wakes at least so often: for signals, errors, a stop by another thread


class Call:
    """One call of a method for one thread at a time, compared by identity. `verb`: for errors."""

    __slots__ = ("verb",)

    def __init__(self, verb: str) -> None:
        self.verb: str = verb


class Membership:
    """A membership of a group. It is a context manager: leaving it stops the consumer and releases its claims."""

    def __init__(self, context: Context, driver: ConsumerDriver, connection: Mapping[str, Any], ending: Ending) -> None:
        self.connection = connection  # librdkafka's settings of a data consumer: other readers of its ranges need them
        self._context = context
        self._driver = driver
        self._member = driver.member
        self._ending = ending
        queue = driver.queue
        lost_acks = queue.delivery.lost_acks if isinstance(queue, DeliveryQueue) else LostAcks()
        self._confirmations: Confirmations = Confirmations(context, driver, lost_acks)
        ending.fronts += 1
        self.identify: Callable[[], int] = threading.get_ident  # of the caller: its thread, or its asyncio task
        self.caller = "thread"  # what a caller is, in errors
        self._user: int | None = None  # the caller that is inside a Call, or in the body of an iteration
        self._inside: Call | None = None  # its Call; None while it is in the body
        self._entry = threading.RLock()  # guards the two: of threads that arrive together only one may pass
        self._iterating: Call | None = None

    # --- life

    @property
    def _delivers(self) -> bool:
        """Returns whether the user is in the body of an iteration, or a handler of `consume` runs."""
        return self._iterating is not None and self._inside is None

    def __repr__(self) -> str:
        """Takes no lock, because debuggers and loggers call it anywhere."""
        topics, claims = list(self._member.options.topics), len(self._member.claims)
        name, client_id, state = self._member.name, self._member.options.client_id, ", closed" * self._ending.over
        return f"{type(self).__name__}({name!r}, {topics}, client_id={client_id!r}, claims={claims}{state})"

    def __del__(self) -> None:
        """Warns of a consumer that the program has dropped while it runs. Takes no lock, as it may run anywhere."""
        ending = self.__dict__.get("_ending")  # missing if a subclass has raised before
        if ending is not None and ending.front_gone():
            front = f"{'Async' if self.caller == 'task' else ''}{self!r}"
            text = f"{front} was dropped and not stopped: it leaves its group now, as after drain()"
            # Not this object as the source, which would bring it back to life. What was made with it tells as much.
            warnings.warn(text, ResourceWarning, stacklevel=2, source=ending)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ending.because(error)
        self.stop()

    def stop(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Drops what is buffered, releases every claim at its position and leaves the group.

        In at-least-once mode messages that were delivered and not acked will be delivered again; acked ones will not,
        not even those above them. In at-most-once mode the next owner gets what was granted and not delivered.

        While the cluster does not answer, the call returns after `timeout_s` seconds. The claims are then freed once
        the other members have waited for the lease to end, and grants are lost. A second call does nothing; if the
        first was interrupted (ctrl-C), it does what is left. Raises InvalidOption before anything is dropped;
        ReentrantCall, for example in a signal's handler that interrupts another call; the consumer is then asked to
        stop, as by `stop_on_signals`.
        """
        try:
            self._context.check_call("Consumer", "stop", waits=True)
        except ReentrantCall:
            self._ending.request_stop(0.0)
            raise
        self._context.complete(self._ending.stop(timeout_s))
        self._ending.close()

    def drain(self, timeout_s: float | None = None) -> None:
        """Stops delivery, waits until the handlers have acked what was delivered, and leaves the group.

        It waits at most `timeout_s` seconds, by default the handler timeout. Raises InvalidOption, ReentrantCall.
        """
        self._context.check_call("Consumer", "drain", waits=True)
        self._begin_drain(check_wait(timeout_s))
        self._finish_drain()

    def _finish_drain(self) -> None:
        self._context.complete(self._ending.finish_drain())
        self._ending.close()

    def _begin_drain(self, timeout_s: float | None) -> None:
        self._ending.drain(self._driver.options.handler_timeout_s if timeout_s is None else timeout_s)

    def _enter(self, call: Call) -> None:
        """Begins a call for one thread at a time, not inside another. Raises ConcurrentUse, ReentrantCall."""
        self._context.check_call("Consumer", call.verb, waits=True)
        me = self.identify()
        with self._entry:
            if self._ending.reason:  # first: a thread of a consume may be inside until it has seen the end
                self._ending.raise_if_ended()
            if self._user is not None and self._user != me:
                raise ConcurrentUse(call.verb, self.caller)
            if self._inside is not None:
                raise ReentrantCall(call.verb, f"{self._inside.verb} of the same consumer")
            self._ending.raise_if_ended()
            self._user, self._inside = me, call

    def _pass(self, verb: str) -> None:
        """Checks that `_enter` allows the call, which does not stay inside. Raises what it raises."""
        call = Call(verb)
        try:
            self._enter(call)
        finally:  # as in Consumer.fetch
            if self._inside is call:
                self._inside = None
                self._user = self._user if self._iterating else None

    # --- positions

    def flush(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Waits until the log has accepted all acks before this call: nobody receives these messages again.

        Raises ClaimLost if an ack since the last flush came too late, or was lost with its claim: the message is
        delivered again. The error names the partitions, and says so once; the log has accepted the others. Raises
        AckNotConfirmed after `timeout_s` seconds, or if it will never be known (`over`); ConcurrentUse, ReentrantCall,
        ConsumerClosed, InvalidOption, and the error that ended the consumer. In at-most-once mode it does not wait.
        """
        self._pass("flush")
        self._context.complete(self._flush(timeout_s))

    def _flush(self, timeout_s: float) -> Steps[None]:
        check_timeout(timeout_s)
        yield from self._confirmed(self._confirmations.flush(timeout_s))

    def _confirmed(self, steps: Steps[None]) -> Steps[None]:
        """Waits for acks. If it will never be known whether the log has them, the error that ended the consumer tells
        more."""
        try:
            yield from steps
        except AckNotConfirmed as error:
            if error.over:
                self._ending.raise_if_ended()
            raise

    def _check_open(self, verb: str, *, waits: bool = False) -> None:
        """Checks a call on a running consumer. `waits`: as in `check_call`. Raises ConsumerClosed, UsedAfterFork,
        ReentrantCall."""
        self._context.check_call("Consumer", verb, waits=waits)
        self._ending.check_open()

    def pause(self, partitions: Iterable[AnyPartition]) -> None:
        """Stops delivering these partitions to this consumer, which keeps the claims.

        A partition of its topics that it does not own is paused for the time when it does. Raises InvalidOption for a
        partition that the topic does not have, as far as the group knows, and for other topics; ConsumerClosed,
        ReentrantCall.
        """
        self._check_open("pause")
        found = check_partitions(partitions)
        with self._context.outbox, self._context.lock:
            self._check_known(found)
            self._driver.queue.pause(found)

    def resume(self, partitions: Iterable[AnyPartition]) -> None:
        """Delivers these partitions again after `pause`. Raises the same errors as `pause`."""
        self._check_open("resume")
        found = check_partitions(partitions)
        with self._context.outbox, self._context.lock:
            self._check_known(found)
            self._driver.queue.resume(found)

    def _check_known(self, partitions: Iterable[TopicPartition]) -> None:
        """Raises InvalidOption for a partition that this consumer can never own. Called with the lock held."""
        topics, group = self._member.options.topics, self._member.group
        for tp in partitions:
            if not consumes(topics, tp.topic):
                raise InvalidOption("partitions", tuple(tp), f"partitions of the topics {', '.join(topics)}")
            known = None if group is None else group.topics.get(tp.topic)
            if known is not None and not 0 <= tp.partition < known.count:
                raise InvalidOption(
                    "partitions", tuple(tp), f"the topic has {known.count}, from 0 to {known.count - 1}"
                )

    # --- looking

    def _claims(self) -> dict[TopicPartition, ClaimInfo]:
        return {c.tp: self._driver.claim_info(c) for c in self._member.claims.values()}

    def cached_info(self) -> ConsumerInfo:
        """Returns the state of this consumer as it knows it, without asking the cluster. Raises ReentrantCall."""
        self._context.check_call("Consumer", "cached_info")
        with self._context.lock:
            claims = self._claims()
            return ConsumerInfo(
                self._member.name,
                self._member.options.client_id,
                self._member.session,
                self._driver.options.delivery,
                self._member.paused,
                claims,
                self._lag(claims.values()),
                sum(map(in_flight, self._member.claims.values())),
                self._member.grants_dropped,
                self._member.late_acks,
                self._lacks(HEALTHY_SILENCE_S) or why_waiting(self._driver),
                *self._pending(),
                tuple(sorted(self._driver.began_at_end)),
                self._ending.over,
            )

    def _lacks(self, max_silence_s: float) -> str:
        """Returns why this consumer does not work, for people; "" if it does. Called with the lock held."""
        return self._context.waiting_for() or fenced(self._driver) or self._program_lacks(max_silence_s)

    def _program_lacks(self, max_silence_s: float) -> str:
        """Returns what the program has not done for so long, for people; "" if it works. Called with the lock held."""
        return ""

    def _pending(self) -> tuple[int, int]:
        """Returns how many messages and bytes a running `consume` has asked for and not delivered."""
        return 0, 0

    def _lag(self, claims: Collection[ClaimInfo]) -> int:
        """Returns the lag of the claims; -1 if unknown: a topic is missing, or it owns nothing and partitions are
        parked."""
        if self._driver.topic_watch.missing or (not claims and self._driver.parked()):
            return -1
        return sum(max(0, claim.lag) for claim in claims)

    def info(self, timeout_s: float = LEAVE_TIMEOUT_S) -> ConsumerInfo:
        """Reads the coordination log to its end, then returns the state as `cached_info` does.

        Raises ClusterUnreachable, ReentrantCall, InvalidOption.
        """
        self._context.complete(self._read_to(*self._log_end(timeout_s)))
        return self.cached_info()

    def _log_end(self, timeout_s: float) -> tuple[int, float]:
        """Returns the offset at which the coordination log ends now, and when the call's time is over (monotonic)."""
        self._context.check_call("Consumer", "info", waits=True)
        check_timeout(timeout_s)
        deadline = self._context.monotonic() + timeout_s
        return self._context.coordination.bounds(self._driver.log, timeout_s).end, deadline

    def _read_to(self, end: int, deadline: float) -> Steps[None]:
        return self._context.until(
            lambda: self._member.world.next_offset >= end, "the end of the coordination log", deadline, self._driver.log
        )

    def events(self) -> Iterator[Advisory]:
        """Yields the advisories that came since the last call: claimed, revoking, lost, fenced, evicted, ...

        At most the newest 10,000 are kept for the next call.
        """
        self._context.check_call("Consumer", "events")
        events = self._driver.events
        while events:
            yield events.popleft()
