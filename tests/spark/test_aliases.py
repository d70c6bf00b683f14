"""Options of Spark's own Kafka source: a query with them is understood, or refused with advice."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from confluent_kafka import Consumer
from pyspark.sql.datasource import CaseInsensitiveDict

from marshal_py.errors import InvalidOption
from marshal_py.spark.log_tables import log_schema
from marshal_py.spark.stream.aliases import (
    ALIASES,
    BATCH_READ_ALIASES,
    JAVA,
    REFUSED,
    REFUSED_IN_BATCH_READS,
    named_as_written,
)
from marshal_py.spark.stream.backfills import OPTIONS as BATCH_OPTIONS
from marshal_py.spark.stream.backfills import BackfillOptions
from marshal_py.spark.stream.options import OPTIONS, StreamOptions, kafka_options
from marshal_py.transport.settings import create_client
from pyspark_marshal import DefaultSource

OLD = {
    "kafka.bootstrap.servers": "127.0.0.1:1",
    "subscribe": "orders,payments",
    "startingOffsets": "earliest",
    "maxOffsetsPerTrigger": "5000",
    "minPartitions": "16",
    "failOnDataLoss": "false",
    "kafka.security.protocol": "SASL_SSL",
}
NEEDED = {"group": "g", "subscribe": "t", "kafka.bootstrap.servers": "127.0.0.1:1"}


def test_a_query_moves_from_sparks_own_source_with_its_options() -> None:
    """Given in two ways: as written, and as Spark passes options, in a dict that ignores case."""
    for given in ({**OLD, "group": "billing"}, CaseInsensitiveDict({**OLD, "GROUP": "billing"})):
        options = StreamOptions.of(given)
        assert (options.group, options.topics, options.rows_max) == ("billing", ("orders", "payments"), 5000)
        assert (options.consumer, options.min_partitions) == ({"start": "earliest"}, 16)
        assert options.kafka == {"bootstrap.servers": "127.0.0.1:1", "security.protocol": "SASL_SSL"}
    assert "headers" in DefaultSource(CaseInsensitiveDict({**OLD, "group": "g"})).schema()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"Group": "g", "TOPICS": "t", "Bootstrap.Servers": "a:1", "Max_Rows_Per_Batch": "7", "KAFKA.Client.Id": "x"},
        {
            "group": "g",
            "SUBSCRIBE": "t",
            "kafka.BOOTSTRAP.servers": "a:1",
            "maxoffsetspertrigger": "7",
            "kafka.client.id": "x",
        },
    ],
)
def test_upper_and_lower_case_do_not_matter_in_names(given: dict[str, str]) -> None:
    options = StreamOptions.of(given)
    assert (options.group, options.topics, options.rows_max) == ("g", ("t",), 7)
    assert options.kafka == {"bootstrap.servers": "a:1", "client.id": "x"}


@pytest.mark.parametrize(
    ("name", "value", "start"),
    [
        ("startingOffsets", "latest", "latest"),
        ("startingOffsets", '{"t":{"0":23,"1":-2}}', '{"t":{"0":23,"1":-2}}'),
        ("startingOffsets", "Earliest", "earliest"),
    ],
)
def test_position_text_a_query_begins(name: str, value: str, start: str) -> None:
    assert StreamOptions.of({**NEEDED, name: value}).consumer == {"start": start}


@pytest.mark.parametrize("name", [*REFUSED, *(name.lower() for name in REFUSED), *(f"kafka.{name}" for name in JAVA)])
def test_an_option_without_an_equivalent_is_refused_with_advice(name: str) -> None:
    with pytest.raises(InvalidOption) as raised:
        DefaultSource({**NEEDED, name: "1"}).schema()
    rules = {**REFUSED, **{f"kafka.{name}": rule for name, rule in JAVA.items()}}
    assert raised.value.option in rules, "in its usual spelling"
    assert raised.value.rule == rules[raised.value.option]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("failOnDataLoss", "true", "noted as lost"),
        ("startingOffsets", '{"x":{"0":1}}', "none of the"),
        ("minPartitions", "0", "from 1 on"),
        ("maxOffsetsPerTrigger", "all", "from 1 on"),
        ("maxOffsetsPerTrigger", "9" * 5_000, "from 1 on"),
    ],
)
def test_a_wrong_value_is_refused_at_load(name: str, value: str, says: str) -> None:
    with pytest.raises(InvalidOption, match=says) as raised:
        DefaultSource({**NEEDED, name: value}).schema()
    assert raised.value.option == name, "under the name that the user gave"


def test_two_names_of_one_option_must_have_the_same_value() -> None:
    assert StreamOptions.of({**NEEDED, "topics": "t"}).topics == ("t",)
    with pytest.raises(InvalidOption, match="startingOffsets says the same"):
        StreamOptions.of({**NEEDED, "startingOffsets": "earliest", "start": "latest"})


def test_a_pattern_replaces_topics() -> None:
    """Topics that are created later are read from their beginning, as by Spark's own source."""
    needed = {"group": "g", "bootstrap.servers": "a:1"}
    options = StreamOptions.of({**needed, "topics_pattern": "orders-*", "startingOffsets": '{"orders-1":{"0":5}}'})
    assert (options.topics, options.topics_pattern) == ((), "orders-*")
    with pytest.raises(InvalidOption, match="a pattern is a glob"):
        StreamOptions.of({**needed, "topics_pattern": "orders-(a|b)"})
    with pytest.raises(InvalidOption, match="use the option topics_pattern, a glob"):
        StreamOptions.of({**needed, "subscribePattern": "orders-.*"})
    with pytest.raises(InvalidOption, match="topics is given too"):
        StreamOptions.of({**NEEDED, "topics_pattern": "t"})


