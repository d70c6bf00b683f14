"""Hours without a fault: `make endurance SECONDS=3600` (python -m tests.rigs.endurance).

What grows slowly shows only in processes that live long: memory, threads, descriptors, the coordination log, the time
that the same work takes. Consumers of each kind, an exporter and a witness stay for the whole run on one broker of
Apache Kafka, while others join and leave every minute, so that partitions move. Every ten seconds /proc is read. A run
has a warm-up and two halves, which are compared; the judge is that of torture.py.

A day is several runs: each adds a line to `endurance.jsonl`, and the table adds up all lines of this version. The exit
code is 1 if a promise was broken or something grew by more than GROWTH allows, and 2 if too little happened.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from confluent_kafka.admin import AdminClient, NewTopic

import marshal_py
from tests.support.brokers import JvmNodes, free_ports
from tests.support.judge import TAKE_OVER
from tests.support.process_scenario import ROOT, ProcessScenario

PARTITIONS: Final = 12
PER_SECOND: Final = 60  # messages
SAMPLE_S: Final = 10.0
VISIT_EVERY_S, VISIT_S = 60.0, 20.0
WARM_UP: Final = 0.2  # of the run: caches fill, and allocators find their size
SETTLE_S: Final = 180.0
HOUR_S: Final = 3_600.0
TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
PAGE_KB: Final = os.sysconf("SC_PAGE_SIZE") // 1024
# By how much the least of the second half may be above that of the first: what is needed for a moment is no growth.
GROWTH: Final = {"rss_kb": 4_096, "threads": 1, "descriptors": 3}
STAY: Final = {
    "one by one": {"style": "single"},
    "batches": {"style": "batch"},
    "process": {"style": "process"},
    "witness": {"style": "single", "last_will": "process"},
}
# In a group and a log of its own, because the judge asks for the journal of each consumer, and this has none.
ASYNCIO: Final = """
import asyncio, sys
from marshal_py import aio

async def main(servers, topic, coordination):
    async with aio.connect(servers, coordination_topic=coordination) as marshal:
        async with marshal.consumer("asyncio", [topic], start="earliest") as consumer:
            async for message in consumer:
                message.ack()

asyncio.run(main(*sys.argv[1:]))
"""


class Sample(NamedTuple):
    """What the kernel says of a process. `cpu_s`: since it began."""

    at_s: float
    rss_kb: int
    threads: int
    descriptors: int
    cpu_s: float


class Half(NamedTuple):
    """The least of a half's samples, and how much of a core the process used."""

    rss_kb: int
    threads: int
    descriptors: int
    cpu_ms_per_s: float


@dataclasses.dataclass
class Outcome:
    """What a run came to. `halves`: of each process that stayed. `scrapes_ms`: of the exporter, the median of each
    half. `log_bytes`: by how much the coordination log grew."""

    version: str  # of the package
    seed: int
    seconds: float
    halves: dict[str, list[Half]]
    scrapes_ms: list[float]
    log_bytes: int
    visits: int
    counters: dict[str, int]
    latencies_ms: dict[str, list[int]]
    violations: list[str]
    void: str

    def grown(self) -> list[str]:
        """Names what has more in the second half than GROWTH allows."""
        return [
            f"{name}: {what} {getattr(first, what)} -> {getattr(second, what)}"
            for name, (first, second) in self.halves.items()
            for what, most in GROWTH.items()
            if getattr(second, what) - getattr(first, what) > most
        ]


def sample(pid: int, at_s: float) -> Sample:
    folder = Path(f"/proc/{pid}")
    fields = (folder / "stat").read_text().rpartition(") ")[2].split()
    cpu_s = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    threads, rss_kb = int(fields[17]), int(fields[21]) * PAGE_KB
    return Sample(at_s, rss_kb, threads, len(list((folder / "fd").iterdir())), cpu_s)


def halves_of(samples: list[Sample], seconds: float) -> list[Half]:
    """Compares what is left of the samples after the warm-up."""
    warm = [one for one in samples if one.at_s >= seconds * WARM_UP]
    middle = len(warm) // 2
    return [
        Half(
            min(one.rss_kb for one in part),
            min(one.threads for one in part),
            min(one.descriptors for one in part),
            1_000 * (part[-1].cpu_s - part[0].cpu_s) / (part[-1].at_s - part[0].at_s),
        )
        for part in (warm[:middle], warm[middle:])
    ]


