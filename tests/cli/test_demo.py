"""The demo as a user runs it, and its judge on made-up runs. Asserts promises, never times."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import threading
import uuid
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from marshal_py.cli.demo.scenario import View, picture
from marshal_py.cli.demo.verdict import Judgement, Milestones, Totals, judge, sentence
from marshal_py.cli.demo.worker import Entry
from tests.cli.shell import DEADLINE_S, MODULE, REPOSITORY, Shell, wait_until
from tests.support.marked_processes import witnesses
from tests.support.timeline_page import picture_in

KEYS = [
    "produced",
    "handled",
    "lost",
    "redelivered",
    "doubled",
    "dropped",
    "failover_s",
    "join_gap_s",
    "moved_on_join",
    "delivery",
    "seconds",
    "ok",
]


# --- whole runs


def environment() -> dict[str, str]:
    return {name: value for name, value in Shell("").environment().items() if name != "MARSHAL_BOOTSTRAP_SERVERS"}


def test_the_demo_loses_nothing_at_least_once(tmp_path: Path) -> None:
    """test_examples.py runs the at-most-once demo, which is the example in the help text, in `make proof`."""
    done = subprocess.run(
        [*MODULE, "demo", "--seconds", "12", "--json", "--html", str(tmp_path / "timeline.html")],
        text=True,
        timeout=2 * DEADLINE_S,
        env=environment(),
        capture_output=True,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == KEYS
    assert result["delivery"] == "at_least_once"
    assert result["ok"] is True
    assert "killed by SIGKILL" in done.stderr
    assert result["lost"] == result["doubled"] == result["dropped"] == 0
    assert result["handled"] == result["produced"] != 0
    drawn = picture_in((tmp_path / "timeline.html").read_text(encoding="utf-8"))
    assert (drawn["group"], len(drawn["lanes"])) == ("demo", 12)


def test_a_timeline_replaces_no_file_unasked(tmp_path: Path) -> None:
    file = tmp_path / "mine.html"
    file.write_text("mine", encoding="utf-8")
    command = [*MODULE, "demo", "--html", str(file)]
    done = subprocess.run(
        command, text=True, timeout=DEADLINE_S, env=environment(), capture_output=True, cwd=REPOSITORY
    )
    assert (done.returncode, file.read_text(encoding="utf-8")) == (1, "mine")
    assert "--force" in done.stderr


@pytest.mark.parametrize(("number", "options"), [(signal.SIGINT, ["--last-will"]), (signal.SIGKILL, [])])
def test_a_demo_that_ends_early_leaves_no_process(number: signal.Signals, options: list[str]) -> None:
    """On ctrl-C it ends its children; when it is killed itself, they notice and end. Their witnesses end with them."""
    mark = f"MARSHAL_TEST={uuid.uuid4().hex}"
    demo = subprocess.Popen(
        [*MODULE, "demo", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | dict([mark.split("=")]),
        cwd=REPOSITORY,
    )
    assert demo.stdout is not None
    alarm = threading.Timer(DEADLINE_S, demo.kill)  # otherwise a demo that prints nothing would block the read below
    alarm.start()
    pids = []
    for line in demo.stdout:
        pids += [int(found) for found in re.findall(r"starts \(pid (\d+)\)", line)]
        if "the group is complete" in line:
            break
    if options and Path("/proc").exists():
        wait_until(lambda: len(witnesses(mark)) == 3, "a witness for each consumer")
        pids += witnesses(mark)
    demo.send_signal(number)
    demo.communicate(timeout=DEADLINE_S)
    alarm.cancel()
    assert len(pids) >= 3
    wait_until(lambda: not any(map(is_running, pids)), "the end of the demo's processes")


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie: in a container without an init, orphans stay zombies."""
    if Path("/proc/self/stat").exists():
        stat = Path(f"/proc/{pid}/stat")
        try:
            return stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- the judge


def totals_of(*entries: tuple[str, Entry]) -> Totals:
    totals = Totals(2)
    for worker, entry in entries:
        totals.add(worker, entry)
    return totals


