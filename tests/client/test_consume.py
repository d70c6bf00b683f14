"""`Consumer.consume`, as an iterator and with a handler, and how it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from marshal_py import Consumer, Message
from marshal_py.client.delivery import prefetch
from marshal_py.errors import (
    ConcurrentUse,
    ConsumerClosed,
    GroupDeleted,
    InvalidOption,
    NeedsAtLeastOnce,
    ReentrantCall,
)
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.records import Evict, GroupConfig
from marshal_py.transport.memory import MemoryTransport
from tests.support.client_fixtures import (
    DEADLINE_S,
    LOG,
    MemoryTestCluster,
    TestCluster,
    collect,
    joined,
    owns,
    places,
    positions,
    until,
)

DELIVERIES = ("at_least_once", "at_most_once")


class Handler:
    """Acks each message. `hold` makes it wait in the handler; `then` is called with each message."""

    def __init__(self, then: Callable[[Message], object] | None = None) -> None:
        self.seen: list[Message] = []
        self.threads: set[str] = set()
        self.then = then
        self.open = threading.Event()
        self.open.set()

    def __call__(self, message: Message) -> None:
        self.threads.add(threading.current_thread().name)
        self.seen.append(message)
        assert self.open.wait(DEADLINE_S)
        if self.then is not None:
            self.then(message)
        message.ack()

    def got(self, count: int) -> list[Message]:
        until(lambda: len(self.seen) >= count, f"{count} messages are handled")
        return self.seen


def limits(**given: Any) -> Any:
    return pytest.param(given, id=" ".join(f"{name}={value}" for name, value in given.items()) or "defaults")


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("given", [limits(), limits(max_messages=1), limits(max_messages=7), limits(max_bytes=100)])
def test_a_loop_gets_everything_once_and_in_order(
    memory: MemoryTestCluster, delivery: str, given: dict[str, int]
) -> None:
    """ADR-37: "Retrieve messages from the server while maintaining a buffer that will refill at some point during the
    message processing."
    ADR-37: "An algorithm for continuously fetching messages should be implemented in clients, taking into account
    language constructs."
    ADR-37: "On the other hand consume() should recover while maintaing its state (e.g. pending counts) by issuing a
    new pull request unless the status is 409 Consumer Deleted or 409 Consumer is push based in which case consume()
    call should conclude in an implementation specific way idiomatic to the language being used."
    ADR-37: "9. Go to #1."
    """
    topic = memory.topic(2)
    memory.fill(topic, 0, 100)
    memory.fill(topic, 1, 100)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], delivery=delivery) as consumer:
        seen: list[tuple[int, int]] = []
        context = consumer.consume(**given)
        for message in context:
            seen.append((message.partition, message.offset))
            message.ack()
            if len(seen) == 200:
                break
        for partition in (0, 1):
            assert [offset for at, offset in seen if at == partition] == list(range(100))
        assert not context.closed
        context.stop()
        assert context.closed
        assert list(context) == []
        assert not consumer.cached_info().closed


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_handler_gets_everything_on_a_thread_of_its_own(cluster: TestCluster, delivery: str) -> None:
    """ADR-37: "3. Check if new message is available. - if yes, go to #4 - if not, go to #1" """
    topic = cluster.topic(2)
    cluster.fill(topic, 0, 50)
    handler = Handler()
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic], delivery=delivery) as consumer:
        context = consumer.consume(handler)
        handler.got(50)
        cluster.fill(topic, 1, 50)
        seen = handler.got(100)
        for partition in (0, 1):
            assert [m.offset for m in seen if m.partition == partition] == list(range(50))
        assert handler.threads == {"marshal-consume"}
        assert context.wait(0.01) is False
        context.drain()
        assert context.wait() is True
        assert (context.closed, context.error) == (True, None)
        assert positions(consumer) == {0: 50, 1: 50}


@pytest.mark.parametrize(
    ("given", "threshold"), [({"max_messages": 10}, 5), ({"max_messages": 10, "threshold_messages": 9}, 9)]
)
def test_the_buffer_is_filled_to_its_limit_and_never_above(
    memory: MemoryTestCluster, given: dict[str, int], threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ADR-37: "Consume() should pre-buffer messages up to a limit set by max_messages or max_bytes options (whichever
    is provided)."
    ADR-37: "max_messages?: number - max number of messages stored in the buffer"
    ADR-37: "threshold_messages?: number - number of messages left in the buffer that should trigger a low watermark on
    the client, and influence it to request more messages"
    ADR-37: "Clients should track the total amount of messages pending in a buffer."
    ADR-37: "For each constraint, a custom threshold can be set, containing the number of messages/bytes that should
    be processed to trigger the next pull request."
    """
    monkeypatch.setattr(prefetch, "SLOW_PER_S", 0)  # a machine that stops for a moment makes no slow handler here
    pending: list[int] = []
    with memory.reading(100) as consumer:
        for message in consumer.consume(**given):
            info = consumer.cached_info()
            pending.append(info.pending_messages)
            assert consumer._queue.buffered() <= info.pending_messages
            message.ack()
            if message.offset == 79:
                break
    assert max(pending) == 9  # of the ten one is in the handler
    assert min(pending) == threshold  # the next delivery would go below, so more was asked for first


