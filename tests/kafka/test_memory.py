"""The memory of a consumer of large messages, in a process of its own, stays below the figure of docs/operations.md."""

from __future__ import annotations

import time

import pytest

from tests.support.kafka import Cluster
from tests.support.memory_bound import IN_HAND, Task, contain, documented_bytes, letters_in, make_topics

OF_EACH = 15  # messages of 1 MB in each of the 12 partitions: more than any buffer may hold
HANDLED = 50


@pytest.fixture(scope="module")
def topics(kafka: Cluster) -> tuple[str, str]:
    return make_topics(kafka.bootstrap, f"memory-{time.time_ns()}", OF_EACH)


@pytest.mark.parametrize(
    ("way", "mode"),
    [
        ("iterate", "at_least_once"),
        ("fetch", "at_least_once"),
        ("handler", "at_least_once"),
        ("aio_iterate", "at_least_once"),
        ("next", "at_most_once"),
        ("aio_handler", "at_most_once"),
    ],
)
def test_memory_stays_below_the_documented_figure(kafka: Cluster, topics: tuple[str, str], way: str, mode: str) -> None:
    """180 MB wait, and the handler is slower than librdkafka. The process is killed when it needs too much."""
    topic, dead = topics
    bound = documented_bytes(in_hand=IN_HAND if way == "fetch" else 1)
    task = Task(kafka.bootstrap, topic, f"{topic}-{way}-{mode}", dead, way, mode, 20, 60.0, HANDLED, {})
    found = contain(task, bound)
    assert not found.killed, f"{found.peak_bytes} bytes of {bound}, {found.handled} handled"
    assert found.handled >= HANDLED, found.errors
    assert letters_in(kafka.bootstrap, dead) == 0
