"""The programs of the guides that use asyncio, ask a cluster or are a service, each with a check. See guides.py."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import psycopg
from confluent_kafka import Producer

import marshal_py
from marshal_py import aio
from marshal_py.sql import AsyncGuard
from tests.support.brokers import free_ports
from tests.support.client_fixtures import DEADLINE_S, until
from tests.support.guides import MESSAGES, VALUES, Place, guide
from tests.support.pages import run_awaiting

NOON_MS: Final = 1_769_860_800_000  # 2026-01-31T12:00:00Z, the time of docs/direct-get.md
# They move the time of the cluster in memory, or kill a Marshal there; tests/testing/test_plugin.py runs all of them.
MEMORY_ALONE: Final = {"test_another_consumer_takes_over"}


# --- the asynchronous programs of docs/consumer.md, docs/process.md, docs/acks.md and examples/


@guide("docs/process.md", 4)
def in_parallel_with_asyncio(at: Place) -> None:
    """Several handlers are in flight at once; one that fails gets its message again."""
    at.fill(2)
    working, done = 0, list[bytes]()

    async def main() -> None:
        several = asyncio.Event()  # the first handler waits for a second one, however late its message comes

        async with (
            aio.connect(at.servers) as marshal,
            marshal.consumer(at.group, [at.topic], start="earliest") as consumer,
        ):

            class Session:
                async def post(self, value: bytes) -> None:
                    nonlocal working
                    working += 1
                    if working > 1:
                        several.set()
                    await several.wait()
                    working -= 1
                    if value == b"3" and not done.count(b"first of 3"):
                        done.append(b"first of 3")
                        raise ConnectionError
                    done.append(value)
                    if len(done) == MESSAGES + 1:
                        consumer._ending.request_stop()

            block = at.block("docs/process.md", 4)
            await asyncio.wait_for(
                run_awaiting(block, "docs/process.md", consumer=consumer, session=Session()), DEADLINE_S
            )

    asyncio.run(main())
    assert sorted(done) == sorted([*VALUES, b"first of 3"])
    assert at.acked() == MESSAGES


@contextmanager
def service(at: Place, work: str = "") -> Iterator[tuple[subprocess.Popen[str], Callable[[], Any]]]:
    """The service in uvicorn, and a function that returns what `/ready` says; `work` replaces its handler."""
    at.fill(2)
    program = at.block("examples/service.py", 0)
    assert program.count("timeout=5.0") == 1
    (at.folder / "service.py").write_text(program.replace("timeout=5.0", "timeout=0.1") + work, encoding="utf-8")
    [port] = free_ports(1)
    last: Any = None

    def ready() -> Any:
        nonlocal last
        assert running.poll() is None, "it has ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=DEADLINE_S) as answer:
                last = json.load(answer)
        except (urllib.error.URLError, ConnectionError):
            return None
        return last

    command = ["-m", "uvicorn", "service:app", "--port", str(port), "--log-level", "warning"]
    with at.process(command, KAFKA=at.servers) as running:
        try:
            yield running, ready
        except AssertionError as error:
            running.kill()
            raise AssertionError(f"{error}. /ready said last: {last}. It wrote: {running.communicate()}") from error


@guide("examples/service.py", 0)
def service_in_uvicorn(at: Place) -> None:
    """It is ready, and ends cleanly on SIGTERM."""
    with service(at) as (running, ready):
        until(lambda: (ready() or {}).get("seen") == MESSAGES, "it is ready and has seen all")
        assert ready() == {"claims": 2, "waiting_for": "", "seen": MESSAGES}
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=DEADLINE_S)
    assert running.returncode in (0, -signal.SIGTERM), "uvicorn raises the signal again once it has ended"
    assert "Traceback" not in said
    assert at.acked() == MESSAGES


FAILS: Final = """

async def work(message):
    seen.append(message.value)
    if len(seen) == 3:
        raise ValueError("no card")
"""


@guide("examples/service.py", 0)
def service_whose_handler_fails(at: Place) -> None:
    """It says so and ends by itself, and nothing but the message that failed is left of those that it got."""
    with service(at, FAILS) as (running, _):
        _, said = running.communicate(timeout=DEADLINE_S)
        assert running.returncode == -signal.SIGTERM
    assert said.count("Traceback") == 1
    assert "ValueError: no card" in said
    assert at.acked() == 2
    assert at.marshal.group(at.group).members() == ()


HANGS: Final = """

