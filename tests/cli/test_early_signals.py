"""Ctrl-C, SIGTERM and SIGHUP while a command starts: while it imports the library, and while it connects."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys

import pytest

from tests.cli.shell import DEADLINE_S, REPOSITORY, Shell

SCRIPT = """
import signal, sys
import marshal_command

class Signal:
    def find_spec(self, name, *_):
        if name == module:
            signal.raise_signal(number)

number, module = int(sys.argv[1]), sys.argv[2]
sys.argv[1:] = ["state"]
sys.meta_path.insert(0, Signal())
marshal_command.main()
"""


@pytest.mark.parametrize("module", ["marshal_py", "confluent_kafka", "marshal_py.cli.app", "marshal_py.cli.state"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_imports_leaves_no_traceback(number: signal.Signals, module: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(int(number)), module],
        cwd=REPOSITORY,
        env=Shell("127.0.0.1:1").environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "", "")


def test_ctrl_c_while_it_connects() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(DEADLINE_S)
        child = Shell(f"127.0.0.1:{silent.getsockname()[1]}").start("groups", "ls")
        accepted, _ = silent.accept()
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=DEADLINE_S)
        accepted.close()
    assert (child.returncode, out, err) == (130, "", "marshal: interrupted\n")
