"""Writes coordination logs of a cluster to dump files, and loads them into a fresh topic (format: transport/dump.py).

A dump holds whole logs, because a part of a log cannot be folded. The dump of a group holds the group's log, and log 0,
which contains the root. A load writes either every record at the offset that it had, or nothing, because sessions and
epochs are offsets.

A dump for a bug report says more of the group (`about`) and less in its records (`without_words`). Nothing of a message
gets in: neither keys nor values are in the log, and the texts of handlers, which may quote them, are left out, as is
what others wrote into the topic. Of the client's settings only those are shown that can be no secret; another value is
replaced wherever it occurs. Names, reasons that admins gave, and client ids stay: without them the log says little.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, cast
from zlib import crc32

from msgspec import structs, to_builtins

from marshal_py.admin.marshal import versions
from marshal_py.admin.views.group_info import Check, GroupHealth
from marshal_py.client.marshal import VERSION
from marshal_py.errors import FileUnusable, HistoryTruncated, PartitionError
from marshal_py.history.explain import as_dict
from marshal_py.log.observer import Observer
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE, TopicPartition
from marshal_py.protocol.wire.records import Genesis, Note
from marshal_py.transport.dump import Header, Reader, Span, Writer, check_whole
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.ports import ClusterInfo, LogRecord
from marshal_py.transport.producer import KafkaProducer


def dump(
    observer: Observer,
    out: BinaryIO,
    group: str | None = None,
    verdicts: bool = False,
    about: Mapping[str, Any] | None = None,
    change: Callable[[LogRecord], LogRecord] = lambda record: record,
) -> int:
    """Writes all logs as they are now, or log 0 and the group's; returns the number of records. `verdicts`: each line
    also has the fold's. `about`: of the header. `change(record)`: what is written instead of a record."""
    logs = sorted({0, *observer.logs_of(group)})  # log 0 also without a root: its records may tell why
    bounds = observer.bounds(logs)
    spans = tuple(Span(log, bounds[log].first, bounds[log].end) for log in logs)
    root = observer.root
    header = Header(
        topic=observer.topic,
        incarnation=None if root is None else root.incarnation.hex(),
        partitions=None if root is None else root.partitions,
        logs=spans,
        group=group or "",
        time_ms=time.time_ns() // 1_000_000,
        by=VERSION,
        about=dict(about or {}),
    )
    writer = Writer(out, header)
    for span in spans:
        try:
            world = observer.oldest(span.log) if verdicts else World(span.log)
            for record in observer.records({span.log: bounds[span.log]}):
                if record.offset >= span.end:
                    break
                judged = verdicts and record.offset >= world.next_offset  # the snapshot contains earlier ones
                more = as_dict(rationalizer.apply(world, record.offset, record.value)) if judged else {}
                writer.write(change(record), {name: value for name, value in more.items() if name != "offset"})
        except HistoryTruncated as error:
            if error.first_offset == span.first:
                raise
            why = f"a consumer deleted its records from {span.first} on before they were written; do it again"
            raise PartitionError(observer.topic, span.log, why) from error
    writer.finish()
    return writer.records


def load(path: Path, transport: KafkaTransport, topic: str) -> int:
    """Writes a dump, checked as a whole before, into an empty coordination topic, created if missing; returns the
    number of records."""
    check_whole(path)
    with Reader(path) as reader:
        header, root = reader.header, World(0)
        hole, ends = "", dict.fromkeys((span.log for span in header.logs), 0)
        for record in reader:
            if not hole and record.offset > ends[record.log]:
                hole = f"{record.log}:{ends[record.log]}"
            ends[record.log] = record.offset + 1
            if root.genesis is None and (record.log, record.offset) == (0, root.next_offset):
                rationalizer.apply(root, record.offset, record.value)  # refuses a log that nobody could read (L6)
    cut = [span.log for span in header.logs if span.first > 0]
    if cut:
        raise FileUnusable(
            str(path),
            f"log {cut[0]} of the dump does not begin at offset 0, and those of {topic!r} do; read the dump with "
            f"--dump instead",
        )
    if header.partitions is None:
        raise FileUnusable(str(path), "it holds no record")
    if hole:
        raise FileUnusable(
            str(path),
            f"the log had no record at {hole}, so later ones would get other offsets in {topic!r}; read the dump "
            f"with --dump instead",
        )
    _prepare(str(path), transport, topic, header.partitions)
    misplaced: list[str] = []
    expected: dict[int, int] = dict.fromkeys(range(header.partitions), 0)

    def on_written(tp: TopicPartition, offset: int) -> None:
        if offset != expected[tp.partition]:
            misplaced.append(f"record {tp.partition}:{expected[tp.partition]} was written at offset {offset}")
        expected[tp.partition] += 1

    producer = KafkaProducer(transport, on_written)
    try:
        with Reader(path) as reader:
            for record in reader:
                producer.write(
                    topic, record.value, record.key, partition=record.log, timestamp_ms=max(0, record.timestamp_ms)
                )
                if misplaced:
                    break
        producer.flush()
    finally:
        producer.close()
    if misplaced:
        raise FileUnusable(
            str(path), f"{misplaced[0]}: somebody else writes to {topic!r}; delete the topic and load it again"
        )
    return sum(expected.values())


