"""Grounds for the tests of the fronts: `ground` is both kinds in turn, `memory` and `embedded` are one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.client_fixtures import EmbeddedGround, MemoryGround, TestCluster, grounds


@pytest.fixture(params=["memory", "embedded"])
def ground(request: pytest.FixtureRequest) -> Iterator[TestCluster]:
    yield from grounds(request.param)


@pytest.fixture
def memory() -> MemoryGround:
    return MemoryGround()


@pytest.fixture
def embedded() -> Iterator[EmbeddedGround]:
    ground = EmbeddedGround()
    yield ground
    ground.close()