@pytest.mark.parametrize("threshold", [None, 8])
def test_the_buffer_is_filled_in_bytes(
    memory: MemoryTestCluster, threshold: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ADR-37: "max_bytes?: number - max number of bytes stored in the buffer"
    ADR-37: "threshold_bytes?: number - hint for the number of bytes left in buffer that should trigger a low watermark
    on the client, and influence it to request more data."
    ADR-37: "pending byte count reaches threshold"
    """
    monkeypatch.setattr(prefetch, "SLOW_PER_S", 0)  # as above
    topic = memory.topic()
    for _ in range(100):
        memory.put(topic, 0, b"v")
    each = 1 + len(topic)
    pending: list[int] = []
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        for message in consumer.consume(max_bytes=10 * each, threshold_bytes=threshold and threshold * each):
            pending.append(consumer.cached_info().pending_bytes)
            message.ack()
            if message.offset == 79:
                break
    assert max(pending) == 9 * each  # of ten messages one is in the handler
    assert min(pending) == (threshold or 5) * each  # the next delivery would go below, so more was asked for first


@pytest.mark.parametrize("endless", [float("inf"), 1e308, 10**400])
def test_a_wait_may_be_endless(memory: MemoryTestCluster, endless: float) -> None:
    with memory.reading(4) as consumer:
        assert [message.offset for message in consumer.fetch(1, expires_s=endless)] == [0]
        found = consumer.next(endless)
        assert found is not None
        for message in consumer.consume(expires_s=endless):
            assert (found.offset, message.offset) == (1, 2)
            break


@pytest.mark.parametrize("wrong", [0.5, -1, float("nan"), float("-inf"), "x", None])
def test_a_consume_refuses_a_wrong_expiry(memory: MemoryTestCluster, wrong: Any) -> None:
    with (
        memory.connect() as marshal,
        joined(marshal, memory.group(), [memory.topic()]) as consumer,
        pytest.raises(InvalidOption, match="expires_s"),
    ):
        consumer.consume(expires_s=wrong)


def test_bytes_are_limited_by_the_size_of_whole_messages(memory: MemoryTestCluster) -> None:
    """ADR-37: "Size consists of: - Data (payload + headers) - Subject - Reply subject"
    ADR-37: "Note that if max_bytes is set, client should set batch_size in requests to a large number (e.g. 1 000
    000) instead of leaving it empty to bypass server sending only one message if batch_size == 0."
    ADR-37: "If max_bytes is set by the user, the value should be set for max_bytes and max_messages should be set to
    a large value internally (e.g. 1 000 000)"
    """
    topic = memory.topic()
    for number in range(60):
        memory.put(topic, 0, b"v" * (1 + number % 7), b"key", [("h", b"1")])
    sizes: list[int] = []
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        each = 7 + 3 + 2 + len(topic)
        for message in consumer.consume(max_bytes=5 * each):
            sizes.append(consumer.cached_info().pending_bytes)
            message.ack()
            if message.offset == 59:
                break
    assert 0 < max(sizes) <= 5 * each


def test_a_message_that_is_larger_than_the_limit_comes_alone(memory: MemoryTestCluster) -> None:
    """ADR-37: "409 Message Size Exceeds MaxBytes" """
    topic = memory.topic()
    for size in (1, 500, 1, 600, 1):
        memory.put(topic, 0, b"x" * size)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        offsets: list[int] = []
        for message in consumer.consume(max_bytes=50):
            offsets.append(message.offset)
            message.ack()
            if len(offsets) == 5:
                break
        assert offsets == [0, 1, 2, 3, 4]


def test_a_second_consume_and_any_other_call_for_messages_are_refused(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 3)
    handler = Handler()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        context = consumer.consume(handler)
        handler.got(3)
        for name, verb in (
            ("consume", consumer.consume),
            ("fetch", consumer.fetch),
            ("next", consumer.next),
            ("iteration", lambda: next(iter(consumer))),
        ):
            with pytest.raises(ConcurrentUse, match=rf"^{name}\(\) was called.*stop"):
                verb()
        with pytest.raises(InvalidOption, match="handler"):
            iter(context)
        context.stop()
        memory.fill(topic, 0, 1, first=3)
        assert places(collect(consumer, 1)) == [(0, 3)]
        with consumer.consume(), pytest.raises(ConcurrentUse):
            consumer.next()
        assert consumer.next(expires_s=0) is None


def test_a_second_loop_is_refused_and_ends_nothing(memory: MemoryTestCluster) -> None:
    found: list[BaseException] = []

    def elsewhere() -> None:
        try:
            next(iter(context))
        except ConcurrentUse as error:
            found.append(error)

    with memory.reading(2) as consumer:
        context = consumer.consume()
        for message in context:
            message.ack()
            if message.offset == 1:
                break
            other = threading.Thread(target=elsewhere)
            other.start()
            other.join(DEADLINE_S)
            with pytest.raises(ConcurrentUse, match="this thread began"):
                next(iter(context))
            assert not context.closed
        assert [getattr(error, "busy", error) for error in found] == [ConcurrentUse.FETCHES]


def test_a_handler_that_would_have_to_be_awaited_is_refused(memory: MemoryTestCluster) -> None:
    async def handle(message: Message) -> None:
        message.ack()

    with memory.reading(1) as consumer:
        with pytest.raises(InvalidOption, match=r"^handler=.*nobody awaits what it returns.*marshal_py\.aio awaits"):
            consumer.consume(handle)
        assert collect(consumer, 1)


def test_a_handler_that_returns_a_coroutine_ends_the_consume(memory: MemoryTestCluster) -> None:
    """Nothing shows before it is called that somebody would have to await it. Its message comes again."""

    async def handle(message: Message) -> None:
        message.ack()

    with memory.reading(2) as consumer:
        context = consumer.consume(lambda message: handle(message))
        with pytest.raises(InvalidOption, match=r"^handler=.*not a coroutine; .*marshal_py\.aio awaits"):
            context.wait(DEADLINE_S)
        assert sorted(places(collect(consumer, 2))) == [(0, 0), (0, 1)]


def test_consume_inside_an_iteration_is_refused(memory: MemoryTestCluster) -> None:
    with memory.reading(1) as consumer:
        for message in consumer:
            with pytest.raises(ConcurrentUse):
                consumer.consume()
            message.ack()
            break
        with pytest.raises(InvalidOption, match="handler"):
            consumer.consume("no function")  # type: ignore[arg-type]
        consumer.consume().stop()


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_stop_drops_the_buffer_and_loses_nothing(memory: MemoryTestCluster, delivery: str) -> None:
    with memory.reading(50, delivery=delivery) as consumer:
        context, offsets = consumer.consume(), []
        for message in context:
            offsets.append(message.offset)
            message.ack()
            if len(offsets) == 5:
                context.stop()
                assert consumer._queue.buffered() == 0
        assert offsets == [0, 1, 2, 3, 4]
        assert context.closed
        assert places(collect(consumer, 45)) == [(0, offset) for offset in range(5, 50)]


def test_stop_waits_for_the_running_handler(memory: MemoryTestCluster) -> None:
    """ADR-37: "Lifecycle of Consume may need to be controlled - for example to stop delivering messages to the callback
    or drain messages already accumulated before stopping the consumer, these can be additional methods on the consumer
    implementation if appropriate or an object that is the return value of callback driven consumers."
    """
    handler = Handler()
    handler.open.clear()
    with memory.reading(50) as consumer:
        context = consumer.consume(handler)
        handler.got(1)
        context.stop(timeout_s=0.01)
        assert not context.closed
        handler.open.set()
        context.stop()
        assert context.closed
        assert len(handler.seen) == 1


def test_stop_and_drain_may_be_called_in_the_handler(memory: MemoryTestCluster) -> None:
    with memory.reading(5) as consumer:
        for ending, last, offsets in (("stop", 1, [0, 1]), ("drain", 2, [2, 3, 4])):
            handler = Handler()
            handler.open.clear()
            context = consumer.consume(handler)
            end = getattr(context, ending)
            handler.then = lambda message, last=last, end=end: end() if message.offset == last else None
            handler.open.set()
            assert context.wait(DEADLINE_S)
            assert [message.offset for message in handler.seen] == offsets


def test_drain_delivers_what_is_buffered_and_asks_for_no_more(memory: MemoryTestCluster) -> None:
    """ADR-37: "Client may want some way to drain() the buffer or iterator without pulling messages, so that the client
    can cleanly stop without leaving many messages un-acked."
    ADR-37: "Lifecycle of Consume may need to be controlled - for example to stop delivering messages to the callback
    or drain messages already accumulated before stopping the consumer, these can be additional methods on the consumer
    implementation if appropriate or an object that is the return value of callback driven consumers."
    """
    topic = memory.topic()
    memory.fill(topic, 0, 100)
    group = memory.group()
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        context, offsets = consumer.consume(max_messages=10), []
        for message in context:
            offsets.append(message.offset)
            if len(offsets) == 3:
                context.drain()
            message.ack()
        assert offsets == list(range(10))
        assert context.closed
        world = marshal._loop.worlds[consumer._driver.log]
        assert [partition.position for partition in world.groups[group].partitions.values()] == [10]
        assert not consumer.cached_info().closed


def test_drain_waits_for_acks_of_other_threads(memory: MemoryTestCluster) -> None:
    held: list[Message] = []
    with memory.reading(3) as consumer:
        context = consumer.consume(held.append)
        until(lambda: len(held) == 3, "all are handed to somebody else")
        drain = threading.Thread(target=context.drain)
        drain.start()
        for message in held:
            assert not context.closed
            message.ack()
        drain.join(DEADLINE_S)
        assert context.closed
        assert positions(consumer) == {0: 3}


def test_a_stop_ends_a_drain_that_waits_for_acks(memory: MemoryTestCluster) -> None:
    held: list[Message] = []
    with memory.reading(2) as consumer:
        context = consumer.consume(held.append)
        until(lambda: len(held) == 2, "somebody else has both")
        held[1].ack()
        drained: list[bool] = []
        drain = threading.Thread(target=lambda: drained.append(context.drain()), daemon=True)
        drain.start()
        until(lambda: context._demand.drain_until is not None, "it drains")
        context.stop()
        assert context.closed
        drain.join(DEADLINE_S)
        assert drained == [False]
        assert consumer.next(0) is None


def test_a_drain_says_whether_everything_is_acked(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 2)
    held: list[Message] = []
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        context = consumer.consume(held.append)
        until(lambda: len(held) == 2, "somebody else has both")
        assert context.drain(0.05) is False
        assert context.closed
        for message in held:
            assert message.ack(), "it is still its handler's"
        context = consumer.consume()
        memory.fill(topic, 0, 2, first=2)
        for message in context:
            message.ack()
            assert context.drain() is False, "the loop goes on"
        assert context.drain() is True
        assert positions(consumer) == {0: 4}


@pytest.mark.parametrize("raises", [False, True], ids=["nak", "raises"])
def test_a_drain_does_not_wait_for_what_was_given_back(memory: MemoryTestCluster, raises: bool) -> None:
    """It waits for the handler in another thread, and then says that not everything is acked."""
    topic = memory.topic()
    memory.fill(topic, 0, 3)
    held: list[Message] = []
    given_back: list[Message] = []

    def handle(message: Message) -> None:
        if message.offset == 1:
            given_back.append(message)
            if raises:
                raise ValueError("not now")
            message.nak(3_600.0)
        elif message.offset == 2:
            held.append(message)
        else:
            message.ack()

    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        context = consumer.consume(handle)
        until(lambda: held, "somebody else has the last one")
        drained: list[bool] = []
        drain = threading.Thread(target=lambda: drained.append(context.drain(3_600.0)), daemon=True)
        drain.start()
        until(lambda: context._demand.drain_until is not None, "it drains")
        assert not context.closed
        assert held[0].ack()
        until(lambda: drained, "the drain has ended")
        assert drained == [False]
        assert context.closed
        assert context.error is None
        assert context.drain() is False
        assert positions(consumer) == {0: 1}
        assert given_back[-1].ack(), "it is still this consumer's"


@pytest.mark.parametrize("wrong", ["a", -0.5, float("nan"), True, [1.0]], ids=str)
def test_a_drain_and_a_wait_refuse_a_wrong_time_before_they_begin(memory: MemoryTestCluster, wrong: Any) -> None:
    handler = Handler()
    with memory.reading(1) as consumer:
        context = consumer.consume(handler)
        for call in (context.drain, context.wait, consumer.drain):
            with pytest.raises(InvalidOption, match=r"^timeout_s=.*a number of seconds, at least 0, or None"):
                call(wrong)
        assert context._demand.drain_until is None
        assert not consumer._ending.draining
        handler.got(1)


def test_a_drain_and_a_wait_may_be_endless(memory: MemoryTestCluster) -> None:
    with memory.reading(1) as consumer:
        context = consumer.consume(lambda message: message.ack())
        until(lambda: positions(consumer) == {0: 1}, "the message is acked")
        assert context.drain(float("inf")) is True
        assert context.wait(float("inf"))
        consumer.drain(float("inf"))
        assert consumer.cached_info().closed


def test_a_wait_in_the_handler_is_refused_by_name(memory: MemoryTestCluster) -> None:
    """It waited for its own thread, without an end."""
    refused: list[str] = []

    def handle(message: Message) -> None:
        assert context.wait(0) is False
        with pytest.raises(ReentrantCall) as caught:
            context.wait()
        refused.append(str(caught.value))
        with context:
            message.ack()

    with memory.reading(1) as consumer:
        context = consumer.consume(handle)
        assert context.wait(DEADLINE_S) is True
        assert refused == [
            "wait() was called inside the handler of this consume and would wait for it: call stop() or drain() there, "
            "which return at once, and wait() in another thread"
        ]
        assert positions(consumer) == {0: 1}


def test_a_wait_in_the_loop_is_refused_by_name(memory: MemoryTestCluster) -> None:
    with memory.reading(1) as consumer:
        context = consumer.consume()
        for message in context:
            with pytest.raises(ReentrantCall, match=r"^wait\(\) was called inside a loop over this consume"):
                context.wait()
            message.ack()
            break
        assert context.wait(0.01) is False
        context.stop()
        assert context.wait() is True


def test_a_drain_that_takes_too_long_drops_the_rest(memory: MemoryTestCluster) -> None:
    handler = Handler()
    handler.open.clear()
    with memory.reading(50) as consumer:
        context = consumer.consume(handler)
        handler.got(1)
        drained: list[bool] = []
        drain = threading.Thread(target=lambda: drained.append(context.drain(timeout_s=0.05)), daemon=True)
        drain.start()
        drain.join(DEADLINE_S)
        assert drained == [False], "it does not wait for a handler that hangs"
        assert not context.closed
        handler.open.set()
        assert context.wait(DEADLINE_S)
        assert context.drain() is False
        assert (len(handler.seen), consumer._queue.buffered()) == (1, 0)
        assert places(collect(consumer, 49)) == [(0, offset) for offset in range(1, 50)]


@pytest.mark.parametrize("ending", ["stop", "drain", "request_stop"])
def test_the_end_of_the_consumer_ends_its_consume(cluster: TestCluster, ending: str) -> None:
    handler = Handler()
    with cluster.reading(20) as consumer:
        context = consumer.consume(handler)
        handler.got(20)
        getattr(consumer._ending if ending == "request_stop" else consumer, ending)()
        assert context.wait(DEADLINE_S)
        assert (context.closed, context.error) == (True, None)
        if ending == "drain":
            for verb in (consumer.next, consumer.consume, consumer.fetch):
                with pytest.raises(ConsumerClosed, match="it was drained"):
                    verb()


def test_a_drain_of_the_consumer_leaves_the_group_while_a_handler_hangs(memory: MemoryTestCluster) -> None:
    handler = Handler()
    handler.open.clear()
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 2)
    with memory.connect() as marshal:
        consumer = joined(marshal, group, [topic])
        context = consumer.consume(handler)
        handler.got(1)
        consumer.drain(timeout_s=0.05)
        with joined(marshal, group, [topic]) as successor:
            assert places(collect(successor, 2)) == [(0, 0), (0, 1)]
        handler.open.set()
        assert context.wait(DEADLINE_S)
        assert len(handler.seen) == 1


def test_the_end_of_the_consumer_ends_a_consume_that_nobody_iterates(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    with memory.connect() as marshal:
        consumer = joined(marshal, memory.group(), [topic])
        context = consumer.consume()
        consumer.stop()
        assert context.closed
        assert context.wait(DEADLINE_S)
        assert list(context) == []
        context.stop()


def fails_on(*offsets: int, kind: type[BaseException] = ValueError, times: int = 1) -> Callable[[Message], None]:
    """A handler's body that raises for each of these messages, so many times."""
    left = dict.fromkeys(offsets, times)

    def handle(message: Message) -> None:
        if left.get(message.offset, 0):
            left[message.offset] -= 1
            raise kind("no such account")

    return handle


