"""At-least-once mode on a real Kafka: what is repeated after a kill -9 and after a handler's timeout; delivery counts.

The consumers are processes of tests/support/failing_handler.py: one never acks a certain message but acks all after it,
one dies of a message. Repeated messages are compared with the progress in the log and the acks in the journals, never
with times.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from marshal_py.protocol.claims import DELIVERIES
from marshal_py.protocol.wire import progress
from marshal_py.protocol.wire.progress import Range
from marshal_sim.oracle.oracle import Oracle, Partition
from tests.support.failing_handler import POISONED
from tests.support.journal import Tail
from tests.support.judge import NS, STAMP_MS
from tests.support.kafka import Cluster, TopicFactory
from tests.support.process_scenario import DEADLINE_S, MakeScenario, ProcessScenario

USER = "tests.support.failing_handler"
QUICK = {"module": USER, "style": "single", "handler_ms": [0]}

pytestmark = pytest.mark.timeout(4 * DEADLINE_S)


def scenario_with(
    kafka: Cluster, topic: TopicFactory, scenario: MakeScenario, messages: int, partitions: int = 1
) -> ProcessScenario:
    """A scenario whose topic has so many messages, without a consumer yet."""
    run = scenario(kafka, [topic(partitions)], coordination_partitions=1)
    run.produce(per_second=100_000, count=messages)
    run.wait(lambda: sum(map(len, run.evidence.topics.values())) == messages, "the messages are there")
    return run


def lines_of(run: ProcessScenario, kind: str) -> list[dict[str, Any]]:
    """The journal lines of this kind of all processes, in the order of time."""
    tails = [Tail(process.tail.path) for process in run.processes.values()]
    return sorted((line for tail in tails for line in tail.read() if line["e"] == kind), key=lambda line: line["ns"])


def partition(run: ProcessScenario) -> Partition | None:
    """The state of the only partition, by the log as far as it was read."""
    group = run.group_state()
    return next(iter(list(group.partitions.values())), None) if group is not None else None


def known(run: ProcessScenario) -> list[Range]:
    """The log's progress ranges above the position."""
    found = partition(run)
    return progress.decode(found.position, found.progress) if found is not None else []


def finished_above(run: ProcessScenario) -> int:
    return sum(to - start for start, to, times in known(run) if not times)


def times_delivered(run: ProcessScenario, offset: int) -> int:
    """How often the log counts this message as delivered."""
    found = partition(run)
    if found is None:
        return 0
    counted = progress.deliveries(found.position, found.attempts, found.in_flight, known(run))
    return next((times for start, to, times in counted if start <= offset < to), 0)


@pytest.mark.proof
def test_a_kill_after_a_long_message_repeats_the_work_of_an_interval(
    kafka: Cluster, topic: TopicFactory, scenario: MakeScenario
) -> None:
    """Ten thousand messages after an unfinished one are finished, and stay finished."""
    held, above = 100, 10_000
    run = scenario_with(kafka, topic, scenario, above + 200)
    run.produce("producer that continues", per_second=500)
    run.start_worker("killed", **QUICK, held=held)
    run.wait(lambda: finished_above(run) >= above, "a heartbeat has reported ten thousand finished messages")
    run.await_begun(100)
    run.kill("killed")
    run.start_worker("successor", **QUICK)
    run.await_begun(300, "successor")
    finish(run, takeovers=1)

    killed = f"killed-{run.processes['killed'].popen.pid}"
    successor = f"successor-{run.processes['successor'].popen.pid}"
    before = {d.offset: d for d in run.evidence.deliveries if d.client == killed}
    again = {d.offset for d in run.evidence.deliveries if d.client == successor} & before.keys()
    reported, sends = last_report(run, killed)
    assert held in again
    assert numbers(run, held) == [1, 2]
    assert again & reported == set(), "finished by the last heartbeat, and delivered again"
    # A heartbeat reports all that was acked when the one before it was sent: two thirds of an interval, at most one.
    assert reported >= {d.offset for d in before.values() if d.ack_ns < sends[-2] - STAMP_MS * NS and d.offset > held}
    since = {d.offset for d in before.values() if d.ack_ns >= sends[-2] - STAMP_MS * NS}
    assert again <= since, "more than the work of an interval and what was in flight"
    assert len(reported) >= above
    print(f"{len(before)} deliveries before, {len(reported)} reported as finished, {len(again)} delivered again")


def last_report(run: ProcessScenario, client: str) -> tuple[set[int], list[int]]:
    """The offsets that a client's last accepted heartbeat reports as finished, and the times of all its heartbeats."""
    oracle, reported, sends = Oracle(), set[int](), []
    for record in run.recorder.logs[0]:
        verdict = oracle.apply(record.offset, record.value)
        if verdict.outcome != "accepted" or verdict.record is None or verdict.record.type != "Heartbeat":
            continue
        group = oracle.groups[run.group]
        session = group.sessions[verdict.record.fields["session"]]
        if session.join["client_id"] == client:
            sends.append(record.sent_ns)
            (part,) = group.partitions.values()
            ranges = progress.decode(part.position, part.progress)
            reported = {offset for start, to, times in ranges if not times for offset in range(start, to)}
    return reported, sends


def finish(run: ProcessScenario, **wanted: int) -> None:
    judgement = run.finish(**wanted)
    print(judgement)
    assert judgement.ok, str(judgement)


