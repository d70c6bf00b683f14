"""Dead letters by their topic: which of several about one message counts, and whether that one was put back."""

from __future__ import annotations

from marshal_py.admin.dead_letters import HEADERS, REDRIVEN, read
from marshal_py.transport.memory import MemoryTransport
from tests.support.client_fixtures import MemoryTestCluster


def test_clocks_that_differ_do_not_decide_what_was_put_back() -> None:
    """The message fails, is put back, and fails again at a consumer whose clock is a second behind the admin's."""
    memory = MemoryTestCluster()
    topic, letters = memory.topic(), memory.topic()
    named = {"topic": topic, "partition": "0", "offset": "0", "group": "g"}
    own: list[tuple[str, bytes | None]] = [(HEADERS + name, value.encode()) for name, value in named.items()]
    marker: list[tuple[str, bytes | None]] = [(REDRIVEN, f"{topic}/0/0 g".encode())]

    def found() -> list[tuple[int, bool]]:
        return [(one.at.offset, one.redriven) for one in read(MemoryTransport(memory.broker), letters)]

    memory.local.produce(letters, b"v", partition=0, headers=own, timestamp_ms=1_000)
    assert found() == [(0, False)]
    memory.local.produce(letters, None, partition=0, headers=marker, timestamp_ms=10_000)
    assert found() == [(0, True)]
    memory.local.produce(letters, b"v", partition=0, headers=own, timestamp_ms=9_000)
    assert found() == [(2, False)]
