"""Fixtures for tests that need a real Kafka, and the line at the end of a run that says which Kafka it was.

This is a pytest plugin, loaded by tests/conftest.py, so that tests/kafka and tests/spark share one broker. A cluster
lives as long as the session. With pytest-xdist each worker has its own, and the last line names all of them. Tests fail
if no Kafka can be started: no test in these folders may be skipped, and the last line counts those that were.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic  # confluent_kafka.admin has it too, but its types do not export it

from tests.support.jars import FETCH_TIMEOUT_S
from tests.support.kafka import Cluster, TopicFactory, start_cluster, wait_until

TESTS = Path(__file__).parents[1]
FOLDERS = (TESTS / "kafka", TESTS / "spark")
DESCRIPTIONS = pytest.StashKey[list[str]]()
OUTPUT = "kafka"  # the key under which a worker of pytest-xdist sends its descriptions to the process that prints
ADMIN_TIMEOUT_S = 30.0  # Creating a topic takes 0.1 s on a whole cluster, some seconds while a broker is being lost.
WARM_UP_TIMEOUT_S = 60.0  # The first group on a cluster waits 2 to 4 s for its coordinator's topic.
FIRST_TEST_TIMEOUT_S = FETCH_TIMEOUT_S + 120.0  # Once per machine one process fetches the jars, and the others wait.


def pytest_configure(config: pytest.Config) -> None:
    config.stash[DESCRIPTIONS] = []
    config.addinivalue_line("markers", "node_control: kills or freezes brokers; needs a cluster that the harness owns")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around pytest-timeout's, which reads the marks and starts its timer
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Raises the timeout of tests until this process has a cluster, because they may have to wait for the jars.

    pytest-timeout counts fixtures as part of the test.
    """
    if _needs_kafka(item.path) and not item.config.stash[DESCRIPTIONS]:
        item.add_marker(pytest.mark.timeout(FIRST_TEST_TIMEOUT_S), append=False)
    return (yield)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output[OUTPUT] = session.config.stash[DESCRIPTIONS]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    output: dict[str, Any] = getattr(node, "workeroutput", None) or {}  # A worker that crashed has no output.
    node.config.stash[DESCRIPTIONS].extend(output.get(OUTPUT, []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ran, skipped = set(), set()
    for category, reports in terminalreporter.stats.items():
        for report in reports:
            # Other plugins put other objects into these lists; only reports of tests and files of these folders count.
            path = getattr(report, "fspath", None)
            if path is None or not _needs_kafka(config.rootpath / path):
                continue
            if category == "skipped":
                skipped.add(report.nodeid)
            elif getattr(report, "when", None) == "call":
                ran.add(report.nodeid)
    if not ran and not skipped:
        return
    started: list[str] = config.stash[DESCRIPTIONS]
    which = " and ".join(dict.fromkeys(started)) or "no cluster was started"
    terminalreporter.write_line(f"kafka: {which}, {len(ran)} tests, {len(skipped)} skipped")


def _needs_kafka(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in FOLDERS)


@pytest.fixture(scope="session")
def kafka(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """One node, warmed up, shared by all tests. Use fresh topics and groups."""
    yield from _session_cluster(pytestconfig, nodes=1)


@pytest.fixture(scope="session")
def kafka3(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """Three nodes, warmed up, replication 3 and min.insync.replicas 2. All three run at the start of each test."""
    yield from _session_cluster(pytestconfig, nodes=3)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> Iterator[TopicFactory]:
    """Makes topics, by default on the one-node cluster, and deletes them after the test."""
    made: list[tuple[Cluster, str]] = []

    def make(partitions: int = 1, *, cluster: Cluster | None = None, config: Mapping[str, str] | None = None) -> str:
        where: Cluster = request.getfixturevalue("kafka") if cluster is None else cluster
        name = f"test-{uuid.uuid4().hex[:12]}"
        _create_topic(where, name, partitions, config or {})
        made.append((where, name))
        return name

    yield make
    for where, name in made:
        # Not waited for, because no test uses the name again. A failure only costs space in a temporary folder.
        _admin(where).delete_topics([name])


def _session_cluster(config: pytest.Config, nodes: int) -> Iterator[Cluster]:
    with start_cluster(nodes) as cluster:
        config.stash[DESCRIPTIONS].append(cluster.description)
        _warm_up(cluster)
        yield cluster


def _admin(cluster: Cluster) -> AdminClient:
    return AdminClient({"bootstrap.servers": cluster.bootstrap})


def _create_topic(cluster: Cluster, name: str, partitions: int, config: Mapping[str, str]) -> None:
    """Creates a topic with the broker's replication. Returns when all partitions have leaders and in-sync replicas."""
    admin = _admin(cluster)  # Kept in a variable: otherwise the client is destroyed while its request runs.
    new = NewTopic(name, num_partitions=partitions, config=dict(config))
    admin.create_topics([new], request_timeout=ADMIN_TIMEOUT_S)[name].result(ADMIN_TIMEOUT_S)

    def usable() -> bool:
        try:
            found = admin.list_topics(name, timeout=ADMIN_TIMEOUT_S).topics[name].partitions.values()
        except KafkaException:
            return False
        whole = [p for p in found if p.leader > 0 and p.error is None and len(p.isrs) == len(p.replicas)]
        return len(whole) == partitions

    wait_until(usable, ADMIN_TIMEOUT_S, f"topic {name} has {partitions} partitions with leaders")


def _warm_up(cluster: Cluster) -> None:
    """Creates the first consumer group, for which the brokers create the offsets topic; that takes seconds."""
    name = f"warm-up-{uuid.uuid4().hex[:12]}"
    _create_topic(cluster, name, 1, {})
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": name, "enable.auto.commit": False})
    try:
        consumer.subscribe([name])

        def assigned() -> bool:
            consumer.poll(0.1)
            return bool(consumer.assignment())

        wait_until(assigned, WARM_UP_TIMEOUT_S, "the first consumer group gets its partition")
    finally:
        consumer.close()
    _admin(cluster).delete_topics([name])
