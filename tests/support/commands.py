"""The command `marshal` against a real Kafka: single commands, and consumers as processes whose messages are collected.

A command that ends by itself runs in this process: a process of its own would mostly import, and many are run again and
again until they show what a test waits for. What is signalled or read while it runs is a process.

Nothing here is asserted but that a command asked for JSON succeeds; tests look at results and messages themselves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support.command_line import invoke

ROOT = Path(__file__).resolve().parents[2]
MARSHAL = (sys.executable, "-m", "marshal_py.cli")
DEADLINE_S = 90.0  # for the end of a consumer: a busy machine needs a multiple of a second


class Commands:
    """Runs `marshal` against one cluster; with `coordination_topic`, every command gets this option."""

    def __init__(self, bootstrap: str, coordination_topic: str = "") -> None:
        self._options = ("--coordination-topic", coordination_topic) if coordination_topic else ()
        self._bootstrap = bootstrap
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "MARSHAL_BOOTSTRAP_SERVERS": bootstrap,
        }

    def start(self, *arguments: str, module: tuple[str, ...] = MARSHAL, **streams: Any) -> subprocess.Popen[str]:
        """Starts a command and returns at once. `streams` are those of subprocess.Popen."""
        command = [*module, *arguments, *self._options]
        return subprocess.Popen(command, env=self.environment, cwd=ROOT, text=True, **streams)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end in this process, whatever its exit code."""
        done = invoke(
            [*arguments, *self._options], env={"MARSHAL_BOOTSTRAP_SERVERS": self._bootstrap}, catch_exceptions=False
        )
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    def json(self, *arguments: str) -> Any:
        """Runs a command with --json, which must succeed. Returns the last line of its output."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


class ConsumeProcesses:
    """`marshal consume` processes of one group, by client id. `messages` are the objects that they print."""

    def __init__(self, commands: Commands, group: str, topic: str, client_ids: Iterable[str]) -> None:
        self.messages: list[dict[str, Any]] = []
        arguments = ("consume", topic, "--group", group, "--start", "earliest", "--heartbeat-interval", "1", "--json")
        self.processes = {
            client_id: commands.start(
                *arguments, "--client-id", client_id, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            for client_id in client_ids
        }
        self._readers = [threading.Thread(target=self._read, args=(one,)) for one in self.processes.values()]
        for reader in self._readers:
            reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.messages.append(json.loads(line))

    def seen(self) -> Counter[tuple[int, int]]:
        """How often each message was printed, by (partition, offset)."""
        return Counter((message["partition"], message["offset"]) for message in list(self.messages))

    def stop(self) -> None:
        """Ends the processes with SIGTERM; kills those that do not end in time."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        for process in self.processes.values():
            process.send_signal(number)
        for process in self.processes.values():
            try:
                process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        for reader in self._readers:
            reader.join(DEADLINE_S)
        for process in self.processes.values():
            assert process.stdout is not None
            process.stdout.close()
