"""Clients that show a password, a certificate or a token to Apache Kafka over TLS: what works, what a broker refuses,
and what it takes away later. Each error names its cause, and nobody writes a secret anywhere.

test_access.py has the quick part of it: a consumer with SCRAM over TLS and the minimal rights.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

import marshal_py
from marshal_py.admin import examination
from marshal_py.admin.examination import Right
from marshal_py.client.driver import consumer_driver
from marshal_py.errors import (
    AccessDenied,
    AuthenticationFailed,
    ClusterUnreachable,
    MarshalError,
    PartitionError,
    TlsMismatch,
)
from tests.support.certificates import Authority
from tests.support.command_line import invoke
from tests.support.guarded import EXPIRED, GuardedCluster, change_rights, start_guarded, token_of
from tests.support.kafka import wait_until

pytestmark = pytest.mark.proof

DEADLINE_S = 90.0
PLANTED = "pl4nted"  # is part of each secret of this file
USERS = [f"user{number:02}" for number in range(16)]
QUIET = {"log_level": 0}
INTERVAL_S = 1.0
TOKEN_LASTS_S = 6.0


@pytest.fixture(scope="module")
def guarded() -> Iterator[GuardedCluster]:
    with start_guarded({name: f"{PLANTED}-{name}" for name in USERS}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pool() -> list[str]:
    return list(USERS)


@pytest.fixture(scope="module")
def producer(guarded: GuardedCluster) -> Producer:
    """Writes to `orders`, which exists, as does the coordination topic."""
    given = {"bootstrap.servers": guarded.bootstrap, **QUIET}
    admin = AdminClient(given)
    admin.create_topics([NewTopic("orders", 2, 1)])["orders"].result(DEADLINE_S)
    with marshal_py.connect(given):
        return Producer(given)


@pytest.fixture
def group() -> str:
    return f"g-{uuid.uuid4().hex[:8]}"


@pytest.fixture(autouse=True)
def _no_secret_is_written(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[None]:
    """Not in the library's log, on the screen, or in a file that a test wrote (dumps, bundles)."""
    caplog.set_level(logging.DEBUG, "marshal_py")
    yield
    written = caplog.text + "".join(capfd.readouterr())
    assert PLANTED not in written
    for file in tmp_path.glob("written-*"):
        assert PLANTED.encode() not in file.read_bytes(), file


def planted_token(user: str, lasts_s: float = 600.0) -> tuple[str, float]:
    return token_of(user, lasts_s, jti=PLANTED)


class Client:
    """A client's settings, and its principal."""

    def __init__(self, settings: dict[str, Any], principal: str) -> None:
        self.settings, self.principal = {**settings, **QUIET}, principal


def new_client(kind: str, guarded: GuardedCluster, pool: list[str]) -> Client:
    name = pool.pop()
    if kind == "password":
        return Client(guarded.settings(name), f"User:{name}")
    if kind == "certificate":
        password = f"{PLANTED}-key"
        signed = guarded.authority.sign(name, password=password)
        return Client(guarded.with_certificate(signed, password), f"User:CN={name}")
    return Client(guarded.with_token(lambda _: planted_token(name, TOKEN_LASTS_S)), f"User:{name}")


def produce_until(producer: Producer, condition: Callable[[], bool], what: str) -> None:
    numbers = itertools.count()

    def holds() -> bool:
        for partition in range(2):
            producer.produce("orders", str(next(numbers)), partition=partition)
        producer.flush(DEADLINE_S)
        return condition()

    wait_until(holds, DEADLINE_S, what)


def take(consumer: marshal_py.Consumer) -> int:
    taken = consumer.fetch(100, min_messages=1, expires_s=0.2)
    for message in taken:
        message.ack()
    return len(taken)


def rendered(error: BaseException) -> str:
    """All that a program could print of an error."""
    return repr(error) + "".join(traceback.format_exception(error))


