"""Planted bugs in the client around the member: buffers, grants, answers, acks, and the ends of a consumer.

They are in the shipped code of marshal_py/client. mutants.py alone calls this file. The docstring of a replaced
function says how it behaves with the bug.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from marshal_py.client import connection, membership, receiving
from marshal_py.client.connection import Change, Poll, Steps
from marshal_py.client.delivery import delivery_queue, prefetch
from marshal_py.client.delivery.buffers import Buffer, Redelivering, Reserved, blocked, redeliveries_of
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.delivery.prefetch import AckWindow
from marshal_py.client.driver.consumer_driver import ConsumerDriver, UserCallbacks
from marshal_py.client.membership import Confirmations, Ending
from marshal_py.client.messages.answers import Ack, Acked, DeadLetters, Delivered, Letter, LostAcks
from marshal_py.client.messages.message import Batch, Message
from marshal_py.client.ranges import ClaimedRange
from marshal_py.client.values.requests import Request, message_bytes
from marshal_py.errors import ClaimLost, MarshalError
from marshal_py.protocol.claims import AtLeastOnce, AtMostOnce, Claim, ClaimPhase, Grant, OffsetRun, Spans, log_has
from marshal_py.protocol.fold import snapshot
from marshal_py.protocol.fold.world import CHECKPOINT_OFFSETS, Group, World
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.member_state import Ready
from marshal_py.protocol.wire.identity import NONE, Instant, TopicPartition
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, AT_MOST_ONCE
from marshal_py.spark.stream.micro_batches import End, MicroBatches, Planned
from marshal_py.transport.ports import Chunk

Patch = tuple[Any, str, Any]


def _at_a_stop(change: Callable[[AtMostOnce], object]) -> list[Patch]:
    """Plants a bug: a stop changes what is known of each claim's grants, before its Release is made."""
    stop = Ending.stop

    def stopped(self: Ending, timeout_s: float) -> Steps[None]:
        with self._context.lock:
            for claim in self._driver.member.claims.values():
                if isinstance(claim.tracker, AtMostOnce) and not claim.sealed:
                    change(claim.tracker)
        yield from stop(self, timeout_s)

    return [(Ending, "stop", stopped)]


def c1() -> list[Patch]:
    def dropped(tracker: AtMostOnce) -> None:
        """Passes over what was granted and not handed over, and tells nobody."""
        tracker.handed_to = tracker.delivered_to = tracker.granted_to()
        tracker.grants.clear()

    return _at_a_stop(dropped)


def c2() -> list[Patch]:
    commit = MicroBatches.commit

    def of_all(self: MicroBatches, end: End, now: Instant) -> bool:
        """Acks what the query has now along with the batch that it has committed."""
        moved = [self._finish(batch) for batch in self.delivered.values()]
        return commit(self, end, now) or any(moved)

    return [(MicroBatches, "commit", of_all)]


def c3() -> list[Patch]:
    def has(spans: Spans, claim: Claim, group: Group | None) -> bool:
        """Counts the acks of a claim that is gone as done."""
        return claim.phase is ClaimPhase.GONE or log_has(spans, claim, group)

    return [(membership, "log_has", has), (LostAcks, "ended", lambda self, claims, group: None)]


def c4() -> list[Patch]:
    def to_deliver(self: DeliveryQueue, count_bytes: bool = False) -> tuple[int, int]:
        """Counts what is buffered of a partition that waits for acks as pending, so that nothing else is asked for."""
        sizes = [(buffer, buffer.size) for buffer, claim in self.delivering() if not blocked(claim)]
        size_bytes = sum([buffer.bytes_of(size, message_bytes) for buffer, size in sizes]) if count_bytes else 0
        return sum([size for _, size in sizes]), size_bytes

    return [(DeliveryQueue, "to_deliver", to_deliver)]


