"""Spark drivers that are killed with everything they started: what is lost, what comes twice, who takes over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from marshal_py.protocol.member.advisory import UNCOMMITTED
from marshal_py.protocol.wire.records import Note
from tests.spark.job import DEADLINE_S, ROOT, Job, Rows
from tests.spark.kafka_topic import INTERVAL_S, KafkaTopic, MakeTopic
from tests.support.client_fixtures import until

BATCH = 120  # rows


def doubled(rows: Rows) -> Rows:
    return [row for row, times in Counter(rows).items() if times > 1]


@pytest.mark.proof
@pytest.mark.timeout(400)
def test_at_least_once_killed_twice_once_without_its_checkpoint(make_topic: MakeTopic, tmp_path: Path) -> None:
    """Nothing is missing. At most the batch that was in the sink comes twice, also without the checkpoint."""
    orders = make_topic(4)
    orders.fill(100)
    options = {"max_rows_per_batch": str(BATCH)}
    with Job(orders, tmp_path, "one", options=options, hold_at=2) as one:
        held = one.await_line("held")["rows"]
        one.kill()
    with Job(orders, tmp_path, "two", options=options, hold_at=2, hold_before=True) as two:
        held_again = two.await_line("held")["rows"]
        two.kill()
    rows = [*one.rows, *two.rows]
    assert sorted(two.rows) == sorted(map(tuple, held)), "the batch in the sink is replayed, range for range"
    with Job(orders, tmp_path, "three", options=options, checkpoint="another", available_now=True) as three:
        three.finish()
    assert set(map(tuple, held_again)) <= set(three.rows), "without its checkpoint the log knows what was not done"
    rows += three.rows
    assert set(rows) == orders.written, "missing 0"
    assert sorted(doubled(rows)) == sorted(map(tuple, held)), "twice: exactly the batch that was in the sink"
    assert len(held) == BATCH
    assert set(orders.positions().values()) == {100}


@pytest.mark.proof
@pytest.mark.timeout(400)
def test_at_most_once_killed_while_the_sink_reads(make_topic: MakeTopic, tmp_path: Path) -> None:
    """Nothing comes twice. At most the batch's ranges are missing, and the log notes them."""
    orders = make_topic(4)
    orders.fill(100)
    options = {"max_rows_per_batch": str(BATCH), "delivery": "at_most_once"}
    with Job(orders, tmp_path, "one", options=options, hold_at=2, hold_before=True) as one:
        held = one.await_line("held")["rows"]
        one.kill()
    with Job(orders, tmp_path, "two", options=options, available_now=True) as two:
        two.finish()
    rows = [*one.rows, *two.rows]
    assert doubled(rows) == []
    assert orders.written - set(rows) == set(map(tuple, held))
    assert len(held) == BATCH
    noted = [
        (note.partition, offset)
        for note in orders.accepted(Note)
        if note.kind == UNCOMMITTED
        for offset in range(note.from_, note.to)
    ]
    assert sorted(noted) == sorted(map(tuple, held))


class Service:
    """A process of `marshal consume`: a member of the same group, without Spark."""

    def __init__(self, orders: KafkaTopic, name: str) -> None:
        command = [
            sys.executable,
            "-B",
            "-m",
            "marshal_py.cli",
            "consume",
            orders.topic,
            "--group",
            orders.group,
            "--json",
            "--client-id",
            name,
            "--heartbeat-interval",
            str(INTERVAL_S),
            "--start",
            "earliest",
            "--coordination-topic",
            orders.log,
            "--bootstrap-servers",
            orders.bootstrap,
        ]
        self.name, self.rows = name, Rows()
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message: dict[str, Any] = json.loads(line)
            self.rows.append((message["partition"], message["offset"]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(signal.SIGTERM)

    def end(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def owners(orders: KafkaTopic) -> Counter[str]:
    """Partitions per live client, from the coordination log."""
    with orders.observe() as observer:
        observer.fold(orders.group)
        for _, group in observer.groups():
            names = {session.id: session.join.client_id for session in group.sessions.values()}
            return Counter(names[part.owner] for part in group.partitions.values() if part.owner in names)
    return Counter()


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_query_and_two_services_share_a_topic_and_survive_each_other(make_topic: MakeTopic, tmp_path: Path) -> None:
    """Twelve partitions, three members. Spark is killed, then a service: nothing is missing, and only messages that the
    dead process had come twice."""
    orders = make_topic(12)
    orders.fill(30)
    orders.connect().close()  # makes the coordination topic
    options = {"client_id": "spark", "max_rows_per_batch": str(BATCH)}

    def shared(*names: str) -> Callable[[], bool]:
        return lambda: sorted(owners(orders)) == sorted(names) and sum(owners(orders).values()) == 12

    with Service(orders, "one") as one, Service(orders, "two") as two:
        with Job(orders, tmp_path, "first", options=options) as first:
            until(lambda: owners(orders) == Counter({"one": 4, "two": 4, "spark": 4}), "a third for each", DEADLINE_S)
            orders.fill(30)
            until(lambda: set(first.rows) | {*one.rows, *two.rows} >= orders.written, "all of it is there", DEADLINE_S)
            orders.fill(20)
            first.kill()
        until(shared("one", "two"), "the services have taken over", DEADLINE_S)
        with Job(orders, tmp_path, "second", options=options) as second:
            until(lambda: owners(orders)["spark"] == 4, "the query has its third again", DEADLINE_S)
            orders.fill(20)
            one.end(signal.SIGKILL)
            until(shared("two", "spark"), "the dead service's partitions are taken over", DEADLINE_S)
            orders.fill(10)
            read = lambda: [*first.rows, *second.rows, *one.rows, *two.rows]  # noqa: E731
            until(lambda: set(read()) >= orders.written, "all of it is there", DEADLINE_S)
            until(lambda: set(orders.positions().values()) == {110}, "all of it is done", DEADLINE_S)
            second.terminate()
    rows = [*first.rows, *second.rows, *one.rows, *two.rows]
    assert set(rows) == orders.written, "missing 0"
    last_batch = {(p, o) for p, o in first.said("batch")[-1]["rows"]}
    assert len(last_batch) <= BATCH
    assert set(doubled(rows)) <= last_batch | set(one.rows), "only what the dead had in their hands comes twice"
