"""The pytest plugin: the fixtures `marshal_broker`, `marshal_broker_kind` and `marshal_replay`. Only this file imports
pytest.

A project that wants it says so in the conftest.py of its root folder:

    pytest_plugins = ["marshal_py.testing.plugin"]

It has no entry point: pytest would load it in every project that has marshal_py installed, before coverage has begun to
measure, whether the project wants it or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from marshal_py.testing.cluster import LocalCluster, local_cluster
from marshal_py.testing.replay import Replay, replay


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that `marshal_replay` reads."""
    parser.addoption("--marshal-dump", metavar="FILE", help="what `marshal log dump` wrote, for marshal_replay")


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


@pytest.fixture
def marshal_replay(pytestconfig: pytest.Config) -> Callable[..., Replay]:
    """The function `marshal_py.testing.replay` for the dump that `--marshal-dump=FILE` names. A test that uses it fails
    without the option."""
    path = pytestconfig.getoption("--marshal-dump")
    if path is None:
        pytest.fail("marshal_replay needs a dump: pytest --marshal-dump=FILE (`marshal log dump GROUP` writes one)")
    return partial(replay, path)
