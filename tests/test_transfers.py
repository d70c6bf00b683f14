"""examples/transfers.py: prepare, `double_ack`, commit over two databases, ended or frozen at every single step.

Strategy: a log with one owner at a time, in memory, and two real SQLite databases. A counter of steps ends the process,
or freezes it while its successor takes over and works, at each of its steps in turn. A frozen one continues afterwards,
to its end or until it dies some steps later. Stores that lack a rule must be found by the same runs.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from examples.transfers import Store, run, settle, transfer
from marshal_py import ClaimLost
from marshal_py.info import ClaimInfo
from marshal_py.protocol.wire.identity import Token
from tests.support.client_fixtures import MemoryTestCluster, joined, positions

TRANSFERS = [{"debit": "alice", "credit": "bob", "cents": 1}, {"debit": "alice", "credit": "eve", "cents": 10}]
EXPECTED = [{"alice": -11}, {"bob": 1, "eve": 10}]
STEPS_MAX = 40  # of two messages: more than there are


class Died(Exception):
    """The process ends here."""


class Process:
    """Counts its steps. `at`: what happens before a step, by its number."""

    def __init__(self, at: dict[int, Callable[[], None]] | None = None) -> None:
        self.at = at or {}
        self.taken = 0

    def point(self) -> None:
        self.taken += 1
        self.at.get(self.taken - 1, lambda: None)()


def dies() -> None:
    raise Died


class SteppedStore(Store):
    """A store that is a step of a process before each transaction."""

    process = Process()

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.db.execute("PRAGMA synchronous = OFF")  # processes die here, and never the machine

    def settle(self, topic: str, partition: int, token: str, position: int) -> None:
        self.process.point()
        super().settle(topic, partition, token, position)

    def prepare(self, message: Any, account: str, cents: int) -> None:
        self.process.point()
        super().prepare(message, account, cents)

    def commit(self, message: Any) -> None:
        self.process.point()
        super().commit(message)

    def roll_back(self, message: Any) -> None:
        self.process.point()
        super().roll_back(message)


class ForgetfulStore(SteppedStore):
    """Wrong: a new owner drops whatever is prepared, as if the log had said nothing."""

    def settle(self, topic: str, partition: int, token: str, position: int) -> None:
        super().settle(topic, partition, token, 0)


class UnfencedStore(SteppedStore):
    """Wrong: an owner that was replaced may still prepare, and settle."""

    def _check_owner(self, topic: str, partition: int, token: str) -> None:
        return


class Log:
    """The position of one partition, and who owns it."""

    def __init__(self) -> None:
        self.position = 0
        self.owner = 0

    def claim(self, process: Process, stores: Sequence[Store]) -> None:
        """A new owner works from the position to the end. A message that it receives may be delivered late."""
        self.owner += 1
        epoch, at = self.owner, self.position
        while at < len(TRANSFERS) and transfer(stores, Delivery(self, process, epoch, at)):  # type: ignore[arg-type]
            at += 1

    def takes(self, epoch: int, offset: int) -> None:
        if epoch != self.owner:
            raise ClaimLost("transfers", ("transfers:0",))
        self.position = offset + 1


class Delivery:
    topic, partition = "transfers", 0

    def __init__(self, log: Log, process: Process, epoch: int, offset: int) -> None:
        self.log, self.process, self.epoch, self.offset = log, process, epoch, offset
        self.token = token(epoch)
        self.value = json.dumps(TRANSFERS[offset]).encode()

    def double_ack(self, timeout_s: float) -> None:
        self.process.point()
        self.log.takes(self.epoch, self.offset)
        self.process.point()  # the log has the ack, and the answer is on its way


def token(epoch: int) -> Token:
    return Token(b"i" * 16, epoch)


class Service:
    """Opens the two databases for one process after the other. `empty`: a database to begin with, made once."""

    def __init__(self, folder: Path, kind: type[SteppedStore], empty: Path) -> None:
        folder.mkdir()
        self.paths, self.kind = [str(shutil.copy(empty, folder / name)) for name in ("from.db", "to.db")], kind
        self.log = Log()

    def work(self, process: Process) -> None:
        stores = [self.kind(path) for path in self.paths]
        for store in stores:
            store.process = process
        try:
            self.log.claim(process, stores)
        except Died:
            pass
        finally:
            for store in stores:
                store.close()

    def balances(self) -> list[dict[str, int]]:
        """After one more owner, which finds no message: it settles when it claims."""
        self.log.owner += 1
        for path in self.paths:
            store = self.kind(path)
            store.settle("transfers", 0, str(token(self.log.owner)), self.log.position)
            store.close()
        found = [Store(path) for path in self.paths]
        accounts = [dict(store.db.execute("SELECT id, cents FROM account")) for store in found]
        assert [store.db.execute("SELECT count(*) FROM prepared").fetchone()[0] for store in found] == [0, 0]
        for store in found:
            store.close()
        return accounts


def outcomes(folder: Path, kind: type[SteppedStore], frozen: bool, lives: int | None = None) -> Counter[str]:
    """Ends or freezes the first process at each of its steps, and counts how the accounts are then.

    `lives`: how many steps a frozen process takes after its successor has worked, before it dies; None for all.
    """
    found: Counter[str] = Counter()
    empty = folder / "empty.db"
    Store(str(empty)).close()
    for step in count():
        assert step < STEPS_MAX
        service = Service(folder / str(step), kind, empty)

        def freezes(service: Service = service) -> None:
            service.work(Process())

        process = Process({step: freezes if frozen else dies})
        if lives is not None:
            process.at[step + lives] = dies
        service.work(process)
        service.work(Process())
        if process.taken <= step:
            return found  # it has no such step: all were tried
        found["exact" if service.balances() == EXPECTED else "wrong"] += 1
    raise AssertionError


@pytest.mark.parametrize(
    ("frozen", "lives"), [(False, None), (True, None), (True, 1), (True, 2)], ids=["dies", "late", "late 1", "late 2"]
)
def test_both_databases_have_every_transfer_once(tmp_path: Path, frozen: bool, lives: int | None) -> None:
    """Partitioned groups: "call prepare on all of them and if they all are prepared call DoubleAck()"."""
    found = outcomes(tmp_path, SteppedStore, frozen, lives)
    assert found["wrong"] == 0
    assert found["exact"] >= 16, "two messages, each with two settlements, preparations and commits, and an ack"


@pytest.mark.parametrize(("kind", "frozen", "lives"), [(ForgetfulStore, False, None), (UnfencedStore, True, 1)])
def test_a_store_that_lacks_a_rule_is_found(
    tmp_path: Path, kind: type[SteppedStore], frozen: bool, lives: int | None
) -> None:
    assert outcomes(tmp_path, kind, frozen, lives)["wrong"] > 0


def test_the_program_transfers_with_a_real_consumer(tmp_path: Path) -> None:
    """What an owner before it has left is settled when it claims, without a message."""
    cluster = MemoryTestCluster()
    topic, group = cluster.topic(), cluster.group()
    for told in TRANSFERS:
        cluster.put(topic, 0, json.dumps(told).encode())
    paths = [str(tmp_path / name) for name in ("from.db", "to.db")]
    with (
        closing(Store(paths[0])) as first,
        closing(LastStore(paths[1])) as last,
        cluster.connect() as marshal,
        joined(marshal, group, [topic], max_acks_pending=1) as consumer,
    ):
        last.over = consumer._ending.request_stop
        run(consumer, [first, last])
        assert positions(consumer) == {0: 2}
    settle(paths, claimed(topic, b"\xff"))
    settle(paths, claimed(topic, b"\0"))  # an owner that was replaced changes nothing
    for path, expected in zip(paths, EXPECTED, strict=True):
        with closing(Store(path)) as store:
            assert dict(store.db.execute("SELECT id, cents FROM account")) == expected


def claimed(topic: str, incarnation: bytes) -> ClaimInfo:
    return ClaimInfo(topic=topic, partition=0, token=Token(incarnation * 16, 1), position=2, lag=0)


class LastStore(Store):
    """Ends the iteration when it has committed the last message."""

    over: Callable[[], object]

    def commit(self, message: Any) -> None:
        super().commit(message)
        if message.offset == len(TRANSFERS) - 1:
            self.over()
