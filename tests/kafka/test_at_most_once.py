"""At-most-once mode on a real Kafka: a consumer that stops cleanly or releases partitions loses and repeats nothing.

The consumers are processes of tests/support/failing_handler.py. They handle the first messages without delay, so that
the library asks for large grants, and then take 10 ms per message: what was granted and not handled must be given back.
The last consumer reads the rest. The tests check each offset of the topic, and tests/support/judge.py the whole run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from marshal_sim.oracle.oracle import Oracle, Verdict
from tests.support.commands import Commands
from tests.support.evidence import Record
from tests.support.journal import Tail
from tests.support.kafka import Cluster, TopicFactory
from tests.support.process_scenario import DEADLINE_S, MakeScenario, ProcessScenario

PARTITIONS = 3
OPEN = 50  # a partition's grants count as open if so many messages were granted and not handed over
BACKLOG = 2_400
QUICK = 300  # messages that are handled without delay
# In a second such a handler takes a hundred messages, but thousands were granted, from all partitions.
SLOW = {"handler_ms": [10], "quick": QUICK, "bounds": {"prefetch": BACKLOG}}
USER = "tests.support.failing_handler"
THIRD_NS = 300_000_000  # of the interval of 1 s, less the time that may pass between reading the clock and sending

pytestmark = pytest.mark.timeout(4 * DEADLINE_S)


def with_backlog(
    kafka: Cluster, topic: TopicFactory, scenario: MakeScenario, partitions: int = PARTITIONS
) -> ProcessScenario:
    """A scenario whose topic has a backlog, without a consumer yet."""
    run = scenario(kafka, [topic(partitions)], delivery="at_most_once", coordination_partitions=1, style="single")
    run.produce(per_second=100_000, count=BACKLOG)
    run.wait(lambda: sum(map(len, run.evidence.topics.values())) == BACKLOG, "the backlog is there")
    return run


def joined(run: ProcessScenario, name: str, **settings: Any) -> None:
    run.start_worker(name, USER, **settings)
    run.await_joined(name)


def await_grants(run: ProcessScenario, places: int = 1) -> None:
    """Waits until the handlers are slow and at least `places` partitions have open grants.

    A consumer that releases such a partition has something to give back.
    """

    def open_grants() -> list[int]:
        seen = Counter(delivery.partition for delivery in run.evidence.deliveries)
        group = run.group_state()
        return [part.position - seen[number] for (_, number), part in list(group.partitions.items())] if group else []

    run.wait(lambda: run.begun() > QUICK and sum(there >= OPEN for there in open_grants()) >= places, "grants are open")


def accepted(run: ProcessScenario, kind: str) -> Iterator[tuple[Record, Verdict]]:
    """The accepted records of a kind, by the oracle."""
    oracle = Oracle()
    for record in list(run.recorder.logs[0]):
        verdict = oracle.apply(record.offset, record.value)
        if verdict.outcome == "accepted" and verdict.record is not None and verdict.record.type == kind:
            yield record, verdict


def given_back(run: ProcessScenario) -> int:
    """The number of offsets that were granted, not handed over, and given back with a Release (F6.3)."""
    releases = [verdict.record.fields for _, verdict in accepted(run, "ReleasingPartition") if verdict.record]
    return sum(fields["observed"] - fields["give"] for fields in releases if fields["observed"] >= 0)


def each_once(run: ProcessScenario) -> None:
    """Every message of the topic was handed over exactly once, and no consumer failed."""
    judgement = run.finish()
    print(judgement)
    assert judgement.ok, str(judgement)
    seen = Counter((delivery.partition, delivery.offset) for delivery in run.evidence.deliveries)
    made = {(number, offset) for (_, number), offsets in run.evidence.topics.items() for offset in offsets}
    assert len(made) == BACKLOG
    assert sorted(made - seen.keys()) == [], "never handed over"
    assert [place for place, times in seen.items() if times > 1] == [], "handed over twice"
    assert run.evidence.failures == []


def read_the_rest(run: ProcessScenario) -> None:
    """Lets another consumer read the remaining messages, and checks that each was handed over once."""
    joined(run, "rest", handler_ms=[0])
    run.wait(lambda: run.begun() >= BACKLOG, "everything is handed over")
    each_once(run)


@pytest.mark.parametrize("style", [pytest.param("single", marks=pytest.mark.proof), "batch"])
def test_sigterm_loses_nothing(kafka: Cluster, topic: TopicFactory, scenario: MakeScenario, style: str) -> None:
    run = with_backlog(kafka, topic, scenario)
    joined(run, "stopped", style=style, **SLOW)
    await_grants(run)
    run.term("stopped")
    assert run.await_gone("stopped") == 0
    run.scan()
    assert run.begun() < BACKLOG, "no message was left that could be lost"
    read_the_rest(run)
    assert given_back(run) > 0, "no grant was open at the stop, so the test shows nothing"


@pytest.mark.proof
def test_two_consumers_that_are_stopped_one_after_the_other_lose_nothing(
    kafka: Cluster, topic: TopicFactory, scenario: MakeScenario
) -> None:
    """The second consumer gets the partitions of the first while it stops itself."""
    run = with_backlog(kafka, topic, scenario)
    joined(run, "first", **SLOW)
    joined(run, "second", **SLOW)
    run.await_begun(20, "second")
    run.wait(lambda: min(run.begun("first"), run.begun("second")) > QUICK, "both are slow by now")
    await_grants(run)
    run.term("first")
    run.term("second")
    assert [run.await_gone(name) for name in ("first", "second")] == [0, 0]
    read_the_rest(run)
    assert given_back(run) > 0


@pytest.mark.proof
@pytest.mark.parametrize("leaves_by", ["block", "drain"])
def test_the_end_of_the_block_and_drain_lose_nothing(
    kafka: Cluster, topic: TopicFactory, scenario: MakeScenario, leaves_by: str
) -> None:
    run = with_backlog(kafka, topic, scenario)
    # `drain` hands over what was prefetched: with the default of a thousand messages, ten seconds of such handlers.
    fetched = {"bounds": {"prefetch": 200}} if leaves_by == "drain" else {}
    run.start_worker("leaver", USER, leaves_after=QUICK + 20, leaves_by=leaves_by, **{**SLOW, **fetched})
    assert run.await_gone("leaver") == 0
    run.scan()
    assert run.begun() < BACKLOG
    read_the_rest(run)


def test_a_planned_move_loses_nothing(kafka: Cluster, topic: TopicFactory, scenario: MakeScenario) -> None:
    run = with_backlog(kafka, topic, scenario)
    # With batches it prefetches, and so has grants of every partition, whichever moves.
    joined(run, "owner", **SLOW, style="batch", batch_max=10)
    await_grants(run, PARTITIONS)
    joined(run, "newcomer", **SLOW)
    run.await_begun(20, "newcomer")
    run.hurry("owner")
    run.hurry("newcomer")
    run.wait(lambda: run.begun() >= BACKLOG, "everything is handed over")
    each_once(run)
    assert given_back(run) > 0


def test_a_pause_in_the_middle_loses_nothing(kafka: Cluster, topic: TopicFactory, scenario: MakeScenario) -> None:
    run = with_backlog(kafka, topic, scenario)
    joined(run, "paused", **SLOW)
    await_grants(run)
    marshal(run, "pause", run.group, "--for", "10m", "--yes")
    assert run.owned() == {}
    marshal(run, "resume", run.group)
    run.hurry("paused")
    run.wait(lambda: run.begun() >= BACKLOG, "everything is handed over")
    each_once(run)
    assert given_back(run) > 0


def marshal(run: ProcessScenario, *arguments: str) -> None:
    """Runs a command, and waits until the recorder has read what it wrote."""
    done = Commands(run.bootstrap, run.coordination_topic).run(*arguments)
    assert done.returncode == 0, done.stderr
    run.wait(run.recorder.read_to_the_end(), "the recorder has read what the command wrote")


def test_one_grant_record_per_session_is_under_way(kafka: Cluster, topic: TopicFactory, scenario: MakeScenario) -> None:
    """T17, D2: a backlog in twelve partitions, then 300 messages per second; no grant record is sent too early."""
    run = with_backlog(kafka, topic, scenario, partitions=12)
    joined(run, "reader", handler_ms=[0], watch_grants=True)
    run.wait(lambda: run.begun() == BACKLOG, "the backlog is read")
    run.produce("producer of a trickle", per_second=300, count=900)
    run.wait(lambda: run.begun() == BACKLOG + 900, "the trickle is over")
    lines = Tail(run.processes["reader"].tail.path).read()
    judgement = run.finish()
    assert judgement.ok, str(judgement)
    asked = [line for line in lines if line["e"] == "asks"]
    answered = {line["nonce"]: line["ns"] for line in lines if line["e"] == "answered"}
    for before, line in pairwise(asked):
        read_ns = answered.get(before["nonce"], line["ns"])
        overdue = line["ns"] - before["ns"] >= THIRD_NS
        assert read_ns < line["ns"] or overdue, "two records of one session were under way at once"
    granted = [verdict.granted for _, verdict in accepted(run, "ClaimingMessages")]
    assert len({line["nonce"] for line in asked}) == len(asked)
    assert max(map(len, granted)) > 1, "one record asks for all partitions"
    print(f"{len(asked)} records, {sum(map(len, granted))} ranges, {run.begun()} messages")
