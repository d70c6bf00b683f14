"""Wrong calls: names, options, two threads, a fork. Each is refused with a named error before anything is sent."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException

import marshal_py
from marshal_py import GroupConfig, Marshal, TopicPartition, aio
from marshal_py.client.driver import loop
from marshal_py.errors import (
    AuthenticationFailed,
    CallerError,
    ClusterUnreachable,
    ConcurrentUse,
    InvalidOption,
    UnsupportedPlatform,
    UsedAfterFork,
)
from marshal_py.transport import settings
from marshal_py.transport.memory import MemoryBroker, MemoryTransport
from tests.support.client_fixtures import (
    DEADLINE_S,
    EmbeddedTestCluster,
    MemoryTestCluster,
    TestCluster,
    collect,
    joined,
    places,
    until,
)

WRONG_IDS: list[Any] = ["", "a\0b", "a\nb", "a\tb", "a\x85b", "x" * 256, "ä" * 128, 5, None, b"bytes", "\ud800"]
ODD_IDS = ["a/b", "team.consumer", "a b", "a:b,c;d", "grüße", "消费者", "🙂", "x" * 255, "ä" * 127, "'\"\\", "-"]


@pytest.fixture
def marshal(memory: MemoryTestCluster) -> Iterator[Marshal]:
    memory.create("t", 1)
    with memory.connect() as marshal:
        yield marshal


@pytest.mark.parametrize("wrong", WRONG_IDS, ids=repr)
def test_a_group_needs_a_name(marshal: Marshal, wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="group"):
        marshal.consumer(wrong, ["t"])


@pytest.mark.parametrize("wrong", [w for w in WRONG_IDS if w is not None], ids=repr)
def test_a_client_needs_a_name(wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="client_id"):
        marshal_py.connect(MemoryTransport(MemoryBroker()), client_id=wrong)


def test_without_a_client_id_one_is_drawn() -> None:
    broker = MemoryBroker()
    with marshal_py.connect(MemoryTransport(broker)) as one, marshal_py.connect(MemoryTransport(broker)) as two:
        assert one.client_id != two.client_id
        assert str(os.getpid()) in one.client_id


@pytest.mark.parametrize("wrong", ["", "x" * 256, 5], ids=repr)
def test_a_member_name_is_a_name(marshal: Marshal, wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="member"):
        marshal.consumer("g", ["t"], member=wrong)


@pytest.mark.parametrize("wrong", ["", ".", "..", "a/b", "a b", "ä", "x" * 250, 5, None], ids=repr)
def test_a_topic_is_named_as_kafka_names_it(marshal: Marshal, wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="topic"):
        marshal.consumer("g", [wrong])


@pytest.mark.parametrize("wrong", ["", "a/b"], ids=repr)
def test_so_is_the_coordination_topic(wrong: str) -> None:
    with pytest.raises(InvalidOption, match="topic"):
        marshal_py.connect(MemoryTransport(MemoryBroker()), coordination_topic=wrong)


@pytest.mark.parametrize("wrong", ["t", [], ()], ids=repr)
def test_topics_are_a_sequence_of_some(marshal: Marshal, wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="topics"):
        marshal.consumer("g", wrong)


def test_so_many_topics_fit_into_a_join(marshal: Marshal) -> None:
    with pytest.raises(InvalidOption, match="at most 1000"):
        marshal.consumer("g", [f"t{i}" for i in range(1_001)])


@pytest.mark.parametrize("odd", ODD_IDS, ids=ascii)
def test_odd_names_work_from_end_to_end(memory: MemoryTestCluster, odd: str) -> None:
    _works(memory, odd)


def test_odd_names_work_on_a_broker(embedded: EmbeddedTestCluster) -> None:
    for odd in ("a/b, c:d", "grüße/消费者🙂", "ä" * 127):
        _works(embedded, odd)


def _works(cluster: TestCluster, odd: str) -> None:
    topic = cluster.topic()
    cluster.fill(topic, 0, 3)
    tp = TopicPartition(topic, 0)
    with cluster.connect(odd) as marshal:
        config = marshal_py.GroupConfig(policy="members", max_members=1, members=[odd])
        with joined(marshal, odd, [topic], member=odd, group_config=config) as consumer:
            assert consumer.cached_info().group == consumer.cached_info().client_id == odd
            collect(consumer, 2)
            assert consumer.info().client_id == odd
        with joined(marshal, odd, [topic], member=odd) as consumer:
            assert places(collect(consumer, 1)) == [(0, 2)]
        until(lambda: marshal._context.admin.committed(odd, [tp]) == {tp: 3}, "the mirror")


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        *(("delivery", w) for w in ("exactly_once", "", None, 1)),
        *(("policy", w) for w in ("fair", "", 1)),
        *(("start", w) for w in ("first", "", None)),
        *(("release_behind_s", w) for w in (0, 4.9, 86_401, "9", True)),
        *(("heartbeat_interval_s", w) for w in (0, 0.999, 600.001, -1, "2", None, True, float("nan"), float("inf"))),
        *(("handler_timeout_s", w) for w in (0, 0.5, 86_400.1, None, "1")),
        *(("max_claims", w) for w in (0, -1, 100_001, 1.5, "1", True)),
        *(("capacity", w) for w in (0, -1, 1_000_001, 1.5, None)),
        *(("prefetch_bytes", w) for w in (0, -1, 1_023, 2_097_151 * 1024 + 1, 2.0, None, True)),
    ],
)
def test_options_have_bounds(marshal: Marshal, option: str, wrong: Any) -> None:
    with pytest.raises(InvalidOption) as raised:
        marshal.consumer("g", ["t"], **{option: wrong})
    assert raised.value.option == option
    assert isinstance(raised.value, CallerError)
    assert marshal._loop.drivers == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("heartbeat_interval_s", 600),
        ("handler_timeout_s", 1),
        ("handler_timeout_s", 86_400),
        ("max_claims", 1),
        ("max_claims", 100_000),
        ("capacity", 1_000_000),
        ("prefetch_bytes", 1_024),
        ("prefetch_bytes", 2_097_151 * 1024),
        ("policy", "greedy"),
        ("policy", "balanced"),
    ],
)
def test_the_bounds_themselves_are_allowed(marshal: Marshal, option: str, value: Any) -> None:
    marshal.consumer("g", ["t"], **{option: value}).stop()


def test_a_consumer_that_would_never_release_what_it_falls_behind_on(marshal: Marshal) -> None:
    """`release_behind_s` has a meaning while the policy is greedy: its own, or the group's."""
    greedy, pinned = GroupConfig(policy="greedy"), GroupConfig(policy="pinned", priority_groups=["a"])
    for wrong in ({}, {"policy": "balanced"}, {"group_config": GroupConfig(policy="balanced")}):
        with pytest.raises(
            InvalidOption, match=r"^release_behind_s=5.*only the policy greedy.*has the policy balanced"
        ):
            marshal.consumer("behind", ["t"], release_behind_s=5, **wrong)
    with pytest.raises(InvalidOption, match=r"has the policy pinned: leave it out$"):
        marshal.consumer("pinned", ["t"], release_behind_s=5, policy="greedy", group_config=pinned, priority_group="a")
    marshal.consumer("own", ["t"], release_behind_s=5, policy="greedy").stop()
    marshal.consumer("group", ["t"], release_behind_s=5, group_config=greedy).stop()
    marshal.consumer("group", ["t"], release_behind_s=5).stop()
    marshal.consumer("later", ["t"], group_config=GroupConfig(policy="balanced")).stop()
    marshal.consumer("later", ["t"], release_behind_s=5, policy="greedy").stop()


