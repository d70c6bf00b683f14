"""The order per key while members join, are dropped, step down, freeze and crash: the real delivery, in virtual time.

Each client is a Member over the virtual log, with the DeliveryQueue that a Consumer has. Handlers take their time, give
messages back, and ack late. The judge sees every delivery and nothing else. `python -m tests.support.key_order` does
the same with processes on an Apache Kafka.
"""

from __future__ import annotations

import random
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from marshal_py import ConsumerOptions, Message, subject_key
from marshal_py.client.delivery.delivery_queue import DeliveryQueue
from marshal_py.protocol.member.member_state import Ready
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import GroupConfig, StepDown
from marshal_py.transport.memory import MemoryBroker, MemoryTransport
from tests.support.key_order import OrderJudge
from tests.support.virtual_cluster import GROUP, INCARNATION, INTERVAL_MS, TOPIC, Client, VirtualCluster

PARTITIONS, KEYS = 6, 20
CHANGES, MESSAGES = 24, 40  # messages per change
STEP_MS = 100  # between two looks of a handler
NAKS = 0.05  # the share of deliveries whose handler gives the message back
key_of = subject_key("orders.*.*", tokens=(2, 1))


class Handlers:
    """What one process delivers to its handlers: the real queue over a source in memory."""

    def __init__(self, client: Client, broker: MemoryBroker, most: int | None, judge: OrderJudge) -> None:
        self.client, self.judge = client, judge
        options = ConsumerOptions(max_acks_pending=most)
        source = MemoryTransport(broker).source(GROUP, client.name, {}, options.prefetch_bytes)
        context: Any = SimpleNamespace(lock=threading.RLock(), clock=SimpleNamespace(now=lambda: client.now))
        self.queue = DeliveryQueue(context, client.member, source, options, INCARNATION, lambda name, task: None)
        self.held: list[tuple[int, Message]] = []  # (when its handler is done, message)
        self._tick: Callable[[], Ready] = client.tick
        client.tick = self.tick  # type: ignore[method-assign]  # a driver carries out more than the cluster knows

    def tick(self) -> Ready:
        out = self._tick()
        self.queue.drop([claim.tp for claim, _ in out.lost] + out.stop_prefetch)
        self.queue.open(out.claimed)
        for tp, position in out.start_prefetch:
            self.queue.start_prefetch(tp, position)
        return out

    def work(self, dice: random.Random, now_ms: int) -> None:
        """Lets the handlers that are done answer, and hands over what may be delivered."""
        queue = self.queue
        for due_ms, message in list(self.held):
            if due_ms <= now_ms:
                self.held.remove((due_ms, message))
                if dice.random() < NAKS:
                    message.nak(dice.choice((0, 0.2, 1.0)))
                elif message.ack():
                    self.judge.done(message.partition, message.offset)
        queue.user_returned()
        queue.add(queue.pull(0.0, 1_000))
        queue.begin()
        for part, _ in queue.take(10, None, self.client.now):
            for message in part:
                number = int(message.value or b"")
                self.judge.delivered(message.partition, message.offset, str(message.token), message.key, number)
                self.held.append((now_ms + dice.choice((0, 0, STEP_MS, 5 * STEP_MS)), message))
        if self.client.member.finished():
            self.client.tick()


