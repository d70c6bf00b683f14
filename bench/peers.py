"""How do the ways to share a topic among consumers in Python compare: one table, one picture?

Contestants: marshal_py, message by message (with and without a witness) and by `process`; confluent-kafka with classic
groups (eager, cooperative), KIP-848 and a share group; aiokafka; FastStream. Each consumer is a process that writes
every delivery into a file (group_member.py) and does nothing else. One judge reads the files, and the times at which
the messages were produced from the topic itself. `--quick` leaves out three contestants, and kills once, not
three times. `--write` writes the picture, and prints the table in Markdown.

Measured:
  messages/s       one consumer reads a filled topic, from its first to its last delivery
  wait             the longest time from the production of a message to its first delivery, whoever handles it; 12
                   partitions, a message every 12 ms in each. `calm`: while nothing happens. `join`: from the call with
                   which a third consumer joins two, until nothing moves any more. `leave`: from the request to one of
                   the three to stop
  first message    of the third consumer, after this call
  fail-over        one of two consumers is killed (SIGKILL): the same wait. Those of marshal_py run alone; the others,
                   which take many seconds, all at once on one topic. `lowest`: with the shortest time-out that a
                   broker's defaults allow, for KIP-848 and share groups with the broker's minimum lowered to it
  repeated, lost   messages delivered more than once, per kill with either setting, and never delivered
  requests/s       at the broker by its own counters (JMX), of three consumers, without those of the producer
  memory           resident, of the largest of three consumers

Spark's own source is not among them: its partitions are shared among the tasks of one query, so that nobody joins,
leaves or takes over. `bench spark` compares it.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

from bench.environment import QUIET, SHARE_START, BenchEnvironment, Result, number_text
from bench.group_load import PARTITIONS, PERIOD_S, ROOT, Delivery, LoadGroup, MemberProcess, Span

BACKLOG, BACKLOG_QUICK, BACKLOG_TINY = 2_000_000, 500_000, 5_000
READ_S, READ_QUICK_S, READ_TINY_S = 10.0, 3.0, 1.0  # a slow contestant reads for so long, and not to the end
FIRST_S: Final = 60.0  # to the first message of a filled topic
COUNT_S, COUNT_QUICK_S = 10.0, 4.0  # for which requests are counted
KILLS, KILLS_QUICK = 3, 1
LOOK_S: Final = 0.1
HOLES_S: Final = 0.5  # between two looks for holes, which cost time
BEFORE_NS: Final = 1_000_000_000  # a message that was produced so long before a kill may have waited for the dead one
GIVE_UP_S: Final = 120.0  # beyond two session timeouts of Kafka
# A kill is delayed by a random part of this time. Ours report every 0.67 s, and Kafka's clients commit every 5 s.
PHASE_S, PHASE_OURS_S = 5.0, 1.0
READ_TIMEOUT_S: Final = 60.0
TINY_STEADY_S: Final = 0.7
PICTURE: Final = ROOT / "docs" / "pictures" / "peers.svg"

SIX_SECONDS: Final = {"session.timeout.ms": 6000}
SIX_SECONDS_AIO: Final = {"session_timeout_ms": 6000, "heartbeat_interval_ms": 2000}


class Setting(NamedTuple):
    """What a consumer is started with: options of Marshal.consumer, settings of a client, of a group at the broker."""

    options: Mapping[str, Any] = {}
    client: Mapping[str, Any] = {}
    group: Mapping[str, str] = {}


NOTHING: Final = Setting()


@dataclass(frozen=True)
class Peer:
    """A contestant. `lowest` is what fails over soonest, and `lowest_name` says what that is."""

    name: str
    kind: str
    default_name: str
    default: Setting = NOTHING
    lowest_name: str = ""
    lowest: Setting | None = None
    ours: bool = False


ONE_SECOND: Final = Setting({"heartbeat_interval_s": 1.0})
PEERS: Final = (
    Peer("marshal_py", "marshal", "interval 2 s", NOTHING, "interval 1 s", ONE_SECOND, True),
    Peer("marshal_py, witness", "marshal", "witness", Setting({"last_will": "process"}), ours=True),
    Peer("marshal_py, process", "process", "interval 2 s", NOTHING, "interval 1 s", ONE_SECOND, True),
    Peer("classic, eager", "eager", "session 45 s", NOTHING, "session 6 s", Setting(client=SIX_SECONDS)),
    Peer("classic, cooperative", "cooperative", "session 45 s", NOTHING, "session 6 s", Setting(client=SIX_SECONDS)),
    Peer(
        "KIP-848",
        "consumer",
        "session 45 s",
        NOTHING,
        "session 6 s",
        Setting(group={"consumer.session.timeout.ms": "6000", "consumer.heartbeat.interval.ms": "1000"}),
    ),
    Peer(
        "share group",
        "share",
        "session 45 s",
        Setting(group=SHARE_START),
        "session 6 s, lock 15 s",
        Setting(
            group={
                **SHARE_START,
                "share.session.timeout.ms": "6000",
                "share.heartbeat.interval.ms": "1000",
                "share.record.lock.duration.ms": "15000",
            }
        ),
    ),
    Peer("aiokafka", "aiokafka", "session 10 s", NOTHING, "session 6 s", Setting(client=SIX_SECONDS_AIO)),
    Peer("FastStream", "faststream", "session 10 s", NOTHING, "session 6 s", Setting(client=SIX_SECONDS_AIO)),
)
LEFT_OUT_QUICKLY: Final = ("eager", "share", "faststream")
TINY_KINDS: Final = ("marshal", "aiokafka")


@dataclass
class Figures:
    """One contestant's row: each figure is a median over its kills, or None if it was not measured."""

    name: str
    setting: str
    ours: bool
    per_second: float | None = None
    first_s: float | None = None
    calm_ms: float | None = None
    join_ms: float | None = None
    leave_ms: float | None = None
    failover_s: float | None = None
    lowest_s: float | None = None
    repeated: float | None = None
    lost: int = 0
    requests_s: float | None = None
    rss_mb: float | None = None


