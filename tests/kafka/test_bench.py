"""Every benchmark runs at its smallest size, and its result has the promised shape and shows that work was done.

No test asserts a time. Other tests look for lost and repeated messages; here only the tallies of the contestants are
checked, because a benchmark that loses messages measures nothing.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.__main__ import NAMES, machine, measure, versions
from bench.environment import BenchEnvironment, Result, Work, cell_text, percentile, ratio, show, spread
from bench.group_load import Delivery, Span
from bench.parallel import Line, judge
from bench.peers import Figures, longest_wait_ms, lost, markdown, picture, repeated
from bench.takeover import WITNESSED, Kills, beyond_spacing
from tests.support.kafka import Cluster

ROOT = Path(__file__).parents[2]
PARTS = {
    *("__init__", "__main__", "environment", "group_member", "load_generator", "group_load", "moves"),
    *("spark_floor", "spark_session"),
}


@pytest.fixture(scope="module")
def environment(kafka: Cluster, tmp_path_factory: pytest.TempPathFactory) -> BenchEnvironment:
    return BenchEnvironment(kafka.bootstrap, kafka.description, tmp_path_factory.mktemp("bench"))


def column(result: Result, name: str) -> list[Any]:
    """The cells of the column with this name."""
    return [row[result.columns.index(name)] for row in result.rows]


def test_each_benchmark_is_in_the_list() -> None:
    assert {path.stem for path in (ROOT / "bench").glob("*.py")} == PARTS | set(NAMES)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [name if name == "join" else pytest.param(name, marks=pytest.mark.proof) for name in NAMES]
)
def test_a_tiny_run_gives_a_complete_result(
    environment: BenchEnvironment, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"bench.{name}")
    assert module.__doc__.partition("\n")[0].endswith("?"), "a benchmark's first line is its question"
    result: Result = module.run(environment, tiny=True)
    assert result.name == name
    assert result.rows
    for row in result.rows:
        assert len(row) == len(result.columns)
    assert json.loads(json.dumps(result.as_json()))["rows"] == result.rows
    show(result, "what?")
    assert name in capsys.readouterr().out
    CHECKS[name](result)


def check_moves(result: Result) -> None:
    assert {"marshal", "eager"} <= set(column(result, "contestant"))
    check_tally(result)


def test_gaps_with_a_witness_are_given_over_the_normal_spacing() -> None:
    kills = Kills(WITNESSED, [0.022, 0.032, 0.011], 2, {"again": 5})
    assert beyond_spacing(kills).startswith(
        f"{WITNESSED}: a gap over the normal spacing is 10 ms, p99 20 ms (2 kills; goal: median <= 50 ms, "
        "p99 <= 200 ms); 2.5 messages per kill are delivered again (goal: <= 17, "
    )


def check_tally(result: Result) -> None:
    assert column(result, "missing") == [0] * len(result.rows)
    assert all(count(cell) > 100 for cell in column(result, "messages"))


def check_rewind(result: Result) -> None:
    assert column(result, "delivered again") >= [12 * 50], "the positions moved"
    check_tally(result)


def check_backlog(result: Result) -> None:
    assert all(cell.endswith(" of 12") and not cell.startswith("0 ") for cell in column(result, "served in 20 s"))
    assert column(result, "not served") == [0]


def check_takeover(result: Result) -> None:
    assert all(kills >= 1 for kills in column(result, "kills"))
    assert all(partitions >= 4 for partitions in column(result, "partitions")), "a third of 12 for each kill"
    check_tally(result)


def check_claims(result: Result) -> None:
    assert column(result, "contestant") == ["marshal", "eager", "cooperative", "consumer"]
    assert all(
        count(cell) == partitions
        for cell, partitions in zip(column(result, "claims"), column(result, "partitions"), strict=True)
    )


def check_traffic(result: Result) -> None:
    assert all(rate["n"] == 2 for rate in column(result, "heartbeats per consumer and third")), "one for each consumer"
    for idle, loaded in zip(*[iter(column(result, "claims in it"))] * 2, strict=True):
        assert idle == 0
        assert loaded > 0
    assert [bool(grants) for grants in column(result, "grants per consumer and second")] == [False, False, False, True]


def check_latency(result: Result) -> None:
    assert {"bare poll()", "marshal iteration", "marshal next()"} <= set(column(result, "way to receive"))
    assert all(one["n"] > 0 for one in column(result, "produce to handler, ms"))


def check_event_loop(result: Result) -> None:
    assert all(read >= 20_000 for read in column(result, "messages read"))
    assert all(one["low"] > 10 for one in column(result, "callbacks")), "the callbacks were counted"
    assert all(one["low"] > 0 for one in column(result, "longest callback, ms"))


def check_memory(result: Result) -> None:
    assert all(tracked > 0 for tracked in column(result, "offsets, messages or records"))
    assert all(column(result, "work"))


def check_throughput(result: Result) -> None:
    assert all(read >= 1_000 for read in column(result, "messages read"))
    assert len(set(column(result, "messages read"))) == 1, "in a tiny run all contestants read the same number"


def check_races(result: Result) -> None:
    assert column(result, "clusters") == ["faulty", "calm"]
    assert all(rate > 0 for rate in column(result, "events per CPU s"))
    assert result.notes[0].startswith("0 violations")


def check_fold(result: Result) -> None:
    assert all(count(cell) >= 1_000 for cell in column(result, "work"))


def check_scale(result: Result) -> None:
    assert all(column(result, "of how many")), "targets, ticks, changes and records were counted"
    assert {what.partition(",")[0] for what in column(result, "what")} == {
        "target",
        "idle tick",
        "churn",
        "the first of all members",
        "1 -> 2 members",
    }


def check_group_processes(result: Result) -> None:
    assert column(result, "processes") == [3]
    assert column(result, "fenced, evicted") == [[0, 0]]
    assert all(rate > 3 for rate in column(result, "log, records/s")), "three members, a heartbeat each 0.67 s"
    assert all(cell["low"] > 0 for cell in column(result, "CPU per member, ms/s"))


def check_startup(result: Result) -> None:
    assert column(result, "records of history") == ["1,000", "10,000"]
    assert all(count(cell) >= 1 for cell in column(result, "messages"))


def check_sweep(result: Result) -> None:
    assert column(result, "violations") == [0] * len(result.rows)
    assert len(set(column(result, "work"))) == 1, "the traces of all contestants are equal"


def check_spark(result: Result) -> None:
    assert set(column(result, "contestant")) == {"marshal", "Python without Kafka"}, (
        "a tiny run has no package of Spark's"
    )
    assert set(column(result, "rows")) == {8_000, 12_800, 80}


def check_stream(result: Result) -> None:
    assert column(result, "contestant") == ["marshal", "without claims"]
    assert column(result, "rows") == [4_000, 4_000], "each contestant has read every message once"
    assert column(result, "longest heartbeat gap / interval")[0] > 0


def check_direct_get(result: Result) -> None:
    questions = {row[0] for row in result.rows if row[1] == "marshal_py"}
    assert {"offset", "time", "last of a key, index", "index build", "scan for a key, no index"} <= questions
    assert all(row[2] == "not run: --tiny" for row in result.rows if row[1] in ("kcat", "console consumer"))
    assert all(cell["median"] > 0 for cell in column(result, "result") if cell != "not run: --tiny")


def check_threads(result: Result) -> None:
    for brokers, connect, consumer, left in result.rows:
        assert connect <= 3 * brokers + 12
        assert consumer <= brokers + 4
        assert left == 0


def check_policies(result: Result) -> None:
    assert {"target, balanced", "target, blocks", "target, pinned"} <= set(column(result, "what"))
    assert min(cell["median"] for cell in column(result, "ms")) > 0


def check_process(result: Result) -> None:
    assert column(result, "order kept") == [True] * 7 + [None] * 3, "the last ones are no consumers, or keep no journal"
    assert all(rate > 0 for rate in column(result, "messages/s"))


def check_parallel(result: Result) -> None:
    of = dict(zip(column(result, "contestant"), column(result, "out of order"), strict=True))
    assert [of[name] for name in of if name.startswith("process, ")] == [0, 0]
    assert of["share group, pool of threads"] > 0, "the judge sees what has no order"
    assert column(result, "lost")[:2] == [0, 0]
    assert all(rate > 0 for rate in column(result, "messages/s"))


def lines(text: str) -> list[Line]:
    split = [each.split() for each in text.split(", ")]
    return [Line(what == "end", int(key), int(offset), float(at)) for at, (what, key, offset) in enumerate(split)]


def test_the_journal_of_parallel_handlers_is_judged() -> None:
    first = lines("begin 1 0, begin 1 1, end 1 0, begin 2 2, end 1 1, end 2 2")
    second = lines("begin 2 2, end 2 2, begin 3 4, end 3 4, begin 3 3, end 3 3")
    assert judge([first, second], 6)[1:] == (2, 1, 1), "1 began beside 0, 3 ended after 4; 2 ended twice; 5 is lost"


def check_peers(result: Result) -> None:
    assert column(result, "contestant") == ["marshal_py", "aiokafka"]
    assert column(result, "lost") == [0, 0]
    assert all(rate > 0 for rate in column(result, "messages/s"))
    for figures in result.raw["figures"]:
        assert figures["lowest_s"] > 0
        assert figures["join_ms"] > 0


MS = 1_000_000


def test_the_journals_of_peers_are_judged() -> None:
    produced = {0: [0, 10 * MS, 20 * MS, 30 * MS], 1: [5 * MS]}
    deliveries = {
        0: [Delivery(1 * MS, 0, 1), Delivery(50 * MS, 1, 2), Delivery(70 * MS, 1, 1), Delivery(51 * MS, 2, 2)]
    }
    assert longest_wait_ms(produced, deliveries, Span(0, 99 * MS)) == 40, "the first delivery counts, in any order"
    assert longest_wait_ms(produced, deliveries, Span(15 * MS, 99 * MS)) == 31, "of what was produced in the span"
    assert repeated(deliveries) == 1
    assert lost(produced, deliveries) == 2, "offset 3, and the only message of partition 1"


def test_peers_are_shown_as_a_table_and_as_a_picture() -> None:
    rows = [
        Figures(
            "marshal_py", "interval 2 s", True, 219_014, 0.301, failover_s=3.7, lowest_s=1.9, join_ms=13, leave_ms=12
        ),
        Figures("KIP-848", "session 45 s", False, failover_s=44.3),
    ]
    head, _, first, second = markdown(rows).splitlines()
    assert len({line.count("|") for line in (head, first, second)}) == 1
    assert first.startswith("| marshal_py | 219,014 | 3.70 (interval 2 s) | 1.90 (interval 1 s) | – | 0 | 0.3 | 13 |")
    assert second.startswith("| KIP-848 | – | 44.3 (session 45 s) | – |")
    drawn = ElementTree.fromstring(picture(rows, "kill -9 & <join>"))
    circles = list(drawn.iter("{http://www.w3.org/2000/svg}circle"))
    assert len(circles) == 6, "what was not measured has no dot"
    fail_over = [float(circle.attrib["cx"]) for circle in circles[:3]]
    assert fail_over[1] < fail_over[0] < fail_over[2], "1.9 s, 3.7 s, 44.3 s from left to right"
    assert "prefers-color-scheme:dark" in picture(rows, "")


def check_operator(result: Result) -> None:
    commands = [str(cell).split()[0] for cell in column(result, "command")]
    assert {"--help", "state", "explain", "groups", "doctor", "check", "top", "top,", "exporter,"} <= set(commands)


CHECKS = {
    "peers": check_peers,
    "parallel": check_parallel,
    "process": check_process,
    "direct_get": check_direct_get,
    "startup": check_startup,
    "join": check_moves,
    "leave": check_moves,
    "rewind": check_rewind,
    "takeover": check_takeover,
    "backlog": check_backlog,
    "claims": check_claims,
    "traffic": check_traffic,
    "memory": check_memory,
    "throughput": check_throughput,
    "latency": check_latency,
    "event_loop": check_event_loop,
    "fold": check_fold,
    "policies": check_policies,
    "scale": check_scale,
    "group_processes": check_group_processes,
    "threads": check_threads,
    "races": check_races,
    "operator": check_operator,
    "sweep": check_sweep,
    "stream": check_stream,
    "spark": check_spark,
}


def count(cell: str) -> int:
    """The number at the start of a cell of work."""
    return int(cell.partition(" ")[0].replace(",", ""))


def test_a_benchmark_that_fails_does_not_hide_the_others(
    environment: BenchEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(environment: BenchEnvironment, tiny: bool) -> Result:
        raise RuntimeError("planted")

    monkeypatch.setattr("bench.claims.run", fail)
    monkeypatch.setattr("bench.fold.run", lambda environment, tiny: Result("fold", ["a"], [[1]], []))
    results, failed = measure(environment, ["claims", "fold"], tiny=True)
    assert failed == ["claims"]
    assert [result["name"] for result in results] == ["fold"]


def test_machine_and_versions_are_named(environment: BenchEnvironment) -> None:
    assert {"date", "cores", "processor"} <= set(machine())
    assert {"marshal_py", "Python", "confluent-kafka", "librdkafka", "Kafka", "aiokafka"} <= set(versions(environment))


def test_statistics() -> None:
    assert spread([3, 1, 2]) == {"n": 3, "median": 2, "p99": 3, "low": 1, "high": 3}
    assert spread([]) is None
    assert percentile(range(1, 1001), 0.99) == 990
    assert percentile([5.0], 0.99) == 5.0
    assert ratio([4, 6], [2]) == 2.5
    assert ratio([1], [0]) is None
    assert cell_text(spread([1, 2, 3])) == "2.00 (1.00 – 3.00)"
    assert cell_text(None) == "–"


def test_work_shows_what_was_read() -> None:
    first, second = Work(), Work()
    for partition, offset in ((0, 1), (1, 0)):
        first.add(partition, offset)
        second.add(partition, offset + 1)
    assert str(first).startswith("2 #")
    assert str(first) != str(second)
