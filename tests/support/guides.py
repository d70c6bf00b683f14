"""What the programs of the guides are run on, and which blocks of which page each of them runs.

The programs are in guide_programs.py and guide_services.py. tests/test_guides.py runs them on the embedded broker and
in memory, tests/kafka/test_guides.py on Apache Kafka. Everywhere a program gets topics and groups of its own, so the
names that a page shows are replaced by others.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple, TypeVar

import pytest
from confluent_kafka.admin import AdminClient

from marshal_py import Consumer, Marshal
from marshal_py.errors import UnsupportedPlatform
from marshal_py.testing import LocalCluster
from marshal_py.transport.kafka import KafkaTransport
from tests.support.client_fixtures import DEADLINE_S, until
from tests.support.kafka_topics import create_topic
from tests.support.pages import ROOT, blocks, run

AT_ONCE: Final = 4  # programs; each waits for clusters most of the time
PROGRAM_S: Final = 120.0  # only a program that never ends takes so long
MESSAGES: Final = 8
KEYS: Final = 4
VALUES: Final = [b"%d" % number for number in range(MESSAGES)]
# Some messages are as old as the page says, and Kafka would delete them soon.
KEPT: Final = {"retention.ms": "-1"}
T = TypeVar("T")


class KafkaCluster(LocalCluster):
    """Apache Kafka behind the methods of `marshal_broker`, without those that only a cluster in this process has."""

    def __init__(self, servers: str) -> None:
        super().__init__()
        self._servers, self._topics, self._marshals = servers, list[str](), list[Marshal]()
        self._admin = AdminClient({"bootstrap.servers": servers})

    @property
    def bootstrap_servers(self) -> str:
        return self._servers

    def _transport(self) -> KafkaTransport:
        return KafkaTransport(self._servers, DEADLINE_S)

    def create_topic(self, name: str, partitions: int = 1) -> None:
        create_topic(self._admin, name, partitions, KEPT)
        self._topics.append(name)

    def connect(self, client_id: str | None = None, **options: Any) -> Marshal:
        self._marshals.append(super().connect(client_id, **options))
        return self._marshals[-1]

    def run_until(self, condition: Callable[[], T], timeout_s: float = DEADLINE_S) -> T:
        found: T = until(condition, "the condition", timeout_s)
        return found

    def settle(self) -> None:
        raise self._refusal("settle")

    def advance(self, seconds: float) -> None:
        raise self._refusal("advance")

    def outage(self) -> AbstractContextManager[None]:
        raise self._refusal("outage")

    def fence(self, consumer: Any) -> AbstractContextManager[None]:
        raise self._refusal("fence")

    def kill(self, marshal: Any) -> None:
        raise self._refusal("kill")

    def _refusal(self, verb: str) -> UnsupportedPlatform:
        return UnsupportedPlatform(verb, "Apache Kafka", "use the cluster in memory")

    def close(self) -> None:
        """Closes what `connect` has returned. Other programs are connected to the same Kafka."""
        for marshal in self._marshals:
            marshal.close()
        if self._writer is not None:
            self._writer.close()
        if self._topics:
            for deleted in self._admin.delete_topics(self._topics).values():
                deleted.result(DEADLINE_S)
        del self._admin  # a page's functions may hold this object for longer than there is a Kafka


class Place:
    """A cluster with names for one program. `taken`: the blocks that it has asked for, each a page and a number."""

    def __init__(self, cluster: LocalCluster, folder: Path, postgres: str) -> None:
        """`postgres`: the URL of a server."""
        self.cluster, self.folder, self.postgres = cluster, folder, postgres
        self.taken: set[tuple[str, int]] = set()
        self.rename()

    @property
    def servers(self) -> str:
        return self.cluster.bootstrap_servers

    @cached_property
    def marshal(self) -> Marshal:
        """One that is connected to the cluster, which closes it."""
        return self.cluster.connect()

    def rename(self) -> None:
        """Gives the topics and the group new names."""
        name = uuid.uuid4().hex[:8]
        self.topic, self.letters, self.group = f"orders-{name}", f"dlq.orders-{name}", f"billing-{name}"

    def fill(self, partitions: int = 1) -> None:
        """Creates the topic, with messages of a few keys."""
        self.cluster.create_topic(self.topic, partitions)
        for number, value in enumerate(VALUES):
            self.cluster.produce(self.topic, value, key=b"k%d" % (number % KEYS))

    def block(self, page: str, number: int) -> str:
        """A block of a page, with the names that are here."""
        self.taken.add((page, number))
        found = blocks(page)[number]
        groups = ("billing", "mailing", "notifications", "shop", "service")
        here = {"orders": self.topic, "users": self.topic, "dlq.orders": self.letters}
        for name, meant in here.items() | dict.fromkeys(groups, self.group).items():
            found = found.replace(f'"{name}"', f'"{meant}"')
        return found.replace("localhost:9092", self.servers)

    def run(self, page: str, *numbers: int, **names: Any) -> dict[str, Any]:
        """Runs blocks, one after the other; returns the names that they define."""
        for number in numbers:
            names = run(self.block(page, number), page, **names)
        return names

    def from_the_start(self, page: str, number: int) -> str:
        """A block that would begin at the end of the topic, so that it reads what is there already."""
        block = self.block(page, number)
        shown = f'["{self.topic}"]'
        assert block.count(shown) == 1
        return block.replace(shown, f'{shown}, start="earliest"')

    @contextmanager
    def consumer(self, **options: Any) -> Iterator[Consumer]:
        with self.marshal.consumer(self.group, [self.topic], start="earliest", **options) as consumer:
            yield consumer

    def acked(self) -> int:
        """How many messages are below the group's positions."""
        return sum(self.marshal.group(self.group).positions().values())

    @contextmanager
    def process(self, arguments: Sequence[str], **environment: str) -> Iterator[subprocess.Popen[str]]:
        """A Python process in the folder, which ends with the block at the latest."""
        command = [sys.executable, *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True
        ) as running:
            try:
                yield running
            finally:
                running.kill()


