"""Options of Spark's own source `format("kafka")` and of Java's client: translated into ours, or refused with advice.

Upper and lower case do not matter in names: Spark passes them in lower case. Values stay texts; options.py and
backfills.py check them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from marshal_py.errors import InvalidOption

_JAAS: Final = re.compile(r"\s*[\w.]*\.(?:PlainLoginModule|ScramLoginModule)\s+required\s(.*);\s*", re.DOTALL)
_PAIR: Final = re.compile(r"""(\w+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s;]+))""", re.DOTALL)
_ESCAPE: Final = re.compile(r"\\([0-3][0-7]{0,2}|[4-7][0-7]?|.)", re.DOTALL)  # as Java's StreamTokenizer reads them
_CONTROLS: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


class Alias(NamedTuple):
    """What a foreign option becomes: our `name` ("": nothing), and `convert`, which returns our value or raises
    ValueError with the rule."""

    name: str
    convert: Callable[[str], str] = str


def _offsets(text: str) -> str:
    """Returns the text in lower case if it is "earliest" or "latest", which Spark accepts in upper case, too."""
    return text.lower() if text.lower() in ("earliest", "latest") else text


def _only(value: str, reason: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text.lower() != value:
            raise ValueError(f"{value}: {reason}")
        return ""

    return convert


# What a job that moves here most often has.
ALIASES: Final[Mapping[str, Alias]] = {
    "kafka.bootstrap.servers": Alias("bootstrap.servers"),
    "subscribe": Alias("topics"),
    "startingOffsets": Alias("start", _offsets),
    "maxOffsetsPerTrigger": Alias("max_rows_per_batch"),
    "minPartitions": Alias("min_partitions"),
    "failOnDataLoss": Alias(
        "",
        _only(
            "false",
            "messages that retention deleted before they were read are skipped, and noted as lost in the log "
            "(docs/spark-reference.md, table lost): put an alarm on that",
        ),
    ),
}

# For a batch read, which has an end. It has no group for which a loss could be noted in the log, so it fails instead.
BATCH_READ_ALIASES: Final[Mapping[str, Alias]] = {
    "endingOffsets": Alias("until", _offsets),
    "failOnDataLoss": Alias("", _only("true", "a batch read fails where messages were deleted: start it later")),
}

_TIME: Final = "it takes a time, too, like 2025-01-31T12:00:00Z"
# Less frequent ones, which have an option here.
_START: Final = f"use the option start; {_TIME}"
_OTHER_NAMES: Final = {
    "startingTimestamp": _START,
    "startingOffsetsByTimestamp": _START,
    "startingOffsetsByTimestampStrategy": "leave it out: a partition without such a message begins at its end",
    "minOffsetsPerTrigger": "use the option min_rows_per_batch",
    "maxTriggerDelay": "use the option max_batch_delay_s, in seconds",
    "includeHeaders": "use the option columns: it names the columns that you want; without it headers are included",
    "kafkaConsumer.pollTimeoutMs": "use the option read_timeout_s, in seconds",
}
_ENDLESS: Final = "a stream has no end; with trigger(availableNow=True) a query reads what is there when it starts"
REFUSED: Final[Mapping[str, str]] = {
    **_OTHER_NAMES,
    "subscribePattern": "use the option topics_pattern, a glob such as orders-*: regular expressions are not taken",
    "assign": "members claim partitions: name topics, and limit how many this query claims by max_claims",
    "endingOffsets": _ENDLESS,
    "endingTimestamp": _ENDLESS,
    "endingOffsetsByTimestamp": _ENDLESS,
    "kafka.group.id": "use the option group: its members share the partitions, and Kafka's own tools show it under the "
    "same name",
    "groupIdPrefix": "use the option group: one name for all runs, under which the position is kept",
    "maxRecordsPerPartition": "limit the batch by max_rows_per_batch; min_partitions asks for more, smaller tasks",
    "fetchOffset.numRetries": "when the query starts, the cluster is asked for as long as connect_timeout_s allows; "
    "later, at each trigger",
    "fetchOffset.retryIntervalMs": "the cluster is asked again at each trigger",
}

# In a batch read, where the advice for a stream would name options that a batch read refuses.
_NO_GROUP: Final = "a batch read has no group: leave it out; a stream has the option group instead"
_RETRIES: Final = "the cluster is asked for as long as connect_timeout_s allows"
_UNTIL: Final = f"use the option until; {_TIME}"
REFUSED_IN_BATCH_READS: Final[Mapping[str, str]] = {
    **_OTHER_NAMES,
    "subscribePattern": "name the topics in topics",
    "endingTimestamp": _UNTIL,
    "endingOffsetsByTimestamp": _UNTIL,
    "minOffsetsPerTrigger": "a batch read takes everything between start and until: leave it out",
    "maxTriggerDelay": "a batch read has no trigger: leave it out",
    "assign": 'name the topics in topics, and the partitions in start or until, as {"orders": {"0": -2}}',
    "kafka.group.id": _NO_GROUP,
    "groupIdPrefix": _NO_GROUP,
    "maxRecordsPerPartition": "a batch read takes everything between start and until; min_partitions asks for more, "
    "smaller tasks",
    "fetchOffset.numRetries": _RETRIES,
    "fetchOffset.retryIntervalMs": _RETRIES,
}

_PEM: Final = "librdkafka reads PEM: use kafka.ssl.ca.location"
JAVA: Final[Mapping[str, str]] = {
    "key.deserializer": "keys are bytes: cast the column key",
    "value.deserializer": "values are bytes: cast the column value, or use from_json, from_avro",
    "max.poll.records": "use max_rows_per_batch",
    "interceptor.classes": "librdkafka has no interceptors",
    "ssl.truststore.location": _PEM,
    "ssl.truststore.password": _PEM,
    "ssl.truststore.type": _PEM,
    "ssl.truststore.certificates": "use kafka.ssl.ca.pem",
    "ssl.keystore.type": "librdkafka reads PKCS#12 (kafka.ssl.keystore.location) or PEM "
    "(kafka.ssl.certificate.location, kafka.ssl.key.location)",
}

_ALIASES: Final = {name.lower(): (name, alias) for name, alias in ALIASES.items()}
_BATCH_READ_ALIASES: Final = {name.lower(): (name, alias) for name, alias in BATCH_READ_ALIASES.items()}
_REFUSED: Final = {name.lower(): (name, rule) for name, rule in REFUSED.items()}
_REFUSED_IN_BATCH_READS: Final = {name.lower(): (name, rule) for name, rule in REFUSED_IN_BATCH_READS.items()}


class Translated(NamedTuple):
    """Options by our names. `given_names` maps our name to the name that the user gave, for error texts."""

    options: dict[str, str]
    given_names: dict[str, str]


def translate(options: Mapping[str, str], *, batch_read: bool = False) -> Translated:
    """Returns the options under our names, in lower case. `batch_read`: of a batch read, not a stream. Raises
    InvalidOption without an equivalent, or for two values of one option."""
    known, refused = _ALIASES, _REFUSED
    if batch_read:
        known, refused = known | _BATCH_READ_ALIASES, refused | _REFUSED_IN_BATCH_READS
    ours: dict[str, str] = {}
    given_names: dict[str, str] = {}
    for given, value in options.items():
        name = given.lower()
        if name in refused and name not in known:
            raise InvalidOption(refused[name][0], value, refused[name][1])
        shown, alias = known.get(name, (name, Alias(name)))
        try:
            text = alias.convert(value)
        except ValueError as error:
            raise InvalidOption(shown, value, str(error)) from error
        if alias.name in ours and ours[alias.name] != text:
            other = given_names[alias.name]
            raise InvalidOption(shown, value, f"{other} says the same, and is given too: keep one of them")
        if alias.name:
            ours[alias.name], given_names[alias.name] = text, shown
    return Translated(ours, given_names)


def from_java(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns librdkafka's settings for Java's, a `sasl.jaas.config` included. Raises InvalidOption without an
    equivalent."""
    for name, rule in JAVA.items():
        if name in settings:
            raise InvalidOption(f"kafka.{name}", "(hidden)", rule)  # which may be a password
    others = dict(settings)
    jaas = others.pop("sasl.jaas.config", None)
    if jaas is None:
        return others
    found = _JAAS.fullmatch(jaas)
    given = _PAIR.findall(found[1]) if found else []
    pairs = {name: _unescaped(double + single) + plain for name, double, single, plain in given}
    if not {"username", "password"} <= pairs.keys():
        rule = (
            "only PlainLoginModule and ScramLoginModule with a username and a password are understood: librdkafka "
            "has settings of its own for Kerberos and OAuth (kafka.sasl.kerberos.*, kafka.sasl.oauthbearer.*)"
        )
        raise InvalidOption("kafka.sasl.jaas.config", "(hidden)", rule)
    return {"sasl.username": pairs["username"], "sasl.password": pairs["password"], **others}