def c5() -> list[Patch]:
    add = DeliveryQueue.add

    def of_any_round(self: DeliveryQueue, chunks: Iterable[Chunk]) -> None:
        """Takes what was fetched for an earlier assignment for what was asked for now."""
        add(self, [chunk._replace(round=self.source.round(chunk.tp)) for chunk in chunks])

    return [(DeliveryQueue, "add", of_any_round)]


def c6() -> list[Patch]:
    opened = Buffer.open

    def drop(self: DeliveryQueue, tps: Iterable[TopicPartition]) -> None:
        """Keeps what was fetched, and continues to fetch, so that the next claim of the partition begins at once."""
        for tp in tps:
            self._turns.remove(tp)

    def open_again(self: Buffer, claim: Claim, position: int) -> None:
        if self.claim is None:
            opened(self, claim, position)
        self.claim = claim

    return [(DeliveryQueue, "drop", drop), (Buffer, "open", open_again)]


def c7() -> list[Patch]:
    def whatever_the_gate(self: Reserved, run: OffsetRun, _: Callable[[], int]) -> Iterator[Message]:
        """Delivers what was reserved while the gate was open, whatever has happened since."""
        buffer, head, delivered = self._buffer, self._head, self._delivered
        run.deliver(0, self._mono_ms)
        for at in range(head.at, head.at + self._count):
            if head.at != at or buffer.paused_by_user:
                return
            index, run.delivered = run.delivered, run.delivered + 1
            if at == len(head.messages) - 1:
                buffer.fetched.popleft()
            head.at = at + 1
            self.taken += 1
            delivered.context.delivered += 1
            yield delivered.make(head.messages[at], delivered, index, head.messages[at].value())

    return [(Reserved, "_at_least_once", whatever_the_gate)]


def c8() -> list[Patch]:
    def in_time(self: Delivered, first: int, stop: int) -> bool:
        """Notes an ack that comes after the Release was made, and tells nobody that it is late."""
        with self.context.lock:
            if self.run is not None:
                self.run.settle()
            return True

    return [(Delivered, "in_time", in_time)]


def c9() -> list[Patch]:
    seal = Claim.seal

    def forgets(self: Claim, phase: ClaimPhase) -> None:
        """Counts the messages that wait to be delivered again as finished."""
        found = self.tracker.redeliveries if isinstance(self.tracker, AtLeastOnce) else None
        for one in found.waiting.values() if found is not None and not self.sealed else ():
            one.run.finish(one.at)
        seal(self, phase)

    return [(Claim, "seal", forgets)]


def c10() -> list[Patch]:
    return [(Ending, "drain_left_s", lambda self: 0.0)]


def c11() -> list[Patch]:
    kept: dict[tuple[int, int], tuple[int, int, list[Grant]]] = {}  # dropped, delivered_to, grants
    take, reserve = DeliveryQueue.take, DeliveryQueue.reserve

    def look(self: DeliveryQueue) -> None:
        for _, claim in self.delivering():
            tracker, key = claim.tracker, (id(self), claim.epoch)
            if not isinstance(tracker, AtMostOnce):
                continue
            dropped, delivered_to, held = kept.get(key, (tracker.dropped, 0, []))
            if tracker.dropped > dropped:  # in between: the queue still has them
                tracker.delivered_to = delivered_to
                tracker.grants.extendleft(reversed(held))
            kept[key] = tracker.dropped, tracker.delivered_to, [*tracker.grants]

    def taken(self: DeliveryQueue, *rest: Any) -> Any:
        look(self)
        found = take(self, *rest)
        look(self)
        return found

    def reserved(self: DeliveryQueue, *rest: Any) -> Any:
        look(self)
        return reserve(self, *rest)

    return [(DeliveryQueue, "take", taken), (DeliveryQueue, "reserve", reserved)]


def c12() -> list[Patch]:
    def accepted(self: Confirmations, ack: Ack, timeout_s: float) -> Steps[None]:
        """Returns when the heartbeat is sent that tells the log of the ack, and does not wait until it is read back."""
        late = [one.claim.tp for one in ack() if one.late]
        self._member.urgent = True
        self._driver.kick()
        yield Change(0.0, self._context.changes)
        if late:
            raise ClaimLost(self._member.name, tuple(map(str, late)))

    return [(Confirmations, "accepted", accepted)]


