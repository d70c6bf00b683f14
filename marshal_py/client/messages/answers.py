"""Carries out what handlers answer besides acks: `nak` (deliver it again later) and `term` (never again).

With a dead-letter topic, messages that are ended or were delivered `max_deliver` times go there (dead_letters.py). The
tracker of the claim knows which messages wait (delivery.py of protocol/claims/), and delivery_queue.py delivers them
again. Everything here is called with the Marshal's lock held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from marshal_py.client.messages.dead_letters import Letter
from marshal_py.client.values.options import ConsumerOptions
from marshal_py.client.values.reports import Reports
from marshal_py.client.values.requests import payload_bytes
from marshal_py.errors import InvalidOption, NeedsAtLeastOnce
from marshal_py.protocol.claims.claim import Claim
from marshal_py.protocol.claims.delivery import AtLeastOnce, OffsetRun
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.identity import Instant
from marshal_py.transport.ports import RawMessage

NAK_DELAY_S: Final = 0.5  # after the first delivery, if the user names no delay: a stumble of a database is over then
NAK_DELAY_DOUBLED_S_MAX: Final = 60.0  # it doubles with each delivery up to this: a poison message costs little
NAK_DELAY_S_MAX: Final = 86_400.0  # of a delay that the user names, which keeps the position back all the time
POISON_DELIVERIES: Final = 5  # of one message: after so many it is reported, and again each time the number doubles
# Why a letter is written instead of a delivery. It says no more than the log knows: owners that died may have delivered
# less often than is counted, and a handler's ack may have died with its process.
UNANSWERED: Final = "the log counts {} deliveries, which may be too many, and has no ack"
REASON_CHARS_MAX: Final = 500  # of `term`, in a dead letter; a Note holds half as much


class LetterWriter(Protocol):
    """Writes letters to the dead-letter topic; `written` counts them. `held_bytes`: of those that are not written."""

    @property
    def written(self) -> int: ...
    @property
    def held_bytes(self) -> int: ...

    def post(self, letter: Letter) -> None: ...


class Answers:
    """Carries out the answers of one consumer's handlers, and counts them since the consumer was made."""

    def __init__(self, member: Member, options: ConsumerOptions, clock_now: Callable[[], Instant]) -> None:
        self._member, self._options, self._now = member, options, clock_now
        self.reports: Reports = Reports(member)
        self.letters: LetterWriter | None = None  # set by the consumer's maker if there is a dead-letter topic
        self.naks: int = 0
        self.waited: bool = False  # whether a message was ever given back or put back
        self.redelivered: int = 0
        self.terminated: int = 0
        self.undelivered: int = 0  # messages that went to the dead-letter topic before this consumer delivered them

    def tracker_of(self, claim: Claim, verb: str) -> AtLeastOnce:
        """Returns the claim's tracker. Raises NeedsAtLeastOnce in at-most-once mode, which has no such answers."""
        if not isinstance(claim.tracker, AtLeastOnce):
            raise NeedsAtLeastOnce(verb, self._member.name)
        return claim.tracker

    def nak(
        self,
        claim: Claim,
        run: OffsetRun,
        first: int,
        messages: Sequence[RawMessage],
        delay_s: float | None,
        again: int,
    ) -> bool:
        """Makes messages wait. `first`: in `run`. `delay_s` None grows. `again`: which delivery is answered; those
        delivered again since stay. False if all are done."""
        tracker, now_ms = self.tracker_of(claim, "nak"), self._now().mono_ms
        was_full = tracker.redeliveries is not None and tracker.redeliveries.full
        before_bytes, most_bytes = self.waiting_bytes(), self._options.prefetch_bytes
        waits, self.waited = False, True
        for index, message in enumerate(messages, first):
            if tracker.redelivered(run.offsets[index]) != again:
                continue
            count = tracker.delivery_count(run.offsets[index])
            delay = grown_delay_s(count) if delay_s is None else delay_s
            if self._exhausted(count):
                if self._post(claim, run, index, message, count, f"given back at delivery_count {count}"):
                    waits = True
                    self.naks += 1
            elif tracker.give_back(run, index, message, now_ms + round(1000 * delay), payload_bytes((message,))):
                waits = True
                self.naks += 1
                self._report_poison(claim, run.offsets[index], count)
        if not was_full and tracker.redeliveries is not None and tracker.redeliveries.full:
            text = f"{len(tracker.redeliveries.waiting)} messages wait to be delivered again"
            self._report_storm(claim, f"{text}: nothing new of the partition is delivered meanwhile")
        if before_bytes < most_bytes <= (size_bytes := self.waiting_bytes()):
            text = f"messages of {size_bytes} bytes wait to be delivered again, and prefetch_bytes is {most_bytes}"
            self._report_storm(claim, f"{text}: the consumer receives nothing new of any partition meanwhile")
        return waits

    def put_back(self, claim: Claim, run: OffsetRun, index: int, message: RawMessage, delay_s: float) -> None:
        """Makes a message wait that is queued for a handler which has not begun (D17)."""
        self.waited, due_ms = True, self._now().mono_ms + round(1000 * delay_s)
        self.tracker_of(claim, "nak").give_back(run, index, message, due_ms, payload_bytes((message,)))

    def term(self, claim: Claim, run: OffsetRun, first: int, messages: Sequence[RawMessage], reason: str) -> bool:
        """Finishes messages for good, and reports each with the reason. Returns False if all of them were finished."""
        tracker, ended = self.tracker_of(claim, "term"), 0
        for index, message in enumerate(messages, first):
            if self.letters is not None:
                count = tracker.delivery_count(run.offsets[index])
                ended += self._post(claim, run, index, message, count, reason or "ended by its handler")
            elif run.finish(index):
                ended += 1
                self.reports.note("terminated", claim, run.offsets[index], reason)
        self.terminated += ended
        return ended > 0

    def waiting_bytes(self) -> int:
        """Returns the bytes that wait to be delivered again or to become dead letters, which no handler has."""
        size_bytes = 0 if self.letters is None else self.letters.held_bytes
        for claim in self._member.claims.values() if self.waited else ():
            if isinstance(claim.tracker, AtLeastOnce) and claim.tracker.redeliveries is not None:
                size_bytes += claim.tracker.redeliveries.size_bytes
        return size_bytes

    # --- dead letters

    def _exhausted(self, delivery_count: int) -> bool:
        return self.deliveries_max is not None and delivery_count >= self.deliveries_max

    def _post(
        self, claim: Claim, run: OffsetRun, index: int, message: RawMessage, deliveries: int, reason: str
    ) -> bool:
        """Sends a message to the dead-letter topic. Returns False if it is finished or on its way already."""
        assert self.letters is not None
        if not self.tracker_of(claim, "term").post(run, index):
            return False
        self.letters.post(Letter(claim, run, index, message, deliveries, reason))
        return True

    @property
    def deliveries_max(self) -> int | None:
        """Returns after how many deliveries a message goes to the dead-letter topic; None if it never does."""
        return self._options.max_deliver if self.letters is not None else None

    def post_undelivered(self, claim: Claim, run: OffsetRun, message: RawMessage, deliveries: int) -> None:
        """Sends the next message of `run` to the dead-letter topic instead of delivering it once more."""
        index = run.deliver(1, self._now().mono_ms)
        self._post(claim, run, index, message, deliveries, UNANSWERED.format(deliveries))
        self.undelivered += 1

    def _report_poison(self, claim: Claim, offset: int, count: int) -> None:
        """Reports a message that was delivered POISON_DELIVERIES times, twice as many, four times as many, ..."""
        times, rest = divmod(count, POISON_DELIVERIES)
        if rest == 0 and times & (times - 1) == 0:
            self.reports.note(
                "poison_message", claim, offset, f"{count} deliveries, and its handler gave it back again"
            )

    def _report_storm(self, claim: Claim, text: str) -> None:
        self._member.advise("nak_storm", claim.tp, epoch=claim.epoch, offset=claim.position(), text=text)
        self._member.request_tick()


