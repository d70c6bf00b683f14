"""Options of the sources that read Kafka: texts, as Spark passes them, checked and turned into values.

`ReadOptions` are the ones that every such source has; `StreamOptions` are those of the stream (backfills.py has those
of batch reads). Nothing here connects to a cluster.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from marshal_py.client.values import position_text
from marshal_py.client.values.options import (
    CONNECT_TIMEOUT_S,
    COORDINATION_TOPIC,
    ConsumerOptions,
    check_pattern,
    check_topics,
)
from marshal_py.errors import InvalidOption
from marshal_py.protocol.wire.identity import check_id
from marshal_py.spark.stream.aliases import from_java, named_as_given, named_as_written, translate
from marshal_py.spark.stream.messages import columns_of
from marshal_py.transport import settings
from marshal_py.transport.topic_checks import COORDINATION_PARTITIONS

MAX_ROWS: Final = 1_000_000  # a batch of a few seconds; in at-least-once mode a crash repeats it
MAX_DELAY_S: Final = 900.0  # as in Spark's own source
READ_TIMEOUT_S: Final = 60.0  # without progress; a broker that restarts is back within seconds

_TEXTS: Final = ("delivery", "policy", "member", "priority_group", "start")
_NUMBERS: Final = ("heartbeat_interval_s", "handler_timeout_s")
_WHOLE_NUMBERS: Final = ("max_claims", "capacity", "priority", "min_pending", "min_ack_pending")
_FLAGS: Final = ("fast_reclaim",)
_OWN: Final = (
    "group", "topics", "topics_pattern", "bootstrap.servers", "client_id", "columns", "max_rows_per_batch",
    "min_rows_per_batch", "max_batch_delay_s", "min_partitions", "read_timeout_s", "coordination_topic",
    "coordination_partitions", "connect_timeout_s", "stateful",
)  # fmt: skip
STATEFUL: Final = ("false", "true", "restart")
OPTIONS: Final = (*_OWN, *_TEXTS, *_NUMBERS, *_WHOLE_NUMBERS, *_FLAGS)

# What follows "it must be given".
_INSTEAD: Final = {
    "group": ": the members of a group share its topics, and the position is kept under its name",
    "topics": ", or Spark's name for it, subscribe; or a topics_pattern",
    "bootstrap.servers": ", or Spark's name for it, kafka.bootstrap.servers",
}


@dataclass(frozen=True)
class ReadOptions:
    """The options that tasks need to read messages, whichever source plans them."""

    columns: tuple[str, ...]
    min_partitions: int | None  # tasks of a batch, at least; None: as many as its ranges need
    read_timeout_s: float  # without progress
    kafka: Mapping[str, Any]  # librdkafka's settings

    @classmethod
    def parse(cls, options: Mapping[str, str], columns: tuple[str, ...] | None = None) -> ReadOptions:
        """Parses a source's options; `columns` replaces the option. Raises InvalidOption."""
        return ReadOptions(
            columns=columns_of(options.get("columns")) if columns is None else columns,
            min_partitions=count(options, "min_partitions", 0) if "min_partitions" in options else None,
            read_timeout_s=number(options, "read_timeout_s", READ_TIMEOUT_S, 1.0),
            kafka=kafka_options(options),
        )


