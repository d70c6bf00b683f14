"""The lease and the wait clock: PROTOCOL.md T1-T3 and T6-T8 as far as these two classes decide them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marshal_py.protocol.time import Lease, WaitClock
from marshal_py.protocol.wire.identity import Instant

I = 3_000  # noqa: E741  the protocol calls an interval so


def at(ms: int) -> Instant:
    """An Instant of a machine that never slept and whose wall clock was not set."""
    return Instant(ms, ms + 50, ms + 1_000_000)


def test_a_lease_begins_with_the_newest_send() -> None:
    """T6: an older send that is read later does not move the start back, nor does a copy move it on."""
    lease = Lease(I)
    assert not lease.valid(at(0)), "without an extension there is no lease"
    lease.renew(at(1_000))
    assert lease.started == at(1_000)
    lease.renew(at(400))
    assert lease.started == at(1_000)
    lease.renew(at(1_000))
    assert lease.started == at(1_000)
    lease.renew(at(2_000))
    assert lease.started == at(2_000)
    lease.end()
    assert not lease.valid(at(2_000))


@pytest.mark.parametrize(
    ("mono", "boot", "wall", "elapsed"),
    [(70, 70, 70, 70), (10, 900, 10, 900), (10, 10, 900, 900), (10, 10, -900, 10), (900, 10, 10, 900)],
)
def test_elapsed_time_is_the_greatest_difference(mono: int, boot: int, wall: int, elapsed: int) -> None:
    """T7: the clock that went furthest counts; setting the wall clock back does not shorten it."""
    start = Instant(5_000, 77, 10_000)
    assert Instant(5_000 + mono, 77 + boot, 10_000 + wall).since_ms(start) == elapsed


@pytest.mark.parametrize("clock", ["boot_ms", "wall_ms", "mono_ms"])
def test_a_suspended_machine_does_not_wake_up_as_owner(clock: str) -> None:
    """T7, T8: one clock that passed the interval is enough."""
    lease = Lease(I)
    start = at(0)
    lease.renew(start)
    assert lease.valid(start._replace(**{clock: getattr(start, clock) + I}))
    assert not lease.valid(start._replace(**{clock: getattr(start, clock) + I + 1}))


@pytest.mark.parametrize("interval_ms", [1_000, 10_000, 600_000])
def test_the_edges_of_a_lease(interval_ms: int) -> None:
    """T8: delivery ends at one interval, to the ms."""
    lease = Lease(interval_ms)
    assert not lease.valid(at(0)), "what never began is over"
    lease.renew(at(0))
    assert lease.valid(at(0))
    assert lease.valid(at(interval_ms))
    assert lease.left_ms(at(interval_ms)) == 0
    assert not lease.valid(at(interval_ms + 1))


def test_a_wait_counts_in_steps() -> None:
    """T1, T2: from its beginning, floored; a sleep of any length counts as a tenth of the interval."""
    clock = WaitClock(I)
    clock.advance(at(0), True)
    began = clock.counted_ms
    assert clock.waited_ms(began) == 0
    for ms in range(100, 1_001, 100):
        clock.advance(at(ms), True)
    assert clock.waited_ms(began) == 999, "both ends were floored, so one ms less"
    clock.advance(at(1_000 + I // 10), True)
    assert clock.waited_ms(began) == 999 + I // 10
    clock.advance(at(60_000), True)
    assert clock.waited_ms(began) == 999 + 2 * (I // 10), "who slept has not waited"
    assert clock.waited_ms(clock.counted_ms) == 0, "another wait has its own beginning"


def test_the_monotonic_clock_is_the_one_that_counts() -> None:
    """T1: boot and wall time, which jump, do not add to a wait."""
    clock = WaitClock(I)
    clock.advance(Instant(0, 0, 0), True)
    clock.advance(Instant(10, 9_000, 9_000), True)
    assert clock.counted_ms == 10


def test_an_unproven_step_restarts_all_waits() -> None:
    """T3: every wait that ran, and no time before it counts ever again."""
    clock = WaitClock(I)
    clock.advance(at(0), True)
    first = clock.counted_ms
    clock.advance(at(200), True)
    second = clock.counted_ms
    clock.advance(at(400), True)
    assert (clock.waited_ms(first), clock.waited_ms(second)) == (399, 199)
    clock.advance(at(600), False)
    assert (clock.waited_ms(first), clock.waited_ms(second)) == (0, 0)
    clock.advance(at(800), True)
    assert (clock.waited_ms(first), clock.waited_ms(second)) == (199, 199)


STEPS = st.lists(st.tuples(st.integers(-50, 2_000), st.booleans()), max_size=40)


@given(STEPS, st.integers(1_000, 600_000))
def test_a_wait_never_exceeds_true_time(steps: list[tuple[int, bool]], interval_ms: int) -> None:
    """T1, T2, T3: every wait, begun at any step, counts proven steps alone."""
    clock, now, begun = WaitClock(interval_ms), 10_000, []
    highest = now
    last_unproven = -1
    for number, (step, proven) in enumerate(steps):
        now += step
        highest = max(highest, now)
        clock.advance(at(now), proven)
        if not proven:
            last_unproven = number
        begun.append((number, now, clock.counted_ms))
    counted = [one[2] for one in begun]
    assert all(0 <= later - earlier <= interval_ms // 10 for earlier, later in pairwise(counted))
    for number, began, value in begun:
        waited = clock.waited_ms(value)
        forward = sum(max(0, step) for step, _ in steps[number + 1 :])
        assert waited <= forward
        if all(step >= 0 for step, _ in steps):
            assert waited <= max(0, highest - began)
        proven_steps = len(steps) - 1 - max(number, last_unproven)
        assert waited <= proven_steps * (interval_ms // 10)
