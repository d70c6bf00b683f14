"""Consumers as processes on a real Kafka, killed, stopped, and given forged records; each run is judged.

Each scenario has its own data topic, group and coordination topic. The judge (tests/support/judge.py) must find no
violation, and enough deliveries and take-overs to prove something. No test asserts a time; the report of a run prints
times (pytest -rP shows it for tests that passed).
"""

from __future__ import annotations

import contextlib
import random
import secrets
from typing import Any

import pytest
from confluent_kafka import KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]  # re-exported, unnamed
from confluent_kafka.cimpl import NewTopic

from marshal_sim.oracle.oracle import Oracle
from tests.support.evidence import Record
from tests.support.judge import Judgement
from tests.support.kafka import Cluster, TopicFactory, wait_until
from tests.support.process_scenario import DEADLINE_S, MakeScenario, ProcessScenario
from tests.support.recorder import bounds, delete_records, plain_consumer

ADMIN_TIMEOUT_S = 30.0
MIXED_TIMEOUT_S = 400.0  # pytest's limit for the mixed run; a machine with other work needs a multiple of its time
# The mixed run continues until there were so many take-overs and deliveries: more than it asks the judge for.
SHORT, LONG = (8, 1_500), (25, 5_000)

# Every wait has its own deadline and says what was missing; this is only the last resort.
pytestmark = pytest.mark.timeout(4 * DEADLINE_S)


def passed(judgement: Judgement) -> None:
    print(judgement)
    assert judgement.ok, str(judgement)


def opened(scenario: ProcessScenario, workers: int, partitions: int, **settings: Any) -> list[str]:
    """Starts a producer and workers. Returns the workers' names once all partitions are owned and messages flow."""
    producing = {key: settings.pop(key) for key in ("per_second",) if key in settings}
    scenario.produce(**producing)
    names = scenario.start_workers(workers, **settings)
    scenario.wait(lambda: scenario.all_owned(partitions), "every partition has an owner")
    scenario.await_begun(100)
    return names


def ended(scenario: ProcessScenario, session: int) -> bool:
    group = scenario.group_state()
    return group is not None and session not in group.sessions


def largest_owner(scenario: ProcessScenario, names: list[str]) -> str:
    """The worker that owns the most partitions."""
    owned = list(scenario.owned().values())
    return max(names, key=lambda name: owned.count(scenario.processes[name].client))


# ---------------------------------------------------------------------------------------------------------------------
# Faults of consumers


@pytest.mark.parametrize("style", ["single", pytest.param("batch", marks=pytest.mark.proof)])
def test_kill_9(kafka: Cluster, topic: TopicFactory, scenario: MakeScenario, style: str) -> None:
    run = scenario(kafka, [topic(6)], style=style)
    names = opened(run, 3, 6)
    victim = largest_owner(run, names)
    session = run.session_of(victim)
    run.kill(victim)
    run.wait(lambda: ended(run, session) and run.all_owned(6), "the survivors own the partitions of the killed one")
    run.await_begun(200)
    run.start_worker(victim)
    run.await_joined(victim)
    run.await_begun(50, victim)
    passed(run.finish(takeovers=1, deliveries=300))


def test_sigstop_past_the_lease_and_sigcont(kafka: Cluster, topic: TopicFactory, scenario: MakeScenario) -> None:
    run = scenario(kafka, [topic(6)])
    victim = largest_owner(run, opened(run, 3, 6))
    session = run.session_of(victim)
    run.stop(victim)
    run.wait(lambda: ended(run, session), "the stopped one is evicted")
    run.await_begun(100)
    run.cont(victim)
    run.wait(lambda: run.session_of(victim) > session, "it joins again")
    run.await_begun(20, victim)
    passed(run.finish(takeovers=1, deliveries=200))


def test_sigterm(kafka: Cluster, topic: TopicFactory, scenario: MakeScenario) -> None:
    run = scenario(kafka, [topic(6)])
    names = opened(run, 3, 6)
    run.term(names[0])
    assert run.await_gone(names[0]) == 0
    run.wait(lambda: run.all_owned(6), "the others own everything")
    run.await_begun(100)
    judgement = run.finish(deliveries=200)
    passed(judgement)
    assert judgement.counters["takeovers"] == 0
    assert judgement.counters["redelivered"] == 0


# ---------------------------------------------------------------------------------------------------------------------
# Faults of brokers


@pytest.mark.proof
@pytest.mark.node_control
def test_the_only_broker_dies_and_comes_back(kafka: Cluster, topic: TopicFactory, scenario: MakeScenario) -> None:
    run = scenario(kafka, [topic(4)])
    opened(run, 3, 4)
    run.record_fault("broker_kill", "1")
    try:
        kafka.kill(1)
    finally:
        kafka.restart(1)
    run.record_fault("broker_up", "1")
    run.await_begun(300)
    judgement = run.finish(deliveries=300)
    passed(judgement)


# ---------------------------------------------------------------------------------------------------------------------
# Changes of topics