# --- the judge: what was produced when, by partition and offset, and who delivered it when

Produced = Mapping[int, Sequence[int]]  # partition -> ns of each offset
Deliveries = Mapping[int, Sequence[Delivery]]


def longest_wait_ms(produced: Produced, deliveries: Deliveries, span: Span) -> float:
    """The longest time from production to the first delivery, of the messages that were produced in that span."""
    longest = 0
    for partition, times in produced.items():
        first: dict[int, int] = {}
        for delivery in deliveries.get(partition, ()):
            first[delivery.offset] = min(delivery.ns, first.get(delivery.offset, delivery.ns))
        for offset, ns in enumerate(times):
            if span.begin <= ns <= span.end and offset in first:
                longest = max(longest, first[offset] - ns)
    return longest / 1e6


def repeated(deliveries: Deliveries) -> int:
    """How many deliveries there were beyond the first one of each message."""
    return sum(len(found) - len({each.offset for each in found}) for found in deliveries.values())


def lost(produced: Produced, deliveries: Deliveries) -> int:
    """How many messages were never delivered."""
    return sum(
        len(set(range(len(times))) - {each.offset for each in deliveries.get(partition, ())})
        for partition, times in produced.items()
    )


def read_produced(environment: BenchEnvironment, topic: str) -> dict[int, list[int]]:
    """The time of each message of a topic, on the clock of the journals (monotonic ns); the topic's has ms."""
    ahead_ns = time.time_ns() - time.monotonic_ns()
    consumer = Consumer({"bootstrap.servers": environment.bootstrap, "group.id": "unused", **QUIET})
    produced: dict[int, list[int]] = {partition: [] for partition in range(PARTITIONS)}
    parts = [TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in produced]
    left = sum(consumer.get_watermark_offsets(part, READ_TIMEOUT_S)[1] for part in parts)
    consumer.assign(parts)
    deadline = time.monotonic() + READ_TIMEOUT_S
    while left and time.monotonic() < deadline:
        for message in consumer.consume(1_000, LOOK_S):
            if message.error() is None:
                produced[message.partition()].append(message.timestamp()[1] * 1_000_000 - ahead_ns)
                left -= 1
    consumer.close()
    if left > 0:
        raise TimeoutError(f"{topic} was not read within {READ_TIMEOUT_S:g} s")
    return produced