def c13() -> list[Patch]:
    def write(self: DeadLetters, letters: Sequence[Letter]) -> None:
        """Hands the letters to the producer and does not wait for Kafka's acknowledgement."""
        self._writer = self._writer or self._open_writer()
        for letter in letters:
            self._writer.write(self.topic, letter.message.value(), letter.message.key(), self._headers(letter))

    return [(DeadLetters, "_write", write)]


def c14() -> list[Patch]:
    def gives_back(tracker: AtMostOnce) -> None:
        """Gives back what the handler has not finished."""
        tracker.handed_to = tracker.handled_to

    return _at_a_stop(gives_back)


def c15() -> list[Patch]:
    def begun(tracker: AtMostOnce) -> None:
        """Keeps the rest of a grant of which something was handed over."""
        if tracker.grants and tracker.grants[0].start < tracker.delivered_to:
            tracker.handed_to = tracker.grants[0].to

    return _at_a_stop(begun)


def c16() -> list[Patch]:
    take = DeliveryQueue.take

    def all_of_them(self: DeliveryQueue, *rest: Any) -> Any:
        """Takes what is buffered of partitions that the user has paused since the call began."""
        paused = [buffer for buffer in self.buffers.values() if buffer.paused_by_user]
        for buffer in paused:
            buffer.paused_by_user = False
        found = take(self, *rest)
        for buffer in paused:
            buffer.paused_by_user = True
        return found

    return [(DeliveryQueue, "take", all_of_them)]


def c17() -> list[Patch]:
    take = Redelivering.take
    known: dict[tuple[int, int], Claim] = {}

    def taken(self: Redelivering, claims: Iterable[Claim | None], now: Instant, left: int, *rest: Any) -> Any:
        """Delivers what is due of every claim that there ever was."""
        known.update(((id(self), one.epoch), one) for one in claims if one is not None)
        parts = rest[-1]
        for (of, _), claim in known.items():
            if of == id(self) and claim.sealed and redeliveries_of(claim) is not None:
                for part in self._take(claim, now, left, None, bool(parts)):
                    parts.append(part)
                    left -= len(part[0].raw)
        return take(self, claims, now, left, *rest)

    return [(Redelivering, "take", taken)]


def c18() -> list[Patch]:
    load = snapshot.load

    def later(*rest: Any) -> World | None:
        """Loads a snapshot and reads on some records above the place that it was made at."""
        world = load(*rest)
        for _ in range(CHECKPOINT_OFFSETS if world is not None else 0):
            assert world is not None
            world.pending.append(None)
            world.next_offset += 1
        if world is not None:
            world.end_block()
        return world

    return [(snapshot, "load", later)]


def c19() -> list[Patch]:
    plan = MicroBatches.plan

    def proven(self: MicroBatches, start: End, available: Sequence[ClaimedRange], now: Instant) -> End:
        """Takes what may not be delivered now, and so is left out of the batch, for committed."""
        end, session = plan(self, start, available, now), self.member.session
        taken = {one.range.tp for batch in self.delivered.values() for one in batch.taken}
        for one in available:
            if one.tp not in taken:
                self._proven[one.tp] = Planned(session, NONE, one.generation, one.start, one.to)
        return end

    return [(MicroBatches, "plan", proven), *_whatever_the_epoch()]


def _whatever_the_epoch() -> list[Patch]:
    def newest(self: MicroBatches, tp: TopicPartition, planned: Planned) -> int:
        part = self._partition(tp)
        return NONE if part is None else part.epoch

    return [(MicroBatches, "_continued_as", newest)]


def c20() -> list[Patch]:
    opened = DeliveryQueue.open

    def forgets(self: DeliveryQueue, claims: Iterable[Claim]) -> None:
        """Delivers a partition that the user has paused once it is claimed again."""
        paused, self.user_paused = self.user_paused, set()
        opened(self, claims)
        self.user_paused = paused

    return [(DeliveryQueue, "open", forgets)]


