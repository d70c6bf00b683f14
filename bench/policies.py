"""What does a group's policy cost: its target, the switch of a pinned group, a change of the members of a large group?

- *target*: computing once which of 100 members should own which of 1,000 partitions, of which first nobody owns any
  and then everybody its part. CPU time in one process.
- *pinned*: two processes, one has everything, defaults. It is killed (`kill -9`), or an admin unpins it. Per partition:
  from the last delivery of the one to the first of the other, less the normal spacing (12 ms).
- *members*: 100 consumers of ten Marshals, each a process, share 1,000 empty partitions. An admin drops one member,
  then half of them: from the call until the log says that the others own everything.

With --tiny the targets alone.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import marshal_py
from bench.environment import BenchEnvironment, Result, spread
from bench.group_load import LoadGroup, MemberProcess, Span
from bench.scale import INTERVAL_MS, TOPIC, Fleet
from marshal_py.protocol.policy import OPEN, RESTRICTED, candidate_order
from marshal_py.protocol.wire.identity import NONE
from marshal_py.protocol.wire.records import ClaimingPartition, GroupConfig, Join

PARTITIONS, MEMBERS = 1_000, 100
PARTITIONS_TINY, MEMBERS_TINY = 40, 4
ROUNDS: Final = 5  # of a target
CLAIMING: Final = 2  # rounds after which it comes true: first the pin or the topic, then what is beneath
A_PROCESS: Final = 10  # members
SWITCHES: Final = 8  # of each kind
TIMEOUT_S: Final = 120.0
PHASE_S: Final = 0.7  # each kill falls into any phase of a heartbeat
POLL_S: Final = 0.1
JOBS: Final = "jobs"


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    partitions, members = (PARTITIONS_TINY, MEMBERS_TINY) if tiny else (PARTITIONS, MEMBERS)
    rows = [_target(policy, partitions, members) for policy in (*OPEN, *RESTRICTED)]
    if not tiny:  # they take too long for a trial
        rows += _pinned(environment, 2 * SWITCHES) + _members(environment, partitions, members)
    columns = ["what", "samples", "ms", "p99, ms", "goal, ms"]
    notes = ["Goals: a target and an unpin at most 20 and 50 ms, a kill 5 s with an interval of 2 s, a change 10 s."]
    return Result("policies", columns, rows, notes)


def _row(what: str, ms: list[float], goal_ms: int) -> list[Any]:
    found = spread(ms)
    assert found is not None
    return [what, len(ms), found, found["p99"], goal_ms]


def _target(policy: str, partitions: int, members: int) -> list[Any]:
    fleet, names = Fleet(partitions, 0), tuple(f"m{number:03}" for number in range(members))
    for name in names:
        at = {"member": name} if policy in ("members", "blocks") else {}
        fleet.append(Join(name, fleet.random.randbytes(16), 1, INTERVAL_MS, (TOPIC,), **at))  # type: ignore[arg-type]
    group = fleet.group
    compute: Any = {**OPEN, **RESTRICTED}[policy]
    group.config = GroupConfig(NONE, policy=policy, max_members=partitions, members=names, priority_groups=(JOBS,))
    took_ms = []
    for round_ in range(ROUNDS):
        began = time.process_time()
        found = compute(group, candidate_order(group, set()))
        took_ms.append(1000 * (time.process_time() - began))
        for tp, line in found.items() if round_ < CLAIMING else ():
            known, session = group.partitions.get(tp), line if isinstance(line, int) else line[0]
            if known is None or known.owner == NONE:
                fleet.append(
                    ClaimingPartition(session, tp.topic, tp.partition, NONE if known is None else known.version, 0)
                )
    return _row(f"target, {policy}", took_ms, 20)


def _pinned(environment: BenchEnvironment, turns: int) -> list[list[Any]]:
    rng, killed, unpinned = random.Random(1), list[float](), list[float]()
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(LoadGroup(environment, "marshal", options={"priority_group": JOBS}))
        settings = {"bootstrap.servers": environment.bootstrap, "log_level": 0}
        marshal = stack.enter_context(marshal_py.connect(settings, coordination_topic=group.coordination))
        marshal.create_group(group.name, marshal_py.GroupConfig(policy="pinned", priority_groups=[JOBS]))
        group.start_load()
        for _ in range(2):
            group.start()
        for turn in range(turns):
            before = _one_has_all(group, marshal, rng.random() * PHASE_S)
            first = _holder(group)
            at_ns = time.monotonic_ns()
            if turn % 2:
                group.kill(first)
            else:
                marshal.group(group.name).unpin()
            group.wait_delivered(at_ns, list(range(group.partitions)), first.number, TIMEOUT_S)
            whole = Span(before.begin, time.monotonic_ns())
            for partition in range(group.partitions):
                gap_ms = group.hand_over_ms(partition, whole) - group.normal_ms(partition, before)
                (killed if turn % 2 else unpinned).append(gap_ms)
            if turn % 2:
                group.start()
    return [_row("pinned, kill -9", killed, 5_000), _row("pinned, unpin", unpinned, 50)]


def _one_has_all(group: LoadGroup, marshal: marshal_py.Marshal, extra_s: float) -> Span:
    """Waits until one member has delivered everything for a while, and another one stands by."""

    def quiet() -> bool:
        group.read()
        now_ns = time.monotonic_ns()
        found = group.owners(Span(now_ns - 500_000_000, now_ns))
        alone = len(found) == group.partitions and len(set(found.values())) == 1
        return alone and len(marshal.group(group.name).pin_info().standbys) == 1

    _until(quiet, "one member has everything")
    began_ns = time.monotonic_ns()
    time.sleep(1 + extra_s)
    group.read()
    return Span(began_ns, time.monotonic_ns())


def _holder(group: LoadGroup) -> MemberProcess:
    number = group.deliveries[0][-1].member
    return next(member for member in group.members if member.number == number)


def _members(environment: BenchEnvironment, partitions: int, members: int) -> list[list[Any]]:
    coordination, name = environment.coordination(), environment.group("members")
    topic = environment.topic(partitions)
    names = [f"m{number:03}" for number in range(members)]
    settings = {"bootstrap.servers": environment.bootstrap, "log_level": 0}
    rows = []
    with contextlib.ExitStack() as stack:
        admin = stack.enter_context(marshal_py.connect(settings, coordination_topic=coordination))
        admin.create_group(name, marshal_py.GroupConfig(policy="members", max_members=partitions, members=names))
        for first in range(0, members, A_PROCESS):
            run_by = names[first : first + A_PROCESS]
            stack.enter_context(_process(environment.bootstrap, coordination, name, topic, *run_by))
        listed = names
        for dropped in (0, 1, members // 2):
            gone, listed = listed[:dropped], listed[dropped:]

            def shared(listed: list[str] = listed) -> bool:
                found = {member.member: len(member.claims) for member in admin.group(name).members()}
                least = partitions // len(listed)
                return sum(found.values()) == partitions and all(
                    least <= found.get(member, 0) <= least + 1 for member in listed
                )

            began = time.monotonic()
            if gone:
                admin.group(name).drop_members(*gone)
            _until(shared, f"{len(listed)} members own everything")
            if gone:
                took_ms = [1000 * (time.monotonic() - began)]
                rows.append(_row(f"members, {len(gone)} of {members} dropped", took_ms, 10_000))
    environment.drop(topic, coordination)
    return rows


@contextlib.contextmanager
def _process(*arguments: str) -> Iterator[None]:
    """A process with some members, until the end of the block. Arguments as for `_consume`."""
    command = [sys.executable, "-m", "bench.policies", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield
        finally:
            process.kill()  # nothing to lose: the topic is empty


def _consume(bootstrap: str, coordination: str, group: str, topic: str, *names: str) -> None:
    """Consumes as these members of the group, until stdin ends."""
    settings = {"bootstrap.servers": bootstrap, "log_level": 0}
    with contextlib.ExitStack() as stack:
        marshal = stack.enter_context(marshal_py.connect(settings, coordination_topic=coordination))
        for name in names:
            stack.enter_context(marshal.consumer(group, [topic], member=name))
        sys.stdin.read()


def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {TIMEOUT_S:g} s: {what}")
        time.sleep(POLL_S)


if __name__ == "__main__":
    _consume(*sys.argv[1:])
