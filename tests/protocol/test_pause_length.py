"""How long a pause lasts in a group of several members."""

from __future__ import annotations

from marshal_py.protocol.wire.records import ReleaseGroup
from tests.support.virtual_cluster import INTERVAL_MS, THIRD_MS, VirtualCluster

PAUSE_MS = 10 * INTERVAL_MS


def test_members_that_read_each_others_waits_end_no_pause_early() -> None:
    """T5: the waits are of the same time, so they do not add up."""
    cluster = VirtualCluster()
    for name in ("a", "b", "c"):  # their steps end at different times
        cluster.add(name)
        cluster.run(INTERVAL_MS + 67)
    cluster.must(ReleaseGroup(-1, -1, PAUSE_MS))
    cluster.run(PAUSE_MS - 1)
    assert cluster.group.paused
    cluster.run_until(lambda: not cluster.group.paused, at_most_ms=INTERVAL_MS + THIRD_MS)
