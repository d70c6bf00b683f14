"""What a shell offers after TAB: commands, and the groups, topics and sessions of the cluster; never an error."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from marshal_py.cli import completing
from marshal_py.cli.options import ReadOptions
from marshal_py.protocol.wire.records import Join
from tests.cli.shell import DEADLINE_S, REPOSITORY, Shell
from tests.log.test_looking_back import Life
from tests.support.long_log import GROUP, LongLog

# Without the limit of a second, which a machine under load passes.
ANSWER = """
import marshal_command, os
marshal_command.ANSWER_S = float(os.environ["ANSWER_S"])
from marshal_py.cli.app import app
app(prog_name="marshal")
"""
TOO_LATE = """
import os, threading
import marshal_command
os.environ[marshal_command.ASKING], marshal_command.ANSWER_S = "complete_zsh", 0.01
marshal_command.answer_soon()
print("nobody sees it", file=__import__("sys").stderr, flush=True)
threading.Event().wait(60)
raise SystemExit("too late")
"""


def ask(shell: Shell, *words: str, answer_s: float = DEADLINE_S) -> list[str]:
    asked = {
        "_MARSHAL_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("marshal", *words)),
        "ANSWER_S": str(answer_s),
    }
    done = subprocess.run(
        [sys.executable, "-c", ANSWER],
        env=shell.environment({**asked, "COMP_CWORD": str(len(words))}),
        cwd=REPOSITORY,
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("ev",), ["evict"]),
        (("--v",), ["--version"]),
        (("state", "bil"), ["billing"]),
        (("state", "nobody"), []),
        (("consume", "orders", "--group", "b"), ["billing"]),
        (("topics", "ls", "o"), ["orders"]),
        (("set-position", "billing", "o"), ["orders"]),
        (("log", "tail", "--coordination-topic", "missing", "b"), []),
    ],
    ids=lambda given: " ".join(given),
)
def test_names_are_offered(shell: Shell, billing: str, words: tuple[str, ...], offered: list[str]) -> None:
    assert ask(shell, *words) == offered


def test_a_cluster_that_does_not_answer_offers_nothing(shell: Shell) -> None:
    assert ask(shell, "state", "--bootstrap-servers", "127.0.0.1:1", "b", answer_s=0.1) == []


def test_no_name_is_offered_that_a_shell_would_run(shell: Shell, tmp_path: Path) -> None:
    """Instead of such a client id its session, which the same commands take."""
    log = LongLog()
    safe = log.tell(Join("worker-1", b"a" * 16, 1, 2_000, ("orders",)))
    evil = log.tell(Join("$(reboot)", b"b" * 16, 1, 2_000, ("orders",)))
    log.tell(Join("c", b"c" * 16, 1, 2_000, ("orders",)), group="a`b`")
    dump = str(log.dump(tmp_path / "dump"))
    assert safe != evil
    with closing(ReadOptions(dump=Path(dump))) as options:
        found = {name for name in completing.COMPLETERS["session"](options, {"group": GROUP}) if name}
    assert found == {"worker-1", str(evil)}
    assert ask(shell, "state", "--dump", dump, "") == [GROUP]


def test_groups_of_a_dump_are_offered(shell: Shell, tmp_path: Path) -> None:
    """A command that reads a dump offers what is in that."""
    life = Life(1)
    assert ask(shell, "state", "--dump", str(life.dump(tmp_path / "dump")), "") == [GROUP]


def test_an_answer_that_takes_long_is_none() -> None:
    done = subprocess.run([sys.executable, "-c", TOO_LATE], cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
