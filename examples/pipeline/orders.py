"""Orders: made up from a seed, and parsed. A malformed order says what is wrong with it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

PARTITIONS = 6
CUSTOMERS = 120  # a customer's orders are in one partition, as the key says
PRODUCTS = ("tea", "salt", "rope", "lamp", "book")
FIRST_MS = round(datetime(2026, 3, 1, tzinfo=UTC).timestamp() * 1000)
STEP_MS = 30_000  # of event time, from one order to the next
LATE_MS = 20 * 60_000  # the hourly counts wait longer
VERY_LATE_MS = 48 * 3_600_000  # long after its hour was closed
CLOSING_MS = 72 * 3_600_000  # the last order of each partition is so much later, which closes every hour


class Made(NamedTuple):
    key: bytes
    value: bytes
    partition: int


class Order(NamedTuple):
    """An order as it was read. `problem` is empty if it is good."""

    customer: str
    product: str
    cents: int
    event_ms: int
    problem: str


def make(count: int, seed: int) -> Iterator[Made]:
    """Makes `count` orders: 2 % malformed, 5 % late, 1 % very late; then one per partition that closes all hours."""
    chance = random.Random(seed)
    for number in range(count + PARTITIONS):
        customer = number % CUSTOMERS if number < count else number - count
        event_ms = FIRST_MS + number * STEP_MS + (CLOSING_MS if number >= count else 0)
        kind = chance.random() if number < count else 1.0
        if kind > 0.95:
            event_ms -= LATE_MS if kind < 0.99 else VERY_LATE_MS if number < count else 0
        order: dict[str, Any] = {
            "customer": f"customer-{customer:03d}",
            "product": chance.choice(PRODUCTS),
            "cents": chance.randrange(100, 20_000),
            "event_ms": event_ms,
        }
        value = _malformed(order, chance) if kind < 0.02 else json.dumps(order).encode()
        yield Made(order["customer"].encode(), value, customer % PARTITIONS)


def _malformed(order: dict[str, Any], chance: random.Random) -> bytes:
    match chance.randrange(4):
        case 0:
            return json.dumps(order).encode()[:-7]
        case 1:
            return json.dumps({**order, "cents": -1}).encode()
        case 2:
            return json.dumps({key: value for key, value in order.items() if key != "product"}).encode()
        case _:
            return b"\xff\xfe" + json.dumps(order).encode()


def parse(value: bytes | None) -> Order:
    """Parses an order. Never raises, because a stream must not stop at a bad message."""
    try:
        order = json.loads(value or b"")
        found = Order(order["customer"], order["product"], order["cents"], order["event_ms"], "")
    except (ValueError, TypeError, KeyError) as error:
        return Order("", "", 0, 0, f"{type(error).__name__}: {error}"[:200])
    if not (isinstance(found.customer, str) and isinstance(found.product, str) and type(found.event_ms) is int):
        return Order("", "", 0, 0, "a field has the wrong type")
    if type(found.cents) is not int or found.cents <= 0:
        return Order("", "", 0, 0, f"cents={found.cents!r}: an order costs something")
    return found


def is_very_late(number_ms: int, newest_ms: int) -> bool:
    """Whether an order is older than any watermark of the hourly counts can admit."""
    return number_ms < newest_ms - VERY_LATE_MS // 2
