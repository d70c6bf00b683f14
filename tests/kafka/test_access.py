"""The minimal rights of each kind of client, by SCRAM over TLS on a Kafka with an authorizer: with these it works, and
without any one of them an error names it (docs/operations.md; marshal_py/admin/examination.py; test_secured.py).

All tests use one broker with an authorizer, and each test has users of its own, so that no right of one helps another.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from confluent_kafka.cimpl import NewPartitions, NewTopic
from typer.testing import Result

import marshal_py
from marshal_py import Message, Reject
from marshal_py.admin import examination
from marshal_py.admin.group import Group
from marshal_py.client.driver import consumer_driver, loop
from marshal_py.errors import (
    AccessDenied,
    AuthenticationFailed,
    CoordinationTopicMissing,
    MarshalError,
    TlsMismatch,
    TopicMissing,
    WrongTopicSetting,
)
from marshal_py.protocol import duties
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import TopicPartition, route
from marshal_py.protocol.wire.records import Note
from marshal_py.transport.kafka import KafkaTransport
from tests.cli.shell import Shell
from tests.support.command_line import invoke
from tests.support.guarded import EXPIRED, GuardedCluster, change_rights, start_guarded
from tests.support.kafka import wait_until

DEADLINE_S = 60.0
PARTITIONS = 2
MESSAGES = 20
QUIET = {"log_level": 0}
USERS = [f"user{number:02}" for number in range(20)]


@pytest.fixture(scope="module")
def guarded() -> Iterator[GuardedCluster]:
    with start_guarded({name: f"secret-of-{name}" for name in USERS}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def root(guarded: GuardedCluster) -> AdminClient:
    """An admin client that may do everything."""
    return AdminClient({"bootstrap.servers": guarded.bootstrap, **QUIET})


@pytest.fixture(scope="module")
def pool() -> list[str]:
    return list(USERS)


class User:
    """A user of the broker, with the rights that it was granted."""

    def __init__(self, cluster: GuardedCluster, root: AdminClient, name: str, path: Path) -> None:
        self.cluster, self.root, self.name = cluster, root, name
        self.settings = {**cluster.settings(name), **QUIET}
        self.file = path / f"{name}.properties"
        self.file.write_text("".join(f"{key}={value}\n" for key, value in cluster.settings(name).items()))

    def grant(self, *granted: examination.Right) -> None:
        change_rights(self.cluster, f"User:{self.name}", granted)

    def may(self, *granted: examination.Right) -> User:
        """Grants rights, and waits until the broker applies them."""
        self.grant(*granted)
        admin = KafkaTransport(self.settings, DEADLINE_S).admin()
        wait_until(lambda: not examination.missing(granted, admin.allowed), DEADLINE_S, f"the rights of {self.name}")
        admin.close()
        return self

    def marshal(self, *arguments: str, asks: bool = False) -> Result:
        return invoke([*arguments, "--command-config", str(self.file), *(["--yes"] if asks else [])])

    def json(self, *arguments: str, asks: bool = False) -> Any:
        done = self.marshal(*arguments, "--json", asks=asks)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def new_user(guarded: GuardedCluster, root: AdminClient, pool: list[str], tmp_path: Path) -> Callable[[], User]:
    return lambda: User(guarded, root, pool.pop(), tmp_path)


@pytest.fixture(scope="module")
def orders(guarded: GuardedCluster, root: AdminClient) -> str:
    """A topic with messages. Also creates the coordination topic, with all rights."""
    root.create_topics([NewTopic("orders", PARTITIONS, 1)])["orders"].result(DEADLINE_S)
    with marshal_py.connect({"bootstrap.servers": guarded.bootstrap, **QUIET}):
        pass
    producer = Producer({"bootstrap.servers": guarded.bootstrap, **QUIET})
    for number in range(MESSAGES):
        producer.produce("orders", b"%d" % number, partition=number % PARTITIONS)
    assert producer.flush(DEADLINE_S) == 0
    return "orders"


@pytest.fixture
def group() -> str:
    return f"g-{uuid.uuid4().hex[:8]}"


# --- on a broker that creates any topic that a client asks for, as by Kafka's defaults


def test_no_request_creates_a_topic(guarded: GuardedCluster, root: AdminClient, group: str) -> None:
    """Neither metadata requests nor a producer whose coordination topic was deleted: a topic that the broker creates by
    itself has one partition and a retention of a week.
    """
    given = {"bootstrap.servers": guarded.bootstrap, **QUIET}
    log = f"log-{group}"
    with marshal_py.connect(given, coordination_topic=log, coordination_partitions=3) as marshal:
        with pytest.raises(TopicMissing):
            marshal.consumer(group, [f"missing-{group}"])
        admin = marshal.transport.admin()
        assert (admin.partition_count(log), admin.settings(log)["retention.ms"]) == (3, "-1")
        with contextlib.suppress(MarshalError):
            admin.settings(f"missing-{group}")
        assert admin.replicas(f"missing-{group}") == {}
        root.delete_topics([log])[log].result(DEADLINE_S)
        wait_until(lambda: admin.partition_count(log) is None, DEADLINE_S, "it is deleted")
        assert marshal._context.coordination._producer.list_topics(log, timeout=DEADLINE_S).topics[log].error, (
            "as before it writes"
        )
    assert [topic for topic in root.list_topics(timeout=DEADLINE_S).topics if group in topic] == []


def test_a_topic_that_a_broker_created_is_fixed_by_the_command_in_the_error(
    guarded: GuardedCluster, root: AdminClient, group: str, tmp_path: Path
) -> None:
    """The doctor reports its single partition, the error's command fixes all settings, and then connect() works."""
    given, log = {"bootstrap.servers": guarded.bootstrap, **QUIET}, f"log-{group}"
    AdminClient(given).list_topics(log, timeout=DEADLINE_S)  # another client asks for it
    wait_until(lambda: log in root.list_topics(timeout=DEADLINE_S).topics, DEADLINE_S, "the topic exists")
    file = tmp_path / "root.properties"
    file.write_text(f"bootstrap.servers={guarded.bootstrap}")
    seen = invoke(["doctor", "--command-config", str(file), "--coordination-topic", log]).stdout
    assert "has 1 partition, and nothing in it yet; 16 are usual" in seen
    with pytest.raises(WrongTopicSetting, match=r"retention\.ms=604800000") as raised:
        marshal_py.connect(given, coordination_topic=log)
    configure, grow = raised.value.command.split(" && ")
    settings = dict(pair.split("=") for pair in configure.split("--add-config ")[1].split(","))
    assert grow.endswith(f"--alter --topic {log} --partitions 16")
    entries = [ConfigEntry(*pair, incremental_operation=AlterConfigOpType.SET) for pair in settings.items()]
    resource = ConfigResource(ResourceType.TOPIC, log, incremental_configs=entries)
    root.incremental_alter_configs([resource])[resource].result(DEADLINE_S)
    root.create_partitions([NewPartitions(log, 16)])[log].result(DEADLINE_S)

    def connects() -> bool:
        with contextlib.suppress(WrongTopicSetting), marshal_py.connect(given, coordination_topic=log) as marshal:
            return marshal.root.partitions == 16
        return False

    wait_until(connects, DEADLINE_S, "the settings are applied")


