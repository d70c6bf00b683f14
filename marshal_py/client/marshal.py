"""`connect` and the Marshal: one connection to a cluster, from which consumers are made.

Users get the Marshal of admin/marshal.py, which adds topics and groups as objects.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, Final, Self, TypeVar, Unpack, overload

from marshal_py.client.connection import Callbacks, Context
from marshal_py.client.consumer import Consumer
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.client.delivery.prefetch import FILLED_SHARE
from marshal_py.client.driver import last_wills
from marshal_py.client.driver.consumer_driver import ConsumerDriver, check_count, find_topics
from marshal_py.client.driver.last_wills import LastWills
from marshal_py.client.driver.loop import Loop
from marshal_py.client.membership import LEAVE_TIMEOUT_S, Ending, Membership, fenced
from marshal_py.client.metrics import Metrics, consumers_of
from marshal_py.client.planner import Planner
from marshal_py.client.ranges import Ranges
from marshal_py.client.values import position_text, requests
from marshal_py.client.values.options import (
    CONNECT_TIMEOUT_S,
    COORDINATION_TOPIC,
    HISTORY_KEPT_S,
    ConsumerKeywords,
    ConsumerOptions,
    RetentionPolicy,
    check_pattern,
    check_retention,
    check_topics,
    chosen,
    explicit,
    read_key,
)
from marshal_py.errors import ConsumerClosed, InvalidOption, MembersAlive, TopicMissing, UnsupportedPlatform
from marshal_py.protocol.duties import SNAPSHOT_EVERY_RECORDS
from marshal_py.protocol.member import rebalance
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.wire.codec import SigningKey
from marshal_py.protocol.wire.identity import EXCEPT, NONE, check_id, has_patterns, matches, names_of, route
from marshal_py.protocol.wire.records import PARTITION_MAX, Genesis
from marshal_py.topics import changes
from marshal_py.transport.connecting import check_timeout
from marshal_py.transport.kafka import KafkaTransport
from marshal_py.transport.memory import MemoryTransport, named_transport
from marshal_py.transport.option_names import checks_names
from marshal_py.transport.ports import TopicInfo
from marshal_py.transport.serialization import Deserializer, K, V
from marshal_py.transport.settings import default_client_id
from marshal_py.transport.topic_checks import COORDINATION_PARTITIONS

# --- Makes the consumers of one Marshal and has them join their groups: checks, then a driver, then the Join record


M = TypeVar("M", bound=Membership)

NO_MESSAGES: Final = "it is the Marshal's own coordination topic, which has no messages; `marshal log tail` shows it"
KAFKA_CONSUMERS: Final = (
    "ordinary Kafka consumers use the same group id, so both would read every message; stop them (one that was killed "
    "counts until its session.timeout.ms is over), or use another group, which may begin where they are "
    "(start='committed:GROUP')"
)
JOIN_STOP_TIMEOUT_S: Final = 3.0  # how long a consumer that could not join waits for the release of what it claimed


class Joining:
    """Makes consumers, unless `closed`. `endings`: of those that have not ended, oldest first; not the consumers, so
    that one that is dropped is noticed (Membership.__del__)."""

    def __init__(
        self,
        transport: KafkaTransport | MemoryTransport,
        context: Context,
        loop: Loop,
        root: Genesis,
        client_id: str,
        library: str,
        timeout_s: float,
        wills: LastWills | None = None,
    ) -> None:
        """`library`: for Joins. `timeout_s`: to join. `wills`: knows the witness for a Join, or None."""
        self._wills = wills
        self.endings: dict[ConsumerDriver, Ending] = {}
        self.closed = False
        self.kept: bool = False  # whether somebody else stops its consumers, so that the program may drop them
        self._transport, self._context, self._loop, self._root = transport, context, loop, root
        self._client_id, self._library, self._timeout_s = client_id, library, timeout_s

    def consumer(self, group: str, topics: Sequence[str], options: ConsumerOptions) -> Consumer[Any, Any]:
        return self._join(Consumer, "consumer", group, topics, options, plans=False)

    def planner(self, group: str, topics: Sequence[str], options: ConsumerOptions) -> Planner:
        return self._join(Planner, "planner", group, topics, options, plans=True)

    def _join(
        self,
        kind: Callable[[Context, ConsumerDriver, Mapping[str, Any], Ending], M],
        verb: str,
        group: str,
        topics: Sequence[str],
        options: ConsumerOptions,
        *,
        plans: bool,
    ) -> M:
        """Returns a consumer of class `kind` once the group has it. `verb`: for errors. `plans`: ranges."""
        context, deadline = self._context, time.monotonic() + self._timeout_s
        context.check_call("Marshal", verb, waits=True)
        if self.closed:
            raise ConsumerClosed("Marshal", "it was closed")
        context.check_alive()
        check_id("group", group)
        driver = self._drive(group, check_topics(topics, patterns=not plans), options, deadline, plans=plans)
        given = self._transport.given if isinstance(self._transport, KafkaTransport) else {}
        ending = Ending(context, driver, lambda: self._end(driver))
        consumer = kind(context, driver, {**given, **options.settings}, ending)
        ending.fronts += self.kept
        self.endings[driver] = ending  # before the next look at `closed`: from then on `close` stops it
        try:
            if self.closed:
                raise ConsumerClosed("Marshal", "it was closed")
            self._loop.add(driver)
            self._await_join(driver, ending, deadline)
            if self._wills is not None:
                self._wills.wait_registered(driver)
        except BaseException:
            consumer.stop(JOIN_STOP_TIMEOUT_S)
            raise
        return consumer

    def _await_join(self, driver: ConsumerDriver, ending: Ending, deadline: float) -> None:
        """Waits until the group has the member. Raises ClusterUnreachable, and the error that ended the consumer."""
        context, member = self._context, driver.member
        until = max(deadline, context.monotonic() + 1.0)
        context.wait_for(lambda: member.session != NONE or driver.ended, "the group to be joined", until, driver.log)
        if driver.ended:
            ending.raise_if_ended()
        if isinstance(driver.queue, Ranges):  # from now on its user has to call
            with context.lock:
                driver.queue.called()

    def _end(self, driver: ConsumerDriver) -> None:
        """Forgets a consumer that has ended."""
        self.endings.pop(driver, None)
        driver.queue.close()

    def _drive(
        self, group: str, topics: tuple[str, ...], options: ConsumerOptions, deadline: float, *, plans: bool
    ) -> ConsumerDriver:
        """Makes the driver of a member that has not joined yet. `deadline`: in seconds of the monotonic clock."""
        context, loop = self._context, self._loop
        letters = options.dead_letter_topic
        if plans:
            options.check_planning()
        if isinstance(options.start, str):
            options = replace(options, start=position_text.read(options.start))  # nobody reads the file again
        position_text.check_topics(options.start, topics)
        if letters is not None and has_patterns(topics):
            topics = (*topics, EXCEPT + letters)
        found = self._check(group, topics, options)
        position_text.check_partitions(options.start, {topic: info.partitions for topic, info in found.items()})
        number = route(group, self._root.partitions)
        world = loop.open_world(number, None if number == 0 else self._root, deadline)
        witness = self._wills.witness if self._wills is not None else ""
        chosen = options.member_options(self._client_id, topics, self._library, witness)
        source = self._transport.source(
            group, self._client_id, options.settings, options.prefetch_bytes // FILLED_SHARE
        )
        try:
            source.learn_leaders(tuple(found))
            with context.lock:
                known, later = world.groups.get(group), frozenset[str]()
                options.check_policy(group, None if known is None else known.config)
                if plans:  # as in Spark: what a query reads in addition, it reads from the beginning
                    later = rebalance.new_topics(known, names_of(topics))
                later |= rebalance.found_later(known, topics, tuple(found))
                member = Member(world, group, chosen, secrets.token_bytes)
                for topic, info in found.items():  # before it can claim anything (D10)
                    member.learn_topic(topic, info.partitions, info.topic_id)
            driver = ConsumerDriver(
                context,
                number,
                member,
                source,
                options,
                self._root.incarnation,
                later,
                loop.maintenance.refold,
                lambda: loop.sessions_of(number),
                plans=plans,
            )
        except BaseException:
            source.close()
            raise
        if letters is not None:
            assert isinstance(driver.queue, DeliveryQueue)
            driver.queue.write_dead_letters(letters, self._transport.writer)
        return driver

    def _check(self, group: str, topics: tuple[str, ...], options: ConsumerOptions) -> dict[str, TopicInfo]:
        """Returns what the cluster says of the topics, patterns' included; no ordinary Kafka consumer may use the group
        (D7). Raises TopicMissing, MembersAlive, InvalidOption."""
        found: dict[str, TopicInfo] = {}
        if self._context.topic in topics:
            raise InvalidOption("topics", self._context.topic, NO_MESSAGES)
        letters = options.dead_letter_topic
        if letters is not None and letters in (*topics, self._context.topic):
            raise InvalidOption("dead_letter_topic", letters, "another topic than those that the consumer reads")
        names, reads = names_of(topics), find_topics(self._context.admin, topics, self._context.topic)
        check_count(topics, len(reads))
        for topic in (*reads, letters) if letters is not None else reads:
            info = self._context.admin.describe_topic(topic)
            if info is None and (topic in names or topic == letters):
                raise TopicMissing(topic)
            if info is not None and topic != letters:
                found[topic] = info
        live = self._context.admin.live_kafka_members(group)
        if live:
            raise MembersAlive(group, KAFKA_CONSUMERS, (f"{live} ordinary Kafka consumers",))
        return found


VERSION: Final = "marshal_py 1.0.0rc1"
STATISTICS_MS_MAX: Final = 86_400_000  # librdkafka's own maximum
EXIT_TIMEOUT_S: Final = 3.0  # how long an interpreter that ends without close() waits for its claims' releases

# Strong references: a program that ends by sys.exit has dropped its names before `atexit` runs, and its claims must be
# released all the same. A Marshal that is dropped without close() keeps its thread and its leases anyway.
open_marshals: set[Marshal] = set()


def _check_platform() -> None:
    """Raises UnsupportedPlatform."""
    if sys.platform == "win32":
        raise UnsupportedPlatform("marshal_py", "Windows", "run it on Linux or macOS, or inside WSL")
    # buffers.py: two threads rely on the order of their stores
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise UnsupportedPlatform(
            "marshal_py",
            "a Python that runs without its global interpreter lock",
            "start it with PYTHON_GIL=1 (or -X gil=1)",
        )


class Marshal:
    """A connection to a cluster. Made by `connect`. It is a context manager: leaving it stops its consumers."""

    def __init__(
        self,
        transport: KafkaTransport | MemoryTransport,
        client_id: str,
        topic: str,
        partitions: int,
        timeout_s: float,
        retention: RetentionPolicy,
        callbacks: Callbacks,
        witness: str = "",
        key: SigningKey | None = None,
    ) -> None:
        self.client_id = client_id
        self._key = key
        self.coordination_topic = topic
        self.transport = transport
        self._timeout_s = timeout_s
        self._done = False
        self._closing = threading.RLock()  # the thread that closes has it
        servers = (
            transport.broker.bootstrap_servers
            if isinstance(transport, MemoryTransport)
            else str(transport.given["bootstrap.servers"])
        )
        self._context = Context(
            transport.log(topic, client_id),
            transport.admin(),
            transport.clock,
            servers,
            topic,
            secrets.token_bytes,
            retention,
            callbacks,
        )
        self._loop = Loop(self._context)
        try:
            self._loop.start()
            self.root: Genesis = self._loop.open_root(partitions, timeout_s)
            given = transport.given if isinstance(transport, KafkaTransport) else {}
            incarnation = self.root.incarnation
            self._wills = LastWills(self._context, witness, given, incarnation, self._loop) if witness else None
        except BaseException:
            self._loop.close(0.0)
            raise
        self._joining = Joining(
            transport, self._context, self._loop, self.root, client_id, VERSION, timeout_s, self._wills
        )
        open_marshals.add(self)

    def __repr__(self) -> str:
        consumers, state = len(self._joining.endings), ", closed" if self._joining.closed else ""
        return f"Marshal({self._context.servers!r}, client_id={self.client_id!r}, consumers={consumers}{state})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    @checks_names
    def connect(
        cls,
        servers_or_config: str | Mapping[str, Any] | MemoryTransport,
        *,
        client_id: str | None = None,
        coordination_topic: str = COORDINATION_TOPIC,
        coordination_partitions: int = COORDINATION_PARTITIONS,
        timeout_s: float = CONNECT_TIMEOUT_S,
        snapshot_every_records: int = SNAPSHOT_EVERY_RECORDS,
        history_kept_s: float = HISTORY_KEPT_S,
        statistics_interval_ms: int = 0,
        evidence_dir: str | None = None,
        last_will: str = "auto",
        sign_with: str | PathLike[str] | None = None,
    ) -> Self:
        """Connects to a cluster, and creates or checks the coordination topic (PROTOCOL.md L1).

        `servers_or_config`: "host:port,..." or a mapping of librdkafka settings (SASL, TLS, ...).
        `client_id`: unique per live process; by default the settings' `client.id`, or the host name, then
        the pid and random digits.
        `coordination_partitions`: how many partitions the coordination topic gets, if this call creates it.
        `snapshot_every_records`: consumers write a snapshot of their log at least that often, of a small state
        after 2,000 records.
        `history_kept_s`: where Kafka lets them, consumers delete records that are older than this and older than the
        two newest confirmed snapshots.
        `statistics_interval_ms`: how often librdkafka's clients report statistics to `Marshal.metrics`; 0: never.
        `evidence_dir`: where a consumer that ends with Diverged saves its state; by default where temporary files are.
        `last_will`: who ends the sessions of this process if it dies, so that others take over at once: "auto" is the
        `marshal run` around this process, if there is one; "process" is a small process that this call starts; "off".
        `sign_with`: a file of `marshal keys`; changes of groups that have admin keys are signed with it.

        `error_cb`, `stats_cb` and `logger` among the settings are called on the thread "marshal-callbacks". While no
        broker answers, a line in the log of this process says every 5 s why.

        Raises ClusterUnreachable after `timeout_s` seconds, an hour at most, with librdkafka's last error;
        AuthenticationFailed and TlsMismatch after about 2 s; CoordinationError, AccessDenied, InvalidOption,
        UnsupportedPlatform.
        """
        _check_platform()
        if type(coordination_partitions) is not int or not 1 <= coordination_partitions <= PARTITION_MAX:
            raise InvalidOption("coordination_partitions", coordination_partitions, f"1 to {PARTITION_MAX}")
        timeout_s = check_timeout(timeout_s)
        retention = check_retention(snapshot_every_records, history_kept_s, evidence_dir)
        named_in = servers_or_config.get("client.id", "") if isinstance(servers_or_config, Mapping) else ""
        unique = f"{named_in or default_client_id()}-{os.getpid()}-{secrets.token_hex(3)}"
        given = unique if client_id is None else client_id
        check_id("client_id", given)
        check_topics([coordination_topic])
        if type(statistics_interval_ms) is not int or not 0 <= statistics_interval_ms <= STATISTICS_MS_MAX:
            raise InvalidOption("statistics_interval_ms", statistics_interval_ms, f"0 (never) to {STATISTICS_MS_MAX}")
        named = None if isinstance(servers_or_config, MemoryTransport) else named_transport(servers_or_config)
        in_memory = named is not None or isinstance(servers_or_config, MemoryTransport)
        settings = servers_or_config if isinstance(servers_or_config, Mapping) else {}
        witness = last_wills.check(last_will, settings, reachable=not in_memory)
        key = None if sign_with is None else read_key(sign_with)
        callbacks = Callbacks()
        try:
            transport: KafkaTransport | MemoryTransport
            if isinstance(servers_or_config, MemoryTransport):
                transport = servers_or_config
            elif named is not None:
                transport = named
            else:
                transport = KafkaTransport(servers_or_config, timeout_s, callbacks.submit)
                transport.collect_statistics(statistics_interval_ms)
            topic = (coordination_topic, coordination_partitions)
            return cls(transport, given, *topic, timeout_s, retention, callbacks, witness, key)
        except BaseException:
            callbacks.close(0.0)
            raise

    def topics(self, pattern: str = "*") -> tuple[str, ...]:
        """Returns the sorted names of the cluster's topics that match a glob, such as orders-*.

        The coordination topic and Kafka's internal topics are left out. Raises InvalidOption, ClusterUnreachable,
        ReentrantCall.
        """
        self._context.check_call("Marshal", "topics", waits=True)
        check_pattern(pattern, "pattern")
        found = self._context.admin.topics() - changes.INTERNAL - {self.coordination_topic}
        return tuple(sorted(topic for topic in found if matches(pattern, topic)))

    # --- consumers

    # The types of keys and values are those that the deserializers return. Options that were made before may have any.

    @overload
    def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        key_deserializer: Deserializer[K] | None = None,
        value_deserializer: Deserializer[V] | None = None,
        **keywords: Unpack[ConsumerKeywords],
    ) -> Consumer[K, V]: ...
    @overload
    def consumer(
        self,
        group: str,
        topics: Sequence[str],
        *,
        options: ConsumerOptions,
        key_deserializer: Deserializer | None = None,
        value_deserializer: Deserializer | None = None,
        **keywords: Unpack[ConsumerKeywords],
    ) -> Consumer[Any, Any]: ...
    @explicit
    def consumer(
        self, group: str, topics: Sequence[str], *, options: ConsumerOptions | None = None, **keywords: Any
    ) -> Consumer[Any, Any]:
        """Joins `group` as a consumer of `topics`, and returns once the group has it.

        `topics`: names, and patterns such as "orders-*", which also match topics that are created later
        (docs/consumer.md). The keywords are the fields of ConsumerOptions, which describes them. With `options` they
        replace single fields of it.

        The callbacks among the options run one after the other on the thread "marshal-callbacks" of this Marshal, in
        the order of the events; a slow one delays the next ones and `close`, nothing else. While 100,000 calls are
        waiting, new ones are dropped (Metrics.callbacks_dropped). Exceptions in them are logged. `close` waits for them
        until its `timeout_s` is over, and for a second if less is left.

        on_revoking is called once when a claim is going to end; info.revoking says why: a hand-over, a pause, a stop, a
        handler that hangs, a partition that is parked. No more messages of it are delivered. The claim ends when its
        handlers have acked what they hold, or after info.drain_s seconds. If its successor dies meanwhile, the claim
        stays and continues.

        Raises InvalidOption, TopicMissing, MembersAlive, ModeMismatch, GroupDeleted, GroupOpaque,
        CoordinationError, ClusterUnreachable, BackgroundThreadEnded, ReentrantCall.
        """
        return self._joining.consumer(group, topics, chosen("consumer", options, keywords))

    @explicit
    def planner(
        self,
        group: str,
        topics: Sequence[str],
        *,
        options: ConsumerOptions | None = None,
        **keywords: Unpack[ConsumerKeywords],
    ) -> Planner:
        """Joins `group` as a consumer that plans ranges for other readers, and returns once the group has it.

        It fetches no messages. It takes the options and callbacks of `consumer`, and raises the same errors.
        """
        return self._joining.planner(group, topics, chosen("planner", options, keywords))

    def metrics(self) -> Metrics:
        """Returns figures of this connection and its consumers. It sends nothing, so it may be called every second."""
        self._context.check_call("Marshal", "metrics")
        context, loop = self._context, self._loop
        with context.lock:
            now = context.clock.now()
            consumers = consumers_of(loop.drivers, now)
        return Metrics(
            self.client_id,
            self.coordination_topic,
            now.wall_ms,
            loop.turn.folded,
            context.coordination.produce_errors,
            self.waiting_for,
            consumers,
            self.transport.statistics() if isinstance(self.transport, KafkaTransport) else {},
            context.callbacks.dropped,
            context.stalls.total_ms,
            context.stalls.longest_ms,
        )

    @property
    def waiting_for(self) -> str:
        """Returns what the connection is waiting for, in words for people; "" when all is well.

        A cluster that hangs gives no error. That a consumer of this connection reads no sign of life of its own back
        any more, shows it, within a heartbeat interval.
        """
        if found := self._context.waiting_for():
            return found
        with self._context.lock:
            return next((found for driver in self._loop.drivers if (found := fenced(driver))), "")

    def close(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Stops every consumer, sends what is queued and disconnects, all within about `timeout_s` seconds.

        While the cluster does not answer, the stops and drains of its consumers and this call take about 20 s together,
        unless a `timeout_s` is longer.

        Callbacks that have begun or are waiting get the time that is left, or a second if that is less.

        A second call does nothing; if the first was interrupted (ctrl-C), it does what is left. While another thread
        closes the Marshal, the call waits for that, at most `timeout_s` seconds. Raises ReentrantCall, InvalidOption,
        and at the end the first error of a consumer.
        """
        self._context.check_call("Marshal", "close", waits=True)
        timeout_s = requests.check_timeout(timeout_s)
        deadline = self._context.end_budget.deadline(timeout_s)  # of all together: what is left of the budget
        if self._closing.acquire(timeout=timeout_s):
            try:
                if not self._done:
                    self._close(deadline)
            finally:
                self._closing.release()

    def _close(self, deadline: float) -> None:
        self._joining.closed = True
        failed: list[Exception] = []
        left: list[Ending] = []
        for ending in list(self._joining.endings.values()):
            try:
                self._context.complete(ending.stop(max(0.0, deadline - time.monotonic())))
                left.append(ending)
            except Exception as error:  # the others hold claims, too
                failed.append(error)
        for ending in left:  # then: each waits for its poll, and those of consumers that have left end together
            try:
                ending.close()
            except Exception as error:
                failed.append(error)
        if self._wills is not None:
            self._wills.close(max(0.0, deadline - time.monotonic()))
        self._loop.close(max(0.0, deadline - time.monotonic()))
        if failed:
            raise failed[0]
        self._done = True
        open_marshals.discard(self)


connect: Final = Marshal.connect


def _close_all() -> None:
    """At interpreter exit: closes each open Marshal within EXIT_TIMEOUT_S, with a ResourceWarning; not in a forked
    child, whose parent owns the claims."""
    for marshal in list(open_marshals):
        if marshal._context.pid == os.getpid():
            with contextlib.suppress(Exception):  # a warning may be an error
                warnings.warn(f"{marshal!r} was not closed", ResourceWarning, stacklevel=2, source=marshal)
            with contextlib.suppress(Exception):
                marshal.close(EXIT_TIMEOUT_S)


atexit.register(_close_all)
