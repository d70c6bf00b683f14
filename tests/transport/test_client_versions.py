"""The transport and a consumer's life over other releases of confluent-kafka than the installed one.

By default over the oldest that pyproject.toml allows; `make versions` runs it over every minor version.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import client_versions

# What a release can break: the conformance suite, and join, delivery, a local pause, a move of partitions, stop.
TESTS = [
    "tests/transport/test_conformance.py",
    "tests/client/test_fetching.py::test_a_paused_partition_delivers_nothing_that_is_buffered",
    "tests/client/test_fetching.py::test_a_partition_may_be_paused_before_it_is_ours",
    "tests/client/test_life.py::test_two_marshals_share_and_the_first_takes_back",
    "tests/client/test_life.py::test_stop_releases_at_the_positions_and_leaves",
]
# Old releases lack the embedded broker's way to cut a log, by name (UnsupportedPlatform); the client has its part.
CHOSEN = "embedded and not Truncate"
RELEASES = client_versions.releases() if os.environ.get("CONFLUENT_KAFKA") == "all" else ["oldest"]


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", RELEASES)
def test_the_transport_and_a_life_over_another_client(release: str) -> None:
    """In a process of their own, which loads that release and its embedded broker."""
    path = client_versions.oldest() if release == "oldest" else client_versions.folder(release)
    run = subprocess.run(
        [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", CHOSEN, *TESTS],
        cwd=client_versions.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(client_versions.ROOT)])},
    )
    assert f"confluent-kafka {client_versions.version(path)}," in run.stdout, run.stdout
    assert run.returncode == 0, run.stdout