# --- the three measurements


def throughput(environment: BenchEnvironment, peer: Peer, topic: str, limit: int, limit_s: float) -> float:
    """Messages per second of one consumer that reads a filled topic."""
    with _group(environment, peer, peer.default, topic) as group:
        member = group.start()
        group.wait(lambda: member.logged() > 0, FIRST_S, "the first message is there")
        began_s = time.monotonic()
        while member.logged() < limit and time.monotonic() - began_s < limit_s:
            time.sleep(LOOK_S)
        group.kill(member)
        times = sorted(each.ns for found in group.deliveries.values() for each in found)
    return (len(times) - 1) / ((times[-1] - times[0]) / 1e9)


def life(
    environment: BenchEnvironment, peer: Peer, figures: Figures, kills: int, tiny: bool, without: float | None
) -> float | None:
    """A third consumer joins two, one leaves, and if it is one of ours one is killed: all alone on the machine.

    `without`: requests per second of a load without consumers; if None, measured now. Returns it.
    """
    rng = random.Random(peer.name)
    with _group(environment, peer, peer.default, None, TINY_STEADY_S if tiny else None) as group:
        group.start_load()
        if without is None:
            without = _request_rate(environment)
        for _ in range(2):
            group.start()
        # A partition that moves may have waited at the beginning of the steady time.
        begin, end = group.steady(group.steady_s)
        calm = Span((begin + end) // 2, end)
        joiner = group.start()
        called = joiner.reported["called"]
        join = Span(called, group.steady().end)
        first = min(d.ns for found in group.deliveries.values() for d in found if d.member == joiner.number)
        figures.first_s = (first - called) / 1e9
        figures.rss_mb = max(map(resident_mb, group.members))
        rate = _request_rate(environment)
        if rate is not None and without is not None and rate > without:  # else the producer was slower meanwhile
            figures.requests_s = rate - without
        leaver = rng.choice(group.members)
        group.stop(leaver)
        leave = Span(leaver.reported["stopping"], group.steady().end)
        killed = []
        if peer.ours:
            before = repeated(group.deliveries)
            for number in range(kills):
                if number:
                    group.start()
                killed.append(_kill(group, rng, PHASE_OURS_S))
            figures.repeated = (repeated(group.deliveries) - before) / kills
        group.stop_load()
        produced = read_produced(environment, group.topic)
        try:
            group.wait(lambda: lost(produced, group.deliveries) == 0, GIVE_UP_S, "everything is delivered")
        except TimeoutError:
            figures.lost += lost(produced, group.deliveries)
    figures.calm_ms, figures.join_ms, figures.leave_ms = (
        longest_wait_ms(produced, group.deliveries, span) for span in (calm, join, leave)
    )
    if killed:
        figures.failover_s = statistics.median(
            longest_wait_ms(produced, group.deliveries, span) / 1000 for span in killed
        )
    return without


class Killed(NamedTuple):
    """What a group showed whose consumers were killed."""

    spans: list[Span]
    deliveries: dict[int, list[Delivery]]
    again: int
    missing: int


def failover(environment: BenchEnvironment, peers: Sequence[tuple[Peer, Figures]], kills: int, tiny: bool) -> None:
    """All groups that take seconds read one topic at once; one of the two consumers of each is killed."""
    with LoadGroup(environment, "eager") as feed:
        feed.start_load()

        def one(peer: Peer, setting: Setting) -> Killed:
            rng, killed, again = random.Random(f"{peer.name} {setting}"), list[Span](), 0
            with _group(environment, peer, setting, feed.topic, TINY_STEADY_S if tiny else None) as group:
                for _ in range(2):
                    group.start()
                for number in range(1 if setting is peer.default else kills):
                    if number:
                        group.start()
                    group.steady()
                    before = repeated(group.deliveries)
                    killed.append(_kill(group, rng, PHASE_OURS_S if tiny else PHASE_S))
                    again += repeated(group.deliveries) - before
                return Killed(killed, group.deliveries, again, group.tally()["missing"])

        wanted = [(peer, figures, peer.default) for peer, figures in peers if not peer.ours and not tiny]
        wanted += [(peer, figures, peer.lowest) for peer, figures in peers if peer.lowest is not None]
        with ThreadPoolExecutor(max(1, len(wanted))) as pool:
            running = [pool.submit(one, peer, setting) for peer, _, setting in wanted]
            done = [each.result() for each in running]
        feed.stop_load()
        produced = read_produced(environment, feed.topic)
    for (peer, figures, setting), killed in zip(wanted, done, strict=True):
        wait_s = statistics.median(longest_wait_ms(produced, killed.deliveries, span) / 1000 for span in killed.spans)
        if setting is peer.default:
            figures.failover_s = wait_s
        else:
            figures.lowest_s = wait_s
        figures.lost += killed.missing
    for peer, figures in peers:
        runs = [killed for (each, _, _), killed in zip(wanted, done, strict=True) if each is peer]
        if runs and not peer.ours:
            figures.repeated = sum(run.again for run in runs) / sum(len(run.spans) for run in runs)


def _group(
    environment: BenchEnvironment, peer: Peer, setting: Setting, topic: str | None, steady_s: float | None = None
) -> LoadGroup:
    name = environment.group(peer.kind)
    if setting.group:
        environment.configure_group(name, setting.group)
    return LoadGroup(
        environment,
        peer.kind,
        steady_s=steady_s,
        settings=setting.client,
        options=setting.options,
        name=name,
        topic=topic,
    )


def _kill(group: LoadGroup, rng: random.Random, phase_s: float) -> Span:
    """Kills one member. Returns the span of the messages that may have waited, once nothing is missing any more."""
    span = group.steady(rng.random() * phase_s)
    victim = rng.choice(group.members)
    its = [partition for partition, member in group.owners(span).items() if member == victim.number]
    group.kill(victim)
    killed_ns = time.monotonic_ns()
    group.wait_delivered(killed_ns, its, victim.number, GIVE_UP_S)
    deadline = time.monotonic() + GIVE_UP_S
    while group.tally()["missing"] and time.monotonic() < deadline:
        time.sleep(HOLES_S)
    return Span(killed_ns - BEFORE_NS, time.monotonic_ns())


def _request_rate(environment: BenchEnvironment) -> float | None:
    before = environment.requests()
    if before is None:
        return None
    time.sleep(COUNT_QUICK_S if environment.quick else COUNT_S)
    after = environment.requests()
    return None if after is None else (after[1] - before[1]) / (after[0] - before[0])


def resident_mb(member: MemberProcess) -> float:
    """Resident memory of a process, which Linux counts in pages."""
    status = Path(f"/proc/{member.process.pid}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS:"))


