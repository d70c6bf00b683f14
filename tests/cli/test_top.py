"""`marshal top`: what keys do, what is drawn, and the whole in a terminal, in a pipe, and of the past."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from marshal_py.admin.views.group_info import Check, PauseInfo
from marshal_py.cli.options import CommonOptions, ReadOptions
from marshal_py.cli.terminal import cut
from marshal_py.cli.top import _Top, picture
from marshal_py.cli.top.picture import Frame, Order, Rows, Screen, Size, Trends, press, wrapped
from marshal_py.cli.top.source import Seen, Source
from marshal_py.client.marshal import connect
from marshal_py.errors import ClusterUnreachable
from marshal_py.log.observer import Observer
from marshal_py.protocol.wire.identity import TopicPartition
from marshal_py.protocol.wire.records import Heartbeat, Leave
from marshal_py.transport.clock import SystemClock
from tests.cli.shell import DEADLINE_S, MODULE, Shell, wait_until
from tests.support.healths import health, member, partition
from tests.support.terminal import CTRL_C, CTRL_Z, Terminal
from tests.support.written_log import WrittenLog

MARSHAL = shlex.join(MODULE)
SMALL, LARGE = Size(80, 24), Size(200, 50)
NOW_MS = 1_764_165_909_000  # 2025-11-26 14:05:09
NOW, BEGIN = Frame(NOW_MS), Screen()
SILENT = Check("silent consumer", "fail", "no sign of life of 'worker-2' for 12 s", "start one")
PAUSE = PauseInfo(7, 60.0, "ops", "deploy", 34.0)
PARTITIONS = (
    *(partition("orders", number, 1 + number % 2) for number in range(12)),
    partition("payments", 0, None, lag=5),
    partition("payments", 1, None, parked="recreated"),
    partition("payments", 2, 2, lag=900, oldest_s=75.0, in_flight=3),
)


def rows(*groups: Any, **more: Any) -> Rows:
    return Rows(Trends().read(groups, NOW_MS), **more)


def world(**more: Any) -> Rows:
    """Three groups; one has two members and fifteen partitions."""
    silent = health(
        "billing",
        level="fail",
        findings=(SILENT,),
        notices=(f"{SILENT.found}; {SILENT.advice}",),
        causes={"silent": 1},
        **{"sessions": 2, "fresh": 1, "stale": 1, "owned": 13, "free": 1, "parked": 1, "lag": 1_234_567},
        oldest_s=75.0,
        partitions=PARTITIONS,
    )
    paused = health("ship", level="warn", causes={"paused": 1}, pause=PAUSE, sessions=1, fresh=1, free=6, lag=40)
    members = (member(1), member(2, state="stale", last_sign_s=12.0, claims=("payments:2",)))
    return rows(silent, paused, health("track", sessions=3, fresh=3, owned=100), members=members, **more)


def shown(screen: Screen, rows: Rows, size: Size = SMALL, frame: Frame = NOW) -> list[str]:
    """Returns the lines that a terminal shows, without the empty ones."""
    lines = [line.plain for line in cut(picture.draw(screen, rows, frame, size), *size)]
    assert len(lines) == size.lines
    assert {len(line) for line in lines} == {size.columns}
    return [line.rstrip() for line in lines if line.strip()]


def pressed(keys: Sequence[str], rows: Rows, screen: Screen = BEGIN, size: Size = SMALL) -> Screen:
    for key in keys:
        screen, _ = press(screen, key, rows, size)
    return screen


# --- pictures


def test_groups() -> None:
    assert shown(Screen(), world()) == [
        "marshal top 14:05:09Z  3 groups, 2 in trouble, by trouble",
        "GROUP                      STATE  MEMB OWNED FREE PARK    LAG  LAG/S ZERO OLDEST",
        "billing                   silent   1+1    13    1    1   1.2M      -    -    75s",
        "ship                      paused     1     0    6    0     40      -    -      -",
        "track                         ok     3   100    0    0      0      -   0s      -",
        "no sign of life of 'worker-2' for 12 s; start one",
        "arrows choose  Enter open  s sort  / filter  Space freeze  ? help  q quit",
    ]
    wide = shown(Screen(group="ship"), world(), LARGE)
    assert wide[1].split()[-4:] == ["PAUSE", "ENDS", "IN", "WHY"]
    assert wide[2].endswith("  no sign of life of 'worker-2' for 12 s; start one")
    assert " 34s" in wide[3]


def test_one_group() -> None:
    assert shown(Screen(view="group", group="billing", tp=TopicPartition("payments", 2)), world()) == [
        "marshal top 14:05:09Z  3 groups, 2 in trouble",
        "billing  silent  13 owned, 1 free, 1 parked",
        "lag 1.2M (-/s, 0 in -); oldest 75s; read 0/s; again -/s, dead -/s",
        "no sign of life of 'worker-2' for 12 s; start one",
        "  MEMBER                           STATE    LAST SIGN  OWNS  WITNESS",
        "a worker-1                         fresh           0s     0  -",
        "b worker-2                         stale          12s     1  -",
        "orders",
        " 0a   1b!  2a   3b!  4a   5b!  6a   7b!  8a   9b! 10a  11b!",
        "payments",
        " 0-   1#   2b!",
        "payments:2  worker-2 (session 2), at 100, lag 900, 0/s, 3 in flight, oldest 75s",
        "arrows choose  Enter explain  Esc back  / filter  ? help  q quit",
    ]
    assert "paused  0 owned, 6 free, 0 parked, the pause ends in 34s" in "".join(
        shown(Screen(view="group", group="ship"), world())
    )
    assert shown(Screen(view="group", group="gone"), world())[1] == "group 'gone' is gone"


@pytest.mark.parametrize("view", ["groups", "group"])
def test_the_way_out_is_shown_where_there_is_room(view: str) -> None:
    """It stands behind the cause, and a terminal of 80 columns has few of either in four lines."""
    parked = rows(health("ship", level="fail", notices=("a long cause, " * 40 + "the way out",)))
    assert "the way out" in " ".join(shown(Screen(view=view, group="ship"), parked))
    crowd = rows(*parked.groups, *(health(f"track-{number}") for number in range(30)))
    if view == "groups":
        assert "the way out" not in " ".join(shown(Screen(), crowd))


@pytest.mark.parametrize("size", [SMALL, LARGE, Size(20, 5), Size(300, 12)])
def test_many_groups_and_partitions_fit_into_any_terminal(size: Size) -> None:
    """What is under the cursor is in the picture."""
    many = tuple(partition("clicks", number, number % 60) for number in range(1_000))
    crowd = rows(
        *(health(f"group-{number:03}", partitions=many if number == 321 else ()) for number in range(500)),
        members=tuple(map(member, range(60))),
    )
    for keys in ([], ["end"], ["down"] * 30, ["page down", "page down", "up"]):
        screen = pressed(keys, crowd, size=size)
        assert size.lines < 6 or any(
            line.startswith((screen.group or "group-000")[:4]) for line in shown(screen, crowd, size)[2:]
        )
    for keys in ([], ["end"], ["down"] * 5 + ["right"], ["page down", "left"]):
        screen = pressed(keys, crowd, Screen(view="group", group="group-321"), size)
        lines = shown(screen, crowd, size)
        number = 0 if screen.tp is None else screen.tp.partition
        assert size.lines < 20 or f" {number:>3}{picture.LETTERS[number % 60 % 52]}" in "".join(
            f" {line}" for line in lines
        )
    for other in (Screen(help=True), Screen(view="partition"), Screen(asked=Order("pause", "x", text="Pause?"))):
        shown(other, crowd, size)


def test_names_cannot_command_the_terminal() -> None:
    evil = rows(health("a\x1b[2Jb", notices=("c\x07d",), partitions=(partition("t\x9b", 0, 1),)), members=(member(1),))
    for screen in (Screen(), Screen(view="group", group="a\x1b[2Jb")):
        text = "".join(shown(screen, evil))
        assert not {*text} & {"\x1b", "\x07", "\x9b"}
        assert r"a\x1b[2Jb" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0, "0"), (12.34, "12.3"), (99_999, "99999"), (123_456, "123k"), (1_234_567, "1.2M"), (2e11, "200G")],
)
def test_numbers_have_at_most_six_columns(value: float | None, text: str) -> None:
    assert picture.count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0, "0s"), (119, "119s"), (120, "2m"), (7_200, "2h"), (1e9, "999d")]
)
def test_times_have_at_most_four_columns(seconds: float | None, text: str) -> None:
    assert picture.age(seconds) == text


def test_stale_rows_and_notes_are_said() -> None:
    frame = Frame(NOW_MS, "stale since 14:05:09: no answer", "group 'billing' continues")
    lines = shown(Screen(frozen=True), world(), frame=frame)
    assert lines[0] == "marshal top 14:05:09Z  stale since 14:05:09: no answer  frozen  3 groups, 2 in …"
    assert lines[-1] == "group 'billing' continues"


# --- keys


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], Screen()),
        (["down"], Screen(group="ship")),
        (["j", "j", "j", "k"], Screen(group="ship")),
        (["end"], Screen(group="track")),
        (["s"], Screen(sort="oldest")),
        (["s"] * 5, Screen()),
        ([" "], Screen(frozen=True)),
        (["?", "x"], Screen()),
        (["/", "s", "q", "backspace", "h", "enter"], Screen(wanted="sh")),
        (["/", "s", "h", "enter", "esc"], Screen()),
        (["/", "s", "esc"], Screen()),
        (["enter"], Screen(view="group", group="billing")),
        (["enter", "right"], Screen(view="group", group="billing", tp=TopicPartition("orders", 1))),
        (["enter", "l", "down"], Screen(view="group", group="billing", tp=TopicPartition("payments", 1))),
        (["enter", "end"], Screen(view="group", group="billing", tp=TopicPartition("payments", 2))),
        (["enter", "enter"], Screen(view="partition", group="billing", tp=TopicPartition("orders", 0))),
        (["enter", "enter", "esc", "backspace"], Screen(group="billing")),
        (["x", "é", "f5"], Screen()),
        (["left"], Screen()),  # the present has no earlier
    ],
)
def test_keys(keys: list[str], expected: Screen) -> None:
    assert pressed(keys, world()) == expected


def test_the_cursor_stays_on_its_group_when_the_order_changes() -> None:
    screen = pressed(["down"], world())
    better = rows(health("ship"), health("billing", level="fail"))
    assert pressed([], better, screen).group == "ship"
    assert press(screen, "enter", better, SMALL)[0].group == "ship"


def test_a_filter_chooses_groups_by_name_and_partitions_by_owner() -> None:
    assert [line.split()[0] for line in shown(Screen(wanted="r"), world())[2:3]] == ["track"]
    assert "no group has 'nobody' in its name" in shown(Screen(wanted="nobody"), world())
    assert " 1b!  3b!" in "".join(shown(Screen(view="group", group="billing", wanted="worker-2"), world()))


def test_changes_are_asked_for_and_need_write() -> None:
    assert press(Screen(), "p", world(), SMALL)[1] == Order("refused", text="top changes nothing without --write")
    writing = world(writes=True)
    asked, order = press(Screen(), "p", writing, SMALL)
    assert (order, shown(asked, writing)[-1]) == (None, "Pause group 'billing'? y/n")
    assert press(asked, "n", writing, SMALL) == (Screen(), None)
    _, order = press(asked, "y", writing, SMALL)
    assert order is not None
    assert (order.kind, order.group) == ("pause", "billing")
    assert pressed(["r"], writing).asked == Order("resume", "billing", text="End the pause of group 'billing'?")
    _, order = press(Screen(), "d", writing, SMALL)
    assert order is not None
    assert order.kind == "refused"
    asked = pressed(["enter", "d"], writing)
    text = "Step worker-1 (session 1) down in group 'billing'?"
    assert asked.asked == Order("step_down", "billing", session=1, text=text)


def test_time_moves_in_the_past_within_what_there_is() -> None:
    past = world(times_ms=(NOW_MS - 25_000, NOW_MS))
    assert pressed(["left"], past).at_ms == NOW_MS - 10_000
    assert pressed(["left", "left", "left"], past).at_ms == NOW_MS - 25_000
    assert pressed(["{", "right", "]"], past).at_ms == NOW_MS - 5_000
    inside = pressed(["left", "["], past, Screen(view="group", group="billing", tp=TopicPartition("orders", 1)))
    assert (inside.at_ms, inside.tp) == (NOW_MS - 10_000, TopicPartition("orders", 0))


def test_an_explanation_is_wrapped_and_scrolls() -> None:
    told = world(lines=[f"line {number} " + "x " * 60 for number in range(30)])
    assert len(wrapped(told.lines, SMALL)) == 60
    screen = pressed(["end"], told, Screen(view="partition", group="billing"))
    assert (screen.scroll, shown(screen, told)[-2].strip()[:1]) == (38, "x")
    assert pressed(["home"], told, screen).scroll == 0


# --- the whole


@pytest.fixture
def terminal(shell: Shell) -> Iterator[Terminal]:
    terminal = Terminal(shell.environment({"TERM": "xterm-256color", "NO_COLOR": "1"}))
    yield terminal
    terminal.close()


def test_a_terminal(terminal: Terminal, shell: Shell, billing: str) -> None:
    """Groups, one group, a partition and back; a pause; ctrl-Z; and q, after which all is as it was."""
    settings = {"bootstrap.servers": shell.servers, "log_level": 0}
    with connect(settings, client_id="worker") as marshal, marshal.consumer(billing, ["orders"]) as consumer:
        wait_until(lambda: len(consumer.cached_info().claims) == 4, "it owns all")
        terminal.type(f"{MARSHAL} top --write --interval 0.2\n")
        terminal.wait(billing)
        terminal.type("\r")
        terminal.wait("worker  ")
        terminal.wait("orders:0  worker")
        terminal.type("\r")
        terminal.wait("ClaimingPartition")
        terminal.type("\x7f")
        terminal.wait("orders:0  worker")
        terminal.resize(30, 100)
        terminal.wait("orders:0  worker")
        terminal.type("p")
        terminal.wait(f"Pause group '{billing}'? y/n")
        terminal.type("y")
        terminal.wait(f"group '{billing}' is paused for ")
        terminal.wait("4 free")
        terminal.type("ry")
        terminal.wait(f"group '{billing}' continues")
        terminal.type(CTRL_Z)
        terminal.wait("Stopped")
        terminal.type("fg\n")
        terminal.wait("4 owned")
        terminal.type("q")
        terminal.wait("\x1b[?1049l")
        terminal.type('echo "status=$?"\n')
        terminal.wait("status=0")
    terminal.type(f"{MARSHAL} top {billing}\n")
    terminal.wait("no consumer is there")
    terminal.type(CTRL_C)
    terminal.wait("\x1b[?1049l")
    terminal.type('echo "status=$?"; stty -a | tr "\\n" " "\n')
    terminal.wait("status=0")
    assert " icanon" in terminal.wait("noflsh")


def test_without_a_terminal(shell: Shell, billing: str, tmp_path: Path) -> None:
    """One picture, as a table and as JSON; of a dump with what owners said of the lag, at its end and before it."""
    document = shell.json("top", "--interval", "0.2")
    row = next(one for one in document["groups"] if one["group"] == billing)
    assert (row["lag"], row["sessions"], row["lag_per_second"], len(row["partitions"])) == (0, 0, 0.0, 4)
    header, *lines = shell.run("top", billing, "--once", "--interval", "0.2").stdout.splitlines()
    assert header.split()[:3] == ["group", "state", "memb"]
    assert [line.split()[0] for line in lines] == [billing]
    dump = str(tmp_path / "dump")
    assert shell.run("log", "dump", "-o", dump).exit_code == 0
    now = shell.json("top", "--dump", dump)
    assert [one["group"] for one in now["groups"]] == [billing]
    assert shell.json("top", "--dump", dump, "--at", "2100-01-01") == now
    for command in (("top", "--once"), ("explain", billing, "full:0")):
        before = shell.run(*command, "--dump", dump, "--at", "2020-01-01")
        assert (before.exit_code, "lies before the" in before.stderr) == (1, True), before.stderr


def test_refusals(shell: Shell, billing: str) -> None:
    refused = shell.run("top")
    assert (refused.exit_code, refused.stderr) == (1, "marshal: top needs a terminal; --once prints one picture\n")
    assert "is not in __marshal" in shell.run("top", "nobody", "--once").stderr
    assert "cannot look up times" in shell.run("top", "--once", "--at", "-5m").stderr  # an embedded broker
    assert shell.run("top", "--write", "--once", "--at", "-5m").exit_code == 2


@pytest.mark.parametrize("arguments", [("--once",), ("nobody", "--once"), ("--once", "--at", "-5m")], ids=str)
def test_one_picture_leaves_no_connection(
    shell: Shell, billing: str, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Also where the command fails after it has connected."""
    opened: list[Observer] = []
    closed: list[Observer] = []
    connect, close = CommonOptions.observer, Observer.close

    def observer(self: CommonOptions) -> Observer:
        opened.append(connect(self))
        return opened[-1]

    def closes(self: Observer) -> None:
        closed.append(self)
        close(self)

    monkeypatch.setattr(CommonOptions, "observer", observer)
    monkeypatch.setattr(Observer, "close", closes)
    shell.run("top", *arguments, "--interval", "0.2")
    assert opened
    assert closed == opened


