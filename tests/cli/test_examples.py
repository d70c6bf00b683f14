"""Examples of help texts are run as they are, in a shell, with `marshal` on the path."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from marshal_py.cli import advisories, consume, demo, doctor, log, state, timeline
from marshal_sim.commands import exhaustive, simulate, verify
from tests.cli.shell import DEADLINE_S, REPOSITORY, Shell
from tests.support.command_line import simulate as simulated

EXAMPLES = [
    consume.EXAMPLE,
    consume.PRODUCE_EXAMPLE,
    state.EXAMPLE,
    timeline.EXAMPLE,
    log.TAIL_EXAMPLE,
    log.DUMP_EXAMPLE,
    log.LOAD_EXAMPLE,
    doctor.EXAMPLE,
    verify.EXAMPLE,
    log.SNAPSHOT_EXAMPLE,
    advisories.EXAMPLE,
    log.RESET_EXAMPLE,
    simulate.EXAMPLE,
    exhaustive.EXAMPLE,
]
DUMP = "billing.dump"  # what examples write and read


@pytest.fixture
def path_with_marshal(tmp_path: Path) -> str:
    for name, module in (("marshal", "-m marshal_py.cli "), ("python", "")):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n', encoding="utf-8")
        script.chmod(0o755)
    return f"{tmp_path}:/usr/bin:/bin"


def command_of(example: str) -> str:
    """The line that a person copies."""
    return example.splitlines()[-1].strip()


@pytest.mark.usefixtures("billing")
@pytest.mark.parametrize("example", EXAMPLES, ids=command_of)
def test_an_example_runs(shell: Shell, path_with_marshal: str, tmp_path: Path, example: str) -> None:
    # The one address in an example is what people will have; here the broker has another.
    line = command_of(example).replace("localhost:9092", shell.servers)
    if "--group billing" in line:
        line = line.replace("billing", "example")  # `billing` has read everything and would wait for more
    if DUMP in line and "--output" not in line:
        assert shell.run("log", "dump", "--output", str(tmp_path / DUMP)).exit_code == 0
    done = subprocess.run(
        line,
        shell=True,
        cwd=tmp_path,
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
        env=shell.environment({"PATH": path_with_marshal}),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.proof  # test_demo.py runs the demo in the other mode
def test_the_example_of_the_demo_runs(shell: Shell, path_with_marshal: str) -> None:
    """And at most once doubles nothing, with a consumer that is killed."""
    environment = shell.environment({"PATH": path_with_marshal})
    del environment["MARSHAL_BOOTSTRAP_SERVERS"]
    done = subprocess.run(
        command_of(demo.EXAMPLE),
        shell=True,
        cwd=REPOSITORY,
        timeout=2 * DEADLINE_S,
        text=True,
        env=environment,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    shown = re.match(
        r"Kept: no message delivered twice\. (\d+) produced, (\d+) handled, 0 doubled, (\d+) dropped, ",
        done.stdout.splitlines()[-1],
    )
    assert shown, done.stdout
    produced, handled, dropped = map(int, shown.groups())
    assert handled + dropped == produced != 0
    assert "killed by SIGKILL" in done.stdout + done.stderr


@pytest.mark.parametrize("example", [*EXAMPLES, demo.EXAMPLE], ids=command_of)
def test_the_help_text_shows_it_in_one_line(shell: Shell, example: str) -> None:
    words = re.split("marshal |marshal_sim ", command_of(example), maxsplit=1)[1].split()
    command = words[:2] if words[0] == "log" else words[:1]
    shown = simulated(*command, "--help") if words[0] == "exhaustive" else shell.run(*command, "--help")
    assert command_of(example) in shown.stdout
