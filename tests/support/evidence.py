"""The evidence of a real run, as values: the raw log, the delivery journals, the contents of topics, the faults.

The code under judgement wrote none of it: the log comes from a plain consumer, the journals from handlers, the faults
from the test that caused them. All times are CLOCK_MONOTONIC in ns of the one host on which everything runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from marshal_sim.judge.evidence import ToolReport

NEVER = 2**63


class Record(NamedTuple):
    """One record of a coordination partition.

    `read_ns`: when the recorder's own consumer had it. `sent_ns`: its CreateTime, which the producing client library
    writes at the call of produce(), floored to ms and moved from the wall clock to the monotonic one.
    """

    offset: int
    value: bytes | None
    read_ns: int
    sent_ns: int
    leader_epoch: int = -1


@dataclass(slots=True)
class Delivery:
    """One message handed to a handler. `gate_ns`: the library's last look at a clock before (begin_ns if unknown).
    `again_ns`: since when it may come again, because its handler failed under `process`."""

    client: str
    token: str
    topic: str
    partition: int
    offset: int
    begin_ns: int
    gate_ns: int
    end_ns: int = NEVER
    ack_ns: int = NEVER
    again_ns: int = NEVER


class Fault(NamedTuple):
    """kind: kill, stop, cont, term (of the process `who`), broker_kill, broker_up, recreated, ..."""

    ns: int
    kind: str
    who: str = ""


class Failure(NamedTuple):
    """An error of the library that a process met. `names`: the error's class and its bases."""

    ns: int
    client: str
    names: tuple[str, ...]
    text: str
    closed: bool


class Dropped(NamedTuple):
    """What the library has told a process of a grant whose rest was dropped, at the fence (D3): offsets from `first` to
    `to` - 1 of the claim `epoch`. It has sent a Note, too, which an outage may keep from the log."""

    ns: int
    client: str
    topic: str
    partition: int
    epoch: int
    first: int
    to: int


@dataclass
class Life:
    """One process."""

    name: str
    client: str
    pid: int
    group: str
    delivery: str
    start_ns: int
    joined_ns: int = NEVER
    beats: list[int] = field(default_factory=list)
    exit_code: int | None = None  # None while it runs; negative for a signal, as in subprocess
    end_ns: int = NEVER
    lanes: int = 0  # how many handlers work at once, if it handles messages by `process`
    checkpoint: str = ""  # of a streaming query; processes with the same one are runs of one query


@dataclass
class Evidence:
    """All evidence of one run."""

    logs: dict[int, list[Record]] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)
    topics: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # offsets that exist or were acknowledged
    faults: list[Fault] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    lives: dict[str, Life] = field(default_factory=dict)  # by client
    keys: dict[tuple[str, int, int], str] = field(default_factory=dict)  # of messages that a `process` has handled
    reports: list[ToolReport] = field(default_factory=list)
    forged: set[tuple[int, int]] = field(default_factory=set)  # (log, offset) that a raw producer wrote
    hand_over_intervals: int | None = None  # so long a hand-over waits for handlers, if the run limits it
    dropped: list[Dropped] = field(default_factory=list)
    told: dict[bytes, int] = field(default_factory=dict)  # a heartbeat's value -> since when it was written, ns
    settled: dict[int, int] = field(default_factory=dict)  # log -> end when all had healed and all should be done


class JournalReader:
    """Turns lines of journals into evidence, one process at a time."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self._life: dict[str, Life] = {}  # by file
        self._open: dict[tuple[str, str, str, int, int], Delivery] = {}

    def take(self, file: str, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            kind = line["e"]
            if kind == "start":
                life = self._life[file] = Life(
                    line["name"],
                    line["client"],
                    line["pid"],
                    line["group"],
                    line["delivery"],
                    line["ns"],
                    lanes=line.get("lanes", 0),
                    checkpoint=line.get("checkpoint", ""),
                )
                if line["client"]:
                    self.evidence.lives[line["client"]] = life
            elif kind == "made":
                self.evidence.topics.setdefault((line["t"], line["p"]), []).extend(line["o"])
            elif kind == "error":
                self.evidence.failures.append(
                    Failure(line["ns"], self._life[file].client, tuple(line["names"]), line["text"], line["closed"])
                )
            elif kind == "joined":
                self._life[file].joined_ns = line["ns"]
            elif kind == "beat":
                self._life[file].beats.append(line["ns"])
            elif kind == "event" and line["kind"] == "amo_dropped":
                place = line["t"], line["p"], line["epoch"], line["from"], line["to"]
                self.evidence.dropped.append(Dropped(line["ns"], self._life[file].client, *place))
            elif kind == "told":
                self.evidence.told[bytes.fromhex(line["v"])] = line["since"]
            elif kind == "kill":  # by itself, at a moment that nobody else can see
                self.evidence.faults.append(Fault(line["ns"], "kill", self._life[file].client))
            elif kind in ("begin", "end", "ack"):
                self._delivery(self._life[file].client, kind, line)
            elif kind == "fail" and self._life[file].lanes:
                self._delivery(self._life[file].client, "again", line)
            elif kind == "fail" and self._life[file].delivery == "at_most_once":
                self._delivery(self._life[file].client, "end", line)  # it is not tried again, so this was its end

    def _delivery(self, client: str, kind: str, line: dict[str, Any]) -> None:
        for offset in line["o"]:
            key = (client, line["tok"], line["t"], line["p"], offset)
            if kind == "begin":
                delivery = Delivery(client, line["tok"], line["t"], line["p"], offset, line["ns"], line["gate"])
                self.evidence.deliveries.append(delivery)
                self._open[key] = delivery
                if "k" in line:
                    self.evidence.keys[line["t"], line["p"], offset] = line["k"]
            elif kind == "end":
                self._open[key].end_ns = line["ns"]
            elif kind == "again":
                self._open[key].end_ns = self._open[key].again_ns = line["ns"]
            else:
                self._open[key].ack_ns = line["ns"]