def c21() -> list[Patch]:
    def resume(self: DeliveryQueue, buffer: Buffer) -> None:
        """Goes on at the end of a partition that was not fetched for a while."""
        if buffer.held_back and not buffer.paused_by_user:
            buffer.held_back = False
            buffer.next_offset = max(buffer.next_offset, self.source.end_offset(buffer.tp))
            self.source.resume({buffer.tp: buffer.next_offset})

    return [(DeliveryQueue, "_resume_fetching", resume)]


def c22() -> list[Patch]:
    opened, positions_of, queues = DeliveryQueue.open, delivery_queue.positions_of, list[DeliveryQueue]()

    def remembered(self: DeliveryQueue, claims: Iterable[Claim]) -> None:
        queues[:] = [self]
        opened(self, claims)

    def from_the_buffer(claims: Iterable[Claim], member: Member) -> Iterator[tuple[Claim, int]]:
        """Begins where the fetched messages begin, also if the claim begins below."""
        for claim, position in positions_of(claims, member):
            buffer = queues[0].buffers.get(claim.tp)
            yield claim, position if buffer is None else max(position, buffer.start)

    return [(DeliveryQueue, "open", remembered), (delivery_queue, "positions_of", from_the_buffer)]


def c23() -> list[Patch]:
    def at_once(driver: ConsumerDriver, ending: Ending, tp: TopicPartition, offset: int, _: float) -> Steps[None]:
        """Returns when the record is sent that moves the position."""
        with driver.context.outbox, driver.context.lock:
            claim = driver.member.seek(tp, offset, driver.context.clock.now())
            driver.kick()
        yield Change(0.0, driver.context.changes)
        if claim is None:
            raise ClaimLost(driver.member.name, (str(tp),))

    return [(receiving, "seek", at_once)]


def c24() -> list[Patch]:
    returned = DeliveryQueue.user_returned

    def stays_shut(self: DeliveryQueue) -> None:
        """Takes a gate that was shut once for shut."""
        shut, deliverable = self._gate_shut, self.deliverable
        self.deliverable = lambda now: 1 if shut else deliverable(now)  # type: ignore[method-assign]
        returned(self)
        del self.deliverable

    return [(DeliveryQueue, "user_returned", stays_shut)]


def c25() -> list[Patch]:
    def returned(self: Delivered, _: int) -> None:
        """Takes the ack of one message for the end of the handlers of all."""
        if isinstance(self.claim.tracker, AtMostOnce):
            self.claim.tracker.returned()

    return [(Delivered, "returned", returned)]


def c26() -> list[Patch]:
    offer = prefetch.offer_grants

    def used_up(buffers: Any, *rest: Any, **more: Any) -> Any:
        """Takes a grant of which nothing is fetched for one that holds no message."""
        for buffer in buffers:
            tracker = buffer.claim.tracker if buffer.claim is not None else None
            if isinstance(tracker, AtMostOnce) and not buffer.fetched:
                tracker.skipped(tracker.granted_to())
        return offer(buffers, *rest, **more)

    return [(delivery_queue, "offer_grants", used_up)]


def c27() -> list[Patch]:
    return [(AckWindow, "room", lambda self, claim, _buffer: 0 if blocked(claim) else sys.maxsize)]


def c28() -> list[Patch]:
    return [(ConsumerDriver, "look_at_topics", lambda self: None)]


def c29() -> list[Patch]:
    return [(Delivered, "touch", lambda self, first, stop: None)]


def c30() -> list[Patch]:
    flush = Confirmations.flush

    def given_up(self: Confirmations, timeout_s: float, after: int | None = None) -> Steps[None]:
        """Counts the messages that wait to be delivered again as finished, if the consumer drains."""
        queue = self._driver.queue
        drains = isinstance(queue, DeliveryQueue) and queue.left() < sys.maxsize
        for claim in self._member.claims.values() if drains else ():
            found = claim.tracker.redeliveries if isinstance(claim.tracker, AtLeastOnce) else None
            for one in found.waiting.values() if found is not None and not claim.sealed else ():
                one.run.finish(one.at)
        return flush(self, timeout_s, after)

    return [(Confirmations, "flush", given_up)]