def grown_delay_s(delivery_count: int) -> float:
    """Returns how many seconds `nak` waits by default after the given number of deliveries: it doubles with each."""
    doubled = min(delivery_count - 1, 16)  # more would pass the bound anyway
    return min(NAK_DELAY_DOUBLED_S_MAX, NAK_DELAY_S * (1 << doubled))


def check_delay(delay_s: float | None) -> None:
    """Raises InvalidOption if `nak` cannot wait so long."""
    if delay_s is None:
        return
    number = isinstance(delay_s, int | float) and not isinstance(delay_s, bool)
    if not number or not 0 <= delay_s <= NAK_DELAY_S_MAX:
        rule = f"a number of seconds from 0 to {NAK_DELAY_S_MAX:g}, or None for one that grows with each delivery"
        raise InvalidOption("delay_s", delay_s, rule)


def check_reason(reason: str) -> str:
    """Returns the reason of a `term`, cut to REASON_CHARS_MAX characters. What utf-8 has no bytes for, such as half a
    surrogate pair, becomes an escape. Raises InvalidOption if it is no text."""
    if not isinstance(reason, str):
        raise InvalidOption("reason", reason, "a text for people who look at the group's advisories")
    return reason[:REASON_CHARS_MAX].encode(errors="backslashreplace").decode()