async def work(message):
    seen.append(message.value)
    await asyncio.Event().wait()
"""


@guide("examples/service.py", 0)
def service_whose_handler_hangs(at: Place) -> None:
    """It ends on SIGTERM all the same."""
    with service(at, HANGS) as (running, ready):
        until(lambda: (ready() or {}).get("seen") == 1, "it has got a message")
        running.send_signal(signal.SIGTERM)
        _, said = running.communicate(timeout=DEADLINE_S)
    assert running.returncode == -signal.SIGTERM
    assert "Traceback" not in said
    assert at.acked() == 0


@guide("docs/acks.md", 5)
def each_effect_once_with_await(at: Place) -> None:
    """The batch is handled a second time: nothing of it is new."""
    at.fill(2)
    with psycopg.connect(at.postgres) as database:
        database.execute("DROP TABLE IF EXISTS orders, applied")
        database.execute("CREATE TABLE orders (id BYTEA, value BYTEA)")
    block = at.block("docs/acks.md", 5).replace('"dbname=shop"', repr(at.postgres))

    async def main() -> None:
        async with await psycopg.AsyncConnection.connect(at.postgres) as connection:
            await AsyncGuard().create(connection)
        async with (
            aio.connect(at.servers) as marshal,
            marshal.consumer(at.group, [at.topic], start="earliest") as consumer,
        ):
            batch = await consumer.fetch(MESSAGES, min_messages=MESSAGES, expires_s=DEADLINE_S)
            for _ in range(2):
                await run_awaiting(block, "docs/acks.md", AsyncGuard=AsyncGuard, psycopg=psycopg, batch=batch)

    asyncio.run(main())
    with psycopg.connect(at.postgres) as database:
        stored = database.execute("SELECT value FROM orders").fetchall()
    assert sorted(bytes(value) for (value,) in stored) == sorted(VALUES)


# --- docs/testing.md


@guide("docs/testing.md", *range(1, 8))
def tests_of_a_service(at: Place) -> None:
    """The page's own tests, with this cluster as `marshal_broker`."""
    names = at.run("docs/testing.md", *range(1, 8))
    tests = {name for name in names if name.startswith("test_")}
    assert tests > MEMORY_ALONE
    at.cluster.create_topic(at.topic)
    at.cluster.produce(at.topic, b"")  # the tests share the producer, which the first one would make
    with ThreadPoolExecutor() as pool:  # they wait most of the time
        results = []
        for name in sorted(tests - MEMORY_ALONE):
            at.rename()
            test = at.run("docs/testing.md", *range(1, 8))[name]
            results.append(pool.submit(test, *[at.cluster for _ in inspect.signature(test).parameters]))
        for result in results:
            result.result()


# --- the keys of docs/process.md, docs/direct-get.md, the history of docs/operations.md


@guide("docs/process.md", 8)
def a_key_of_a_subject(at: Place) -> None:
    at.cluster.create_topic(at.topic, 2)
    producer = Producer({"bootstrap.servers": at.servers})
    at.run("docs/process.md", 8, producer=producer, value=b"7")
    assert producer.flush(DEADLINE_S) == 0
    with at.marshal.topic(at.topic) as orders:
        assert orders["42.eu"].value == b"7"


@guide("docs/process.md", 7)
def one_message_at_a_time(at: Place) -> None:
    at.cluster.create_topic(at.topic)
    with at.run("docs/process.md", 7, marshal=at.marshal)["consumer"] as consumer:
        at.cluster.run_until(lambda: consumer.cached_info().claims)
        at.cluster.produce_many(at.topic, VALUES)
        for value in VALUES:
            [message] = consumer.fetch(2, min_messages=1, expires_s=DEADLINE_S)
            assert message.value == value
            message.ack()