@pytest.mark.parametrize("kind", ["password", "certificate", "token"])
def test_a_consumer_works_with_each_kind_of_credentials(
    guarded: GuardedCluster, pool: list[str], producer: Producer, group: str, kind: str, tmp_path: Path
) -> None:
    """It lives longer than its tokens and than the broker lets a password be; nothing that it leaves has a secret."""
    client = new_client(kind, guarded, pool)
    change_rights(guarded, client.principal, examination.rights_of("consumer", "__marshal", [group], ["orders"]))
    began_s, seen = time.monotonic(), 0
    with (
        marshal_py.connect(client.settings, timeout_s=DEADLINE_S) as marshal,
        marshal.consumer(group, ["orders"], start="earliest", heartbeat_interval_s=INTERVAL_S) as consumer,
    ):

        def outlives() -> bool:
            nonlocal seen
            seen += take(consumer)
            return seen > 20 and time.monotonic() > began_s + 2 * TOKEN_LASTS_S

        produce_until(producer, outlives, "it works with its second credentials")
        events = list(consumer.events())
        assert not [event for event in events if event.kind in ("fenced", "lost", "mirror_refused")]
        shown = f"{marshal!r} {consumer!r} {consumer.info()} {marshal.metrics()} {events}"
    assert PLANTED not in shown
    file = tmp_path / "client.properties"
    texts = {**client.settings, "bootstrap.servers": guarded.bootstrap, "security.protocol": "PLAINTEXT"}
    texts = {name: value for name, value in texts.items() if isinstance(value, str)}
    if kind == "password":  # the commands have no callbacks; a certificate's are of a test of the bundle
        texts |= {name: str(value) for name, value in client.settings.items()}
        texts["log_level"] = "0"
    file.write_text("".join(f"{name}={value}\n" for name, value in texts.items()))
    for number, arguments in enumerate((("bundle", group, "-o"), ("log", "dump", "-o"))):
        told = invoke([*arguments, str(tmp_path / f"written-{number}"), "--command-config", str(file)])
        assert told.exit_code == 0, told.output
    for arguments in (("advisories", group), ("doctor", group), ("state", group, "--settings")):
        assert PLANTED not in invoke([*arguments, "--command-config", str(file)]).output


def refused_cases(guarded: GuardedCluster, folder: Path) -> dict[str, tuple[dict[str, Any], type[MarshalError], str]]:
    user = USERS[0]
    good, authority = guarded.settings(user), guarded.authority
    foreign = Authority(folder, "foreign")
    no_certificate = guarded.with_certificate(authority.sign("somebody"))
    for name in ("ssl.certificate.location", "ssl.key.location"):
        del no_certificate[name]
    password, tls = "invalid credentials with SASL mechanism SCRAM", "no connection to .*"

    def raises(_: str) -> tuple[str, float]:
        raise RuntimeError(f"{PLANTED}-answer")

    return {
        "password": ({**good, "sasl.password": f"{PLANTED}-old"}, AuthenticationFailed, password),
        "user": ({**good, "sasl.username": "nobody"}, AuthenticationFailed, f"User:nobody: .*{password}"),
        "mechanism": ({**good, "sasl.mechanism": "PLAIN"}, AuthenticationFailed, "supported mechanisms: SCRAM-SHA-512"),
        "no TLS": ({**good, "security.protocol": "SASL_PLAINTEXT"}, TlsMismatch, "this port speaks TLS"),
        "no SASL": (
            {**good, "bootstrap.servers": guarded.bootstrap, "security.protocol": "SASL_PLAINTEXT"},
            AuthenticationFailed,
            "check security.protocol",
        ),
        "server expired": (guarded.settings(user, EXPIRED), TlsMismatch, f"{tls}refused: certificate has expired"),
        "server foreign": (
            {**good, "ssl.ca.location": str(foreign.file)},
            TlsMismatch,
            f"{tls}refused: unable to get local issuer certificate",
        ),
        "client expired": (
            guarded.with_certificate(authority.sign("late", expired=True)),
            TlsMismatch,
            f"{tls}alert certificate.*their last day",
        ),
        "client foreign": (guarded.with_certificate(foreign.sign("mallory")), TlsMismatch, f"{tls}alert"),
        "client without": (no_certificate, TlsMismatch, f"{tls}alert"),
        "token expired": (
            guarded.with_token(lambda _: (planted_token(user, -60.0)[0], time.time() + 60)),
            AuthenticationFailed,
            "invalid_token.*what oauth_cb returns",
        ),
        "token of nothing": (
            guarded.with_token(lambda _: (f"{PLANTED}-token", time.time() + 60)),
            AuthenticationFailed,
            "invalid_token",
        ),
        "no token": (guarded.with_token(raises), AuthenticationFailed, "oauth_cb gave no token"),
    }


