"""`marshal get` and `marshal consume` with deserializers, and with a Schema Registry on loopback."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import fastavro
import pytest
from confluent_kafka import Producer

from marshal_py.transport.embedded import Broker
from tests.cli.shell import Shell

TOPIC = "get-encoded"
AVRO = {
    "type": "record",
    "name": "User",
    "fields": [
        {"name": "name", "type": "string"},
        {"name": "since", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "raw", "type": "bytes"},
    ],
}
JSON = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Age", "type": "object"}
SCHEMAS = {
    1: {"schema": json.dumps(AVRO)},  # registries leave the type of Avro out
    2: {"schema": json.dumps(JSON), "schemaType": "JSON"},
    3: {"schema": 'syntax = "proto3"; message M {}', "schemaType": "PROTOBUF"},
}
DECODED = {"name": "Bob", "since": "2026-01-31T12:00:00Z", "raw": "AP8="}


class Registry(BaseHTTPRequestHandler):
    """Answers GET /schemas/ids/N."""

    def do_GET(self) -> None:
        number = self.path.partition("?")[0].rpartition("/")[2]
        found = SCHEMAS.get(int(number)) if number.isdigit() else None
        body = json.dumps(found or {"error_code": 40403, "message": f"no schema {number}"}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def registry() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Registry) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def encoded(number: int, content: bytes) -> bytes:
    return b"\0" + number.to_bytes(4, "big") + content


@pytest.fixture(scope="module")
def users(shell: Shell, broker: Broker) -> Shell:
    """Partition 0: Avro, JSON, a tombstone. Partition 1: text, Protobuf, an unknown schema."""
    broker.create_topic(TOPIC, 2)
    avro = io.BytesIO()
    user = {"name": "Bob", "since": datetime(2026, 1, 31, 12, tzinfo=UTC), "raw": b"\0\xff"}
    fastavro.schemaless_writer(avro, AVRO, user)
    producer = Producer({"bootstrap.servers": shell.servers, "log_level": 2})
    values = [encoded(1, avro.getvalue()), encoded(2, b'{"age": 7}'), None]
    others = [b"text", encoded(3, b"\0"), encoded(9, b"x")]
    for partition, contents in enumerate((values, others)):
        for at, value in enumerate(contents):
            producer.produce(TOPIC, value, b"key-%d" % at, partition)
    assert producer.flush(60) == 0
    return shell


def said(shell: Shell, *arguments: str) -> tuple[int, str]:
    result = shell.run(*arguments)
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


def test_a_registry_says_how_values_are_read(users: Shell, registry: str) -> None:
    ask = ("get", TOPIC, "--partition", "0", "--schema-registry", registry)
    result = users.run(*ask, "--batch", "3", "--json")
    assert result.exit_code == 0, result.output
    avro, by_json, tombstone, _ = map(json.loads, result.stdout.splitlines())
    assert (avro["key"], avro["value"], avro["value_base64"]) == ("key-0", DECODED, None)
    assert (by_json["value"], tombstone["value"]) == ({"age": 7}, None)
    shown = users.run(*ask, "--batch", "3").stdout
    assert '"name": "Bob"' in shown
    assert "tombstone: the key is deleted" in shown


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        ("0", "does not begin with a zero byte and the number of a schema"),
        ("1", "its schema is of type PROTOBUF, and AVRO and JSON are read"),
        ("2", "no schema 9"),
    ],
)
def test_values_that_the_registry_cannot_read(users: Shell, registry: str, offset: str, reason: str) -> None:
    code, text = said(users, "get", TOPIC, "--partition", "1", "--offset", offset, "--schema-registry", registry)
    assert (code, f"the value of {TOPIC}:1@{offset} cannot be deserialized" in text, reason in text) == (1, True, True)


def test_a_function_of_ones_own(users: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the working folder. It gets the bytes and a context; what JSON does not have is printed as text."""
    (tmp_path / "my_decoding.py").write_text(
        "from decimal import Decimal\n"
        "def key(content, context):\n    return {'of': context.field, 'n': Decimal(content[-1:].decode())}\n"
        "def upper(content, context):\n    return content.decode().upper()\n"
        "nothing = 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARSHAL_SCHEMA_REGISTRY", "no URL, and nobody asks it")
    ask = ["get", TOPIC, "--partition", "1", "--key-deserializer", "my_decoding:key"]
    result = users.run(*ask, "--offset", "0", "--value-deserializer", "my_decoding:upper", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["key"], found["value"]) == ({"of": "key", "n": "0"}, "TEXT")
    assert "TEXT" in users.run(*ask, "--offset", "0", "--value-deserializer", "my_decoding:upper").output
    code, text = said(users, *ask, "--offset", "0", "--value-deserializer", "my_decoding:nothing")
    assert (code, "a int cannot be called" in text) == (2, True)


def test_a_consumer_reads_values_the_same_way(users: Shell, registry: str) -> None:
    """A value that cannot be read is not acknowledged."""
    ask = ("consume", TOPIC, "--group", "decoding", "--start", f'{{"{TOPIC}": {{"0": 0, "1": -1}}}}')
    result = users.run(*ask, "--schema-registry", registry, "--max-messages", "2")
    assert result.exit_code == 0, result.output
    avro, by_json = map(json.loads, result.stdout.splitlines())
    assert (avro, by_json) == (DECODED, {"age": 7})
    broken = users.run(
        *("consume", TOPIC, "--group", "broken", "--start", f'{{"{TOPIC}": {{"0": -1, "1": 0}}}}'),
        *("--schema-registry", registry, "--max-messages", "1"),
    )
    assert broken.exit_code == 1
    assert f"{TOPIC}:1 at offset 0 cannot be deserialized" in broken.stderr
    assert "it is not acknowledged" in broken.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--value-deserializer", "json"], "expected MODULE:FUNCTION or registry"),
        (["--value-deserializer", "no_such_module:f"], "No module named 'no_such_module'; PYTHONPATH"),
        (["--key-deserializer", "json:nothing"], "has no attribute 'nothing'"),
        (["--key-deserializer", "registry"], "name the registry by --schema-registry URL"),
        (["--schema-registry", "here"], "--schema-registry 'here'"),
    ],
)
def test_options_that_are_wrong(shell: Shell, arguments: list[str], says: str) -> None:
    code, text = said(shell, "get", TOPIC, "key", *arguments)
    assert (code, says in text) == (2, True), text
