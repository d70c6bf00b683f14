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

import marshal_py
from marshal_py.client.values.options import HAND_OVER_TIMEOUT_S
from marshal_sim.oracle.wire import parse_envelope
from tests.rigs.links import KINDS, Link, Links
from tests.rigs.shim import Shim
from tests.support.brokers import JvmNodes, free_ports
from tests.support.judge import BESIDE, TAKE_OVER
from tests.support.process_scenario import QUERY_WORKER, ROOT, WORKER, ProcessScenario

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
NONE: Final = "none"  # no fault
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
    """What a row came to. `latencies_ms`: those of tests/support/judge.py."""

    version: str  # of the package
    row: str
    seed: int
    seconds: float  # of faults
    steps: dict[str, int]
    counters: dict[str, int]
    latencies_ms: dict[str, list[int]]
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
        self._struck: set[str] = set()  # by the faults of now: a frozen process cannot be stopped
        self._down: int | None = None  # the broker that is killed or frozen: two of three must stay in sync

    def run(self, run: ProcessScenario, seconds: float) -> Outcome:
        limit_s = self.row.worker.get("options", {}).get("handler_timeout_s", HAND_OVER_TIMEOUT_S)
        run.evidence.hand_over_intervals = int(limit_s / INTERVAL_S)  # no longer does a hand-over wait for a handler
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
            kinds = [self._pick()] if self._faults else []
            if self._faults and self._chance.random() < 0.25:
                kinds += [kind for kind in [self._pick()] if kind != kinds[0]]
            self._struck.clear()
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
        violations = [str(one) for one in found.violations]
        return Outcome(
            *(marshal_py.__version__, self.row.name, self.seed, seconds, dict(self.steps)),
            *(found.counters, found.latencies_ms, violations, found.void),
        )

    def _pick(self) -> str:
        return self._chance.choices(self._faults, [WEIGHTS[fault] for fault in self._faults])[0]

    def _rest(self, seconds: float) -> None:
        """A pause that belongs to the plan: how long a fault lasts, or nothing happens."""
        time.sleep(seconds)

    def _tell(self, kind: str, who: str) -> None:
        self.steps[kind] += 1
        ns = time.monotonic_ns()
        at = ns / 1e9 - self._began
        with (self._folder / "steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"row": self.row.name, "ns": ns, "step": kind, "who": who}) + "\n")
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
        free = sorted(set(there) - self._struck)
        if len(there) < 2 or not free:
            return None
        self._struck.add(found := self._chance.choice(free))
        return found

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
        """A wall clock jumps by an hour, and no take-over may come of it, so the judge is told nothing. Afterwards
        the broker is started again, as a person would do: Kafka 4.4's BrokerLifecycleManager may give up every
        heartbeat as "timed out before it could be sent" from then on, at once or after the next change of the
        controller, and the controllers fence it."""
        if self._down is not None:
            return lambda: None
        node = self._down = self._chance.randint(1, NODES)
        ahead_s = self._chance.choice((-HOUR_S, HOUR_S))
        self._tell("broker_clock", f"{node} by {ahead_s} s")
        shim = self._brokers.shim
        assert shim is not None
        shim.set_clock(node, ahead_s)

        def heal() -> None:
            shim.set_clock(node, 0)
            self._down = None
            self._broker(run, "broker_kill", self._brokers.nodes.kill, self._brokers.nodes.restart, node)()

        return heal

    def _broker(
        self,
        run: ProcessScenario,
        kind: str,
        strike: Callable[[int], None],
        heal: Callable[[int], None],
        which: int | None = None,
    ) -> Callable[[], None]:
        """`which`: the broker; None: any."""
        if self._down is not None:
            return lambda: None
        node = self._down = which or self._chance.randint(1, NODES)
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
    parser.add_argument("--faults", default="", help=f"none, or some of {','.join(FAULTS)}; all by default")
    parser.add_argument("--rows", type=int, default=2, help="how many of the matrix, from the seed on")
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS], help="this row alone")
    parser.add_argument("--plant", default="", help="a bug for every worker: late-heartbeat-wins, or a mutant's number")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "torture.jsonl", help="gets a line per row that ran without a plant"
    )
    parser.add_argument("--resume", action="store_true", help="run no row that it has of this seed and version")
    parser.add_argument("--keep", type=Path, help="where to make a folder for journals, logs and steps, and to keep it")
    options = parser.parse_args(arguments)
    if options.plant in PLANTS:
        options.plant, row, faults = PLANTS[options.plant]
        options.row, options.faults = options.row or [row], options.faults or faults
    options.faults = () if options.faults == NONE else tuple(options.faults.split(",")) if options.faults else FAULTS
    if unknown := set(options.faults) - set(FAULTS):
        parser.error(f"--faults {','.join(sorted(unknown))}: {NONE}, or some of {','.join(FAULTS)}")
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
    faults = ", ".join(options.faults) or NONE
    print(f"seed {options.seed}, {len(rows)} rows of {options.seconds / len(rows):.0f} s, {faults}")
    outcomes = [one for one in kept(options.out) if one.seed == options.seed] if options.resume else []
    rows, seconds = [row for row in rows if row.name not in {one.row for one in outcomes}], options.seconds / len(rows)
    if not rows:
        return outcomes
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
                outcomes.append(torturing.run(run, seconds))
            if not options.plant:
                keep(options.out, outcomes[-1])
    return outcomes