def c31() -> list[Patch]:
    drain = Ending.drain

    def of_a_drain(self: Ending, wait_s: float) -> None:
        """Gives the handlers no more time, because it drains already."""
        drain(self, 0.0 if self.draining else wait_s)

    return [(Ending, "drain", of_a_drain)]


def c32() -> list[Patch]:
    stop = Ending.stop

    def cut_short(self: Ending, timeout_s: float) -> Steps[None]:
        """Takes all that a drain has delivered for finished."""
        with self._context.lock:
            for claim in self._driver.member.claims.values() if self.draining else ():
                if isinstance(claim.tracker, AtLeastOnce) and not claim.sealed:
                    for run in claim.tracker.runs:
                        for index in range(run.delivered):
                            run.finish(index)
        yield from stop(self, timeout_s)

    return [(Ending, "stop", cut_short)]


def c33() -> list[Patch]:
    fetch = receiving.Receiving.fetch

    def lost(self: receiving.Receiving, request: Request) -> Steps[Batch[Any, Any]]:
        """Delivers what has come to the call that is cancelled, so to nobody."""
        try:
            return (yield from fetch(self, request))
        except GeneratorExit:
            with self._context.outbox, self._context.lock:
                self.queue.take(request.most, request.max_bytes, self._context.clock.now())
            raise

    return [(receiving.Receiving, "fetch", lost)]


def c34() -> list[Patch]:
    notify = UserCallbacks.notify

    def at_once(self: UserCallbacks, ready: Ready, active: bool) -> None:
        """Calls the user where a step leads to it."""
        thread: Any = self._driver.context.callbacks
        thread.submit = lambda call: connection.run_callback(call, self._driver.context.logger)
        notify(self, ready, active)
        del thread.submit

    return [(UserCallbacks, "notify", at_once)]


def c35() -> list[Patch]:
    return [(connection, "run_callback", lambda call, _: call())]


def c36() -> list[Patch]:
    finish = Member._finish

    def still_told(self: Member, claim: Claim, *, ended_in_log: bool) -> None:
        """Tells of a claim that began and ended between two ticks: of its end first."""
        claimed, self.out.claimed = self.out.claimed, []
        finish(self, claim, ended_in_log=ended_in_log)
        self.out.claimed = claimed

    return [(Member, "_finish", still_told)]


def c37() -> list[Patch]:
    notify = UserCallbacks.notify

    def of_every_claim(self: UserCallbacks, ready: Ready, active: bool) -> None:
        """Tells of the end of claims of which the user has not heard."""
        for claim, _ in ready.lost:
            claim.told = True
        notify(self, ready, active)

    return [(UserCallbacks, "notify", of_every_claim)]


def c38() -> list[Patch]:
    def as_the_log_has_it(self: ConsumerDriver, claim: Claim) -> int:
        """Needs what the log has of the partition, and a group that was deleted since has nothing."""
        group = self.member.group
        return max(claim.position(), NONE if group is None else group.partitions[claim.tp].position)

    return [(ConsumerDriver, "position", as_the_log_has_it)]


def c39() -> list[Patch]:
    give_up = ConsumerDriver.give_up

    def silently(self: ConsumerDriver, error: MarshalError | None) -> None:
        """Tells the user nothing if the time for a stop is over."""
        if error is None:
            self.ended = True
        else:
            give_up(self, error)

    return [(ConsumerDriver, "give_up", silently)]


def c40() -> list[Patch]:
    fetch = receiving.Receiving.fetch

    def asks_ahead(self: receiving.Receiving, request: Request) -> Steps[Batch[Any, Any]]:
        """Asks for what comes next once it has taken a batch, which a call that is cancelled there keeps."""
        batch = yield from fetch(self, request)
        if batch.parts:
            yield from self.intake.pull(0.0)
        return batch

    return [(receiving.Receiving, "fetch", asks_ahead)]