class Endurance:
    """One run: processes that stay, visitors, and a look at all of them now and then."""

    def __init__(self, run: ProcessScenario, folder: Path, data: Path) -> None:
        self._run, self._folder, self._data = run, folder, data
        self._pids: dict[str, int] = {}
        self._beside: list[subprocess.Popen[bytes]] = []
        self._samples: dict[str, list[Sample]] = {}
        self._scrapes_ms: list[tuple[float, float]] = []
        self.visits = 0

    @contextlib.contextmanager
    def _started(self, name: str, *arguments: str) -> Iterator[None]:
        """A process that stays and writes no journal."""
        with (self._folder / f"{name}.log").open("wb") as out:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            popen = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
            )
            self._pids[name] = popen.pid
            self._beside.append(popen)
            try:
                yield
            finally:
                popen.terminate()
                popen.wait(SETTLE_S)

    def stay(self, seconds: float) -> tuple[dict[str, list[Half]], list[float], int]:
        """Runs everything for so long. Returns the halves, the exporter's, and by how much the log grew."""
        run, [port] = self._run, free_ports(1)
        servers, coordination = run.bootstrap, run.coordination_topic
        run.produce(per_second=PER_SECOND)
        for name, settings in STAY.items():
            run.start_worker(name, **settings)
        for name in STAY:
            run.await_joined(name, SETTLE_S)
            self._pids[name] = run.processes[name].popen.pid
        run.wait(lambda: run.all_owned(PARTITIONS), "every partition has an owner")
        exporter = ("exporter", "--bootstrap-servers", servers, "--coordination-topic", coordination)
        with (
            self._started("asyncio", "-c", ASYNCIO, servers, run.topics[0], f"{coordination}-asyncio"),
            self._started("exporter", "-m", "marshal_py.cli", *exporter, "--port", str(port)),
        ):
            run.wait(lambda: self._scrape(port) is not None, "the exporter answers", SETTLE_S)
            began, log_bytes, visit_at, visitor = time.monotonic(), self._log_bytes(), VISIT_EVERY_S, ""
            while (at_s := time.monotonic() - began) < seconds:
                if visitor and at_s >= visit_at + VISIT_S:
                    run.term(visitor)
                    run.await_gone(visitor, SETTLE_S)
                    visitor, visit_at = "", visit_at + VISIT_EVERY_S
                elif not visitor and at_s >= visit_at:
                    self.visits += 1
                    visitor = f"visitor{self.visits}"
                    run.start_worker(visitor, style=("single", "batch", "process")[self.visits % 3])
                self._look(at_s, port)
                run.scan()
                time.sleep(max(0.0, SAMPLE_S - (time.monotonic() - began - at_s)))
            if visitor:
                run.term(visitor)
            halves = {name: halves_of(samples, seconds) for name, samples in self._samples.items()}
            scrapes = [
                statistics.median(ms for at, ms in self._scrapes_ms if (at >= seconds / 2) is late)
                for late in (False, True)
            ]
            return halves, scrapes, self._log_bytes() - log_bytes

    def _look(self, at_s: float, port: int) -> None:
        for name, pid in self._pids.items():
            self._samples.setdefault(name, []).append(sample(pid, at_s))
        scraped_ms = self._scrape(port)
        if scraped_ms is None:
            raise AssertionError("the exporter has stopped to answer")
        self._scrapes_ms.append((at_s, scraped_ms))
        with (self._folder / "samples.jsonl").open("a", encoding="utf-8") as file:
            newest = {name: samples[-1]._asdict() for name, samples in self._samples.items()}
            file.write(json.dumps({"at_s": at_s, "scrape_ms": scraped_ms, **newest}) + "\n")

    def _scrape(self, port: int) -> float | None:
        """Returns how many ms a scrape took; None if nothing answers yet."""
        for popen in self._beside:
            if popen.poll() is not None:
                raise AssertionError(f"a process has ended: {popen.args}; see the logs in {self._folder}")
        began = time.monotonic()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as it:
            if f'group="{self._run.group}"'.encode() in it.read():
                return (time.monotonic() - began) * 1_000
        return None

    def _log_bytes(self) -> int:
        logs = self._data.glob(f"**/{self._run.coordination_topic}-*/*.log")
        return sum(log.stat().st_size for log in logs)