@pytest.mark.parametrize("topics", [["t"], ["t*"]])
def test_a_start_of_a_partition_that_does_not_exist(marshal: Marshal, topics: list[str]) -> None:
    with pytest.raises(InvalidOption) as raised:
        marshal.consumer("start", topics, start='{"t": {"0": 0, "7": 5}}')
    assert "t:7 does not exist: topic 't' has the partitions 0 to 0; leave it out" in str(raised.value)
    with (
        marshal.planner("plan", ["t"], start="earliest") as planner,
        pytest.raises(InvalidOption, match="t:7 does not"),
    ):
        planner.ranges.ends_at('{"t": {"0": 0, "7": 5}}')


def test_a_start_of_a_partition_that_a_later_topic_does_not_have(
    memory: MemoryTestCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that a pattern matches later: the consumer ends, because its start cannot be."""
    monkeypatch.setattr(loop, "METADATA_S", 0.1)
    memory.create("later-0", 1)
    start = '{"later-0": {"0": 0}, "later-1": {"0": 0, "7": 5}}'
    with memory.connect() as marshal, marshal.consumer("g", ["later-*"], start=start) as consumer:
        memory.create("later-1", 1)
        with pytest.raises(InvalidOption, match="later-1:7 does not exist"):
            consumer.next(expires_s=DEADLINE_S)


def test_an_option_that_does_not_exist(marshal: Marshal) -> None:
    with pytest.raises(InvalidOption, match="hearbeat"):
        marshal.consumer("g", ["t"], hearbeat_interval_s=1)
    with pytest.raises(InvalidOption, match=r"\['client_id'\] is not allowed.*connect\(\)"):
        marshal.consumer("g", ["t"], start="earliest", client_id="c")


@pytest.mark.parametrize("wrong", [["127.0.0.1:1"], 7, "http://a:1", {"bootstrap.servers": 5}])
def test_servers_that_are_none_are_named(wrong: Any) -> None:
    with pytest.raises(InvalidOption, match="servers"):
        marshal_py.connect(wrong, timeout_s=1.0)


def test_a_misspelt_setting_is_named_alone(embedded: EmbeddedTestCluster) -> None:
    with pytest.raises(InvalidOption) as raised:
        marshal_py.connect({"bootstrap.servers": embedded.target, "bootsrap": "x"}, timeout_s=5.0)
    assert str(raised.value).startswith("settings='bootsrap' is not allowed")


@pytest.mark.parametrize(
    ("option", "wrong"),
    [
        *(("coordination_partitions", w) for w in (0, -1, 100_000, 1.5, "16", True)),
        *(("timeout_s", w) for w in (0, -1, float("nan"))),
    ],
)
def test_options_of_connect(option: str, wrong: Any) -> None:
    with pytest.raises(InvalidOption) as raised:
        marshal_py.connect(MemoryTransport(MemoryBroker()), **{option: wrong})
    assert raised.value.option == option


@pytest.mark.parametrize(
    "key",
    [
        "enable.auto.commit",
        "auto.offset.reset",
        "group.id",
        "enable.idempotence",
        "acks",
        "transactional.id",
        "partition.assignment.strategy",
    ],
)
def test_settings_that_the_protocol_would_not_survive(embedded: EmbeddedTestCluster, key: str) -> None:
    with pytest.raises(InvalidOption) as raised:
        marshal_py.connect({"bootstrap.servers": embedded.target, key: "x"})
    assert raised.value.option == key
    topic = embedded.topic()
    with embedded.connect() as marshal, pytest.raises(InvalidOption) as raised:
        marshal.consumer("g", [topic], settings={key: "x"})
    assert raised.value.option == key


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max.poll.interval.ms": 1}, r"^max\.poll\.interval\.ms=1 is not allowed: .*`session\.timeout\.ms`$"),
        ({"security_protocol": "SSL"}, r"^settings='security_protocol' .*with dots: security\.protocol\?$"),
        ({"sasl.pasword": "secret"}, r"^settings='sasl\.pasword' is not allowed: No such [^.]*\"sasl.pasword\"$"),
        ({"sasl.mechanism": "GSSAPI", "security.protocol": "SASL_SSL"}, r"^settings=\['bootstrap\.servers', 'sasl"),
    ],
    ids=["too low", "underscore", "unknown", "several"],
)
def test_a_setting_that_librdkafka_refuses_is_named_before_its_reason(given: dict[str, Any], said: str) -> None:
    """Of the settings those that the caller gave. The value of one that does not exist may be a password."""
    configuration = settings.data_reader({"bootstrap.servers": "127.0.0.1:1", **given}, "c", "g", None)
    with pytest.raises(InvalidOption, match=said) as raised:
        settings.create_client(confluent_kafka.Consumer, configuration)
    assert "KafkaError" not in str(raised.value)


async def _awaited(*_: object) -> None: ...


@pytest.mark.parametrize("wrong", [_awaited, 5], ids=["coroutine", "5"])
@pytest.mark.parametrize("key", ["error_cb", "stats_cb", "throttle_cb", "oauth_cb", "logger"])
def test_callbacks_in_the_settings_are_called_and_not_awaited(
    embedded: EmbeddedTestCluster, key: str, wrong: Any
) -> None:
    with pytest.raises(InvalidOption) as raised:
        marshal_py.connect({"bootstrap.servers": embedded.target, key: wrong})
    assert raised.value.option == key
    topic = embedded.topic()
    with embedded.connect() as marshal, pytest.raises(InvalidOption) as raised:
        marshal.consumer("g", [topic], settings={key: wrong})
    assert raised.value.option == key


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a callback"])
def test_no_token_is_a_failed_authentication(beside: bool) -> None:
    """confluent-kafka calls other callbacks with its error set; what they return then makes a SystemError of it."""

    def client(_: dict[str, Any]) -> None:
        refused = KafkaException(KafkaError(KafkaError._TIMED_OUT, "OAuth token not set within 10 seconds timeout"))
        if beside:
            raise SystemError("a callback returned a result with an exception set") from refused
        raise refused

    given = {"bootstrap.servers": "127.0.0.1:1", "oauth_cb": lambda _: ("", 0.0)}
    with pytest.raises(AuthenticationFailed, match=r"127\.0\.0\.1:1 .* oauth_cb gave no token: .* within 10 seconds"):
        settings.create_client(client, given)


def test_an_error_inside_the_client_stays_one() -> None:
    def client(_: dict[str, Any]) -> None:
        raise SystemError("a bug")

    with pytest.raises(SystemError, match="a bug"):
        settings.create_client(client, {"bootstrap.servers": "127.0.0.1:1"})


@pytest.mark.parametrize("wrong", [-1, float("nan"), 10**400, "a", None, True], ids=lambda wrong: repr(wrong)[:5])
def test_a_time_to_wait_is_a_number_of_seconds(memory: MemoryTestCluster, wrong: Any) -> None:
    """Also with asyncio. A `stop` that is refused has stopped nothing."""
    topic, rule = memory.topic(), r"^timeout_s=.*a number of seconds, at least 0"
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        for verb in (consumer.stop, consumer.flush, consumer.info):
            with pytest.raises(InvalidOption, match=rule):
                verb(wrong)
        assert not consumer.cached_info().closed
        assert not consumer._ending.stopping
        consumer.flush()

    async def main() -> None:
        async with aio.connect(memory.target) as marshal, marshal.consumer(memory.group(), [topic]) as consumer:
            for verb in (consumer.stop, consumer.flush, consumer.info):
                with pytest.raises(InvalidOption, match=rule):
                    await verb(wrong)
            assert not consumer.cached_info().closed
            await consumer.flush()

    asyncio.run(main())


@pytest.mark.parametrize("servers", ["", {}, {"bootstrap.servers": ""}], ids=repr)
def test_servers_are_needed(servers: Any) -> None:
    with pytest.raises(InvalidOption, match="bootstrap"):
        marshal_py.connect(servers)


def test_the_name_that_was_probably_meant_is_said() -> None:
    with pytest.raises(InvalidOption, match=r"Did you mean bootstrap\.servers by bootstrap_servers\?$"):
        marshal_py.connect({"client.id": "a", "bootstrap_servers": "127.0.0.1:1"})


def test_a_setting_that_librdkafka_does_not_know(embedded: EmbeddedTestCluster) -> None:
    with pytest.raises(InvalidOption, match=r"no\.such\.setting"):
        marshal_py.connect({"bootstrap.servers": embedded.target, "no.such.setting": "1"})
    topic = embedded.topic()
    with embedded.connect() as marshal, pytest.raises(InvalidOption, match=r"fetch\.min\.bytes"):
        marshal.consumer("g", [topic], settings={"fetch.min.bytes": "many"})


def test_servers_that_do_not_exist() -> None:
    with pytest.raises(ClusterUnreachable, match=r"127\.0\.0\.1:1") as raised:
        marshal_py.connect("127.0.0.1:1", timeout_s=0.5)
    assert raised.value.retriable
    assert raised.value.waiting_for == "the cluster's metadata"


def test_a_python_without_its_gil_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate before a delivery relies on an order of two threads' stores and loads that is not promised there."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with pytest.raises(UnsupportedPlatform, match="PYTHON_GIL=1"):
        marshal_py.connect(MemoryTransport(MemoryBroker()))
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    marshal_py.connect(MemoryTransport(MemoryBroker())).close()


# --- threads


def test_two_threads_in_one_consumer(cluster: TestCluster) -> None:
    topic = cluster.topic()
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        inside = threading.Event()
        ended: list[object] = []

        def wait_in_fetch() -> None:
            inside.set()
            ended.append(consumer.fetch(1, expires_s=40))

        thread = threading.Thread(target=wait_in_fetch)
        thread.start()
        inside.wait()
        until(lambda: consumer._user is not None, "the other thread is inside")
        for verb in (consumer.fetch, consumer.next, consumer.flush, lambda: next(iter(consumer))):
            with pytest.raises(ConcurrentUse, match="another thread"):
                verb()
        cluster.fill(topic, 0, 1)
        thread.join()
        assert len(ended) == 1
        assert consumer.next(expires_s=0) is None


def test_an_iteration_belongs_to_its_thread(memory: MemoryTestCluster) -> None:
    topic = memory.topic()
    memory.fill(topic, 0, 2)
    errors: list[BaseException] = []
    with memory.connect() as marshal, joined(marshal, memory.group(), [topic]) as consumer:
        for message in consumer:

            def intrude() -> None:
                try:
                    consumer.next()
                except ConcurrentUse as error:
                    errors.append(error)

            thread = threading.Thread(target=intrude)
            thread.start()
            thread.join()
            message.ack()
            if message.offset == 1:
                break
        assert len(errors) == 2
        with pytest.raises(ConcurrentUse, match="this thread began has not ended"):
            for _ in _two_at_once(memory, consumer, topic):
                pass


def test_an_iterator_that_a_variable_holds_has_not_ended(memory: MemoryTestCluster) -> None:
    with memory.reading(3) as consumer:
        held = iter(consumer)
        next(held).ack()
        for begin in (lambda: next(iter(consumer)), consumer.consume):
            with pytest.raises(ConcurrentUse, match=r"del the variable") as raised:
                begin()
            assert raised.value.busy == ConcurrentUse.ITERATES
        del held
        assert places(collect(consumer, 2)) == [(0, 1), (0, 2)]


def _two_at_once(memory: MemoryTestCluster, consumer: Any, topic: str) -> Any:
    memory.fill(topic, 0, 2, first=2)
    for outer in consumer:
        yield outer
        yield from consumer


def _fetch_for_ever(consumer: marshal_py.Consumer, ended: list[BaseException]) -> None:
    try:
        while True:
            consumer.fetch(1, expires_s=40)
    except CallerError as error:
        ended.append(error)


def test_stop_from_another_thread_ends_a_waiting_fetch(cluster: TestCluster) -> None:
    """librdkafka would free its client under the thread that waits in it."""
    topic = cluster.topic()
    for _ in range(5):
        with cluster.connect() as marshal:
            consumer = joined(marshal, cluster.group(), [topic])
            ended: list[BaseException] = []

            thread = threading.Thread(target=_fetch_for_ever, args=(consumer, ended))
            thread.start()
            until(lambda consumer=consumer: consumer._user is not None, "the thread is inside")  # type: ignore[misc]
            consumer.stop()
            thread.join()
            assert [type(error).__name__ for error in ended] == ["ConsumerClosed"]


# --- fork


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_must_connect_again(cluster: TestCluster) -> None:
    topic = cluster.topic()
    with cluster.connect() as marshal, joined(marshal, cluster.group(), [topic]) as consumer:
        verbs: list[Any] = [
            consumer.fetch,
            consumer.next,
            consumer.flush,
            consumer.stop,
            consumer.drain,
            consumer.info,
            consumer.cached_info,
            lambda: next(iter(consumer)),
            lambda: next(consumer.events()),
            marshal.close,
            marshal.metrics,
            lambda: marshal.consumer("g", [topic]),
            lambda: consumer.pause([(topic, 0)]),
            lambda: consumer.resume([(topic, 0)]),
            lambda: consumer.complete(b""),
            lambda: consumer.message(b""),
        ]
        assert _in_a_child(verbs) == ["UsedAfterFork"] * len(verbs)
        assert _in_a_child([lambda: consumer._ending.stopping or 1 / 0]) == ["nothing"], "loops end there"
        assert not consumer._ending.stopping
        cluster.fill(topic, 0, 1)
        assert places(collect(consumer, 1)) == [(0, 0)], "the parent goes on"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_an_ack_in_a_fork_is_refused(memory: MemoryTestCluster, delivery: str) -> None:
    """Without the check it returned True and did nothing, or waited for a lock whose holder does not exist there.

    ACKS: In a forked process every answer raises.
    """
    topic = memory.topic()
    memory.fill(topic, 0, 4)
    with memory.connect() as marshal:
        gone = joined(marshal, memory.group(), [topic], delivery=delivery)
        late = collect(gone, 1, ack=False)[0]
        gone.stop()
        with joined(marshal, memory.group(), [topic], delivery=delivery) as consumer:
            batch = until(lambda: consumer.fetch(1, expires_s=0.1), "a message")
            messages, message = iter(consumer), next(iter(batch))
            next(messages)
            verbs: list[Any] = [
                message.ack,
                message.in_progress,
                message.nak,
                message.term,
                message.double_ack,
                message.handle,
                batch.ack,
                batch.nak,
                batch.term,
                batch.parts[0].ack,
                late.ack,
                late.in_progress,
                lambda: next(messages),
            ]
            held, over = threading.Event(), threading.Event()

            def hold() -> None:
                with marshal._context.lock:
                    held.set()
                    assert over.wait(40)

            holder = threading.Thread(target=hold)
            holder.start()
            try:
                assert held.wait(40)
                reported = _in_a_child(verbs)
            finally:
                over.set()
                holder.join()
            assert reported == ["UsedAfterFork"] * len(verbs)
            assert message.ack()
            assert next(messages).offset == 2, "the parent goes on"


def _in_a_child(verbs: list[Any]) -> list[str]:
    """What each method raises in a forked child."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        gc.disable()  # what other tests left for the collector may have threads of librdkafka, which end here
        os.write(writer, _tried(verbs).encode())
        os._exit(0)
    os.close(writer)
    reported = b"".join(iter(lambda: os.read(reader, 4096), b"")).decode()
    os.close(reader)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}; it had reported {reported!r}"
    return reported.split()


def _tried(verbs: list[Any]) -> str:
    reported = ""
    for verb in verbs:
        try:
            verb()
            reported += "nothing "
        except UsedAfterFork:
            reported += "UsedAfterFork "
        except BaseException as error:
            reported += f"{error!r} "
    return reported
