"""The garbage collector while messages are in hand: what is raised is put back, and what the program set stays."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from marshal_py.client.headroom import HEADROOM, MESSAGES_MAX, Headroom
from marshal_py.errors import ConsumerClosed
from tests.support.fronts import MemoryGround, joined

USUAL = (700, 10, 10)
RAISED = (700 + 7_000, 10, 10)


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    for owner in ("one", "other"):
        HEADROOM.leave(owner)
    gc.set_threshold(*before)


def looks(count: int) -> int:
    """How often the collector looks while `count` objects are made and kept."""
    before = gc.get_stats()[0]["collections"]
    kept = [[] for _ in range(count)]  # type: ignore[var-annotated]
    after = gc.get_stats()[0]["collections"]
    assert len(kept) == count
    return after - before


def test_what_is_kept_does_not_start_the_collector() -> None:
    assert looks(7_000) >= 8
    HEADROOM.keep("one", 7_000)
    gc.collect()
    assert looks(7_000) == 0
    assert looks(8_000) == 1, "garbage beyond it is still found"
    HEADROOM.leave("one")
    assert gc.get_threshold() == USUAL


def test_all_consumers_together() -> None:
    HEADROOM.keep("one", 3_000)
    HEADROOM.keep("other", 4_000)
    HEADROOM.keep("one", 2_000)  # it may keep 3,000 again
    assert gc.get_threshold() == RAISED
    HEADROOM.leave("one")
    assert gc.get_threshold() == (4_700, 10, 10)
    HEADROOM.leave("one")
    HEADROOM.leave("other")
    assert gc.get_threshold() == USUAL


def test_it_is_bounded() -> None:
    HEADROOM.keep("one", 10 * MESSAGES_MAX)
    assert gc.get_threshold()[0] == 700 + MESSAGES_MAX


@pytest.mark.parametrize("own", [5_000, 0])
def test_what_the_program_sets_meanwhile_stays(own: int) -> None:
    HEADROOM.keep("one", 7_000)
    gc.set_threshold(own, 20, 20)
    HEADROOM.keep("one", 8_000)
    HEADROOM.keep("other", 1_000)
    assert gc.get_threshold() == (own, 20, 20)
    HEADROOM.leave("one")
    HEADROOM.leave("other")
    assert gc.get_threshold() == (own, 20, 20)
    HEADROOM.keep("one", 1_000)
    assert gc.get_threshold()[0] == (own + 1_000 if own else 0), "from now on the program's own threshold is this one"


def test_a_collector_that_is_off_stays_off() -> None:
    gc.set_threshold(0)
    HEADROOM.keep("one", 7_000)
    assert gc.get_threshold()[0] == 0
    HEADROOM.leave("one")
    assert gc.get_threshold()[0] == 0
    gc.set_threshold(*USUAL)
    HEADROOM.keep("one", 7_000)
    gc.disable()
    HEADROOM.leave("one")
    off = not gc.isenabled()
    gc.enable()
    assert off


def test_a_forked_child_has_the_usual_one() -> None:
    HEADROOM.keep("one", 7_000)
    child = os.fork()
    if not child:
        try:
            fine = gc.get_threshold() == USUAL
            HEADROOM.keep("other", 7_000)
            os._exit(0 if fine and gc.get_threshold() == RAISED else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.get_threshold() == RAISED


def test_many_threads() -> None:
    def work(number: int) -> None:
        for messages in range(1, 200):
            HEADROOM.keep(number, messages)
        HEADROOM.leave(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert gc.get_threshold() == USUAL


@pytest.mark.parametrize(("delivery", "kept"), [("at_least_once", 2 * 300), ("at_most_once", 2 * 300 + 4 * 50)])
def test_a_consumer_keeps_two_batches_and_what_is_granted_ahead(memory: MemoryGround, delivery: str, kept: int) -> None:
    topic = memory.topic()
    with memory.connect() as marshal, joined(
        marshal, memory.group(), [topic], delivery=delivery, grant_messages=50
    ) as consumer:  # fmt: skip
        assert gc.get_threshold() == USUAL
        consumer.fetch(300, expires_s=0)
        consumer.fetch(10, expires_s=0)
        assert gc.get_threshold()[0] == 700 + kept
        consumer.stop()
        assert gc.get_threshold() == USUAL


def test_who_is_stopped_as_he_fetches_keeps_nothing(memory: MemoryGround, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        keep = Headroom.keep

        def stopped_before(self: Headroom, owner: object, messages: int) -> None:
            other = threading.Thread(target=consumer.stop)
            other.start()
            other.join(10)
            keep(self, owner, messages)

        monkeypatch.setattr(Headroom, "keep", stopped_before)
        with pytest.raises(ConsumerClosed):
            consumer.fetch(300)
        assert gc.get_threshold() == USUAL
