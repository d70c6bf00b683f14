"""`marshal run` around commands that have no consumers: statuses, signals, orphans, process 1."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from marshal_py.cli.app import app
from marshal_py.last_will import connecting
from marshal_py.last_will.runner import Runner, SignalProbe, in_words
from marshal_py.protocol.wire.records import Leave, ReleasingPartition
from marshal_py.transport import bare_producer
from tests.last_will.test_witness import CONSUMER, FakeProducer

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0
RUN = connecting.command("run", "--")


def run(*command: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a command without a terminal, whatever the tests have."""
    words = [*before, *RUN, *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, start_new_session=True)


def close(runner: Runner) -> None:
    for end in (runner._theirs, runner._woken, runner._waker):
        os.close(end)
    runner._ours.close()
    runner._witness.close()


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_it_ends_as_the_command_did(script: str, status: int) -> None:
    assert run("sh", "-c", script).returncode == status


def test_a_command_that_cannot_be_started() -> None:
    """Exit codes of shells: 127 for one that does not exist, 126 for one that is no program."""
    missing, no_program = run("/nonexistent/program"), run("/etc/passwd")
    assert (missing.returncode, no_program.returncode) == (127, 126)
    assert missing.stderr == "marshal run: /nonexistent/program: No such file or directory\n"


def test_a_command_without_a_name_does_not_exist() -> None:
    """An empty variable in an entry point: `marshal run -- "$COMMAND"`."""
    done = run("")
    assert (done.returncode, done.stderr) == (127, "marshal run: '': No such file or directory\n")


def test_it_says_which_signal_ended_the_command() -> None:
    """The shell around it sees an exit status. Who ends a program on purpose knows that."""
    assert run("sh", "-c", "kill -SEGV $$").stderr == "marshal run: sh ended by signal 11 (SIGSEGV)\n"
    assert run("sh", "-c", "kill -TERM $$").stderr == ""


@pytest.mark.parametrize("before", [(), ("unshare", "--pid", "--fork")])
def test_a_signal_that_comes_before_the_command_is_started(before: tuple[str, ...]) -> None:
    """It ends `marshal run`, as process 1 too, and nothing is started."""
    script = """
import os, signal
from marshal_py.last_will import connecting
connecting.hold()
os.kill(os.getpid(), signal.SIGTERM)
connecting.become(["echo", "started"])
"""
    words = [*before, sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT, start_new_session=True)
    assert (done.returncode, done.stdout) == (143 if before else -15, "")


def test_the_command_gets_the_signals_that_its_start_held() -> None:
    script = """
import sys
from marshal_py.last_will import connecting
connecting.hold()
connecting.become([sys.executable, "-c", "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)
    assert done.stdout == "set()\n"


class FakeProbe(SignalProbe):
    """A probe without a process: the test says what has gone to the group."""

    def __init__(self) -> None:
        self.pending: set[int] = set()

    def got(self, number: int) -> bool:
        got = number in self.pending
        self.pending.discard(number)
        return got


def passed_on(
    monkeypatch: pytest.MonkeyPatch, signals: list[tuple[float, signal.Signals, bool]], probe: FakeProbe | None = None
) -> list[tuple[int, bool]]:
    """Returns the signals that a runner's loop gets, and whether each is held to have reached the command already.

    `signals`: when each comes, in seconds, and whether it goes to the group.
    """
    runner, coming, clock = Runner(["true"]), iter([*signals, (1_000.0, signal.SIGCHLD, False)]), 0.0

    def sigwait(_: object) -> signal.Signals:
        nonlocal clock
        clock, number, to_group = next(coming)
        if probe is not None and to_group:
            probe.pending.add(number)
        return number

    monkeypatch.setattr(signal, "sigwait", sigwait)
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    runner._status, runner._probe = 0, probe
    runner._listen(frozenset())
    read = os.read(runner._woken, 100)[:-2]
    close(runner)
    return [(number, bool(shared)) for number, shared in zip(read[::2], read[1::2], strict=True)]


def test_two_signals_of_timeout_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` signals its child and then its group. One that comes later is another one."""
    term, usr1 = signal.SIGTERM, signal.SIGUSR1
    signals = [(0.0, term, False), (0.1, term, True), (0.1, usr1, False), (0.1, usr1, False), (1.0, term, False)]
    assert [number for number, _ in passed_on(monkeypatch, signals)] == [term, usr1, usr1, term]