def test_a_group_without_consumers_is_idle_only_if_nothing_waits() -> None:
    rows = Trends().read((health("known"), health("past", lag=None)), 0)
    assert [picture.word(row) for row in rows] == ["idle", "no member"]
    assert "nothing is wrong" in picture.why(rows[0])
    assert picture.why(rows[1]) == "'past': no consumer is there, and whether messages wait is not known"


@pytest.mark.parametrize("left", [True, False])
def test_the_past_says_what_waited(left: bool) -> None:
    """The cluster knows the ends of that time, also where no owner wrote them."""
    now_ms = SystemClock().now().wall_ms
    log = WrittenLog(now_ms)
    session, _ = log.own("billing", "one", "orders", 1)
    log.fill("orders", 0, 7)
    log.now_ms += 60_000
    if left:
        log.write(Leave(session, "stopped"), "billing")
    else:
        log.write(Heartbeat(session, 1, ()), "billing")
    source = Source(log.observer, None, log.now_ms)
    (billing,) = source.look().groups
    word = "no consumer" if left else "hangs"
    assert (billing.lag, billing.sessions, picture.word(billing)) == (7, int(not left), word)
    assert ("7 messages wait" in picture.why(billing)) == left


class _Woken:
    """A terminal of which nothing is wanted but that it is woken."""

    def wake(self) -> None: ...


