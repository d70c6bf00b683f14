"""Acks take no lock: none is lost and none counts twice, whatever happens between their steps (T16)."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import SupportsIndex

import pytest

from marshal_py.client.values.info import oldest_unfinished_ms
from marshal_py.protocol.claims import AtLeastOnce, ClaimPhase, OffsetRun, release
from marshal_py.protocol.fold.world import Partition
from marshal_py.protocol.wire import progress
from marshal_py.protocol.wire.progress import Range
from marshal_py.protocol.wire.records import ReleasingPartition
from marshal_py.testing import make_batch, make_message
from marshal_py.testing.messages import RecordedMessage


def tracker_of(message: RecordedMessage[object, object]) -> AtLeastOnce:
    tracker = message._delivered.claim.tracker
    assert isinstance(tracker, AtLeastOnce)
    return tracker


class Between(list[int]):
    """A list of acks that calls `before` before it appends one, and `after` after that."""

    before: Callable[[], object] = staticmethod(lambda: None)
    after: Callable[[], object] = staticmethod(lambda: None)

    def append(self, index: SupportsIndex) -> None:
        self.before()
        super().append(int(index))
        self.after()


@pytest.mark.parametrize("phase", [ClaimPhase.RELEASING, ClaimPhase.GONE])
def test_an_ack_counts_exactly_if_the_released_position_is_above_it(phase: ClaimPhase) -> None:
    """T16: the claim is sealed before, within or after an ack; the ack says whether the Release includes it."""
    for when, counts in (("before", False), ("after", True)):
        message = make_message(offset=7)
        claim, run, released = message._delivered.claim, message._delivered.run, []
        assert run is not None

        def seal(claim=claim, released=released) -> None:  # type: ignore[no-untyped-def]
            claim.seal(phase)
            released.append(claim.position())

        run.acks = between = Between()
        setattr(between, when, seal)
        assert message.ack() is counts
        assert released == [8 if counts else 7]
        claim.settle()
        assert claim.position() == released[0], "an ack that came too late changes no position"
        assert message.ack() is counts, "and a second call says the same"


def test_copies_of_a_release_say_the_same_whatever_is_acked_meanwhile() -> None:
    """The first copy may be lost. Metrics, and the stats of a `process`, ask about the messages of all claims: an ack
    that they noted moved what was finished against the released position, and a message in between was lost."""
    batch = make_batch([b"%d" % number for number in range(6)])
    batch.messages[2].ack()
    claim = batch.messages[0]._delivered.claim
    claim.seal_for_release(0)
    first = release(7, Partition(claim.tp, 0), claim)
    assert isinstance(first, ReleasingPartition)
    finished = [span for span in progress.decode(first.position, first.progress) if not span.times]
    assert (first.position, first.in_flight, finished) == (0, 5, [Range(2, 3, 0)])
    assert not batch.messages[0].ack(), "too late"
    oldest_unfinished_ms(claim, 0)
    assert release(7, Partition(claim.tp, 0), claim) == first


def test_an_ack_before_the_claim_ends_is_in_its_position() -> None:
    message = make_message(offset=7)
    assert message.ack()
    message._delivered.claim.seal(ClaimPhase.RELEASING)
    assert message._delivered.claim.position() == 8


def test_a_part_and_a_batch_say_what_their_messages_say() -> None:
    batch = make_batch([b"a", b"b", b"c"])
    assert batch[:2].ack()
    batch.messages[0]._delivered.claim.seal(ClaimPhase.GONE)
    assert [message.ack() for message in batch.messages] == [True, True, False]
    assert [batch[:2].ack(), batch[1:].ack(), batch.parts[0].ack()] == [True, False, False]


def test_acks_count_once_they_are_noted() -> None:
    """What is read between two calls of `settle` belongs together: position, number in flight, progress."""
    batch = make_batch([b"a", b"b", b"c"])
    tracker = tracker_of(batch.messages[0])
    before = tracker.position(), tracker.in_flight, tracker.progress()
    batch.messages[2].ack()
    batch.messages[0].ack()
    assert (tracker.position(), tracker.in_flight, tracker.progress()) == before
    tracker.settle()
    assert (tracker.position(), tracker.in_flight) == (1, 1)
    batch.messages[1].ack()
    tracker.settle()
    assert (tracker.position(), tracker.in_flight) == (3, 0)


def test_a_nak_and_a_part_see_the_acks_before_them() -> None:
    batch = make_batch([b"a", b"b"])
    assert batch.messages[0].ack()
    assert not batch.messages[0].nak(0), "it is done"
    assert batch.ack()
    assert tracker_of(batch.messages[0]).position() == 2


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_acks_and_notes_ends_as_all_finished(seed: int) -> None:
    dice, run = random.Random(seed), OffsetRun(range(100, 160))
    run.deliver(60, 0)
    indexes = [*range(60), *dice.choices(range(60), k=20)]  # some twice
    if seed % 2:
        dice.shuffle(indexes)
    seen = set()
    for index in indexes:
        run.acks.append(index)
        seen.add(index)
        if dice.random() < 0.2:
            run.settle()
            assert {at for at in range(60) if run.is_finished(at)} == seen
    run.settle()
    assert (run.low, run.finished, run.unfinished, run.acks) == (60, set(), 0, [])


def test_an_interrupted_note_is_repeated() -> None:
    """Ctrl-C may end `settle` after any step: the acks are then noted by the next call."""

    class Interrupted(OffsetRun):
        left = 2

        def finish(self, index: int) -> bool:
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            return super().finish(index)

    run = Interrupted(range(5))
    run.deliver(5, 0)
    for index in (4, 2, 0, 1, 3):
        run.acks.append(index)
    with pytest.raises(KeyboardInterrupt):
        run.settle()
    run.left = 9
    run.settle()
    assert (run.low, run.finished, run.acks) == (5, set(), [])


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.proof)])
def test_threads_that_ack_while_the_claim_is_sealed(step: int) -> None:
    """Four threads ack a message each in turn; the claim ends somewhere. Acks that said True are in the position."""
    for count in range(0, 40, step):
        batch = make_batch([b"x"] * 400)
        claim, said = batch.messages[0]._delivered.claim, [False] * 400
        start = threading.Barrier(5)

        def ack(first: int, batch=batch, said=said, start=start) -> None:  # type: ignore[no-untyped-def]
            start.wait()
            for at in range(first, 400, 4):
                said[at] = batch.messages[at].ack()

        threads = [threading.Thread(target=ack, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        start.wait()
        with batch.messages[0]._delivered.context.lock:
            while not said[min(399, 10 * count)]:
                claim.settle()
            claim.seal(ClaimPhase.RELEASING)
            run = batch.messages[0]._delivered.run
            assert run is not None
            noted = [run.is_finished(at) for at in range(400)]
        for thread in threads:
            thread.join()
        assert said == noted
