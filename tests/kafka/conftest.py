"""Fixtures for tests/kafka: nodes are restored after each test, and the processes of scenarios end with it.

The fixtures that make clusters and topics are in tests/support/clusters.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kafka import Cluster, brokers_seen_by, wait_until
from tests.support.process_scenario import MakeScenario, ProcessScenario

HEAL_TIMEOUT_S = 30.0  # A broker that comes back is listed after a second or two.


@pytest.fixture(autouse=True)
def _nodes_restored(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restarts the nodes that a test has lost, so that its failure does not spread to the next test."""
    cluster: Cluster | None = request.getfixturevalue("kafka3") if "kafka3" in request.fixturenames else None
    yield
    if cluster is not None and cluster.can_control_nodes:
        addresses = cluster.bootstrap.split(",")
        for node, address in enumerate(addresses, 1):
            if not brokers_seen_by(address):
                cluster.restart(node)
        everyone = set(range(1, cluster.nodes + 1))

        def whole() -> bool:
            return all(brokers_seen_by(address) == everyone for address in addresses)

        wait_until(whole, HEAL_TIMEOUT_S, "the three nodes know each other again")


@pytest.fixture
def scenario(tmp_path: Path) -> Iterator[MakeScenario]:
    """Makes scenarios, and ends their processes after the test."""
    with contextlib.ExitStack() as stack:

        def make(cluster: Cluster, topics: list[str], **settings: Any) -> ProcessScenario:
            return stack.enter_context(ProcessScenario(cluster.bootstrap, tmp_path, topics, **settings))

        yield make
