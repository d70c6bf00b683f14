"""A pytest plugin: how a worker of pytest-xdist ended that crashed. xdist names the test it ran, and nothing else.

The summary shows the exit status, how many processes the kernel has ended for lack of memory, and the stacks of all
threads if the worker died of a fatal signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")
EXIT_S = 10.0  # a worker that crashed has ended, or ends at once


def describe(status: int | None, stacks: str, memory_events: str) -> str:
    """Returns the lines of one worker. `status`: as of subprocess, None for a worker that still runs."""
    ended = "it still runs" if status is None else f"exit status {status}"
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            ended = f"signal {-status} ({signal.Signals(-status).name})"
    killed = dict(line.split() for line in memory_events.splitlines()).get("oom_kill", "unknown")
    return "\n".join([f"{ended}; processes ended for lack of memory: {killed}", stacks or "no stacks were written"])


class Crashes:
    """In the controlling process: collects what is known of each crash."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="pytest-crashes-")
        self.found: list[tuple[str, str]] = []

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["stacks"] = str(Path(self.folder.name) / node.gateway.id)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if not error:
            return
        status = None
        with contextlib.suppress(Exception):  # it may still run, or be no process of this machine
            status = node.gateway._io.popen.wait(EXIT_S)
        stacks, events = Path(self.folder.name) / node.gateway.id, ""
        with contextlib.suppress(OSError):
            events = MEMORY_EVENTS.read_text()
        text = stacks.read_text(errors="replace") if stacks.exists() else ""
        self.found.append((node.gateway.id, describe(status, text, events)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for worker, text in self.found:
            terminalreporter.section(f"{worker} crashed")
            terminalreporter.write_line(text)

    def pytest_unconfigure(self) -> None:
        self.folder.cleanup()


class Stacks:
    """In a worker: has the stacks of all threads written at a fatal signal."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT)  # open until the worker ends

    def pytest_runtest_logstart(self) -> None:
        """Says again where: pytest's own plugin says it when a run begins, and a test may run pytest in here."""
        faulthandler.enable(self.file)


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", None)
    if given is not None:
        config.pluginmanager.register(Stacks(given["stacks"]), "stacks")
    elif config.pluginmanager.hasplugin("dsession") or config.getoption("numprocesses", None):
        config.pluginmanager.register(Crashes(), "crashes")
