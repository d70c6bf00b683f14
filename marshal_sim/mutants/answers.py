"""Planted bugs in what becomes of messages that handlers give back (PROTOCOL.md D14), and of those that go to a
dead-letter topic (D15).

mutants.py alone calls this file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from marshal_py.client.messages.answers import Answers
from marshal_py.protocol.claims import AtLeastOnce, Claim, GivenBack, OffsetRun, Redeliveries
from marshal_py.protocol.wire.records import OFFSET_MAX

Patch = tuple[Any, str, Any]


def counts_as_done() -> list[Patch]:
    give_back = Redeliveries.give_back

    def done(self: Redeliveries, run: OffsetRun, index: int, message: object, due_ms: int, _: int) -> bool:
        found = give_back(self, run, index, message, due_ms)
        run.finish(index)
        return found

    return [(Redeliveries, "give_back", done)]


def hurries() -> list[Patch]:
    give_back = Redeliveries.give_back

    def at_once(self: Redeliveries, run: OffsetRun, index: int, message: object, due_ms: int, _: int) -> bool:
        return give_back(self, run, index, message, 0)

    return [(Redeliveries, "give_back", at_once)]


def forgets() -> list[Patch]:
    def forgotten(self: Redeliveries, run: OffsetRun, index: int, message: object, due_ms: int, _: int) -> bool:
        """Sets the message aside and remembers nothing else."""
        if run.is_finished(index):
            return False
        run.set_aside(index)
        return True

    return [(Redeliveries, "give_back", forgotten)]


def rewinds() -> list[Patch]:
    take = Redeliveries.take

    def taken(self: Redeliveries, now_ms: int) -> GivenBack | None:
        """Delivers again everything of the run that comes after the message, too."""
        one = take(self, now_ms)
        if one is not None:
            one.run.delivered = min(one.run.delivered, one.at + 1)
        return one

    return [(Redeliveries, "take", taken)]


def never_counted() -> list[Patch]:
    return [(AtLeastOnce, "delivery_count", lambda self, offset: 1 + self._delivered_before_at(offset))]


def one_more() -> list[Patch]:
    def exhausted(self: Answers, delivery_count: int) -> bool:
        return self.deliveries_max is not None and delivery_count > self.deliveries_max

    return [(Answers, "_exhausted", exhausted)]


def unlimited_after_a_claim() -> list[Patch]:
    return [(AtLeastOnce, "next_delivered", lambda self, offset, times: OFFSET_MAX)]


def done_when_sent() -> list[Patch]:
    post = Answers._post

    def posted(self: Answers, claim: Claim, run: OffsetRun, index: int, *others: Any) -> bool:
        found = post(self, claim, run, index, *others)
        run.finish(index)
        return found

    return [(Answers, "_post", posted)]


def not_waited_for() -> list[Patch]:
    set_aside = OffsetRun.set_aside

    def never_waits(self: OffsetRun, index: int, *, waits: bool = False) -> None:
        set_aside(self, index)

    return [(OffsetRun, "set_aside", never_waits)]


# Name, what it does wrong, the bug, and the faults that make it likely to show.
PLANTED: Final[tuple[tuple[str, str, Callable[[], list[Patch]], tuple[str, ...]], ...]] = (
    ("D14A", "a message that was given back counts as finished", counts_as_done, ("crash",)),
    ("D14B", "a message that was given back comes before its delay is over", hurries, ()),
    ("D14C", "a message that was given back is forgotten", forgets, ()),
    ("D14D", "after a message that comes again, those behind it come again, too", rewinds, ()),
    ("D15A", "deliveries after the first one do not count", never_counted, ()),
    ("D15B", "the limit allows one delivery more", one_more, ()),
    ("D15C", "a new owner does not look at the deliveries of earlier owners", unlimited_after_a_claim, ("crash",)),
    ("D15D", "a message is finished when its letter is sent", done_when_sent, ("crash",)),
    ("D15E", "a Release does not wait for letters", not_waited_for, ("arrive", "leave")),
)
