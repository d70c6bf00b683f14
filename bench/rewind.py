"""The positions of a live group are set back: how long is it paused, and how long does each partition wait?

No contestant: Kafka's own tool sets the positions of stopped groups only. Three processes with marshal_py's defaults,
12 partitions, 1,000 messages per second, handlers that return at once. Each move sets all partitions back by 50.

Measured, per move:
  paused  from when the tool reads its pause to when it reads its move, which resumes the group
  call    `Group.set_position()` as a whole: it connects, folds the log, looks offsets up, pauses, moves, disconnects
  gap     per partition: the longest time without a delivery around it, less the normal spacing (12 ms)
"""

from __future__ import annotations

import random
import time

from bench.environment import BenchEnvironment, Result, percentile, spread
from bench.group_load import LoadGroup, Span
from marshal_py.admin.group import Group
from marshal_py.admin.plans.operation import Progress
from marshal_py.transport.kafka import KafkaTransport

MOVES = 30
BACK = -50
PHASE_S = 1.0  # as in bench/moves.py: moves fall into any phase of a heartbeat interval
TINY_STEADY_S = 0.7
AFTER_S = 1.0  # watched after each move; of a gap that is longer, only this part would count
TIMEOUT_S = 60.0


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    rng = random.Random("rewind")
    paused_ms: list[float] = []
    call_ms: list[float] = []
    gap_ms: list[float] = []
    with LoadGroup(environment, "marshal", steady_s=TINY_STEADY_S if tiny else None) as group:
        group.start_load()
        for _ in range(3):
            group.start()
        admin = Group(KafkaTransport(environment.bootstrap, TIMEOUT_S), group.name, group.coordination)
        for _ in range(1 if tiny else MOVES):
            before = group.steady(rng.random() * PHASE_S)
            seen_ns: dict[str, int] = {}

            def watch(event: Progress, seen_ns: dict[str, int] = seen_ns) -> None:
                seen_ns[event.kind] = time.monotonic_ns()

            began = time.monotonic_ns()
            admin.set_position(group.topic, shift_by=BACK, watcher=watch)
            ended = time.monotonic_ns()
            group.wait_delivered(ended, list(range(group.partitions)), -1, TIMEOUT_S)
            time.sleep(AFTER_S)
            group.read()
            paused_ms.append((seen_ns["moved"] - seen_ns["paused"]) / 1e6)
            call_ms.append((ended - began) / 1e6)
            around = Span(began, ended + int(AFTER_S * 1e9))
            gap_ms += [group.longest_ms(p, around) - group.normal_ms(p, before) for p in range(group.partitions)]
        tally = group.tally()
    row = [
        "marshal",
        len(paused_ms),
        spread(paused_ms),
        percentile(paused_ms, 0.99),
        spread(call_ms),
        spread(gap_ms),
        percentile(gap_ms, 0.99),
        tally["missing"],
        tally["again"],
        tally["delivered"],
    ]
    columns = [
        "contestant",
        "moves",
        "paused, ms",
        "p99, ms",
        "call, ms",
        "gap of a partition, ms",
        "p99, ms",
        "missing",
        "delivered again",
        "messages",
    ]
    notes = [
        "Goal: pause to resume of 12 partitions within 1 s.",
        f"Delivered again is what was asked for: {-BACK} messages per partition and move.",
    ]
    return Result("rewind", columns, [row], notes, {"paused_ms": paused_ms, "call_ms": call_ms, "gap_ms": gap_ms})