def test_a_message_whose_handler_raises_comes_again_later(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 5)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        handler = Handler(fails_on(2, times=2))
        context = consumer.consume(handler, max_messages=1)
        seen = handler.got(7)
        context.drain()
        assert [message.offset for message in seen if message.offset != 2] == [0, 1, 3, 4]
        assert [message.offset for message in seen].count(2) == 3
        assert context.error is None
        assert positions(consumer) == {0: 5}
        failed = [event for event in consumer.events() if event.kind == "handler_failed"]
        assert [(event.topic, event.partition, event.offset) for event in failed] == [(topic, 0, 2)] * 2


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_handler_that_raises_may_end_the_consume(
    memory: MemoryTestCluster, delivery: str, caplog: pytest.LogCaptureFixture
) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 5)
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], delivery=delivery) as consumer:
        handler = Handler(fails_on(2))
        with caplog.at_level(logging.ERROR, "marshal_py"):
            context = consumer.consume(handler, on_error="stop" if delivery == "at_least_once" else None)
            with pytest.raises(ValueError, match="no such account"):
                context.wait(DEADLINE_S)
        assert isinstance(context.error, ValueError)
        assert context.closed
        assert [message.offset for message in handler.seen] == [0, 1, 2]
        assert f"a handler failed on {topic}:0 at offset 2" in caplog.text
        failed = [event for event in consumer.events() if event.kind == "handler_failed"]
        assert [(event.topic, event.partition, event.offset) for event in failed] == [(topic, 0, 2)]
        assert "no such account" in failed[0].text
        assert not consumer.cached_info().closed
        again = collect(consumer, 3 if delivery == "at_least_once" else 2)
        assert sorted(places(again)) == [(0, 2), (0, 3), (0, 4)][-len(again) :]