# --- the table and the picture


class Column(NamedTuple):
    title: str
    cell: Callable[[Figures], Any]


def _low(figures: Figures) -> str:
    lowest = next(peer.lowest_name for peer in PEERS if peer.name == figures.name)
    return "–" if figures.lowest_s is None else f"{number_text(figures.lowest_s)} ({lowest})"


def _default(figures: Figures) -> str:
    return "–" if figures.failover_s is None else f"{number_text(figures.failover_s)} ({figures.setting})"


COLUMNS: Final = (
    Column("contestant", lambda f: f.name),
    Column("messages/s", lambda f: f.per_second),
    Column("fail-over, s: defaults", _default),
    Column("lowest", _low),
    Column("repeated per kill", lambda f: f.repeated),
    Column("lost", lambda f: f.lost),
    Column("join: first message, s", lambda f: f.first_s),
    Column("longest wait, ms: join", lambda f: f.join_ms),
    Column("leave", lambda f: f.leave_ms),
    Column("calm", lambda f: f.calm_ms),
    Column("requests/s", lambda f: f.requests_s),
    Column("memory, MB", lambda f: f.rss_mb),
)


def text(cell: Any) -> str:
    return "–" if cell is None else cell if isinstance(cell, str) else f"{cell:,.0f}" if cell >= 10 else f"{cell:.2g}"


