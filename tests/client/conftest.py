"""Test clusters: `cluster` is both kinds in turn, `memory` and `embedded` are one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.client_fixtures import EmbeddedTestCluster, MemoryTestCluster, TestCluster, clusters


@pytest.fixture(params=["memory", "embedded"])
def cluster(request: pytest.FixtureRequest) -> Iterator[TestCluster]:
    yield from clusters(request.param)


@pytest.fixture
def memory() -> MemoryTestCluster:
    return MemoryTestCluster()


@pytest.fixture
def embedded() -> Iterator[EmbeddedTestCluster]:
    cluster = EmbeddedTestCluster()
    yield cluster
    cluster.close()