@pytest.mark.parametrize("name", ["sasl.password", "ssl.keystore.password", "sasl.jaas.config"])
@pytest.mark.parametrize(
    "source",
    [StreamOptions.of, lambda given: BackfillOptions.of({k: v for k, v in given.items() if k != "group"}), log_schema],
    ids=["stream", "batch_read", "log"],
)
def test_a_password_under_an_unknown_name_is_not_shown(source: Callable[[dict[str, str]], object], name: str) -> None:
    """Who leaves `kafka.` out is told so."""
    with pytest.raises(InvalidOption, match=f"option='{name}' is not allowed.*write kafka.{name}") as raised:
        source({name: "s3cret", "group": "g", "bootstrap.servers": "a:1"})
    assert "s3cret" not in str(raised.value)
    with pytest.raises(InvalidOption, match=r"option='grupe' is not allowed: (?!.*write kafka)"):
        source({"grupe": "s3cret", "bootstrap.servers": "a:1"})


def test_a_password_that_only_java_has_is_not_shown() -> None:
    with pytest.raises(
        InvalidOption, match=r"kafka\.ssl\.truststore\.password=.*use kafka\.ssl\.ca\.location"
    ) as raised:
        StreamOptions.of({**NEEDED, "kafka.ssl.truststore.password": "s3cret"})
    assert "s3cret" not in str(raised.value)


def test_a_missing_group_is_explained() -> None:
    with pytest.raises(InvalidOption, match=r"group.*the position is kept under its name"):
        StreamOptions.of({"subscribe": "t", "kafka.bootstrap.servers": "a:1"})


@pytest.mark.parametrize(
    "module",
    [
        "org.apache.kafka.common.security.plain.PlainLoginModule",
        "org.apache.kafka.common.security.scram.ScramLoginModule",
        "kafkashaded.org.apache.kafka.common.security.plain.PlainLoginModule",
    ],
)
def test_a_password_in_javas_form_is_understood(module: str) -> None:
    jaas = f"""{module} required username="me" password='a "b"=;c';"""
    assert kafka_options({"kafka.sasl.jaas.config": jaas, "bootstrap.servers": "a:1"}) == {
        "sasl.username": "me",
        "sasl.password": 'a "b"=;c',
        "bootstrap.servers": "a:1",
    }


@pytest.mark.parametrize(
    ("written", "password"),
    [(r'"a\"b;c"', 'a"b;c'), (r"'a\'b\\'", "a'b\\"), (r'"\t\101\0411\778\."', "\tA!1?8."), (r"plain\t", r"plain\t")],
)
def test_escapes_in_javas_form_are_understood(written: str, password: str) -> None:
    jaas = f"x.PlainLoginModule required username=me password={written};"
    assert kafka_options({"kafka.sasl.jaas.config": jaas, "bootstrap.servers": "a:1"})["sasl.password"] == password


@pytest.mark.parametrize(
    "jaas",
    [
        "com.sun.security.auth.module.Krb5LoginModule required useKeyTab=true;",
        "secret",
        "x.PlainLoginModule required username=me;",
    ],
)
def test_another_login_is_refused_and_not_shown(jaas: str) -> None:
    with pytest.raises(InvalidOption, match="PlainLoginModule") as raised:
        kafka_options({"kafka.sasl.jaas.config": jaas, "bootstrap.servers": "a:1"})
    assert jaas not in str(raised.value)


def test_advice_names_options_that_are_not_refused_there() -> None:
    """A batch read must not be told to use an option that it refuses."""
    assert REFUSED_IN_BATCH_READS.keys() | BATCH_READ_ALIASES.keys() >= REFUSED.keys()
    stream_only = set(OPTIONS) - set(BATCH_OPTIONS) - {"group"}
    for rule in REFUSED_IN_BATCH_READS.values():
        assert not stream_only & set(re.findall(r"\w+", rule)), rule


def test_every_alias_leads_to_an_option() -> None:
    """No other test would find a spelling mistake in the table."""
    values = {"startingOffsets": "earliest", "failOnDataLoss": "false"}
    for name in ALIASES:
        given = {"group": "g", "topics": "t", "bootstrap.servers": "a:1", "min_rows_per_batch": "5"}
        given[name] = values.get(name, "5")
        given.pop(ALIASES[name].name, None)
        StreamOptions.of(given)


def test_settings_that_contradict_each_other_are_named_as_they_were_written() -> None:
    """librdkafka names both, and no source gives their values away."""
    given = {"max.poll.interval.ms": "9", "session.timeout.ms": "90"}
    client = {**given, "bootstrap.servers": "127.0.0.1:1", "group.id": "g"}
    with (
        pytest.raises(InvalidOption, match=r"option='kafka\.max\.poll\.interval\.ms, kafka\.session\.timeout\.ms'"),
        named_as_written(given),
    ):
        create_client(Consumer, client)
    with pytest.raises(InvalidOption, match="settings="), named_as_written({}):
        raise InvalidOption("settings", ["acks"], "of a client that is not the caller's")
