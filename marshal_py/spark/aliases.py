"""What Spark's own source `format("kafka")` and Java's client call things: taken in our words, or refused with them.

Names count in any case: Spark hands them over in lower case. Values stay texts; whoever reads them checks them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from marshal_py.errors import InvalidOption
from marshal_py.spark.messages import COLUMNS

_UNITS_MS: Final = {"us": 0.001, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_TIME: Final = re.compile(r"(\d{1,15}) *([a-z]*)")
_JAAS: Final = re.compile(r"\s*[\w.]*\.(?:PlainLoginModule|ScramLoginModule)\s+required\s(.*);\s*", re.DOTALL)
_PAIR: Final = re.compile(r"""(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s;]+))""")


class Alias(NamedTuple):
    """`convert`: its value in ours; raises ValueError with the rule."""

    name: str
    convert: Callable[[str], str] = str


def _seconds(text: str) -> str:
    """Spark's durations; without a unit they are ms."""
    found = _TIME.fullmatch(text.strip().lower())
    if found is None or (found[2] or "ms") not in _UNITS_MS:
        raise ValueError(f"a number with one of {', '.join(_UNITS_MS)}")
    return f"{int(found[1]) * _UNITS_MS[found[2] or 'ms'] / 1000:g}"


def _moment(ms: object) -> str:
    if isinstance(ms, bool) or not isinstance(ms, int | str):
        raise ValueError("ms since 1970")
    try:
        return datetime.fromtimestamp(int(ms) / 1000, UTC).isoformat()
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError("ms since 1970") from error


def _moments(text: str) -> str:
    try:
        return json.dumps(
            {
                topic: {number: _moment(ms) for number, ms in partitions.items()}
                for topic, partitions in json.loads(text).items()
            }
        )
    except (ValueError, AttributeError) as error:
        raise ValueError('JSON as {"topic": {"0": 1738324800000}}') from error


def _offsets(text: str) -> str:
    """Spark takes its two words in any case."""
    return text.lower() if text.lower() in ("earliest", "latest") else text


def _with_headers(text: str) -> str:
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return ",".join(name for name in COLUMNS if name != "headers" or text.lower() == "true")