def markdown(rows: Sequence[Figures]) -> str:
    """The table as docs/benchmarks.md shows it."""
    lines = ["| " + " | ".join(column.title for column in COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(text(column.cell(figures)) for column in COLUMNS) + " |" for figures in rows]
    return "\n".join(lines) + "\n"


WIDTH, LEFT, TOP, ROW, PANEL, GAP, LABEL = 980, 170, 62, 30, 215, 58, 60  # of the picture, in pixels
STYLE: Final = (
    "text{font:12px system-ui,sans-serif;fill:#24292f}.h{font-weight:600}.s{fill:#57606a}.g{stroke:#d0d7de}"
    ".b{fill:#fff}.o{fill:#0969da}.t{fill:#8c959f}.oo{fill:none;stroke:#0969da}.tt{fill:none;stroke:#8c959f}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9198a1}.g{stroke:#3d444d}.b{fill:#0d1117}"
    ".o{fill:#4493f8}.t{fill:#7d8590}.oo{stroke:#4493f8}.tt{stroke:#7d8590}}"
)


class Panel(NamedTuple):
    """A part of the picture: a figure of each row (a dot), and another one (a ring), on a scale by powers of ten."""

    title: str
    below: str
    unit: str
    dot: Callable[[Figures], float | None]
    ring: Callable[[Figures], float | None]
    low: float
    high: float
    ticks: Mapping[float, str]


PANELS: Final = (
    Panel(
        "fail-over after kill -9",
        "● defaults  ○ lowest time-out",
        " s",
        lambda f: f.failover_s,
        lambda f: f.lowest_s,
        0.01,
        100,
        {0.01: "10 ms", 0.1: "100 ms", 1: "1 s", 10: "10 s", 100: ""},
    ),
    Panel(
        "a message waits at most",
        "● one joins  ○ one leaves",
        " ms",
        lambda f: f.join_ms,
        lambda f: f.leave_ms,
        1,
        10_000,
        {1: "1 ms", 10: "10 ms", 100: "100 ms", 1000: "1 s", 10_000: ""},
    ),
    Panel(
        "messages per second",
        "one consumer, one by one",
        "",
        lambda f: f.per_second,
        lambda f: None,
        1_000,
        1_000_000,
        {1_000: "1,000", 10_000: "10,000", 100_000: "100,000", 1_000_000: ""},
    ),
)


def _place(panel: Panel, value: float) -> float:
    """Pixels from the left end of a panel; what is beyond its ends is at its ends."""
    share = math.log10(max(value, panel.low) / panel.low) / math.log10(panel.high / panel.low)
    return PANEL * min(1.0, share)


def _label(panel: Panel, x: float, y: float, dot: float | None, ring: float | None) -> list[str]:
    """The value of a dot, on the side where the ring is not."""
    if dot is None:
        return []
    at, other = x + _place(panel, dot), x + _place(panel, ring or dot)
    left = 0 < other - at < LABEL
    place = f'x="{at - 9:.1f}" text-anchor="end"' if left else f'x="{at + 9:.1f}"'
    return [f'<text class="s" {place} y="{y}" style="font-size:10px">{text(dot)}{panel.unit}</text>']


def picture(rows: Sequence[Figures], caption: str) -> str:
    """An SVG that needs nothing else, for light and dark pages."""
    height = TOP + ROW * len(rows) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{_escaped(caption)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="b" width="{WIDTH}" height="{height}"/>',
    ]
    for number, figures in enumerate(rows):
        weight = ' class="h"' if figures.ours else ""
        parts.append(f'<text{weight} x="8" y="{TOP + ROW * number + 19}">{_escaped(figures.name)}</text>')
    for index, panel in enumerate(PANELS):
        x = LEFT + index * (PANEL + GAP)
        parts.append(
            f'<text class="h" x="{x}" y="20">{panel.title}</text><text class="s" x="{x}" y="38">{panel.below}</text>'
        )
        for tick, label in panel.ticks.items():
            at, bottom = x + _place(panel, tick), TOP + ROW * len(rows)
            parts.append(f'<line class="g" x1="{at:.1f}" y1="{TOP - 12}" x2="{at:.1f}" y2="{bottom}"/>')
            parts.append(f'<text class="s" x="{at + 3:.1f}" y="{TOP - 8}" style="font-size:9px">{label}</text>')
        for number, figures in enumerate(rows):
            y = TOP + ROW * number + 15
            color = "o" if figures.ours else "t"
            for value, shape in ((panel.dot(figures), color), (panel.ring(figures), 2 * color)):
                if value is not None:
                    at = x + _place(panel, value)
                    parts.append(
                        f'<circle class="{shape}" cx="{at:.1f}" cy="{y}" r="5" stroke-width="2">'
                        f"<title>{_escaped(figures.name)}: {text(value)}{panel.unit}</title></circle>"
                    )
            parts += _label(panel, x, y + 4, panel.dot(figures), panel.ring(figures))
    parts.append(f'<text class="s" x="8" y="{height - 10}">{_escaped(caption)}</text></svg>\n')
    return "\n".join(parts)


def _escaped(plain: str) -> str:
    return plain.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")


def write(raw: Mapping[str, Any], where: str) -> str:
    """Writes the picture. Returns the table in Markdown."""
    rows = [Figures(**each) for each in raw["figures"]]
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture(rows, f"{raw['command']}, {where}; scales by powers of ten"), encoding="utf-8")
    return f"By `{raw['command']}`, {where}:\n\n{markdown(rows)}"