class Scenario:
    """One group with the policy `members`, and a seeded sequence of changes while messages are handled."""

    def __init__(self, seed: int, most: int | None) -> None:
        self.dice = random.Random(seed)
        self.most = most
        self.broker = MemoryBroker()
        self.broker.create_topic(TOPIC, PARTITIONS)
        self.judge = OrderJudge()
        self.numbers: dict[bytes, int] = defaultdict(int)
        self.cluster = VirtualCluster(partitions=PARTITIONS)
        self.names = ["m0", "m1", "m2"]
        self.cluster.must(GroupConfig(NONE, policy="members", max_members=PARTITIONS, members=tuple(self.names)))
        self.handlers: list[Handlers] = []
        self.made = 0
        for name in (*self.names, "m0"):
            self.start(name)

    def produce(self) -> None:
        for _ in range(MESSAGES):
            at = self.dice.randrange(KEYS)
            key = key_of(f"orders.{at % 3}.{at}")
            partition = zlib.crc32(key) % PARTITIONS
            offset = self.broker.produce(TOPIC, partition, b"%d" % self.numbers[key], key)
            self.judge.produced(partition, offset)
            self.numbers[key] += 1

    def start(self, name: str) -> None:
        client = self.cluster.add(f"{name}-{self.made}", member=name)
        self.made += 1
        self.handlers.append(Handlers(client, self.broker, self.most, self.judge))

    def run(self, for_ms: int) -> None:
        until_ms = self.cluster.now_ms + for_ms
        while self.cluster.now_ms < until_ms:
            self.cluster.run(STEP_MS)
            for handlers in self.handlers:
                if handlers.client.runs:
                    handlers.work(self.dice, self.cluster.now_ms)

    def set_members(self) -> None:
        group = self.cluster.world.groups[GROUP]
        assert group.config is not None
        config: dict[str, Any] = {"policy": "members", "max_members": PARTITIONS, "members": tuple(self.names)}
        self.cluster.must(GroupConfig(group.config_offset, **config))

    def running(self) -> list[Handlers]:
        return [one for one in self.handlers if one.client.runs]

    def change(self, kind: str) -> None:
        """One change of the members. Whoever is needed afterwards is started, as a supervisor would."""
        one = self.dice.choice(self.running())
        name = str(one.client.member.options.member)
        match kind:
            case "join":
                self.names.append(f"m{self.made}")
                self.start(self.names[-1])
                self.set_members()
            case "drop" if len(self.names) > 2:
                self.names.remove(self.dice.choice(self.names))
                self.set_members()
            case "step down":
                if one.client.session in self.cluster.world.groups[GROUP].sessions:
                    self.cluster.must(StepDown(one.client.session, NONE))
            case "crash":
                self.cluster.kill(one.client)
                self.start(name)
            case "freeze":
                one.client.suspend()
                self.run(4 * INTERVAL_MS)
                one.client.resume()
        for missing in sorted({*self.names} - {one.client.member.options.member for one in self.running()}):
            self.start(missing)

    def finish(self) -> None:
        for _ in range(200):
            if self.judge.missing() == 0:
                return
            self.run(INTERVAL_MS)


KINDS = ("join", "drop", "step down", "crash", "freeze")


def scenario(seed: int, most: int | None) -> Scenario:
    made = Scenario(seed, most)
    made.run(2 * INTERVAL_MS)
    for number in range(CHANGES):
        made.produce()
        made.change(KINDS[number % len(KINDS)])
        made.run(INTERVAL_MS)
    made.finish()
    return made


def test_at_one_pending_each_key_is_handled_in_order() -> None:
    """Partitioned groups: "Always keep the strict order of delivery per subject even when scaling up or down".

    partitioned consumer groups: "Always keep the strict order of delivery per subject even when scaling up or down."
    """
    judge = scenario(1, 1).judge
    assert judge.missing() == 0
    assert judge.violations(strict=True) == []
    assert judge.repeated > 0, "messages came again"
    assert judge.claims > 3 * PARTITIONS, "partitions moved"


def test_with_more_pending_first_deliveries_are_in_order() -> None:
    """No message is passed over: what comes first, comes in the order of the partition."""
    judge = scenario(2, 4).judge
    assert judge.missing() == 0
    assert judge.violations(strict=False) == []
    assert judge.violations(strict=True), "naks and acks change the order of what comes again"


def test_without_a_bound_a_nak_changes_the_order() -> None:
    """The judge finds what the option prevents."""
    assert scenario(3, None).judge.violations(strict=True)
