"""Faults on real clusters: `make torture SECONDS=300 SEED=1` (python -m tests.rigs.torture).

Three brokers (Apache Kafka in KRaft mode, three replicas, two in sync), a proxy per link between a client and a broker
and between two brokers, a clock and a disk of each broker that can be moved and full (shim.py; it takes a C compiler),
consumers and producers as processes. A seeded plan strikes one thing after the other, sometimes two at once; each step
is printed and written to `steps.jsonl` before it happens. Each row of the matrix is a run of its own on the same
cluster: a delivery mode, a policy, with or without witnesses. The judge is that of tests/support/judge.py: it reads the
raw log, the journals of the handlers, and what Kafka acknowledged to the producers.

The exit code is 1 if a promise was broken, and 2 if too little happened to prove anything. The plan is the same for the
same seed; the processes' turns are the machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from marshal_sim.oracle.wire import parse_envelope
from tests.rigs.links import KINDS, Link, Links
from tests.rigs.shim import Shim
from tests.support.brokers import JvmNodes, free_ports
from tests.support.process_scenario import QUERY_WORKER, WORKER, ProcessScenario
from tests.support.soak import ROOT, add, load, save

NODES: Final = 3
PARTITIONS: Final = 12
WORKERS, WORKERS_MAX = 4, 7
PER_SECOND: Final = 300  # messages of the producer
SETTLE_S: Final = 180.0  # also for the start of a JVM on a busy machine
INTERVAL_S: Final = 1.0
FAULTS: Final = (
    *("kill", "freeze", "term", "join", "clock", "late", "link"),
    *("broker_kill", "broker_freeze", "broker_clock", "broker_disk", "broker_link"),
)
WEIGHTS: Final = dict(zip(FAULTS, (4, 3, 2, 2, 1, 2, 4, 1, 1, 1, 1, 1), strict=True))
HOUR_S: Final = 3_600
SHIMMED: Final = frozenset({"broker_clock", "broker_disk"})
HEARTBEAT: Final = 2  # PROTOCOL.md 4.2
LATE_COPIES: Final = 12
LATE_RECORDS: Final = 24  # among so many newest records of the log, heartbeats are written a second time
# A bug by name: its mutant, and the row and the faults that show it soon. Others go by the number of their mutant.
PLANTS: Final = {"late-heartbeat-wins": ("P4", "at least once, hanging", "late")}
SLOW: Final = {"handler_ms": [0, 1, 5, 30, 120]}
HANGING: Final = {"handler_ms": [1] * 400 + [6_000], "options": {"handler_timeout_s": 4.0}}


def type_of(value: bytes) -> int:
    envelope = parse_envelope(value)
    return -1 if envelope is None else envelope.type


class Row(NamedTuple):
    """One configuration. `worker`: settings of tests/support/worker.py. `queries`: so many streaming queries
    (query_worker.py) are members, too."""

    name: str
    delivery: str
    worker: dict[str, Any]
    queries: int = 0


ROWS: Final = (
    Row("at least once", "at_least_once", {}),
    Row("at most once", "at_most_once", {}),
    Row("at least once, witness", "at_least_once", {"last_will": "process"}),
    Row("at least once, slow", "at_least_once", SLOW),
    Row("at most once, witness", "at_most_once", {"last_will": "process"}),
    Row("at least once, greedy", "at_least_once", {"options": {"policy": "greedy"}}),
    Row("at least once, hanging", "at_least_once", HANGING),
    Row("at most once, slow", "at_most_once", SLOW),
    Row("at least once, process", "at_least_once", {"style": "process"}),
    Row("at least once, Spark", "at_least_once", {}, queries=2),
)


@dataclasses.dataclass
class Outcome:
    """What a row came to. `takeovers_ms`: from an owner's last sign of life to its successor's first delivery."""

    row: str
    seed: int
    steps: dict[str, int]
    counters: dict[str, int]
    takeovers_ms: list[int]
    violations: list[str]
    void: str


class Brokers(NamedTuple):
    """What a fault can strike. `shim`: None if no fault needs it. `links`: between clients and brokers. `between`:
    between brokers. `through`: the addresses of the proxies."""

    nodes: JvmNodes
    shim: Shim | None
    links: Links
    between: Links
    through: str


class Torture:
    """One row: a group under faults, then healed, settled and judged."""

    def __init__(self, row: Row, seed: int, faults: tuple[str, ...], brokers: Brokers, folder: Path) -> None:
        self.row, self.seed, self.steps = row, seed, Counter[str]()
        self._chance = random.Random(f"{seed}/{row.name}")
        self._faults = faults
        self._brokers, self._folder = brokers, folder
        self._queries = [f"q{number}" for number in range(1, row.queries + 1)]
        self._number = 0
        self._began = time.monotonic()
        self._down: int | None = None  # the broker that is killed or frozen: two of three must stay in sync

    def run(self, run: ProcessScenario, seconds: float) -> Outcome:
        limit_s = self.row.worker.get("options", {}).get("handler_timeout_s")
        if limit_s is not None:  # a hand-over waits no longer for a handler
            run.evidence.hand_over_intervals = int(limit_s / INTERVAL_S)
        run.produce(per_second=PER_SECOND)
        for name in self._queries:
            run.start_worker(name, QUERY_WORKER, bootstrap=self._brokers.through)
        self._names = run.start_workers(WORKERS - self.row.queries, bootstrap=self._brokers.through)
        for name in self._queries:
            run.await_joined(name, SETTLE_S)
        self._names += self._queries
        run.wait(lambda: run.all_owned(PARTITIONS), "every partition has an owner")
        run.await_begun(100)
        self._began = time.monotonic()
        until = self._began + seconds
        while time.monotonic() < until:
            kinds = [self._pick()]
            if self._chance.random() < 0.25:
                kinds += [kind for kind in [self._pick()] if kind != kinds[0]]
            with contextlib.ExitStack() as healing:
                for kind in kinds:
                    healing.enter_context(self._step(run, kind))
                self._rest(self._chance.uniform(0.3, 6.0))
            run.scan()
            for name in self._queries:  # one may have ended with an error, such as PartitionsUnread
                self._again(run, name)
            self._rest(self._chance.expovariate(1 / 2.0))
        self._mend(run)
        # A witness ends the sessions of who is killed, so nobody needs to be evicted.
        wanted = int("kill" in self._faults and "last_will" not in self.row.worker)
        found = run.finish(takeovers=wanted, deliveries=500, settle_s=SETTLE_S)
        print(found, flush=True)
        times, violations = sorted(found.latencies_ms["take-over"]), [str(one) for one in found.violations]
        return Outcome(self.row.name, self.seed, dict(self.steps), found.counters, times, violations, found.void)

    def _pick(self) -> str:
        return self._chance.choices(self._faults, [WEIGHTS[fault] for fault in self._faults])[0]

    def _rest(self, seconds: float) -> None:
        """A pause that belongs to the plan: how long a fault lasts, or nothing happens."""
        time.sleep(seconds)

    def _tell(self, kind: str, who: str) -> None:
        self.steps[kind] += 1
        at = time.monotonic() - self._began
        with (self._folder / "steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"row": self.row.name, "at_s": round(at, 3), "step": kind, "who": who}) + "\n")
        print(f"  {at:7.2f} s  {kind} {who}", flush=True)

    @contextlib.contextmanager
    def _step(self, run: ProcessScenario, kind: str) -> Iterator[None]:
        """Strikes at the beginning of the block, and heals at its end."""
        strike: Callable[[ProcessScenario], Callable[[], None]] = getattr(self, f"_{kind}")
        heal = strike(run)
        yield
        heal()

    def _victim(self, run: ProcessScenario) -> str | None:
        there = [name for name in self._names if run.processes[name].running]
        return self._chance.choice(sorted(there)) if len(there) > 1 else None

    def _again(self, run: ProcessScenario, name: str) -> None:
        if not run.processes[name].running:
            self._start(run, name)

    def _start(self, run: ProcessScenario, name: str) -> None:
        self._tell("start", name)
        module = QUERY_WORKER if name in self._queries else WORKER
        run.start_worker(name, module, bootstrap=self._brokers.through)

    def _kill(self, run: ProcessScenario) -> Callable[[], None]:
        if (name := self._victim(run)) is None:
            return lambda: None
        self._tell("kill", run.processes[name].client)
        run.kill(name)
        return lambda: self._again(run, name)

    def _freeze(self, run: ProcessScenario) -> Callable[[], None]:
        if (name := self._victim(run)) is None:
            return lambda: None
        self._tell("freeze", run.processes[name].client)
        run.stop(name)
        return lambda: run.cont(name)

    def _term(self, run: ProcessScenario) -> Callable[[], None]:
        if (name := self._victim(run)) is None:
            return lambda: None
        self._tell("term", run.processes[name].client)
        run.term(name)
        return lambda: (run.await_gone(name, SETTLE_S), self._again(run, name))[1]

    def _join(self, run: ProcessScenario) -> Callable[[], None]:
        if len(self._names) >= WORKERS_MAX:
            return self._term(run)
        self._number += 1
        name = f"j{self._number}"
        self._names.append(name)
        self._start(run, name)
        return lambda: None

    def _clock(self, run: ProcessScenario) -> Callable[[], None]:
        if (name := self._victim(run)) is None or run.evidence.lives.get(run.processes[name].client) is None:
            return lambda: None  # it may not listen to the signal yet
        if name in self._queries:
            return lambda: None  # its member is in another process, which does not listen
        self._tell("clock", run.processes[name].client)
        os.kill(run.processes[name].popen.pid, signal.SIGUSR1)
        return lambda: None

    def _late(self, run: ProcessScenario) -> Callable[[], None]:
        """Writes copies of some of the newest heartbeats, with their times, as if the network had kept them."""
        log = run.recorder.log_of(run.group)
        records = run.recorder.logs[log][-LATE_RECORDS:] if log is not None else []
        wall_minus_mono_ns = time.time_ns() - time.monotonic_ns()
        beats = [
            (record.value, (record.sent_ns + wall_minus_mono_ns) // 1_000_000)
            for record in records
            if record.value is not None and type_of(record.value) == HEARTBEAT
        ]
        self._tell("late", f"{min(LATE_COPIES, len(beats))} heartbeats")
        producer = Producer({"bootstrap.servers": run.bootstrap})
        for value, sent_ms in self._chance.sample(beats, min(LATE_COPIES, len(beats))):
            producer.produce(run.coordination_topic, value, run.group.encode(), partition=log, timestamp=sent_ms)
        producer.flush(SETTLE_S)
        return lambda: None

    def _link(self, run: ProcessScenario) -> Callable[[], None]:
        return self._strike(run, "link", self._brokers.links)

    def _broker_link(self, run: ProcessScenario) -> Callable[[], None]:
        return self._strike(run, "broker_link", self._brokers.between)

    def _strike(self, run: ProcessScenario, name: str, links: Links) -> Callable[[], None]:
        kind, share = self._chance.choice(KINDS), self._chance.choice((0.1, 0.3, 1.0))
        self._tell(name, f"{kind} of {share:.0%}")
        run.record_fault("link")
        struck: list[Link] = links.strike(kind, share, self._chance, self._chance.uniform(0.05, 1.0))

        def heal() -> None:
            links.heal(struck)
            run.record_fault("link_whole")

        return heal

    def _broker_kill(self, run: ProcessScenario) -> Callable[[], None]:
        return self._broker(run, "broker_kill", self._brokers.nodes.kill, self._brokers.nodes.restart)

    def _broker_freeze(self, run: ProcessScenario) -> Callable[[], None]:
        return self._broker(run, "broker_freeze", self._brokers.nodes.stop, self._brokers.nodes.cont)

    def _broker_disk(self, run: ProcessScenario) -> Callable[[], None]:
        """The broker ends by itself at its next write."""

        shim = self._brokers.shim
        assert shim is not None

        def heal(node: int) -> None:
            shim.set_full(node, False)
            self._brokers.nodes.restart(node)

        return self._broker(run, "broker_disk", lambda node: shim.set_full(node, True), heal)

    def _broker_clock(self, run: ProcessScenario) -> Callable[[], None]:
        """A wall clock jumps by an hour and back. No take-over may come of it, so the judge is told nothing."""
        node, ahead_s = self._chance.randint(1, NODES), self._chance.choice((-HOUR_S, HOUR_S))
        self._tell("broker_clock", f"{node} by {ahead_s} s")
        shim = self._brokers.shim
        assert shim is not None
        shim.set_clock(node, ahead_s)
        return lambda: shim.set_clock(node, 0)

    def _broker(
        self, run: ProcessScenario, kind: str, strike: Callable[[int], None], heal: Callable[[int], None]
    ) -> Callable[[], None]:
        if self._down is not None:
            return lambda: None
        node = self._down = self._chance.randint(1, NODES)
        self._tell(kind, str(node))
        run.record_fault(kind, str(node))
        run.record_fault("link")  # members that wait for this broker are not connected, and others are
        strike(node)

        def mend() -> None:
            heal(node)
            run.record_fault("broker_up", str(node))
            run.record_fault("link_whole")
            self._down = None

        return mend

    def _mend(self, run: ProcessScenario) -> None:
        """Every worker runs at the end, so that all that is left can be done."""
        for name in self._names:
            self._again(run, name)
        for name in self._names:
            run.await_joined(name, SETTLE_S)


def options_of(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.rigs.torture", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of faults, divided among the rows")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--faults", default="", help=f"some of {','.join(FAULTS)}; all by default")
    parser.add_argument("--rows", type=int, default=2, help="how many of the matrix, from the seed on")
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS], help="this row alone")
    parser.add_argument("--plant", default="", help="a bug for every worker: late-heartbeat-wins, or a mutant's number")
    parser.add_argument(
        "--out", type=Path, help="a file with the outcome of each row; rows that it has are not run again"
    )
    parser.add_argument("--totals", type=Path, default=ROOT / "proof.json", help="where a run without a plant adds up")
    parser.add_argument("--keep", type=Path, help="a folder for journals, logs and steps")
    options = parser.parse_args(arguments)
    if options.plant in PLANTS:
        options.plant, row, faults = PLANTS[options.plant]
        options.row, options.faults = options.row or [row], options.faults or faults
    options.faults = tuple(options.faults.split(",")) if options.faults else FAULTS
    if unknown := set(options.faults) - set(FAULTS):
        parser.error(f"--faults {','.join(sorted(unknown))}: some of {','.join(FAULTS)}")
    return options


def chosen(options: argparse.Namespace) -> list[Row]:
    if options.row:
        return [row for row in ROWS if row.name in options.row]
    count = max(1, min(options.rows, len(ROWS)))
    first = max(0, options.seed - 1) * count
    return [ROWS[(first + number) % len(ROWS)] for number in range(count)]


@contextlib.contextmanager
def cluster(folder: Path, faults: tuple[str, ...]) -> Iterator[Brokers]:
    """Three brokers, with a proxy in front of each for clients and another for the other brokers."""
    ports = iter(free_ports(4 * NODES))
    proxies, between = ({next(ports): next(ports) for _ in range(NODES)} for _ in range(2))
    shim = Shim(folder.with_name("shim"), range(1, NODES + 1)) if SHIMMED.intersection(faults) else None
    environment = {} if shim is None else {"environment": shim.environment}
    nodes = JvmNodes(NODES, {}, folder, proxies=proxies, between=between, **environment)
    with contextlib.closing(nodes), Links(proxies) as links, Links(between) as links_between:
        nodes.start()
        through = ",".join(f"127.0.0.1:{port}" for port in proxies)
        yield Brokers(nodes, shim, links, links_between, through)


def torture(options: argparse.Namespace, folder: Path) -> list[Outcome]:
    rows = chosen(options)
    print(f"seed {options.seed}, {len(rows)} rows of {options.seconds / len(rows):.0f} s, {', '.join(options.faults)}")
    outcomes = kept(options)
    rows = [row for row in rows if (row.name, options.seed) not in {(one.row, one.seed) for one in outcomes}]
    with cluster(folder / "kafka", options.faults) as brokers:
        direct = ",".join(brokers.nodes.addresses.values())
        for number, row in enumerate(rows):
            topic = f"torture-{number}"
            admin = AdminClient({"bootstrap.servers": direct})
            admin.create_topics([NewTopic(topic, PARTITIONS, NODES)])[topic].result(60)
            print(f"{row.name}:", flush=True)
            torturing = Torture(row, options.seed, options.faults, brokers, folder)
            worker = {"plant": options.plant, **row.worker}
            with ProcessScenario(
                direct, folder / f"row-{number}", [topic], delivery=row.delivery, seed=options.seed % 1_000, **worker
            ) as run:
                outcomes.append(torturing.run(run, options.seconds / len(rows)))
            if options.out is not None:
                options.out.write_text(json.dumps([dataclasses.asdict(one) for one in outcomes], indent=1))
    return outcomes


def kept(options: argparse.Namespace) -> list[Outcome]:
    """What an earlier run has written to `--out`: those rows are not run again."""
    if options.out is None or not options.out.exists():
        return []
    return [Outcome(**one) for one in json.loads(options.out.read_text())]


def table(outcomes: list[Outcome]) -> str:
    """One line per row: what happened, and what it came to."""
    lines = [
        f"{'row':<24}{'steps':>6}{'messages':>10}{'again':>7}{'take-overs':>11}{'p50 s':>7}{'p99 s':>7}{'moves':>7}"
        f"{'violations':>11}"
    ]
    for one in outcomes:
        times = one.takeovers_ms
        p50, p99 = (f"{statistics.quantiles(times, n=100)[at] / 1000:.1f}" if len(times) > 1 else "" for at in (49, 98))
        lines.append(
            f"{one.row:<24}{sum(one.steps.values()):>6}{one.counters['deliveries']:>10}{one.counters['redelivered']:>7}"
            f"{one.counters['takeovers']:>11}{p50:>7}{p99:>7}{one.counters['handovers']:>7}{len(one.violations):>11}"
            + (f"  void: {one.void}" if one.void else "")
        )
    return "\n".join(lines)


def add_up(options: argparse.Namespace, outcomes: list[Outcome]) -> None:
    """Adds what was just run to the totals of this version and machine, beside those of `make soak`."""
    loaded = load(options.totals)
    now = loaded["now"]
    for one in outcomes:
        add(now, "torture_rows", 1)
        add(now, "torture_steps", sum(one.steps.values()))
        for name in ("takeovers", "deliveries"):
            add(now, f"torture_{name}", one.counters[name])
        if one.violations:
            failed = f"python -m tests.rigs.torture --seed {one.seed} --row '{one.row}' --seconds {options.seconds:g}"
            now["failures"].append(failed)
    save(options.totals, loaded["runs"])


def main(arguments: list[str]) -> int:
    options = options_of(arguments)
    folder = options.keep or Path(tempfile.mkdtemp(prefix="marshal_torture_"))
    folder.mkdir(parents=True, exist_ok=True)
    earlier = len(kept(options))
    try:
        outcomes = torture(options, folder)
    finally:
        for part in ("kafka", "shim"):
            shutil.rmtree(folder / part, ignore_errors=True)
    if not options.plant:
        add_up(options, outcomes[earlier:])
    print(table(outcomes))
    violated = sum(len(one.violations) for one in outcomes)
    print(f"{violated} violations; seed {options.seed}")
    if not violated and options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"journals, logs and steps are in {folder}")
    return 1 if violated else 2 if any(one.void for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
