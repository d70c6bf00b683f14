"""Copies of a program under `marshal run` die in turn, again and again, and a journal says what was repeated.

    python -m tests.support.last_will_kills --copies 3 --deaths 10 --how kill segfault exit exception

Each copy dies `--deaths` times and is started again. `--how`: kill (SIGKILL), segfault, exit (`os._exit(3)`), exception
(nobody handles it, and nothing closes the consumer), oom (the kernel kills it in a memory control group of its own;
that needs root and cgroup v1). They take turns. The handlers write a journal (journal.py) before they begin a message
and after its ack. In the end the journals are compared with what was produced. Exit code 1 if a message is missing, if
one was repeated that was acked long before its death, if a status is not passed on, or if a process or file is left.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import marshal_py
from marshal_py.client.driver.last_wills import KEEP_S
from marshal_py.last_will import connecting
from tests.support.journal import Journal, Tail
from tests.support.kafka import start_cluster
from tests.support.marked_processes import marked

ROOT: Final = Path(__file__).resolve().parents[2]
TOPIC, GROUP, PARTITIONS = "orders", "billing", 6
PERIOD_S: Final = 0.02  # between two messages of a partition
DEADLINE_S: Final = 120.0
KEPT_S: Final = 4 * KEEP_S  # acked longer before the death: an error. More than KEEP_S, for a machine that is busy
MARK: Final = "LAST_WILL_KILLS"
STATUS: Final = {"kill": 137, "segfault": 139, "exit": 3, "exception": 1, "oom": 137}
MEMORY: Final = Path("/sys/fs/cgroup/memory")
MEMORY_BYTES: Final = 160 * 2**20


# --- a copy


def copy(servers: str, journal_path: str) -> None:
    journal = Journal(Path(journal_path))
    raising = threading.Event()

    def exhaust_memory() -> None:
        held = []
        while True:
            held.append(bytearray(b"x") * 2**20)

    def obey() -> None:
        deaths: dict[str, Callable[[], object]] = {
            "segfault": faulthandler._sigsegv,  # type: ignore[attr-defined]  # there for tests
            "exit": lambda: os._exit(3),
            "exception": raising.set,
            "oom": exhaust_memory,
        }
        for line in sys.stdin:
            deaths[line.strip()]()

    threading.Thread(target=obey, daemon=True).start()
    marshal = marshal_py.connect(servers)
    consumer = marshal.consumer(GROUP, [TOPIC], start="earliest")
    marshal_py.stop_on_signals(consumer)
    journal.write("joined")
    for message in consumer:
        journal.write("begin", p=message.partition, o=message.offset)
        message.ack()
        journal.write("ack", p=message.partition, o=message.offset)
        if raising.is_set():
            raise RuntimeError("nobody handles this")
    marshal.close()


class Copy:
    """A copy under `marshal run`, which is started again after each of its deaths."""

    def __init__(self, servers: str, folder: Path, number: int) -> None:
        self.servers, self.folder, self.number, self.runs = servers, folder, number, 0
        self.journals: list[Tail] = []
        self.lines: list[list[dict[str, Any]]] = []  # of each of its lives
        self.start()

    def start(self) -> None:
        journal = self.folder / f"{self.number}-{self.runs}.journal"
        self.runs += 1
        self.journals.append(Tail(journal))
        self.lines.append([])
        with (self.folder / f"{self.number}.log").open("ab") as log:
            self.process = subprocess.Popen(
                connecting.command(
                    "run", "--", sys.executable, "-m", __spec__.name, "--copy", self.servers, str(journal)
                ),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT), MARK: os.environ[MARK]},
            )

    def read(self) -> list[dict[str, Any]]:
        """Returns what the present life has written so far."""
        self.lines[-1] += self.journals[-1].read()
        return self.lines[-1]

    def works(self) -> bool:
        return any(line["e"] == "ack" for line in self.read())

    @property
    def child(self) -> int:
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def die(self, how: str) -> None:
        assert self.process.stdin is not None
        with _small(self.child) if how == "oom" else contextlib.nullcontext():
            if how == "kill":
                os.kill(self.child, signal.SIGKILL)
            else:
                self.process.stdin.write(f"{how}\n".encode())
                self.process.stdin.flush()
            found = self.process.wait(DEADLINE_S)
        self.process.stdin.close()
        if found != STATUS[how]:
            raise SystemExit(f"status {found} after {how}; {STATUS[how]} was expected")
        self.read()


@contextlib.contextmanager
def _small(pid: int) -> Iterator[None]:
    """Moves a process into a control group with little memory. Its `marshal run` stays outside."""
    group = MEMORY / f"marshal-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
        (group / "cgroup.procs").write_text(str(pid))
        yield
        events = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
        if not int(events.get("oom_kill", "1")):
            raise SystemExit("the process died, and not for lack of memory")
    finally:
        group.rmdir()


# --- the parent


def run(servers: str, folder: Path, copies: int, deaths: int, hows: list[str]) -> int:
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)]).values():
        future.result(60)
    produced: set[tuple[int, int]] = set()
    stopping = threading.Event()
    producing = threading.Thread(target=_produce, args=(servers, produced, stopping))
    producing.start()
    members = [Copy(servers, folder, number) for number in range(copies)]
    try:
        for number in range(copies * deaths):
            _until(lambda: all(member.works() for member in members), "each copy handles messages")
            victim, how = members[number % copies], hows[number // copies % len(hows)]
            victim.die(how)
            victim.start()
            print(f"{number + 1}: copy {victim.number}, {how}; produced {len(produced)}", flush=True)
        _until(lambda: all(member.works() for member in members), "each copy handles messages")
    finally:
        stopping.set()
        producing.join()

    def missing() -> set[tuple[int, int]]:
        for member in members:
            member.read()
        lines = (line for member in members for life in member.lines for line in life)
        return produced - {(line["p"], line["o"]) for line in lines if "p" in line}

    _until(lambda: not missing(), "every message is begun", fail=False)
    statuses = []
    for member in members:
        member.process.terminate()
        statuses.append(member.process.wait(DEADLINE_S))
        assert member.process.stdin is not None
        member.process.stdin.close()
        member.read()
    verdict = {
        **_judge([life for member in members for life in member.lines]),
        "lost": len(missing()),
        "statuses": statuses,
    }
    verdict |= {"produced": len(produced), "kills": copies * deaths, "processes_left": _left(), "how": hows}
    verdict["files_left"] = [path.name for path in (folder / "tmp").iterdir()]
    print(json.dumps(verdict))
    wrong = (
        verdict["lost"]
        or any(statuses)
        or verdict["processes_left"]
        or verdict["files_left"]
        or verdict["repeated_late"]
    )
    return 1 if wrong else 0


def _produce(servers: str, produced: set[tuple[int, int]], stopping: threading.Event) -> None:
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 1})

    def written(error: object, message: Any) -> None:
        if error is None:
            produced.add((message.partition(), message.offset()))

    while not stopping.wait(PERIOD_S):
        for partition in range(PARTITIONS):
            producer.produce(TOPIC, b"order", partition=partition, on_delivery=written)
        producer.poll(0)
    producer.flush(60)


def _judge(lives: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Returns what was repeated after each death, how long before it that had been acked, and the gaps."""
    ends = [max((line["ns"] for line in life), default=0) for life in lives]
    acked: dict[tuple[int, int], list[tuple[int, int]]] = {}  # message -> (ns, life) of each ack
    begun: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, life in enumerate(lives):
        for line in life:
            if "p" in line:
                into = acked if line["e"] == "ack" else begun
                into.setdefault((line["p"], line["o"]), []).append((line["ns"], number))
    repeats, ages_ms = 0, []
    for message, times in begun.items():
        repeats += len(times) - 1
        for again, _ in sorted(times)[1:]:
            before = [(ends[life] - at) / 1e6 for at, life in acked.get(message, ()) if at < again]
            ages_ms += before[-1:]
    gaps_ms: list[float] = []
    for partition in range(PARTITIONS):
        mine = sorted((ns, life) for (p, _), times in begun.items() if p == partition for ns, life in times)
        changes = [(b[0] - a[0]) / 1e6 for a, b in pairwise(mine) if ends[a[1]] < b[0]]
        gaps_ms += [max(0.0, gap - 1000 * PERIOD_S) for gap in changes]
    gaps_ms.sort()
    return {
        "repeated": repeats,
        "repeated_acked": len(ages_ms),
        "oldest_ack_repeated_ms": round(max(ages_ms, default=0.0), 1),
        "repeated_late": sum(age > 1000 * KEPT_S for age in ages_ms),
        "gap_ms_median": round(statistics.median(gaps_ms), 1),
        "gap_ms_p99": round(gaps_ms[int(0.99 * (len(gaps_ms) - 1))], 1),
        "take_overs": len(gaps_ms),
    }


def _left() -> int:
    """Returns the number of processes that this run has started and that are still there."""
    mark = f"{MARK}={os.environ[MARK]}"  # not in this process's own environment, as it began
    _until(lambda: not marked(mark), "every process ends", fail=False)
    zombies = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return len(marked(mark) | {int(pid) for pid in zombies if _is_zombie(pid)})


def _is_zombie(pid: str) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def _until(condition: Callable[[], object], what: str, *, fail: bool = True) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            if fail:
                raise TimeoutError(f"not within {DEADLINE_S:g} s: {what}")
            return
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}")
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--deaths", type=int, default=10)
    parser.add_argument("--how", nargs="+", choices=tuple(STATUS), default=["kill"])
    parser.add_argument("--copy", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.copy:
        copy(*given.copy)
        return 0
    with start_cluster() as cluster, tempfile.TemporaryDirectory(prefix="last-wills-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        os.environ |= {MARK: uuid.uuid4().hex, "TMPDIR": str(folder / "tmp"), "XDG_RUNTIME_DIR": str(folder / "tmp")}
        return run(cluster.bootstrap, folder, given.copies, given.deaths, given.how)


if __name__ == "__main__":
    sys.exit(main())
