"""How long does one question to a topic take, with and without a key index, beside kcat and Kafka's console consumer?

The topic holds small messages of many keys, in the order of time, over several partitions; the page cache is warm. Rows
of `Topic.get` are single questions to an open topic, each about another place. kcat and Kafka's console consumer are
started once per question, as people do in a shell, so their rows include their start. kcat must be on PATH; the console
consumer is fetched with the jars of tests/support if it is not. A row says why a program did not run. A key question to
them reads the topic and filters, and the console consumer cannot be asked for a time. The last rows are rates: building
the index, and looking for a key that does not exist, beside a bare client that reads the same messages and compares
nothing.
"""

from __future__ import annotations

import random
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

from confluent_kafka import Consumer, Producer
from confluent_kafka import TopicPartition as KafkaPartition

from bench.environment import FILL_TIMEOUT_S, QUIET, BenchEnvironment, Result, spread
from marshal_py.errors import MessageNotFound
from marshal_py.topics.keys import PARTITIONERS
from marshal_py.topics.topic import Topic
from marshal_py.transport import settings
from marshal_py.transport.kafka import KafkaTransport
from tests.support.jars import KafkaUnavailable, cache_folder, find_java, tools_jars

PARTITIONS: Final = 8
MESSAGES: Final = 1_000_000
MESSAGES_TINY: Final = 8_000
KEYS: Final = 100_000
KEYS_TINY: Final = 2_000
HOT_KEYS: Final = 1_024  # written once more at the end, as by producers that keep all keys of a table up to date
SIZE_BYTES: Final = 100
ASKED: Final = 200  # questions per row
ASKED_TINY: Final = 3
BATCHES: Final = 20  # of multi_last per row
STARTED: Final = 5  # programs per row
RATES: Final = 3  # rounds of the rates
BARE_PIECE: Final = 500
TIMEOUT_S: Final = 120.0
PARTITIONER: Final = "murmur2_random"
SPACING_MS: Final = 10  # between two messages, by their timestamps


def key_of(number: int) -> str:
    return f"user.{number}"


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    count, keys = (MESSAGES_TINY, KEYS_TINY) if tiny else (MESSAGES, KEYS)
    name = environment.topic(PARTITIONS)
    began_ms = int(time.time() * 1000) - count * SPACING_MS
    environment.say(f"direct_get: writing {count:,} messages")
    fill(environment.bootstrap, name, count, keys, began_ms)
    transport = KafkaTransport(environment.bootstrap, TIMEOUT_S)
    plain, indexed = (Topic(transport, name, partitioner=PARTITIONER) for _ in range(2))
    whole = Topic(transport, name)  # searches every partition
    dice, asked = random.Random(1), ASKED_TINY if tiny else ASKED
    rows: list[list[Any]] = []

    def times(question: str, ask: Callable[[], object], rounds: int) -> None:
        ask()  # connections, leaders, pages
        rows.append([question, "marshal_py", spread(timed(ask) for _ in range(rounds)), "ms"])
        environment.say(f"direct_get: {question}")

    try:
        builds = rates(environment, whole, indexed, count, 1 if tiny else RATES)
        end = count // PARTITIONS * 9 // 10  # keys fill the partitions almost evenly

        def at_offset() -> object:
            return plain.get(offset=dice.randrange(end), partition=dice.randrange(PARTITIONS))

        def at_time() -> object:
            at_ms = began_ms + dice.randrange(count) * SPACING_MS
            return plain.get(start_time=datetime.fromtimestamp(at_ms / 1000, UTC))

        times("offset", at_offset, asked)
        times("time", at_time, asked)
        hot = [key_of(number) for number in range(min(HOT_KEYS, keys))]
        batches = ASKED_TINY if tiny else BATCHES
        times("last of a key, no index", lambda: plain[key_of(dice.randrange(keys))], max(3, asked // 10))

        def any_keys() -> object:
            return indexed.get(multi_last=[key_of(at) for at in dice.sample(range(keys), len(hot))])

        times("last of a key, index", lambda: indexed[key_of(dice.randrange(keys))], asked)
        times(f"last of {len(hot):,} keys near the end, index", lambda: indexed.get(multi_last=hot), batches)
        times(f"last of {len(hot):,} keys anywhere, index", any_keys, batches)
        rows += others(environment.bootstrap, name, count, began_ms, 0 if tiny else STARTED)
        rows += builds
    finally:
        for topic in (plain, indexed, whole):
            topic.close()
        environment.drop(name)
    notes = [
        f"{count:,} messages of {SIZE_BYTES} bytes and {keys:,} keys in {PARTITIONS} partitions",
        "goals: offset 5 ms, last of a key with an index 2 ms, 1,024 keys with an index 100 ms (p50); "
        "index 100,000 messages/s; a scan for a key 0.8 of a bare client",
    ]
    return Result("direct_get", ["question", "contestant", "result", "unit"], rows, notes)


def timed(ask: Callable[[], object]) -> float:
    """Runs `ask` and returns how many ms it took."""
    began = time.perf_counter()
    ask()
    return (time.perf_counter() - began) * 1000


def fill(bootstrap: str, name: str, count: int, keys: int, began_ms: int) -> None:
    """Writes `count` messages whose keys choose the partitions, the first HOT_KEYS keys once more at the end."""
    choose = PARTITIONERS[PARTITIONER]
    assert choose is not None
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "acks": "all", **QUIET})
    value, dice = b"x" * SIZE_BYTES, random.Random(0)
    numbers = [dice.randrange(keys) for _ in range(count - keys)] + [*range(keys)]
    dice.shuffle(numbers)
    hot = min(HOT_KEYS, keys)
    for at, number in enumerate([*numbers[: count - hot], *range(hot)]):
        key = key_of(number).encode()
        while True:
            try:
                producer.produce(name, value, key, choose(key, PARTITIONS), timestamp=began_ms + at * SPACING_MS)
                break
            except BufferError:
                producer.poll(0.1)
    if left := producer.flush(FILL_TIMEOUT_S):
        raise RuntimeError(f"{name}: {left} messages without an answer")


