"""The code of the README, of pages under docs/ and of examples/ runs: blocks are taken from the files, not copied."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.payments import ADVANCE
from marshal_py import Message
from marshal_py.embedded import Broker
from marshal_py.protocol.advisory import ALARMING, KINDS
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.producer import KafkaProducer

ROOT = Path(__file__).resolve().parent.parent
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
README = (ROOT / "README.md").read_text()
CONSUMER_PAGE = (ROOT / "docs" / "consumer.md").read_text()
FENCING_PAGE = (ROOT / "docs" / "fencing.md").read_text()
README_LINES_MAX = 150
DEADLINE_S = 60


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker(topics={"__marshal": 16, "orders": 12, "mails": 4}) as running:
        yield running


def fill(broker: Broker, topic: str, count: int) -> None:
    sink = KafkaProducer(KafkaTransport(broker.bootstrap_servers, DEADLINE_S))
    for number in range(count):
        sink.write(topic, f"message {number}".encode(), key=str(number).encode())
    sink.flush(DEADLINE_S)
    sink.close()


def from_the_start(block: str, broker: Broker) -> str:
    """The block, against this broker, reading what is there already."""
    code = block.replace("localhost:9092", broker.bootstrap_servers)
    return code.replace('["orders"]', '["orders"], start="earliest"')


def test_the_files_that_contributing_names_exist() -> None:
    """CONTRIBUTING.md tells newcomers where a change goes; a renamed file must be renamed there too."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)*(?:[a-z_]+\.py|[a-z_]+/))`", page))
    assert len(named) > 40
    places = (ROOT, ROOT / "marshal_py")
    assert {name for name in named if not any((place / name).exists() for place in places)} == set()


def test_every_line_that_is_logged_is_in_the_docs() -> None:
    """docs/logging.md has each format with its level. To add a line, add a row."""
    page = (ROOT / "docs" / "logging.md").read_text()
    levels = {
        "debug": "DEBUG",
        "info": "INFO",
        "warning": "WARNING",
        "error": "ERROR",
        "exception": "ERROR",
        "critical": "CRITICAL",
        "log": "",
    }
    seen = 0
    for file in sorted((ROOT / "marshal_py").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())) if "demo" not in file.parts else ():
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logger"), attr=attr)) if attr in levels:
                    seen += 1
                    text = node.args[attr == "log"]
                    assert isinstance(text, ast.Constant), f"{file}:{node.lineno}: a line is a constant format"
                    level = levels[attr]
                    rows = [row for row in page.splitlines() if f"`{text.value}`" in row and f"| {level}" in row]
                    where = f"{file}:{node.lineno}"
                    assert rows or attr == "log", f"{where}: {level} {text.value!r} is not in docs/logging.md"
    assert seen > 20, "loggers have another name now, and this test looks at nothing"


def test_the_levels_of_events_are_in_the_docs() -> None:
    page = (ROOT / "docs" / "logging.md").read_text()
    rows = {level: re.search(rf"^\| {level} \| `([a-z_ ]+)` \|$", page, re.MULTILINE) for level in ("WARNING", "INFO")}
    found = {level: set(row[1].split()) for level, row in rows.items() if row is not None}
    assert found == {"WARNING": ALARMING, "INFO": KINDS.keys() - ALARMING}


class Enough(Exception):
    """Ends an example's endless loop from inside its own handler."""


def test_there_are_examples() -> None:
    """Pages without blocks would pass every other test here."""
    assert (len(PYTHON.findall(README)), len(PYTHON.findall(CONSUMER_PAGE))) == (1, 2)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= README_LINES_MAX


def test_the_index_lists_every_page() -> None:
    """docs/README.md: a page that nobody finds might as well be missing."""
    index = (ROOT / "docs" / "README.md").read_text()
    listed = set(re.findall(r"\]\(([a-z-]+\.md)\)", index))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_first_example_charges_every_order(broker: Broker) -> None:
    """The embedding example, with a `charge` that stops it after the last order."""
    fill(broker, "orders", 50)
    charged: list[bytes] = []

    def charge(message: Message) -> None:
        charged.append(message.value)
        assert len(str(message.token)) == 49
        if len(charged) == 50:
            raise Enough

    code = from_the_start(PYTHON.findall(README)[0], broker)
    with pytest.raises(Enough):
        exec(compile(code, "README.md", "exec"), {"charge": charge})
    assert sorted(charged) == sorted(f"message {number}".encode() for number in range(50))


def test_the_sql_is_that_of_the_tested_example() -> None:
    """tests/test_payments.py shows what it does."""
    [block] = re.findall(r"```sql\n(.*?)```", FENCING_PAGE, re.DOTALL)
    assert block.strip() == ADVANCE.strip()


def test_consume_example_stores_every_order_once(broker: Broker) -> None:
    """The example with a handler, which an exit ends."""
    fill(broker, "orders", 50)
    stored: list[bytes] = []

    def store(value: bytes, fence: Any) -> None:
        stored.append(value)
        if len(stored) == 50:
            raise SystemExit

    code = from_the_start(PYTHON.findall(CONSUMER_PAGE)[1], broker)
    with pytest.raises(SystemExit):
        exec(compile(code, "consumer.md", "exec"), {"store": store})
    assert sorted(stored) == sorted(f"message {number}".encode() for number in range(50))


def test_batch_example_stores_every_order_once(broker: Broker) -> None:
    """The batch example, at most once."""
    fill(broker, "orders", 50)
    stored: list[bytes] = []

    def store(values: list[bytes], fence: Any) -> None:
        stored.extend(values)
        if len(stored) >= 50:
            raise Enough

    code = from_the_start(PYTHON.findall(CONSUMER_PAGE)[0], broker)
    with pytest.raises(Enough):
        exec(compile(code, "docs/consumer.md", "exec"), {"store": store})
    assert sorted(stored) == sorted(f"message {number}".encode() for number in range(50))


@pytest.mark.parametrize(
    ("name", "topic", "word"), [("at_least_once.py", "orders", "charging"), ("at_most_once.py", "mails", "sending")]
)
def test_example_program(broker: Broker, name: str, topic: str, word: str) -> None:
    """Each program under examples/ handles what is there and ends cleanly on SIGTERM."""
    fill(broker, topic, 20)
    command = [sys.executable, str(ROOT / "examples" / name), broker.bootstrap_servers, topic]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        assert program.stdout is not None
        lines = [program.stdout.readline() for _ in range(20)]
        program.send_signal(signal.SIGTERM)
        assert program.wait(DEADLINE_S) == 0
    assert all(line.startswith(word) for line in lines), lines