def test_a_message_that_is_never_acked_brings_no_other_one_back(
    kafka: Cluster, topic: TopicFactory, scenario: MakeScenario
) -> None:
    """D4: the partition is taken back again and again; messages acked after that one are not delivered again."""
    held, messages, rounds = 20, 200, 4
    run = scenario_with(kafka, topic, scenario, messages)
    run.start_worker("forgetful", **QUICK, held=held, options={"handler_timeout_s": 1.0})
    run.wait(lambda: len(numbers(run, held)) >= rounds, f"{rounds} deliveries of the message")
    run.term("forgetful")
    assert run.await_gone("forgetful") == 0
    assert numbers(run, held)[:rounds] == list(range(1, rounds + 1)), "each of its deliveries is counted"
    begun = Counter(offset for line in lines_of(run, "begin") for offset in line["o"])
    late = Counter(offset for line in lines_of(run, "late") for offset in line["o"])  # whose ack was refused
    assert begun.keys() == set(range(messages))
    repeated = {offset: times for offset, times in begun.items() if offset != held and times > 1 + late[offset]}
    assert repeated == {}, "acked, and delivered again"
    print(f"{begun.total()} deliveries of {messages} messages, {late.total()} late acks")


def numbers(run: ProcessScenario, offset: int) -> list[int]:
    """The numbers of all deliveries of this message, as handlers saw them."""
    return [line["n"] for line in lines_of(run, "begin") if offset in line["o"]]


CRASHES = 5
# One process at a time: the next one declares that the one before is dead (T15).
CRASHER = {**QUICK, "client": "crasher", "options": {"fast_reclaim": True}}


def crashed(run: ProcessScenario, **settings: Any) -> None:
    """Runs a process until it dies of its message."""
    process = run.start_worker("crasher", **{**CRASHER, **settings})
    if settings.get("poison_waits"):
        number = len(numbers(run, settings["poison"])) + 1
        run.wait(lambda: len(numbers(run, settings["poison"])) == number, f"delivery {number}")
        run.wait(lambda: times_delivered(run, settings["poison"]) >= number, f"the log counts delivery {number}")
        run.hurry("crasher")
    run.wait(lambda: not process.running, "it dies of the message")
    assert process.popen.returncode == POISONED, run.describe()


def recovered(run: ProcessScenario, style: str) -> None:
    """The sixth process handles everything."""
    run.start_worker("crasher", **{**CRASHER, "style": style})
    run.wait(run.all_done, "everything is handled")


@pytest.mark.parametrize("style", ["single", pytest.param("batch", marks=pytest.mark.proof)])
def test_five_crashes_on_the_message_at_the_position_are_counted_one_by_one(
    kafka: Cluster, topic: TopicFactory, scenario: MakeScenario, style: str
) -> None:
    """D11, F4.5: only the claims count the deliveries, because each process dies at once, before any heartbeat."""
    run = scenario_with(kafka, topic, scenario, 60)
    for _ in range(CRASHES):
        crashed(run, style=style, poison=0)
    recovered(run, style)
    assert numbers(run, 0) == [1, 2, 3, 4, 5, 6]


def test_what_no_owner_has_delivered_counts_twice_at_most(
    kafka: Cluster, topic: TopicFactory, scenario: MakeScenario
) -> None:
    """D11: each process dies of the first message of a partition, and the other partition has messages, too."""
    run = scenario_with(kafka, topic, scenario, 60, partitions=2)
    for _ in range(CRASHES):
        crashed(run, style="single", poison=0)
    recovered(run, "single")
    first = [(line["p"], line["n"]) for line in lines_of(run, "begin") if line["o"] == [0]]
    assert len(first) == CRASHES + 2, "and once each by the process that survives"
    for number in (0, 1):
        counted = [n for p, n in first if p == number]
        assert all(delivery <= n <= delivery + DELIVERIES for delivery, n in enumerate(counted, 1)), first


@pytest.mark.proof
@pytest.mark.parametrize("style", ["single", "batch"])
def test_five_crashes_on_a_message_in_the_middle_are_counted_one_by_one(
    kafka: Cluster, topic: TopicFactory, scenario: MakeScenario, style: str
) -> None:
    """D11: each process dies once the log counts the delivery; in a batch, also those of the messages after it."""
    poison, messages = 25, 60
    run = scenario_with(kafka, topic, scenario, messages)
    for _ in range(CRASHES):
        crashed(run, style=style, poison=poison, poison_waits=True)
    recovered(run, style)
    assert numbers(run, poison) == [1, 2, 3, 4, 5, 6]
    for offset in range(messages):
        assert numbers(run, offset) == sorted(numbers(run, offset))


@pytest.mark.proof
def test_crashes_before_any_heartbeat_never_lower_a_count(
    kafka: Cluster, topic: TopicFactory, scenario: MakeScenario
) -> None:
    """D11: a process that dies at once in a batch may not be counted, but the count never falls or exceeds."""
    poison = 25
    run = scenario_with(kafka, topic, scenario, 60)
    for _ in range(CRASHES):
        crashed(run, style="batch", poison=poison)
    recovered(run, "batch")
    counted = numbers(run, poison)
    assert len(counted) == CRASHES + 1
    assert counted == sorted(counted)
    assert all(number <= delivery for delivery, number in enumerate(counted, 1))


@pytest.mark.proof
@pytest.mark.parametrize("style", ["single", "batch"])
def test_a_message_that_kills_every_owner_at_once_is_counted_in_the_end(
    kafka: Cluster, topic: TopicFactory, scenario: MakeScenario, style: str
) -> None:
    """D11: no owner lived to report the finished messages before it, so messages are reported one by one."""
    poison, lives = 25, 0
    run = scenario_with(kafka, topic, scenario, 60)
    while max(numbers(run, poison), default=0) < 6:
        crashed(run, style=style, poison=poison)
        lives += 1
        assert lives <= 20, numbers(run, poison)
    recovered(run, style)
    others = [number for offset in range(60) if offset != poison for number in numbers(run, offset)]
    assert max(others) <= 4, "the counts of messages that kill no owner"
    print(f"{lives} lives: {numbers(run, poison)}")
