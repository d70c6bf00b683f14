"""A service that books each payment exactly once, whichever process dies. Start it several times.

    python examples/payments.py localhost:9092 payments accounts.db

A value is JSON: {"account": "alice", "cents": 250}. Messages are delivered at least once, so some come again, and a
process that was frozen may still write after another one has taken over its partition. Two things in the database make
this harmless:

- A row per *partition* holds the token of its newest owner and the next offset. An older token is refused; an offset
  below the next one has been booked already.
- That row moves in the *transaction* of the booking. Both happen or neither does.

A token on the row of the account is not enough: the next owner applies what comes again a second time, for its token is
greater; and of two partitions that write to one account, the one whose token is smaller is refused forever.

The offsets of a topic that was deleted and created again begin at 0, and an admin may move a position back to have
messages applied again. In both cases delete the rows of those partitions, while the group is paused.
"""

import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import marshal_py

SCHEMA = """
CREATE TABLE IF NOT EXISTS account (id TEXT PRIMARY KEY, cents INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS applied (
    topic TEXT, partition INTEGER, token TEXT NOT NULL, next_offset INTEGER NOT NULL, PRIMARY KEY (topic, partition));
"""

# Changes one row if the message is new and its owner is the newest, otherwise none. It is a single statement, so on a
# server (PostgreSQL takes it, too) the row is locked until the transaction ends, and two owners wait for each other.
ADVANCE = """
INSERT INTO applied (topic, partition, token, next_offset) VALUES (:topic, :partition, :token, :offset + 1)
ON CONFLICT (topic, partition) DO UPDATE SET token = excluded.token, next_offset = excluded.next_offset
WHERE applied.token <= excluded.token AND applied.next_offset < excluded.next_offset
"""
RAISE = "UPDATE applied SET token = :token WHERE topic = :topic AND partition = :partition AND token < :token"
NEWEST = "SELECT token FROM applied WHERE topic = :topic AND partition = :partition"
BOOK = """
INSERT INTO account (id, cents) VALUES (:account, :cents)
ON CONFLICT (id) DO UPDATE SET cents = account.cents + excluded.cents
"""

LOCK_TIMEOUT_S = 30.0  # how long a booking waits for those of other processes


class NotTheOwner(Exception):
    """A later owner of the partition has been here already; nothing was changed."""


class Accounts:
    """The accounts, and how far each partition has been booked. One per thread."""

    def __init__(self, path: str) -> None:
        self.db = sqlite3.connect(path, timeout=LOCK_TIMEOUT_S, isolation_level=None)
        self.db.executescript(SCHEMA)

    def close(self) -> None:
        self.db.close()

    def book(self, message: marshal_py.Message) -> bool:
        """Books a payment; False if that has been done already. Raises NotTheOwner.

        Book the messages of a partition in order, because every offset below `next_offset` counts as booked. Store one
        that cannot be booked somewhere else in the same transaction; never skip it.
        """
        place = {
            "topic": message.topic,
            "partition": message.partition,
            "offset": message.offset,
            "token": str(message.token),
        }
        with self.transaction():
            if self.db.execute(ADVANCE, place).rowcount == 1:
                self.db.execute(BOOK, json.loads(message.value))
                return True
            [newest] = self.db.execute(NEWEST, place).fetchone()
            if newest > place["token"]:
                raise NotTheOwner(f"{message}: a later owner has token {newest}")
            self.db.execute(RAISE, place)  # an earlier owner is refused from now on
            return False

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")


def main(servers: str, topic: str, database: str) -> None:
    with (
        closing(Accounts(database)) as accounts,
        marshal_py.connect(servers) as marshal,
        marshal.consumer("payments", [topic], start="earliest") as consumer,
        marshal_py.stop_on_signals(consumer),
    ):
        for message in consumer:
            try:
                booked = accounts.book(message)
            except NotTheOwner as error:
                print(f"refused {error}", flush=True)  # no ack: the message belongs to the later owner
                continue
            message.ack()  # after the commit
            print(f"{'booked' if booked else 'known'} {message.topic}:{message.partition}@{message.offset}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