def test_the_coordination_topic_is_deleted_and_recreated(
    kafka: Cluster, topic: TopicFactory, scenario: MakeScenario
) -> None:
    run = scenario(kafka, [topic(4)])
    names = opened(run, 2, 4)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.delete_topics([run.coordination_topic])[run.coordination_topic].result(ADMIN_TIMEOUT_S)
    run.record_fault("recreated")  # from now on no heartbeat is accepted; one may have been until the answer came
    settings = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}

    def created() -> bool:
        request = NewTopic(run.coordination_topic, num_partitions=2, config=settings)
        with contextlib.suppress(Exception):  # Kafka deletes in the background: until then the name is taken.
            admin.create_topics([request])[run.coordination_topic].result(ADMIN_TIMEOUT_S)
            return True
        return False

    wait_until(created, DEADLINE_S, "the topic exists again")
    for name in names:
        assert run.await_gone(name, DEADLINE_S) == 3
    judgement = run.finish(deliveries=100, expect_settled=False)
    passed(judgement)
    for name in names:
        failures = [f for f in run.evidence.failures if f.client == run.processes[name].client and f.closed]
        assert failures
        assert "CoordinationError" in failures[0].names
    assert accepted_in(kafka, run.coordination_topic) == []


def accepted_in(cluster: Cluster, topic: str) -> list[str]:
    """The types of the records in a coordination topic that a fresh oracle accepts."""
    consumer = plain_consumer(cluster.bootstrap)
    found: list[str] = []
    try:
        for log in range(2):
            low, high = bounds(consumer, topic, log)
            oracle = Oracle()
            if low == high:
                continue
            consumer.assign([TopicPartition(topic, log, 0)])
            values: list[Record] = []

            def enough(values: list[Record] = values, high: int = high) -> bool:
                values.extend(
                    Record(m.offset() or 0, m.value(), 0, 0) for m in consumer.consume(100, 0.2) if m.error() is None
                )  # type: ignore[arg-type]
                return len(values) >= high

            wait_until(enough, ADMIN_TIMEOUT_S, f"{topic}:{log} is read")
            for record in values:
                verdict = oracle.apply(record.offset, record.value)
                if verdict.outcome == "accepted" and verdict.record is not None:
                    found.append(verdict.record.type)
    finally:
        consumer.close()
    return found


def test_topics_grow(kafka: Cluster, topic: TopicFactory, scenario: MakeScenario) -> None:
    data = topic(2)
    run = scenario(kafka, [data])
    opened(run, 3, 2)
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    growth = [NewPartitions(data, 5), NewPartitions(run.coordination_topic, 7)]
    for future in admin.create_partitions(growth).values():
        future.result(ADMIN_TIMEOUT_S)
    run.wait(lambda: len(run.evidence.topics) == 5, "the producer writes to the new partitions")
    run.wait(lambda: run.all_owned(5), "the new partitions have owners")
    run.start_worker("late")
    run.await_joined("late")
    run.await_begun(300)
    passed(run.finish(deliveries=500))


def test_records_are_deleted_under_a_slow_consumer(kafka: Cluster, topic: TopicFactory, scenario: MakeScenario) -> None:
    data = topic(1)
    run = scenario(kafka, [data], style="single", handler_ms=[20], fails=0.0)
    # It may have fifty unacked messages, so it must fetch again, from an offset that is deleted by then.
    run.start_worker("slow", bounds={"unacked": 50, "prefetch": 20})
    run.await_joined("slow")
    run.produce(per_second=2_000, count=1_500)
    run.wait(lambda: len(run.evidence.topics.get((data, 0), ())) == 1_500, "everything is produced")
    run.await_begun(20)
    delete_records(kafka.bootstrap, data, 0, 1_000)
    judgement = run.finish(deliveries=500)
    passed(judgement)
    lost = judgement.lost_ranges[run.group, data, 0]
    assert lost
    assert lost[-1][1] == 1_000


# ---------------------------------------------------------------------------------------------------------------------
# Forged records in the log


@pytest.mark.proof
def test_garbage_and_replayed_records(kafka: Cluster, topic: TopicFactory, scenario: MakeScenario) -> None:
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    run = scenario(kafka, [topic(4)])
    names = opened(run, 3, 4)
    victim = largest_owner(run, names)
    session = run.session_of(victim)
    run.kill(victim)
    run.await_begun(100)
    log = run.recorder.log_of(run.group)
    assert log is not None
    for _ in range(6):
        genuine = [record for record in run.recorder.logs[log] if (log, record.offset) not in run.evidence.forged]
        values = [forged(chance, [record.value for record in genuine if record.value]) for _ in range(250)]
        write_raw(run, kafka, values, chance)
        run.await_begun(50)
    run.wait(lambda: ended(run, session), "the killed one is evicted, however often its heartbeats are replayed")
    run.start_worker(victim)
    run.await_joined(victim)
    run.await_begun(100)
    judgement = run.finish(takeovers=1, deliveries=500)
    passed(judgement)
    assert judgement.counters["garbage"] >= 300
    assert judgement.counters["rejected"] >= 50


