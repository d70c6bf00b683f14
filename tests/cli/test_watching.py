"""`--watch` of `marshal state` and `marshal explain`: in a terminal, in a pipe, and what ends it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from itertools import chain, repeat
from typing import ClassVar

import pytest
from rich.text import Text

from marshal_py.cli.terminal import keys_of, scrolled
from marshal_py.cli.watching import _in_terminal, _repeat
from marshal_py.errors import ClusterUnreachable
from tests.cli.shell import DEADLINE_S, MODULE, REPOSITORY, Shell
from tests.support.terminal import CTRL_C, CTRL_Z, Terminal

MARSHAL = shlex.join(MODULE)


@pytest.fixture
def terminal(shell: Shell) -> Iterator[Terminal]:
    terminal = Terminal(shell.environment({"TERM": "xterm-256color"}))
    yield terminal
    terminal.close()


def modes(terminal: Terminal) -> str:
    """Returns how the last command has ended, and how it has left the terminal."""
    terminal.type('echo "modes=$? $(stty -g)."\n')
    terminal.wait("modes=")
    return terminal.wait(".")


@pytest.mark.parametrize(
    ("text", "keys", "rest"),
    [
        ("qj", ["q", "j"], ""),
        ("\x1b[A\x1bOB\x1b[6~", ["up", "down", "page down"], ""),
        ("\x1b", [], "\x1b"),  # may be the first byte of an arrow
        ("x\x1b[", ["x"], "\x1b["),
        ("\x1b\x1b[A", ["esc", "up"], ""),
        ("\x1b[200~\x01é\x7f\r", ["é", "backspace", "enter"], ""),  # what no key here means is left out
    ],
)
def test_keys(text: str, keys: list[str], rest: str) -> None:
    assert keys_of(text) == (keys, rest)


def test_scrolling_stays_within_the_text() -> None:
    assert [scrolled(0, key, 30, 10) for key in ("up", "j", "page down", "end", "x")] == [0, 1, 9, 20, 0]
    assert [scrolled(5, key, 8, 10) for key in ("down", "home")] == [0, 0]


class _Screen:
    """A terminal of ten lines, at whose end somebody is, and the pictures that it was given."""

    drawn: ClassVar[list[list[str]]] = []

    def __init__(self, _console: object) -> None: ...

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *_: object) -> None: ...

    def size(self) -> tuple[int, int]:
        return 80, 10

    def draw(self, lines: list[Text]) -> None:
        self.drawn.append([line.plain for line in lines[1:]])

    def keys(self, _wait_s: float) -> list[str]:
        return ["end"] if len(self.drawn) == 1 else []


def test_a_page_that_has_become_shorter_is_on_the_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = chain([500], repeat(40))
    monkeypatch.setattr("marshal_py.cli.terminal.Terminal", _Screen)
    _in_terminal(lambda: print("\n".join(map(str, range(next(lengths))))), 0.0, lambda: len(_Screen.drawn) == 2)
    assert _Screen.drawn[1] == [str(number) for number in range(31, 40)]


def test_a_terminal(terminal: Terminal, billing: str) -> None:
    """The picture changes in its place. Ctrl-Z gives the terminal back and `fg` takes it; so does `q`, as it was."""
    before = modes(terminal)
    terminal.type(f"{MARSHAL} state {billing} --watch 0.1\n")
    assert "\x1b[?1049h" in terminal.wait("group billing"), "on a screen of its own"
    terminal.wait("group billing")
    terminal.resize(24, 40)
    terminal.wait("q qu…")
    terminal.type(CTRL_Z)
    terminal.wait("\x1b[?1049l")
    terminal.wait("Stopped")
    terminal.type("fg\n")
    terminal.wait("\x1b[?1049h")
    terminal.wait("group billing")
    terminal.type("q")
    terminal.wait("\x1b[?1049l")
    assert modes(terminal) == before
    terminal.type(f"{MARSHAL} explain {billing} orders:0 --watch 0.1\n")
    terminal.wait("orders:0 of group")
    terminal.type(CTRL_C)
    terminal.wait("\x1b[?1049l")
    assert modes(terminal) == before


def test_a_terminal_that_goes_away_ends_it_as_ctrl_c_does(shell: Shell, billing: str) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(ours, (24, 80))
    arguments = [*MODULE, "state", billing, "--watch", "0.1"]
    environment = shell.environment({"TERM": "xterm-256color"})
    process = subprocess.Popen(
        arguments, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, cwd=REPOSITORY, env=environment
    )
    try:
        os.close(theirs)
        shown = b""
        while b"group billing" not in shown:
            shown += os.read(ours, 4_096)
        os.close(ours)
        assert process.communicate(timeout=DEADLINE_S) == (None, b"")
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def test_a_pipe(shell: Shell, billing: str) -> None:
    """Repeats what it prints, with a line between; or documents of JSON, one per line."""
    with shell.start("state", billing, "--watch", "0.1") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert next(lines).startswith("group billing")
        for expected in ("---- 20", "group billing", "---- 20"):
            while not next(lines).startswith(expected):
                pass
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0
    with shell.start("explain", billing, "orders:0", "--json", "--watch", "0.1") as process:
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline())["partition"] for _ in range(2)] == [0, 0]
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0


def test_the_first_answer_may_end_it(shell: Shell, billing: str) -> None:
    result = shell.run("state", "nobody", "--watch", "1")
    assert (result.exit_code, "'nobody' is not in" in result.stderr) == (1, True)
    assert shell.run("state", billing, "--watch", "0").exit_code == 2
    assert shell.run("state", billing, "--watch", "1", "--dump", "x").exit_code == 2


def test_during_an_outage_it_says_how_old_the_picture_is(capsys: pytest.CaptureFixture[str]) -> None:
    def unreachable() -> None:
        raise ClusterUnreachable("b:9092", "an answer", "cut")

    made_s = time.monotonic() - 130.0
    assert _repeat(unreachable, 0.0, False, made_s) == made_s
    assert "what is shown was so 2 min ago" in capsys.readouterr().err
    assert _repeat(lambda: None, 0.0, False, made_s) > made_s
