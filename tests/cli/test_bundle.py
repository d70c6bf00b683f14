"""`marshal bundle`: what is in the file, what is not, and who reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from marshal_py import connect
from marshal_py.admin import archive
from marshal_py.admin.archive import HIDDEN, LEFT_OUT
from marshal_py.admin.views.group_info import Check
from marshal_py.log.observer import Observer
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import NONE, route
from marshal_py.protocol.wire.records import Note
from marshal_py.transport.dump import Reader, memory_transport
from marshal_py.transport.embedded import Broker
from marshal_py.transport.ports import ClusterInfo
from tests.cli.shell import DEADLINE_S, Shell
from tests.support.client_fixtures import until
from tests.support.healths import health

GROUP, PLANTED = "letters", "pa55word"


@pytest.fixture(scope="module")
def bundle(shell: Shell, broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a group that has ended a message with words of its own, and whose `process` is held up by a message with a
    key; somebody else has written into its log."""
    producer = Producer({"bootstrap.servers": shell.servers})
    for _ in range(3):
        producer.produce("full", f"{PLANTED}-value", f"{PLANTED}-key", headers={"h": f"{PLANTED}-header"})
    assert producer.flush(DEADLINE_S) == 0
    with (
        connect({"bootstrap.servers": shell.servers, "log_level": 0}, client_id="worker-1") as marshal,
        marshal.consumer(GROUP, ["full"], start="earliest") as consumer,
    ):
        message = consumer.next(DEADLINE_S)
        assert message is not None
        assert message.term(f"{PLANTED}-term: {message.value!r}")
        consumer.flush()
        assert shell.run("pause", GROUP, "--for", "10m", "--reason", "lunch with bob", "--yes").exit_code == 0
        assert shell.run("resume", GROUP, "--yes").exit_code == 0
        until(lambda: consumer.info().claims, "it owns the partition again")
        (member,) = marshal.group(GROUP).members()
        held_up = f"the message of key '{PLANTED}-key' has held up the position for 10 s"
        note = Note(member.session, "held_up", "full", message.partition, message.offset + 1, NONE, held_up)
        value = codec.encode(note, GROUP, marshal.root.incarnation)
        producer.produce("__marshal", value, GROUP, partition=route(GROUP, 16))
        producer.produce("__marshal", f"{PLANTED}-foreign", f"{PLANTED}-foreign", partition=route(GROUP, 16))
        producer.produce("__marshal", None, f"{PLANTED}-tombstone", partition=route(GROUP, 16))
        assert producer.flush(DEADLINE_S) == 0
        assert f"{PLANTED}-key" in shell.run("state", GROUP).stdout
        folder = tmp_path_factory.mktemp("bundles")
        settings = folder / "client.properties"
        settings.write_text(f"client.id=tool\nclient.rack=here\nsasl.password={PLANTED}-setting\n", encoding="utf-8")
        path = folder / "letters.bundle"
        told = shell.json("bundle", GROUP, "-o", str(path), "--command-config", str(settings))
    assert told == {"file": str(path), "records": told["records"], "left_out": 4}
    return path


def test_nothing_that_was_planted_is_in_it(bundle: Path) -> None:
    content = bundle.read_bytes()
    with Reader(bundle) as reader:
        for record in reader:
            content += b"".join(filter(None, (record.key, record.value)))
    assert PLANTED.encode() not in content
    for stays in (b"worker-1", b"lunch with bob", LEFT_OUT.encode(), GROUP.encode(), b"held up"):
        assert stays in content


def test_its_header_says_what_was_known_besides(bundle: Path) -> None:
    with Reader(bundle) as reader:
        about = reader.header.about
    assert {"marshal_py", "protocol", "fold", "python", "system", "confluent-kafka", "librdkafka"} == {
        *about["versions"]
    }
    assert about["settings"].items() >= {"client.id": "tool", "sasl.password": HIDDEN, "client.rack": "here"}.items()
    assert (about["health"]["group"], about["health"]["lag"]) == (GROUP, 2)
    assert [check["name"] for check in about["checks"]][:2] == ["bundle", "cluster"]