def test_a_wrong_password_is_named_long_before_the_timeout(guarded: GuardedCluster) -> None:
    given = {**guarded.settings(USERS[0]), **QUIET, "sasl.password": "wrong"}
    began_s = time.monotonic()
    with pytest.raises(AuthenticationFailed, match="invalid credentials with SASL mechanism SCRAM-SHA-512"):
        marshal_py.connect(given, timeout_s=10 * DEADLINE_S)
    assert time.monotonic() - began_s < DEADLINE_S, "it waited although waiting could not help"
    with pytest.raises(TlsMismatch, match="this port speaks TLS"):
        marshal_py.connect({**given, "security.protocol": "SASL_PLAINTEXT"}, timeout_s=10 * DEADLINE_S)
    with pytest.raises(TlsMismatch, match="certificate of this server is refused: certificate has expired"):
        marshal_py.connect({**guarded.settings(USERS[0], EXPIRED), **QUIET}, timeout_s=10 * DEADLINE_S)


@pytest.fixture(autouse=True)
def _a_refused_copy_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_driver, "LASTS_MS", 0)


def consume(settings: dict[str, Any], group: str, topic: str) -> int:
    """Reads every message with the defaults: positions come from Kafka's offsets and are mirrored to them."""
    with (
        marshal_py.connect(settings, timeout_s=DEADLINE_S) as marshal,
        marshal.consumer(group, [topic], start="committed|earliest", heartbeat_interval_s=1.0) as consumer,
    ):
        seen = 0
        for message in consumer:
            message.ack()
            seen += 1
            if seen == MESSAGES:
                break
        consumer.flush()
        kinds = [event.kind for event in consumer.events()]
    assert "mirror_refused" not in kinds
    return seen


