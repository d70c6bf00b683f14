"""make_message and make_batch: what a handler sees, what is recorded, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from marshal_py import Batch, CallerError, Message, TopicPartition
from marshal_py.client.messages.message import Part
from marshal_py.errors import ClaimLost, InvalidOption, NeedsAtLeastOnce
from marshal_py.testing import Answer, make_batch, make_message


def test_it_is_a_message_with_the_attributes_that_were_named() -> None:
    message = make_message(
        b"v", key=b"k", topic="orders", partition=3, offset=120, headers=[("a", b"b")], timestamp_ms=5, topic_id="id"
    )
    assert isinstance(message, Message)
    assert (message.topic, message.partition, message.offset) == ("orders", 3, 120)
    assert (message.key, message.value, message.headers) == (b"k", b"v", [("a", b"b")])
    assert (message.timestamp, message.topic_id, message.delivery_count) == (5, "id", 1)
    assert not message.revoking
    assert repr(message).startswith("Message(orders:3@120, token=")


def test_what_a_deserializer_would_have_made_is_given_as_it_is() -> None:
    message = make_message({"id": 7}, key=("a", 1))
    assert (message.value, message.key) == ({"id": 7}, ("a", 1))


def test_a_greater_epoch_is_a_greater_token() -> None:
    older, newer = make_message(epoch=9), make_message(epoch=10)
    assert older.token < newer.token
    assert str(older.token) < str(newer.token)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_delivery_count(count: int) -> None:
    assert make_message(offset=40, delivery_count=count).delivery_count == count


def test_answers_are_recorded_in_order() -> None:
    message = make_message()
    assert (message.answers, message.acked) == ([], False)
    message.in_progress()
    assert not message.acked
    assert message.ack()
    assert message.acked
    assert message.answers == [Answer("in_progress"), Answer("ack")]
    assert message.verbs == ["in_progress", "ack"]


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_an_ack_that_waits_is_one_answer(delivery: str) -> None:
    message = make_message(delivery=delivery)
    assert message.double_ack()
    assert message.acked
    assert message.verbs == ["double_ack"]


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_an_ack_after_the_claim_was_lost_comes_too_late(delivery: str) -> None:
    message = make_message(topic="orders", partition=2, delivery=delivery)
    message.lose_claim()
    assert message.revoking
    assert not message.ack()
    assert not message.acked
    with pytest.raises(ClaimLost, match="orders:2"):
        message.double_ack()
    assert message.verbs == ["ack", "double_ack"]


def test_a_partition_that_moves_can_still_be_acked() -> None:
    message = make_message(revoking=True)
    assert message.revoking
    assert message.ack()


def test_messages_do_not_share_anything() -> None:
    one, two = make_message(), make_message()
    one.ack()
    one.lose_claim()
    assert (two.acked, two.revoking, two.answers) == (False, False, [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"partition": -1},
        {"offset": -1},
        {"delivery_count": 0},
        {"epoch": -1},
        {"epoch": 2**63},
        {"epoch": "x"},
        {"offset": "1"},
        {"offset": 1.5},
        {"offset": 2**63},
        {"partition": True},
        {"delivery_count": None},
        {"timestamp_ms": 1.5},
        {"topic": 7},
        {"delivery": "exactly_once"},
        {"delivery": "at_most_once", "delivery_count": 2},
    ],
)
def test_what_no_message_can_have_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=list(wrong)[-1]) as refused:
        make_message(**wrong)
    assert isinstance(refused.value, CallerError)


@pytest.mark.parametrize("kind", [Message, Part, Batch])
def test_every_verb_is_recorded_once_and_in_every_message(kind: type) -> None:
    """A verb that one of them gets later must be recorded too."""
    verbs = {name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert verbs >= {"ack", "double_ack", "in_progress", "nak", "term"}
    for verb in verbs:
        batch = make_batch([make_message(b"1", topic="a"), make_message(b"2", topic="a", offset=5)])
        answered: Any = {Message: batch[0], Part: batch.parts[0], Batch: batch}[kind]
        getattr(answered, verb)()
        assert [message.verbs for message in batch.messages] == [[verb], [] if kind is Message else [verb]]


def test_a_wrong_timeout_is_refused_as_a_consumer_does() -> None:
    for answered in (make_message(), make_batch([b"1"]), make_batch([b"1"]).parts[0]):
        with pytest.raises(InvalidOption, match="timeout_s"):
            answered.double_ack(timeout_s=-1)
        assert answered.ack(), "it was not acked before"


def test_a_batch_of_values() -> None:
    batch = make_batch([b"a", {"id": 7}])
    assert isinstance(batch, Batch)
    assert [(message.topic, message.partition, message.offset) for message in batch] == [("test", 0, 0), ("test", 0, 1)]
    assert batch.parts[0].values == [b"a", {"id": 7}]
    assert batch[0] is batch.messages[0]
    assert not batch.acked
    assert batch[1:].ack()
    assert [message.acked for message in batch.messages] == [False, True]
    assert batch.messages[0].ack()
    assert batch.acked
    assert not make_batch([])


def test_a_batch_of_several_partitions() -> None:
    late = make_message(b"3", topic="orders", partition=1, offset=9, delivery_count=4, epoch=2)
    early = make_message(b"2", topic="orders", partition=1, offset=4, delivery_count=2, epoch=2)
    other = make_message(b"1", topic="orders", key=b"k", headers=[("a", b"b")])
    batch = make_batch([late, other, early])
    assert [part.values for part in batch.parts] == [[b"2", b"3"], [b"1"]]
    assert [part.token.epoch for part in batch.parts] == [2, 1]
    assert [message.delivery_count for message in batch] == [2, 4, 1]
    assert (batch[2].key, batch[2].headers) == (b"k", [("a", b"b")])
    late.lose_claim()
    assert not batch.ack()
    assert (early.acked, late.acked, other.acked) == (False, False, True)
    with pytest.raises(ClaimLost, match="orders:1"):
        batch.double_ack()


def test_a_batch_in_at_most_once_mode() -> None:
    batch = make_batch([make_message(b"1", delivery="at_most_once", offset=at) for at in (3, 4)])
    assert batch.parts[0].ack()
    assert batch.acked
    with pytest.raises(NeedsAtLeastOnce):
        batch.nak()


def answered() -> Message:
    message = make_message(offset=2)
    message.nak()
    return message


@pytest.mark.parametrize(
    "wrong",
    [
        [make_message(), make_message()],
        [make_message(), make_message(offset=1, epoch=2)],
        [make_message(), make_message(offset=1, revoking=True)],
        [make_message(), make_message(partition=1, delivery="at_most_once")],
        [answered()],
    ],
    ids=["the same offset", "two claims", "two states", "two modes", "answered"],
)
def test_what_no_fetch_returns_together_is_refused(wrong: list[Message]) -> None:
    with pytest.raises(InvalidOption, match="messages"):
        make_batch(wrong)


def test_the_claim_is_that_of_one_partition() -> None:
    message = make_message(topic="orders", partition=1)
    assert message._delivered.claim.tp == TopicPartition("orders", 1)


def test_what_a_handler_answers_instead_of_an_ack_is_recorded() -> None:
    back, ended = make_message(b"1"), make_message(b"2")
    assert back.nak(5.0)
    assert ended.term("no JSON")
    assert (back.answers, back.acked) == ([("nak", 5.0)], False)
    assert (ended.answers, ended.acked) == ([("term", "no JSON")], True)
    with pytest.raises(NeedsAtLeastOnce):
        make_message(delivery="at_most_once").nak()
