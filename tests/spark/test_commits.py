"""Commit reports from a listener in the driver: they ack a batch before the next trigger, and no other batch."""

from __future__ import annotations

import json
import stat
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marshal_py.spark import QueryListener
from marshal_py.spark.stream import commits
from tests.spark.kafka_topic import MakeTopic
from tests.spark.test_stream_source import Query
from tests.support.client_fixtures import until


def progress(query: Query, end: dict[str, Any]) -> Any:
    """A progress event as Spark posts it, with offsets as JSON."""
    source = SimpleNamespace(
        endOffset=json.dumps(end),
        latestOffset=json.dumps(query.reader.reportLatestOffset()),
        numInputRows=0,
        processedRowsPerSecond=0.0,
    )
    return SimpleNamespace(progress=SimpleNamespace(sources=[source], name="q", id="1", batchId=0))


def address(query: Query) -> str:
    report = query.reader.reportLatestOffset()
    assert report is not None
    return str(report["commits"])


def test_a_commit_is_acked_when_a_listener_reports_it(make_topic: MakeTopic) -> None:
    orders = make_topic(2)
    orders.fill(10)
    query = Query(orders)
    query.turn()
    assert orders.positions() == {0: 0, 1: 0}
    QueryListener().onQueryProgress(progress(query, query.offset(0)))
    until(lambda: orders.positions() == {0: 10, 1: 10}, "the batch is acked, and no trigger came")
    orders.fill(5)
    query.turn()
    QueryListener().onQueryProgress(progress(query, query.offset(1)))
    until(lambda: orders.positions() == {0: 15, 1: 15}, "the next one too")
    query.until_idle()
    assert sorted(query.out) == sorted(orders.written)
    query.reader.stop()


def test_only_reports_of_the_batch_that_spark_has_count(make_topic: MakeTopic) -> None:
    """Others are ignored: an idle trigger's report, ranges that were never planned, unreadable reports."""
    orders = make_topic(1)
    orders.fill(10)
    query = Query(orders, max_rows_per_batch=5)
    query.turn()
    assert query.write_ahead()
    query.read()  # its tasks run; Spark has not committed it
    other = {**query.offset(1), "r": {f"{orders.topic}:0": [1, 0, 0, 10]}}
    for end in (query.offset(-1), query.offset(0), query.offset(0), other):
        assert commits.report(address(query), json.dumps(end))
    assert not commits.report(address(query), "no JSON")
    assert commits.report(address(query), "null")
    member = query.reader._member
    assert member is not None
    member.planner.flush()
    assert orders.positions() == {0: 5}
    assert member.query.batches.delivered_ranges(query.offset(1)), "it is still with the query"
    commits.report(address(query), json.dumps(query.offset(1)))
    until(lambda: orders.positions() == {0: 10}, "acked once it was reported")
    query.reader.stop()


def test_reports_may_come_while_the_query_plans_and_reads(make_topic: MakeTopic) -> None:
    """Reports come early, late, twice, and of all batches at any time; every message still comes once."""
    orders = make_topic(3)
    orders.fill(60)
    query = Query(orders, max_rows_per_batch=6)
    ended = threading.Event()

    def send_reports() -> None:
        while not ended.is_set():
            for end in query.offsets[: query.commits]:
                commits.report(address(query), end)

    reporter = threading.Thread(target=send_reports)
    query.turn()
    reporter.start()
    try:  # beside a thread that never rests, a member may heartbeat late; it then plans nothing for a moment
        until(lambda: not query.turn() and len(query.out) >= len(orders.written), "all of it was read")
    finally:
        ended.set()
        reporter.join()
    assert sorted(query.out) == sorted(orders.written)
    assert query.commits >= 30
    until(lambda: orders.positions() == {0: 60, 1: 60, 2: 60}, "all of it is acked")
    query.reader.stop()


def test_the_socket_is_private_and_removed_with_the_process(make_topic: MakeTopic) -> None:
    orders = make_topic(1)
    orders.fill(1)
    query = Query(orders)
    query.turn()
    where = Path(address(query))
    assert stat.S_IMODE(where.parent.stat().st_mode) == 0o700
    query.reader.stop()
    assert not where.parent.exists()
    assert not commits.report(str(where), "{}"), "the process is gone: the report fails"


def test_without_a_socket_commits_are_acked_at_the_next_trigger(
    make_topic: MakeTopic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: Any) -> str:
        raise OSError("no space left")

    orders = make_topic(1)
    orders.fill(5)
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    query = Query(orders)
    query.turn()
    QueryListener().onQueryProgress(progress(query, query.offset(0)))
    assert orders.positions() == {0: 0}
    query.until_idle()
    assert orders.positions() == {0: 5}
    query.reader.stop()
