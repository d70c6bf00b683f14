"""What the README and docs/ say is there; examples/ runs. tests/test_guides.py runs the programs of the pages."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from examples.payments import ADVANCE
from marshal_py import ConsumerOptions, GroupConfig
from marshal_py.aio import AsyncGroup
from marshal_py.embedded import Broker
from marshal_py.protocol.member.advisory import ALARMING
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.producer import KafkaProducer
from tests.test_architecture import ROOMS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FENCING_PAGE = (ROOT / "docs" / "acks.md").read_text()
README_LINES_MAX = 120
WORDS_MAX = {"PROTOCOL.md": 6_600, "CONTRIBUTING.md": 1_100}  # one sitting each: 35 minutes, and 6
DOCS_WORDS_MAX = 30_000  # without the marks of tables, which `wc -w` counts, too
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


def test_the_files_that_contributing_names_exist() -> None:
    """CONTRIBUTING.md tells newcomers where a change goes; a renamed file must be renamed there too."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)*(?:[a-z_]+\.py|[a-z_]+/))`", page))
    assert len(named) > 20
    places = (ROOT, ROOT / "marshal_py")
    assert {name for name in named if not any((place / name).exists() for place in places)} == set()


def test_contributing_names_every_room() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = [room for rooms in ROOMS.values() for room in rooms]
    assert len(rooms) > 20
    assert [room for room in rooms if f"`{room}`" not in page] == []


def test_every_line_that_is_logged_has_a_constant_format() -> None:
    """Programs that collect log lines group them by it."""
    methods, seen = {"debug", "info", "warning", "error", "exception", "critical", "log", "write"}, 0
    loggers = {"log", "logger", "_logger", "LOGGER", "lines", "_lines"}
    for file in sorted((ROOT / "marshal_py").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())) if "demo" not in file.parts else ():
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name), attr=attr)) if (
                    name in loggers and attr in methods
                ):
                    seen += 1
                    assert isinstance(node.args[attr in {"log", "write"}], ast.Constant), f"{file}:{node.lineno}"
    assert seen > 30, "loggers have another name now, and this test looks at nothing"


def test_the_levels_of_events_are_in_the_docs() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    [row] = re.findall(r"^\| WARNING \| `([a-z_ ]+)` \|\n\| INFO \| all others \|$", page, re.MULTILINE)
    assert sorted(row.split()) == sorted(ALARMING)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= README_LINES_MAX


@pytest.mark.parametrize("page", WORDS_MAX)
def test_a_page_can_be_read_in_one_sitting(page: str) -> None:
    """What another implementation need not obey belongs into docs/protocol/; a newcomer needs little."""
    words = [word for word in (ROOT / page).read_text(encoding="utf-8").split() if re.search(r"\w", word)]
    assert 500 < len(words) <= WORDS_MAX[page]


def test_the_pages_are_short_together() -> None:
    """What is added to a page is taken from it elsewhere."""
    text = " ".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= DOCS_WORDS_MAX


def test_the_index_lists_every_page() -> None:
    """docs/README.md: a page that nobody finds might as well be missing."""
    index = (ROOT / "docs" / "README.md").read_text()
    listed = set(re.findall(r"\]\(([a-z-]+\.md)\)", index))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}


def test_the_settings_of_a_group_are_in_the_docs() -> None:
    """docs/direct-get.md names all of them."""
    page = (ROOT / "docs" / "direct-get.md").read_text()
    assert [field.name for field in fields(GroupConfig) if f"`{field.name}`" not in page] == []


def test_the_settings_of_a_consumer_are_in_the_docs() -> None:
    """docs/consumer.md has each of them once, in the order of `ConsumerOptions`, which is by purpose."""
    section = (ROOT / "docs" / "consumer.md").read_text().partition("## Settings of `marshal.consumer")[2]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", section, re.MULTILINE)
    assert re.findall(r"\w+", " ".join(rows)) == [field.name for field in fields(ConsumerOptions)]


def test_the_operations_on_a_group_are_in_the_docs() -> None:
    """docs/command-line.md names every method of `marshal.group(name)` that asyncio programs have, too."""
    section = (ROOT / "docs" / "command-line.md").read_text().partition("## From Python")[2]
    methods = {name for name in dir(AsyncGroup) if not name.startswith("_")} - {"name"}
    assert "unpin" in methods
    assert [name for name in sorted(methods) if f"`{name}`" not in section] == []


def test_the_broker_to_try_things_on() -> None:
    command = [sys.executable, str(ROOT / "examples" / "broker.py"), "orders", "mails"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as program:
        assert program.stdout is not None
        name, _, address = program.stdout.readline().strip().partition("=")
        found = AdminClient({"bootstrap.servers": address}).list_topics(timeout=DEADLINE_S).topics
        program.send_signal(signal.SIGTERM)
        assert program.wait(DEADLINE_S) == 0
    assert name == "export MARSHAL_BOOTSTRAP_SERVERS"
    assert [len(found[topic].partitions) for topic in ("orders", "mails")] == [12, 12]


def test_the_sql_is_that_of_the_tested_example() -> None:
    """tests/test_payments.py shows what it does."""
    [block] = re.findall(r"```sql\n(.*?)```", FENCING_PAGE, re.DOTALL)
    assert block.strip() == ADVANCE.strip()


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