class Guide(NamedTuple):
    """A program: the blocks that it runs, each a page and a number."""

    program: Callable[[Place], None]
    blocks: frozenset[tuple[str, int]]

    def check(self, make_cluster: Callable[[], LocalCluster], folder: Path, postgres: str) -> None:
        """Runs the program on a cluster. Fails also if it has run other blocks than it says."""
        with make_cluster() as cluster:
            place = Place(cluster, folder, postgres)
            self.program(place)
        assert place.taken == self.blocks


def guide(page: str, *numbers: int) -> Callable[[Callable[[Place], None]], Guide]:
    """Makes a Guide of a function that runs these blocks of a page at a Place, and checks what they did."""
    return lambda program: Guide(program, frozenset((page, number) for number in numbers))


def guides_of(*modules: ModuleType) -> dict[str, Guide]:
    """The guides in these modules, by name."""
    return {name: one for module in modules for name, one in vars(module).items() if isinstance(one, Guide)}


@contextmanager
def started(
    guides: Mapping[str, Guide],
    make_cluster: Callable[[], LocalCluster],
    folders: pytest.TempPathFactory,
    postgres: str,
) -> Iterator[dict[str, Future[None]]]:
    """Runs the programs in threads, some at once, because they wait most of the time. A test waits for one result.

    The threads are daemons, so that a program that does not end is one test that fails.
    """
    results: dict[str, Future[None]] = {name: Future() for name in guides}
    waiting = iter([(guide, folders.mktemp(name), results[name]) for name, guide in guides.items()])
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                found = next(waiting, None)
            if found is None:
                return
            guide, folder, result = found
            if result.set_running_or_notify_cancel():
                try:
                    guide.check(make_cluster, folder, postgres)
                except BaseException as error:
                    result.set_exception(error)
                else:
                    result.set_result(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    yield results
    for result in results.values():
        result.cancel()
    for thread in threads:
        thread.join(DEADLINE_S)
