"""The summary of a run says how a process of pytest-xdist ended that crashed."""

from __future__ import annotations

import pytest

from tests.support import crashes

DIES = """
import os, signal

def test_it():
    os.kill(os.getpid(), signal.{name})
"""


@pytest.mark.parametrize(("name", "stacks"), [("SIGKILL", False), ("SIGSEGV", True)])
def test_the_summary_says_how_a_process_ended(name: str, stacks: bool, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it=DIES.format(name=name))
    done = pytester.runpytest_subprocess("-n", "1", "-p", crashes.__name__, "-p", "no:cacheprovider", timeout=120)
    done.assert_outcomes(failed=1)
    lines = done.stdout.str().splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("=") and " gw0 crashed " in line)
    assert f"({name})" in lines[at + 1]
    assert any("in test_it" in line for line in lines[at + 2 :]) is stacks


def test_what_is_not_known_is_said() -> None:
    told = "it still runs; processes ended for lack of memory: unknown\nno stacks were written"
    assert crashes.describe(None, "", "") == told
    assert crashes.describe(3, "", "low 0\noom_kill 2").startswith(
        "exit status 3; processes ended for lack of memory: 2\n"
    )
