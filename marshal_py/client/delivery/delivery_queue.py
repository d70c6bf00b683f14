"""The queue of one consumer: buffers between its data source and its user, and the gate before every delivery.

It decides which partition is next, how much of it, and which partitions the source should fetch (PROTOCOL.md D1-D3).
The gate is the member's check of whether a claim may deliver at this moment (`Member.open_ms`, D8); it is open if so,
else shut. All but `pull` and `_ask` is called with the Marshal's lock: checking the gate and delivering must be one
step, or a Release could be sent between them. (Reserved, in buffers.py, achieves that without the lock and says how.)

A partition is fetched ahead when this member will probably claim it soon; its messages are delivered only after that.
In at-most-once mode a claim delivers only messages that a grant covers: a range of offsets that the log gave to it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from marshal_py.client.connection import Ask, Context, TaskSteps, watch_forks
from marshal_py.client.delivery.buffers import (
    ENDLESS,
    Allowance,
    Buffer,
    Redelivering,
    Reserved,
    due_count,
    fit,
    redeliveries_of,
)
from marshal_py.client.delivery.prefetch import (
    AckWindow,
    HandlingRate,
    Prefetch,
    Turns,
    grants_asked,
    grants_fetched,
    offer_grants,
)
from marshal_py.client.messages.answers import Answers, DeadLetters, Delivered, DeliveryContext, UnackedWatch
from marshal_py.client.messages.message import DecodedMessage, Message, Part
from marshal_py.client.values.options import BOUNDS, ConsumerOptions
from marshal_py.client.values.requests import message_bytes
from marshal_py.protocol.claims import AtLeastOnce, AtMostOnce, Claim, ClaimPhase, OffsetRun
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import Instant, TopicPartition
from marshal_py.transport.ports import Chunk, DataSource, MessageWriter

GATE_MS: Final = 5  # between two readings of all three clocks while messages are delivered one by one (T7)
ENDS_TIMEOUT_S: Final = 3.0  # a healthy broker answers in milliseconds; who does not is asked again
AHEAD_MESSAGES_MAX: Final = 2_000  # per partition that is fetched ahead; more would only fill memory


class DeliveryQueue:
    """Keeps the buffers of one consumer, and decides what is delivered from them."""

    member: Member
    source: DataSource
    options: ConsumerOptions

    def __init__(
        self,
        context: Context,
        member: Member,
        source: DataSource,
        options: ConsumerOptions,
        incarnation: bytes,
        submit: Callable[[str, Callable[[], object]], None],
    ) -> None:
        """Begins without claims. `submit(name, task)` runs a task on the consumer's worker thread."""
        self.member, self.source, self.options = member, source, options
        self._context, self._submit, self.clock_now = context, submit, context.clock.now
        self.asked_ms: int = self.clock_now().mono_ms  # monotonic: when the user last asked for messages
        member.user_asked(self.asked_ms)  # a consumer that never asks is idle since it joined
        raw = options.key_deserializer is None and options.value_deserializer is None
        make: type[Message] = Message if raw else DecodedMessage
        self.answers: Answers = Answers(member, options, self.clock_now)
        self.delivery: DeliveryContext = DeliveryContext(
            member, context.lock, self.clock_now, incarnation, make, options, self.answers
        )
        self.redelivering: Redelivering = Redelivering(self.delivery)
        self.window: AckWindow = AckWindow(options.max_acks_pending)
        self.delivery.at_work, self.delivery.counted_out = self.window.at_work, self.window.counted_out
        self.delivery.terminated = self.window.terminated
        self.buffers: dict[TopicPartition, Buffer] = {}
        self.user_paused: set[TopicPartition] = set()
        self._turns: Turns = Turns()
        self.rate: HandlingRate = HandlingRate()
        self._taking: list[tuple[OffsetRun, int]] = []  # the running fetch's: (run, its `delivered` before)
        self._pid = os.getpid()
        watch_forks(self)
        self.prefetch: Prefetch = Prefetch(options.prefetch_bytes, BOUNDS.prefetch, self.answers.waiting_bytes)
        self._last: int | None = None  # while the consumer drains: the value of `delivered` at which it stops
        self._gate_shut = False  # as the user's thread last found it; while it is, claimed partitions are not fetched
        self.at_most_once: bool = options.delivery == "at_most_once"
        self._spent = False  # in at-most-once mode: no more may be granted before messages are delivered
        self._unacked = UnackedWatch(member, options)
        self._letters: DeadLetters | None = None
        self._unsure: dict[TopicPartition, Claim] = {}  # claims whose partition's end the cluster was asked for

    @property
    def delivered(self) -> int:
        """Returns how many messages this consumer has delivered since it was made."""
        return self.delivery.delivered

    def forked(self) -> None:
        """Makes delivery end and acks raise UsedAfterFork in a forked child process (`ForkedLock`)."""
        self.delivery.forked(self._pid)
        for buffer in self.buffers.values():
            buffer.paused_by_user = True  # ends a running iteration, which delivers without the lock

    # --- called by the driver

    def start_prefetch(self, tp: TopicPartition, position: int) -> None:
        """Starts to fetch a partition from `position` on, before its owner releases it to this member (A3)."""
        if tp not in self.buffers:
            self.buffers[tp] = Buffer(tp, position)
            self.source.assign({tp: position})

    def open(self, claims: Iterable[Claim]) -> None:
        """Begins to deliver the messages of these accepted claims, from the positions that the log has."""
        fresh: dict[TopicPartition, int] = {}
        for claim, position in positions_of(claims, self.member):
            tp = claim.tp
            buffer = self.buffers.get(tp)
            if buffer is None or buffer.start > position or not self.source.fetching(tp):
                buffer = self.buffers[tp] = Buffer(tp, position)
                fresh[tp] = position
            buffer.open(claim, position)
            while buffer.lost:
                start, to = buffer.lost.pop(0)
                if to > position:
                    self.member.note("offset_lost", tp, max(start, position), to)
            if tp in self.user_paused:
                buffer.paused_by_user = True
            elif buffer.held_back and tp not in fresh:
                fresh[tp] = buffer.next_offset
                buffer.held_back = False
            self._turns.add(tp)
        if fresh:
            self.source.assign(fresh)
        for tp in self.user_paused & fresh.keys():
            self._pause_fetching(self.buffers[tp])

    def drop(self, tps: Iterable[TopicPartition]) -> None:
        """Drops the buffers of partitions that are no longer claimed or fetched ahead, and stops fetching them."""
        gone = [tp for tp in tps if self.buffers.pop(tp, None) is not None]
        for tp in gone:
            self._turns.remove(tp)
        self.source.unassign(gone)

    def has(self, tp: TopicPartition) -> bool:
        """Returns whether this consumer has claimed the partition or fetches it ahead."""
        return tp in self.buffers

    def restart(self, tp: TopicPartition, first: int) -> int:
        """After a refusal (D6): fetches a partition again from where its buffer ends, or from `first`; returns that
        end. The refused position may be above, as what comes while it is held back is dropped (`add`). Ahead of a claim
        `first`: the owner may have had what is lost here, so `open` says it of what the claim leaves of that."""
        buffer = self.buffers[tp]
        ended = buffer.next_offset
        buffer.reach(first)  # so the position passes what is lost, also where nothing is left behind it
        if not buffer.held_back:  # else it will be fetched from there when it is resumed
            self.source.assign({tp: buffer.next_offset})
        if buffer.claim is not None or ended >= first:
            return ended
        buffer.lost.append((ended, first))
        return first

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        """Stops fetching and delivering these partitions, as the user asks. They stay claimed."""
        for tp in tps:
            self.user_paused.add(tp)
            buffer = self.buffers.get(tp)
            if buffer is not None:
                buffer.paused_by_user = True
                self._pause_fetching(buffer)

    def resume(self, tps: Iterable[TopicPartition]) -> None:
        for tp in tps:
            self.user_paused.discard(tp)
            buffer = self.buffers.get(tp)
            if buffer is not None:
                buffer.paused_by_user = False
                self._resume_fetching(buffer)

    def _pause_fetching(self, buffer: Buffer) -> None:
        if not buffer.held_back:
            buffer.held_back = True
            self.source.pause([buffer.tp])

    def _resume_fetching(self, buffer: Buffer) -> None:
        if buffer.held_back and not buffer.paused_by_user:
            buffer.held_back = False
            self.source.resume({buffer.tp: buffer.next_offset})

    # --- the user's side

    def pull(self, timeout_s: float, max_messages: int) -> list[Chunk]:
        """Waits up to `timeout_s` seconds for messages; returns at most `max_messages`. Called without the lock."""
        return self.source.poll(timeout_s, max_messages)

    def looks(self) -> bool:
        """Returns whether to read the source's queue to its end now, so that none waits in it for a slow user."""
        return self.prefetch.due(self.rate, self.asked_ms)

    def takes(self, most: int) -> int:
        """Returns how many messages to take from the source, `most` at most: 0 while buffers are full, memory is full
        of what was given back (Prefetch.stopped) or a grant is asked for; 1 if nothing of full buffers can be
        delivered, so that the others do not wait for acks."""
        if (fitting := self.prefetch.takes(self.buffers.values(), most)) or most <= 0 or self.prefetch.stopped:
            return fitting
        waits = self.deliverable(self.clock_now()) or grants_asked(self.delivering())
        return int(self._gate_shut or not waits)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Sorts fetched messages into buffers, and stops fetching where they are full. Drops those of an earlier
        assignment (`round`), and of paused partitions, which are fetched again."""
        grown: list[Buffer] = []
        alone = not any([buffer.fetched for buffer in self.buffers.values()])
        for tp, round_, messages, reached in chunks:
            buffer = self.buffers.get(tp)
            if buffer is None or round_ != self.source.round(tp):
                continue
            if buffer.held_back:
                continue  # fetched before the source paused it; it will be fetched again
            buffer.add(messages, reached)
            grown.append(buffer)
        # What comes into empty buffers is no more than librdkafka's queue held, and to measure it takes time.
        room = None if alone else self.prefetch.room(self.buffers.values())
        for buffer in grown:
            if self._at_bound(buffer) or (room is not None and room.full(buffer)):
                self._pause_fetching(buffer)

    def _at_bound(self, buffer: Buffer) -> bool:
        """Returns whether a partition has what it may have, whatever the memory: AHEAD_MESSAGES_MAX before it is
        claimed, then, in at-least-once mode, BOUNDS.unacked from the position to the newest fetched."""
        if buffer.claim is None:
            return buffer.size >= AHEAD_MESSAGES_MAX
        tracker = buffer.claim.tracker
        return isinstance(tracker, AtLeastOnce) and tracker.tracks(BOUNDS.unacked)

    def wait_for_gate(self) -> None:
        """Stops fetching claimed partitions, whose messages wait, until the gate opens."""
        self._gate_shut = True
        for buffer in self.buffers.values():
            if buffer.claim is not None:
                self._pause_fetching(buffer)

    def drain(self) -> None:
        """Limits what is still delivered to BOUNDS.prefetch messages, because the buffers may hold minutes of work."""
        self._last = self.delivered + BOUNDS.prefetch

    def left(self) -> int:
        """Returns how many messages may still be delivered; sys.maxsize if `drain` has not been called."""
        return sys.maxsize if self._last is None else self._last - self.delivered

    def delivering(self) -> list[tuple[Buffer, Claim]]:
        """Returns the buffers that deliver while the gate is open, each with its claim."""
        return [
            (buffer, claim)
            for buffer in self.buffers.values()
            if not buffer.paused_by_user and (claim := buffer.claim) is not None and claim.phase is ClaimPhase.OPEN
        ]

    @property
    def _empty(self) -> bool:
        """Returns whether there is nothing to deliver, as after each message of a slow topic."""
        return not self.answers.waited and not any([buffer.fetched for buffer in self.buffers.values()])

    def deliverable(self, now: Instant) -> int:
        """Returns how many messages wait for nothing but the gate; in at-most-once mode only those with a grant."""
        total = 0
        for buffer, claim in () if self._empty else self.delivering():
            if isinstance(claim.tracker, AtMostOnce):
                total += buffer.granted(claim.tracker)
            else:
                total += due_count(claim, now)
                if buffer.fetched:
                    total += min(self.window.room(claim, buffer), buffer.size)
        return total

    def to_deliver(self, count_bytes: bool = False) -> tuple[int, int]:
        """Returns messages and bytes (0 without `count_bytes`) of claims that may deliver more (AckWindow), granted or
        not."""
        delivering = self.delivering()
        sizes = [
            (buffer, buffer.size) for buffer, claim in delivering if buffer.fetched and self.window.opens(claim, buffer)
        ]
        size_bytes = sum([buffer.bytes_of(size, message_bytes) for buffer, size in sizes]) if count_bytes else 0
        return sum([size for _, size in sizes]), size_bytes

    def buffered(self) -> int:
        """Returns how many messages, of all partitions together, were fetched and not delivered."""
        return sum([buffer.size for buffer in self.buffers.values() if buffer.fetched])

    def buffered_of(self, tp: TopicPartition) -> int:
        buffer = self.buffers.get(tp)
        return 0 if buffer is None else buffer.size

    def suffices(self, min_messages: int, max_bytes: int | None) -> bool:
        """Returns whether to take a batch now: `min_messages` or `max_bytes` are there, or waiting brings no more,
        because a partition with messages gets no more before, or the buffers are full."""
        there = size_bytes = 0
        self.prefetch.wanted, now = min_messages, self.clock_now()
        for buffer, claim in self.delivering():
            tracker = claim.tracker
            count, at_bound = buffer.size, buffer.held_back
            if isinstance(tracker, AtMostOnce):
                granted = buffer.granted(tracker)
                at_bound = grants_fetched(buffer, tracker, self._spent) or (at_bound and granted == count)
                count = granted
            elif self.window.most is not None or redeliveries_of(claim) is not None:
                room = self.window.room(claim, buffer)
                if room <= count:
                    count, at_bound = room, True
                again = due_count(claim, now)
                if again and (at_bound or max_bytes is not None):
                    return True
                there += again
            if count and (at_bound or claim.one_by_one):
                return True
            there += count
            if max_bytes is not None:
                size_bytes += buffer.bytes_of(count, message_bytes)
        if not 0 < there < min_messages:
            return there > 0
        return (max_bytes is not None and size_bytes >= max_bytes) or self.prefetch.full(self.buffers.values())

    def take(self, max_messages: int, max_bytes: int | None, now: Instant) -> list[tuple[Part, Delivered]]:
        """Delivers up to `max_messages` and `max_bytes` (None: any; the first always) where the gate is open.
        Partitions give even shares, and others fill up; the next batch begins after this one's last partition."""
        parts: list[tuple[Part, Delivered]] = []
        before, max_messages = self.delivered, min(max_messages, self.left())
        claims = [self.buffers[tp].claim for tp in self._turns if not self.buffers[tp].paused_by_user]
        max_messages, max_bytes = self.redelivering.take(claims, now, max_messages, max_bytes, parts)
        filled = sum([bool(buffer.fetched) for buffer in self.buffers.values()])
        share = -(-max_messages // max(1, filled))
        left, left_bytes = self._take_round(parts, share, max_messages, max_bytes, now)
        if share < max_messages:
            self._take_round(parts, left, left, left_bytes, now)
        if parts:
            self.rate.delivered(before, now.mono_ms)
        return parts

    def _take_round(
        self, parts: list[tuple[Part, Delivered]], share: int, left: int, left_bytes: int | None, now: Instant
    ) -> tuple[int, int | None]:
        """Takes up to `share` messages per partition into `parts`. Returns how much of `left`, `left_bytes` remains."""
        turns = self._turns.each()
        while left > 0 and (left_bytes is None or left_bytes > 0) and (tp := next(turns, None)) is not None:
            buffer = self.buffers[tp]
            claim = buffer.claim
            if claim is None or not buffer.fetched or buffer.paused_by_user or not self.window.room(claim, buffer):
                continue
            if not self.member.may_deliver(claim.epoch, now):
                continue
            careful = claim.one_by_one  # a message of this partition may have killed its owners (D11)
            of_it = min(1 if careful else share, left)
            while of_it > 0 and buffer.fetched:
                part = self._take_part(buffer, claim, of_it, left_bytes, now, bool(parts))
                if part is None:
                    break
                parts.append(part)
                of_it -= len(part[0].raw)
                left -= len(part[0].raw)
                if left_bytes is not None:
                    left_bytes -= sum(map(message_bytes, part[0].raw))
        return left, left_bytes

    def _take_part(
        self, buffer: Buffer, claim: Claim, limit: int, limit_bytes: int | None, now: Instant, have_some: bool
    ) -> tuple[Part, Delivered] | None:
        head = buffer.fetched[0]
        if isinstance(claim.tracker, AtMostOnce):
            limit = min(limit, buffer.skip_to_grant(claim.tracker))
            if not buffer.fetched:
                return None
            head = buffer.fetched[0]
        count = self.redelivering.limit(claim, buffer, min(limit, len(head.messages) - head.at))
        count = min(count, self.window.room(claim, buffer))  # now: what went to the dead-letter topic takes room, too
        head = buffer.fetched[0] if buffer.fetched else head
        if limit_bytes is not None:
            count = fit(head.messages, head.at, count, limit_bytes, not have_some)
        if count <= 0:
            return None
        whole = head.at == 0 and count == len(head.messages)
        raw = head.messages if whole else head.messages[head.at : head.at + count]
        first = 0
        if head.run is not None:
            self._taking.append((head.run, head.run.delivered))
            first = head.run.deliver(count, now.mono_ms)
        if isinstance(claim.tracker, AtMostOnce):
            claim.tracker.deliver(raw[-1].offset() or 0, now.mono_ms, len(raw))
        delivered = Delivered(self.delivery, claim, head.run)
        self.delivery.delivered += count
        head.at += count
        if head.at == len(head.messages):
            buffer.fetched.popleft()
        return Part(raw, delivered, first), delivered

    def begin(self) -> None:
        """Notes that a new fetch begins: the user has the messages of earlier ones, so `take_back` keeps those."""
        self._taking.clear()
        self.redelivering.begin()

    def take_back(self) -> None:
        """Undoes a fetch that ctrl-C interrupted: in at-least-once mode they are delivered again, in at-most-once mode
        lost."""
        while self._taking:
            run, delivered = self._taking.pop()
            run.delivered = delivered
        self.redelivering.take_back()
        self.fetch_again()

    def fetch_again(self) -> None:
        """After an exception, which may have lost some: empties all buffers and fetches all undelivered again."""
        again: dict[TopicPartition, int] = {}
        for tp, buffer in self.buffers.items():
            position = buffer.forget()
            if self.source.round(tp):
                again[tp] = buffer.next_offset = position
                buffer.held_back = False
        self.source.assign(again)
        for tp in self.user_paused & again.keys():
            self._pause_fetching(self.buffers[tp])

    def reserve(self, now: Instant, allowance: Allowance = ENDLESS) -> Reserved | None:
        """Returns messages of one partition, within `allowance`, to deliver one by one; or None."""
        self._turns.resume(self.delivered)
        if self._empty:
            return None
        for tp in self._turns.each():
            buffer = self.buffers[tp]
            claim = buffer.claim
            if claim is None or buffer.paused_by_user:
                continue
            again = redeliveries_of(claim)
            if not buffer.fetched and again is None:
                continue
            open_ms = self.member.open_ms(claim.epoch, now)
            if open_ms <= 0:
                continue
            until_ms = now.boot_ms + min(open_ms, GATE_MS)
            self._turns.reserved(tp, self.delivered)
            if again is not None:
                due = self.redelivering.reserve(claim, now, until_ms)
                if due is not None:
                    return due
                if not buffer.fetched:
                    continue
            if not self.window.opens(claim, buffer):
                continue
            there = len(buffer.fetched[0].messages) - buffer.fetched[0].at
            count = 1 if claim.one_by_one else there
            if isinstance(claim.tracker, AtMostOnce):
                count = buffer.skip_to_grant(claim.tracker)
            count = self.redelivering.limit(claim, buffer, min(count, self.left(), allowance.messages))
            count = min(count, self.window.room(claim, buffer))  # now, as in _take_part
            if allowance.size_bytes is not None and count > 0:
                head = buffer.fetched[0]
                count = fit(head.messages, head.at, count, allowance.size_bytes, allowance.one_fits)
            if count > 0:
                self.rate.delivered(self.delivered, now.mono_ms)
                head = buffer.fetched[0]
                return Reserved(buffer, head, Delivered(self.delivery, claim, head.run), count, until_ms, now.mono_ms)
        return None

    # --- at-most-once mode

    def offer(self) -> bool:
        """Sets each claim's `offer`: offsets to ask a grant for (D2). Tells whether the member can ask for one now."""
        buffers = [self.buffers[tp] for tp in self._turns]
        something, self._spent = offer_grants(buffers, self.source, self.rate, ends=self.left() <= 0)
        return something

    def user_returned(self) -> None:
        """The user asks for more: resumes fetching for low buffers. In at-most-once mode he is done with the last ones;
        in a pinned group it keeps the pin (A11)."""
        now = self.clock_now()
        self.asked_ms = now.mono_ms
        self.member.user_asked(self.asked_ms)
        self.rate.returned(self.delivered, self.asked_ms)
        self._gate_shut = self._gate_shut and self.deliverable(now) > 0
        held_back: list[Buffer] = []
        for buffer in self.buffers.values():
            claim = buffer.claim
            if claim is None:
                continue
            if isinstance(claim.tracker, AtMostOnce):
                claim.tracker.returned()
            else:
                claim.settle()
            if buffer.held_back and not buffer.paused_by_user:
                held_back.append(buffer)
        if held_back and not self._gate_shut:
            self._refill(held_back)

    def user_done(self) -> None:
        """Notes, in at-most-once mode, that the user asks again and gets nothing more: he is done with the last
        messages, also under claims that are being released."""
        for claim in self.member.claims.values():
            if isinstance(claim.tracker, AtMostOnce):
                claim.tracker.returned()

    def _refill(self, held_back: list[Buffer]) -> None:
        """Resumes fetching for these buffers, except those that still have many messages buffered or unfinished."""
        room = self.prefetch.room(self.buffers.values())
        for buffer in held_back:
            if room is not None and not room.low(buffer):
                continue
            tracker = buffer.claim.tracker if buffer.claim is not None else None
            if isinstance(tracker, AtLeastOnce):
                if tracker.tracked > BOUNDS.unacked // 2:
                    continue
                tracker.position()
            self._resume_fetching(buffer)

    # --- new claims: where their messages begin, given what earlier owners finished (D1)
    #
    # An earlier owner may have finished offsets above the position. Those are skipped only if the partition reaches
    # that far, because a partition that was truncated since holds other messages there. The data client may know only
    # an old end of the partition, for example if fetching was paused. So if the known end is too low, the claim is
    # unsure: its messages are fetched and delivered only after the cluster has been asked for the end. Such claims are
    # few.

    def begin_claims(self, claims: Sequence[Claim]) -> None:
        """Opens these accepted claims: at once, or after the cluster's answer if they are unsure."""
        unsure = [claim for claim in claims if self._may_be_shorter(claim)]
        self.open([claim for claim in claims if claim not in unsure])
        self._unsure.update((claim.tp, claim) for claim in unsure)
        self._ask_soon()

    def end_claims(self, claims: Sequence[Claim]) -> None:
        """Forgets these claims, which have ended."""
        self.delivery.lost_acks.ended(claims, self.member.group)
        for claim in claims:
            if self._unsure.get(claim.tp) is claim:
                del self._unsure[claim.tp]

    def look(self) -> None:
        """Does what is due every third of a heartbeat interval, at which it is called."""
        self._ask_soon()
        self._unacked.look(self.member.claims.values(), self.clock_now())
        self.answers.reports.end_period()

    def _ask_soon(self) -> None:
        """Has the worker ask where the partitions of unsure claims end; repeated until the cluster answers."""
        if self._unsure:
            self._submit("what earlier owners finished", self._ask)

    def overdue(self, now: Instant) -> bool:
        """False: the member itself judges by messages in flight. Ranges judges users who plan ranges."""
        return False

    def _may_be_shorter(self, claim: Claim) -> bool:
        tracker = claim.tracker
        if not isinstance(tracker, AtLeastOnce) or not tracker.finished_to():
            return False
        return self.source.end_offset(claim.tp) < tracker.finished_to()

    def _ask(self) -> TaskSteps:
        """Asks the cluster for ends, then opens the unsure claims; on the worker, without the lock. A partition without
        a leader holds up no other; it is asked for again."""
        context = self._context
        with context.lock:
            asked = dict(self._unsure)
        ends: dict[TopicPartition, int] = yield Ask(lambda: context.admin.told_offsets([*asked], ENDS_TIMEOUT_S))
        with context.outbox, context.lock:
            for tp, claim in asked.items():
                if self._unsure.get(tp) is not claim or tp not in ends:
                    continue
                del self._unsure[tp]
                if isinstance(claim.tracker, AtLeastOnce) and ends[tp] < claim.tracker.finished_to():
                    claim.tracker.discard_inherited()
                self.open([claim])
            context.changed.notify_all()

    # --- dead letters

    def write_dead_letters(self, topic: str, open_writer: Callable[[], MessageWriter]) -> None:
        """Has messages that are delivered too often, or ended by `term`, written to `topic`. Called once, at first."""
        answers = self.answers
        answers.letters = self._letters = DeadLetters(topic, self.member, self._context, answers.reports, open_writer)

    @property
    def writing(self) -> bool:
        """Returns whether dead letters are on their way."""
        return self._letters is not None and self._letters.pending

    def close(self) -> None:
        """Writes no dead letters any more."""
        if self._letters is not None:
            self._letters.close()


def positions_of(claims: Iterable[Claim], member: Member) -> Iterator[tuple[Claim, int]]:
    """Yields these claims, each with the position that the folded log has for it."""
    for claim in claims:
        assert member.group is not None
        yield claim, member.group.partitions[claim.tp].position