def test_a_consumer_works_with_minimal_rights(new_user: Callable[[], User], orders: str, group: str) -> None:
    """It needs no right to create or delete anything."""
    needed = examination.rights_of(examination.CONSUMER, "__marshal", [group], [orders])
    user = new_user().may(*needed)
    assert consume(user.settings, group, orders) == MESSAGES
    found = user.json("doctor", group, "--as", "consumer")
    assert found["ok"], found
    assert {"name": "rights: consumer", "level": "ok"}.items() <= next(
        check.items() for check in found["checks"] if check["name"] == "rights: consumer"
    )


@pytest.mark.parametrize("lacking", [0, *(pytest.param(number, marks=pytest.mark.proof) for number in range(1, 5))])
def test_each_of_a_consumers_rights_is_necessary(
    new_user: Callable[[], User], orders: str, group: str, lacking: int
) -> None:
    """Without any one of them, the consumer ends with an error that names it, and the doctor names it, too."""
    every = [
        examination.Right(one.kind, one.name, (operation,))
        for one in examination.rights_of(examination.CONSUMER, "__marshal", [group], [orders])
        for operation in one.operations
    ]
    assert len(every) == 5
    left_out = every[lacking]
    user = new_user().may(*(one for one in every if one != left_out))
    if left_out.kind == "topic" and left_out.operations == ("Read",) and left_out.name == orders:
        user.may(examination.Right("topic", orders, ("Describe",)))  # else it could not even see the topic
    if left_out.kind == "topic" and left_out.name == "__marshal" and left_out.operations != ("DescribeConfigs",):
        user.may(examination.Right("topic", "__marshal", ("Describe",)))
    with pytest.raises(MarshalError) as failed:
        consume(user.settings, group, orders)
    if left_out.name == orders:
        assert "orders" in str(failed.value)
        assert f"uthorization failed; User:{user.name} needs Read on topic orders" in str(failed.value)
    else:
        error = failed.value
        assert isinstance(error, AccessDenied), error
        assert (error.kind, error.name) == (left_out.kind, left_out.name)
        assert error.operation in (*left_out.operations, "Describe")
        assert error.principal == f"User:{user.name}"
    doctor = user.marshal("doctor", group, "--topic", orders, "--as", "consumer", "--json")
    assert doctor.exit_code == 1
    (check,) = [one for one in json.loads(doctor.stdout)["checks"] if one["level"] == "fail"]
    assert check["found"] == f"User:{user.name} lacks {left_out.operations[0]} on {left_out.kind} {left_out.name}"
    assert check["advice"].endswith(f"--operation {left_out.operations[0]} --{left_out.kind} {left_out.name}")
    assert f"--allow-principal User:{user.name}" in check["advice"]


