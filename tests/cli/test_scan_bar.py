"""The progress bar of long questions: on a terminal, after a second, gone before anything else is printed."""

from __future__ import annotations

import io
import sys

import pytest

from marshal_py.cli import get
from marshal_py.cli.get import ScanBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stderr", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_a_bar_comes_after_a_second(monkeypatch: pytest.MonkeyPatch, stderr: type[io.StringIO], shown: bool) -> None:
    now_s = [0.0]
    monkeypatch.setattr(get.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(sys, "stderr", stderr())
    bar = ScanBar()
    bar.show(1, 10)
    assert bar._bar is None, "a short question shows none"
    now_s[0] = 2.0
    bar.show(5, 10)
    assert (bar._bar is not None) == shown
    bar.hide()
    assert bar._bar is None
    assert ("5/10" in sys.stderr.getvalue()) == shown  # type: ignore[attr-defined]
    bar.show(6, 10)
    assert bar._bar is None, "the next question has a second of its own"
