"""What a handler does so that a partition that must move moves at once (docs/consumer.md, Moves)."""

from __future__ import annotations

import pytest

from marshal_py.testing import MemoryCluster
from tests.support.client_fixtures import DEADLINE_S


@pytest.mark.parametrize("given_back", [True, False])
def test_what_was_not_begun_is_given_back(given_back: bool) -> None:
    """Beginning nothing new is not enough: the partition waits for `hand_over_timeout_s` then."""
    with MemoryCluster() as cluster:
        cluster.create_topic("orders", partitions=2)
        for partition in (0, 1):
            cluster.produce_many("orders", [b"x"] * 10, partition=partition)
        old = cluster.connect().consumer("billing", ["orders"], start="earliest")
        messages = list(old.fetch(20, min_messages=20, expires_s=DEADLINE_S))
        assert len(messages) == 20
        new = cluster.connect().consumer("billing", ["orders"])
        first, *rest = cluster.run_until(lambda: [message for message in messages if message.revoking])
        assert first.ack()
        if given_back:
            assert all(message.nak(0) for message in rest)
        cluster.advance(10)
        assert bool(new.cached_info().claims) is given_back
        if given_back:
            received = cluster.run_until(lambda: list(new.fetch(10, expires_s=0)))
            assert [message.offset for message in received] == [message.offset for message in rest]
            for message in received:
                message.ack()
        for message in messages:
            message.ack()