def test_it_knows_the_ends_of_all_partitions(
    shell: Shell, billing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("marshal_py.admin.watch.ENDS_MAX", 1)
    path = tmp_path / "billing.bundle"
    assert shell.run("bundle", billing, "-o", str(path)).exit_code == 0
    with Reader(path) as reader:
        health = reader.header.about["health"]
    assert (health["unknown"], len(health["partitions"])) == (0, 4)


def test_commands_read_it_as_a_dump(bundle: Path, shell: Shell) -> None:
    offline, where = Shell(""), ("--dump", str(bundle))
    live, kept = (one.json("explain", GROUP, "full:0", *more) for one, more in ((shell, ()), (offline, where)))
    assert kept["position"] == live["position"]
    (ended,) = offline.run("advisories", GROUP, "--kind", "terminated", *where).stdout.splitlines()
    assert ended.endswith(LEFT_OUT)
    assert offline.run("log", "tail", GROUP, *where).exit_code == 0
    assert offline.run("check", GROUP, *where).exit_code == 1, "a message holds its position up"
    told = offline.run("doctor", *where)
    assert (told.exit_code, told.stdout.splitlines()[0].startswith("ok    bundle: marshal_py ")) == (0, True)
    assert f"warn  held up: '{GROUP}': full:0 is held up at 1 (said " in told.stdout


def test_what_compares_digests_refuses_it(bundle: Path, shell: Shell) -> None:
    for command in (("verify", "--dump"), ("simulate", "--dump"), ("log", "load", "--coordination-topic", "__copy")):
        refused = shell.run(*command, str(bundle))
        assert (refused.exit_code, "a bundle leaves words out" in refused.stderr) == (1, True), command


def test_without_words_the_fold_says_the_same(bundle: Path, shell: Shell, tmp_path: Path) -> None:
    dumped = tmp_path / "whole.dump"
    assert shell.run("log", "dump", GROUP, "-o", str(dumped)).exit_code == 0
    found, last = [], NONE  # the whole dump is newer
    for path in (bundle, dumped):
        header, transport = memory_transport(path)
        with Observer(transport, header.topic) as observer:
            for one in observer.read(GROUP):
                at = one.record.offset
                if at == last:
                    break
            last = at
            (group,) = (one for _, one in observer.groups() if one.name == GROUP)
            counters = observer.worlds[route(GROUP, 16)].counters
            found.append((counters, repr(group.partitions), group.pause_change))
    assert found[0] == found[1]
    assert found[0][0]["garbage"] == 2


def test_a_secret_is_hidden_wherever_it_occurs() -> None:
    value: Any = {"a": ["user alice-b failed", {"b": 7}], "c": ("alice-b",)}
    assert archive._without(value, ["alice-b"]) == {"a": [f"user {HIDDEN} failed", {"b": 7}], "c": [HIDDEN]}


def test_only_what_may_be_a_secret_is_hidden_and_the_whole_of_it() -> None:
    settings = {"sasl.username": "admin", "sasl.password": "admin-S3cret!", "enable.idempotence": "true", "x": "6000"}
    told = Check("x", "warn", "it is true: admin with admin-S3cret! failed at 126000")
    cluster = ClusterInfo("id", (), {}, {}, {})
    found = archive.about(settings, [told], health("billing"), cluster)
    assert found["checks"][1]["found"] == f"it is true: {HIDDEN} with {HIDDEN} failed at 126000"
    assert found["settings"] == dict.fromkeys(settings, HIDDEN)


def test_a_group_that_is_not_there_and_a_path_that_is_none(shell: Shell, billing: str, tmp_path: Path) -> None:
    missing = shell.run("bundle", "leters", "-o", str(tmp_path / "x"))
    assert (missing.exit_code, "is not in __marshal" in missing.stderr) == (1, True)
    assert not (tmp_path / "x").exists()
    assert shell.run("bundle", billing, "-o", str(tmp_path / "no" / "x")).exit_code == 1
    assert json.loads(shell.run("bundle", billing, "-o", str(tmp_path / "y"), "--json").stdout)["left_out"] == 0