def keep(out: Path, outcome: Outcome) -> None:
    """Adds a line to the file of outcomes; several runs may do so at once."""
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")


def kept(out: Path) -> list[Outcome]:
    """The outcomes of this version of the package."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    return [one for one in (Outcome(**json.loads(line)) for line in lines) if one.version == marshal_py.__version__]


def table(outcomes: list[Outcome]) -> str:
    """One line per row: what happened, and what it came to. The runs of a row are added up."""
    lines = [
        f"{'row':<24}{'hours':>6}{'kills':>7}{'freezes':>8}{'brokers':>8}{'links':>7}{'others':>7}{'messages':>10}"
        f"{'again':>7}{'take-overs':>11}{'p50 s':>7}{'p99 s':>7}{'beside':>8}{'p50 s':>7}{'p99 s':>7}{'moves':>7}"
        f"{'violations':>11}"
    ]
    rows = list(dict.fromkeys(one.row for one in outcomes))
    groups = [[one for one in outcomes if one.row == row] for row in rows]
    lines += [_line(row, group) for row, group in zip(rows, groups, strict=True)]
    return "\n".join(lines if len(rows) < 2 else [*lines, _line("all", outcomes)])


def _line(name: str, outcomes: list[Outcome]) -> str:
    steps, counters = Counter[str](), Counter[str]()
    for one in outcomes:
        steps.update(one.steps)
        counters.update(one.counters)
    of = Counter(kill=steps["kill"], freeze=steps["freeze"])
    for kind in FAULTS:
        of["link" if "link" in kind else "broker" if "broker" in kind else ""] += steps[kind]
    of[""] -= of["kill"] + of["freeze"]
    hours = sum(one.seconds for one in outcomes) / HOUR_S
    line = f"{name:<24}{hours:>6.2f}{of['kill']:>7}{of['freeze']:>8}{of['broker']:>8}{of['link']:>7}{of['']:>7}"
    line += f"{counters['deliveries']:>10}{counters['redelivered']:>7}"
    for kind in (TAKE_OVER, BESIDE):
        times = [ms / 1000 for one in outcomes for ms in one.latencies_ms[kind]]
        cuts = statistics.quantiles(times, n=100, method="inclusive") if len(times) > 1 else times * 99
        p50, p99 = (f"{cuts[at]:.1f}" if cuts else "" for at in (49, 98))
        line += f"{len(times):>{11 if kind == TAKE_OVER else 8}}{p50:>7}{p99:>7}"
    line += f"{counters['handovers']:>7}{sum(len(one.violations) for one in outcomes):>11}"
    void = "; ".join(one.void for one in outcomes if one.void)
    return line + f"  void: {void}" * bool(void)


def main(arguments: list[str]) -> int:
    options = options_of(arguments)
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="marshal_torture_", dir=options.keep))
    try:
        outcomes = torture(options, folder)
    finally:
        for data in (*folder.glob("kafka/*/data"), folder / "shim"):
            shutil.rmtree(data, ignore_errors=True)
    print(table(outcomes))
    violated = sum(len(one.violations) for one in outcomes)
    print(f"{violated} violations; seed {options.seed}")
    if not options.plant:
        print(f"all runs in {options.out}:\n{table(kept(options.out))}")
    if not violated and options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"journals, logs and steps are in {folder}")
    return 1 if violated else 2 if any(one.void for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
