"""How the coordination log is read and written: the settings and the order of writes of rules L1, L7 and L9."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import marshal_py
from marshal_py.errors import InvalidOption
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import route
from marshal_py.transport import settings
from marshal_py.transport.kafka import KafkaLog
from marshal_py.transport.kafka_admin import SharedRequester
from marshal_py.transport.memory import MemoryBroker, MemoryLog, MemoryTransport
from marshal_py.transport.ports import LogRecord

GROUP_LENGTH_AT = 11  # offset of the group id's length in a record; only a Genesis has 0 there
GIVEN = {"bootstrap.servers": "127.0.0.1:1", "fetch.wait.max.ms": 7}


def test_readers_and_writers_of_the_log() -> None:
    """L9: readers read uncommitted and never reset; writers use acks=all and idempotence; callers cannot change it."""
    reader = settings.log_reader(settings.from_user(GIVEN), "me", 100)
    assert reader["isolation.level"] == "read_uncommitted"
    assert reader["auto.offset.reset"] == "error"
    assert reader["enable.auto.commit"] is False
    writer = settings.log_writer(settings.from_user(GIVEN), "me")
    assert writer["acks"] == "all"
    assert writer["enable.idempotence"] is True
    for key, value in (
        ("acks", "1"),
        ("enable.idempotence", False),
        ("auto.offset.reset", "latest"),
        ("transactional.id", "t"),
    ):
        with pytest.raises(InvalidOption):
            settings.from_user({**GIVEN, key: value})


class WritingProducer:
    """Stands for a producer that still writes: `meanwhile` is called while somebody waits for it."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.meanwhile, self.waiting = meanwhile, 1

    def __len__(self) -> int:
        return self.waiting

    def poll(self, timeout_s: float) -> None:
        self.waiting = 0
        self.meanwhile()

    def purge(self, blocking: bool) -> None:
        self.waiting = 0


def test_two_threads_may_close_a_log() -> None:
    given = settings.from_user(GIVEN)
    log = KafkaLog(given, "__marshal", "me", 100, True, SharedRequester(given, "me"))
    log._producer = WritingProducer(lambda: log.close(0.0))  # type: ignore[assignment]
    log.close(60.0)
    log.close(60.0)
    assert log.append(0, b"", b"") is False


def test_the_callers_settings_for_data_do_not_reach_the_log() -> None:
    """L9: `read_committed` is right for data and wrong for the log; the caller gives one mapping for both."""
    reader = settings.log_reader(settings.from_user({**GIVEN, "isolation.level": "read_committed"}), "me", 100)
    assert reader["isolation.level"] == "read_uncommitted"


def test_nobody_writes_before_the_genesis_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """L7: in each log the first record of a client that is no Genesis is written after it has read one."""
    broker = MemoryBroker()
    broker.create_topic("orders", 1)
    group = next(g for g in map(str, range(100)) if route(g, 4) != 0)
    known: set[int] = set()  # logs whose Genesis a reader has got
    wrote: list[tuple[int, bool]] = []
    plain_poll, plain_append = MemoryLog.poll, MemoryLog.append

    def poll(self: MemoryLog, timeout_s: float) -> list[LogRecord]:
        records = plain_poll(self, timeout_s)
        known.update(r.log for r in records if r.value is not None and r.value[GROUP_LENGTH_AT] == 0)
        return records

    def append(self: MemoryLog, log: int, key: bytes, value: bytes) -> bool:
        if value[GROUP_LENGTH_AT]:
            wrote.append((log, log in known))
        return plain_append(self, log, key, value)

    monkeypatch.setattr(MemoryLog, "poll", poll)
    monkeypatch.setattr(MemoryLog, "append", append)
    with marshal_py.connect(MemoryTransport(broker), coordination_partitions=4) as marshal:
        marshal.consumer(group, ["orders"]).stop()
    assert wrote
    assert all(after for _, after in wrote)
    first = [records[0].value() for records in broker.topics["__marshal"] if records]
    assert len(first) == 2, "the root and the group's log"
    assert all(value is not None and codec.open_envelope(value, -1) is not None for value in first)
