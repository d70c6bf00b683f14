"""Fixtures for tests that need a real Kafka, and the line at the end of a run that says which Kafka it was.

This is a pytest plugin, loaded by tests/conftest.py, so that tests/kafka and tests/spark share one broker. It lives as
long as the session; three nodes live as long as their file, because they take an eighth of a core even at rest. With
pytest-xdist each worker has its own, and the last line names all of them. Tests fail if no Kafka can be started: no
test in these folders may be skipped, and the last line counts those that were.
"""

from __future__ import annotations

import uuid
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from tests.support.jars import FETCH_TIMEOUT_S
from tests.support.kafka import Cluster, TopicFactory, start_cluster
from tests.support.kafka_topics import create_topic, join_first_group

TESTS = Path(__file__).parents[1]
FOLDERS = (TESTS / "kafka", TESTS / "spark")
DESCRIPTIONS = pytest.StashKey[list[str]]()
OUTPUT = "kafka"  # the key under which a worker of pytest-xdist sends its descriptions to the process that prints
FIRST_TEST_TIMEOUT_S = FETCH_TIMEOUT_S + 120.0  # Once per machine one process fetches the jars, and the others wait.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-kafka", action="store_true", help="tests/cli/test_partitioned.py on Apache Kafka")


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
    yield from _warm_cluster(pytestconfig, nodes=1)


@pytest.fixture(scope="module")
def kafka3(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    """Three nodes, warmed up, replication 3 and min.insync.replicas 2. All three run at the start of each test."""
    yield from _warm_cluster(pytestconfig, nodes=3)


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> Iterator[TopicFactory]:
    """Makes topics, by default on the one-node cluster, and deletes them after the test."""
    made: list[tuple[Cluster, str]] = []

    def make(partitions: int = 1, *, cluster: Cluster | None = None, config: Mapping[str, str] | None = None) -> str:
        where: Cluster = request.getfixturevalue("kafka") if cluster is None else cluster
        name = f"test-{uuid.uuid4().hex[:12]}"
        admin = _admin(where)  # kept in a variable: otherwise the client is destroyed while its request runs
        create_topic(admin, name, partitions, config)
        made.append((where, name))
        return name

    yield make
    for where, name in made:
        # Not waited for, because no test uses the name again. A failure only costs space in a temporary folder.
        _admin(where).delete_topics([name])


def _warm_cluster(config: pytest.Config, nodes: int) -> Iterator[Cluster]:
    with start_cluster(nodes) as cluster:
        config.stash[DESCRIPTIONS].append(cluster.description)
        _warm_up(cluster)
        yield cluster


def _admin(cluster: Cluster) -> AdminClient:
    return AdminClient({"bootstrap.servers": cluster.bootstrap})


def _warm_up(cluster: Cluster) -> None:
    """Creates the first consumer group, for which the brokers create the offsets topic; that takes seconds."""
    name, admin = f"warm-up-{uuid.uuid4().hex[:12]}", _admin(cluster)
    create_topic(admin, name, 1)
    join_first_group(cluster.bootstrap, name)
    admin.delete_topics([name])
