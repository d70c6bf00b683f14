"""Test clusters: `cluster` is both kinds in turn, `memory` and `embedded` are one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from marshal_py.client.values.options import BOUNDS
from tests.support.client_fixtures import EmbeddedTestCluster, MemoryTestCluster, TestCluster, clusters


@pytest.fixture(autouse=True)
def _bounds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets what the mark `bounds` names for the time of a test."""
    mark = request.node.get_closest_marker("bounds")
    for name, value in mark.kwargs.items() if mark is not None else ():
        monkeypatch.setattr(BOUNDS, name, value)


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
