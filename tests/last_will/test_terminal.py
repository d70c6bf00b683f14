"""`marshal run` in a terminal: keys and jobs do what they do without it. A real bash on a pseudo-terminal."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator

import pytest

from marshal_py.last_will import connecting
from tests.support.terminal import CTRL_C, CTRL_Z, Terminal

RUN = shlex.join(connecting.command("run", "--"))
# Shows each SIGTERM, and at a SIGWINCH how many there were.
COUNT = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGWINCH))
print("ready", flush=True)
count = 0
while signal.sigwait((signal.SIGTERM, signal.SIGWINCH)) == signal.SIGTERM:
    count += 1
    print(f"term-{count}", flush=True)
print(f"sum-{count}")
"""

SLOW_PROBE = """
import sys, time
from marshal_py.last_will import runner
class Slow(runner.SignalProbe):
    def __init__(self):
        time.sleep(0.5)
        super().__init__()
runner.SignalProbe = Slow
sys.exit(runner.run(sys.argv[1:], frozenset()))
"""


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_ctrl_z_stops_it_and_fg_continues_it(terminal: Terminal) -> None:
    """The shell comes back as soon as both have stopped; twice, because a signal may be left over from the first."""
    terminal.type(f"{RUN} sh -c 'while echo ready; read line; do echo got-$line; done'\n")
    for word in ("one", "two"):
        terminal.wait("ready")
        terminal.type(CTRL_Z)
        terminal.wait("Stopped")
        # A ctrl-Z right after fg may stop marshal run a moment before the command, which then reads one character.
        terminal.type("\necho $(pgrep -c -g $(jobs -p) -r T)-stopped\n")
        terminal.wait("2-stopped")
        terminal.type("fg\n")
        terminal.wait("while echo ready")  # bash names the job that it continues
        terminal.type(f"{word}\n")
        terminal.wait(f"got-{word}")


def test_ctrl_c_ends_the_script_around_it(terminal: Terminal) -> None:
    """A shell goes on after a command that exits with 130, and not after one that SIGINT has ended."""
    script = f"""{RUN} sh -c "echo ready; exec sleep 1000"; echo survived"""
    terminal.type(f"bash -c {shlex.quote(script)}\n")
    terminal.wait("ready")
    terminal.type(CTRL_C)
    terminal.type("echo status=$?\n")
    assert "survived" not in terminal.wait("status=130")


def test_ctrl_c_is_understood_from_the_first_word_of_the_command_on(terminal: Terminal) -> None:
    """However long the processes around it take to begin."""
    slow = shlex.join([sys.executable, "-c", SLOW_PROBE, "sh", "-c", "echo ready; exec sleep 1000"])
    terminal.type(f"bash -c {shlex.quote(f'{slow}; echo survived')}\n")
    terminal.wait("ready")
    terminal.type(CTRL_C)
    terminal.type("echo status=$?\n")
    assert "survived" not in terminal.wait("status=130")


def test_a_command_that_handles_ctrl_c_gets_it_once(terminal: Terminal) -> None:
    """And ends as it likes. Bash's `read` may miss a signal that comes just before it waits, so it ends each second."""
    reads = "until read -t 1 x; do :; done; read y"
    terminal.type(f"""{RUN} bash -c 'trap "echo int" INT; echo ready; {reads}; exit 7'; echo status=$?\n""")
    terminal.wait("ready")
    terminal.type(CTRL_C)
    terminal.wait("int")
    terminal.type("one\ntwo\n")
    assert "int" not in terminal.wait("status=7")


def test_a_signal_for_the_group_reaches_the_command_once(terminal: Terminal) -> None:
    """`kill %1` is for the group, `kill $!` for `marshal run` alone. A second SIGTERM would cut a clean stop short."""
    terminal.type(f"{RUN} {sys.executable} -c {shlex.quote(COUNT)} &\n")
    terminal.wait("ready")
    terminal.type("kill $!\n")
    terminal.wait("term-1")
    terminal.type("kill %1\n")
    terminal.wait("term-2")
    terminal.type("kill -WINCH $!\n")  # has a higher number, so it comes behind a SIGTERM that is on its way
    terminal.wait("sum-2")


def test_the_next_program_of_a_pipeline_can_read_the_terminal(terminal: Terminal) -> None:
    """As `less` does. Ctrl-C ends all of it."""
    terminal.type(
        f"{RUN} sh -c 'echo first; exec sleep 1000' | sh -c 'read x; echo $x; read y </dev/tty; echo $x-$y; cat'\n"
    )
    terminal.wait("first")
    terminal.type("typed\n")
    terminal.wait("first-typed")
    terminal.type(CTRL_C)
    terminal.type("echo ${PIPESTATUS[@]}\n")
    terminal.wait("130 130")


def test_a_job_in_the_background(terminal: Terminal) -> None:
    """The shell keeps the terminal; a signal reaches the command; one that reads the terminal is stopped until `fg`."""
    terminal.type(f"{RUN} sh -c 'echo ready; exec sleep 1000' & \n")
    terminal.wait("ready")
    terminal.type("kill -HUP $!; wait $!; echo status=$?\n")
    terminal.wait("status=129")
    terminal.type(f"{RUN} sh -c 'read line; echo got-$line' & wait $!; echo waited; fg\n")
    terminal.wait("waited")
    terminal.type("typed\n")
    terminal.wait("got-typed")
