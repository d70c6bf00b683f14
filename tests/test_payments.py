"""examples/payments.py: every payment changes its account once, whatever comes again and whoever comes late.

Strategy: a log of payments and a group of owners in memory, with a seeded schedule that kills owners, hands their
partitions over, and lets those that were thought dead go on under their old tokens; the database is a real one. A store
that keeps the token on the account's row shows that the schedule can tell a wrong one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.payments import Accounts, NotTheOwner
from marshal_py.embedded import Broker
from marshal_py.protocol.wire.identity import Token
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.producer import KafkaProducer

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 60


def payment(account: str, cents: int, partition: int, offset: int, epoch: int) -> Any:
    value = json.dumps({"account": account, "cents": cents}).encode()
    token = Token(b"i" * 16, epoch)
    return SimpleNamespace(topic="payments", partition=partition, offset=offset, token=token, value=value)


def balances(accounts: Accounts) -> dict[str, int]:
    return dict(accounts.db.execute("SELECT id, cents FROM account"))


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[Accounts]:
    with closing(Accounts(str(tmp_path / "accounts.db"))) as accounts:
        yield accounts


def test_a_message_that_comes_again_is_booked_once(accounts: Accounts) -> None:
    """S4: under the same token, and under the next owner's."""
    assert accounts.book(payment("alice", 250, 0, 7, epoch=10))
    assert not accounts.book(payment("alice", 250, 0, 7, epoch=10))
    assert not accounts.book(payment("alice", 250, 0, 7, epoch=11))
    assert balances(accounts) == {"alice": 250}


def test_a_stale_owner_changes_nothing(accounts: Accounts) -> None:
    """S4: also with a message that nobody has booked; the transaction leaves no trace."""
    accounts.book(payment("alice", 250, 0, 7, epoch=11))
    with pytest.raises(NotTheOwner, match="token 69"):
        accounts.book(payment("bob", 1, 0, 8, epoch=10))
    assert balances(accounts) == {"alice": 250}
    assert accounts.book(payment("bob", 1, 0, 8, epoch=11))


def test_an_owner_that_only_repeats_fences_the_earlier_ones(accounts: Accounts) -> None:
    """S4: the database has seen a newer token, though that owner's payment was booked already."""
    assert accounts.book(payment("alice", 250, 0, 7, epoch=10))
    assert not accounts.book(payment("alice", 250, 0, 7, epoch=11))
    with pytest.raises(NotTheOwner):
        accounts.book(payment("bob", 1, 0, 8, epoch=10))
    assert balances(accounts) == {"alice": 250}


def test_two_partitions_write_one_account(accounts: Accounts) -> None:
    """A greater token of one partition says nothing about the other's payments."""
    accounts.book(payment("alice", 1, 0, 0, epoch=99))
    accounts.book(payment("alice", 2, 1, 0, epoch=5))
    accounts.book(payment("alice", 4, 0, 1, epoch=99))
    assert balances(accounts) == {"alice": 7}


def test_a_payment_that_cannot_be_booked_is_not_passed_over(accounts: Accounts) -> None:
    """The row of the partition stays where it was, so the message can come again."""
    with pytest.raises(json.JSONDecodeError):
        accounts.book(SimpleNamespace(**{**vars(payment("", 0, 0, 7, epoch=1)), "value": b"?"}))
    assert accounts.book(payment("alice", 1, 0, 7, epoch=1))


@dataclass
class Owner:
    epoch: int
    at: int  # the next offset that it will handle


@dataclass
class Schedule:
    """Three partitions whose owners die with messages in hand, while the dead go on writing; the same for each seed."""

    seed: int
    booked_again: int = 0
    refused: int = 0
    expected: dict[str, int] = field(default_factory=dict)

    def run(self, book: Callable[[Any], bool]) -> None:
        dice = random.Random(self.seed)
        names = [f"account {number}" for number in range(5)]
        logs = [[(dice.choice(names), dice.randrange(1, 1000)) for _ in range(60)] for _ in range(3)]
        epochs = iter(range(1, 1_000_000))
        owners = [[Owner(next(epochs), 0)] for _ in logs]  # of each partition, the newest one last
        while any(of_one[-1].at < len(log) for of_one, log in zip(owners, logs, strict=True)):
            number = dice.randrange(len(logs))
            of_one, log = owners[number], logs[number]
            if dice.random() < 0.1:  # killed, frozen or moved: the successor begins where the last heartbeat stood
                of_one.append(Owner(next(epochs), max(0, of_one[-1].at - dice.randrange(4))))
            owner = of_one[-1] if dice.random() < 0.8 else dice.choice(of_one)  # or one that does not know yet
            if owner.at == len(log):
                continue
            account, cents = log[owner.at]
            try:
                self.booked_again += not book(payment(account, cents, number, owner.at, owner.epoch))
            except NotTheOwner:
                assert owner is not of_one[-1]
                self.refused += 1
            owner.at += dice.random() < 0.9  # else it died before the ack, and the message comes again
        for account, cents in (entry for log in logs for entry in log):
            self.expected[account] = self.expected.get(account, 0) + cents


@pytest.mark.parametrize("seed", range(5))
def test_balances_are_exact_after_kills_and_late_owners(accounts: Accounts, seed: int) -> None:
    schedule = Schedule(seed)
    schedule.run(accounts.book)
    assert balances(accounts) == schedule.expected
    assert min(schedule.booked_again, schedule.refused) > 0, schedule  # it had what it is for


@pytest.mark.parametrize("seed", range(5))
def test_a_token_on_the_account_is_not_enough(seed: int) -> None:
    """The same schedules find a store that compares tokens where the effect is."""
    cents_of: dict[str, int] = {}
    token_of: dict[str, Token] = {}

    def book(message: Any) -> bool:
        told = json.loads(message.value)
        if token_of.get(told["account"], message.token) <= message.token:
            token_of[told["account"]] = message.token
            cents_of[told["account"]] = cents_of.get(told["account"], 0) + told["cents"]
        return True

    schedule = Schedule(seed)
    schedule.run(book)
    assert cents_of != schedule.expected


def test_the_program_books_every_payment(tmp_path: Path) -> None:
    """Against the embedded broker, and it ends cleanly on SIGTERM."""
    with Broker(topics={"__marshal": 16, "payments": 4}) as broker:
        sink = KafkaProducer(KafkaTransport(broker.bootstrap_servers, DEADLINE_S))
        for number in range(40):
            sink.write("payments", json.dumps({"account": "alice", "cents": number}).encode(), key=str(number).encode())
        sink.flush(DEADLINE_S)
        sink.close()
        command = [
            sys.executable,
            str(ROOT / "examples" / "payments.py"),
            broker.bootstrap_servers,
            "payments",
            str(tmp_path / "accounts.db"),
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
        ) as program:
            assert program.stdout is not None
            lines = [program.stdout.readline() for _ in range(40)]
            program.send_signal(signal.SIGTERM)
            assert program.wait(DEADLINE_S) == 0
    assert all(line.startswith("booked payments:") for line in lines), lines
    with closing(Accounts(str(tmp_path / "accounts.db"))) as accounts:
        assert balances(accounts) == {"alice": sum(range(40))}
