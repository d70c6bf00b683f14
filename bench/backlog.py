"""With a backlog and slow handlers: how long until every partition has a message, at a start and after a kill -9?

No contestant: the figures are compared with goals. Each member is a process whose handler takes 10 ms per message. The
topic has 12 partitions, each with a backlog. Measured first with one member that owns all partitions: from its first
message of any partition to its first message of each. Then three members share the partitions and one gets SIGKILL:
from the claim of its successor, and from the kill, to the first message of each of its partitions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from bench.environment import BenchEnvironment, Result, spread
from tests.support.kafka import wait_until

PARTITIONS: Final = 12
MEMBERS: Final = 3
MESSAGES: Final = 600_000  # in the topic: more than can be handled or prefetched in the time
MESSAGES_TINY: Final = 24_000
SIZE_BYTES: Final = 100
HANDLER_S: Final = 0.01
BATCH: Final = 100  # of `fetch`: one second of work
WATCHED_S: Final = 20.0  # a partition without a message of the only member by then counts as not served
SETTLED_S: Final = 5.0  # for so long the three members have had their claims when one is killed
SETTLED_TINY_S: Final = 1.0
LIMIT_S: Final = 90.0
WAYS: Final = ("iteration, at least once", "iteration, at most once", "fetch(100), at least once")


# --- a member, as a process


def member(arguments: Mapping[str, Any]) -> None:
    """Handles messages, and reports each claim and the first message after it."""
    import marshal_py

    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()  # never without its parent
    seen: set[int] = set()

    def claimed(claim: marshal_py.info.ClaimInfo) -> None:
        seen.discard(claim.partition)
        report("claim", claim.partition)

    def report(event: str, partition: int) -> None:
        line = json.dumps([event, partition, time.monotonic_ns()]) + "\n"
        os.write(sys.stdout.fileno(), line.encode())  # one write per line, because two threads report

    def handle(message: marshal_py.Message) -> None:
        if message.partition not in seen:
            seen.add(message.partition)
            report("message", message.partition)
        time.sleep(HANDLER_S)
        message.ack()

    delivery = "at_most_once" if "at most once" in arguments["way"] else "at_least_once"
    with (
        marshal_py.connect(arguments["bootstrap"], coordination_topic=arguments["coordination"]) as marshal,
        marshal.consumer(
            arguments["group"], [arguments["topic"]], start="earliest", delivery=delivery, on_claim=claimed
        ) as consumer,
    ):
        if "fetch" in arguments["way"]:
            while True:
                for message in consumer.fetch(BATCH, min_messages=BATCH, expires_s=1.0):
                    handle(message)
        for message in consumer:
            handle(message)


class Process:
    """One member and what it reported: for each partition, the last claim and the first message after it."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.reported: dict[str, dict[int, int]] = {"claim": {}, "message": {}}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.backlog", json.dumps(arguments)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event, partition, ns = json.loads(line)
            if event == "claim":
                self.reported["claim"][partition] = ns
                self.reported["message"].pop(partition, None)
            else:
                self.reported["message"].setdefault(partition, ns)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def _until(condition: Callable[[], bool], limit_s: float, what: str) -> bool:
    try:
        wait_until(condition, limit_s, what)
    except TimeoutError:
        return False
    return True


# --- the measurements


def start(arguments: Mapping[str, Any], watched_s: float) -> list[float]:
    """Seconds from the first message of any partition to the first of each partition that had one."""
    process = Process(arguments)
    first = process.reported["message"]
    try:
        if not _until(lambda: bool(first), LIMIT_S, "a first message"):
            raise TimeoutError("no message")
        _until(lambda: len(first) == PARTITIONS, watched_s, "a message of every partition")
    finally:
        process.kill()
    return sorted((ns - min(first.values())) / 1e9 for ns in first.values())


def kill(arguments: Mapping[str, Any], settled_s: float) -> tuple[list[float], list[float], int]:
    """For the killed member's partitions: seconds from claim to message and from kill to message; how many got none."""
    members = [Process(arguments) for _ in range(MEMBERS)]
    try:
        wait_until(lambda: _shared(members), LIMIT_S, "all partitions are shared evenly")
        time.sleep(settled_s)
        victim = members.pop()
        its = _last_claims([*members, victim])[victim]
        killed_ns = time.monotonic_ns()
        victim.kill()
        for one in members:
            for partition in its:  # messages that the other members had before the partitions were shared
                one.reported["message"].pop(partition, None)

        def served() -> bool:
            return all(any(partition in one.reported["message"] for one in members) for partition in its)

        _until(served, LIMIT_S, "a message of each partition of the dead")
    finally:
        for one in members:
            one.kill()
    after_claim, after_kill = [], []
    for partition in its:
        for one in members:
            if partition in one.reported["message"]:
                after_claim.append((one.reported["message"][partition] - one.reported["claim"][partition]) / 1e9)
                after_kill.append((one.reported["message"][partition] - killed_ns) / 1e9)
    return after_claim, after_kill, len(its) - len(after_kill)


def _last_claims(members: list[Process]) -> dict[Process, list[int]]:
    owner: dict[int, Process] = {}
    for partition in range(PARTITIONS):
        claimed = {one.reported["claim"][partition]: one for one in members if partition in one.reported["claim"]}
        if claimed:
            owner[partition] = claimed[max(claimed)]
    return {one: [partition for partition in owner if owner[partition] is one] for one in members}


def _shared(members: list[Process]) -> bool:
    return [len(its) for its in _last_claims(members).values()] == [PARTITIONS // MEMBERS] * MEMBERS


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    topic = environment.topic(PARTITIONS)
    environment.fill(topic, PARTITIONS, MESSAGES_TINY if tiny else MESSAGES, SIZE_BYTES)
    coordination = environment.coordination()
    rows: list[list[Any]] = []
    raw: dict[str, Any] = {}
    settled_s = SETTLED_TINY_S if tiny else SETTLED_S
    for way in WAYS[:1] if tiny else WAYS:
        arguments = {"bootstrap": environment.bootstrap, "topic": topic, "coordination": coordination, "way": way}
        environment.say(f"{way}: one consumer")
        alone = start({**arguments, "group": environment.group("backlog")}, WATCHED_S)
        environment.say(f"{way}: a kill")
        after_claim, after_kill, never = kill({**arguments, "group": environment.group("backlog")}, settled_s)
        raw[way] = {"alone": alone, "after_claim": after_claim, "after_kill": after_kill}
        served = f"{len(alone)} of {PARTITIONS}"
        rows.append([way, served, spread(alone), spread(after_claim), spread(after_kill), never])
    environment.drop(topic, coordination)
    columns = [
        "way",
        f"served in {WATCHED_S:g} s",
        "first messages, s",
        "claim to message, s",
        "kill to message, s",
        "not served",
    ]
    notes = [f"Goals: {PARTITIONS} of {PARTITIONS} in {WATCHED_S:g} s; claim to message at most 5 s; none not served."]
    return Result("backlog", columns, rows, notes, raw)


if __name__ == "__main__":
    member(json.loads(sys.argv[1]))
