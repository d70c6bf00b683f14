"""What goes on failing is logged once per cause and minute, not per attempt; a topic that is gone stops no other."""

from __future__ import annotations

import logging
import threading

import pytest

from marshal_py.client.connection import CAUSES_MAX, REPEAT_S, Repeats, Worker
from marshal_py.errors import ClusterUnreachable
from tests.client.test_planner import spans
from tests.support.client_fixtures import MemoryTestCluster, until


def test_a_cause_is_due_again_after_a_minute_or_when_it_changes() -> None:
    now_s = [0.0]
    repeats = Repeats(lambda: now_s[0])
    assert [repeats.due(text) for text in ("down (after 0ms)", "down (after 12ms)", "gone", "down (after 7 s)")] == [
        True,
        False,
        True,
        False,
    ]
    now_s[0] = REPEAT_S - 1
    assert not repeats.due("gone")
    now_s[0] = REPEAT_S
    assert [repeats.due("gone"), repeats.due("gone")] == [True, False]


def test_what_is_remembered_is_bounded() -> None:
    repeats = Repeats(lambda: 0.0)
    for number in range(3 * CAUSES_MAX):
        assert repeats.due(f"topic {number}")
    assert len(repeats._written) == CAUSES_MAX


@pytest.mark.parametrize("error", [ClusterUnreachable("b:1", "the ends of orders:0", "unknown topic"), KeyError("a")])
def test_a_task_that_fails_again_and_again_makes_one_line(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    worker, runs = Worker("a test"), 0

    def task() -> None:
        nonlocal runs
        runs += 1
        ran.set()
        raise error

    for number in range(5):
        ran = threading.Event()
        worker.submit(f"the look {number // 4}", task)
        assert ran.wait(30)
        until(lambda: not worker.busy, "it has failed")
    worker.close(30.0)
    assert (runs, len(caplog.records)) == (5, 2)


def test_a_deleted_topic_makes_one_line_and_the_other_topic_is_planned(
    memory: MemoryTestCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, a query that read both read nothing any more, and logged that four times a second."""
    gone, kept = memory.topic(3), memory.topic()
    caplog.set_level(logging.WARNING, "marshal_py")
    with memory.connect() as marshal, marshal.planner(memory.group(), [gone, kept], start="earliest") as planner:
        assert planner.ranges.settle(30.0)
        memory.broker.delete_topic(gone)
        memory.fill(kept, 0, 5)
        with planner.batch(100, wait_s=30.0) as batch:
            assert spans(batch) == [(0, 0, 5)]
            batch.commit()
        for _ in range(20):
            assert not planner.batch(100, wait_s=0.0)
        lines = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
        assert len([line for line in lines if "there is no such partition; trying again" in line]) == 1
        assert len([line for line in lines if f"topic_missing {gone}" in line]) == 1
        assert len(lines) <= 3, lines