def test_after_a_handler_has_ended_a_consume_the_next_one_gets_its_message(memory: MemoryTestCluster) -> None:
    with memory.reading(3) as consumer:
        for kind in (ValueError, SystemExit):
            context = consumer.consume(Handler(fails_on(1, kind=kind)), on_error="stop")
            with pytest.raises(kind):
                context.wait(DEADLINE_S)
        seen: list[tuple[int, int]] = []
        handler = Handler(lambda message: seen.append((message.offset, message.delivery_count)))
        context = consumer.consume(handler)
        handler.got(2)
        assert context.drain() is True
        assert sorted(seen) == [(1, 3), (2, 1)]
        assert positions(consumer) == {0: 3}


def test_a_handler_that_exits_ends_the_consume(memory: MemoryTestCluster) -> None:
    """sys.exit() in a thread would only end the thread, silently."""
    with memory.reading(3) as consumer:
        context = consumer.consume(Handler(fails_on(1, kind=SystemExit)))
        with pytest.raises(SystemExit):
            context.wait(DEADLINE_S)
        assert context.closed


def test_a_wrong_policy_for_errors_is_refused(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic], delivery="at_most_once") as consumer:
        with pytest.raises(NeedsAtLeastOnce, match="nak"):
            consumer.consume(print, on_error="nak")
        with pytest.raises(InvalidOption, match="on_error"):
            consumer.consume(print, on_error="ignore")  # type: ignore[arg-type]


