"""Changes of topics wait until the brokers show them; real brokers are in tests/kafka/test_topics.py."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from marshal_py.errors import AccessDenied, ClusterUnreachable
from marshal_py.transport import kafka_admin
from marshal_py.transport.kafka_admin import SHOWN_ANSWERS, KafkaTopics
from marshal_py.transport.ports import TopicInfo

OLD, NEW, GROWN = TopicInfo(1, "old"), TopicInfo(1, "new"), TopicInfo(3, "new")


class Brokers(kafka_admin.Requester):
    """Accepts every change, and describes the topic as planned; the last answer stays."""

    def __init__(self, *answers: TopicInfo | None) -> None:
        super().__init__({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
        self.errors = kafka_admin.ConnectionErrors({})
        self.answers = list(answers)
        self.sent: list[bool] = []

    def describe(self, _: str) -> TopicInfo | None:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def create_topics(self, new: Any, **how: Any) -> Any:
        return self._answer(new[0].topic, how["validate_only"])

    def create_partitions(self, new: Any, **how: Any) -> Any:
        return self._answer("orders", how["validate_only"])

    def _answer(self, name: str, dry_run: bool) -> dict[str, Future[None]]:
        self.sent.append(dry_run)
        done: Future[None] = Future()
        done.set_result(None)
        return {name: done}

    def topics(self) -> KafkaTopics:
        return KafkaTopics(self, {"bootstrap.servers": "nowhere:1"}, 1.0, self.describe)


def create(topics: KafkaTopics, dry_run: bool = False) -> None:
    topics.create("orders", 1, None, {}, dry_run)


def grow(topics: KafkaTopics, dry_run: bool = False) -> None:
    topics.grow("orders", 3, dry_run)


@pytest.mark.parametrize(
    ("change", "answers"),
    [
        (create, (None, None, NEW)),
        (create, (None, NEW, NEW, None, NEW)),  # one broker is behind
        (create, (OLD, OLD, None, NEW)),  # a topic of this name was deleted a moment ago
        (grow, (NEW, GROWN, NEW, GROWN)),
    ],
)
def test_a_change_returns_when_the_brokers_show_it(
    change: Callable[[KafkaTopics], None], answers: tuple[TopicInfo | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_admin, "RETRY_PAUSE_S", 0.0)
    brokers = Brokers(*answers)
    change(brokers.topics())
    assert (brokers.answers, brokers.sent) == ([answers[-1]], [False])
    brokers = Brokers(*answers, *[answers[-1]] * (SHOWN_ANSWERS - 2), None, answers[-1])
    change(brokers.topics())
    assert brokers.answers == [answers[-1]], "one broker that does not know it, among many that do"


@pytest.mark.parametrize("change", [create, grow])
def test_what_is_never_shown_and_what_need_not_be(
    change: Callable[[KafkaTopics, bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_admin, "CREATED_TIMEOUT_S", 0.0)
    with pytest.raises(ClusterUnreachable, match="nowhere:1 while waiting for orders to appear: it was created"):
        change(Brokers(None).topics(), False)
    change(Brokers(None).topics(), True)  # a dry run makes nothing

    def denied(_: str) -> TopicInfo | None:
        raise AccessDenied("me", "Describe", "topic", "orders")

    change(KafkaTopics(Brokers(None), {"bootstrap.servers": "nowhere:1"}, 1.0, denied), False)
