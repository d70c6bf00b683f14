"""What every kind of consumer shares: one membership of a group, as its user holds it.

consumer.py (which fetches messages) and planner.py (which plans ranges for other readers) build on it. Its methods
inspect, pause and stop it. What it owns and when it may deliver is decided by protocol.member.Member.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import inf
from types import TracebackType
from typing import Any, Final, Self

from marshal_py.client.connection import END_S_MIN, Change, Context, Steps, watch_forks
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.driver.consumer_driver import ConsumerDriver
from marshal_py.client.messages.answers import Ack, Acked, LostAcks
from marshal_py.client.ranges import Ranges
from marshal_py.client.values.info import ClaimInfo, ConsumerInfo, in_flight
from marshal_py.client.values.requests import AnyPartition, check_partitions, check_timeout, check_wait
from marshal_py.errors import (
    AckNotConfirmed,
    ClaimLost,
    ClusterUnreachable,
    ConcurrentUse,
    ConsumerClosed,
    InvalidOption,
    MarshalError,
    PartitionsParked,
    PartitionsUnread,
    ReentrantCall,
)
from marshal_py.protocol.claims import AtLeastOnce, ClaimPhase, finished_spans, log_has
from marshal_py.protocol.fold.world import Group
from marshal_py.protocol.member.advisory import Advisory
from marshal_py.protocol.member.waiting import Facts, standstills, waiting_for
from marshal_py.protocol.wire import records
from marshal_py.protocol.wire.identity import NONE, TopicPartition, consumes

# --- Says why a consumer does not work: protocol/member/waiting.py's table, with what this process knows beyond the log
#
# It knows its connection, its lease, its topics in the cluster and its handlers. Call the functions with the lock held.


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
    gone, ranges = driver.topic_watch.absent, driver.queue
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


# --- Waits until the log has accepted acks: `flush` and `double_ack`, and the commit of planned ranges.
#
# An ack moves the position of its claim, or adds to the ranges that are finished above it; the next heartbeat or
# Release tells the log so. It is accepted when this reader has folded that record (T17). Threads that wait at the same
# time share heartbeats: one is sent at once, and the next when that one was read back.
#
# A claim may end before. If a record of the log has ended it, the log says which acks it has: the others are lost, and
# their messages are delivered again. If this process has given the claim up (the consumer has ended, or the log's
# history was deleted), nobody knows: a heartbeat that was sent before may still be accepted.


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


# --- How one consumer ends: by a stop, a drain, a signal or an error.
#
# An Ending tells the member to leave, waits until it has left, and keeps the reason for later calls of the user. The
# member decides what it releases and when. A drain waits for the handlers of delivered messages; a stop does not.


LEAVE_TIMEOUT_S: Final = 10.0
HAND_OVER_S: Final = 1.0  # a hand-over takes some ms; a deployment must not wait for one that does not come
LETTERS_TIMEOUT_S: Final = 2.0  # many round trips of a cluster; the next owner repeats the letters that are not written
LEAVE_SLICE_S: Final = 0.1  # how often a consumer that waits until it has left wakes up: for signals, and to step


class Ending:
    """Ends one consumer, from the request until its data source is closed."""

    def __init__(self, context: Context, driver: ConsumerDriver, closed: Callable[[], object]) -> None:
        """Of the consumer that `driver` drives. `closed`: called once nothing can be fetched."""
        self._context = context
        self._driver = driver
        self._closed = closed
        self.reason: str = ""  # why the consumer is closed; "" while it is not
        self.done: bool = False  # it has left, and its source is closed
        self.draining: bool = False
        self.drain_until: float = 0.0  # monotonic
        self._why = "stopped"  # what the log says of a stop
        self._stop_at: float | None = None  # monotonic; a signal handler sets it, so without the lock
        self._forked = False
        self._closing = threading.RLock()  # held by `close` alone
        self.fronts: int = 0  # whoever can stop it: a Consumer, a Planner that it has become, a test's cluster
        self.dispose: Callable[[Ending], object] = Ending.close  # how a consumer that has ended by itself is closed
        watch_forks(self)

    def forked(self) -> None:
        """Makes iterations end and every method raise UsedAfterFork, in a forked child process. Called in the child."""
        self._forked = True

    @property
    def over(self) -> bool:
        """Returns whether the consumer has ended, by an error, by the user or by a fork."""
        return bool(self.reason) or self._driver.ended or self._forked

    @property
    def error_waits(self) -> bool:
        """Returns whether an error has ended the consumer, and waits for the user's next call."""
        return self._driver.ended and self._driver.error is not None and not self.reason and not self._forked

    @property
    def stopping(self) -> bool:
        """Returns whether it has ended, drains, or was asked to; False while an error waits."""
        return self.draining or self.must_stop() or (self.over and not self.error_waits)

    def because(self, error: BaseException | None) -> None:
        """Has the log say that an error of the program stops it: its class alone, for its text may hold anything."""
        if isinstance(error, Exception):
            self._why = f"{records.FAILED}{type(error).__name__}"

    def stop(self, timeout_s: float) -> Steps[None]:
        """Stops, and waits until it has left, within `timeout_s`; `close` must follow. A second call completes an
        interrupted one. Raises InvalidOption before anything."""
        check_timeout(timeout_s)
        self.reason = self.reason or "it was stopped"
        deadline = self._context.monotonic() + timeout_s
        yield from self._write_letters(min(timeout_s, LETTERS_TIMEOUT_S))
        yield from self._leave(self._why, 0.0, max(0.0, deadline - self._context.monotonic()))

    def _write_letters(self, timeout_s: float) -> Steps[None]:
        """Waits until dead letters that are on their way are written, for `timeout_s` seconds at most."""
        deadline = self._context.monotonic() + timeout_s
        while True:
            with self._context.lock:
                left_s = deadline - self._context.monotonic()
                if self._driver.ended or left_s <= 0 or not self._driver.queue.writing:
                    return
                seen = self._context.changes
            yield Change(min(LEAVE_SLICE_S, left_s), seen)

    def drain(self, wait_s: float) -> None:
        """Notes that the consumer drains, for at most `wait_s` seconds; `finish_drain` releases its claims later."""
        self.drain_until = self._context.monotonic() + wait_s
        self.draining = True

    def drain_left_s(self) -> float:
        return max(0.0, self.drain_until - self._context.monotonic())

    def finish_drain(self) -> Steps[None]:
        """Waits for the handlers, then releases the claims and leaves the group. `close` must follow."""
        wait_s = self.drain_left_s()
        self.reason = self.reason or "it was drained"
        yield from self._leave("drained", wait_s, min(LEAVE_TIMEOUT_S, max(END_S_MIN, wait_s)))

    def _leave(self, reason: str, wait_s: float, timeout_s: float) -> Steps[None]:
        """Has the member leave: handlers have `wait_s`, then the claims are released. Returns when it read back that it
        left, within `timeout_s` or what the Marshal's ends have left (T16, T17; EndBudget). Logs what was not acked."""
        if self.done:
            return
        context, driver, member = self._context, self._driver, self._driver.member
        handlers_until, deadline = context.monotonic() + wait_s, inf
        with context.outbox, context.lock:
            abandoned = driver.counters.abandoned
            if not driver.ended:
                member.leave(context.clock.now(), reason, round(wait_s * 1000))
                driver.kick()
        while True:
            with context.outbox, context.lock:
                now_s, now_ms = context.monotonic(), context.clock.now().mono_ms
                busy = any(not claim.sealed and not claim.drained(now_ms) for claim in member.claims.values())
                if deadline == inf and (now_s >= handlers_until or not busy):
                    deadline = context.end_budget.deadline(timeout_s)
                left_s = min(deadline, max(handlers_until, now_s + LEAVE_SLICE_S)) - now_s
                if member.ended and not driver.gave_up:  # another thread's stop may have given up
                    context.end_budget.answered()
                if driver.ended or left_s <= 0 or driver.log in context.broken:
                    unacked = driver.counters.abandoned - abandoned + sum(map(in_flight, member.claims.values()))
                    if not driver.ended:
                        driver.give_up(None)
                    break
                seen = context.changes
            yield Change(min(LEAVE_SLICE_S, left_s), seen)
            driver.kick()
        if unacked:
            context.logger.info(
                "group %s: %s has left (%s); messages that were delivered and not acked: %d",
                *(member.name, member.options.client_id, reason, unacked),
                extra={"marshal_group": member.name, "marshal_client_id": member.options.client_id},
            )

    def close(self) -> None:
        """Closes the data source, once the consumer has left. Waits for librdkafka, and for another thread's close."""
        with self._closing:
            if not self.done:
                self._driver.close()
                self._closed()
                self.done = True

    def front_gone(self) -> bool:
        """From a finaliser, without a lock: the program dropped an object; returns whether it was the last of a running
        one. Then the background thread drains it and its worker closes it, also after an interrupted stop."""
        self.fronts -= 1
        if self.fronts or self.done or self._forked or sys.is_finalizing():
            return False
        running = not self.over
        self._driver.dropped = self._close_dropped
        self._driver.close_dropped()
        return running

    def _close_dropped(self) -> None:
        self.reason = self.reason or "it was dropped"
        self.dispose(self)

    def request_stop(self, hand_over_s: float = HAND_OVER_S) -> None:
        """Asks for a stop in `hand_over_s` at most, so that others take over before (A6); at once by 0 or a second
        call. Takes no lock: signal handlers call it."""
        self._stop_at = 0.0 if self._stop_at is not None else self._context.monotonic() + hand_over_s

    @property
    def asked(self) -> bool:
        """Returns whether somebody has asked for a stop."""
        return self._stop_at is not None

    def must_stop(self) -> bool:
        """Returns whether a requested stop is due: its time is up, no claim is left, nobody can take one, or nothing
        may be delivered. The first call lets others take over."""
        if self._stop_at is None:
            return False
        if self._context.monotonic() >= self._stop_at:
            return True
        member = self._driver.member
        with self._context.outbox, self._context.lock:
            if not member.stop_prepared:
                member.prepare_stop()
                self._driver.kick()
            return member.ready_to_stop()

    def raise_if_stopping(self) -> None:
        """Raises ConsumerClosed once nothing more is fetched, because the consumer drains or was asked to stop."""
        if self.draining or self.must_stop():
            raise ConsumerClosed("Consumer", "it drains" if self.draining else "it was asked to stop")

    def check_open(self) -> None:
        """Raises ConsumerClosed once the consumer has ended. The call that receives raises the error that ended it."""
        if self.over:
            raise ConsumerClosed("Consumer", self.reason or str(self._driver.error or "it was stopped"))

    def raise_if_ended(self) -> None:
        """Raises what the user must know: partitions' errors, one per call, then what ended it; ConsumerClosed once
        closed."""
        if self.reason:
            raise ConsumerClosed("Consumer", self.reason)
        if self._driver.pending_errors:
            raise self._driver.pending_errors.popleft()
        if self._driver.ended:
            error = self._driver.error
            self.reason = str(error) if error is not None else "it was stopped"
            self.dispose(self)
            if error is not None:
                raise error
            raise ConsumerClosed("Consumer", self.reason)


HEALTHY_SILENCE_S: Final = 60.0  # twice the expiry of a fetch: a program that asks is never silent for so long
WAIT_SLICE_S: Final = 0.1  # a waiting call wakes at least so often: for signals, errors, a stop by another thread


# --- The membership


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
        """Returns the lag of the claims; -1 if unknown: that of a claim is, a topic is missing, or it owns nothing and
        partitions are parked."""
        if self._driver.topic_watch.missing or (not claims and self._driver.parked()):
            return -1
        if any(claim.lag < 0 for claim in claims):
            return -1
        return sum(claim.lag for claim in claims)

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