def test_a_consume_that_nobody_iterates_tells_why_the_consumer_has_ended(memory: MemoryTestCluster) -> None:
    topic, group = memory.topic(), memory.group()
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        context = consumer.consume()
        delete(memory, group)
        until(lambda: consumer.cached_info().closed, "the consumer has ended")
        assert isinstance(context.error, GroupDeleted)
        for wait in (context.wait, lambda: list(context)):
            with pytest.raises(GroupDeleted):
                wait()


@pytest.mark.parametrize("handled", [True, False])
def test_a_deleted_group_ends_the_consume(memory: MemoryTestCluster, handled: bool) -> None:
    """ADR-37: "409 Consumer Deleted"
    ADR-37: "if message is an error, go to #6"
    ADR-37: "Statuses that are errors should be telegraphed to the user in language specific way."
    ADR-37: "If consumer is not available, terminate Consume() execution with error."
    ADR-37: "verify if error should be terminal based on Status handling, then issue a warning/error (if required) and
    conclude the call if necessary."
    """
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 3)
    found: list[BaseException] = []

    def receive() -> None:
        try:
            if handled:
                context.wait()
            else:
                for message in context:
                    message.ack()
        except GroupDeleted as error:
            found.append(error)

    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        context = consumer.consume(Handler() if handled else None)
        loop = threading.Thread(target=receive)
        loop.start()
        until(owns(consumer, 0), "the partition is claimed")
        delete(memory, group)
        loop.join(DEADLINE_S)
        assert len(found) == 1
        assert context.error is found[0]
        assert (context.closed, consumer.cached_info().closed) == (True, True)