@guide("docs/direct-get.md", 0)
def stored_messages(at: Place) -> None:
    """Every answer, in the order of the page."""
    at.cluster.create_topic(at.topic, 4)
    for number in range(8):
        at.cluster.produce(at.topic, b"filler %d" % number, partition=3, timestamp_ms=NOON_MS - 9_000 + number)
    written = (
        ("1234.name", "Bob", -2_000),
        ("1234.address", "10 Oak Lane", -1_000),
        ("1234.name", "Robert", 1_000),
        ("1234.address", "1 Main Street", 2_000),
        ("99.name", "Smith", 3_000),
    )
    for key, value, ms in written:
        at.cluster.produce(at.topic, value.encode(), key=key.encode(), timestamp_ms=NOON_MS + ms)
    block = re.sub(
        r"^    (users[.\[].*?)(  #.*)?$",
        r"    answers.append(\1)",
        at.block("docs/direct-get.md", 0),
        flags=re.MULTILINE,
    )
    answers: list[Any] = []
    exec(compile(block, "docs/direct-get.md", "exec"), {"answers": answers})
    ones, batches = answers[:4], answers[4:]
    assert [one.value for one in ones] == [b"filler 7", b"Robert", b"Robert", b"Robert"]
    since = {b"Robert", b"1 Main Street", b"Smith"}
    assert [{one.value for one in batch} for batch in batches] == [since, since, {b"Bob", b"10 Oak Lane"}]


@guide("docs/direct-get.md", 1)
def groups(at: Place) -> None:
    """The group that is made is among the names, has consumed nothing, and is deleted at the end."""
    at.cluster.create_topic(at.topic)
    block = at.block("docs/direct-get.md", 1)
    answers: list[Any] = []
    for asked in ("billing.info()", "marshal.groups()", f'marshal.groups("{at.topic}")'):
        assert block.count(f"    {asked}") == 1
        block = block.replace(f"    {asked}", f"    answers.append({asked})")
    exec(compile(block, "docs/direct-get.md", "exec"), {"answers": answers})
    info, names, consuming = answers
    assert info.policy == "balanced"
    assert at.group in names
    assert consuming == ()
    assert at.group not in at.marshal.groups()


@guide("docs/operations.md", 0)
def options_of_the_history(at: Place) -> None:
    """A Marshal with these options works."""
    at.fill()
    opened: list[marshal_py.Marshal] = []

    def connect(servers: str, **options: Any) -> None:
        opened.append(marshal_py.connect(servers, **options))

    at.run("docs/operations.md", 0, marshal_py=SimpleNamespace(connect=connect), servers=at.servers)
    [marshal] = opened
    with marshal, marshal.consumer(at.group, [at.topic], start="earliest") as consumer:
        assert [one.value for one in consumer.fetch(MESSAGES, min_messages=MESSAGES, expires_s=DEADLINE_S)] == VALUES


# --- docs/monitoring.md


@guide("docs/monitoring.md", 0)
def figures(at: Place) -> None:
    at.cluster.create_topic(at.topic)
    found = at.run("docs/monitoring.md", 0)["figures"]
    assert [one.group for one in found.consumers] == [at.group]


@guide("docs/monitoring.md", 1)
def exporter(at: Place) -> None:
    """On another port, which nobody uses."""
    at.fill()
    [port] = free_ports(1)
    block = at.block("docs/monitoring.md", 1)
    assert block.count("9100") == 2
    with at.consumer() as consumer:
        assert len(consumer.fetch(MESSAGES, min_messages=MESSAGES, expires_s=DEADLINE_S)) == MESSAGES
        names: dict[str, Any] = {"marshal": at.marshal}
        exec(compile(block.replace("9100", str(port)), "docs/monitoring.md", "exec"), names)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_S) as answer:
                text = answer.read().decode()
        finally:
            names["exporter"].close()
    [line] = [line for line in text.splitlines() if line.startswith("marshal_messages_delivered_total{")]
    assert f'group="{at.group}"' in line
    assert line.endswith(f" {MESSAGES}.0")


PROGRAM: Final = """
import sys
import marshal_py

with marshal_py.connect(sys.argv[1]) as marshal, marshal.consumer(sys.argv[2], [sys.argv[3]]) as consumer:
    consumer.info()
"""


@guide("docs/monitoring.md", 2)
def lines_with_a_time(at: Place) -> None:
    """A program that begins with the block writes its events with their time."""
    at.cluster.create_topic(at.topic)
    (at.folder / "logs.py").write_text(at.block("docs/monitoring.md", 2) + PROGRAM, encoding="utf-8")
    with at.process(["logs.py", at.servers, at.group, at.topic]) as program:
        _, said = program.communicate(timeout=DEADLINE_S)
    assert program.returncode == 0, said
    assert re.search(rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} group {at.group}: joined \(", said, re.MULTILINE), (
        said
    )