def test_what_a_broker_refuses_is_named(guarded: GuardedCluster, tmp_path: Path) -> None:
    """Long before the timeout, and as an error that does not ask for another try."""
    for name, (settings, kind, text) in refused_cases(guarded, tmp_path).items():
        began_s = time.monotonic()
        with pytest.raises(kind, match=text) as refused:
            marshal_py.connect({**settings, **QUIET}, timeout_s=10 * DEADLINE_S)
        assert time.monotonic() - began_s < DEADLINE_S, f"{name}: it waited although waiting could not help"
        assert not refused.value.retriable, name
        assert PLANTED not in rendered(refused.value), name
    without = {**guarded.settings(USERS[0]), "security.protocol": "SSL", **QUIET}
    with pytest.raises(ClusterUnreachable, match=r"a port with SASL .* check security.protocol=SSL"):
        marshal_py.connect({name: value for name, value in without.items() if "sasl" not in name}, timeout_s=5)


ROLE_RIGHTS = [
    # role, right that is taken away, the command that needs it, what the command says
    ("admin", Right("topic", "__marshal", ("Read",)), ("state", "GROUP"), "--operation Read --topic __marshal"),
    ("admin", Right("topic", "__marshal", ("Write",)), ("pause", "GROUP", "--yes"), "--operation Write --topic __mar"),
    (
        "admin",
        Right("topic", "orders", ("Describe",)),
        ("set-position", "GROUP", "orders", "--to", "earliest", "--yes"),
        "--operation Describe --topic orders",
    ),
    (
        "admin",
        Right("group", "GROUP", ("Describe",)),
        ("set-position", "GROUP", "orders", "--to", "committed", "--yes"),
        "--operation Describe --group GROUP",
    ),
    ("observer", Right("topic", "__marshal", ("Read",)), ("state", "GROUP"), "--operation Read --topic __marshal"),
    (
        "observer",
        Right("topic", "orders", ("Describe",)),
        ("set-position", "GROUP", "orders", "--to", "earliest", "--dry-run"),
        "--operation Describe --topic orders",
    ),
]


def test_each_right_of_an_admin_and_an_observer_is_necessary(
    guarded: GuardedCluster, pool: list[str], producer: Producer, group: str, tmp_path: Path
) -> None:
    """Without any one of them, a command and the doctor name it."""
    given = {"bootstrap.servers": guarded.bootstrap, **QUIET}
    with marshal_py.connect(given) as marshal, marshal.consumer(group, ["orders"], start="earliest") as consumer:
        produce_until(producer, lambda: take(consumer) > 0, "it consumes")
    everything = [examination.rights_of(role, "__marshal", [group], ["orders"]) for role in ("admin", "observer")]
    every = sum(len(right.operations) for rights in everything for right in rights)
    assert len(ROLE_RIGHTS) == every - 1, "test_access.py takes Delete away, which needs records that may go"
    for role, right, command, told in ROLE_RIGHTS:
        away = right._replace(name=right.name.replace("GROUP", group))
        name = pool.pop()
        file = tmp_path / f"{name}.properties"
        file.write_text("".join(f"{key}={value}\n" for key, value in {**guarded.settings(name), **QUIET}.items()))
        needed = examination.rights_of(role, "__marshal", [group], ["orders"])
        needed = [one._replace(operations=(operation,)) for one in needed for operation in one.operations]
        assert away in needed
        describe = [away._replace(operations=("Describe",))] if away.name == "__marshal" else []
        change_rights(guarded, f"User:{name}", [one for one in needed if one != away] + describe)
        arguments = [group if one == "GROUP" else one for one in command]
        done = invoke([*arguments, "--command-config", str(file)])
        assert done.exit_code == 1, (away, done.output)
        assert told.replace("GROUP", group) in done.stderr, (away, done.stderr)
        doctor = invoke(["doctor", group, "--topic", "orders", "--as", role, "--json", "--command-config", str(file)])
        lacks = f"User:{name} lacks {away.operations[0]} on {away.kind} {away.name}"
        assert lacks in [check["found"] for check in json.loads(doctor.stdout)["checks"]], (away, doctor.stdout)