def delete(cluster: MemoryTestCluster, group: str) -> None:
    """Evicts every session of the group and deletes it at once, so that nobody can join in between."""
    with cluster.broker.lock:
        world = cluster.world(group)
        assert world.genesis is not None
        state = world.groups[group]
        records = [Evict(one.id, one.extended, 2 * one.join.interval_ms) for one in state.sessions.values()]
        for record in (*records, GroupConfig(state.config_offset, deleted=True)):
            value = codec.encode(record, group, world.genesis.incarnation)
            cluster.broker.produce(LOG, world.log, value, None, None, 0)


def test_the_end_of_a_claim_is_told_that_comes_with_the_deletion_of_its_group(memory: MemoryTestCluster) -> None:
    """The state of the partition is gone when the user is told of the claim's end. The step failed, and he was not."""
    topic, (group, other), lost = memory.topic(), (memory.group(), memory.group()), list[tuple[int, str]]()
    memory.fill(topic, 0, 1)
    with (
        memory.connect() as marshal,
        joined(marshal, other, [topic]) as goes_on,
        joined(marshal, group, [topic], on_lost=lambda info, why: lost.append((info.position, why))) as consumer,
    ):
        until(owns(consumer, 0), "the partition is claimed")
        until(owns(goes_on, 0), "that of another group, too")
        delete(memory, group)
        until(lambda: consumer.cached_info().closed, "it ends")
        until(lambda: lost, "the user learns it")
        assert lost == [(0, "session ended")]
        assert len(collect(goes_on, 1)) == 1


