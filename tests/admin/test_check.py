"""What `marshal check` says of a group, and in which forms. Pure; tests/kafka/test_check.py has the situations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from marshal_py.admin.views import diagnosis
from marshal_py.admin.views.diagnosis import Limits
from marshal_py.admin.views.group_info import Check, GroupCheck, GroupHealth, PartitionHealth
from marshal_py.cli.doctor import FORMS
from tests.support.command_line import invoke
from tests.support.healths import health as group
from tests.support.healths import partition

NO_LIMITS = Limits()


def row(number: int, position: int | None = 10, end: int | None = 10, **given: Any) -> PartitionHealth:
    lag = None
    if position is not None and end is not None and position <= end and not given.get("parked"):
        lag = end - position
    return partition("orders", number, 1, **{"position": position, "end": end, "lag": lag, **given})


def health(*rows: PartitionHealth, sessions: int = 1, **given: Any) -> GroupHealth:
    """A group with these partitions."""
    lags = [one.lag for one in rows if one.lag is not None]
    figures = {
        "sessions": sessions,
        "owned": len(rows),
        "lag": sum(lags) if lags else None,
        "oldest_s": max((one.oldest_s for one in rows if one.oldest_s is not None), default=None),
        "retention_s": min((one.retention_s for one in rows if one.retention_s is not None), default=None),
        "partitions": rows,
    }
    return group("billing", **{**figures, **given})


def said(found: GroupCheck) -> dict[str, str]:
    return {one.name: one.level for one in found.checks}


def test_a_group_that_works_is_ok() -> None:
    found = diagnosis.check(health(row(0), row(1, 7)), Limits(3, 60))
    assert (found.level, found.exit_code, found.lag) == ("unknown", 3, 3), "the age of the three is not known"
    found = diagnosis.check(health(row(0), row(1, 7, oldest_s=59.0)), Limits(3, 60))
    assert (found.level, found.exit_code, found.checks) == ("ok", 0, ())


def test_the_worst_finding_decides() -> None:
    warned, failed = Check("paused", "warn", "it is paused"), Check("silent consumer", "fail", "silent")
    assert diagnosis.check(health(row(0), findings=(warned,)), NO_LIMITS).exit_code == 1
    unknown = diagnosis.check(health(row(0, end=None), findings=(warned,)), Limits(lag=1))
    assert (unknown.exit_code, [one.name for one in unknown.checks]) == (3, ["lag", "paused"])
    found = diagnosis.check(health(row(0, end=None), findings=(warned, failed)), Limits(lag=1))
    assert (found.level, found.exit_code, found.checks[0]) == ("fail", 2, failed)


def test_limits() -> None:
    found = diagnosis.check(health(row(0, 5, oldest_s=61.0), row(1)), Limits(4, 60))
    assert said(found) == {"lag": "fail", "age": "fail"}
    assert said(diagnosis.check(health(row(0, 5, oldest_s=60.0)), Limits(5, 60))) == {}
    partly = health(row(0, 5, oldest_s=61.0), row(1, None))
    assert said(diagnosis.check(partly, Limits(4, 60))) == {"lag": "fail", "age": "fail"}, "what is known suffices"
    assert said(diagnosis.check(partly, Limits(5, 61))) == {"lag": "unknown", "age": "unknown"}
    assert said(diagnosis.check(partly, NO_LIMITS)) == {}


@pytest.mark.parametrize(
    ("given", "in_cluster", "why"),
    [
        ({"end": None}, True, "orders:3: the cluster does not say where it ends"),
        ({"end": None}, False, "a dump does not say where topics end"),
        ({"position": None}, True, "it has no position yet"),
        ({"position": 11}, True, "its position 11 is beyond its end 10"),
        ({"parked": "DataTopicRecreated"}, True, "the records at its position were lost (DataTopicRecreated)"),
        ({"lag": None}, True, "the topic was created again"),
    ],
)
def test_what_cannot_be_compared_says_why(given: dict[str, Any], in_cluster: bool, why: str) -> None:
    (one,) = diagnosis.check(health(row(3, **given)), Limits(lag=0), in_cluster).checks
    assert (one.level, why in one.found) == ("unknown", True), one


def test_nobody_is_there() -> None:
    assert said(diagnosis.check(health(row(0), sessions=0), NO_LIMITS)) == {"no consumer": "warn"}
    causes = {"no_consumer": 1}
    told = (Check("no consumer", "fail", "5 messages wait"),)
    found = diagnosis.check(health(row(0, 5), findings=told, sessions=0, causes=causes), NO_LIMITS)
    assert found.checks == told
    assert said(diagnosis.check(health(deleted=True, sessions=0), Limits(1, 1))) == {}


@pytest.mark.parametrize(
    ("age_s", "left_s", "level"),
    [(79.0, 21.0, None), (80.0, 20.0, "warn"), (95.0, 5.0, "fail"), (None, 0.0, "fail"), (3.0, None, None)],
)
def test_retention_comes_near(age_s: float | None, left_s: float | None, level: str | None) -> None:
    here = row(1, 5, oldest_s=age_s, retention_s=left_s, deleted=int(left_s == 0))
    found = list(diagnosis.of_retention("billing", (row(0), here)))
    assert [(one.name, one.level) for one in found] == ([] if level is None else [("retention near", level)])
    if level is not None:
        assert ("has deleted" if left_s == 0 else "soon deletes") in found[0].found
        assert "orders:1" in found[0].found


def test_ordinary_kafka_consumers_of_the_same_group_fail() -> None:
    assert list(diagnosis.of_kafka_consumers("billing", 0)) == []
    (found,) = diagnosis.of_kafka_consumers("billing", 2)
    assert (found.level, found.found.startswith("2 ordinary Kafka consumers")) == ("fail", True)
    assert found.advice.endswith("; if the group has gone back to them: marshal groups rm billing")
    (found,) = diagnosis.of_kafka_consumers("billing", 2, early=True)
    assert (found.level, "groups rm" in found.advice) == ("warn", False), "there may be nothing to delete"


# --- forms

FOUND = diagnosis.check(
    health(row(0, 3, oldest_s=90.0), findings=(Check("parked partitions", "warn", "2 | 3", "look"),) * 2), Limits(5, 60)
)


def lines(form: str, found: GroupCheck = FOUND) -> list[str]:
    return list(FORMS[form](found, Limits(5, 60)))


def test_text_is_one_line_and_then_the_findings() -> None:
    first, *rest = lines("text")
    figures = "(1 consumers, 1 partitions owned, 0 free, lag 7, oldest message 90 s)"
    assert first == f"CRITICAL billing: lag; age; parked partitions {figures}"
    assert rest[0] == "fail     lag: 'billing': 7 messages wait, more than 5"
    assert rest[2:] == ["warn     parked partitions: 2 | 3  -> look"] * 2
    assert lines("text", diagnosis.check(health(row(0)), NO_LIMITS)) == [
        "OK billing: every partition is consumed (1 consumers, 1 partitions owned, 0 free, lag 0)"
    ]


def test_json_is_the_result() -> None:
    (line,) = lines("json")
    assert msgspec.json.decode(line, type=GroupCheck) == FOUND


def test_nagios_gets_no_exponent() -> None:
    found = msgspec.structs.replace(FOUND, lag=12_345_678, oldest_s=1_234_567.25)
    (line,) = FORMS["nagios"](found, Limits(10_000_001, 2_000_000))
    assert "lag=12345678;;10000001;0 age=1234567.25s;;2000000;0" in line


def test_nagios_is_one_line_with_figures() -> None:
    (line,) = lines("nagios")
    told, figures = line.split(" | ")
    assert told.startswith("MARSHAL CRITICAL billing: lag; age; parked partitions (")
    assert told.endswith("; 2 / 3; 2 / 3"), "what is before the bar holds none"
    assert figures == "lag=7;;5;0 age=90s;;60;0 consumers=1 owned=1 free=0 parked=0"
    (line,) = lines("nagios", diagnosis.checked("a|b", [Check("cluster", "fail", "no")]))
    assert line.startswith("MARSHAL CRITICAL a/b: no | lag=U")
    (line,) = lines("nagios", diagnosis.checked("billing", [Check("cluster", "unknown", "no answer")]))
    assert line == "MARSHAL UNKNOWN billing: no answer | lag=U;;5;0 age=U;;60;0"


def test_prometheus_reads_the_file() -> None:
    named = replace(FOUND, group='a"b\\c')
    families = list(text_string_to_metric_families("\n".join([*lines("prometheus", named), ""])))
    found = {sample.name: sample for family in families for sample in family.samples}
    assert {sample.labels["group"] for sample in found.values()} == {'a"b\\c'}
    assert found["marshal_check_state"].value == 2
    assert (found["marshal_check_lag"].value, found["marshal_check_oldest_unfinished_seconds"].value) == (7, 90)
    (family,) = [family for family in families if family.name == "marshal_check_findings"]
    series = [(one.labels["check"], one.labels["level"], one.value) for one in family.samples]
    assert series == [("lag", "fail", 1), ("age", "fail", 1), ("parked partitions", "warn", 2)], "each series once"
    assert "marshal_check_retention_seconds" not in found, "what is unknown is absent, and not 0"
    idle = lines("prometheus", diagnosis.check(health(row(0)), NO_LIMITS))
    assert 'marshal_check_oldest_unfinished_seconds{group="billing"} 0' in idle


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["billing"], "UNKNOWN billing: Invalid value: name the cluster by "),
        (["billing", "--format", "nagios", "--age", "abc"], "MARSHAL UNKNOWN billing: Invalid value: 'ab"),
        (["billing", "--format=nagios", "--command-config", "none"], "MARSHAL UNKNOWN billing: Invalid "),
        (["billing", "--json", "--lag", "x"], '{"group":"billing","level":"unknown","exit_code":3,'),
        ([], "UNKNOWN ?: Missing argument"),
        (["billing", "--format", "xml"], "UNKNOWN billing: Invalid value: --format takes text"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_unknown(given: list[str], said: str) -> None:
    """The exit code 2 of other commands would page somebody for a group that is well."""
    result = invoke(["check", *given], env={"MARSHAL_BOOTSTRAP_SERVERS": ""})
    assert (result.exit_code, result.stdout[: len(said)]) == (3, said)
    assert invoke(["state", "--lag"], env={"MARSHAL_BOOTSTRAP_SERVERS": ""}).exit_code == 2