def test_a_skipped_signal_does_not_swallow_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second `kill %1` within 0.3 s is skipped. The third SIGTERM is for this process alone: it is passed on."""
    signals = [(0.0, signal.SIGTERM, True), (0.1, signal.SIGTERM, True), (1.0, signal.SIGTERM, False)]
    assert passed_on(monkeypatch, signals, FakeProbe()) == [(signal.SIGTERM, True), (signal.SIGTERM, False)]


@pytest.mark.parametrize(
    ("number", "waiting", "passed"),
    [
        (signal.SIGCONT, signal.SIGTSTP, False),
        (signal.SIGTSTP, signal.SIGCONT, False),
        (signal.SIGCONT, signal.SIGUSR1, True),
        (signal.SIGUSR1, signal.SIGCONT, True),
    ],
)
def test_ctrl_z_right_after_fg_counts(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, waiting: signal.Signals, passed: bool
) -> None:
    """A stop takes SIGCONT back where it waits, in the probe too, and SIGCONT a stop. The later of the two counts."""
    monkeypatch.setattr(signal, "sigpending", lambda: {waiting})
    assert passed_on(monkeypatch, [(0.0, number, False)], FakeProbe()) == [(number, not passed)]


def test_the_probe_waits_for_no_signal_that_was_taken_back() -> None:
    """SIGCONT takes back the SIGTSTP that the probe has just seen. It answers the next question, too."""
    script = """
import os, signal
from marshal_py.last_will.runner import SignalProbe
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTSTP, signal.SIGUSR1))
sigpending = signal.sigpending
signal.sigpending = lambda: sigpending() | {signal.SIGTSTP}
probe = SignalProbe()
os.killpg(0, signal.SIGUSR1)
print(probe.got(signal.SIGTSTP), probe.got(signal.SIGUSR1), probe.got(signal.SIGUSR1))
"""
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT, start_new_session=True)
    assert done.stdout == "True True False\n", done.stderr


def test_the_command_of_the_package_is_the_same() -> None:
    command = [sys.executable, "-m", "marshal_py.cli", "run", "--", "sh", "-c", "echo out; exit 5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)
    assert (done.returncode, done.stdout) == (5, "out\n")


@pytest.mark.parametrize(
    "words", [["--", "ls", "-d"], ["ls", "-d"], ["--", "ls", "--", "--help"], ["ls", "--", "--help"]]
)
def test_options_of_the_program_are_the_programs(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `env` and `nice`; what begins with `--` says so."""
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _path, command: started.append(command))
    app(["run", *words], standalone_mode=False)
    program = words[1:] if words[0] == "--" else words
    assert started == [connecting.command("run", "--", *program)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_passed_on(number: signal.Signals) -> None:
    script = f"trap 'echo got; exit 9' {number.name.removeprefix('SIG')}; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen([*RUN, "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.read() == "got\n"
    assert process.wait(DEADLINE_S) == 9
    process.stdout.close()


LIMIT = "grep '^Max open files' /proc/$1/limits | tr -s ' ' | cut -d ' ' -f 4,5"


def test_it_takes_all_descriptors_and_leaves_the_command_its_own() -> None:
    """A witness holds some of each process."""
    script = f"set -- $PPID; {LIMIT}; ulimit -Sn"
    outer = f'ulimit -Sn 64; ulimit -Hn 512; {" ".join(RUN)} sh -c "$1"'
    done = subprocess.run(["sh", "-c", outer, "sh", script], capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.stdout == "512 512\n64\n", done.stderr


def test_the_witness_of_one_process_takes_all_descriptors_too() -> None:
    script = f"""
import subprocess
from marshal_py.last_will.connecting import WitnessConnection, start_witness
connection = WitnessConnection(start_witness())
connection.wait({DEADLINE_S})
print(subprocess.check_output(["sh", "-c", {LIMIT!r}, "sh", connection.name.removeprefix("process ")], text=True))
"""
    outer = f'ulimit -Sn 64; ulimit -Hn 512; {sys.executable} -c "$1"'
    words = ["sh", "-c", outer, "sh", script]
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, cwd=ROOT)
    assert done.stdout.split() == ["512", "512"], done.stderr


def test_a_signal_that_comes_while_the_command_is_started_reaches_it() -> None:
    script = """
import os, signal, sys
from marshal_py.last_will.runner import Runner

def fork(fork=os.fork):
    os.kill(os.getpid(), signal.SIGTERM)
    return fork()

os.fork = fork
sys.exit(Runner(["sleep", "30"]).run())
"""
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, timeout=DEADLINE_S, cwd=ROOT).returncode == 128 + signal.SIGTERM