def test_a_letter_that_may_not_be_written_waits_for_the_right(
    new_user: Callable[[], User], root: AdminClient, orders: str, group: str
) -> None:
    """The event names the right. The message is unfinished until its letter is written, and others are handled."""
    letters = f"letters-{group}"
    root.create_topics([NewTopic(letters, 1, 1)])[letters].result(DEADLINE_S)
    needed = examination.rights_of(examination.CONSUMER, "__marshal", [group], [orders])
    user = new_user().may(*needed, examination.Right("topic", letters, ("Describe",)))
    refused = list[str]()

    def handle(message: Message) -> None:
        if (message.partition, message.offset) == (0, 0):
            raise Reject("no amount")

    with (
        marshal_py.connect(user.settings, timeout_s=DEADLINE_S) as marshal,
        marshal.consumer(group, [orders], start="earliest", dead_letter_topic=letters) as consumer,
        consumer.process(handle) as work,
    ):

        def told() -> bool:
            refused.extend(event.text for event in consumer.events() if event.kind == "dead_letter_failed")
            return bool(refused) and work.stats().finished == MESSAGES - 1

        wait_until(told, DEADLINE_S, "the refusal is told, and the others are handled")
        assert f"User:{user.name} may not Write topic {letters!r}: kafka-acls.sh --add" in refused[0]
        assert (
            sum(claim.position for claim in consumer.cached_info().claims.values()) <= MESSAGES - MESSAGES // PARTITIONS
        )
        user.grant(examination.Right("topic", letters, ("Write",)))
        positions = consumer.cached_info
        wait_until(
            lambda: sum(c.position for c in positions().claims.values()) == MESSAGES, DEADLINE_S, "it is written"
        )


def test_views_say_of_what_nobody_may_read(
    new_user: Callable[[], User], guarded: GuardedCluster, root: AdminClient, orders: str, group: str
) -> None:
    """D13: a consumer that may read one of its topics alone works on, and each view says what nobody consumes."""
    secret = f"secret-{group}"
    root.create_topics([NewTopic(secret, 1, 1)])[secret].result(DEADLINE_S)
    needed = examination.rights_of(examination.CONSUMER, "__marshal", [group], [orders])
    user = new_user().may(*needed, examination.Right("topic", secret, ("Describe",)))
    kinds: list[tuple[str, str]] = []

    def parked(consumer: marshal_py.Consumer) -> bool:
        for message in consumer.fetch(MESSAGES, min_messages=MESSAGES, expires_s=0.2):
            message.ack()
        kinds.extend((event.kind, event.topic) for event in consumer.events())
        return ("parked", secret) in kinds

    with (
        marshal_py.connect(user.settings, timeout_s=DEADLINE_S) as marshal,
        marshal.consumer(group, [orders, secret], start="earliest", heartbeat_interval_s=1.0) as consumer,
    ):
        wait_until(lambda: parked(consumer), DEADLINE_S, "nobody can read it")
        assert marshal.metrics().consumers[0].not_consumed == {"parked": 1}
        assert consumer.cached_info().waiting_for == "", "it has other work"
        admin = Shell(guarded.bootstrap)
        told = f"1 partitions of '{secret}' are parked (PartitionUnreadable)"
        assert any(told in notice for notice in admin.json("state", group)["groups"][0]["notices"])
        assert any(told in notice for notice in admin.json("state", "--lag", group)["notices"])
        checks = json.loads(admin.run("doctor", group, "--json").stdout)["checks"]
        assert any(told in check["found"] for check in checks if check["name"] == "parked partitions")
        assert f"parked {secret}:0" in admin.run("advisories", group, "--kind", "alarming").stdout


def test_a_client_without_rights_learns_what_to_ask_for(new_user: Callable[[], User], orders: str, group: str) -> None:
    """The error does not claim that the topic is missing: an authorizer hides the difference."""
    user = new_user()
    with pytest.raises(AccessDenied, match="Describe topic '__marshal'"):
        consume(user.settings, group, orders)
    for arguments in (("state",), ("groups", "ls"), ("pause", group, "--yes"), ("log", "dump")):
        refused = user.marshal(*arguments)
        assert refused.exit_code == 1
        assert "--operation Describe --topic __marshal" in refused.stderr
    found = user.marshal("doctor", "--json")
    assert found.exit_code == 0, "without --as, missing rights are only warnings"
    levels = {check["name"]: check["level"] for check in json.loads(found.stdout)["checks"]}
    assert levels["rights: observer"] == levels["rights: consumer"] == levels["rights: admin"] == "warn"


