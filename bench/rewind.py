"""The positions of a live group move: how long is it paused, and how long does each partition wait?

No contestant: Kafka's own tool moves positions of stopped groups only. Three processes with marshal_py's defaults, 12
partitions, 1,000 messages per second, handlers that are done at once; each move is 50 messages back, everywhere.

Measured, per move:
  paused  the tool reads its pause to it reads its move, which resumes
  call    `Group.set_position()` as a whole: it connects, folds the log, looks offsets up, pauses, moves, disconnects
  gap     per partition: the longest time without a delivery around it, less the normal spacing (12 ms)
"""

from __future__ import annotations

import random
import time

from bench.environment import BenchEnvironment, Result, percentile, spread
from bench.group_load import LoadGroup, Span
from marshal_py.admin.group import Group
from marshal_py.admin.operation import Progress
from marshal_py.transport.kafka import KafkaTransport

MOVES = 30
BACK = -50
PHASE_S = 1.0  # as of bench/moves.py: so that moves meet every phase of the heartbeats
TINY_HOLD_S = 0.7
AFTER_S = 1.0  # of watching: a gap that is still open then would be counted as far as it is
TIMEOUT_S = 60.0


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    rng = random.Random("rewind")
    paused_ms: list[float] = []
    call_ms: list[float] = []
    gap_ms: list[float] = []
    with LoadGroup(environment, "marshal", hold_s=TINY_HOLD_S if tiny else None) as crew:
        crew.feed()
        for _ in range(3):
            crew.start()
        group = Group(KafkaTransport(environment.bootstrap, TIMEOUT_S), crew.group, crew.coordination)
        for _ in range(1 if tiny else MOVES):
            before = crew.steady(rng.random() * PHASE_S)
            said: dict[str, int] = {}

            def watch(event: Progress, said: dict[str, int] = said) -> None:
                said[event.kind] = time.monotonic_ns()

            began = time.monotonic_ns()
            group.set_position(crew.topic, shift_by=BACK, watcher=watch)
            ended = time.monotonic_ns()
            crew.wait_delivered(ended, list(range(crew.partitions)), -1, TIMEOUT_S)
            time.sleep(AFTER_S)
            crew.read()
            paused_ms.append((said["moved"] - said["paused"]) / 1e6)
            call_ms.append((ended - began) / 1e6)
            around = Span(began, ended + int(AFTER_S * 1e9))
            gap_ms += [crew.longest_ms(p, around) - crew.normal_ms(p, before) for p in range(crew.partitions)]
        tally = crew.tally()
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
