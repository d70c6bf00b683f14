"""Planted bugs in the client around the member: buffers, grants, answers, acks, and the ends of a consumer.

They are in the shipped code of marshal_py/client. mutants.py alone calls this file. The docstring of a replaced
function says how it behaves with the bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from marshal_py.client.delivery import grants
from marshal_py.client.delivery.buffers import Buffer
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.delivery.redelivery import Redelivering, redeliveries_of
from marshal_py.client.messages.dead_letters import DeadLetters, Letter
from marshal_py.client.receive.ending import Ending
from marshal_py.client.values.waits import Steps
from marshal_py.protocol.claims.at_most_once import AtMostOnce, Grant
from marshal_py.protocol.claims.claim import Claim, ClaimPhase
from marshal_py.protocol.claims.delivery import AtLeastOnce
from marshal_py.protocol.claims.redelivery import Redeliveries
from marshal_py.protocol.wire.identity import Instant, TopicPartition
from marshal_py.protocol.wire.records import AT_LEAST_ONCE, AT_MOST_ONCE

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


def c6() -> list[Patch]:
    opened = Buffer.open

    def drop(self: DeliveryQueue, tps: Iterable[TopicPartition]) -> None:
        """Keeps what was fetched, and goes on fetching, so that the next claim of the partition begins at once."""
        for tp in tps:
            self._turns.remove(tp)

    def open_again(self: Buffer, claim: Claim, position: int) -> None:
        if self.claim is None:
            opened(self, claim, position)
        self.claim = claim

    return [(DeliveryQueue, "drop", drop), (Buffer, "open", open_again)]


def c9() -> list[Patch]:
    seal = Claim.seal

    def forgets(self: Claim, phase: ClaimPhase) -> None:
        """Counts the messages that wait to be delivered again as finished."""
        found = self.tracker.redeliveries if isinstance(self.tracker, AtLeastOnce) else None
        for one in found.waiting.values() if found is not None and not self.sealed else ():
            one.run.finish(one.at)
        seal(self, phase)

    return [(Claim, "seal", forgets)]


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


def c13() -> list[Patch]:
    def write(self: DeadLetters, letters: Sequence[Letter]) -> None:
        """Hands the letters to the producer and does not wait for Kafka's acknowledgement."""
        self._writer = self._writer or self._open_writer()
        for letter in letters:
            self._writer.write(self.topic, letter.message.value(), letter.message.key(), self._headers(letter))

    return [(DeadLetters, "_write", write)]


def c15() -> list[Patch]:
    def begun(tracker: AtMostOnce) -> None:
        """Keeps the rest of a grant of which something was handed over."""
        if tracker.grants and tracker.grants[0].start < tracker.delivered_to:
            tracker.handed_to = tracker.grants[0].to

    return _at_a_stop(begun)


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

    return [(Redelivering, "take", taken), (Redeliveries, "end", lambda self: None)]


def c22() -> list[Patch]:
    opened = DeliveryQueue.open

    def from_the_buffer(self: DeliveryQueue, claims: Iterable[Claim], positions: dict[TopicPartition, int]) -> None:
        """Begins where the fetched messages begin, also if the claim begins below."""
        at = {tp: max(position, self.buffers[tp].start) for tp, position in positions.items() if tp in self.buffers}
        opened(self, claims, {**positions, **at})

    return [(DeliveryQueue, "open", from_the_buffer)]


def c24() -> list[Patch]:
    returned = DeliveryQueue.user_returned

    def stays_shut(self: DeliveryQueue) -> None:
        """Takes a gate that was shut once for shut."""
        shut, deliverable = self._gate_shut, self.deliverable
        self.deliverable = lambda: 1 if shut else deliverable()  # type: ignore[method-assign]
        returned(self)
        del self.deliverable

    return [(DeliveryQueue, "user_returned", stays_shut)]


def c26() -> list[Patch]:
    offer = grants.offer

    def used_up(buffers: Any, *rest: Any, **more: Any) -> Any:
        """Takes a grant of which nothing is fetched for one that holds no message."""
        for buffer in buffers:
            tracker = buffer.claim.tracker if buffer.claim is not None else None
            if isinstance(tracker, AtMostOnce) and not buffer.fetched:
                tracker.skipped(tracker.granted_to())
        return offer(buffers, *rest, **more)

    return [(grants, "offer", used_up)]


_AMO: Final = {"mode": AT_MOST_ONCE}
_ALO: Final = {"mode": AT_LEAST_ONCE}
_FAST: Final = {"rate": 200, "interval_ms": 1_000, "partitions": 2, "intervals": 8}  # a user who needs no time
# Name, what it does wrong, the bug, the faults that make it likely to show, and other options.
PLANTED: Final[tuple[tuple[str, str, Callable[[], list[Patch]], tuple[str, ...], dict[str, Any]], ...]] = (
    ("C1", "a stop drops what was granted and not handed over", c1, ("leave", "arrive"), _AMO),
    ("C6", "a buffer survives the release of its claim", c6, ("admin", "step_down", "arrive", "leave"), _ALO),
    ("C9", "a hand-over forgets what handlers gave back", c9, ("answers", "arrive", "leave", "step_down"), _ALO),
    ("C11", "the queue delivers by a grant of before a fence", c11, ("lag", "delay", "suspend"), _AMO),
    ("C13", "a message is finished before Kafka has its dead letter", c13, ("answers",), _ALO),
    ("C15", "a stop keeps the rest of a grant that was begun", c15, ("leave", "arrive"), _AMO),
    (
        "C17",
        "what a handler gave back comes again after its claim was released",
        c17,
        ("answers", "arrive", "leave", "step_down"),
        _ALO,
    ),
    ("C22", "a claim begins where fetching ahead began", c22, ("arrive", "leave", "step_down"), _AMO),
    ("C24", "a partition whose gate was shut is not fetched again", c24, ("admin", "lag", "outage"), _ALO),
    ("C26", "what is granted and not fetched is taken for used up", c26, ("arrive", "lag"), {**_AMO, **_FAST}),
)