def test_an_explanation_is_that_of_the_partition_chosen_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes late is of another question. An error is an answer, too."""
    late, answered = threading.Event(), threading.Event()

    def sentences(_options: Any, _group: str, tp: TopicPartition, _at_ms: int | None) -> list[str]:
        if tp.partition == 2:
            raise ClusterUnreachable("b:9092", "an answer", "cut")
        if tp.partition == 0:
            assert late.wait(DEADLINE_S)
        return [f"{tp} explained"]

    def wake(_terminal: _Woken) -> None:
        answered.set()

    monkeypatch.setattr("marshal_py.cli.explain.sentences", sentences)
    monkeypatch.setattr(_Woken, "wake", wake)
    source = Source(WrittenLog(NOW_MS).observer, None, NOW_MS)
    top = _Top(ReadOptions(), source, cast(Any, _Woken()), 1.0, False, None)

    def explain(partition: int) -> None:
        answered.clear()
        top._obey(Order("explain", "billing", TopicPartition("orders", partition)), BEGIN)

    explain(0)
    explain(1)
    assert answered.wait(DEADLINE_S)
    answered.clear()
    late.set()
    assert answered.wait(DEADLINE_S)
    assert top._rows().lines == ["orders:1 explained"]
    explain(2)
    assert answered.wait(DEADLINE_S)
    assert "cut" in top._rows().lines[0]


def test_the_log_of_the_library_stays_off_the_screen() -> None:
    """In a process of its own: here pytest takes what nobody else does."""
    program = (
        "import logging\nfrom marshal_py.cli.terminal import no_log_lines\nlogger = logging.getLogger('marshal_py')\n"
        "with no_log_lines():\n    logger.warning('during')\nlogger.warning('after')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "after\n"


def test_a_picture_of_the_past_comes_once_the_cluster_is_back() -> None:
    now_ms, seen = SystemClock().now().wall_ms, list[Seen]()
    log = WrittenLog(now_ms)
    log.own("billing", "one", "orders", 2)
    source = Source(log.observer, None, now_ms)
    source.look()
    log.transport.connection.cut = True
    source.at_ms = now_ms - 5_000

    def show(found: Seen) -> None:
        seen.append(found)
        log.transport.connection.cut = False

    source.start(0.01, show)
    try:
        wait_until(lambda: len(seen) > 1, "a picture after the one that failed")
    finally:
        source.close()
    assert [bool(found.problem) for found in seen] == [True, False]