def _only(value: str, reason: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text.lower() != value:
            raise ValueError(f"{value}: {reason}")
        return ""

    return convert


# Ours with the empty name is what this source does anyway.
ALIASES: Final[Mapping[str, Alias]] = {
    "kafka.bootstrap.servers": Alias("bootstrap.servers"),
    "subscribe": Alias("topics"),
    "subscribePattern": Alias("topics_pattern"),
    "startingOffsets": Alias("start", _offsets),
    "startingTimestamp": Alias("start", _moment),
    "startingOffsetsByTimestamp": Alias("start", _moments),
    "startingOffsetsByTimestampStrategy": Alias(
        "", _only("latest", "where no message is as new, partitions begin at their end")
    ),
    "maxOffsetsPerTrigger": Alias("max_rows_per_batch"),
    "minOffsetsPerTrigger": Alias("min_rows_per_batch"),
    "maxTriggerDelay": Alias("max_batch_delay_s", _seconds),
    "minPartitions": Alias("min_partitions"),
    "includeHeaders": Alias("columns", _with_headers),
    "kafkaConsumer.pollTimeoutMs": Alias("read_timeout_s", _seconds),
    "failOnDataLoss": Alias(
        "",
        _only(
            "false",
            "what retention deleted before it was read is passed, and noted as lost "
            "in the log (docs/spark.md, table lost), where an alarm belongs",
        ),
    ),
}

# A batch read holds no claims: it has an end, and nobody to note a loss for.
BOUNDED: Final[Mapping[str, Alias]] = {
    "endingOffsets": Alias("until", _offsets),
    "endingTimestamp": Alias("until", _moment),
    "endingOffsetsByTimestamp": Alias("until", _moments),
    "failOnDataLoss": Alias("", _only("true", "a batch read fails where a range was deleted: begin it later")),
}

_ENDLESS: Final = "a stream has no end: trigger(availableNow=True) ends with what is there when it starts"
REFUSED: Final[Mapping[str, str]] = {
    "assign": "members claim partitions: name topics, and bound what this query takes by max_claims",
    "endingOffsets": _ENDLESS,
    "endingTimestamp": _ENDLESS,
    "endingOffsetsByTimestamp": _ENDLESS,
    "kafka.group.id": "say group: its members share the partitions, and Kafka's own tools know it by the same name",
    "groupIdPrefix": "say group: one name for all runs, under which the position stands",
    "maxRecordsPerPartition": "bound the batch by max_rows_per_batch, and its tasks by min_partitions",
    "fetchOffset.numRetries": "the cluster is asked again for connect_timeout_s when the query starts, and at each "
    "trigger later",
    "fetchOffset.retryIntervalMs": "the cluster is asked again at each trigger",
}

_PEM: Final = "librdkafka reads PEM: say kafka.ssl.ca.location"
JAVA: Final[Mapping[str, str]] = {
    "key.deserializer": "keys are bytes: cast the column key",
    "value.deserializer": "values are bytes: cast the column value, or use from_json, from_avro",
    "max.poll.records": "say max_rows_per_batch",
    "interceptor.classes": "librdkafka has no interceptors",
    "ssl.truststore.location": _PEM,
    "ssl.truststore.password": _PEM,
    "ssl.truststore.type": _PEM,
    "ssl.truststore.certificates": "say kafka.ssl.ca.pem",
    "ssl.keystore.type": "librdkafka reads PKCS#12 (kafka.ssl.keystore.location) or PEM "
    "(kafka.ssl.certificate.location, kafka.ssl.key.location)",
}

_ALIASES: Final = {name.lower(): (name, alias) for name, alias in ALIASES.items()}
_BOUNDED: Final = {name.lower(): (name, alias) for name, alias in BOUNDED.items()}
_REFUSED: Final = {name.lower(): (name, rule) for name, rule in REFUSED.items()}


class Translated(NamedTuple):
    """`said`: the name under which each option was given, as people write it."""

    options: dict[str, str]
    said: dict[str, str]


def translated(options: Mapping[str, str], *, bounded: bool = False) -> Translated:
    """The options under our names, in lower case. Raises InvalidOption: refused, or one thing said twice.

    `bounded`: of a batch read, not of a stream.
    """
    known = _ALIASES | _BOUNDED if bounded else _ALIASES
    ours: dict[str, str] = {}
    said: dict[str, str] = {}
    for given, value in options.items():
        name = given.lower()
        if name in _REFUSED and name not in known:
            raise InvalidOption(_REFUSED[name][0], value, _REFUSED[name][1])
        shown, alias = known.get(name, (name, Alias(name)))
        try:
            text = alias.convert(value)
        except ValueError as error:
            raise InvalidOption(shown, value, str(error)) from error
        if alias.name in ours and ours[alias.name] != text:
            raise InvalidOption(shown, value, f"{said[alias.name]} says the same, and is given too: keep one of them")
        if alias.name:
            ours[alias.name], said[alias.name] = text, shown
    return Translated(ours, said)


def from_java(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a client, those of Java's alone in librdkafka's words. Raises InvalidOption where it has none.

    A `sasl.jaas.config` with a password becomes `sasl.username` and `sasl.password`.
    """
    for name, rule in JAVA.items():
        if name in settings:
            raise InvalidOption(f"kafka.{name}", settings[name], rule)
    left = dict(settings)
    jaas = left.pop("sasl.jaas.config", None)
    if jaas is None:
        return left
    found = _JAAS.fullmatch(jaas)
    pairs = {name: "".join(texts) for name, *texts in _PAIR.findall(found[1])} if found else {}
    if not {"username", "password"} <= pairs.keys():
        rule = (
            "only PlainLoginModule and ScramLoginModule with a username and a password are understood: librdkafka "
            "has settings of its own for Kerberos and OAuth (kafka.sasl.kerberos.*, kafka.sasl.oauthbearer.*)"
        )
        raise InvalidOption("kafka.sasl.jaas.config", "(hidden)", rule)
    return {"sasl.username": pairs["username"], "sasl.password": pairs["password"], **left}