def rates(environment: BenchEnvironment, whole: Topic, indexed: Topic, count: int, rounds: int) -> list[list[Any]]:
    """Measures rates in messages per second, the contestants in turn. Leaves `indexed` with an index."""
    built, scanned, bare = [], [], []
    whole.get(batch=1)  # connects, as the bare client has done when its clock begins
    for number in range(rounds):
        file = environment.folder / f"direct-get-{whole.name}-{number}.idx"
        indexed.key_index(file)
        built.append(count / timed(indexed.update_index) * 1000)
        scanned.append(count / timed(lambda: absent(whole)) * 1000)
        bare.append(count / read_all(environment.bootstrap, whole.name, count))
    return [
        ["index build", "marshal_py", spread(built, 0), "messages/s"],
        ["scan for a key, no index", "marshal_py", spread(scanned, 0), "messages/s"],
        ["scan for a key, no index", "bare confluent-kafka", spread(bare, 0), "messages/s"],
        ["scan, relative to the bare client", "", spread(s / b for s, b in zip(scanned, bare, strict=True)), "ratio"],
    ]


def absent(topic: Topic) -> None:
    """Looks for a key that does not exist, in every partition."""
    try:
        topic.get(next_by_key="nobody")
    except MessageNotFound:
        return
    raise RuntimeError("found a key that nobody wrote")


def read_all(bootstrap: str, name: str, count: int) -> float:
    """Reads the topic with a bare client that has the library's settings. Returns how many seconds that took.

    It takes BARE_PIECE messages at once, with which it is fastest: larger pieces start collections of cyclic garbage.
    """
    given = {"bootstrap.servers": bootstrap, **QUIET}
    consumer = Consumer({**settings.data_reader(given, "bench", "bench", None), "queued.max.messages.kbytes": 65_536})
    consumer.list_topics(name, timeout=TIMEOUT_S)  # connects
    began, seen = time.perf_counter(), 0
    consumer.assign([KafkaPartition(name, number, 0) for number in range(PARTITIONS)])
    while seen < count:
        messages = consumer.consume(BARE_PIECE, 1.0)
        if not messages:
            raise TimeoutError("no message")
        seen += sum([not message.error() for message in messages])
    took_s = time.perf_counter() - began
    consumer.close()
    return took_s


def others(bootstrap: str, name: str, count: int, began_ms: int, rounds: int) -> list[list[Any]]:
    """Asks the programs of others, each question `rounds` times. With none they are only named."""
    partition, offset, key = PARTITIONS // 2, count // PARTITIONS // 2, key_of(0)
    rows: list[list[Any]] = []
    for program, command in (("kcat", kcat), ("console consumer", console_consumer)):
        start, missing = command() if rounds else ("", "not run: --tiny")
        if program == "kcat":
            start = f"{start} -q -C -b {bootstrap} -t {name}"
            asked = {
                "offset": f"{start} -p {partition} -o {offset} -c 1 -e",
                "time": f"{start} -o s@{began_ms + 1000} -c 1 -e",
                "last of a key, no index": f"{start} -e -f '%k %s\\n' | grep '^{key} ' | tail -1",
            }
        else:
            start = f"{start} --bootstrap-server {bootstrap} --topic {name} --property print.key=true"
            whole = f"{start} --from-beginning --max-messages {count}"
            asked = {
                "offset": f"{start} --partition {partition} --offset {offset} --max-messages 1",
                "last of a key, no index": f"{whole} | grep -P '^{key}\\t' | tail -1",
            }
        for question, line in asked.items():
            result = missing or spread(timed(lambda line=line: shell(line)) for _ in range(rounds))  # type: ignore[misc]
            rows.append([question, program, result, "ms"])
    return rows


def kcat() -> tuple[str, str]:
    """Returns how to start kcat, and why it cannot run ("" if it can)."""
    return "kcat", "" if shutil.which("kcat") else "not run: kcat is not on PATH"


def console_consumer() -> tuple[str, str]:
    """Returns how to start Kafka's console consumer, and why it cannot run ("" if it can)."""
    if (found := shutil.which("kafka-console-consumer.sh")) is not None:
        return found, ""
    try:
        java = find_java()
        path = ":".join(map(str, tools_jars(java, cache_folder())))
    except KafkaUnavailable as error:
        return "", f"not run: {error.step}"
    return shlex.join([java.executable, "-cp", path, "org.apache.kafka.tools.consumer.ConsoleConsumer"]), ""


def shell(line: str) -> None:
    done = subprocess.run(line, shell=True, capture_output=True, timeout=TIMEOUT_S, check=False)
    if not done.stdout:
        raise RuntimeError(f"no answer of: {line}\n{done.stderr.decode(errors='replace')[-500:]}")
