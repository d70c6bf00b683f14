"""A service that takes money out of one database and puts it into another, exactly once, whichever process dies.

    python examples/transfers.py localhost:9092 transfers from.db to.db

A value is JSON: {"debit": "alice", "credit": "bob", "cents": 250}. Two databases have no common transaction, so a
message goes through three steps (JetStream's partitioned consumer groups, "In order to achieve exactly once
processing"):

1. prepare: each database keeps what it has to do, durably, and changes no account;
2. `double_ack`: the log accepts that the message is done. This decides: nobody receives it again;
3. commit: each database changes the account and forgets what it has prepared.

If the log does not accept the ack because another process owns the partition now, both databases roll back. A process
that dies in between leaves something prepared. The next owner of the partition settles it before it does anything else:
the log has the position of the partition, so what is prepared below it is committed, and the rest is dropped.

Each database also keeps the token of the partition's newest owner and refuses older ones. So a process that was frozen
cannot prepare a message after its successor has settled the partition.

The position says which messages are done only if they are done in order: `max_acks_pending=1`. With one database, its
own transaction is simpler and faster: docs/acks.md.
"""

import json
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing

import marshal_py
from marshal_py import ClaimLost, Consumer, Message
from marshal_py.info import ClaimInfo

SCHEMA = """
CREATE TABLE IF NOT EXISTS account (id TEXT PRIMARY KEY, cents INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS owner (topic TEXT, partition INTEGER, token TEXT NOT NULL, PRIMARY KEY (topic, partition));
CREATE TABLE IF NOT EXISTS prepared (
    topic TEXT, partition INTEGER, position INTEGER, token TEXT NOT NULL, account TEXT NOT NULL, cents INTEGER NOT NULL,
    PRIMARY KEY (topic, partition, position));
"""
BEGIN = "BEGIN IMMEDIATE"
NEWEST = "SELECT token FROM owner WHERE topic = ? AND partition = ?"
OWN = "INSERT OR REPLACE INTO owner (topic, partition, token) VALUES (?, ?, ?)"
PREPARE = "INSERT INTO prepared (topic, partition, position, token, account, cents) VALUES (?, ?, ?, ?, ?, ?)"
BELOW = "SELECT account, cents FROM prepared WHERE topic = ? AND partition = ? AND position < ?"
MINE = "SELECT account, cents FROM prepared WHERE topic = ? AND partition = ? AND position = ? AND token = ?"
FORGET = "DELETE FROM prepared WHERE topic = ? AND partition = ?"
FORGET_MINE = "DELETE FROM prepared WHERE topic = ? AND partition = ? AND position = ? AND token = ?"
CHANGE = """
INSERT INTO account (id, cents) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET cents = account.cents + excluded.cents
"""

LOCK_TIMEOUT_S = 30.0  # how long a transaction waits for those of other processes
ACK_TIMEOUT_S = 60.0  # long, because nothing is decided before the log has answered


class NotTheOwner(Exception):
    """A later owner has settled the partition already; nothing was changed."""


class Store:
    """One of the two databases. One per thread."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.db = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None)
        self.db.executescript(SCHEMA)

    def close(self) -> None:
        self.db.close()

    def settle(self, topic: str, partition: int, token: str, position: int) -> None:
        """Ends what earlier owners have left prepared, when the claim with this token begins at `position`.

        Does nothing if this claim has settled the partition before. Raises NotTheOwner.
        """
        with self.db:  # commits, or rolls back if something raises
            self.db.execute(BEGIN)
            if self._newest(topic, partition) < token:
                for change in self.db.execute(BELOW, (topic, partition, position)).fetchall():
                    self.db.execute(CHANGE, change)
                self.db.execute(FORGET, (topic, partition))
                self.db.execute(OWN, (topic, partition, token))
            self._check_owner(topic, partition, token)

    def prepare(self, message: Message, account: str, cents: int) -> None:
        """Keeps what is to be done for a message. Raises NotTheOwner."""
        place = message.topic, message.partition
        with self.db:
            self.db.execute(BEGIN)
            self._check_owner(*place, str(message.token))
            self.db.execute(PREPARE, (*place, message.offset, str(message.token), account, cents))

    def commit(self, message: Message) -> None:
        """Does what was prepared, unless a later owner has done it already."""
        with self.db:
            self.db.execute(BEGIN)
            for change in self.db.execute(MINE, _place(message)).fetchall():
                self.db.execute(CHANGE, change)
            self.db.execute(FORGET_MINE, _place(message))

    def roll_back(self, message: Message) -> None:
        """Forgets what was prepared for this delivery of a message."""
        with self.db:
            self.db.execute(BEGIN)
            self.db.execute(FORGET_MINE, _place(message))

    def _newest(self, topic: str, partition: int) -> str:
        found = self.db.execute(NEWEST, (topic, partition)).fetchone()
        return str(found[0]) if found is not None else ""

    def _check_owner(self, topic: str, partition: int, token: str) -> None:
        newest = self._newest(topic, partition)
        if newest != token:
            raise NotTheOwner(f"{topic}:{partition} has been settled under token {newest}, and this is {token}")


def _place(message: Message) -> tuple[str, int, int, str]:
    return message.topic, message.partition, message.offset, str(message.token)


def transfer(stores: Sequence[Store], message: Message) -> bool:
    """Carries out one message. Returns False if it belongs to a later owner. AckNotConfirmed decides nothing.

    After AckNotConfirmed the log may have the ack or not. So both stores stay prepared, and the next owner settles.
    """
    told = json.loads(message.value or b"")
    changes = (told["debit"], -told["cents"]), (told["credit"], told["cents"])
    try:
        for store, change in zip(stores, changes, strict=True):
            # The first message of a claim is at the claim's position; later calls do nothing.
            store.settle(message.topic, message.partition, str(message.token), message.offset)
            store.prepare(message, *change)
        message.double_ack(ACK_TIMEOUT_S)
    except (ClaimLost, NotTheOwner):
        for store in stores:
            store.roll_back(message)
        return False
    for store in stores:
        store.commit(message)
    return True


def settle(paths: Sequence[str], claim: ClaimInfo) -> None:
    """Settles a partition as soon as it is claimed, also if no message comes. Runs on the thread of callbacks."""
    for path in paths:
        with closing(Store(path)) as store:
            try:
                store.settle(claim.topic, claim.partition, str(claim.token), claim.position)
            except NotTheOwner:
                return


def run(consumer: Consumer, stores: Sequence[Store]) -> None:
    for message in consumer:
        done = transfer(stores, message)
        print(f"{'done' if done else 'lost'} {message.topic}:{message.partition}@{message.offset}", flush=True)


def main(servers: str, topic: str, *paths: str) -> None:
    with (
        marshal_py.connect(servers) as marshal,
        marshal.consumer(
            "transfers", [topic], start="earliest", max_acks_pending=1, on_claim=lambda claim: settle(paths, claim)
        ) as consumer,
        marshal_py.stop_on_signals(consumer),
    ):
        run(consumer, [Store(path) for path in paths])


if __name__ == "__main__":
    main(*sys.argv[1:])
