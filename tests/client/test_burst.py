"""The garbage collector during a burst of messages: what is raised is put back, and what the program set stays."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator

import pytest

from marshal_py.client.burst import BURST, BURST_OBJECTS

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)


def looks(count: int) -> int:
    """How often the collector looks while `count` objects are made and kept."""
    before = gc.get_stats()[0]["collections"]
    kept = [[] for _ in range(count)]  # type: ignore[var-annotated]
    after = gc.get_stats()[0]["collections"]
    assert len(kept) == count
    return after - before


def test_a_burst_does_not_start_the_collector() -> None:
    assert looks(7_000) >= 8
    with BURST:
        assert looks(7_000) == 0
    assert gc.get_threshold() == USUAL


def test_an_error_inside_puts_it_back() -> None:
    with pytest.raises(ZeroDivisionError), BURST:
        raise ZeroDivisionError
    assert gc.get_threshold() == USUAL


def test_the_last_thread_out_puts_it_back() -> None:
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with BURST:
            inside.set()
            assert leave.wait(10)

    other = threading.Thread(target=stay)
    other.start()
    assert inside.wait(10)
    with BURST:
        pass
    assert gc.get_threshold()[0] == BURST_OBJECTS
    leave.set()
    other.join(10)
    assert gc.get_threshold() == USUAL


def test_what_the_program_sets_meanwhile_stays() -> None:
    with BURST:
        gc.set_threshold(5_000, 20, 20)
    assert gc.get_threshold() == (5_000, 20, 20)


def test_a_collector_that_is_off_stays_off() -> None:
    gc.set_threshold(0)
    with BURST:
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold()[0] == 0
    gc.set_threshold(*USUAL)
    with BURST:
        gc.disable()
    off = not gc.isenabled()
    gc.enable()
    assert off


def test_a_child_that_is_forked_inside_has_the_usual_one() -> None:
    with BURST:
        child = os.fork()
        if not child:
            try:
                fine = gc.get_threshold() == USUAL
                with BURST:
                    fine = fine and gc.get_threshold()[0] == BURST_OBJECTS
                os._exit(0 if fine and gc.get_threshold() == USUAL else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.get_threshold() == USUAL