def run(environment: BenchEnvironment, tiny: bool) -> Result:
    peers = [
        peer
        for peer in PEERS
        if (not tiny or (peer.kind in TINY_KINDS and not peer.default.options))
        and not (environment.quick and peer.kind in LEFT_OUT_QUICKLY)
    ]
    few = environment.quick or tiny
    kills = KILLS_QUICK if few else KILLS
    count = BACKLOG_TINY if tiny else BACKLOG_QUICK if few else BACKLOG
    limit_s = READ_TINY_S if tiny else READ_QUICK_S if few else READ_S
    rows = [Figures(peer.name, peer.default_name, peer.ours) for peer in peers]
    topic = environment.topic(PARTITIONS)
    environment.fill(topic, PARTITIONS, count)
    without: float | None = None
    for peer, figures in zip(peers, rows, strict=True):
        environment.say(peer.name)
        figures.per_second = throughput(environment, peer, topic, count, limit_s)
        without = life(environment, peer, figures, kills, tiny, without)
    environment.drop(topic)
    environment.say("kills of those that take seconds, all at once")
    failover(environment, list(zip(peers, rows, strict=True)), kills, tiny)
    notes = [
        f"{PARTITIONS} partitions, a message every {1000 * PERIOD_S:g} ms in each; of {count:,} messages of 100 bytes "
        f"one consumer reads for at most {limit_s:g} s; three consumers join and leave, two remain for the kills",
        f"fail-over is the longest wait of a message; median of {kills} kills, with Kafka's defaults of one; one join, "
        "one leave; requests/s by the broker's own counters (JMX), of three consumers without the producer",
    ]
    command = "python -m bench peers" + (" --quick" if environment.quick else "")
    cells = [[column.cell(figures) for column in COLUMNS] for figures in rows]
    raw = {"figures": [asdict(figures) for figures in rows], "command": command}
    return Result("peers", [column.title for column in COLUMNS], cells, notes, raw)