@dataclass(frozen=True)
class StreamOptions(ReadOptions):
    """The options of `spark.readStream.format("marshal")`, checked."""

    group: str
    topics: tuple[str, ...]  # empty if there is a pattern
    topics_pattern: str | None
    client_id: str | None
    rows_max: int
    rows_min: int  # a smaller batch waits for more rows, at most this long:
    delay_s: float
    connect_timeout_s: float
    coordination_topic: str
    coordination_partitions: int
    stateful: bool  # the query has windows, joins or counts that live in its checkpoint
    restart: bool  # its state may begin empty where the group is
    consumer: Mapping[str, Any]  # arguments of ConsumerOptions

    @classmethod
    def of(cls, given: Mapping[str, str]) -> StreamOptions:
        """Parses a stream's options, also under Spark's own names. Raises InvalidOption."""
        options, given_names = translate(given)
        check_names(options, OPTIONS)
        with named_as_given(given_names):
            return cls._of(options)

    @classmethod
    def _of(cls, options: Mapping[str, str]) -> StreamOptions:
        pattern = options.get("topics_pattern")
        for name in ("group", "bootstrap.servers", *(("topics",) if pattern is None else ())):
            if not options.get(name):
                raise InvalidOption(name, options.get(name), f"it must be given{_INSTEAD[name]}")
        if pattern is not None and "topics" in options:
            raise InvalidOption("topics_pattern", pattern, "topics is given too: keep one of them")
        consumer: dict[str, Any] = {name: options[name] for name in _TEXTS if name in options}
        consumer |= {name: number(options, name, 0, 0) for name in _NUMBERS if name in options}
        consumer |= {name: count(options, name, 0) for name in _WHOLE_NUMBERS if name in options}
        consumer |= {name: flag(options, name) for name in _FLAGS if name in options}
        start = ConsumerOptions(**consumer).start
        if pattern is None:
            topics = topics_of(options["topics"])
            position_text.check_topics(start, topics)
        else:
            topics = ()
            check_pattern(pattern, "topics_pattern")
        rows_min, rows_max = (count(options, "min_rows_per_batch", 1), count(options, "max_rows_per_batch", MAX_ROWS))
        if rows_min > rows_max:
            raise InvalidOption("min_rows_per_batch", rows_min, f"at most max_rows_per_batch, {rows_max}")
        if "max_batch_delay_s" in options and "min_rows_per_batch" not in options:
            rule = "it limits how long a batch waits for min_rows_per_batch: give that too, or leave it out"
            raise InvalidOption("max_batch_delay_s", options["max_batch_delay_s"], rule)
        stateful = options.get("stateful", "false").lower()
        if stateful not in STATEFUL:
            raise InvalidOption("stateful", options["stateful"], f"one of {', '.join(STATEFUL)}")
        return cls(
            group=check_id("group", options["group"]),
            topics=topics,
            topics_pattern=pattern,
            client_id=options.get("client_id"),
            rows_max=rows_max,
            rows_min=rows_min,
            delay_s=number(options, "max_batch_delay_s", MAX_DELAY_S, 0.0),
            connect_timeout_s=number(options, "connect_timeout_s", CONNECT_TIMEOUT_S, 1.0),
            coordination_topic=options.get("coordination_topic", COORDINATION_TOPIC),
            coordination_partitions=count(options, "coordination_partitions", COORDINATION_PARTITIONS),
            stateful=stateful != "false",
            restart=stateful == "restart",
            consumer=consumer,
            **vars(ReadOptions.parse(options)),
        )

    @property
    def at_most_once(self) -> bool:
        return self.consumer.get("delivery") == "at_most_once"


def topics_of(text: str) -> tuple[str, ...]:
    """Returns the topics of the option, between commas. Raises InvalidOption."""
    return check_topics([topic.strip() for topic in text.split(",") if topic.strip()])


def count(options: Mapping[str, str], name: str, default: int) -> int:
    """Returns the option `name` as a whole number of at least 1. Raises InvalidOption."""
    text = options.get(name, str(default))
    try:
        value = int(text) if text.isascii() and text.isdigit() else 0
    except ValueError:  # more digits than Python takes
        value = 0
    if value < 1:
        raise InvalidOption(name, text, "a whole number from 1 on")
    return value


def kafka_options(options: Mapping[str, str]) -> settings.Settings:
    """Returns librdkafka's settings: `bootstrap.servers` and all with `kafka.`. Raises InvalidOption."""
    given: settings.Settings = {
        key.removeprefix("kafka."): value for key, value in options.items() if key.startswith("kafka.")
    }
    servers = options.get("bootstrap.servers", given.get("bootstrap.servers", ""))
    with named_as_written(given):
        return settings.from_user({**from_java(given), "bootstrap.servers": servers})


def as_options(given: Mapping[str, Any]) -> dict[str, str]:
    """The reverse of `kafka_options`. Raises InvalidOption for callbacks and other objects: options are texts."""
    options: dict[str, str] = {}
    for key, value in given.items():
        if not isinstance(value, str | int | float):
            raise InvalidOption(key, value, "executors only get settings that are texts or numbers, not callbacks")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        options["bootstrap.servers" if key == "bootstrap.servers" else f"kafka.{key}"] = text
    return options


def check_names(options: Mapping[str, str], known: Sequence[str]) -> None:
    """Raises InvalidOption for an option that is neither in `known` nor begins with `kafka.`."""
    check_known(options, known, f"kafka.* or one of {', '.join(sorted(known))}")


def check_known(options: Iterable[str], known: Container[str], rule: str) -> None:
    """Raises InvalidOption with `rule` for an option that is neither in `known` nor begins with `kafka.`. It does not
    show the value: a setting of librdkafka without its `kafka.` may be a password."""
    for name in options:
        if name not in known and not name.startswith("kafka."):
            advice = f". If you mean a setting of the Kafka client, write kafka.{name}" if "." in name else ""
            raise InvalidOption("option", name, rule + advice)


def number(options: Mapping[str, str], name: str, default: float, least: float) -> float:
    """Returns the option `name` as a number of at least `least`. Raises InvalidOption."""
    try:
        value = float(options.get(name, default))
    except ValueError:
        value = float("nan")
    if not least <= value < float("inf"):
        raise InvalidOption(name, options.get(name), f"a number, {least:g} or more")
    return value


def flag(options: Mapping[str, str], name: str) -> bool:
    """Returns True or False, as the option `name` says. Raises InvalidOption if its text is neither true nor false."""
    value = options.get(name, "false").lower()
    if value not in ("true", "false"):
        raise InvalidOption(name, options.get(name), "true or false")
    return value == "true"