A, B, C = "consumer-1", "consumer-2", "consumer-4"  # the second one is killed, the fourth one joins
KEPT_RUN = (
    ("p", Entry("written", 0.0, 0, 0)),
    ("p", Entry("written", 0.0, 0, 1)),
    ("p", Entry("written", 0.0, 1, 0)),
    (B, Entry("claimed", 0.0, 0, 10)),
    (A, Entry("claimed", 0.0, 1, 11)),
    (B, Entry("delivered", 1.0, 0, 0)),
    (A, Entry("delivered", 1.0, 1, 0)),
    (A, Entry("claimed", 4.0, 0, 12)),
    (A, Entry("delivered", 5.5, 0, 1)),
    (C, Entry("claimed", 7.0, 1, 13)),
    (A, Entry("lost", 7.0, 1, text="hand-over")),
)
MILESTONES = Milestones(killed=2.0, joiner_started=6.0, production_ended=9.0)
ENDS = {0: 2, 1: 1}


def judged(*more: tuple[str, Entry], ends: dict[int, int] = ENDS, delivery: str = "at_least_once") -> Judgement:
    return judge(totals_of(*KEPT_RUN, *more), ends, MILESTONES, delivery, 10.04)


def test_a_run_that_keeps_its_promise_is_ok() -> None:
    assert list(msgspec.to_builtins(judged()).values()) == [3, 3, 0, 0, 0, 0, 4.5, None, 1, "at_least_once", 10.0, True]


def test_a_message_that_nobody_got_is_lost_or_dropped() -> None:
    assert (judged(ends={0: 2, 1: 2}).lost, judged(ends={0: 2, 1: 2}).ok) == (1, False)
    once = judged(ends={0: 2, 1: 2}, delivery="at_most_once")
    assert (once.lost, once.dropped, once.ok) == (0, 1, True)


def test_an_acknowledged_message_that_the_topic_does_not_have_is_lost() -> None:
    assert judged(("p", Entry("written", 0.0, 1, 7))).lost == 1


def test_a_second_delivery_is_redelivered_or_doubled() -> None:
    again = (A, Entry("delivered", 6.0, 0, 0))
    assert (judged(again).redelivered, judged(again).doubled, judged(again).ok) == (1, 0, True)
    once = judged(again, delivery="at_most_once")
    assert (once.redelivered, once.doubled, once.ok) == (0, 1, False)


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_a_message_from_nowhere_breaks_it(delivery: str) -> None:
    assert not judged((C, Entry("delivered", 8.0, 1, 5)), delivery=delivery).ok


def test_times_and_moves_come_from_what_was_told() -> None:
    result = judged((C, Entry("delivered", 6.75, 1, 1)), ends={0: 2, 1: 2})
    assert (result.failover_s, result.join_gap_s, result.moved_on_join) == (4.5, 0.75, 1)


def test_the_last_line_says_whether_the_promise_was_kept() -> None:
    assert sentence(judged()).startswith("Kept: no message lost. 3 produced, 3 handled, 0 lost")
    assert sentence(judged(ends={0: 9})).startswith("BROKEN: no message lost. ")


# --- what is shown


def test_the_picture_names_the_owner_of_each_partition() -> None:
    totals = totals_of((A, Entry("claimed", 0.0, 0, 10)), ("p", Entry("written", 0.0, 1, 0)))
    assert [line.split() for line in picture(totals).plain.splitlines()] == [
        ["partition", "0", "1"],
        ["consumer", "1", "-"],
        ["produced", "1", "handled", "0", "lag", "1", "consumer-1:1"],
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_terminal_is_given_back(terminal: bool) -> None:
    """Also on ctrl-C: the cursor is shown again. Where there is no terminal, no byte is for one."""
    out = io.StringIO()
    with suppress(KeyboardInterrupt), View(Console(file=out, force_terminal=terminal)) as view:
        view.say("begins")
        view.draw(totals_of())
        raise KeyboardInterrupt
    shown = out.getvalue()
    assert "begins" in shown
    assert (shown.count("\x1b[?25l"), shown.count("\x1b[?25h"), "\x1b" in shown) == (terminal, terminal, terminal)
