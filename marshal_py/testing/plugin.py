"""The pytest plugin: the fixtures `marshal_broker` and `marshal_broker_kind`. The only file that imports pytest.

A project that wants it says so in the conftest.py of its root folder:

    pytest_plugins = ["marshal_py.testing.plugin"]

It has no entry point: pytest would load it in every project that has marshal_py installed, before coverage has begun to
measure, whether the project wants it or not.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from marshal_py.testing.cluster import LocalCluster, local_cluster


@pytest.fixture
def marshal_broker_kind() -> str:
    """The kind of `marshal_broker`: "memory", or "embedded" for a broker that every Kafka client can connect to.

    A test or a module asks for another one by overriding this fixture, or by parametrizing it.
    """
    return "memory"


@pytest.fixture
def marshal_broker(marshal_broker_kind: str) -> Iterator[LocalCluster]:
    """A new cluster in this process, for one test. Afterwards every Marshal that is connected to it is closed."""
    with local_cluster(marshal_broker_kind) as cluster:
        yield cluster