def test_the_command_is_in_a_process_group_of_its_own() -> None:
    """Where there is no terminal (test_terminal.py): what somebody sends to the group of `marshal run` comes once."""
    script = "import os; print(os.getpgrp() == os.getpid())"
    assert run(sys.executable, "-c", script).stdout == "True\n"


def test_the_command_has_the_usual_signal_handling() -> None:
    script = "import signal; print(signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1))"
    assert run(sys.executable, "-c", script).stdout == "0 0\n", "SIG_DFL"


def test_what_the_caller_ignores_stays_ignored() -> None:
    """`nohup marshal run -- COMMAND` means the command."""
    script = "import signal; print(signal.getsignal(signal.SIGHUP).name, signal.getsignal(signal.SIGINT).name)"
    before = ("sh", "-c", "trap '' HUP INT; exec \"$@\"", "sh")
    assert run(sys.executable, "-c", script, before=before).stdout == "SIG_IGN SIG_IGN\n"


def test_as_process_1_it_reaps_orphans() -> None:
    """An orphan of the command becomes a child of process 1; nothing of it is left after its end."""
    script = "(sh -c 'sleep 0.05; exit 4' &) ; sleep 0.5; ps -eo pid,stat,comm; exit 6"
    done = run("sh", "-c", script, before=("unshare", "--pid", "--fork", "--mount-proc"))
    assert done.returncode == 6, done.stderr
    rows = [line.split(None, 2) for line in done.stdout.splitlines()[1:]]
    assert rows[0][0] == "1"
    assert not [row for row in rows if row[1].startswith("Z")], done.stdout


def test_a_process_finds_it_by_the_inherited_socket() -> None:
    script = "from marshal_py.last_will import connecting; print(connecting.connect() is not None)"
    assert run(sys.executable, "-c", script).stdout == "True\n"


def test_a_descriptor_that_means_something_else_now_is_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may have closed what it did not know, and opened a file in its place."""
    assert not connecting.expected(), "the tests do not run under marshal run"
    reader, writer = os.pipe()
    monkeypatch.setenv(connecting.VARIABLE, connecting.describe(reader))
    assert connecting.descriptor() is None, "no socket"
    for value in ("", "x", "5", "5:6", f"{reader}:1:1", "99999:1:1"):
        monkeypatch.setenv(connecting.VARIABLE, value)
        with pytest.raises(connecting.Unusable, match="pass_fds"):
            connecting.connect()
    os.close(reader)
    os.close(writer)


def test_what_was_not_read_before_the_command_ended_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """T19: `marshal run` may be stopped from before the session begins until after the command has died."""
    producer = FakeProducer()
    monkeypatch.setattr(bare_producer, "create", lambda _settings: producer)
    runner = Runner(["never started"])
    fd = runner._theirs
    os.set_inheritable(fd, True)
    script = CONSUMER.replace("socket.socket(fileno=int(sys.argv[1]))", "connecting.connect()")
    child = subprocess.Popen(
        [sys.executable, "-c", "from marshal_py.last_will import connecting\n" + script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(fd,),
        env={**os.environ, connecting.VARIABLE: connecting.describe(fd)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    child.kill()
    child.communicate()
    runner._ours.setblocking(False)
    runner._settle()
    assert [record for _, _, _, record in producer.sent] == [
        ReleasingPartition(7, 9, 100, reason="died", attempts=1),
        Leave(7, "died"),
    ]
    close(runner)


def test_connecting_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `marshal run` that is stopped takes no connections; at some number of them there is no room for more."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    monkeypatch.setenv(connecting.VARIABLE, connecting.describe(theirs.fileno()))
    made = []

    def fill() -> None:
        while True:
            made.append(connecting.connect())

    with pytest.raises(OSError, match="has not taken"):
        fill()
    assert made
    for one in (*made, ours):
        one.close()
    with pytest.raises(connecting.Unusable, match="has ended"):
        connecting.connect()
    theirs.close()


def test_a_marshal_run_that_has_ended_is_gone_for_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes share the socket: the first one that asks learns it by another error than the next ones."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    monkeypatch.setenv(connecting.VARIABLE, connecting.describe(theirs.fileno()))
    ours.close()
    for _ in range(3):
        with pytest.raises(connecting.Unusable, match="marshal run has ended"):
            connecting.connect()
    theirs.close()


def test_how_a_process_ended_in_words() -> None:
    assert in_words(0) == "exit status 0"
    assert in_words(3 << 8) == "exit status 3"
    assert in_words(9) == "signal 9 (SIGKILL)"
    assert in_words(11 | 128) == "signal 11 (SIGSEGV)"