REVOKED = [
    (Right("topic", "__marshal", ("Read",)), AccessDenied, "may not Read topic '__marshal'"),
    (Right("topic", "__marshal", ("Write",)), AccessDenied, "may not Write topic '__marshal'"),
    (Right("topic", "orders", ("Read",)), PartitionError, "authorization failed; {} needs Read on topic orders"),
]


@pytest.mark.parametrize(("right", "kind", "text"), REVOKED, ids=["log read", "log write", "data"])
def test_a_right_that_is_revoked_in_the_middle_ends_the_consumer_by_name(
    guarded: GuardedCluster,
    pool: list[str],
    producer: Producer,
    group: str,
    right: Right,
    kind: type[MarshalError],
    text: str,
) -> None:
    client = new_client("password", guarded, pool)
    ended = consume_until_refused(
        guarded, client, producer, group, lambda: change_rights(guarded, client.principal, [right], revoke=True)
    )
    assert isinstance(ended, kind), ended
    assert text.format(client.principal) in str(ended)


def test_credentials_that_end_in_the_middle_end_the_consumer_by_name(
    guarded: GuardedCluster, pool: list[str], producer: Producer, group: str
) -> None:
    """A user that is deleted, and an `oauth_cb` that fails: the broker asks again while connections last."""
    client = new_client("password", guarded, pool)
    user = client.principal.removeprefix("User:")
    ended = consume_until_refused(guarded, client, producer, group, lambda: guarded.set_password(user, None))
    assert isinstance(ended, AuthenticationFailed), ended
    assert client.principal in str(ended)
    asked: list[str] = []

    def next_token(_: str) -> tuple[str, float]:
        if asked:
            raise RuntimeError(f"{PLANTED}-answer")
        return planted_token(name, TOKEN_LASTS_S)

    name = pool.pop()
    client = Client(guarded.with_token(next_token), f"User:{name}")
    ended = consume_until_refused(guarded, client, producer, group, lambda: asked.append("no more"))
    assert isinstance(ended, AuthenticationFailed), ended


def test_a_right_on_the_group_that_is_revoked_is_an_advisory(
    guarded: GuardedCluster, pool: list[str], producer: Producer, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer works on: only the copy of its positions is refused."""
    monkeypatch.setattr(consumer_driver, "LASTS_MS", 0)
    client, told = new_client("password", guarded, pool), list[str]()
    change_rights(guarded, client.principal, examination.rights_of("consumer", "__marshal", [group], ["orders"]))
    with (
        marshal_py.connect(client.settings, timeout_s=DEADLINE_S) as marshal,
        marshal.consumer(group, ["orders"], start="earliest", heartbeat_interval_s=INTERVAL_S) as consumer,
    ):
        produce_until(producer, lambda: take(consumer) > 0, "it consumes")
        change_rights(guarded, client.principal, [Right("group", group, ("Read",))], revoke=True)

        def advised() -> bool:
            take(consumer)
            told.extend(event.text for event in consumer.events() if event.kind == "mirror_refused")
            return bool(told)

        produce_until(producer, advised, "an advisory")
        produce_until(producer, lambda: take(consumer) > 0, "it consumes still")
    assert f"{client.principal} needs Read on group {group}" in told[0]


def consume_until_refused(
    guarded: GuardedCluster, client: Client, producer: Producer, group: str, take_away: Callable[[], None]
) -> MarshalError:
    """Returns what ended a consumer after `take_away`. It has no secret, and neither have the events before."""
    change_rights(guarded, client.principal, examination.rights_of("consumer", "__marshal", [group], ["orders"]))
    shown: list[str] = []
    with contextlib.ExitStack() as stack:
        marshal = stack.enter_context(marshal_py.connect(client.settings, timeout_s=DEADLINE_S))
        consumer = stack.enter_context(
            marshal.consumer(group, ["orders"], start="earliest", heartbeat_interval_s=INTERVAL_S)
        )
        produce_until(producer, lambda: take(consumer) > 0, "it consumes")
        take_away()
        ended: list[MarshalError] = []

        def refused() -> bool:
            try:
                take(consumer)
            except MarshalError as error:
                ended.append(error)
            shown.extend(map(repr, consumer.events()))
            return bool(ended)

        produce_until(producer, refused, "it ends")
        with contextlib.suppress(MarshalError):  # closing may repeat it
            stack.close()
    assert PLANTED not in "".join(shown) + rendered(ended[0])
    return ended[0]