def _prepare(path: str, transport: KafkaTransport, topic: str, partitions: int) -> None:
    """Creates the topic if it is missing. Raises FileUnusable if it has too few partitions or is not empty."""
    admin = transport.admin()
    try:
        there = range(admin.partition_count(topic) or 0)
        bounds = admin.bounds([TopicPartition(topic, log) for log in there]) if there else {}
        used = next((tp for tp, found in bounds.items() if found.end > 0), None)
        if used is not None:
            raise FileUnusable(
                path,
                f"topic {topic!r} is not empty: partition {used.partition} ends at offset {bounds[used].end}; name a "
                f"fresh topic by --coordination-topic",
            )
        count = admin.prepare_coordination(topic, partitions)
        if count < partitions:
            raise FileUnusable(path, f"topic {topic!r} has {count} partitions, and its root names {partitions}")
    finally:
        admin.close()


LEFT_OUT: Final = "(left out of the bundle)"
HIDDEN: Final = "(hidden)"
OWN_TEXTS: Final = frozenset(  # kinds of Notes whose texts this library writes, without words of a program
    {"probe", "unreadable", "mirror_refused", "diverged", "uncommitted", "poison_message", "offset_lost"}
)
SHOWN: Final = frozenset({
    "bootstrap.servers", "security.protocol", "sasl.mechanism", "sasl.mechanisms",
    "ssl.endpoint.identification.algorithm", "enable.ssl.certificate.verification", "client.id", "client.rack",
    "compression.type", "debug", "group.id", "isolation.level", "linger.ms", "log_level",
})  # fmt: skip
SHOWN_FAMILIES: Final = (
    "api.version.", "broker.address.", "fetch.", "message.", "metadata.", "queue.buffering.", "queued.",
    "reconnect.backoff.", "retry.backoff.", "socket.", "topic.metadata.",
)  # fmt: skip
SECRET_NAMES: Final = ("jaas", "key", "password", "secret", "token", "username")  # parts of the names of settings
SECRET_CHARS_MIN: Final = 4  # a shorter value would be replaced in every other word
OTHER_CHARS_MIN: Final = 8  # of settings with other names: `true`, or a time in ms, is no secret


def about(
    settings: Mapping[str, Any], checks: Iterable[Check], health: GroupHealth, cluster: ClusterInfo
) -> dict[str, Any]:
    """Returns what the header of a bundle has, in JSON's types. `settings`: the client's."""
    used = {**versions(cluster), "python": platform.python_version(), "system": platform.platform()}
    made = Check("bundle", "ok", ", ".join(f"{name} {version}" for name, version in used.items()))
    hidden = {name: str(value) for name, value in settings.items() if not _is_shown(name)}
    secrets = {value for name, value in hidden.items() if len(value) >= _chars_min(name)}
    found = {
        "versions": used,
        "cluster": {"id": cluster.cluster_id, "brokers": to_builtins(cluster.brokers), "limits": cluster.limits()},
        "settings": {name: HIDDEN if name in hidden else str(value) for name, value in sorted(settings.items())},
        "checks": to_builtins([made, *checks]),
        "health": to_builtins(health),
    }
    return cast(dict[str, Any], _without(found, sorted(secrets, key=len, reverse=True)))  # one may be in another


def _is_shown(name: str) -> bool:
    return name in SHOWN or name.startswith(SHOWN_FAMILIES)


def _chars_min(name: str) -> int:
    """Returns how long the value of a setting must be so that it is replaced where it occurs."""
    return SECRET_CHARS_MIN if any(part in name for part in SECRET_NAMES) else OTHER_CHARS_MIN


def _without(value: Any, secrets: Sequence[str]) -> Any:
    """Returns a value of JSON with other words for the secrets in its texts."""
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, HIDDEN)
        return value
    if isinstance(value, dict):
        return {key: _without(each, secrets) for key, each in value.items()}
    return [_without(each, secrets) for each in value] if isinstance(value, list | tuple) else value


def without_words(root: Genesis | None, record: LogRecord) -> LogRecord:
    """Returns a record without what a program or somebody else may have written into it: the texts of its Note, or all
    of it, if it is none of this log's. The fold judges both alike."""
    seed = NONE if root is None else crc32(root.incarnation)
    envelope = codec.open_envelope(record.value, seed)
    if envelope is None:
        return record if not (record.key or record.value) else record._replace(key=None, value=record.value and b"")
    group, _, version, kind, body, _ = envelope
    note = codec.decode_body(kind, body)
    if root is None or not isinstance(note, Note) or not note.text or note.kind in OWN_TEXTS:
        return record
    value = codec.encode(structs.replace(note, text=LEFT_OUT), group, root.incarnation, version)
    return record._replace(value=value)