def test_partitions_that_move_do_not_disturb_it(cluster: TestCluster) -> None:
    """Claims are lost in the middle: every message is delivered, and what was acked comes once."""
    topic = cluster.topic(4)
    group = cluster.group()
    handlers = [Handler(), Handler()]
    with cluster.connect("a") as one, cluster.connect("b") as two:
        first = joined(one, group, [topic])
        context = first.consume(handlers[0], max_messages=10)
        until(owns(first, 0, 1, 2, 3), "all partitions are its own")
        for partition in range(4):
            cluster.fill(topic, partition, 50)
        handlers[0].got(100)
        second = joined(two, group, [topic])
        other = second.consume(handlers[1], max_messages=10)
        until(
            lambda: len(first.cached_info().claims) == len(second.cached_info().claims) == 2, "each owns two partitions"
        )
        for partition in range(4):
            cluster.fill(topic, partition, 50, first=50)
        until(lambda: len(handlers[0].seen) + len(handlers[1].seen) >= 400, "everything is handled")
        context.drain()
        other.drain()
        seen = places(handlers[0].seen) + places(handlers[1].seen)
        assert sorted(set(seen)) == [(partition, offset) for partition in range(4) for offset in range(100)]
        assert len(seen) == 400
        assert handlers[1].seen


def test_a_connection_that_is_lost_ends_nothing(memory: MemoryTestCluster) -> None:
    """Nothing is lost, and nothing is doubled, as the lease and the claims are the same afterwards.

    ADR-37: "Clients should detect server disconnect and reconnect."
    ADR-37: "Check if consumer exists (fetch consumer info)."
    ADR-37: "Publish a new pull request."
    """
    topic = memory.topic(2)
    memory.fill(topic, 0, 10)
    handler = Handler()
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        context = consumer.consume(handler, max_messages=4, expires_s=1)
        handler.got(10)
        claims = consumer.cached_info().claims.keys()
        assert isinstance(marshal.transport, MemoryTransport)
        marshal.transport.connection.cut = True
        memory.broker.wake()
        until(lambda: "fenced" in [event.kind for event in consumer.events()], "nothing is delivered any more")
        assert consumer.cached_info().waiting_for
        memory.fill(topic, 0, 10, first=10)
        memory.fill(topic, 1, 10)
        marshal.transport.connection.cut = False
        memory.broker.wake()
        handler.got(30)
        context.drain()
        assert sorted(places(handler.seen)) == [(0, at) for at in range(20)] + [(1, at) for at in range(10)]
        assert consumer.cached_info().claims.keys() == claims
        assert context.error is None
        assert "heartbeat_missed" not in [event.kind for event in consumer.events()]