def test_an_observer_reads_and_changes_nothing(
    new_user: Callable[[], User], guarded: GuardedCluster, orders: str, group: str, tmp_path: Path
) -> None:
    consume({"bootstrap.servers": guarded.bootstrap, **QUIET}, group, orders)
    user = new_user().may(*examination.rights_of(examination.OBSERVER, "__marshal", [group], [orders]))
    user.json("bundle", group, "-o", str(tmp_path / "bundle"))
    assert user.name.encode() not in (tmp_path / "bundle").read_bytes()
    checked = user.marshal("check", group, "--lag", "0", "--age", "1s")
    assert (checked.exit_code, checked.stdout.split(":")[0]) == (1, f"WARNING {group}"), "nobody is there any more"
    assert user.json("doctor", group, "--as", "observer")["ok"]
    (state,) = user.json("state", group)["groups"]
    assert [one["lag"] for one in state["partitions"]] == [0] * PARTITIONS
    assert group in [one["group"] for one in user.json("groups", "ls")]
    assert user.json("explain", group, f"{orders}:0")["position"] == MESSAGES // PARTITIONS
    assert user.json("set-position", group, orders, "--to", "earliest", "--dry-run")["outcome"] == "dry_run"
    for arguments in (("pause", group), ("set-position", group, orders, "--to", "0"), ("groups", "rm", group)):
        refused = user.marshal(*arguments, asks=True)
        assert refused.exit_code == 1
        assert "--operation Write --topic __marshal" in refused.stderr, refused.stderr
    assert user.json("state", group, "--settings")["pause"] is None


def test_an_admin_works_with_minimal_rights(
    new_user: Callable[[], User], guarded: GuardedCluster, orders: str, group: str
) -> None:
    """It needs no right to read the messages of the group's topics."""
    consume({"bootstrap.servers": guarded.bootstrap, **QUIET}, group, orders)
    user = new_user().may(*examination.rights_of(examination.ADMIN, "__marshal", [group], [orders]))
    assert user.json("doctor", group, "--as", "admin")["ok"]
    assert user.json("pause", group, asks=True)["token"] >= 0
    assert user.json("set-position", group, orders, "--to", "earliest", "--adopt", asks=True)["outcome"] == "moved"
    assert user.json("set-position", group, orders, "--to", "committed", "--adopt", asks=True)["outcome"] == "moved"
    assert user.json("groups", "update", group, "--policy", "greedy", asks=True)["offset"] > 0
    assert user.json("groups", "rm", group, asks=True)["deleted"]