def c41() -> list[Patch]:
    def look(self: receiving.Intake) -> Steps[None]:
        """Sorts what has come into the buffers when nothing more comes."""
        came: list[Chunk] = []
        for _ in range(prefetch.LOOK_PIECES_MAX):
            piece = self._queue.prefetch.piece(self._queue.buffers.values())
            chunks: list[Chunk] = (yield Poll(0.0, piece)) if piece else []
            came += chunks
            if not chunks:
                break
        with self._context.lock:
            self._add(came)

    return [(receiving.Intake, "look", look)]


def c42() -> list[Patch]:
    acked = Message._acked

    def once(self: Message[Any, Any]) -> list[Acked]:
        """Acks, and waits for nothing if that was done before."""
        run, index = self._delivered.run, self._index
        done = run is not None and (index in run.acks or run.is_finished(index))
        return [] if done else acked(self)

    return [(Message, "_acked", once)]


def c43() -> list[Patch]:
    suffices, take = DeliveryQueue.suffices, DeliveryQueue.take
    seen: dict[DeliveryQueue, list[Buffer]] = {}

    def looks(self: DeliveryQueue, min_messages: int, max_bytes: int | None) -> bool:
        seen[self] = [buffer for buffer in self.buffers.values() if not buffer.paused_by_user]
        return suffices(self, min_messages, max_bytes)

    def as_seen(self: DeliveryQueue, max_messages: int, max_bytes: int | None, now: Instant) -> Any:
        """Takes of the partitions that were not paused when it looked."""
        paused = [buffer for buffer in self.buffers.values() if buffer.paused_by_user and buffer in seen[self]]
        for buffer in paused:
            buffer.paused_by_user = False
        taken = take(self, max_messages, max_bytes, now)
        for buffer in paused:
            buffer.paused_by_user = True
        return taken

    return [(DeliveryQueue, "suffices", looks), (DeliveryQueue, "take", as_seen)]


