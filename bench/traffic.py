"""What does the coordination cost: how many records and bytes does a consumer write per third of its interval?

Contestants: none; the members of Kafka's groups send heartbeats as requests, which leave no records. marshal_py at its
defaults (interval 2 s), two consumer processes, 12 and 256 partitions, idle, and with several messages per third for
every partition. The same in at-most-once mode with 12 partitions, where grants are records, too.

Measured: the records of the group's coordination log in a steady time, read by a plain consumer. `heartbeats per third`
is (n - 1) heartbeats divided by the time between a session's first and last, in thirds, so that the ends of the window
cause no error. `records` counts everything written in the window. Bytes are key and value as the library made them;
Kafka's batch adds about 70 to a record that travels alone. `bytes per changed claim` is the difference in size between
heartbeats under load and idle ones, divided by the number of claims in them.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any
from zlib import crc32

from confluent_kafka import Consumer, TopicPartition

from bench.environment import QUIET, BenchEnvironment, Result, spread
from bench.group_load import LoadGroup
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import route
from marshal_py.protocol.wire.records import Genesis, Heartbeat, Record

SIZES = (12, 256)
TINY_SIZES = (12,)
AT_MOST_ONCE = (12, "at_most_once")
CONSUMERS = 2
INTERVAL_S, TINY_INTERVAL_S = 2.0, 1.0
PERIOD_S, TINY_PERIOD_S = 0.2, 0.1  # between two messages of a partition: less than a third of the interval
WINDOW_S, TINY_WINDOW_S = 20.0, 2.5
SETTLE_THIRDS = 3  # after the load has changed; by then the changes of before are reported
READ_TIMEOUT_S = 30.0
GOAL = (
    "Goals: 1 heartbeat per consumer and third, whatever the number of partitions; <= 20 B per changed claim; "
    "<= 30 grants per consumer and second."
)


@dataclass
class Window:
    """The records written in a steady time."""

    partitions: int
    delivery: str
    load: str
    seconds: float = 0.0
    thirds: float = 0.0  # of all consumers together
    records: int = 0
    bytes: int = 0
    rates: list[float] = field(default_factory=list)  # heartbeats per third, one per session
    heartbeats: int = 0
    heartbeat_bytes: int = 0
    changed: int = 0
    others: dict[str, int] = field(default_factory=dict)


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    rows: list[list[Any]] = []
    found: list[Window] = []
    for partitions, delivery in [(size, "at_least_once") for size in (TINY_SIZES if tiny else SIZES)] + [AT_MOST_ONCE]:
        environment.say(f"traffic with {partitions} partitions, {delivery}")
        idle, loaded = _measure(environment, partitions, delivery, tiny)
        found += [idle, loaded]
        for window in (idle, loaded):
            rows.append(
                [
                    partitions,
                    delivery,
                    window.load,
                    spread(window.rates),
                    window.records / window.thirds,
                    window.others.get("ClaimingMessages", 0) / window.seconds / CONSUMERS,
                    window.bytes / window.thirds,
                    window.heartbeat_bytes / window.heartbeats,
                    window.changed / window.heartbeats,
                    _bytes_per_claim(idle, loaded) if window is loaded else None,
                    f"{window.records:,}: " + ", ".join(f"{n} {name}" for name, n in sorted(window.others.items())),
                ]
            )
    columns = [
        "partitions",
        "delivery",
        "load",
        "heartbeats per consumer and third",
        "records",
        "grants per consumer and second",
        "bytes",
        "bytes of a heartbeat",
        "claims in it",
        "bytes per changed claim",
        "records in all",
    ]
    return Result("traffic", columns, rows, [GOAL], {f"{w.partitions} {w.delivery} {w.load}": asdict(w) for w in found})


def _bytes_per_claim(idle: Window, loaded: Window) -> float | None:
    if not loaded.changed:
        return None
    extra = loaded.heartbeat_bytes - loaded.heartbeats * idle.heartbeat_bytes / idle.heartbeats
    return round(extra / loaded.changed, 2)


def _measure(environment: BenchEnvironment, partitions: int, delivery: str, tiny: bool) -> tuple[Window, Window]:
    interval_s = TINY_INTERVAL_S if tiny else INTERVAL_S
    options: dict[str, Any] = {"delivery": delivery} | ({"heartbeat_interval_s": interval_s} if tiny else {})
    settle_s, window_s = SETTLE_THIRDS * interval_s / 3, TINY_WINDOW_S if tiny else WINDOW_S
    period_s, steady_s = TINY_PERIOD_S if tiny else PERIOD_S, 1.0 if tiny else None
    with LoadGroup(
        environment, "marshal", partitions=partitions, period_s=period_s, steady_s=steady_s, options=options
    ) as group:
        log = _Log(environment, group)
        group.start_load()
        for _ in range(CONSUMERS):
            group.start()
        group.steady()
        group.stop_load()
        idle = Window(partitions, delivery, "idle")
        loaded = Window(partitions, delivery, f"every partition each {period_s:g} s")
        for window in (idle, loaded):
            if window is loaded:
                group.start_load()
                group.steady()
            time.sleep(settle_s)
            log.read()
            time.sleep(window_s)
            _count(window, log.read(), window_s, interval_s / 3)
        group.read()
        log.close()
    return idle, loaded


class _Log:
    """A plain consumer of the group's coordination log."""

    def __init__(self, environment: BenchEnvironment, group: LoadGroup) -> None:
        self._consumer = Consumer({"bootstrap.servers": environment.bootstrap, "group.id": "unused", **QUIET})
        topics = self._consumer.list_topics(group.coordination, timeout=READ_TIMEOUT_S).topics
        number = route(group.name, len(topics[group.coordination].partitions))
        self._at = TopicPartition(group.coordination, number, 0)
        self._consumer.assign([self._at])
        self._next = 0
        self._seed = -1

    def read(self) -> list[tuple[int, int, Record | None]]:
        """Reads up to the current end of the log. Returns (timestamp ms, bytes, record) of each record."""
        _, end = self._consumer.get_watermark_offsets(self._at, READ_TIMEOUT_S)
        found: list[tuple[int, int, Record | None]] = []
        deadline = time.monotonic() + READ_TIMEOUT_S
        while self._next < end:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the coordination log was not read to {end} within {READ_TIMEOUT_S:g} s")
            message = self._consumer.poll(0.1)
            if message is None or message.error() is not None:
                continue
            self._next = (message.offset() or 0) + 1
            value = message.value() or b""
            found.append((message.timestamp()[1], len(message.key() or b"") + len(value), self._decode(value)))
        return found

    def _decode(self, value: bytes) -> Record | None:
        opened = codec.open_envelope(value, self._seed)
        if opened is None:
            return None
        record: Record | None = opened[5] or codec.decode_body(opened[3], opened[4])
        if isinstance(record, Genesis):
            self._seed = crc32(record.incarnation)
        return record

    def close(self) -> None:
        self._consumer.close()


def _count(window: Window, found: list[tuple[int, int, Record | None]], window_s: float, third_s: float) -> None:
    window.seconds, window.thirds = window_s, CONSUMERS * window_s / third_s
    window.records, window.bytes = len(found), sum(size for _, size, _ in found)
    window.others = dict(Counter("foreign" if r is None else type(r).__name__ for _, _, r in found))
    beats: dict[int, list[int]] = defaultdict(list)
    for at_ms, size, record in found:
        if isinstance(record, Heartbeat):
            beats[record.session].append(at_ms)
            window.heartbeats += 1
            window.heartbeat_bytes += size
            window.changed += len(record.claims)
    for times in beats.values():
        if len(times) > 1:
            window.rates.append((len(times) - 1) * third_s * 1000 / (times[-1] - times[0]))