def test_a_client_that_may_not_delete_leaves_truncation_to_an_admin(
    new_user: Callable[[], User], guarded: GuardedCluster, orders: str, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N12: a consumer with minimal rights writes snapshots; Kafka refuses its deletion; one advisory reports that."""
    monkeypatch.setattr(loop, "TRUNCATE_EVERY_MS", 50)
    monkeypatch.setattr(loop, "TRUNCATE_RECORDS_MIN", 16)
    monkeypatch.setattr(duties, "STAGGER_RECORDS", 16)
    user = new_user().may(*examination.rights_of(examination.CONSUMER, "__marshal", [group], [orders]))
    admin_user = new_user().may(*examination.rights_of(examination.ADMIN, "__marshal", [group], [orders]))
    options = {"snapshot_every_records": 64, "history_kept_s": 0.0, "timeout_s": DEADLINE_S}
    producer = Producer({"bootstrap.servers": guarded.bootstrap, **QUIET})
    with (
        marshal_py.connect(user.settings, client_id="lesser", **options) as marshal,
        marshal.consumer(group, [orders], heartbeat_interval_s=1.0) as consumer,
    ):
        log = TopicPartition("__marshal", route(group, marshal.root.partitions))
        value = codec.encode(Note(-1, "filler"), group, marshal.root.incarnation)
        kept = marshal._loop.maintenance.snapshotters[log.partition]

        def grow() -> bool:
            for _ in range(16):
                producer.produce(log.topic, value, group.encode(), log.partition)
            return producer.flush(DEADLINE_S) == 0

        def refused() -> list[Any]:
            return [event for event in consumer._driver.events if event.kind == "truncation_refused"]

        wait_until(lambda: grow() and bool(refused()), DEADLINE_S, "Kafka refuses the deletion")
        at = kept.confirmed_at
        wait_until(lambda: grow() and kept.confirmed_at > at, DEADLINE_S, "snapshots continue")
        (advisory,) = refused()
        assert "uthoriz" in advisory.text, advisory.text
        assert advisory.log == log.partition
        assert marshal._context.admin.bounds([log])[log].first == 0
        wait_until(lambda: grow() and kept.deletable() > 0, DEADLINE_S, "its heartbeats show that it has read them")
        truncate = ("snapshot", "--log", str(log.partition), "--truncate", "--keep", "0s")
        lesser = user.marshal(*truncate, asks=True)
        assert lesser.exit_code == 1
        assert "the deletion of its records is refused" in lesser.stderr
        assert f"{user.name} needs Delete on topic __marshal" in lesser.stderr
        assert marshal._context.admin.bounds([log])[log].first == 0
        (row,) = admin_user.json(*truncate, asks=True)
        assert row["clients"] == ["lesser"]
        assert marshal._context.admin.bounds([log])[log].first == row["deleted_before"] > 0
        assert len(refused()) == 1
        assert not consumer.cached_info().closed
    with marshal_py.connect(user.settings, timeout_s=DEADLINE_S) as later, later.consumer(group, [orders]) as consumer:
        assert later._loop.worlds[log.partition].began_at >= row["deleted_before"], "it began at the snapshot"
        wait_until(lambda: len(consumer.cached_info().claims) == PARTITIONS, DEADLINE_S, "it works")


def test_a_client_with_the_right_creates_the_coordination_topic(
    new_user: Callable[[], User], orders: str, group: str
) -> None:
    """Without the right, the error names the command or the missing right, whichever the broker answers first."""
    user, errors = new_user(), []
    user.grant(examination.Right("topic", "__other", ("Describe",)))

    def connects() -> bool:
        try:
            marshal_py.connect(user.settings, coordination_topic="__other").close()
        except (AccessDenied, CoordinationTopicMissing) as error:
            errors.append(error)
            return False
        return True

    wait_until(
        lambda: not connects() and isinstance(errors[-1], CoordinationTopicMissing), DEADLINE_S, "it may describe"
    )
    assert "--create --topic __other" in str(errors[-1])
    user.grant(examination.Right("topic", "__other", ("Read", "Write", "DescribeConfigs", "Create")))
    wait_until(connects, DEADLINE_S, "it may create")
    assert user.json("groups", "ls", "--coordination-topic", "__other") == []


def test_an_admin_without_a_right_on_the_group(
    new_user: Callable[[], User], guarded: GuardedCluster, orders: str, group: str
) -> None:
    """Only a move to committed offsets needs a right on the group."""
    consume({"bootstrap.servers": guarded.bootstrap, **QUIET}, group, orders)
    user = new_user().may(*examination.rights_of(examination.ADMIN, "__marshal", [], [orders]))
    where = Group(KafkaTransport(user.settings, DEADLINE_S), group, "__marshal")
    with pytest.raises(AccessDenied, match=f"Describe group '{group}'"):
        where.set_position(orders, "committed")
    assert where.set_position(orders, "earliest").offset > 0


def test_putting_letters_back_without_a_right_on_their_topic(
    new_user: Callable[[], User], guarded: GuardedCluster, root: AdminClient, orders: str
) -> None:
    """The rights of docs/acks.md. Kafka does not say which topic it refuses, and then refuses the abort, too."""
    letters = f"letters-{uuid.uuid4().hex[:8]}"
    root.create_topics([NewTopic(letters, 1, 1)])[letters].result(DEADLINE_S)
    producer = Producer({"bootstrap.servers": guarded.bootstrap, **QUIET})
    own = {"topic": orders, "partition": "0", "offset": "0", "group": "billing", "message": "Timeout"}
    producer.produce(letters, b"0", headers=[(f"__dlq.errors.{name}", text.encode()) for name, text in own.items()])
    assert producer.flush(DEADLINE_S) == 0
    user, redrive = new_user(), ("dead-letters", "redrive", letters)
    user.grant(examination.Right("transactional_id", f"marshal-redrive-{letters}", ("Write",)))
    user.may(examination.Right("topic", letters, ("Read", "Write")), examination.Right("topic", orders, ("Describe",)))
    assert f"may not Write topic '{orders}'" in user.marshal(*redrive, asks=True).stderr
    user.may(examination.Right("topic", orders, ("Write",)))
    assert user.marshal(*redrive, asks=True).stdout == "1 put back, 0 were before\n"
