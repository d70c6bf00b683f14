"""How much memory does the library use per unacknowledged message, and does it grow with time?

Contestants: none; Kafka's groups remember one position per partition and no unacknowledged messages.

Measured:
  tracker    the tracker of one claim with 100,000 offsets delivered in chunks, as fetched: tracemalloc's bytes per
             tracked offset (from the position to the newest one). Contiguous offsets and offsets with gaps (a compacted
             topic, transactions); none acked, and all acked but every hundredth; and the worst case, in which every
             message is fetched alone
  consumer   a process with a consumer of the cluster: resident memory after many messages were fetched and acked in
             batches, compared with that after more were fetched and not acked. The caller drops the messages, so that
             only what the library keeps is left
  long run   growth of resident memory over the second half of the acked part of the same process (in the first half
             librdkafka's queue fills), and of a process in which two members with twelve partitions run for 24 hours of
             virtual time on one log, without a cluster
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.environment import BenchEnvironment, Result, Work
from marshal_py.protocol.claims import AtLeastOnce, OffsetRun
from marshal_py.protocol.fold import rationalizer
from marshal_py.protocol.fold.world import World
from marshal_py.protocol.member.member import Member
from marshal_py.protocol.member.member_state import MemberOptions, Ready
from marshal_py.protocol.wire import codec
from marshal_py.protocol.wire.identity import HASH_NAME, Instant, TopicPartition
from marshal_py.protocol.wire.records import Genesis

TRACKED, TINY_TRACKED = 100_000, 10_000
CHUNK = 1_000  # what a consumer takes at once (client/values/options.py)
FIRST = 1_000_000_000  # offsets as they are on a topic that is not new: no small integers that Python shares
LEFT_OUT = 100  # out of order: one message of so many is not acked

PARTITIONS = 12
ACKED, TINY_ACKED = 1_000_000, 20_000
UNACKED, TINY_UNACKED = 300_000, 10_000
SIZE_BYTES = 20
BATCH = 1_000
CHILD_TIMEOUT_S = 300.0

HOURS, TINY_HOURS = 24.0, 0.05
SIMULATED_MEMBERS = 2
STEP_MS = 10  # while the simulated members join and claim
REST_MS = 20_000
SAMPLES = 4  # of resident memory: at each quarter of a run
HALF = 1  # index of the sample in the middle


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    environment.say("memory of a tracker")
    rows: list[list[Any]] = [["tracker", *case] for case in _tracker(TINY_TRACKED if tiny else TRACKED)]
    acked, unacked = (TINY_ACKED, TINY_UNACKED) if tiny else (ACKED, UNACKED)
    environment.say(f"memory of a consumer: {acked:,} messages acked, {unacked:,} not")
    topic, coordination = environment.topic(PARTITIONS), environment.coordination()
    # Twice as many as are read, so that librdkafka's queue is equally full at every sample.
    environment.fill(topic, PARTITIONS, 2 * (acked + unacked), SIZE_BYTES)
    found = _child("consume", environment.bootstrap, topic, coordination, str(acked), str(unacked))
    environment.drop(topic, coordination)
    rows.append(
        [
            "consumer",
            "contiguous, none acked",
            found["tracked"],
            found["held_bytes"] / found["tracked"],
            found["held_bytes"] / 1e6,
            found["work"],
        ]
    )
    rows.append(
        [
            "consumer, long run",
            f"second half of {acked:,} acked",
            acked // 2,
            found["grown_bytes"] / acked * 2,
            found["grown_bytes"] / 1e6,
            found["work"],
        ]
    )
    hours = TINY_HOURS if tiny else HOURS
    environment.say(f"memory over {hours:g} simulated hours")
    lived = _child("live", str(hours))
    rows.append(
        [
            "members, long run",
            f"second half of {hours:g} simulated hours",
            lived["records"] // 2,
            lived["grown_bytes"] / lived["records"] * 2,
            lived["grown_bytes"] / 1e6,
            lived["work"],
        ]
    )
    columns = ["what", "case", "offsets, messages or records", "bytes each", "MB in all", "work"]
    notes = ["Goals: <= 200 bytes per tracked unacked offset; flat over 24 simulated hours."]
    return Result("memory", columns, rows, notes, {"consumer": found, "members": lived})


# --- one tracker


def _tracker(count: int) -> list[list[Any]]:
    """Case, tracked offsets, bytes each, MB, evidence."""
    rows: list[list[Any]] = []
    for gaps in (False, True):
        for out_of_order in (False, True):
            acks = f"all acked but every {LEFT_OUT}th" if out_of_order else "none acked"
            offsets = "with gaps" if gaps else "contiguous"
            rows.append([f"{offsets}, {acks}", *_track(count, CHUNK, gaps, out_of_order)])
    rows.append(["contiguous, each fetched alone, none acked", *_track(count, 1, False, False)])
    return rows


def _track(count: int, chunk: int, gaps: bool, out_of_order: bool) -> tuple[int, float, float, str]:
    gc.collect()
    tracemalloc.start()
    tracker = AtLeastOnce(FIRST)
    runs = [_deliver(tracker, first, chunk, gaps) for first in range(FIRST, FIRST + count, chunk)]
    if out_of_order:
        for number, run_ in enumerate(runs):
            for index in range(chunk):
                if (number * chunk + index) % LEFT_OUT:
                    run_.finish(index)
    del runs
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    work = Work()
    work.add(0, tracker.position())
    work.add(tracker.in_flight, tracker.tracked)
    return tracker.tracked, used / tracker.tracked, used / 1e6, f"#{work.xor >> 32:08x}"


def _deliver(tracker: AtLeastOnce, first: int, chunk: int, gaps: bool) -> OffsetRun:
    offsets: Sequence[int] = [2 * first + 2 * k for k in range(chunk)] if gaps else range(first, first + chunk)
    run_ = tracker.add(offsets)
    run_.deliver(chunk, 0)
    return run_


# --- processes of their own


def _child(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.memory", *arguments]
    answer = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=CHILD_TIMEOUT_S
    )
    if answer.returncode:
        raise RuntimeError(f"{arguments[0]} ended with {answer.returncode}: {answer.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def resident_bytes() -> int:
    """The resident memory of this process; its maximum so far on a system without /proc."""
    gc.collect()
    statistics = Path("/proc/self/statm")
    if statistics.exists():
        return int(statistics.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def consume(bootstrap: str, topic: str, coordination: str, acked: int, unacked: int) -> dict[str, Any]:
    """Fetches and acks `acked` messages, then fetches `unacked` more without acking them."""
    import marshal_py
    from marshal_py.client.values.options import BOUNDS

    BOUNDS.unacked = 10_000_000
    work, samples = Work(), []
    with (
        marshal_py.connect(bootstrap, coordination_topic=coordination) as marshal,
        marshal.consumer("memory", [topic], start="earliest") as consumer,
    ):

        def read(until: int, ack: bool) -> None:
            while work.count < until:
                batch = consumer.fetch(
                    min(BATCH, until - work.count), min_messages=min(BATCH, until - work.count), expires_s=1.0
                )
                for part in batch.parts:
                    for offset in part.offsets:
                        work.add(part.topic_partition.partition, offset)
                if ack:
                    batch.ack()

        for quarter in range(1, SAMPLES + 1):
            read(acked * quarter // SAMPLES, ack=True)
            samples.append(resident_bytes())
        read(acked + unacked, ack=False)
        held_bytes = resident_bytes() - samples[-1]
        in_flight = consumer.cached_info().in_flight
    return {
        "tracked": in_flight,
        "held_bytes": held_bytes,
        "grown_bytes": samples[-1] - samples[HALF],
        "samples": samples,
        "work": str(work),
    }


class VirtualGroup:
    """Members on one log in virtual time. Every member reads a record as soon as one sends it."""

    def __init__(self) -> None:
        self.topic = "orders"
        self.incarnation = bytes(range(16))
        self.now_ms = 1_000_000
        self.offset = 0
        self.work = Work()
        self.members = [self._member(number) for number in range(SIMULATED_MEMBERS)]
        self._append(
            codec.encode(Genesis(self.incarnation, 1, HASH_NAME, rationalizer.PROTOCOL_VERSION), "", self.incarnation)
        )

    def _member(self, number: int) -> Member:
        options = MemberOptions(client_id=f"client-{number}", topics=(self.topic,))
        member = Member(World(0, None), "memory", options, os.urandom)
        member.learn_topic(self.topic, PARTITIONS)
        return member

    def now(self) -> Instant:
        return Instant(self.now_ms, self.now_ms, self.now_ms)

    def _append(self, value: bytes) -> None:
        for member in self.members:
            verdict = rationalizer.apply(member.world, self.offset, value)
            if verdict.group:
                member.receive(verdict, self.now())
        self.offset += 1

    def step(self, ms: int) -> None:
        """Advances the time. Each member then handles three messages per partition and ticks."""
        self.now_ms += ms
        for member in self.members:
            for claim in member.claims.values():
                tracker = claim.tracker
                assert isinstance(tracker, AtLeastOnce)
                first = tracker.position()
                run_ = tracker.add(range(first, first + 3))
                run_.deliver(3, self.now_ms)
                run_.finish_range(0, 3)
                self.work.add(claim.tp.partition, first + 2)
            self._do(member, member.tick(self.now()))

    def _do(self, member: Member, ready: Ready) -> None:
        assert not ready.ended, ready.error
        for record in ready.send:
            self._append(codec.encode(record, member.name, self.incarnation))
        for tp, _ in ready.start_prefetch:
            member.prefetched(TopicPartition(*tp))
        for want in ready.resolve:
            member.start_resolved(want.tp, 0, 0, self.now())


def live(hours: float) -> dict[str, Any]:
    """Runs two members for so many hours of virtual time. Samples the resident memory at each quarter."""
    group, samples = VirtualGroup(), []
    for _ in range(REST_MS // STEP_MS):
        group.step(STEP_MS)
    owned = [len(member.claims) for member in group.members]
    assert sum(owned) == PARTITIONS, owned
    third_ms = group.members[0].third_ms
    steps, before = round(hours * 3_600_000 / third_ms), group.offset
    for quarter in range(SAMPLES):
        for _ in range(steps * quarter // SAMPLES, steps * (quarter + 1) // SAMPLES):
            group.step(third_ms)
        samples.append(resident_bytes())
    records = group.offset - before
    assert sum(len(member.claims) for member in group.members) == PARTITIONS
    return {"records": records, "samples": samples, "grown_bytes": samples[-1] - samples[HALF], "work": str(group.work)}


def main() -> None:
    verb, *arguments = sys.argv[1:]
    if verb == "live":
        found = live(float(arguments[0]))
    else:
        found = consume(arguments[0], arguments[1], arguments[2], int(arguments[3]), int(arguments[4]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