def endure(options: argparse.Namespace, folder: Path) -> Outcome:
    data = folder / "kafka"
    with contextlib.closing(JvmNodes(1, {}, data)) as nodes:
        nodes.start()
        servers = ",".join(nodes.addresses.values())
        admin = AdminClient({"bootstrap.servers": servers})
        admin.create_topics([NewTopic("endurance", PARTITIONS, 1)])["endurance"].result(60)
        with ProcessScenario(servers, folder / "run", ["endurance"], seed=options.seed) as run:
            enduring = Endurance(run, folder, data)
            halves, scrapes_ms, log_bytes = enduring.stay(options.seconds)
            found = run.finish(deliveries=500, settle_s=SETTLE_S)
    print(found, flush=True)
    violations = [str(one) for one in found.violations]
    return Outcome(
        *(marshal_py.__version__, options.seed, options.seconds, halves, scrapes_ms, log_bytes, enduring.visits),
        *(found.counters, found.latencies_ms, violations, found.void),
    )


def kept(out: Path) -> list[Outcome]:
    """The outcomes of this version of the package."""
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    outcomes = [Outcome(**line) for line in lines if line["version"] == marshal_py.__version__]
    for one in outcomes:
        one.halves = {name: [Half(*half) for half in halves] for name, halves in one.halves.items()}
    return outcomes


def table(outcomes: list[Outcome]) -> str:
    """One line per process that stayed, its halves beside each other, the greatest of all runs; then the sums."""
    lines = [f"{'process':<12}{'memory, MB':>16}{'threads':>10}{'descriptors':>13}{'CPU, ms/s':>14}"]
    for name in dict.fromkeys(name for one in outcomes for name in one.halves):
        runs = [one.halves[name] for one in outcomes if name in one.halves]
        first, second = (max(halves[at].rss_kb for halves in runs) / 1024 for at in (0, 1))
        line = f"{name:<12}{f'{first:.1f} {second:.1f}':>16}"
        for what, width in (("threads", 10), ("descriptors", 13)):
            pair = " ".join(str(max(getattr(halves[at], what) for halves in runs)) for at in (0, 1))
            line += f"{pair:>{width}}"
        pair = " ".join(f"{statistics.mean(halves[at].cpu_ms_per_s for halves in runs):.1f}" for at in (0, 1))
        lines.append(f"{line}{pair:>14}")
    hours = sum(one.seconds for one in outcomes) / HOUR_S
    scrapes = " ".join(f"{max(one.scrapes_ms[at] for one in outcomes):.0f}" for at in (0, 1))
    deliveries, again = (sum(one.counters[name] for one in outcomes) for name in ("deliveries", "redelivered"))
    lines.append(
        f"{hours:.2f} hours, {sum(one.visits for one in outcomes)} visitors, {deliveries} deliveries, {again} of them "
        f"again, {sum(len(one.latencies_ms[TAKE_OVER]) for one in outcomes)} take-overs; the log grew by "
        f"{sum(one.log_bytes for one in outcomes) / hours / 1e6:.1f} MB/h; a scrape took {scrapes} ms; "
        f"{sum(len(one.violations) for one in outcomes)} violations"
    )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.rigs.endurance", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=HOUR_S)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "endurance.jsonl", help="gets a line per run")
    parser.add_argument("--keep", type=Path, help="where to make a folder for journals, logs and samples, and keep it")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        if options.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="marshal_endurance_")))
        else:
            options.keep.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(dir=options.keep))
        outcome = endure(options, folder)
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
    print(table([outcome]))
    grown = outcome.grown()
    for one in grown:
        print(f"has grown: {one}")
    print(f"all runs in {options.out}:\n{table(kept(options.out))}")
    return 1 if outcome.violations or grown else 2 if outcome.void else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