def test_what_a_fetch_returns_is_received_as_it_arrives(cluster: TestCluster) -> None:
    """ADR-37: "the messages will be delivered via a callback with some signal to indicate that the fetch has finished
    (could be message is null) or via some iterator functionality where getting the next message will block until a
    message is yielded or the operation or the operation finishes, which terminates the iterator." """
    topic = cluster.topic()
    cluster.fill(topic, 0, 1)
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        offsets: list[int] = []
        while len(offsets) < 3:
            for message in consumer.fetch(1_000, expires_s=600):
                offsets.append(message.offset)
                message.ack()
            cluster.fill(topic, 0, 1, first=len(offsets))  # the next one exists only once this one is here
        assert offsets == [0, 1, 2]
        assert [message.offset for message in consumer.fetch(10, expires_s=600)] == [3]
        assert list(consumer.fetch(10, expires_s=0)) == []


def test_a_consumer_without_a_consume_has_nothing_pending(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    with memory.connect() as marshal:
        consumer: Consumer = joined(marshal, memory.group(), [topic])
        info = consumer.cached_info()
        assert (info.pending_messages, info.pending_bytes) == (0, 0)
        context = consumer.consume(max_messages=10)
        context.stop()
        info = consumer.cached_info()
        assert (info.pending_messages, info.pending_bytes) == (0, 0)


def test_a_loop_that_is_left_pauses_and_the_end_of_the_block_ends_it(memory: MemoryTestCluster) -> None:
    """The repr tells the state."""
    topic, group = memory.topic(), memory.group()
    memory.fill(topic, 0, 4)
    with memory.connect() as marshal, joined(marshal, group, [topic]) as consumer:
        with consumer.consume() as context:
            for _ in range(2):
                for message in context:
                    message.ack()
                    break
                assert repr(context) == f"ConsumeContext({group!r}, open)"
            with pytest.raises(ConcurrentUse):
                consumer.fetch(1)
        assert repr(context) == f"ConsumeContext({group!r}, closed)"
        assert consumer._queue.buffered() == 0
        assert [message.offset for message in collect(consumer, 2)] == [2, 3]