_AMO: Final = {"mode": AT_MOST_ONCE}
_SPREAD: Final = {"clients": 4, "partitions": 24, "interval_ms": 1_000, "intervals": 8}  # many claims, over many ticks
_ALO: Final = {"mode": AT_LEAST_ONCE}
_MANY: Final = {**_ALO, "rate": 60, "intervals": 8}
_HELD: Final = {**_ALO, "clients": 2, "partitions": 4, "intervals": 4, "rate": 20}
_FAST: Final = {"rate": 200, "interval_ms": 1_000, "partitions": 2, "intervals": 8}  # a user who needs no time
# Name, what it does wrong, the bug, the faults that make it likely to show, and other options.
PLANTED: Final[tuple[tuple[str, str, Callable[[], list[Patch]], tuple[str, ...], dict[str, Any]], ...]] = (
    ("C1", "a stop drops what was granted and not handed over", c1, ("leave", "arrive"), _AMO),
    ("C2", "a commit of a batch acks what the query has now, too", c2, ("crash", "lag"), {"queries": 3}),
    ("C3", "a flush counts what was lost with its claim as done", c3, ("calls", "lag", "stop", "crash"), _ALO),
    ("C4", "a partition that waits for acks keeps a consume from asking", c4, ("calls",), _HELD),
    ("C5", "what was fetched for an earlier assignment is taken for new", c5, ("calls",), _ALO),
    ("C6", "a buffer survives the release of its claim", c6, ("admin", "step_down", "arrive", "leave"), _ALO),
    (
        "C7",
        "what an iteration has reserved comes although its gate is shut",
        c7,
        ("calls", "arrive", "step_down", "leave"),
        _MANY,
    ),
    ("C8", "an ack counts that comes after the Release was made", c8, ("calls", "lag", "stop", "slow_handler"), _ALO),
    ("C9", "a hand-over forgets what handlers gave back", c9, ("answers", "arrive", "leave", "step_down"), _ALO),
    ("C10", "a drain ends before its last ack", c10, ("leave", "arrive", "slow_handler"), _ALO),
    ("C11", "the queue delivers by a grant of before a fence", c11, ("lag", "delay", "suspend"), _AMO),
    ("C12", "a double_ack returns before the log has the ack", c12, ("calls", "crash", "outage_writes", "drop"), _ALO),
    ("C13", "a message is finished before Kafka has its dead letter", c13, ("answers",), _ALO),
    ("C14", "a stop gives back what a handler has", c14, ("calls", "leave", "arrive", "slow_handler"), _AMO),
    ("C15", "a stop keeps the rest of a grant that was begun", c15, ("leave", "arrive"), _AMO),
    ("C16", "a fetch delivers what its user has paused meanwhile", c16, ("calls",), _ALO),
    (
        "C17",
        "what a handler gave back comes again after its claim was released",
        c17,
        ("answers", "arrive", "leave", "step_down"),
        _ALO,
    ),
    ("C18", "a log is read on above the place of its snapshot", c18, ("snapshots", "crash", "arrive"), {}),
    ("C19", "a range that could not be delivered counts as committed", c19, ("stop", "lag", "admin"), {"queries": 2}),
    ("C20", "a pause of the user ends with the claim", c20, ("calls", "admin", "arrive"), _ALO),
    ("C21", "what came while a partition was held back is skipped", c21, ("calls",), _ALO),
    ("C22", "a claim begins where fetching ahead began", c22, ("arrive", "leave", "step_down"), _AMO),
    ("C23", "a seek returns before the log has the position", c23, ("calls",), _ALO),
    ("C24", "a partition whose gate was shut is not fetched again", c24, ("admin", "lag", "outage"), _ALO),
    ("C25", "one ack reports all that was handed over as handled", c25, ("calls", "slow_handler"), _AMO),
    ("C26", "what is granted and not fetched is taken for used up", c26, ("arrive", "lag"), {**_AMO, **_FAST}),
    ("C27", "more is delivered than may wait for acks", c27, ("calls",), _ALO),
    ("C28", "a topic that grows is not looked at again", c28, ("grow",), {}),
    ("C29", "a handler that reports that it is at work is not heard", c29, ("calls", "stuck_handler"), _ALO),
    ("C30", "a flush amid a drain counts what was given back as done", c30, ("calls", "answers", "leave"), _ALO),
    ("C31", "a second drain ends the first", c31, ("calls", "leave", "slow_handler"), _ALO),
    ("C32", "a stop amid a drain counts what handlers have as done", c32, ("calls", "leave", "slow_handler"), _ALO),
    ("C33", "a fetch that is cancelled loses what had come", c33, ("calls",), _ALO),
    ("C34", "callbacks run where heartbeats are sent", c34, ("arrive",), {}),
    ("C35", "a callback that raises ends the others", c35, ("arrive",), {}),
    ("C36", "the loss of a claim is told before the claim", c36, ("lag", "arrive", "leave", "step_down"), _SPREAD),
    ("C37", "the loss of a claim is told that the user never had", c37, ("delay", "leave", "arrive", "duplicate"), {}),
    (
        "C38",
        "nobody can be told of the end of a claim once its group is deleted",
        c38,
        ("deletion", "slow_handler", "arrive"),
        {},
    ),
    ("C39", "a stop that has no more time tells nobody", c39, ("leave", "delay", "suspend"), {}),
    ("C40", "a fetch waits once it has taken, and loses that if it is cancelled", c40, ("cancels",), _ALO),
    ("C41", "a look that is cancelled loses what had come", c41, ("cancels",), _ALO),
    ("C42", "a double_ack of what is acked does not wait", c42, ("calls", "cancels", "crash", "outage_writes"), _ALO),
    ("C43", "a fetch delivers what was paused since it looked", c43, ("calls", "locks"), _FAST),
)