def _unescaped(text: str) -> str:
    """Returns what a text between quotes in a JAAS configuration means."""
    return _ESCAPE.sub(
        lambda one: chr(int(one[1], 8)) if one[1][0] in "01234567" else _CONTROLS.get(one[1], one[1]), text
    )


@contextmanager
def named_as_given(given_names: Mapping[str, str]) -> Iterator[None]:
    """Has an InvalidOption name an option of ours as the user gave it: `given_names` of what `translate` returned."""
    try:
        yield
    except InvalidOption as error:
        name = given_names.get(error.option, error.option)
        if name == error.option:
            raise
        raise InvalidOption(name, error.value, error.rule, given=error.given) from error


@contextmanager
def named_as_written(kafka: Mapping[str, Any]) -> Iterator[None]:
    """Has an InvalidOption name a setting as the caller writes it, with `kafka.`, around each client of librdkafka.
    `kafka`: the caller's settings."""
    try:
        yield
    except InvalidOption as error:
        raise _as_written(error, kafka) from error


def _as_written(error: InvalidOption, kafka: Mapping[str, Any]) -> InvalidOption:
    if error.option == "settings":  # librdkafka does not know one, or names several
        names = [error.value] if isinstance(error.value, str) else error.value
        given = [f"kafka.{name}" for name in names if name in kafka] if isinstance(names, list) else []
        if given:
            rule = (
                f"{error.rule}. What follows kafka. must be a setting of librdkafka: correct the name, or leave it out"
            )
            return InvalidOption("option", ", ".join(given), rule)  # without values, which may be passwords
    if error.option in kafka and error.option != "bootstrap.servers":
        return InvalidOption(f"kafka.{error.option}", error.value, error.rule)
    return error