def forged(chance: random.Random, old: list[bytes]) -> bytes | None:
    """Garbage of several kinds, or a replayed record."""
    value = chance.choice(old)
    match chance.randrange(8):
        case 0:
            return None
        case 1:
            return chance.randbytes(chance.randrange(200))
        case 2:
            return value[: chance.randrange(len(value))]
        case 3:
            at = chance.randrange(len(value))
            return value[:at] + bytes([value[at] ^ (1 << chance.randrange(8))]) + value[at + 1 :]
        case 4:
            return b"Mr\x01" + chance.randbytes(60)
        case _:
            return value


def write_raw(run: ProcessScenario, cluster: Cluster, values: list[bytes | None], chance: random.Random) -> None:
    """Writes to all logs of the coordination topic, and records the offsets for the judge."""
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "acks": "all"})

    def landed(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        run.evidence.forged.add((message.partition() or 0, message.offset() or 0))

    log = run.recorder.log_of(run.group)
    for value in values:
        number = log if chance.random() < 0.8 else chance.randrange(2)
        producer.produce(run.coordination_topic, value, partition=number, on_delivery=landed)
    assert producer.flush(ADMIN_TIMEOUT_S) == 0


# ---------------------------------------------------------------------------------------------------------------------
# At most once


@pytest.mark.parametrize(
    "written", [True, pytest.param(False, marks=pytest.mark.proof)], ids=["in the log", "not yet written"]
)
def test_at_most_once_killed_between_the_grant_and_its_reading(
    kafka: Cluster, topic: TopicFactory, scenario: MakeScenario, written: bool
) -> None:
    run = scenario(kafka, [topic(4)], delivery="at_most_once", bounds={"grant": 40})
    run.produce(per_second=600)
    for number in range(3):
        name = f"w{number}"
        run.start_worker(name, die_at_grant=0 if number == 0 else 5 * number, die_after_write=written)
        run.await_joined(name)
    for name in ("w1", "w2"):
        run.wait(lambda name=name: not run.processes[name].running, f"{name} has died after sending its grant")
        assert run.processes[name].popen.returncode == -9
    run.wait(lambda: run.all_owned(4), "the survivor owns everything")
    run.await_begun(300)
    passed(run.finish(takeovers=2, deliveries=300))


@pytest.mark.proof
def test_at_most_once_killed_at_random(kafka: Cluster, topic: TopicFactory, scenario: MakeScenario) -> None:
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    run = scenario(kafka, [topic(6)], delivery="at_most_once", seed=seed % 1_000)
    names = opened(run, 3, 6, per_second=600)
    for _ in range(4):
        victim = chance.choice(names)
        session = run.session_of(victim)
        run.await_begun(chance.randrange(1, 80), victim)
        run.kill(victim)
        run.start_worker(victim)
        run.await_joined(victim)
        run.wait(lambda session=session: ended(run, session), "the killed one is evicted")
    passed(run.finish(takeovers=4, deliveries=1_000))


# ---------------------------------------------------------------------------------------------------------------------
# All faults together


@pytest.mark.proof
@pytest.mark.timeout(MIXED_TIMEOUT_S)
@pytest.mark.parametrize("size", [SHORT, LONG], ids=["short", "long"])
def test_a_mixed_run(kafka: Cluster, topic: TopicFactory, scenario: MakeScenario, size: tuple[int, int]) -> None:
    """Random kills, stops, restarts and clean ends, until there are enough take-overs and deliveries to judge."""
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    run = scenario(kafka, [topic(10), topic(2)], seed=seed % 1_000)
    names = opened(run, 5, 12, per_second=400)
    (takeovers, deliveries), taken = size, 0
    while taken < takeovers or run.begun() < deliveries:
        victim = chance.choice(names)
        run.wait(lambda victim=victim: run.session_of(victim) >= 0, f"{victim} is in the group")
        run.await_begun(chance.randrange(1, 150))
        session, client = run.session_of(victim), run.processes[victim].client
        owned = list(run.owned().values()).count(client)
        match chance.choice(["kill", "kill", "kill", "stop", "stop", "term"]):
            case "kill":
                run.kill(victim)
                if chance.random() < 0.5:
                    run.start_worker(victim)
                run.wait(lambda session=session: ended(run, session), f"{victim} is evicted")
                taken += owned
                if not run.processes[victim].running:
                    run.start_worker(victim)
                run.await_joined(victim)
            case "stop":
                run.stop(victim)
                # Sometimes it continues before its session ends, sometimes long after.
                if chance.random() < 0.7:
                    run.wait(lambda session=session: ended(run, session), f"{victim} is evicted")
                    taken += owned
                else:
                    run.await_begun(chance.randrange(1, 400))
                run.cont(victim)
            case "term":
                run.term(victim)
                assert run.await_gone(victim) == 0
                run.start_worker(victim)
                run.await_joined(victim)
    passed(run.finish(takeovers=takeovers * 4 // 5, deliveries=deliveries // 5))
