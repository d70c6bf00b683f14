"""Running `marshal` in tests: in this process, or in one of its own; and waiting for conditions, with a deadline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from typer.testing import Result

from tests.support.command_line import invoke

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 60.0  # nothing but the demo takes seconds; a machine under load may be twenty times slower
LOOK_S = 0.02  # between two looks, and at least
LOOKS_APART = 3  # times the processor time of a look: one that runs a command would take it from what it waits for
MODULE = (sys.executable, "-m", "marshal_py.cli")


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline, used_s = time.monotonic() + DEADLINE_S, time.process_time()
    while not condition():
        assert time.monotonic() < deadline, f"not within {DEADLINE_S:g} s: {what}"
        time.sleep(max(LOOK_S, LOOKS_APART * (time.process_time() - used_s)))
        used_s = time.process_time()


class Shell:
    """Runs commands against one broker: in this process, or in one of their own."""

    def __init__(self, servers: str) -> None:
        self.servers = servers

    def run(self, *arguments: str, stdin: bytes = b"") -> Result:
        return invoke(list(arguments), input=stdin, env={"MARSHAL_BOOTSTRAP_SERVERS": self.servers})

    def json(self, *arguments: str, stdin: bytes = b"") -> Any:
        result = self.run(*arguments, "--json", stdin=stdin)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*MODULE, *arguments],
            env=self.environment(),
            text=True,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(REPOSITORY), "MARSHAL_BOOTSTRAP_SERVERS": self.servers, **(extra or {})}
